"""Argument checks shared by the privacy rooms: one line that holds the value, the rule and the fix."""

import math
from numbers import Integral, Real

SMALLEST_DELTA = 1e-280


def check_real(name: str, value: object, *, minimum: float, exclusive: bool, fix: str) -> float:
    """Return ``value`` as a finite float at or above ``minimum``.

    Args:
        name: what the caller calls the value.
        value: the candidate; booleans, strings and tensors are refused.
        minimum: the least value allowed.
        exclusive: whether ``minimum`` itself is refused.
        fix: what to pass instead.

    Returns:
        The value as a float.

    Raises:
        ValueError: if it is not a real number, NaN, infinite or too small.

    Example:
        >>> check_real("epsilon", 1, minimum=0.0, exclusive=True, fix="pass epsilon=1.0")
        1.0
    """
    sign = ">" if exclusive else "≥"
    if isinstance(value, bool) or not isinstance(value, Real):
        raise ValueError(f"{name} is {value!r}: it must be a real number; {fix}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number) or number < minimum or (exclusive and number == minimum):
        raise ValueError(f"{name} is {number!r}: it must be finite and {sign} {minimum:g}; {fix}")
    return number


def check_epsilon(epsilon: object, *, name: str = "epsilon") -> float:
    """Return a finite ε ≥ 0, or raise ValueError."""
    return check_real(name, epsilon, minimum=0.0, exclusive=False, fix=f"pass e.g. {name}=1.0")


def check_delta(delta: object, *, zero_allowed: bool = False) -> float:
    """Return a δ in (0, 1), or in [0, 1) where pure differential privacy is meant; else raise ValueError."""
    number = check_real("delta", delta, minimum=0.0, exclusive=not zero_allowed, fix="pass e.g. delta=1e-5")
    if number >= 1.0:
        raise ValueError(f"delta is {number!r}: it must be < 1, since delta=1 promises nothing; pass e.g. delta=1e-5")
    if 0.0 < number < SMALLEST_DELTA:
        raise ValueError(
            f"delta is {number!r}: values below {SMALLEST_DELTA:g} cannot be told from 0 in double precision; "
            "pass e.g. delta=1e-12"
        )
    return number


def check_multiplier(noise_multiplier: object, *, name: str = "noise_multiplier") -> float:
    """Return a finite noise multiplier > 0, or raise ValueError."""
    return check_real(name, noise_multiplier, minimum=0.0, exclusive=True, fix=f"pass e.g. {name}=1.0")


def check_num_releases(num_releases: object) -> int:
    """Return a count of releases ≥ 1; a fractional count rounds up, so that nothing is left uncounted.

    Example:
        >>> check_num_releases(2.5)
        3
    """
    number = check_real("num_releases", num_releases, minimum=0.0, exclusive=True, fix="pass e.g. num_releases=1")
    return int(num_releases) if isinstance(num_releases, Integral) else math.ceil(number)


def check_norm(p: object, *, name: str = "p") -> float:
    """Return the norm order 1, 2 or inf ("inf" is accepted), or raise ValueError.

    Example:
        >>> check_norm("inf")
        inf
    """
    if isinstance(p, str):
        p = math.inf if p == "inf" else p
    if isinstance(p, bool) or not isinstance(p, Real) or float(p) not in (1.0, 2.0, math.inf):
        raise ValueError(f"{name} is {p!r}: the norms known are 1, 2 and inf; pass {name}=2")
    return float(p)


def norm_word(p: float) -> int | str:
    """The norm as it is written: 1, 2 or "inf"."""
    return "inf" if math.isinf(p) else int(p)


def number_words(number: float) -> str:
    """The number as it is written: the shortest text that reads back as this very float, so nothing is rounded away.

    Example:
        >>> number_words(0.1234567), number_words(1e-5), number_words(2.0)
        ('0.1234567', '1e-05', '2')
    """
    return repr(float(number)).removesuffix(".0")


def check_integer(name: str, value: object, *, minimum: int) -> int:
    """Return an integer ≥ ``minimum``, or raise ValueError."""
    if isinstance(value, bool) or not isinstance(value, Integral) or value < minimum:
        raise ValueError(f"{name} is {value!r}: it must be an integer ≥ {minimum}; pass e.g. {name}={minimum}")
    return int(value)


def check_choice(name: str, value: object, choices: tuple[str, ...]) -> str:
    """Return ``value`` if it is one of ``choices``, else raise ValueError that lists them."""
    if not isinstance(value, str) or value not in choices:
        raise ValueError(f"{name} is {value!r}: it must be one of {', '.join(choices)}; pass {name}={choices[0]!r}")
    return value


def check_radius(radius: object) -> float | str:
    """Return a finite radius > 0 in raw input units, or "any" (any two records); else raise ValueError."""
    if radius == "any":
        return "any"
    return check_real("radius", radius, minimum=0.0, exclusive=True, fix='pass e.g. radius=0.1, or radius="any"')


def check_box(input_box: tuple[float, float]) -> tuple[float, float]:
    """Return (low, high), finite with low < high, or raise ValueError."""
    try:
        low, high = (
            check_real("input_box", end, minimum=-1e30, exclusive=False, fix="pass (0, 1)") for end in input_box
        )
    except TypeError:
        raise ValueError(f"input_box is {input_box!r}: it must be a pair (low, high); pass (0, 1)") from None
    if not low < high <= 1e30:
        raise ValueError(f"input_box is ({low:g}, {high:g}): low must be below high; pass (0, 1)")
    return low, high
