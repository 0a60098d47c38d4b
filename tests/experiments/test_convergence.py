"""What the convergence recipe measures, against runs and steps written out one by one."""

import numpy as np
import pytest
import torch
from federations import make_tiny

from asfl_privacy.execution.rounds import run_serially
from asfl_privacy.federated import METHODS, TrainingSettings
from asfl_privacy.federated.diagnostics import diagnose
from asfl_privacy.federated.steps import draw_batch
from asfl_privacy.federated.streams import numpy_stream
from asfl_privacy.reporting.exhibits.convergence import convergence_exhibit
from asfl_privacy.reporting.exhibits.exhibit import Material

RUN = {"cohort": 3, "tail_steps": 1, "full_steps": 2, "batch_size": 2}
FIELDS = {
    "data": "digits",
    "partition": "dirichlet:1",
    "clients": 4,
    "cohort": 4,
    "rounds": 2,
    "tail_steps": 2,
    "full_steps": 2,
    "batch_size": 8,
}
PROBLEM = {"methods": ["fedavg", "asfl"], "horizons": [2, 4], "seeds": 2, "clients": 3, "records": 4, "half": 2, **RUN}
OPTIONS = {"methods": ["fedavg", "asfl"], "lr": 0.1, "seeds": 1, "problem": PROBLEM}


@pytest.fixture(scope="module")
def convergence(paper):
    return paper("convergence")


@pytest.fixture(scope="module")
def smooth(paper):
    return paper("smooth_problem")


def on_the_problem(smooth, **changes):
    settings = RUN | {"clients": 3, "rounds": 2, "lr": 0.05, "seed": 4} | changes
    return smooth.make_federation(smooth.Problem(half=2, clients=3, records=4), TrainingSettings(**settings))


def test_without_a_tail_round_sharing_has_fedavgs_diagnostics_bit_for_bit(digits, convergence):
    """Catches: a diagnosis that moves a generator or leaves something in the scratch network that training reads."""

    def figures(method):
        federation = make_tiny(digits, tail_steps=0, rounds=2)
        records = convergence.diagnose_run(federation, METHODS[method], executor="serial")
        return [{name: value for name, value in one.items() if name != "method"} for one in records]

    assert figures("asfl") == figures("fedavg")


def test_diagnosing_changes_nothing_and_is_of_the_weights_after_so_many_rounds(digits, convergence):
    """Rounds 0, 2 and the last; the last one's figures are those of a run that nobody watched."""
    federation = make_tiny(digits, rounds=3)
    records = convergence.diagnose_run(federation, METHODS["asfl"], executor="serial", every=2)
    assert [one["round"] for one in records] == [0, 2, 3]
    unwatched = run_serially(federation, METHODS["asfl"], ledger=None)
    found = diagnose(federation, unwatched.state.weights)
    last = records[-1]
    assert (last["loss"], last["squared_gradient_norm"], last["dissimilarity"]) == (
        found.loss,
        found.squared_gradient_norm,
        found.dissimilarity,
    )
    assert last["remote_fraction"] == unwatched.remote_fraction > 0
    assert records[0]["drift"] is None
    assert records[0]["remote_fraction"] is None
    assert last["drift"] > 0


def test_drift_after_one_step_is_the_squared_rate_times_the_variance_of_mini_batch_gradients(convergence, smooth):
    """Catches: drift of averaged weights, of all clients instead of the cohort, a rate that enters once."""
    federation = on_the_problem(smooth, tail_steps=0, full_steps=1, rounds=1)
    _, after = convergence.diagnose_run(federation, METHODS["fedavg"])
    gradients = []
    for client in federation.clients:
        rng = numpy_stream(4, round=0, client=client.number, purpose="full steps")
        batch = client.inputs[draw_batch(client.num_records, batch_size=2, rng=rng)]
        gradients.append(smooth.exact_gradients(batch, torch.zeros(4, dtype=torch.float64)).mean(0))
    spread = torch.stack(gradients) - torch.stack(gradients).mean(0)
    assert after["drift"] == pytest.approx(0.05**2 * float(spread.square().sum(1).mean()), rel=1e-10)
    assert after["drift"] > 0


def test_the_planned_share_is_what_sharing_draws_on_average(convergence, smooth):
    """τ' = 4 and τ = 4: a quarter. Over 3 clients × 20 rounds × 8 draws a deviation above .1 is beyond 5σ."""
    federation = on_the_problem(smooth, tail_steps=4, full_steps=4, rounds=20, batch_size=1, lr=0.001)
    records = convergence.diagnose_run(federation, METHODS["asfl"], every=20, by=smooth.diagnose_exactly)
    assert records[-1]["planned_remote_fraction"] == 0.25
    assert records[-1]["remote_fraction"] == pytest.approx(0.25, abs=0.1)
    plain = convergence.diagnose_run(federation, METHODS["fedavg"], every=20, by=smooth.diagnose_exactly)
    assert (plain[-1]["planned_remote_fraction"], plain[-1]["remote_fraction"]) == (0.0, 0.0)


