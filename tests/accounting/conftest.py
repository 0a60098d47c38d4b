"""Golden values and their comparison to the digits given."""

import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

GOLDEN = Path(__file__).parents[1] / "golden" / "privacy.toml"


@pytest.fixture(scope="session")
def golden() -> dict[str, Any]:
    return tomllib.loads(GOLDEN.read_text(encoding="utf-8"))


@pytest.fixture(scope="session")
def agrees() -> Callable[[float, str], bool]:
    """Whether a number agrees with a written one to half a unit of its last digit."""

    def compare(number: float, written: str) -> bool:
        mantissa, _, exponent = written.partition("e")
        decimals = len(mantissa.partition(".")[2])
        half_unit = 0.5 * 10.0 ** (int(exponent or 0) - decimals)
        return abs(number - float(written)) <= half_unit * (1.0 + 1e-9)

    return compare
