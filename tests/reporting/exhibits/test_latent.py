"""Figure 3 from scatter and places that were made by hand."""

import math

import pytest

from asfl_privacy.reporting.exhibits.exhibit import Material
from asfl_privacy.reporting.exhibits.folder import read_material, write_exhibit
from asfl_privacy.reporting.exhibits.latent import latent_exhibit

INFO = {
    "title": "Latent space",
    "command": "run",
    "commit": "abc",
    "started": "2026-01-01T00:00:00",
    "config": {"data": "digits"},
    "versions": {"python": "3"},
    "exhibit": "latent",
    "missing": [],
}


def line(method, seed, ratio, *, space="penultimate", records="common", between=4.0, **changes):
    layer = {"exchange": "conv1", "penultimate": "fc1"}[space]
    within = None if ratio is None else ratio * between
    return {
        "method": method,
        "seed": seed,
        "space": space,
        "layer": layer,
        "records": records,
        "classes": 10,
        "within": within,
        "between": None if ratio is None else between,
    } | changes


def place(method, client, label, *, seed=0, records="common", x=0.5):
    return {
        "method": method,
        "seed": seed,
        "records": records,
        "client": client,
        "label": label,
        "x": x,
        "y": 2.0 * client + label,
    }


def material(scatter, centroids=()):
    return Material(info=INFO, tables={"scatter": scatter, "centroids": centroids})


PAIRED = [
    line("fedavg", 0, 0.4),
    line("fedavg", 1, 0.1),
    line("asfl", 0, 0.2),
    line("asfl", 1, 0.1),
]
"""Quotients ½ and 1: their geometric mean is 1/√2, the logarithms' half-width t(.975, 1)·s/√2 with s = ln 2/√2."""


def test_ratios_are_compared_seed_by_seed_as_logarithms():
    """Catches: means divided by means, arithmetic means of quotients, FedAvg over ASFL, a normal quantile."""
    shown = latent_exhibit(material(PAIRED))
    fedavg, asfl = shown.table.lines
    assert fedavg[4] == "0.2"  # √(.4·.1)
    assert asfl[4] == "0.1414"  # √(.2·.1)
    assert asfl[5] == "0.1 to 0.2"
    assert asfl[6] == "0.7071"
    half = 12.7062 * (math.log(2) / math.sqrt(2)) / math.sqrt(2)  # Student's t with one degree of freedom, tabulated
    low, high = (float(text) for text in asfl[7].split(" to "))
    assert low == pytest.approx(math.exp(-half) / math.sqrt(2), rel=1e-3)
    assert high == pytest.approx(math.exp(half) / math.sqrt(2), rel=1e-3)
    assert fedavg[6:9] == ("—", "—", "—")
    assert shown.findings == (
        "The scatter ratio is lower under ASFL than under FedAvg in 1 of 1 measures, with a 95 % interval below 1 in 0.",
        "On common test records, before the last layer (after fc1): ASFL's ratio is 0.7071 times FedAvg's over 2 paired "
        f"seeds, 95 % interval {asfl[7]}: not distinguishable at that confidence.",
    )


@pytest.mark.parametrize(("factors", "verdict"), [((0.5, 0.49, 0.51), "lower"), ((2.0, 2.1, 1.9), "higher")])
def test_a_difference_beyond_its_interval_is_called_by_its_direction(factors, verdict):
    scatter = [line("fedavg", seed, 0.3) for seed in range(3)]
    scatter += [line("asfl", seed, 0.3 * factor) for seed, factor in enumerate(factors)]
    findings = latent_exhibit(material(scatter)).findings
    assert findings[1].endswith(f": {verdict}.")
    assert f"in {int(verdict == 'lower')} of 1 measures" in findings[0]


def test_seeds_of_one_method_alone_are_in_no_pair():
    scatter = [line("fedavg", 0, 0.4), line("asfl", 0, 0.2), line("asfl", 1, 0.9)]
    findings = latent_exhibit(material(scatter)).findings
    assert findings[1].endswith("0.5 times FedAvg's over 1 paired seed; one pair has no interval.")


