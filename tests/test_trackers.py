"""Trackers: what TensorBoard and MLflow are told, read back; nothing of single clients; failures never end a run."""

import importlib.util
import json
import math

import pytest
from federations import make_tiny

from asfl_privacy.config import SweepConfig, load_config
from asfl_privacy.execution import RunStoppedError, run_serially
from asfl_privacy.federated import METHODS
from asfl_privacy.federated.stopwatch import PHASES
from asfl_privacy.metrics import figures
from asfl_privacy.trackers import NOT_TOLD, check_tracker, open_tracker
from asfl_privacy.unfinished import unfinished_folder

TAGS = {
    "accuracy",
    "loss",
    "bytes/model",
    "bytes/activations",
    "bytes/labels",
    "peak_memory_bytes",
    *(f"seconds/{phase}" for phase in PHASES),
}
ROW = {"status": "ok", "accuracy": 0.25, "epsilon_total": math.inf, "held_back": None, "seconds": 1.5}
CONFIG = load_config(None, overrides={"epsilon": "4", "data_root": "/private/place", "clip": None})


def refuse(line):
    raise AssertionError(line)


def tracked(kind, digits, folder, *, on_warning=refuse, fail_after=None, error=None):
    """A run of three rounds told to a tracker; its evaluations."""
    federation = make_tiny(digits, seed=0)
    with open_tracker(kind, folder=folder, config=CONFIG, name="tiny seed 0", on_warning=on_warning) as tracker:

        def tell(evaluation):
            if evaluation.round == fail_after:
                raise error or ValueError("boom")
            tracker.evaluation(evaluation)

        done = run_serially(federation, METHODS["asfl"], ledger=None, on_evaluation=tell)
        tracker.finish(ROW)
        if folder is not None:
            folder.mkdir()
            (folder / "row.json").write_text("{}")
    return done.evaluations


def events_in(folder):
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    found = event_accumulator.EventAccumulator(str(folder), size_guidance={"tensors": 0, "scalars": 0})
    return found.Reload()


def doubles(events, tag):
    """Steps and values of a tag."""
    return [(event.step, event.tensor_proto.double_val[0]) for event in events.Tensors(tag)]


@pytest.fixture
def tensorboard():
    pytest.importorskip("tensorboard", reason="the extra tensorboard is not installed")


def test_tensorboard_is_told_every_figure_of_every_evaluation_and_nothing_else(tensorboard, digits, tmp_path):
    """Catches a tag of a single client or record, and figures cut to float32."""
    evaluations = tracked("tensorboard", digits, tmp_path / "run")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["run", "run.unfinished"]
    assert sorted(file.name for file in (tmp_path / "run").iterdir()) == ["row.json", "tensorboard"]
    events = events_in(tmp_path / "run" / "tensorboard")
    words = {"configuration/text_summary", "row/text_summary"}
    assert {tag for tag in events.Tags()["tensors"] if not tag.startswith("_hparams_")} == TAGS | words
    assert set(events.Tags()["scalars"]) == {"final/accuracy", "final/seconds"}
    for tag in TAGS:
        wanted = [(one.round, float(figures(one)[tag.replace("/", "_")])) for one in evaluations]
        assert doubles(events, tag) == wanted, tag


def test_tensorboard_holds_the_configuration_but_no_place_of_this_machine(tensorboard, digits, tmp_path):
    tracked("tensorboard", digits, tmp_path / "run")
    events = events_in(tmp_path / "run" / "tensorboard")
    text = events.Tensors("configuration/text_summary")[0].tensor_proto.string_val[0].decode()
    told = {line.split(" | ")[0].removeprefix("| ") for line in text.splitlines()[2:]}
    given = {name for name, value in CONFIG.model_dump(mode="json").items() if value not in (None, [])}
    assert told == given - set(NOT_TOLD)
    assert "| epsilon | 4.0 |" in text
    files = list((tmp_path / "run" / "tensorboard").iterdir())
    assert files
    assert not any(b"/private/place" in file.read_bytes() for file in files)


def test_noise_is_told_where_there_is_some(tensorboard, tmp_path):
    from asfl_privacy.execution import Evaluation

    with open_tracker("tensorboard", folder=tmp_path / "run", config=CONFIG, name="run", on_warning=refuse) as tracker:
        tracker.evaluation(Evaluation(round=3, accuracy=0.5, loss=math.inf, sensitivity=0.1, noise_scale=7.5))
        live = events_in(unfinished_folder(tmp_path / "run") / "tensorboard")  # while the run is under way
        assert doubles(live, "sensitivity") == [(3, 0.1)]
        assert doubles(live, "noise_scale") == [(3, 7.5)]
        assert not {"loss", "peak_memory_bytes"} & set(live.Tags()["tensors"])  # infinite, and not measured


def test_a_run_opened_again_begins_its_events_anew(tensorboard, digits, tmp_path):
    """Catches rounds that are told twice after a resume."""
    with pytest.raises(RunStoppedError):
        tracked("tensorboard", digits, tmp_path / "run", fail_after=3, error=RunStoppedError("stopped"))
    kept = unfinished_folder(tmp_path / "run") / "tensorboard"
    assert [step for step, _ in doubles(events_in(kept), "loss")] == [1, 2]
    tracked("tensorboard", digits, tmp_path / "run")
    assert not kept.exists()
    assert [step for step, _ in doubles(events_in(tmp_path / "run" / "tensorboard"), "loss")] == [1, 2, 3]


