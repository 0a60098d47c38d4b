"""The convergence exhibit from diagnoses and decays that were made by hand."""

import math
import re

import pytest

from asfl_privacy.reporting.comparison import Difference
from asfl_privacy.reporting.exhibits.convergence import convergence_exhibit, verdict
from asfl_privacy.reporting.exhibits.exhibit import Material
from asfl_privacy.reporting.exhibits.folder import read_material, write_exhibit

INFO = {
    "title": "Convergence",
    "command": "run",
    "commit": "abc",
    "started": "2026-01-01T00:00:00",
    "config": {"data": "digits"},
    "versions": {"python": "3"},
    "exhibit": "convergence",
    "missing": [],
}
HORIZONS = (100, 400, 1600)


def diagnosis(method, seed, number, norm, *, drift=None, **changes):
    shares = method == "asfl"
    return {
        "method": method,
        "seed": seed,
        "round": number,
        "loss": 1.0,
        "squared_gradient_norm": norm,
        "dissimilarity": 3.0 * norm,
        "drift": drift,
        "remote_fraction": None if number == 0 else 0.24 if shares else 0.0,
        "planned_remote_fraction": 0.25 if shares else 0.0,
    } | changes


def decay(method, seed, rounds, norm):
    return {
        "method": method,
        "seed": seed,
        "rounds": rounds,
        "lr": 0.01,
        "smoothness": 2.0,
        "squared_gradient_norm": norm,
        "first_squared_gradient_norm": 5.0,
        "dissimilarity": 1.0,
        "drift": 0.1,
        "remote_fraction": 0.0,
    }


DIAGNOSTICS = [
    diagnosis(method, seed, number, norm, drift=drift)
    for method, factor in (("fedavg", 1.0), ("asfl", 0.5))
    for seed in (0, 1)
    for number, norm, drift in ((0, 9.0, None), (1, 4.0 * factor, 0.2 * factor), (2, 2.0 * factor, 0.4 * factor))
]


def power_laws(slopes):
    """Means that fall as T to the slopes given, by method, one a seed."""
    return [
        decay(method, seed, rounds, 7.0 * rounds**slope)
        for method, values in slopes.items()
        for seed, slope in enumerate(values)
        for rounds in HORIZONS
    ]


def material(decays, diagnostics=DIAGNOSTICS):
    return Material(info=INFO, tables={"diagnostics": diagnostics, "decay": decays})


def test_slopes_of_power_laws_are_their_exponents_and_pair_by_seed():
    """Slopes −.5, −.6 and −.4, −.6: means −.55 and −.5, differences .1 and 0, half-width t(.975, 1)·.05 with t = tan(.475π).

    Catches: a slope against T itself, a base of logarithms on one axis only, unpaired differences.
    """
    shown = convergence_exhibit(material(power_laws({"fedavg": (-0.5, -0.6), "asfl": (-0.4, -0.6)})))
    half = math.tan(0.475 * math.pi) * 0.05
    interval = f"−{half - 0.05:.3f} to +{0.05 + half:.3f}"
    fedavg, asfl = shown.table.lines
    assert fedavg[:2] == ("FedAvg", "−0.550")
    assert fedavg[3:] == ("—", "—", "2")
    assert asfl[:2] == ("ASFL", "−0.500")
    assert asfl[3:] == ("+0.050", interval, "2")
    assert any(f"+0.050 from FedAvg's over 2 paired seed(s), 95 % interval {interval}" in one for one in shown.findings)


@pytest.mark.parametrize(
    ("asfl", "says"),
    [
        ((-0.6, -0.61, -0.62), "faster than FedAvg: the interval lies below 0"),
        ((-0.4, -0.41, -0.42), "slower than FedAvg: the interval lies above 0"),
        ((-0.51, -0.51, -0.51), "no slower than FedAvg at that confidence: the interval includes 0"),
    ],
)
def test_the_verdict_is_of_the_interval_and_a_slower_decay_is_said(asfl, says):
    """Catches: signs turned round, which would call the slower method faster; a verdict from the mean alone."""
    shown = convergence_exhibit(material(power_laws({"fedavg": (-0.5, -0.51, -0.52), "asfl": asfl})))
    assert any(one.endswith(f"That is {says}.") for one in shown.findings)


