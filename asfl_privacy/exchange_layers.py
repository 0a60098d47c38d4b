"""Exchange layers compared before training: what each would cost and save, and how much of the signal noise would leave."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - torch's own name for it
from torch.utils.flop_counter import FlopCounterMode

from asfl_privacy.cells import Cell
from asfl_privacy.config import SweepConfig
from asfl_privacy.data import Dataset
from asfl_privacy.federated import METHODS, Federation, Privacy, State, build_federation
from asfl_privacy.federated.sharing import label_dtype, plan_head
from asfl_privacy.federated.streams import SERVER, noise_source, torch_stream
from asfl_privacy.mechanisms import (
    ReleasePlan,
    finish_both,
    make_mechanism,
    noised_and_clean,
    release_sensitivity,
)
from asfl_privacy.models import block_names, split_model
from asfl_privacy.models.split import activation_bytes
from asfl_privacy.run import prepare_run, training_settings
from sensitivity import UnsupportedModuleError

NUM_TRIALS = 64
"""Made-up records, drawn uniformly from the input box, that the signal-to-noise ratio is estimated on."""


@dataclass(frozen=True, kw_only=True)
class PrivacyFacts:
    """What a private run would do at an exchange layer, with the initial weights.

    Attributes:
        p: Norm of the input distance.
        q: The mechanism's norm.
        radius: R, or `any`.
        head_sensitivity: Certified bound of how far the activations at the exchange layer can move, in the norm q, for
            inputs within R (any two, where the radius says so); None where the whole head has no certificate.
        placement: Where the noise would sit.
        placement_reason: Why, where `auto` was asked.
        placement_sensitivity: The same bound at the placement, from which the noise is calibrated.
        noise_stddev: σ or √2·b at the placement.
        signal_to_noise: Variance over records of the clean activations at the exchange layer over the mean square of the
            change that noise, clip and lattice make there; an estimate; None where both are 0.
    """

    p: float
    q: float
    radius: float | str
    head_sensitivity: float | None
    placement: str
    placement_reason: str | None
    placement_sensitivity: float
    noise_stddev: float
    signal_to_noise: float | None


@dataclass(frozen=True, kw_only=True)
class LayerFacts:
    """One block at whose end activations could leave.

    Attributes:
        exchange_layer: Name of the block.
        is_automatic: Whether `auto` takes it.
        reason: Why `auto` takes it; None for the others.
        records: Records that a client shares a round, mean over the clients.
        activation_bytes: Of a client and round, mean over the clients, as they are without noise; None where the block
            does not give one tensor with a row a record.
        label_bytes: Likewise.
        model_bytes: Of a client and round, to it and from it, as the method counts them.
        trained_in_tail: Share of the trainable parameters that the tail round trains.
        saved_by_tail: Share of a full step's arithmetic that a tail step saves; None where torch counts none.
        privacy: What a private run would do; None without noise, or where it is refused.
        refused: Why a run that exchanges here is refused, or None.
    """

    exchange_layer: str
    is_automatic: bool
    reason: str | None
    records: float
    activation_bytes: float | None
    label_bytes: float
    model_bytes: int
    trained_in_tail: float
    saved_by_tail: float | None
    privacy: PrivacyFacts | None
    refused: str | None

    @property
    def exchange_to_model(self) -> float | None:
        """Activation and label bytes over model bytes."""
        return None if self.activation_bytes is None else (self.activation_bytes + self.label_bytes) / self.model_bytes

    def to_dict(self) -> dict[str, object]:
        """All figures under flat names; blank privacy where there is none."""
        own = {name: value for name, value in asdict(self).items() if name not in ("privacy", "refused")}
        names = PrivacyFacts.__dataclass_fields__
        private: dict[str, object] = dict.fromkeys(names) if self.privacy is None else asdict(self.privacy)
        return own | {"exchange_to_model": self.exchange_to_model} | private | {"refused": self.refused}


def compare_layers(
    config: SweepConfig,
    cell: Cell,
    *,
    data: Dataset,
    on_layer: Callable[[str], None] = lambda name: None,
) -> tuple[LayerFacts, ...]:
    """Facts about every block at whose end activations could leave, from input to output.

    Args:
        config: The configuration of one run.
        cell: Its cell; its seed gives partition and initial weights.
        data: The data set.
        on_layer: Told of every block before it is looked at.

    Returns:
        One entry a block but the last.

    Raises:
        ValueError: A method that shares no activations, τ' = 0, or what a run refuses at every block alike.

    Guarantee:
        No value of a record enters the figures, and the choice of `auto` needs less: shapes and modules alone. The
        figures rest on shapes, sizes of the clients (public in this setting), initial weights, constants of the data
        set and made-up inputs.

    Edge cases:
        Clients with fewer records than ⌈τ'/2⌉·batch share all they have. With noise at placement `exchange` a payload
        is coded and usually smaller than stated. A filter that holds records back, and failures, are not foreseen.
    """
    if cell.exchange_layer is None or not METHODS[cell.method].shares:
        raise ValueError(
            f"method {cell.method} shares no activations, so it has no exchange layer; use method asfl, or share yes"
        )
    if config.tail_steps == 0:
        raise ValueError("tail_steps 0 exchanges nothing; give tail_steps 2 or more")
    automatic = build_federation(
        data,
        model_name=config.model,
        partition=config.partition,
        settings=training_settings(config, replace(cell, exchange_layer="auto")),
        privacy=None,
    )
    names = block_names(automatic.model)[:-1]
    if cell.exchange_layer != "auto":
        split_model(automatic.model, cell.exchange_layer)  # refuses unknown names
    automatic.load(automatic.initial_weights, training=False)
    sizes = activation_bytes(automatic.model, input_shape=automatic.input_shape)
    found = []
    for name in names:
        on_layer(name)
        here = replace(cell, exchange_layer=name)
        found.append(_facts(config, here, data=data, federation=automatic, size=sizes[name]))
    if all(layer.refused is not None for layer in found):
        raise ValueError(found[0].refused)
    return tuple(found)


def _facts(config: SweepConfig, cell: Cell, *, data: Dataset, federation: Federation, size: int | None) -> LayerFacts:
    """The facts about one block; `federation` is the automatic one, whose clients and model all share."""
    assert cell.exchange_layer is not None
    name, model = cell.exchange_layer, federation.model
    cut = block_names(model).index(name) + 1
    wanted = math.ceil(config.tail_steps / 2) * config.batch_size
    shared = [min(wanted, client.num_records) for client in federation.clients]
    records = sum(shared) / len(shared)
    privacy, refused = None, None
    if size is None:
        refused = f"block {name} does not give one tensor with a row a record, which an exchange sends; cut elsewhere"
    try:
        run = prepare_run(config, cell, data=data)
        if run.privacy is not None and refused is None:
            here = replace(federation, split=split_model(model, name), privacy=run.privacy)
            reasons = [note for note in run.notes if note.startswith("placement ")]
            privacy = privacy_facts(here, run.privacy, reason=reasons[0] if reasons else None)
    except ValueError as error:
        refused = " ".join(str(error).split())
    chosen = name == federation.split.exchange_layer
    start = State(weights=federation.initial_weights)
    method = METHODS[cell.method]
    return LayerFacts(
        exchange_layer=name,
        is_automatic=chosen,
        reason=federation.split.reason if chosen else None,
        records=records,
        activation_bytes=None if size is None else records * size,
        label_bytes=records * label_dtype(data.num_classes).itemsize,
        model_bytes=method.traffic(start, [0], [], federation=federation).model,
        trained_in_tail=_trainable(model[cut:]) / _trainable(model),
        saved_by_tail=None if size is None else saved_by_tail(model, cut=cut, input_shape=federation.input_shape),
        privacy=privacy,
        refused=refused,
    )


def privacy_facts(federation: Federation, privacy: Privacy, *, reason: str | None) -> PrivacyFacts:
    """What a release would be with the initial weights.

    Args:
        federation: Its split gives the head, its seed the made-up inputs and the trial noise.
        privacy: Noise multipliers and placement, from `prepare_run`.
        reason: Why the placement.

    Raises:
        ValueError: What certificate or release refuse.
    """
    federation.load(federation.initial_weights, training=False)
    plan, q = plan_head(federation, privacy), float(make_mechanism(privacy.mechanism, scale=1.0).norm)
    head: float | None
    try:
        head = release_sensitivity(
            federation.head_before_noise(),
            p=privacy.p,
            q=q,
            radius=privacy.radius,
            input_shape=federation.input_shape,
            clip=privacy.clip,
            input_box=federation.data.input_box,
        ).value
    except UnsupportedModuleError:
        head = None
    return PrivacyFacts(
        p=privacy.p,
        q=q,
        radius=privacy.radius,
        head_sensitivity=head,
        placement=privacy.placement,
        placement_reason=reason,
        placement_sensitivity=plan.sensitivity.value,
        noise_stddev=plan.noise_stddev,
        signal_to_noise=signal_to_noise(plan, federation.head_before_noise(), seed=federation.settings.seed),
    )


@torch.no_grad()
def signal_to_noise(plan: ReleasePlan, head: nn.Sequential, *, seed: int) -> float | None:
    """Estimate how much of the exchanged activations a release leaves, on made-up inputs.

    Args:
        plan: From `plan_release` on this head.
        head: Evaluating, on the CPU.
        seed: Of the made-up inputs and the trial noise.

    Returns:
        Mean square of the clean activations over the mean square of released minus clean ones: inf where the release
        changes nothing, None where both are 0.

    Raises:
        ValueError: What a release refuses.

    Guarantee:
        None: real records are not uniform in the box, and weights change with training. It ranks layers of one network;
        it predicts no accuracy.
    """
    generator = torch_stream(seed, round=-1, client=SERVER, purpose="made-up inputs")
    low, high = plan.input_box
    drawn = torch.rand(NUM_TRIALS, *plan.input_shape, generator=generator, dtype=torch.float64)
    parameter = next(head.parameters(), torch.zeros(1))
    inputs = (low + (high - low) * drawn).to(parameter).clamp(low, high)
    source = noise_source(seed=seed, round=-1, client=SERVER, purpose="trial noise")
    released, clean = finish_both(plan, head, *noised_and_clean(plan, head, inputs, source=source))
    signal = float(
        clean.double().var(0).mean()
    )  # what all records have in common, a bias say, does not tell them apart
    noise = float((released.double() - clean.double()).square().mean())
    if noise == 0.0:
        return math.inf if signal > 0.0 else None
    return signal / noise


def saved_by_tail(model: nn.Sequential, *, cut: int, input_shape: tuple[int, ...]) -> float | None:
    """Share of the multiply-adds of a full step, forward and backward, that a step of the tail alone saves.

    Args:
        model: Sequence of blocks.
        cut: Number of blocks in the head.
        input_shape: Shape of one record.

    Returns:
        Between 0 and 1, from products and convolutions that run (`torch.utils.flop_counter`); None where a full step has
        none. The head's forward passes for the exchange are not taken off.

    Example:
        >>> net = nn.Sequential(nn.Linear(30, 20), nn.Linear(20, 10))
        >>> saved_by_tail(net, cut=1, input_shape=(30,))  # 1 − 2·200 / (2·600 + 3·200)
        0.7777777777777778
    """
    inputs = torch.zeros(2, *input_shape)
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        activations = model[:cut](inputs.clone())
    full = _step_operations(model, inputs)
    return 1.0 - _step_operations(model[cut:], activations) / full if full else None


def _step_operations(network: nn.Module, inputs: Tensor) -> int:
    """Arithmetic of one step on a batch: outputs, and the gradient of what is trained."""
    trained = [parameter for parameter in network.parameters() if parameter.requires_grad]
    if not trained:
        return 0
    labels = torch.zeros(len(inputs), dtype=torch.int64)
    with torch.random.fork_rng(devices=[]), FlopCounterMode(display=False) as counter:
        loss = F.cross_entropy(network(inputs.clone()), labels)
        torch.autograd.grad(loss, trained, allow_unused=True)
    return int(counter.get_total_flops())


def _trainable(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters() if parameter.requires_grad)
