"""Figure 4 from hand-made rows: the claim is judged by paired seeds and by counted bytes, with and without the model's."""

import pytest

from asfl_privacy.reporting.exhibits.exchange_layers import exchange_layers_exhibit
from asfl_privacy.reporting.exhibits.exhibit import Material
from asfl_privacy.reporting.exhibits.folder import read_material, write_exhibit
from asfl_privacy.reporting.rows import complete_row

INFO = {
    "title": "Layers",
    "exhibit": "exchange-layer",
    "command": "run",
    "commit": None,
    "started": "2026-01-01",
    "config": {},
    "versions": {},
}
NAMES = ("conv1", "conv2", "fc1")
SENT = {"conv1": 9_000_000, "conv2": 4_000_000, "fc1": 900_000}


def layers(automatic="fc1", data="digits", names=NAMES):
    return [
        {"data": data, "model": "small-cnn", "exchange_layer": name, "automatic": "yes" if name == automatic else "no"}
        for name in names
    ]


@pytest.fixture
def rows(unnoised):
    """Best conv1; conv2 0.5 points below, fc1 `lost` points below in every seed, which differ by a point each."""

    def made(*, lost=1.0, seeds=5, model_bytes=2_000_000, **changes):
        below = {"conv1": 0.0, "conv2": 0.5, "fc1": lost}
        return [
            unnoised(
                seed=seed,
                exchange_layer=name,
                accuracy=0.9 + seed / 100 - below[name] / 100,
                bytes_activations=SENT[name],
                bytes_labels=1_000_000,
                bytes_model=model_bytes,
                **changes,
            )
            for seed in range(seeds)
            for name in NAMES
        ]

    return made


def shown(rows, records=None, **info):
    tables = {"layers": layers() if records is None else records}
    return exchange_layers_exhibit(
        Material(info={**INFO, **info}, rows=[complete_row(row) for row in rows], tables=tables)
    )


def test_shares_and_differences_are_those_of_hand_work(rows, fedavg):
    """10, 5 and 1.9 MB of activations and labels; 12, 7 and 3.9 with the model's. Catches: labels left out, shares of a sum."""
    exhibit = shown(rows() + [fedavg(seed=seed, accuracy=0.88 + seed / 100) for seed in range(5)])
    by_name = {line[0]: dict(zip(exhibit.table.headings, line, strict=True)) for line in exhibit.table.lines}
    assert list(by_name) == list(NAMES)
    assert [one["MB of activations and labels"] for one in by_name.values()] == ["10", "5", "1.9"]
    assert [one["share of the largest"] for one in by_name.values()] == ["1", "0.5", "0.19"]
    assert [one["MB with the model's"] for one in by_name.values()] == ["12", "7", "3.9"]
    assert [one["share of the largest of these"] for one in by_name.values()] == ["1", "0.5834", "0.325"]
    assert [one["points above the best layer"] for one in by_name.values()] == ["best", "-0.5", "-1.0"]
    assert by_name["fc1"]["95 % interval"] == "-1.0 to -1.0"
    assert by_name["conv2"]["points above FedAvg"] == "+1.5"
    assert [one["automatic"] for one in by_name.values()] == ["no", "no", "yes"]


def test_a_share_just_above_a_half_does_not_read_as_a_half(rows):
    """Catches: a claim at no more than 0.5 of the bytes that fails at 0.5."""
    made = rows()
    for row in made:
        row["bytes_activations"] = {"conv1": 9_000_000, "conv2": 4_000_100, "fc1": 10_000}[row["exchange_layer"]]
    exhibit = shown(made, layers("conv2"))
    (verdict,) = [one for one in exhibit.findings if "counting bytes of activations and labels" in one]
    assert "does not hold" in verdict
    assert "0.5001 of the bytes of conv1" in verdict


@pytest.mark.parametrize(
    ("lost", "automatic", "holds"),
    [
        (1.0, "fc1", (True, True)),  # exactly one point, .19 and .325 of the bytes
        (1.1, "fc1", (False, False)),  # too inaccurate
        (1.0, "conv2", (True, False)),  # exactly half of 10 MB, but 7 of 12 MB
        (1.0, "conv1", (False, False)),  # the best, but the costliest
    ],
)
def test_the_claim_is_judged_for_each_way_of_counting(rows, lost, automatic, holds):
    """Catches: < for ≤ at either bound, one way of counting used for both, the best layer passing for free."""
    found = shown(rows(lost=lost), layers(automatic)).findings
    assert ") holds: " in found[1] if holds[0] else ") does not hold: " in found[1]
    assert ") holds: " in found[2] if holds[1] else ") does not hold: " in found[2]
    assert "counting bytes of activations and labels" in found[1]
    assert "counting all bytes" in found[2]