def test_one_seed_proves_nothing():
    shown = convergence_exhibit(material(power_laws({"fedavg": (-0.5,), "asfl": (-0.9,)})))
    assert any("nothing follows" in one for one in shown.findings)
    assert verdict(Difference(-0.4, -math.inf, math.inf, 1)).startswith("one seed")
    assert [line[2] for line in shown.table.lines] == ["—", "—"]


def test_the_constant_is_told_beside_the_slope():
    """Twice FedAvg's means with the same slope is said to be twice."""
    decays = power_laws({"fedavg": (-0.5, -0.5)})
    twice = [one | {"method": "asfl", "squared_gradient_norm": 2 * one["squared_gradient_norm"]} for one in decays]
    shown = convergence_exhibit(material(decays + twice))
    assert any("over 1600 rounds is 2 times (95 % interval 2 to 2) FedAvg's" in one for one in shown.findings)


def test_rounds_give_first_and_last_values_the_share_and_ratios():
    """ASFL at half of FedAvg's values everywhere is .5 of each; the common start is in no mean over rounds."""
    shown = convergence_exhibit(material(power_laws({"fedavg": (-0.5, -0.5), "asfl": (-0.5, -0.5)})))
    fedavg, asfl = shown.sections[0].lines
    assert fedavg == ("FedAvg", "9", "2", "27", "6", "0.2", "0.4", "0.000", "2")
    assert asfl == ("ASFL", "9", "1", "27", "3", "0.1", "0.2", "0.240", "2")
    text = " ".join(shown.findings)
    assert "α = 0.240" in text
    assert "(τ′/2)/(τ′ + τ) is 0.250" in text
    for name in ("‖∇F‖²", "client drift"):
        assert f"ASFL's {name}, mean over rounds, is 0.5 times (95 % interval 0.5 to 0.5) FedAvg's." in shown.findings


def test_a_run_that_does_not_drift_is_drawn_all_the_same():
    """Zeros have no logarithm: no ratio is claimed of them, and the panel is linear."""
    still = [one | {"drift": None if one["drift"] is None else 0.0} for one in DIAGNOSTICS]
    shown = convergence_exhibit(material(power_laws({"fedavg": (-0.5, -0.5), "asfl": (-0.5, -0.5)}), still))
    assert not any("drift" in one for one in shown.findings)
    assert shown.figures["rounds.png"].startswith(b"\x89PNG")


def test_ticks_are_numbers():
    """Catches: powers of ten written as formulas, which the style shows as their source."""
    shown = convergence_exhibit(material(power_laws({"fedavg": (-0.5, -0.5), "asfl": (-0.5, -0.5)})))
    for name in ("rounds.svg", "decay.svg"):
        assert "mathdefault" not in shown.figures[name]
        assert len(re.findall(r"<text", shown.figures[name])) > 4


def test_a_folder_renders_again_to_the_same_bytes(tmp_path):
    write_exhibit(tmp_path, material(power_laws({"fedavg": (-0.5, -0.6), "asfl": (-0.4, -0.6)})))
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    write_exhibit(tmp_path, read_material(tmp_path))
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    assert {path.name for path in (tmp_path / "figures").iterdir()} == {
        "rounds.svg",
        "rounds.png",
        "decay.svg",
        "decay.png",
    }


@pytest.mark.parametrize(
    ("decays", "line"),
    [
        (power_laws({"asfl": (-0.5,)}), "decay has no runs of fedavg"),
        ([decay("fedavg", 0, 100, 1.0)], "for 1 number"),
        ([decay("fedavg", 0, 100, 0.0), decay("fedavg", 0, 200, 1.0)], "means above 0"),
        ([decay("fedavg", 0, 100, 1.0)] * 2, "two records of rounds 100"),
        ([], "decay.csv is missing or empty"),
    ],
)
def test_material_that_gives_no_slope_is_refused(decays, line):
    with pytest.raises(ValueError, match=line):
        convergence_exhibit(material(decays))