@pytest.fixture(scope="module")
def database(tmp_path_factory):
    """An MLflow database of this module's own."""
    pytest.importorskip("mlflow", reason="the extra mlflow is not installed")
    pytest.importorskip("sqlalchemy", reason="the extra mlflow is not installed whole")
    return f"sqlite:///{tmp_path_factory.mktemp('mlflow') / 'mlflow.db'}"


@pytest.fixture
def mlflow(database, monkeypatch, request):
    """A client of it; each test has an experiment of its own."""
    from mlflow import MlflowClient

    monkeypatch.setenv("MLFLOW_TRACKING_URI", database)
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", request.node.name)
    check_tracker("mlflow")
    return MlflowClient(database)


def runs_of(client, request):
    experiment = client.get_experiment_by_name(request.node.name)
    return client.search_runs([experiment.experiment_id])


def test_mlflow_is_told_the_same(mlflow, digits, tmp_path, request):
    evaluations = tracked("mlflow", digits, tmp_path / "run")
    (run,) = runs_of(mlflow, request)
    assert (run.info.status, run.info.run_name) == ("FINISHED", "tiny seed 0")
    assert set(run.data.metrics) == TAGS | {"final/accuracy", "final/seconds"}
    for tag in TAGS:
        wanted = [(one.round, float(figures(one)[tag.replace("/", "_")])) for one in evaluations]
        assert [(m.step, m.value) for m in mlflow.get_metric_history(run.info.run_id, tag)] == wanted, tag
    given = {name for name, value in CONFIG.model_dump(mode="json").items() if value not in (None, [])}
    assert set(run.data.params) == given - set(NOT_TOLD)
    assert run.data.params["epsilon"] == "4.0"
    ours = {key: value for key, value in run.data.tags.items() if not key.startswith("mlflow.")}
    assert ours == {"final/status": "ok", "final/epsilon_total": "inf"}  # a metric would make a number of it
    assert set(run.data.tags) - set(ours) == {"mlflow.runName"}  # no user, no path of a script


@pytest.mark.parametrize(
    ("error", "status"),
    [(ValueError("boom"), "FAILED"), (RunStoppedError("x"), "KILLED"), (KeyboardInterrupt(), "KILLED")],
)
def test_mlflow_says_how_a_run_ended(mlflow, digits, tmp_path, request, error, status):
    with pytest.raises(type(error)):
        tracked("mlflow", digits, tmp_path / "run", fail_after=2, error=error)
    (run,) = runs_of(mlflow, request)
    assert run.info.status == status
    assert run.data.metrics.keys() == TAGS


def test_a_server_that_goes_while_a_run_is_under_way_costs_one_warning(mlflow, digits, tmp_path, request, monkeypatch):
    """The run's numbers are those of an untracked one. Catches a tracker whose failure ends training."""
    from mlflow import MlflowClient

    told, calls = [], []

    def gone(self, run_id, metrics=(), params=(), tags=()):
        calls.append(run_id)
        raise ConnectionError("refused by https://me:secret@server/api\nand more")

    federation = make_tiny(digits, seed=0)
    with open_tracker("mlflow", folder=None, config=CONFIG, name="run", on_warning=told.append) as tracker:
        monkeypatch.setattr(MlflowClient, "log_batch", gone)
        done = run_serially(federation, METHODS["asfl"], ledger=None, on_evaluation=tracker.evaluation)
        tracker.finish(ROW)
    assert len(done.evaluations) == 3
    assert told == [
        "track mlflow ended, the run goes on without it: ConnectionError: refused by https://server/api and more"
    ]
    assert len(calls) == 1


def test_a_server_that_is_gone_at_the_start_costs_one_warning_too(database, digits, tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:1")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    told = []
    assert len(tracked("mlflow", digits, tmp_path / "run", on_warning=told.append)) == 3
    assert len(told) == 1
    with pytest.raises(
        ValueError, match=r"track mlflow cannot write to its place .*; set MLFLOW_TRACKING_URI"
    ) as refused:
        check_tracker("mlflow")
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("kind", ["tensorboard", "mlflow"])
def test_an_extra_that_is_missing_is_said_before_training(kind, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        ValueError, match=rf"track {kind} needs the package {kind}, .*; pip install 'asfl-privacy\[{kind}\]'"
    ):
        check_tracker(kind)
    check_tracker("none")


def test_no_tracker_writes_nothing(digits, tmp_path):
    tracked("none", digits, tmp_path / "run")
    assert [file.name for file in (tmp_path / "run").iterdir()] == ["row.json"]


def test_what_cannot_be_tracked_is_refused():
    for kind, folder, words in (("wandb", None, "'wandb' is unknown"), ("tensorboard", None, "has none; give one")):
        with (
            pytest.raises(ValueError, match=words),
            open_tracker(kind, folder=folder, config=CONFIG, name="run", on_warning=refuse),
        ):
            pass
    with pytest.raises(ValueError, match="track"):
        load_config(None, overrides={"track": "wandb"})
    assert json.loads(SweepConfig().model_dump_json())["track"] == "none"
