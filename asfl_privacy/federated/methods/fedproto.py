"""FedProto: clients share class prototypes and keep their networks to themselves (Tan et al. 2022)."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from asfl_privacy.federated.federation import Federation
from asfl_privacy.federated.methods.local_method import LocalMethod
from asfl_privacy.federated.phases import Delivery, Stage, State, Steps, Traffic, Update
from asfl_privacy.federated.private_updates import trained_names
from asfl_privacy.federated.sharing import label_dtype
from asfl_privacy.federated.steps import Objective
from asfl_privacy.federated.weights import Weights
from asfl_privacy.mechanisms import ReleasePlan
from asfl_privacy.mechanisms.guards import is_finite
from asfl_privacy.mechanisms.plain_modules import is_plain
from asfl_privacy.models import OWN_LAYERS

OWN = "weights."
"""What the name of each entry of a client's own network begins with in the client's state."""
MEAN, COUNT = "prototype.mean", "prototype.count"
"""In a client's state: its class means of h, shape (k, d), zero where it has no record, and how many records, (k,)."""
GLOBAL, KNOWN, SENT = "prototype.global", "prototype.known", "prototype.sent"
"""In the server's: global prototypes, shape (k, d), zero where there is none, which there are, and which of them went
down to the round's cohort, shape (k,)."""

BATCH_SIZE = 1024
"""Records of the frozen passes at a time."""