def test_fedavg_on_whole_batches_is_gradient_descent_written_out(convergence, smooth):
    """The mean of ‖∇F(x_t)‖² over t < T, from a loop in NumPy. Catches: the last point counted, the first left out."""
    problem = smooth.Problem(half=2, clients=3, records=4)
    settings = {"cohort": 3, "tail_steps": 1, "full_steps": 2, "batch_size": 4}
    found = convergence.decay_record("fedavg", problem=problem, settings=settings, rounds=8, shortest=2, seed=1)
    records = smooth.make_data(problem, seed=1).train_inputs.double().numpy().reshape(3, 4, 4)
    turn = np.kron([[1, 1], [1, -1]], np.eye(2)) / np.sqrt(2)

    def gradients(x):
        r = (records - x) @ turn
        return -((2 * r / (1 + r**2)) @ turn).mean(1)

    rate, x, norms, drifts = 0.5 / (16 * 2 * 3), np.zeros(4), [], []  # √(2/8) / (16·L·K)
    for _ in range(8):
        norms.append(np.sum(gradients(x).mean(0) ** 2))
        ends = np.tile(x, (3, 1))
        for _ in range(3):
            ends = ends - rate * gradients(ends[:, None, :])
        x = ends.mean(0)
        drifts.append(np.mean(np.sum((ends - x) ** 2, 1)))
    assert found["lr"] == pytest.approx(rate, rel=1e-15)
    assert found["squared_gradient_norm"] == pytest.approx(np.mean(norms), rel=1e-9)
    assert found["first_squared_gradient_norm"] == pytest.approx(norms[0], rel=1e-9)
    assert found["drift"] == pytest.approx(np.mean(drifts), rel=1e-9)


def test_steps_fall_with_the_root_of_t_from_the_theorem_s_bound(convergence, smooth):
    bound = 1 / ((1 + 1**2) * 8 * smooth.SMOOTHNESS * 5)
    assert convergence.step_size(50, shortest=50, local_steps=5) == pytest.approx(bound)
    assert convergence.step_size(5000, shortest=50, local_steps=5) == pytest.approx(bound / 10)


def test_a_toy_recipe_is_measured_kept_and_shown(convergence, paper, tmp_path, monkeypatch):
    """The second time nothing is trained; the exhibit takes what comes out."""
    runs = paper("runs").Runs(tmp_path, None)
    tables = convergence.measure(FIELDS, OPTIONS, runs=runs).tables
    assert [(one["method"], one["seed"], one["round"]) for one in tables["diagnostics"]] == [
        (method, 0, number) for method in ("fedavg", "asfl") for number in range(3)
    ]
    assert sorted((one["method"], one["seed"], one["rounds"]) for one in tables["decay"]) == [
        (method, seed, rounds) for method in ("asfl", "fedavg") for seed in (0, 1) for rounds in (2, 4)
    ]
    monkeypatch.setattr(convergence, "run_rounds", None)
    assert convergence.measure(FIELDS, OPTIONS, runs=runs).tables == tables
    shown = convergence_exhibit(Material(info={"title": "toy"}, tables=tables))
    assert [line[0] for line in shown.table.lines] == ["FedAvg", "ASFL"]


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"every": 0}, "every 0 must be a whole number from 1"),
        ({"problem": PROBLEM | {"methods": ["asfl"]}}, "slopes need fedavg"),
        ({"problem": PROBLEM | {"horizons": [5, 5]}}, "two numbers of rounds"),
        ({"problem": PROBLEM | {"depth": 3}}, r"problem\.depth is unknown"),
        ({"problem": {k: v for k, v in PROBLEM.items() if k != "cohort"}}, r"problem\.cohort is missing"),
    ],
)
def test_options_that_break_a_rule_are_refused_before_anything_is_measured(convergence, paper, tmp_path, changes, line):
    with pytest.raises(ValueError, match=line):
        convergence.measure(FIELDS, OPTIONS | changes, runs=paper("runs").Runs(tmp_path / "none", None))
    assert not (tmp_path / "none").exists()


def test_a_method_without_a_global_network_has_no_global_gradient(digits, convergence):
    with pytest.raises(ValueError, match="fedproto trains no global network"):
        convergence.diagnose_run(make_tiny(digits), METHODS["fedproto"])
