import pytest
import torch
from torch import nn

from sensitivity import UnsupportedModuleError, certify
from sensitivity.capturing.inspection import require_certifiable_tree


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
        (nn.Sequential(nn.InstanceNorm1d(3)).eval(), "InstanceNorm1d"),
        (nn.Sequential(nn.Dropout()), r"'0' \(Dropout\) is in train mode"),
        (nn.Sequential(nn.AlphaDropout()), "AlphaDropout"),
        (nn.Sequential(nn.RReLU()), "RReLU"),
        (with_forward_hook(), r"'1' \(ReLU\) has a forward hook"),
        (with_pre_hook(), r"'1' \(ReLU\) has a forward hook"),
        (nn.LazyLinear(3), "not initialised"),
        (nn.Sequential(nn.Conv1d(1, 1, 3, padding=1, padding_mode="circular")), "pads with 'circular'"),
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