@dataclass(frozen=True)
class FedProto(LocalMethod):
    """Each client trains a network of its own on CE + λ·mean((h(x) − C̄^(y))²); the server averages class means of h.

    h is the input of the last block, d numbers a record. The mean runs over the b·d numbers of a mini-batch, and a record
    whose class has no global prototype adds 0 to it: nothing is ever pulled to zero. After its steps a client computes its
    class means with the network frozen, in evaluation mode, over all its own records. Averages are over the round's cohort:
    weighted by class counts, or each client that has the class alike. A class that nobody in the cohort has keeps its
    former prototype: that is the last word of the clients who have the class, and without it they would be pulled nowhere
    whenever the others were sampled. All networks begin with the federation's initial weights.

    Guarantee:
        Nothing of a network leaves its client, and `state.weights` stay the initial weights. With λ = 0 the run is N
        independent ones, bit for bit. A round sends, in bytes, with s for the bytes of one number of h, l for those of a
        label (1 up to 256 classes, 4 beyond) and 4 for a count,
        Σ_{i∈S} [ k_i·(d·s + l + 4) + k_known·(d·s + l) ], k_i the classes that client i has and k_known the global
        prototypes at the beginning of the round; clients that fail count as if they had answered.

    Source:
        Tan, Long, Liu, Zhou, Lu, Jiang & Zhang 2022, `FedProto: Federated prototype learning across heterogeneous clients`,
        Algorithm 1. The weighted mean is its aggregation step without the factor 1/|N_j|, which divides a second time and
        would shrink a mean over several clients; the unweighted mean, and the distance record by record in place of that
        of a mini-batch's class means, are those of the authors' code.
    """

    name: str = "fedproto"

    def __post_init__(self) -> None:
        """Refuse sharing."""
        if self.shares:
            raise ValueError(
                f"method {self.name} shares activations: each of its clients has a head of its own, whose activations mean "
                "nothing to another client's tail; use fedproto alone, or asfl"
            )

    @property
    def in_the_clear(self) -> str:
        """See `LocalMethod`."""
        return "class prototypes"

    @property
    def exposes_records(self) -> bool:
        """They do: the prototype of a class of one record is h of that record."""
        return True

    @property
    def has_global_network(self) -> bool:
        """It has none."""
        return False

    def prepare(self, state: State, *, federation: Federation, round: int) -> ReleasePlan | None:
        """Nothing is released with noise.

        Raises:
            ValueError: A private run, or options out of range.
        """
        options = federation.settings.options
        if federation.privacy is not None:
            raise ValueError(
                f"method {self.name} in a private run: its clients send {self.in_the_clear}, which nothing noises, so no "
                "guarantee would hold; use method asfl or fedavg, or mech none with updates none"
            )
        if not 0.0 <= options.prototype_weight < math.inf:
            raise ValueError(f"prototype_weight {options.prototype_weight} must be a finite number ≥ 0; give 1, say")
        if options.prototype_mean not in ("weighted", "unweighted"):
            raise ValueError(f"prototype_mean {options.prototype_mean!r} is unknown; use weighted or unweighted")
        return None

    def start(self, state: State, client: int) -> Weights:
        """The client's own network; the initial one where it was never sampled."""
        kept = state.clients.get(client, {})
        return {name.removeprefix(OWN): value for name, value in kept.items() if name.startswith(OWN)} or state.weights

    def full_stage(self, plain: Stage, state: State, client: int, *, federation: Federation) -> Stage:
        """Full steps that also pull h to the global prototypes, where there are any."""
        weight = federation.settings.options.prototype_weight
        if weight == 0.0 or GLOBAL not in state.server:
            return replace(plain, objective=_no_pull)  # said all the same: steps of other objectives are not batched
        return replace(plain, objective=pull(state.server[GLOBAL], state.server[KNOWN], weight=weight))

    def finish(
        self, update: Update, state: State, client: int, *, steps: Sequence[Steps], federation: Federation, round: int
    ) -> Update:
        """The client keeps its network, and beside it the prototypes, of which the server reads no more than those."""
        for name in trained_names(federation.model):
            if not is_finite(update.weights[name]):
                raise ValueError(f"weights {name} are not finite after local steps: training diverged; lower lr")
        mean, count = class_means(update.weights, client, federation=federation)
        if not is_finite(mean):
            raise ValueError("prototypes are not finite: training diverged; lower lr")
        kept = {OWN + name: value for name, value in update.weights.items()}
        return replace(update, weights={}, client_state={**kept, MEAN: mean, COUNT: count})

    def aggregate(self, state: State, updates: Mapping[int, Update], *, federation: Federation, round: int) -> State:
        """The mean of the cohort's prototypes, class by class, in float64 and in client order."""
        states = [_kept(updates[client]) for client in sorted(updates)]
        means_SKD = torch.stack([kept[MEAN] for kept in states]).double()
        counts_SK = torch.stack([kept[COUNT] for kept in states])
        is_weighted = federation.settings.options.prototype_mean == "weighted"
        shares_SK = (counts_SK if is_weighted else counts_SK > 0).double()
        total = shares_SK.sum(0)
        found = total > 0
        mean = (shares_SK.unsqueeze(2) * means_SKD).sum(0) / total.clamp(min=1.0).unsqueeze(1)
        mean = mean.to(states[0][MEAN].dtype)
        before = state.server.get(KNOWN, torch.zeros_like(found))
        former = state.server.get(GLOBAL, torch.zeros_like(mean))
        server = {GLOBAL: torch.where(found.unsqueeze(1), mean, former), KNOWN: before | found, SENT: before}
        return replace(state, server={**state.server, **server})

    def traffic(
        self, state: State, cohort: Sequence[int], deliveries: Sequence[Delivery], *, federation: Federation
    ) -> Traffic:
        """Prototypes up and down, by the formula above; no weights."""
        prototypes, sent = state.server[GLOBAL], int(state.server[SENT].sum())
        row = prototypes.shape[1] * prototypes.element_size() + label_dtype(federation.data.num_classes).itemsize
        counts = (_class_counts(federation.clients[client].labels, federation=federation) for client in cohort)
        owned = sum(int(count.count_nonzero()) for count in counts)
        return Traffic(model=owned * (row + torch.int32.itemsize) + len(cohort) * sent * row)

    @torch.no_grad()
    def measures(self, state: State, *, federation: Federation) -> dict[str, float]:
        """Means over all N clients of each one's accuracy on test records, weighted to its own classes.

        A client's accuracy is Σ_c n_c·a_c / Σ_c n_c over the classes c that have test records, n_c its training records of
        class c and a_c the share of the test records of c that are right: that of records drawn as its own are. One that
        was never sampled counts with the initial network; one without any class that is tested is left out.

        Returns:
            personal_accuracy, of its own network's logits; prototype_accuracy_local, of the global prototype of its own
            classes that is nearest to h (Euclidean); prototype_accuracy_all, of the nearest of all. A record of a class
            without a global prototype is wrong there.

        Raises:
            ValueError: No client has a class that is tested.
        """
        inputs, labels = federation.data.test_inputs, federation.data.test_labels.to(federation.device)
        known, prototypes = state.server[KNOWN], state.server[GLOBAL]
        untrained: tuple[Tensor, Tensor] | None = None
        found: list[tuple[float, float, float]] = []
        for client in range(len(federation.clients)):
            counts = _class_counts(federation.clients[client].labels, federation=federation)
            rows = torch.nonzero(counts[labels]).flatten()  # the others have weight 0
            if not len(rows):
                continue
            own = self.start(state, client)
            if own is state.weights:
                if untrained is None:
                    untrained = frozen_pass(own, inputs, federation=federation)
                features, logits = (values[rows] for values in untrained)
            else:
                features, logits = frozen_pass(own, inputs[rows.to(inputs.device)], federation=federation)
            named = (
                logits.argmax(1),
                nearest(features, prototypes, among=known & (counts > 0)),
                nearest(features, prototypes, among=known),
            )
            right = [_weighted_accuracy(name == labels[rows], labels[rows], counts=counts) for name in named]
            found.append((right[0], right[1], right[2]))
        if not found:
            raise ValueError(
                "no client has a record of any class among the test records, so there is nothing to measure; give test "
                "records of the classes that are trained"
            )
        names = ("personal_accuracy", "prototype_accuracy_local", "prototype_accuracy_all")
        return {name: sum(values) / len(found) for name, values in zip(names, zip(*found, strict=True), strict=True)}


