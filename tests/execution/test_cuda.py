"""A GPU trains what the CPU trains, and what is private is computed as on the CPU; what needs no GPU runs everywhere."""

import math
from dataclasses import replace

import pytest
import torch
from federations import few_records, gaussian, make_federation, make_tiny
from torch import nn

import sensitivity
from asfl_privacy.accounting import Ledger
from asfl_privacy.execution import begin_run, run_rounds
from asfl_privacy.execution.checkpoint import read_checkpoint, write_checkpoint
from asfl_privacy.execution.choice import choose_executor, make_executor
from asfl_privacy.execution.client_work import collect_one, repeatable_kernels
from asfl_privacy.federated import METHODS, State, build_federation
from asfl_privacy.federated.batched_steps import batch_network, run_steps_batched
from asfl_privacy.federated.local_training import _put_channels_last, own_records
from asfl_privacy.federated.private_updates import noised_sum
from asfl_privacy.federated.sharing import NOISED_INPUTS, plan_sharing
from asfl_privacy.federated.steps import Rule, run_steps
from asfl_privacy.federated.streams import numpy_stream
from asfl_privacy.mechanisms import Gaussian, NoiseLayer, add_noise, apply_release, finish_release, plan_release
from asfl_privacy.mechanisms.lattice import SeededSource

GPU = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
DEVICES = ["cpu", pytest.param("cuda", marks=GPU)]


def cuda(test):
    """Mark a test that needs a GPU."""
    for mark in GPU:
        test = mark(test)
    return test


@pytest.fixture
def full_precision():
    """Without TF32, so that only the order of sums differs from the CPU's."""
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cudnn.allow_tf32 = before


SETTINGS = {
    "clean, an odd cohort": {"cohort": 5},
    "noise at the input": {"privacy": gaussian()},
    "noise at the exchange": {"privacy": gaussian(placement="exchange")},
    "noise kept, labels, updates": {
        "privacy": gaussian(
            noise="once", label_epsilon=2.0, updates="dp-fedavg", update_multiplier=4.0, update_clip=0.002
        )
    },
    "small pools": {"clients": 40, "batch_size": 64, "partition": "dirichlet:0.2"},
}


def federation_on(device, digits, setting="clean, an odd cohort", *, double=False, **changes):
    """The federation of `make_federation`, on a device."""
    asked = {**SETTINGS[setting], **changes}
    names = {"model_name": asked.get("model_name", "small-cnn"), "partition": asked.get("partition", "dirichlet:0.5")}
    plain = make_federation(digits, **asked)
    data = digits
    if double:
        data = replace(digits, train_inputs=digits.train_inputs.double(), test_inputs=digits.test_inputs.double())
    made = build_federation(data, settings=plain.settings, privacy=plain.privacy, device=device, **names)
    if double:
        made.model.double()
        weights = {n: v.double() if v.is_floating_point() else v for n, v in made.initial_weights.items()}
        made = replace(made, initial_weights=weights)
    return made


def run_of(federation, method="asfl", executor="serial", *, start=None, after_round=lambda progress: None, **options):
    privacy = federation.privacy
    ledger = None if privacy is None else Ledger(p=privacy.p, radius=privacy.radius)
    start = begin_run(federation, ledger=ledger) if start is None else start
    with make_executor(executor, federation, METHODS[method], **options) as running:
        return run_rounds(federation, METHODS[method], executor=running, start=start, after_round=after_round)


def assert_close(first, second, *, tolerance):
    for name, value in first.state.weights.items():
        difference = float((value.cpu().double() - second.state.weights[name].cpu().double()).norm())
        assert difference <= tolerance * float(value.double().norm()), (name, difference)


def assert_same_bits(first, second):
    assert list(first.state.weights) == list(second.state.weights)
    for name, value in first.state.weights.items():
        assert torch.equal(value, second.state.weights[name]), name
    assert first.ledger == second.ledger


