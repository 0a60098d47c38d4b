import contextlib
import functools

import pytest
import torch
from torch import nn

from sensitivity import UnsupportedModuleError, certify, operator_norm
from sensitivity.capturing.inspection import precision_problem, require_certifiable_tree


def with_forward_hook():
    head = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    head[1].register_forward_hook(lambda module, args, output: 100 * output)
    return head


def with_pre_hook():
    head = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    head[1].register_forward_pre_hook(lambda module, args: (100 * args[0],))
    return head


def with_tensor(tensor):
    head = nn.Linear(3, 3)
    head.extra = tensor
    return head


@pytest.mark.parametrize(
    ("head", "words"),
    [
        (nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)), r"'1' \(BatchNorm1d\) is in train mode: .* call .eval\(\)"),
        (nn.BatchNorm1d(3, track_running_stats=False).eval(), "track_running_stats=False"),
        (
            nn.Sequential(nn.InstanceNorm1d(3, track_running_stats=True)),
            r"'0' \(InstanceNorm1d\) is in train mode: .* call .eval\(\)",
        ),
        (nn.Sequential(nn.Dropout()), r"'0' \(Dropout\) is in train mode"),
        (nn.Sequential(nn.AlphaDropout()), "AlphaDropout"),
        (nn.Sequential(nn.RReLU()), "RReLU"),
        (with_forward_hook(), r"'1' \(ReLU\) has a forward hook"),
        (with_pre_hook(), r"'1' \(ReLU\) has a forward hook"),
        (nn.LazyLinear(3), "not initialised"),
        (nn.Linear(3, 3).half(), "half precision"),
        (nn.Linear(3, 3).bfloat16(), "half precision"),
        (nn.Linear(3, 3, dtype=torch.complex64), "only real weights"),
        (with_tensor(torch.tensor([1.0, float("nan")])), "'extra' holds NaN or infinity"),
        (with_tensor(torch.eye(3).to_sparse()), "only dense tensors"),
        (nn.Linear(3, 3, device="meta"), "only dense tensors"),
    ],
    ids=lambda value: None if isinstance(value, nn.Module) else value,
)
def test_what_the_tree_shows_is_refused_by_name(head, words):
    with pytest.raises(UnsupportedModuleError, match=words) as refusal:
        certify(head, p=1, q=1, input_shape=(3,))
    assert "\n" not in str(refusal.value)


def test_a_hook_anywhere_in_the_tree_is_refused_before_it_runs():
    """Mutation caught: recording through hooks, or looking at the top module only."""
    calls = []
    head = nn.Sequential(nn.Sequential(nn.Linear(3, 3)))
    head[0][0].register_forward_hook(lambda *args: calls.append(1))
    with pytest.raises(UnsupportedModuleError, match=r"'0.0'"):
        certify(head, p=1, q=1, input_shape=(3,))
    assert not calls


def test_a_global_hook_is_refused():
    handle = nn.modules.module.register_module_forward_hook(lambda *args: None)
    try:
        with pytest.raises(UnsupportedModuleError, match="global forward hook"):
            certify(nn.ReLU(), p=1, q=1, input_shape=(3,))
    finally:
        handle.remove()


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_active_autocast_is_refused_in_one_line(device):
    """Mutation caught: leaving autocast to the casts that a recording on the CPU shows."""
    torch.set_autocast_enabled(device, True)
    try:
        with pytest.raises(UnsupportedModuleError, match=f"autocast is active on {device}: .* outside it") as refusal:
            certify(nn.Linear(3, 3), p=1, q=1, input_shape=(3,))
    finally:
        torch.set_autocast_enabled(device, False)
    assert "\n" not in str(refusal.value)


@contextlib.contextmanager
def precision(**values):
    """Precisions of cuda_matmul and the like, put back afterwards."""
    backends = {name: functools.reduce(getattr, name.split("_"), torch.backends) for name in values}
    before = {name: backend.fp32_precision for name, backend in backends.items()}
    try:
        for name, backend in backends.items():
            backend.fp32_precision = values[name]
        yield
    finally:
        for name, backend in backends.items():
            backend.fp32_precision = before[name]


@pytest.mark.parametrize(
    ("coarse", "full", "device"),
    [
        ({"cuda_matmul": "tf32"}, {"cudnn_conv": "ieee"}, "cuda"),
        ({"cudnn_conv": "tf32"}, {"cuda_matmul": "ieee"}, "cuda"),
        ({"mkldnn_matmul": "bf16"}, {"mkldnn_conv": "ieee"}, "cpu"),
        ({"mkldnn_conv": "tf32"}, {"mkldnn_matmul": "ieee"}, "cpu"),
    ],
)
def test_products_in_reduced_precision_are_refused_where_the_head_is(coarse, full, device):
    ((name, value),) = coarse.items()
    with precision(**{name: "ieee"}, **full):
        assert precision_problem({device}) is None
    setting = f"torch.backends.{name.replace('_', '.')}.fp32_precision"
    with precision(**coarse, **full):
        problem = precision_problem({device})
        assert problem is not None
        assert problem.startswith(f"{setting} is '{value}' and the head is on {device}")
        assert problem.endswith("set it to 'ieee'")
        assert precision_problem({"meta"}) is None
        if device == "cpu":
            with pytest.raises(UnsupportedModuleError, match=setting):
                certify(nn.ReLU(), p=1, q=1, input_shape=(3,))


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_tf32_convolutions_on_cuda_are_refused():
    head = nn.Conv1d(1, 1, 3, device="cuda")
    with (
        precision(cudnn_conv="tf32", cuda_matmul="ieee"),
        pytest.raises(UnsupportedModuleError, match=r"cudnn.conv.fp32_precision is 'tf32'"),
    ):
        certify(head, p=1, q=1, input_shape=(1, 5))
    with precision(cudnn_conv="ieee", cuda_matmul="ieee"):
        assert certify(head, p=1, q=1, input_shape=(1, 5)).value > 0.0


def test_quantised_modules_are_refused():
    class Linear(nn.Linear):
        __module__ = "torch.ao.nn.quantized.modules.linear"

    with pytest.raises(UnsupportedModuleError, match="quantised"):
        certify(nn.Sequential(Linear(3, 3)), p=1, q=1, input_shape=(3,))


def test_compiled_heads_are_refused():
    with pytest.raises(UnsupportedModuleError, match="certify the original module"):
        certify(torch.compile(nn.Linear(3, 3)), p=1, q=1, input_shape=(3,))


@pytest.mark.parametrize("head", [None, torch.relu, torch.eye(3), nn.Linear])
def test_what_is_no_module_is_refused(head):
    with pytest.raises(ValueError, match=r"only a torch.nn.Module"):
        require_certifiable_tree(head)


def test_eval_dropout_and_dropout_of_probability_zero_are_the_identity():
    assert certify(nn.Dropout(0.9).eval(), p=2, q=2, input_shape=(3,)).value == 1.0
    assert certify(nn.Dropout(0.0), p=2, q=2, input_shape=(3,)).value == 1.0


def test_flushing_small_numbers_to_zero_is_refused():
    """A weight of 1e-40 becomes 0 on the way to float64, and its bound with it."""
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush")
    try:
        with pytest.raises(UnsupportedModuleError, match="flushed to 0"):
            certify(nn.Linear(2, 2), p=2, q=2, input_shape=2)
        with pytest.raises(UnsupportedModuleError, match="flushed to 0"):
            operator_norm(torch.eye(2), p=2, q=2)
    finally:
        torch.set_flush_denormal(False)
