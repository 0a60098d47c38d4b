"""Configuration: every field of a sweep or a run, its default, its rule, and its flag of the same name."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, field_validator, model_validator

from asfl_privacy.data import parse_partition
from asfl_privacy.federated import METHODS
from asfl_privacy.federated.methods import SHARING
from asfl_privacy.federated.schedules import parse_schedule

T = TypeVar("T")


def _as_sequence(value: object) -> object:
    """A single value stands for a list of one."""
    return value if isinstance(value, list | tuple) else (value,)


Grid = Annotated[tuple[T, ...], BeforeValidator(_as_sequence)]
"""A field that a sweep takes every value of."""

MECHANISMS = ("gaussian", "laplace", "none")
_SHARED = {"fedavg": "asfl"}
"""Methods that have a name of their own where clients share activations."""
_OPTIONS_OF = {
    "server_lr": ("scaffold", "fedpvr", "fedvarp"),
    "corrected_from": ("fedpvr",),
    "mu": ("moon",),
    "temperature": ("moon",),
    "prototype_weight": ("fedproto",),
    "prototype_mean": ("fedproto",),
}
"""Fields that single methods read, and these methods."""
NORMS: Mapping[str, float] = {"1": 1.0, "2": 2.0, "inf": math.inf}


def _grid(default: Sequence[object], description: str, metavar: str) -> Any:  # noqa: ANN401 - pydantic's own type
    return Field(default=tuple(default), description=description, json_schema_extra={"metavar": metavar})


def _one(default: object, description: str, metavar: str) -> Any:  # noqa: ANN401 - pydantic's own type
    return Field(default=default, description=description, json_schema_extra={"metavar": metavar})


class SweepConfig(BaseModel):
    """A grid of runs; fields that hold several values are crossed, a run holds one of each.

    Unknown keys are errors. Every field is also the flag of the same name, with hyphens for underscores.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)

    mech: Grid[str] = _grid(["gaussian"], "Mechanism of the release.", "gaussian|laplace|none")
    data: str = _one(
        "digits", "Data set, or your own.", "digits|fashion-mnist|mnist5k|cifar10|cifar100|femnist|module:name"
    )
    model: str = _one(
        "small-cnn",
        "Network, or your own.",
        "small-cnn|lenet|resnet20[-bn]|vgg11[-bn]|module:factory, each also +projection:W",
    )
    method: Grid[str] = _grid(["asfl"], "Method; references are added beside it.", "|".join(METHODS))
    share: Literal["no", "yes"] = _one("no", "Activation sharing before the local steps of every method.", "no|yes")
    epsilon: Grid[float] = _grid([], "ε of one release at radius R. Default: a grid by mechanism.", "E…")
    total_epsilon: Grid[float] = _grid([], "ε of the whole run at radius R, instead of or beside --epsilon.", "E…")
    delta: Grid[float] = _grid([], "δ of the Gaussian mechanism. Default: 1e-5 and a ladder.", "D…")
    radius: Grid[str | float] = _grid([1.0], "Distance in pixel units within which records look alike.", "R|any")
    norm: Grid[str] = _grid([], "Norm p of that distance. Default: 2 for gaussian, 1 for laplace.", "1|2|inf")
    clip: float | None = _one(None, "Clip what is noised to this norm, record by record.", "C")
    placement: Grid[str] = _grid(["auto"], "Where the noise sits.", "auto|input|after:NAME|exchange")
    noise: Literal["fresh", "once"] = _one("fresh", "A new draw a release, or one a record for good.", "fresh|once")
    own: Literal["clean", "released"] = _one("clean", "Own activations in the tail round.", "clean|released")
    labels: str = _one("clear", "Labels as they are, or randomised once per record at ε = E.", "clear|randomized:E")
    updates: Literal["none", "dp-sgd", "dp-fedavg"] = _one("none", "Protection of updates.", "none|dp-sgd|dp-fedavg")
    update_clip: float = _one(1.0, "Norm that a gradient (dp-sgd) or an update (dp-fedavg) is clipped to.", "C")
    update_share: float = _one(0.5, "Share of a total budget that updates get.", "S")
    filter: Literal["none", "individual"] = _one("none", "Hold back records whose budget is spent.", "none|individual")
    planned_releases: int | None = _one(None, "Releases of a record that a total with --filter plans for.", "N")
    planned_steps: int | None = _one(None, "DP-SGD steps of a record that a total with --filter plans for.", "N")
    calibration: Literal["analytic", "paper"] = _one("analytic", "Proven noise, or PixelDP's.", "analytic|paper")
    noisy_training: Literal["no", "yes"] = _one("no", "The noise layer in the full local steps too.", "no|yes")
    reproducible: Literal["yes", "no"] = _one(
        "yes", "Noise from the seed (no guarantee), or from the system.", "yes|no"
    )
    exchange_layer: Grid[str] = _grid(["auto"], "Block after which activations leave.", "auto|NAME")
    partition: str = _one("dirichlet:0.1", "How records are spread over clients.", "iid|dirichlet:A|shards:K|natural")
    clients: int = _one(20, "Number of clients.", "N")
    cohort: int = _one(10, "Clients sampled each round.", "M")
    rounds: int = _one(30, "Number of rounds.", "T")
    tail_steps: int = _one(10, "Steps of the tail round, τ'.", "τ'")
    full_steps: int = _one(10, "Full local steps, τ. FedAvg takes τ' + τ.", "τ")
    batch_size: int = _one(32, "Records a step.", "B")
    lr: float = _one(0.1, "Learning rate of SGD.", "LR")
    lr_schedule: str = _one("constant", "Learning rate over the rounds.", "constant|cosine|step:F@R,…")
    momentum: float = _one(0.0, "Momentum of local steps, anew in each tail round and each stretch of full steps.", "M")
    weight_decay: float = _one(0.0, "Weight decay of local steps.", "W")
    server_lr: float = _one(1.0, "Server step of scaffold, fedpvr, fedvarp.", "η")
    mu: float = _one(1.0, "Weight of moon's contrastive loss.", "μ")
    temperature: float = _one(0.5, "Temperature of moon's contrastive loss.", "T")
    prototype_weight: float = _one(1.0, "Weight of fedproto's distance to the prototypes.", "λ")
    prototype_mean: Literal["weighted", "unweighted"] = _one(
        "weighted", "fedproto's mean of prototypes: by class counts, or not.", "weighted|unweighted"
    )
    corrected_from: str = _one("auto", "First block that fedpvr corrects; auto: the last one alone.", "auto|NAME")
    evaluate_every: int = _one(2, "Rounds between evaluations.", "K")
    last_evaluations: int = _one(5, "Final evaluations that the accuracy is the mean of.", "K")
    evaluate_on: Literal["test", "validation"] = _one(
        "test", "Records that accuracy is of: the test records, or a sixth of the training records.", "test|validation"
    )
    seeds: int = _one(3, "Number of seeds, counted from --seed on; train runs one.", "N")
    seed: int = _one(0, "First seed.", "S")
    data_root: str = _one("data", "Folder of downloaded data sets.", "DIR")
    device: Literal["auto", "cpu", "cuda", "mps"] = _one("cpu", "Where training runs.", "auto|cpu|cuda|mps")
    executor: Literal["auto", "serial", "threads", "processes", "batched", "torchrun"] = _one(
        "auto", "Who does the clients' work of a run.", "auto|serial|threads|processes|batched|torchrun"
    )
    precision: Literal["float32", "bfloat16"] = _one(
        "float32", "Arithmetic of local steps; bounds, noise and releases stay as they are.", "float32|bfloat16"
    )
    compile: Literal["no", "yes"] = _one("no", "Compile the batched step (CUDA graphs on a GPU).", "no|yes")
    checkpoint_every: int | None = _one(
        None, "Rounds between checkpoints, 0 for none. Default: 10, or 1 with reproducible no.", "K"
    )
    tolerate_failures: Literal["no", "yes"] = _one("no", "Go on without clients whose work failed.", "no|yes")
    track: Literal["none", "tensorboard", "mlflow"] = _one(
        "none", "Also write evaluations to RUN/tensorboard, or MLflow's tracking URI.", "none|tensorboard|mlflow"
    )
    launcher: Literal["local", "ray"] = _one(
        "local", "Where a sweep's cells run: this machine, or a Ray cluster.", "local|ray"
    )

    @property
    def methods(self) -> tuple[str, ...]:
        """The methods that run: with `share yes` each one after activation sharing."""
        return self.method if self.share == "no" else tuple(dict.fromkeys(self._with_sharing()))

    def _with_sharing(self) -> tuple[str, ...]:
        """What each of the methods is called after activation sharing."""
        return tuple(name if METHODS[name].shares else _SHARED.get(name, name + SHARING) for name in self.method)

    @property
    def shares_activations(self) -> bool:
        """Whether any method shares activations."""
        return any(METHODS[name].shares for name in self.methods)

    def asks_the_same_as(self, other: SweepConfig, *, but_for: Collection[str]) -> bool:
        """Whether both are equal, some fields aside."""
        return self.model_dump(exclude=set(but_for)) == other.model_dump(exclude=set(but_for))

    @field_validator("mech")
    @classmethod
    def _known_mechanism(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        return _each_of(value, MECHANISMS)

    @field_validator("method")
    @classmethod
    def _known_method(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        return _each_of(value, tuple(METHODS))

    @field_validator("norm")
    @classmethod
    def _known_norm(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        return _each_of(value, tuple(NORMS), may_be_empty=True)

    @field_validator("*", mode="before")
    @classmethod
    def _no_truth_values(cls, value: object) -> object:
        values = value if isinstance(value, list | tuple) else (value,)
        if any(isinstance(one, bool) for one in values):
            raise ValueError(f"{value} is a truth value, which no field takes; give a number or a name")
        return value

    @field_validator("norm", "exchange_layer", mode="before")
    @classmethod
    def _text_of_numbers(cls, value: object) -> object:
        values = value if isinstance(value, list | tuple) else (value,)
        return tuple(f"{v:g}" if isinstance(v, int | float) else v for v in values)

    @field_validator("radius")
    @classmethod
    def _radius_above_zero(cls, value: tuple[str | float, ...]) -> tuple[str | float, ...]:
        checked: list[str | float] = []
        for radius in _not_empty(value):
            if radius == "any":
                checked.append("any")
                continue
            try:
                number = float(radius)
            except ValueError:
                number = math.nan
            if not (math.isfinite(number) and number > 0):
                raise ValueError(f"{radius} must be a finite number above 0, or any; give for example 1.0")
            checked.append(number)
        return tuple(checked)

    @field_validator("epsilon", "total_epsilon")
    @classmethod
    def _epsilon_above_zero(cls, value: tuple[float, ...]) -> tuple[float, ...]:
        for epsilon in value:
            if not (math.isfinite(epsilon) and epsilon > 0):
                raise ValueError(f"{epsilon:g} must be a finite number above 0; give for example 4")
        return value

    @field_validator("delta")
    @classmethod
    def _delta_inside(cls, value: tuple[float, ...]) -> tuple[float, ...]:
        for delta in value:
            if not 0 < delta < 1:
                raise ValueError(f"{delta:g} must lie strictly between 0 and 1; give for example 1e-5")
        return value

    @field_validator("placement")
    @classmethod
    def _placement_form(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for placement in _not_empty(value):
            if placement not in ("auto", "input", "exchange") and not (
                placement.startswith("after:") and placement != "after:"
            ):
                raise ValueError(f"{placement!r} is unknown; use auto, input, after:NAME or exchange")
        return value

    @field_validator("exchange_layer")
    @classmethod
    def _some_exchange_layer(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(_not_empty(value))

    @field_validator("labels")
    @classmethod
    def _labels_form(cls, value: str) -> str:
        label_epsilon(value)
        return value

    @field_validator("update_share")
    @classmethod
    def _share_inside(cls, value: float) -> float:
        if not 0 < value < 1:
            raise ValueError(f"{value:g} must lie strictly between 0 and 1; give for example 0.5")
        return value

    @field_validator("planned_releases", "planned_steps")
    @classmethod
    def _planned_at_least_one(cls, value: int | None) -> int | None:
        if value is not None and value < 1:
            raise ValueError(f"{value} must be a whole number from 1 on; give for example 20, or leave it out")
        return value

    @field_validator("lr_schedule")
    @classmethod
    def _schedule_form(cls, value: str) -> str:
        parse_schedule(value)
        return value

    @field_validator("momentum")
    @classmethod
    def _momentum_inside(cls, value: float) -> float:
        if not 0 <= value < 1:
            raise ValueError(f"{value:g} must lie in 0 to 1, 1 left out; give for example 0.9")
        return value

    @field_validator("weight_decay", "mu", "prototype_weight")
    @classmethod
    def _weight_decay_form(cls, value: float) -> float:
        if not (math.isfinite(value) and value >= 0):
            raise ValueError(f"{value:g} must be a finite number from 0 on; give for example 1e-4")
        return value

    @field_validator("clip", "lr", "update_clip", "server_lr", "temperature")
    @classmethod
    def _above_zero(cls, value: float | None) -> float | None:
        if value is not None and not (math.isfinite(value) and value > 0):
            raise ValueError(f"{value:g} must be a finite number above 0; give for example 0.1")
        return value

    @field_validator("partition")
    @classmethod
    def _partition_form(cls, value: str) -> str:
        parse_partition(value)
        return value

    @field_validator("clients", "cohort", "rounds", "batch_size", "evaluate_every", "last_evaluations", "seeds")
    @classmethod
    def _at_least_one(cls, value: int) -> int:
        if value < 1:
            raise ValueError(f"{value} must be a whole number from 1 on; give for example 3")
        return value

    @field_validator("tail_steps", "full_steps", "seed", "checkpoint_every")
    @classmethod
    def _at_least_zero(cls, value: int | None) -> int | None:
        if value is not None and value < 0:
            raise ValueError(f"{value} must be a whole number from 0 on; give for example 0")
        return value

    @model_validator(mode="after")
    def _fields_agree(self) -> Self:
        if self.cohort > self.clients:
            raise ValueError(
                f"cohort {self.cohort} must lie in 1 to {self.clients}, the number of clients; sample fewer or add clients"
            )
        if self.tail_steps + self.full_steps == 0:
            raise ValueError("tail_steps 0 and full_steps 0 train nothing; give one of them a step")
        if "any" in self.radius and self.clip is None:
            raise ValueError("radius any needs a clip, as two records may differ without limit; add clip, e.g. 4.0")
        if self.noise == "once" and any(placement not in ("auto", "input") for placement in self.placement):
            raise ValueError(
                f"noise once with placement {', '.join(self.placement)}: a record's noise can be kept only at the input, as "
                "the head changes every round; use placement input"
            )
        if self.compile == "yes" and self.executor not in ("auto", "batched"):
            raise ValueError(
                f"compile yes has no effect with executor {self.executor}, which runs the network as it is; use executor "
                "batched"
            )
        strangers = [
            name for name, shared in zip(self.method, self._with_sharing(), strict=True) if shared not in METHODS
        ]
        if self.share == "yes" and strangers:
            raise ValueError(
                f"share yes with method {strangers[0]}: its clients do not train one network whose activations another could "
                "go on with; use share no"
            )
        self._budgets_agree()
        self._channels_agree()
        return self

    def _budgets_agree(self) -> None:
        budgets = {"epsilon": self.epsilon, "total_epsilon": self.total_epsilon, "delta": self.delta}
        asked = next((name for name, values in budgets.items() if values), None)
        private = (self.shares_activations and set(self.mech) != {"none"}) or self.updates != "none"
        if asked is not None and not private:
            reason = "mech none" if self.shares_activations else f"method {', '.join(self.methods)}"
            exposing = [name for name in self.methods if METHODS[name].exposes_records]
            if exposing and not self.shares_activations:
                raise ValueError(
                    f"{asked} with method {exposing[0]}: its clients send {METHODS[exposing[0]].in_the_clear}, "
                    "which nothing noises, so that no private run is possible; use method asfl"
                )
            raise ValueError(
                f"{asked} has no effect with {reason}, which adds no noise; leave it out, or let clients share activations with "
                "noise: share yes"
            )
        if self.delta and "gaussian" not in self.mech and self.updates == "none":
            raise ValueError(
                f"delta {', '.join(f'{d:g}' for d in self.delta)} has no effect: the Laplace mechanism has δ = 0; leave it out"
            )

    def _channels_agree(self) -> None:
        shares_nothing = self.tail_steps == 0 and self.updates == "none" and set(self.mech) != {"none"}
        if shares_nothing and (self.epsilon or self.total_epsilon):
            raise ValueError(
                "tail_steps 0 shares no activations, so a budget has nothing to protect; give tail_steps 1 or more, or "
                "updates dp-sgd"
            )
        if self.updates != "none" and (self.epsilon or not self.total_epsilon):
            raise ValueError(
                f"updates {self.updates} needs a budget for all channels together; give total_epsilon, e.g. 8, and no epsilon"
            )
        if self.updates != "none" and "none" in self.mech:
            raise ValueError(
                f"updates {self.updates} with mech none would protect updates beside clean activations; leave mech none out"
            )
        for method in (METHODS[name] for name in self.methods):
            if method.exposes_records and (self.updates != "none" or (method.shares and set(self.mech) != {"none"})):
                raise ValueError(
                    f"method {method.name} in a private run: its clients send {method.in_the_clear}, which nothing noises; use "
                    "method asfl or fedavg, or mech none with updates none"
                )
        open_methods = [name for name in self.methods if METHODS[name].in_the_clear]
        if self.updates != "none" and open_methods:
            raise ValueError(
                f"updates {self.updates} with method {open_methods[0]}: its clients send {METHODS[open_methods[0]].in_the_clear} "
                "too, which nothing noises; use method asfl, fedavg or fedvarp, or updates none"
            )
        for name, methods in _OPTIONS_OF.items():
            is_default = getattr(self, name) == type(self).model_fields[name].default
            if not is_default and not any(method.partition("+")[0] in methods for method in self.methods):
                raise ValueError(
                    f"{name} {getattr(self, name)} has no effect with method {', '.join(self.methods)}; leave it out, or use "
                    f"method {' or '.join(methods)}"
                )
        if self.updates == "dp-sgd" and self.mu > 0 and any(name.startswith("moon") for name in self.methods):
            raise ValueError(
                "updates dp-sgd with method moon: a record's contrastive loss reads networks that saw it before, so its steps "
                "are not noised gradients alone; use method asfl or fedavg, or mu 0"
            )
        if self.labels != "clear" and (not self.shares_activations or "none" in self.mech):
            raise ValueError(
                f"labels {self.labels} belongs to private activation sharing; use method asfl with mech gaussian or laplace"
            )
        released = self.own == "released" and self.labels != "clear"
        if self.updates == "dp-sgd" and self.full_steps == 0 and released:
            raise ValueError(
                "full_steps 0 with own released and randomised labels: no step reads unreleased data, so updates dp-sgd has "
                "nothing to noise; give updates none, or full_steps 1 or more"
            )
        if self.filter == "individual" and not self.total_epsilon:
            raise ValueError("filter individual needs a budget to hold back records by; give total_epsilon, e.g. 8")
        planned = {"planned_releases": self.planned_releases, "planned_steps": self.planned_steps}
        for name, value in planned.items():
            if value is not None and self.filter == "none":
                raise ValueError(f"{name} {value} has no effect without filter individual; add it, or leave {name} out")
        if self.planned_steps is not None and self.updates != "dp-sgd":
            raise ValueError(f"planned_steps {self.planned_steps} has no effect without updates dp-sgd; leave it out")
        defaults = type(self).model_fields
        for name in ("update_clip", "update_share"):
            if self.updates == "none" and getattr(self, name) != defaults[name].default:
                raise ValueError(f"{name} {getattr(self, name):g} has no effect with updates none; leave it out")
        if self.calibration == "paper" and set(self.mech) == {"none"}:
            raise ValueError("calibration paper has no effect with mech none; leave it out")
        if self.noisy_training == "yes":
            self._noisy_training_agrees()
        if self.calibration == "paper" and (self.total_epsilon or self.updates != "none" or self.noise == "once"):
            raise ValueError(
                "calibration paper is PixelDP as published, for one release at a time; give epsilon, updates none and noise "
                "fresh, or use calibration analytic"
            )

    def _noisy_training_agrees(self) -> None:
        if self.calibration == "paper":
            raise ValueError("noisy_training yes has no effect with calibration paper, which trains so; leave it out")
        if not self.shares_activations or self.tail_steps == 0 or set(self.mech) == {"none"}:
            raise ValueError(
                "noisy_training yes belongs to private activation sharing, whose noise layer it is; use method asfl with mech "
                "gaussian or laplace and tail_steps 1 or more"
            )
        if self.updates == "dp-sgd":
            raise ValueError(
                "noisy_training yes with updates dp-sgd: gradients of records would go through noise twice; use updates none or "
                "noisy_training no"
            )


def label_epsilon(labels: str) -> float | None:
    """ε of the label randomiser that `labels` asks for; None for labels in the clear.

    Raises:
        ValueError: for another form, or an ε that is not a finite number above 0.

    Example:
        >>> label_epsilon("randomized:1.5"), label_epsilon("clear")
        (1.5, None)
    """
    if labels == "clear":
        return None
    name, _, text = labels.partition(":")
    try:
        epsilon = float(text)
    except ValueError:
        epsilon = math.nan
    if name != "randomized" or not (math.isfinite(epsilon) and epsilon > 0):
        raise ValueError(f"{labels!r} is unknown; use clear, or randomized:E with ε above 0, e.g. randomized:1")
    return epsilon


def load_config(path: Path | None, *, overrides: Mapping[str, object]) -> SweepConfig:
    """Read a TOML file, put the flags over it, and check everything.

    Args:
        path: TOML file with the fields of `SweepConfig`, or None.
        overrides: Fields given as flags; they win over the file.

    Returns:
        The checked configuration.

    Raises:
        ValueError: An unreadable file, unknown keys, or values that break a rule: one line that names the first.

    Example:
        >>> load_config(None, overrides={"epsilon": ["4", "16"]}).epsilon
        (4.0, 16.0)
    """
    values: dict[str, object] = {}
    if path is not None:
        try:
            values = tomllib.loads(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
            raise ValueError(f"config {path}: {_one_line(error)}; give a readable TOML file") from None
    try:
        return SweepConfig.model_validate({**values, **overrides})
    except ValidationError as error:
        raise ValueError(_first_error(error)) from None


def _first_error(error: ValidationError) -> str:
    """The first thing pydantic found, as one line: field, value, rule, fix."""
    first = error.errors()[0]
    location = first["loc"][0] if first["loc"] else ""
    if first["type"] == "extra_forbidden":
        return f"config key {location!r} is unknown; the valid keys are {', '.join(SweepConfig.model_fields)}"
    if first["type"] == "value_error":
        message = str(first["ctx"]["error"])
        return f"{location} {message}" if location and not message.startswith(str(location)) else message
    field = SweepConfig.model_fields.get(str(location))
    extra = field.json_schema_extra if field is not None else None
    form = extra.get("metavar", "") if isinstance(extra, dict) else ""
    rule = first["msg"][:1].lower() + first["msg"][1:]
    return f"{location} {first['input']!r}: {rule}; give {form}"


def _each_of(values: tuple[str, ...], known: tuple[str, ...], *, may_be_empty: bool = False) -> tuple[str, ...]:
    for value in values if may_be_empty else _not_empty(values):
        if value not in known:
            raise ValueError(f"{value!r} is unknown; use {', '.join(known)}")
    return values


def _not_empty(values: tuple[T, ...]) -> tuple[T, ...]:
    if not values:
        raise ValueError("list is empty; give at least one value")
    return values


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())
