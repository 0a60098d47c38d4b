"""The networks of the paper's recipes train, exchange and are certified like the small ones; batch norm stays in the tail."""

import math

import numpy as np
import pytest
import torch
from federations import gaussian, make_federation

import sensitivity
from asfl_privacy.accounting import Ledger
from asfl_privacy.data import make_dataset
from asfl_privacy.execution import run_serially
from asfl_privacy.federated import METHODS, State
from asfl_privacy.federated.batching_support import supports_batching
from asfl_privacy.federated.methods.fedavg import FedAvg
from asfl_privacy.federated.private_steps import check_private_network
from asfl_privacy.federated.steps import Pool
from asfl_privacy.mechanisms.plain_modules import is_plain
from asfl_privacy.models import NETS, OWN_LAYERS, block_names, build_model, split_model

TINY = {"clients": 2, "cohort": 2, "rounds": 1, "tail_steps": 2, "full_steps": 1, "batch_size": 2, "partition": "iid"}
DEEP = ["resnet20", "vgg11"]


def images(*, side=32, count=8, channels=3):
    rng = np.random.default_rng(0)
    inputs, labels = rng.random((count, channels, side, side)), np.arange(count) % 4
    groups = np.arange(count) // 5
    return make_dataset("images", train=(inputs, labels), test=(inputs[:2], labels[:2]), train_groups=groups)


@pytest.mark.parametrize("name", DEEP)
@pytest.mark.parametrize(("channels", "side"), [(3, 32), (1, 28)])
def test_every_block_can_end_the_head_and_nothing_is_lost(name, channels, side):
    data = images(side=side, channels=channels)
    model = build_model(name, data=data, seed=0)
    x = data.train_inputs[:2]
    whole = model(x)
    for block in block_names(model)[:-1]:
        split = split_model(model, block)
        assert torch.equal(split.tail(split.head(x)), whole)


@pytest.mark.parametrize("name", DEEP)
def test_a_round_of_asfl_without_noise_trains_every_layer_on_eight_records(name):
    """Catches a block without a path for the gradient: the shortcut alone would carry the rest."""
    federation = make_federation(images(), model_name=name, exchange_layer="auto", **TINY)
    result = run_serially(federation, METHODS["asfl"], ledger=None)
    before, after = federation.initial_weights, result.state.weights
    trained = [key for key, _ in federation.model.named_parameters()]
    assert all(not torch.equal(before[key], after[key]) for key in trained)
    assert all(torch.isfinite(value).all() for value in after.values())


class Watched(FedAvg):
    """FedAvg that keeps what the clients sent."""

    def aggregate(self, state, updates, *, federation, round):
        object.__setattr__(self, "sent", {client: update.weights for client, update in updates.items()})
        return super().aggregate(state, updates, federation=federation, round=round)


@pytest.mark.parametrize("name", ["resnet20-bn", "vgg11-bn"])
def test_running_statistics_are_averaged_and_counters_stay_whole(name):
    """(5·a + 3·b)/8 by hand. Catches statistics of one client, or of the start, and counters that became floats."""
    federation = make_federation(
        images(), model_name=name, exchange_layer="normalize", **TINY | {"partition": "natural"}
    )
    five, three = sorted((0, 1), key=lambda client: -federation.clients[client].num_records)
    assert [federation.clients[client].num_records for client in (five, three)] == [5, 3]
    method = Watched()
    after = run_serially(federation, method, ledger=None).state.weights
    num_steps = TINY["tail_steps"] + TINY["full_steps"]
    norms = [key.removesuffix("running_mean") for key in after if key.endswith("running_mean")]
    assert len(norms) == (19 if name == "resnet20-bn" else 8)
    for norm in norms:
        assert after[f"{norm}num_batches_tracked"].dtype == torch.int64
        assert after[f"{norm}num_batches_tracked"].item() == num_steps
        for part in ("running_mean", "running_var"):
            one, other = (method.sent[client][norm + part] for client in (five, three))
            assert not torch.equal(one, other)
            assert torch.allclose(after[norm + part], (5 * one + 3 * other) / 8, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["resnet20-bn", "vgg11-bn"])
def test_no_head_may_hold_batch_norm(name):
    """In private runs as in others. Catches a norm that is refused in some blocks alone."""
    model = build_model(name, data=images(), seed=0)
    first, *later = block_names(model)[:-1]
    assert split_model(model, first).exchange_layer == "normalize"
    for block in [*later, "auto"]:
        with pytest.raises(ValueError, match="is BatchNorm2d in train mode: its output mixes records"):
            split_model(model, block, input_shape=(3, 32, 32))
    with pytest.raises(ValueError, match="is BatchNorm2d in train mode: its output mixes records"):
        make_federation(images(), model_name=name, privacy=gaussian(), **TINY | {"exchange_layer": later[0]})


@pytest.mark.parametrize("name", DEEP)
@pytest.mark.parametrize("placement", ["input", "exchange"])
def test_a_head_with_group_norm_is_certified_and_its_releases_counted(name, placement):
    """Behind group norm the certificate is large, 1/√ε = 316 a norm, but it is one."""
    federation = make_federation(
        images(), model_name=name, privacy=gaussian(placement=placement), **TINY | {"exchange_layer": "conv1"}
    )
    plan = METHODS["asfl"].prepare(State(weights=federation.initial_weights), federation=federation, round=0)
    assert math.isfinite(plan.sensitivity.value)
    assert plan.sensitivity.value >= (1.0 if placement == "input" else 100.0)
    ledger = Ledger(p=2.0, radius=1.0)
    run_serially(federation, METHODS["asfl"], ledger=ledger)
    assert ledger.epsilon(delta=1e-5).high > 0.0


def test_no_pair_of_images_exceeds_the_certificate_of_a_block_that_changes_the_shape():
    """A search beside the proof, over a shortcut that takes every other pixel and pads channels."""
    torch.manual_seed(0)
    net = NETS["resnet20"](input_shape=(1, 6, 6), num_classes=4, mean=(0.5,), std=(0.5,))
    block = net.get_submodule("block4").eval()
    shape = (16, 6, 6)
    certificate = sensitivity.certify(block, p=2, q=2, input_shape=shape, method="fast")
    found = sensitivity.lower_bound(block, p=2, q=2, input_shape=shape)
    assert 0.0 < found.value <= certificate.value


def pool(count=6, side=8):
    generator = torch.Generator().manual_seed(0)
    return Pool(inputs=torch.rand((count, 1, side, side), generator=generator), labels=torch.arange(count) % 4)


def small(name, side=8):
    return NETS[name](input_shape=(1, side, side), num_classes=4, mean=(0.5,), std=(0.5,)).train()


def test_each_record_has_a_gradient_of_its_own_behind_group_norm_alone():
    """What DP-SGD needs; the check compares Opacus with one record after the other."""
    check_private_network(small("resnet20"), pool())
    with pytest.raises(ValueError, match="BatchNorm2d in train mode: its output mixes records"):
        check_private_network(small("resnet20-bn"), pool())


def test_many_clients_train_at_once_as_one_after_the_other():
    """A trial in float64 within `supports_batching`; residual blocks go through vmap there."""
    assert supports_batching(small("resnet20"), pool()) is None


@pytest.mark.parametrize("name", sorted(NETS))
def test_built_in_networks_are_known_to_keep_nothing(name):
    """Catches a layer of ours that is missing in OWN_LAYERS: evaluation would run on one thread."""
    side = 32 if name.startswith("vgg") else 8
    assert is_plain(small(name, side), also=OWN_LAYERS)