# ---- mixed precision and TF32 never reach what is private


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("placement", ["input", "exchange"])
def test_nothing_is_certified_or_released_within_autocast(device, placement):
    """Catches: a release whose head ran in half precision, which no certificate covers. Not one word is drawn."""

    class Counting:
        drawn = 0

        def words(self, count):
            self.drawn += count
            return SeededSource(b"count").words(count)

    head = nn.Sequential(nn.Flatten(), nn.Linear(16, 4), nn.ReLU()).eval()
    facts = {"mechanism": "gaussian", "noise_multiplier": 2.0, "p": 2, "radius": 0.5, "input_shape": (1, 4, 4)}
    plan, inputs, source = plan_release(head, placement=placement, **facts), torch.rand(3, 1, 4, 4), Counting()
    noised = add_noise(plan, head, inputs, source=SeededSource(b"outside"))
    if placement == "input":  # what is noised there may lie on the GPU
        head, inputs, noised = head.to(device), inputs.to(device), noised.to(device)
    elif device == "cuda":
        pytest.skip("what runs before the noise runs on the CPU")
    with torch.autocast(device, dtype=torch.bfloat16):
        with pytest.raises(ValueError, match="autocast"):
            sensitivity.certify(head, p=2, q=2, input_shape=(1, 4, 4))
        for release in (add_noise, apply_release):
            with pytest.raises(ValueError, match="autocast"):
                release(plan, head, inputs, source=source)
        with pytest.raises(ValueError, match=r"autocast|bfloat16"):
            finish_release(plan, head, noised)
        with pytest.raises(ValueError, match="autocast"):
            NoiseLayer(Gaussian(noise_stddev=1.0))(inputs)
        if placement == "exchange":
            with pytest.raises(ValueError, match="autocast"):
                plan_release(head, placement=placement, **facts)
    assert source.drawn == 0


@pytest.mark.parametrize("device", DEVICES)
def test_noised_updates_are_clipped_in_float64_within_autocast_too(device):
    """Catches: norms of clipped rows in half precision, by which a row would be longer than C."""
    rows = torch.randn(5, 40, generator=torch.Generator().manual_seed(0)).to(device)
    plain = noised_sum(rows, clip=0.5, add_noise=lambda total: total)
    with torch.autocast(device, dtype=torch.bfloat16):
        within = noised_sum(rows, clip=0.5, add_noise=lambda total: total)
    assert plain.dtype == within.dtype == torch.float64
    assert torch.equal(plain, within)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("placement", ["input", "exchange"])
def test_bfloat16_training_releases_what_float32_training_does(digits, device, placement):
    """The same certificate, scale and payload to the bit; catches autocast around the collect phase."""
    released = []
    for precision in ("float32", "bfloat16"):
        federation = federation_on(
            device, digits, "noise at the exchange", precision=precision, privacy=gaussian(placement=placement)
        )
        state, method = State(weights=federation.initial_weights), METHODS["asfl"]
        plan = method.prepare(state, federation=federation, round=0)
        done = collect_one(method, state, 1, federation=federation, plan=plan, remaining=None, round=0)
        assert done.payload.activations.dtype == torch.float32
        assert done.payload.activations.device.type == device
        released.append((plan.scale, plan.sensitivity.value, done.payload))
    (scale, moved, first), (other_scale, other_moved, second) = released
    assert (scale, moved) == (other_scale, other_moved)
    assert torch.equal(first.activations, second.activations)


@cuda
def test_with_tf32_on_the_certificate_and_the_release_are_those_of_the_cpu(digits):
    """Scale, kept noise and released lattice values to the bit, with torch's default of TF32 convolutions; catches a head
    that runs on the GPU before the noise, where TF32 and Winograd round beyond what the sensitivity allows."""
    assert torch.backends.cudnn.allow_tf32
    for setting in ("noise at the exchange", "noise kept, labels, updates"):
        found = {}
        for device in ("cpu", "cuda"):
            federation = federation_on(device, digits, setting)
            state, method = State(weights=federation.initial_weights), METHODS["asfl"]
            plan = method.prepare(state, federation=federation, round=0)
            done = collect_one(method, state, 1, federation=federation, plan=plan, remaining=None, round=0)
            found[device] = plan, done
        (plan, here), (far_plan, there) = found["cpu"], found["cuda"]
        assert (plan.scale, plan.sensitivity.value) == (far_plan.scale, far_plan.sensitivity.value)
        assert plan.whole_record_multiplier == far_plan.whole_record_multiplier
        assert there.payload.activations.device.type == "cuda"
        if plan.placement == "exchange":
            cells = there.payload.activations.cpu().double() / plan.payload_spacing
            assert torch.equal(cells, cells.round())
            assert torch.equal(here.payload.activations, there.payload.activations.cpu())
        else:
            assert torch.equal(here.client_state[NOISED_INPUTS], there.client_state[NOISED_INPUTS].cpu())
            assert torch.equal(here.payload.labels, there.payload.labels.cpu())


@cuda
def test_a_certificate_of_a_head_on_the_gpu_is_that_of_its_copy_on_the_cpu(digits, full_precision):
    federation = federation_on("cpu", digits)
    federation.load(federation.initial_weights, training=False)
    here = sensitivity.certify(federation.split.head, p=2, q=2, input_shape=(1, 8, 8), input_box=(0.0, 1.0))
    there = sensitivity.certify(federation.split.head.cuda(), p=2, q=2, input_shape=(1, 8, 8), input_box=(0.0, 1.0))
    assert there.value >= here.value * (1.0 - 1e-12)
    assert there.map(0.5) == pytest.approx(here.map(0.5), rel=1e-9)


