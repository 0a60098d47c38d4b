from asfl_privacy.reporting.cells import gather_cells
from asfl_privacy.reporting.display import display_table


def show(rows):
    table = display_table(gather_cells(rows))
    assert {len(line) for line in table.lines} == {len(table.headings)}
    return table, [dict(zip(table.headings, line, strict=True)) for line in table.lines]


def test_what_varies_has_a_column_and_what_does_not_is_said_once(gaussian, unnoised):
    table, lines = show([unnoised(), gaussian(), gaussian(radius="any", epsilon_release=4.0)])
    assert [line["radius R"] for line in lines] == ["—", "1", "any"]
    assert ("placement", "input") in table.shared
    assert "radius R" not in dict(table.shared)


def test_fedavg_steps_are_named_in_its_line_and_open_no_column(unnoised, fedavg):
    table, lines = show([unnoised(), fedavg()])
    assert [line["run"] for line in lines] == ["ASFL, no noise", "FedAvg, no noise, 10 full steps"]
    assert ("tail steps τ′", "4") in table.shared


def test_reference_lines_are_blank_where_privacy_has_no_meaning(grid):
    _, lines = show(grid)
    for line in lines[:2]:
        privacy = ("ε per release", "ε total", "δ", "ε whole record", "sensitivity", "noise sd")
        assert {line[heading] for heading in privacy} == {"—"}


def test_spent_privacy_is_shown_rounded_up(gaussian):
    # Catches: showing the target, or rounding to nearest.
    _, (line,) = show([gaussian(epsilon_release=3.9991, epsilon_total=30.001, epsilon_whole_record=float("inf"))])
    assert (line["ε per release"], line["ε total"], line["ε whole record"]) == ("4", "30.01", "∞")


def test_what_was_asked_is_shown_where_it_is_not_what_was_spent(gaussian):
    table, _ = show([gaussian()])
    assert "ε asked, per release" not in table.headings
    _, (line,) = show([gaussian(epsilon_release=3.5, delta_total=1e-3)])
    assert (line["ε asked, per release"], line["ε per release"]) == ("4", "3.5")
    assert (line["δ asked"], line["δ"]) == ("1e-5", "1e-3")


def test_failed_runs_show_beside_the_good_ones(grid):
    _, lines = show(grid)
    assert [line["runs"] for line in lines if line["ε per release"] == "1"] == ["1 of 2, 1 failed"]
    assert [line["accuracy %"] for line in lines if line["ε per release"] == "1"] == ["62.0"]


def test_personal_accuracy_has_columns_of_its_own_where_there_is_any(fedavg, unnoised):
    # Catches: one column for both, in which an easier task would look like a better method.
    own = fedavg(method="fedproto", accuracy=None, personal_accuracy=0.75, prototype_accuracy_local=0.5)
    table, lines = show([fedavg(), own, unnoised()])
    by_run = {line["run"].split(",")[0]: line for line in lines}
    assert (by_run["FedProto"]["accuracy %"], by_run["FedProto"]["personal accuracy %"]) == ("—", "75.0")
    assert by_run["FedProto"]["nearest own prototype %"] == "50.0"
    assert (by_run["FedAvg"]["accuracy %"], by_run["FedAvg"]["personal accuracy %"]) == ("90.0", "—")
    assert "nearest of all prototypes %" not in table.headings
    assert not [heading for heading in show([fedavg()])[0].headings if "personal" in heading]