def pull(prototypes: Tensor, known: Tensor, *, weight: float) -> Objective:
    """λ times the mean squared distance of h to the global prototype of each record's class.

    Args:
        prototypes: C̄, shape (k, d).
        known: Which there are, shape (k,).
        weight: λ.

    Returns:
        The objective.

    Guarantee:
        A record of a class that is not known adds 0 to the mean over the b·d numbers of the mini-batch, and no gradient.

    Example:
        >>> network = nn.Sequential(nn.Identity(), nn.Linear(2, 2))
        >>> objective = pull(torch.tensor([[1.0, 1.0], [0.0, 0.0]]), torch.tensor([True, False]), weight=2.0)
        >>> float(objective(network, torch.tensor([[3.0, 1.0], [5.0, 5.0]]), torch.tensor([0, 1]))[1].detach())
        2.0
    """

    def objective(network: nn.Module, inputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        *body, last = _blocks(network)
        features = inputs
        for block in body:
            features = block(features)
        # before the last block runs, which may work in place
        gap = (features.flatten(1).to(prototypes.dtype) - prototypes[labels]) * known[labels].unsqueeze(1)
        extra = weight * gap.square().mean()
        return last(features), extra

    return objective


def _no_pull(network: nn.Module, inputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """The plain loss: adding 0 changes no bit of it, nor of its gradient."""
    return network(inputs), torch.zeros((), device=inputs.device)


@torch.no_grad()
def class_means(weights: Weights, client: int, *, federation: Federation) -> tuple[Tensor, Tensor]:
    """A client's prototypes and class counts under a network.

    Args:
        weights: The network's.
        client: Client number.
        federation: The federation; its scratch network is changed.

    Returns:
        Means of h, shape (k, d), zero for a class without records, in the type of h; counts, int32, shape (k,).
    """
    holder = federation.clients[client]
    features, _ = frozen_pass(weights, holder.inputs, federation=federation)
    counts = _class_counts(holder.labels, federation=federation)
    means = torch.zeros((len(counts), features.shape[1]), dtype=features.dtype, device=features.device)
    for label in counts.nonzero().flatten().tolist():
        means[label] = features[holder.labels == label].double().mean(0).to(means.dtype)
    return means, counts.to(torch.int32)


@torch.no_grad()
def frozen_pass(weights: Weights, inputs: Tensor, *, federation: Federation) -> tuple[Tensor, Tensor]:
    """h, shape (n, d), and logits, shape (n, k), of the network in evaluation mode; the scratch network is changed."""
    federation.load(weights, training=False)
    # what a block may keep of one pass must not show in another client's
    network = federation.model if is_plain(federation.model, also=OWN_LAYERS) else copy.deepcopy(federation.model)
    *body, last = _blocks(network)
    features, logits = [], []
    for batch in torch.split(inputs, BATCH_SIZE):
        values = batch.to(federation.device, copy=True)  # a block may work in place
        for block in body:
            values = block(values)
        features.append(values.flatten(1).clone())
        logits.append(last(values))
    return torch.cat(features), torch.cat(logits)


def nearest(features: Tensor, prototypes: Tensor, *, among: Tensor) -> Tensor:
    """The class of the nearest prototype, Euclidean, the lowest of equally near ones; −1 where there is none.

    Args:
        features: Shape (n, d).
        prototypes: Shape (k, d).
        among: Which classes may be named, shape (k,).

    Example:
        >>> points, prototypes = torch.tensor([[0.0, 2.0], [3.0, 0.0]]), torch.tensor([[0.0, 0.0], [0.0, 3.0], [3.0, 0.0]])
        >>> nearest(points, prototypes, among=torch.tensor([True, True, False])).tolist()
        [1, 0]
    """
    if not bool(among.any()):
        return torch.full((len(features),), -1, device=features.device)
    wide = prototypes.double()
    # ‖h − C‖² = ‖h‖² + ‖C‖² − 2⟨h, C⟩, and ‖h‖² is the same for all classes
    gaps = wide.square().sum(1) - 2.0 * features.double() @ wide.T
    return gaps.masked_fill(~among, math.inf).argmin(1)


def _blocks(network: nn.Module) -> Iterator[nn.Module]:
    """The blocks in order; one that stands in several places, in each."""
    assert isinstance(network, nn.Sequential)  # the model is one, and without sharing no other network is trained
    return itertools.chain(network)


def _class_counts(labels: Tensor, *, federation: Federation) -> Tensor:
    return torch.bincount(labels, minlength=federation.data.num_classes)


def _weighted_accuracy(right: Tensor, labels: Tensor, *, counts: Tensor) -> float:
    """Σ_c n_c·a_c / Σ_c n_c over the classes among the labels, all of which have n_c > 0."""
    tested: list[int] = torch.bincount(labels, minlength=len(counts)).tolist()
    correct: list[int] = torch.bincount(labels[right], minlength=len(counts)).tolist()
    own: list[int] = counts.tolist()
    classes = [c for c, number in enumerate(tested) if number]
    return sum(own[c] * correct[c] / tested[c] for c in classes) / sum(own[c] for c in classes)


def _kept(update: Update) -> Mapping[str, Tensor]:
    assert update.client_state is not None  # finish gave it
    return update.client_state