@cuda
def test_noise_on_gpu_tensors_is_the_noise_on_cpu_tensors():
    """From one source both give the same lattice values; catches draws from the GPU's own generator."""
    head = nn.Sequential(nn.Flatten(), nn.Linear(16, 4)).eval()
    inputs = torch.rand(3, 1, 4, 4, generator=torch.Generator().manual_seed(0))
    facts = {"mechanism": "gaussian", "noise_multiplier": 2.0, "p": 2, "radius": 0.5, "input_shape": (1, 4, 4)}
    plan = plan_release(head, placement="input", **facts)
    here = add_noise(plan, head, inputs, source=SeededSource(b"one"))
    there = add_noise(plan, head.cuda(), inputs.cuda(), source=SeededSource(b"one"))
    assert there.device.type == "cuda"
    assert torch.equal(here, there.cpu())
    layers = [NoiseLayer(Gaussian(noise_stddev=1.0), generator=torch.Generator().manual_seed(3)) for _ in range(2)]
    assert torch.equal(layers[0](inputs), layers[1](inputs.cuda()).cpu())


# ---- a GPU trains what the CPU trains


@cuda
@pytest.mark.parametrize("executor", ["serial", "batched"])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("setting", SETTINGS)
def test_a_run_on_the_gpu_is_that_of_the_cpu_but_for_rounding(digits, full_precision, setting, method, executor):
    here = run_of(federation_on("cpu", digits, setting), method, executor)
    there = run_of(federation_on("cuda", digits, setting), method, executor)
    assert all(value.device.type == "cuda" for value in there.state.weights.values())
    assert_close(here, there, tolerance=1e-3)
    if here.ledger is not None and setting == "noise at the exchange":  # the bound follows the head to its last digit
        assert here.ledger.counts == there.ledger.counts
        spent = [one.ledger.epsilon(delta=1e-5, distance=math.inf).high for one in (here, there)]
        assert spent[0] == pytest.approx(spent[1], rel=1e-3)
    else:
        assert here.ledger == there.ledger
    for name in ("drawn", "drawn_remote", "held_back", "rounds_done"):
        assert getattr(here, name) == getattr(there, name), name
    for mine, other in zip(here.evaluations, there.evaluations, strict=True):
        assert abs(mine.accuracy - other.accuracy) <= 3 / len(digits.test_labels)
        assert mine.loss == pytest.approx(other.loss, rel=1e-3)


@cuda
@pytest.mark.parametrize("executor", ["serial", "batched"])
@pytest.mark.parametrize("setting", ["clean, an odd cohort", "small pools"])
def test_in_float64_it_is_the_same_run_to_1e_11(digits, setting, executor):
    """Catches a wrong step that float32 hides: channels last, masks, indices copied too late."""
    here, there = (
        run_of(federation_on(device, digits, setting, double=True), "asfl", executor) for device in ("cpu", "cuda")
    )
    assert next(iter(there.state.weights.values())).dtype == torch.float64
    assert_close(here, there, tolerance=1e-11)


@cuda
@pytest.mark.parametrize(
    ("executor", "model"),
    [("serial", "small-cnn"), ("serial", "own_nets:norm_and_dropout"), ("batched", "small-cnn"), ("batched", "lenet")],
)
def test_the_same_seed_gives_the_same_bits_on_the_same_gpu(digits, executor, model):
    """Catches kernels that add up in an order left to chance, and dropout that nobody seeds; torch's generators stay."""
    named = {"model_name": model, "exchange_layer": "head" if ":" in model else "conv2", "partition": "iid"}
    torch.cuda.manual_seed(5)
    before = torch.cuda.get_rng_state()
    runs = [run_of(federation_on("cuda", digits, **named), "asfl", executor) for _ in range(2)]
    assert_same_bits(*runs)
    assert torch.equal(before, torch.cuda.get_rng_state())


@cuda
@pytest.mark.parametrize("executor", ["serial", "batched"])
def test_bfloat16_trains_float32_weights_near_those_of_float32(digits, executor):
    plain, mixed = (
        run_of(federation_on("cuda", digits, precision=name), "asfl", executor) for name in ("float32", "bfloat16")
    )
    vectors = []
    for run in (plain, mixed):
        assert all(value.dtype == torch.float32 for value in run.state.weights.values())
        vectors.append(torch.cat([value.double().flatten() for value in run.state.weights.values()]))
    difference = float((vectors[0] - vectors[1]).norm() / vectors[0].norm())
    assert 0.0 < difference < 0.05  # 0 would say that nothing ran in bfloat16


