"""`layers`: one line a block, the same numbers as JSON, and one line for bad input."""

import json

import pytest

from asfl_privacy.cli import main

SIZES = ["--clients", "6", "--cohort", "4", "--tail-steps", "2", "--full-steps", "2", "--batch-size", "16"]
QUICK = [*SIZES, "--model", "federations:tiny_net", "--partition", "iid"]


@pytest.fixture(autouse=True)
def workplace(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def call(capsys, *arguments):
    """Exit code, standard output and the lines of standard error."""
    with pytest.raises(SystemExit) as ended:
        main(list(arguments))
    captured = capsys.readouterr()
    return ended.value.code, captured.out, captured.err.strip().splitlines()


def test_table_and_json_hold_the_same_numbers(capsys, workplace):
    """16 records of 8 float32 numbers, and a byte for each label; 610 float32 weights there and back; 90 behind `body`."""
    flags = ["layers", *QUICK, "--epsilon", "4", "--placement", "exchange"]
    code, out, errors = call(capsys, *flags, "--json")
    assert (code, errors) == (0, [])
    (body,) = json.loads(out)
    assert (body["exchange_layer"], body["is_automatic"], body["placement"]) == ("body", True, "exchange")
    assert (body["activation_bytes"], body["label_bytes"], body["model_bytes"]) == (16 * 8 * 4, 16, 2 * 610 * 4)
    assert body["exchange_to_model"] == (16 * 8 * 4 + 16) / (2 * 610 * 4)
    assert body["trained_in_tail"] == 90 / 610
    assert body["head_sensitivity"] == body["placement_sensitivity"] > 0.0
    assert body["signal_to_noise"] > 0.0
    code, out, errors = call(capsys, *flags)
    assert (code, errors) == (0, [])
    (line,) = [line for line in out.splitlines() if line.strip().startswith("body")]
    cells = line.split()
    assert cells[1:3] == ["←", "auto,"] or cells[1:3] == ["←", "auto"]
    assert [cell for cell in cells if cell in ("512", "16", "4,880", "exchange")] == ["512", "16", "4,880", "exchange"]
    assert "14.8 %" in line
    assert "is an estimate on 64 made-up inputs" in out
    assert f"auto takes body: {body['reason']}" in out
    assert list(workplace.iterdir()) == []


def test_a_sensitivity_is_never_shown_below_what_was_certified(capsys):
    """Catches rounding to nearest."""
    flags = ["layers", *SIZES, "--epsilon", "4", "--placement", "input"]
    found = json.loads(call(capsys, *flags, "--json")[1])
    out = call(capsys, *flags)[1]
    for layer in found:
        (line,) = [line for line in out.splitlines() if line.split()[:1] == [layer["exchange_layer"]]]
        assert float(line.split()[-4]) >= layer["head_sensitivity"] * (1 - 1e-9)
    assert "conv2 ← auto, asked for" in out or "conv2 ← auto" in out


def test_without_noise_the_private_columns_are_blank(capsys):
    code, out, _ = call(capsys, "layers", *QUICK, "--mech", "none")
    assert code == 0
    (line,) = [line for line in out.splitlines() if line.strip().startswith("body")]
    assert line.split()[-4:] == ["—"] * 4
    assert "estimate" not in out
    (body,) = json.loads(call(capsys, "layers", *QUICK, "--mech", "none", "--json")[1])
    assert body["head_sensitivity"] is body["signal_to_noise"] is body["placement"] is None


def test_a_block_asked_for_is_marked_beside_the_automatic_one(capsys):
    out = call(capsys, "layers", *SIZES, "--mech", "none", "--exchange-layer", "fc1")[1]
    assert "fc1 ← asked for" in out
    assert "conv2 ← auto " in out


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--mech", "none", "--method", "fedavg"], "method fedavg shares no activations"),
        (["--mech", "none", "--tail-steps", "0"], "tail_steps 0 exchanges nothing"),
        (["--mech", "none", "--exchange-layer", "nowhere"], "use auto or one of body"),
        (["--epsilon", "nan"], "epsilon nan"),
        (["--epsilon", "4", "--radius", "any"], "radius any needs a clip"),
        (["--epsilon", "4", "--placement", "after:nowhere"], "after:nowhere"),
        (["--epsilon", "4", "--seeds", "2"], "layers runs one seed"),
        ([], "layers runs one cell"),
        (["--data", "nowhere", "--mech", "none"], "nowhere"),
    ],
)
def test_bad_input_is_one_line_and_exit_2(capsys, workplace, flags, words):
    code, out, errors = call(capsys, "layers", *QUICK, *flags)
    assert (code, out, len(errors)) == (2, "", 1)
    assert words in errors[0]
    assert list(workplace.iterdir()) == []


def test_the_help_states_the_rule_and_that_no_record_is_looked_at(capsys):
    out = " ".join(call(capsys, "layers", "--help")[1].split())
    assert "earliest block whose activations take at most half of the bytes of the largest" in out
    assert "no record is, so this costs no privacy" in out
