"""Settings in which another library's ε is known to be wrong or far off, each asked anew beside the truth.

    python experiments/benchmarks/privacy/faults.py [--quick]

The truth of our own kind of setting is our bracket; that of hidden Poisson sampling, which we do not offer, is what
dp-accounting's privacy loss distribution says from below and from above.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from accountants import EPSILON, gaussian, response
from peers import NoRuleError, dp_accounting_epsilon, opacus_epsilon
from rows import ESTIMATE, FAILED, LOWER, MISSING, UPPER, Row

from asfl_privacy.accounting import compose

INTERVAL, QUICK_INTERVAL = 2e-5, 1e-4
AT_LEAST, AT_MOST = "truth, at least", "truth, at most"
Bracket = tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A setting, who is asked, what it claims to give, why it is off, its answer, and the truth from both sides."""

    case: str
    tool: str
    kind: str
    why: str
    claimed: Callable[[], float]
    truth: Callable[[], Bracket]


def replace_one_rdp(noise_over_clip: float, count: int) -> float:
    """RdpAccountant under REPLACE_ONE for Gaussian noise of noise_over_clip·C on sums of records clipped to C."""
    import dp_accounting  # type: ignore[import-untyped, unused-ignore]

    accountant = dp_accounting.rdp.RdpAccountant(neighboring_relation=dp_accounting.NeighboringRelation.REPLACE_ONE)
    accountant.compose(dp_accounting.GaussianDpEvent(noise_over_clip), count)
    return float(accountant.get_epsilon(1e-5))


def poisson(z: float, q: float, count: int, *, interval: float) -> Bracket:
    """ε at δ = 1e-5 of Gaussians with hidden Poisson sampling, by dp-accounting from below and from above."""
    from dp_accounting.pld import privacy_loss_distribution as distributions  # type: ignore[import-untyped, unused-ignore]

    found = []
    for is_pessimistic in (False, True):
        one = distributions.from_gaussian_mechanism(
            z,
            sampling_prob=q,
            value_discretization_interval=interval,
            pessimistic_estimate=is_pessimistic,
            use_connect_dots=is_pessimistic,
        )
        found.append(float(one.self_compose(count).get_epsilon_for_delta(1e-5)))
    return found[0], found[1]


def ours(*events: object, delta: float = 1e-5) -> Bracket:
    """Our bracket."""
    bracket = compose(events, delta=delta)  # type: ignore[arg-type]
    return bracket.low, bracket.high


def faults(*, interval: float) -> list[Fault]:
    """The settings."""
    hundred = [response(1 / 1.0986, 100, 2)]
    return [
        Fault(
            case="Gaussian, σ = 1, hidden Poisson sampling q = .01, T = 100",
            tool="opacus GDP",
            kind=ESTIMATE,
            why="a central limit theorem, used far from the limit",
            claimed=lambda: opacus_epsilon("GDP", [gaussian(1.0, 100)], 1e-5, sampling_probability=0.01),
            truth=lambda: poisson(1.0, 0.01, 100, interval=interval),
        ),
        Fault(
            case="Gaussian, σ = 1, hidden Poisson sampling q = .01, T = 100",
            tool="opacus PRV",
            kind=UPPER,
            why="its allowed error of .01 is added to ε",
            claimed=lambda: opacus_epsilon("PRV", [gaussian(1.0, 100)], 1e-5, sampling_probability=0.01),
            truth=lambda: poisson(1.0, 0.01, 100, interval=interval),
        ),
        Fault(
            case="Gaussian, σ = 50, hidden Poisson sampling q = .01, T = 100",
            tool="opacus RDP",
            kind=UPPER,
            why="its orders end at 63, which leaves .103 at δ = 1e-5 however little is lost",
            claimed=lambda: opacus_epsilon("RDP", [gaussian(50.0, 100)], 1e-5, sampling_probability=0.01),
            truth=lambda: poisson(50.0, 0.01, 100, interval=interval),
        ),
        Fault(
            case="randomised response, k = 2, ε0 = 1.0986, T = 100",
            tool="dp-accounting PLDAccountant",
            kind=UPPER,
            why="the count of RandomizedResponseDpEvent is ignored",
            claimed=lambda: dp_accounting_epsilon("PLD", hundred, 1e-5),
            truth=lambda: ours(*hundred),
        ),
        Fault(
            case="replace-one, records clipped to C, σ = 10·C, T = 100",
            tool="dp-accounting RdpAccountant",
            kind=UPPER,
            why="REPLACE_ONE is accepted, but the sensitivity stays C where 2C is due",
            claimed=lambda: replace_one_rdp(10.0, 100),
            truth=lambda: ours(gaussian(5.0, 100)),
        ),
        Fault(
            case="Gaussian, σ/Δ = 10, T = 100, δ = 1e-16",
            tool="dp-accounting PLDAccountant",
            kind=UPPER,
            why="the tail mass it cuts off, 1e-15, is counted as infinite loss",
            claimed=lambda: dp_accounting_epsilon("PLD", [gaussian(10.0, 100)], 1e-16),
            truth=lambda: ours(gaussian(10.0, 100), delta=1e-16),
        ),
    ]


def measure(*, interval: float) -> Iterator[Row]:
    """Claim and truth of every setting."""
    for fault in faults(interval=interval):
        try:
            with_name = [(fault.tool, fault.kind, fault.claimed(), fault.why)]
            low, high = fault.truth()
            with_name += [(AT_LEAST, LOWER, low, ""), (AT_MOST, UPPER, high, "")]
        except ModuleNotFoundError as error:
            with_name = [(fault.tool, MISSING, math.nan, f"{error.name} is not installed")]
        except (NoRuleError, ValueError, RuntimeError, ArithmeticError) as error:  # another version may refuse it
            with_name = [
                (fault.tool, FAILED, math.nan, f"{type(error).__name__}: {' '.join(str(error).split())[:120]}")
            ]
        for tool, kind, value, note in with_name:
            yield Row(
                benchmark="faults",
                case=f"{fault.tool}: {fault.case}",
                tool=tool,
                quantity=EPSILON,
                kind=kind,
                value=None if math.isnan(value) else value,
                note=note,
            )


def main() -> None:
    """Print one line a row."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a coarser truth")
    options = parser.parse_args()
    for row in measure(interval=QUICK_INTERVAL if options.quick else INTERVAL):
        print(f"{row.case:80} {row.tool:28} {'–' if row.value is None else f'{row.value:.6g}'} {row.note}", flush=True)


if __name__ == "__main__":
    main()