def test_activations_alone_may_be_half_where_labels_tip_the_sum(rows):
    """5 MB of 10 MB, and labels of 1 MB each: 6 of 11. Catches: labels counted with activations alone."""
    labelled = [{**row, "bytes_labels": 5_000_000} for row in rows(lost=1.0)]
    found = shown(labelled, layers("conv2")).findings
    assert ") does not hold: " in found[1]
    assert ") holds: " in found[3]


def test_fewer_than_five_pairs_prove_no_claim(rows):
    """Catches: pairs not counted; seeds of one layer alone counted as pairs."""
    found = shown(rows(seeds=4)).findings
    assert "(4 paired seeds; the claim asks for 5)" in found[0]
    assert "would hold, but over fewer than 5 seeds" in found[1]
    lopsided = [row for row in rows() if not (row["exchange_layer"] == "fc1" and row["seed"] == 0)]
    assert "(4 paired seeds" in shown(lopsided).findings[0]


def test_each_data_set_is_judged_on_its_own(rows):
    """Catches: the best layer or the largest bytes taken over all data sets."""
    other = [{**row, "bytes_activations": 10 * row["bytes_activations"]} for row in rows(lost=3.0, data="mnist5k")]
    exhibit = shown(rows() + other, layers() + layers(data="mnist5k"))
    assert len(exhibit.findings) == 8
    assert "digits, small-cnn: the automatic layer, fc1, is -1.00 points from the best, conv1" in exhibit.findings[0]
    assert ") holds: within 1 point, 0.19 of the bytes of conv1" in exhibit.findings[1]
    assert "mnist5k, small-cnn: the automatic layer, fc1, is -3.00 points" in exhibit.findings[4]
    assert ") does not hold: more than 1 point, 0.1099 of the bytes of conv1" in exhibit.findings[5]


def test_an_automatic_layer_that_was_not_run_is_said(rows):
    exhibit = shown([row for row in rows() if row["exchange_layer"] != "fc1"])
    assert exhibit.findings == ("digits, small-cnn: the automatic layer, fc1, has no finished run.",)


def test_bytes_that_were_not_counted_prove_nothing(rows):
    exhibit = shown([{**row, "bytes_labels": None if row["seed"] == 0 else 5} for row in rows()])
    assert exhibit.findings[1].endswith(
        "counting bytes of activations and labels: not known, as a run does not say its bytes."
    )


def test_failed_and_noised_runs_enter_nothing(rows, gaussian):
    extra = [
        gaussian(seed=0, exchange_layer="fc1", accuracy=0.1),
        {**rows()[0], "seed": 9, "status": "failed: loss is NaN", "accuracy": None},
    ]
    exhibit = shown(rows() + extra)
    assert exhibit.table == shown(rows()).table
    assert any("conv1, seed 9: failed: loss is NaN" in sentence for sentence in exhibit.sections[0].sentences)


@pytest.mark.parametrize(
    ("records", "message"),
    [
        (layers("none of these"), "layers names 0 automatic layers"),
        ([*layers("conv1"), *layers("conv2")], "layers names 2 automatic layers"),
        (layers("fc1", names=("conv1", "fc1")), "layers lacks 'conv2'"),
        (layers(data="mnist5k"), "layers names 0 automatic layers for digits"),
    ],
)
def test_layers_that_do_not_fit_the_rows_are_refused(rows, records, message):
    with pytest.raises(ValueError, match=message):
        shown(rows(), records)


def test_rows_that_cannot_be_compared_are_refused(rows, fedavg):
    with pytest.raises(ValueError, match="rounds is 5 and 20"):
        shown([*rows(), {**rows()[0], "rounds": 5}])
    with pytest.raises(ValueError, match="'conv1' of digits, small-cnn has two cells"):
        shown([*rows(), {**rows()[0], "lr": 0.5}])
    with pytest.raises(ValueError, match="fedavg has 2 cells"):
        shown([*rows(), fedavg(lr=0.1), fedavg(lr=0.2)])
    with pytest.raises(ValueError, match="no finished run of asfl without noise"):
        shown([fedavg()])


def test_the_folder_makes_the_same_report_again(tmp_path, rows, fedavg):
    made = [complete_row(row) for row in [*rows(), fedavg()]]
    write_exhibit(tmp_path, Material(info=INFO, rows=made, tables={"layers": layers()}))
    before = {path: path.read_bytes() for path in sorted(tmp_path.rglob("*")) if path.is_file()}
    write_exhibit(tmp_path, read_material(tmp_path))
    assert {path: path.read_bytes() for path in sorted(tmp_path.rglob("*")) if path.is_file()} == before
    svg = (tmp_path / "figures" / "exchange-layers.svg").read_text()
    for text in (*NAMES, "automatic", "FedAvg", "digits, small-cnn"):
        assert f">{text}<" in svg