def test_blank_and_zero_scatter_are_named_and_in_no_mean():
    """Catches: −∞ in a mean, and a run that vanishes without a word."""
    scatter = [*PAIRED, line("fedavg", 2, 0.4), line("asfl", 2, None), line("fedavg", 3, 0.4), line("asfl", 3, 0.0)]
    shown = latent_exhibit(material(scatter))
    assert shown.table.lines[1][4:9] == latent_exhibit(material(PAIRED)).table.lines[1][4:9]
    left_out = [text for text in shown.sections[0].sentences if text.startswith("In no mean")]
    assert [text.rsplit(": ")[1] for text in left_out] == [
        f"ASFL, seed {seed}, common test records, before the last layer." for seed in (2, 3)
    ]


def test_every_measure_has_its_lines_and_common_records_come_first():
    scatter = [
        line(method, 0, 0.1, space=space, records=records)
        for method in ("fedavg", "asfl")
        for space in ("penultimate", "exchange")
        for records in ("own", "common")
    ]
    lines = latent_exhibit(material(scatter)).table.lines
    assert [(one[1][:6], one[3]) for one in lines[::2]] == [
        ("common", "conv1"),
        ("common", "fc1"),
        ("own tr", "conv1"),
        ("own tr", "fc1"),
    ]


def test_what_cannot_be_compared_is_refused():
    with pytest.raises(ValueError, match="lacks fedavg"):
        latent_exhibit(material([line("asfl", 0, 0.1)]))
    with pytest.raises(ValueError, match="after conv1 and fc1: ratios are compared in one space"):
        latent_exhibit(
            material([line("fedavg", 0, 0.1, space="exchange"), line("asfl", 0, 0.1, space="exchange", layer="fc1")])
        )
    with pytest.raises(ValueError, match="a method and seed twice"):
        latent_exhibit(material([PAIRED[0], PAIRED[0], PAIRED[2]]))
    with pytest.raises(ValueError, match=r"scatter\.csv is missing or empty"):
        latent_exhibit(Material(info=INFO))


def test_maps_are_of_the_first_seed_that_all_methods_have(tmp_path):
    """Catches: seeds mixed in one panel, own and common records in one, blank places drawn, another map's number."""
    centroids = [place(method, client, label) for method in ("fedavg", "asfl") for client in (0, 1) for label in (3, 8)]
    centroids += [place("fedavg", 5, 9, seed=1), place("asfl", 6, 3, records="own"), place("asfl", 7, 3, x=None)]
    scatter = [*PAIRED, line("asfl", 0, 0.9, space="exchange"), line("fedavg", 0, 0.9, space="exchange")]
    shown = latent_exhibit(material(scatter, centroids))
    common, own = shown.sections[1:]
    assert common.lines == (
        ("FedAvg", "4", "2", "2", "1.6", "4", "0.4"),
        ("ASFL", "4", "2", "2", "0.8", "4", "0.2"),
    )
    assert "seed 0" in common.sentences[0]
    assert common.alt.startswith("FedAvg and ASFL, side by side")
    assert own.alt.startswith("ASFL, side by side")
    assert set(shown.figures) == {f"latent-{kind}.{form}" for kind in ("common", "own") for form in ("svg", "png")}
    picture = shown.figures["latent-common.svg"]
    assert all(text in picture for text in (">FedAvg<", ">ASFL<", "within / between 0.4", ">3<", ">8<"))
    assert ">9<" not in picture


def test_the_folder_is_made_anew_from_its_tables_to_the_byte(tmp_path):
    centroids = [place(method, client, label) for method in ("fedavg", "asfl") for client in (0, 1) for label in (3, 8)]
    write_exhibit(tmp_path, material(PAIRED, centroids))
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert {path.name for path in before} >= {"scatter.csv", "centroids.csv", "latent-common.svg", "table.tex"}
    write_exhibit(tmp_path, read_material(tmp_path))
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