@cuda
def test_compiled_with_cuda_graphs_it_is_the_run_without_but_for_rounding(digits, full_precision):
    named = {"partition": "iid", "batch_size": 16}
    plain = run_of(federation_on("cuda", digits, **named), "asfl", "batched")
    compiled = run_of(federation_on("cuda", digits, **named), "asfl", "batched", compile=True)
    assert_close(plain, compiled, tolerance=1e-3)


@cuda
@pytest.mark.parametrize("setting", ["clean, an odd cohort", "noise kept, labels, updates"])
def test_a_checkpoint_of_the_gpu_resumes_there_to_the_same_bits_and_on_the_cpu(
    digits, tmp_path, full_precision, setting
):
    def keep_first(progress):
        if progress.rounds_done == 1:
            write_checkpoint(tmp_path, progress, fingerprint="a run")

    whole = run_of(federation_on("cuda", digits, setting), after_round=keep_first)
    for device in ("cuda", "cpu"):
        federation = federation_on(device, digits, setting)
        start = read_checkpoint(tmp_path, fingerprint="a run", device=federation.device).progress
        assert all(value.device.type == device for value in start.state.weights.values())
        rest = run_of(federation, start=start)
        if device == "cuda":
            assert_same_bits(whole, rest)
        else:
            assert_close(whole, rest, tolerance=1e-3)
            assert whole.ledger == rest.ledger


@cuda
def test_local_steps_wait_for_nothing(digits):
    """torch refuses every synchronisation within the steps; catches .item(), float(loss) and copies from pageable memory."""
    federation = federation_on("cuda", digits)
    federation.load(federation.initial_weights, training=True)
    pool, network = own_records(federation, 0), federation.model
    prepared = batch_network(network, channels_last=True)
    sizes = {"num_steps": 5, "batch_size": 16, "rule": Rule(0.1)}

    def rngs():
        return [numpy_stream(0, round=0, client=client, purpose="full steps") for client in (0, 1)]

    def both():
        run_steps(network, pool, rng=rngs()[0], **sizes)
        starts, pools = [federation.initial_weights] * 2, [pool, own_records(federation, 1)]
        run_steps_batched(prepared, starts, pools, rngs=rngs(), **sizes)

    both()  # libraries load at the first call
    torch.cuda.set_sync_debug_mode("error")
    try:
        both()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@cuda
def test_auto_batches_on_a_gpu_and_threads_are_refused_there(digits):
    federation = federation_on("cuda", digits)
    assert choose_executor("auto", federation, METHODS["asfl"], workers=8).name == "batched"
    with pytest.raises(ValueError, match="executor threads with device cuda"):
        make_executor("threads", federation, METHODS["asfl"], workers=2)


# ---- pieces that need no GPU


def test_the_head_before_the_noise_is_on_the_cpu_and_evaluates_as_the_network_does(digits):
    """A network elsewhere ("meta" stands for any other device) is copied; on the CPU it is the network's own head."""
    here = make_tiny(digits)
    assert here.head_before_noise() is here.split.head
    elsewhere = replace(here, device=torch.device("meta"))  # the weights stay on the CPU: a copy can be compared
    elsewhere.load(here.initial_weights, training=False)
    copied = elsewhere.head_before_noise()
    assert copied is not here.split.head
    assert all(
        not module.training and p.device.type == "cpu" for module in copied.modules() for p in module.parameters()
    )
    inputs = few_records(digits).train_inputs
    assert torch.equal(copied(inputs), here.split.head(inputs))
    elsewhere = replace(elsewhere, privacy=gaussian(placement="exchange"))
    assert plan_sharing(State(weights=here.initial_weights), federation=elsewhere).certificate is not None


def test_repeatable_kernels_are_asked_for_on_cuda_alone_and_put_back():
    cudnn = torch.backends.cudnn
    before = cudnn.deterministic, cudnn.benchmark, cudnn.conv.fp32_precision
    with repeatable_kernels(torch.device("cpu")):
        assert (cudnn.deterministic, cudnn.benchmark, cudnn.conv.fp32_precision) == before
    inside = []

    def failing():
        with repeatable_kernels(torch.device("cuda:0")):
            inside.append((cudnn.deterministic, cudnn.benchmark))
            raise RuntimeError("fails")

    with pytest.raises(RuntimeError, match="fails"):
        failing()
    assert inside == [(True, False)]
    assert (cudnn.deterministic, cudnn.benchmark, cudnn.conv.fp32_precision) == before


def test_kernels_with_channels_last_hold_the_same_numbers():
    """Also where a convolution is not of images, which torch's own conversion refuses."""
    network = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv3d(1, 2, 2), nn.Linear(3, 2))
    before = {name: value.clone() for name, value in network.state_dict().items()}
    _put_channels_last(network)
    assert network[0].weight.is_contiguous(memory_format=torch.channels_last)
    assert all(torch.equal(value, before[name]) for name, value in network.state_dict().items())
