"""What travels between ranks comes back to the bit."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asfl_privacy.execution.rank_messages import count_bytes, from_bytes, pack, shapes_of, to_bytes, unpack
from asfl_privacy.federated import Payload, State

CPU = torch.device("cpu")
TYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
    torch.complex64,
)


def bits(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8).tolist()


@given(
    kinds=st.lists(st.tuples(st.sampled_from(TYPES), st.lists(st.integers(0, 4), max_size=3)), max_size=6),
    seed=st.integers(0, 2**31),
)
def test_every_bit_type_and_shape_comes_back(kinds, seed):
    """Random bits: NaNs of any payload, signed zeros, subnormals. Catches alignment, offsets and 0-d or empty tensors."""
    generator = torch.Generator().manual_seed(seed)
    tensors = []
    for dtype, shape in kinds:
        length = math.prod(shape) * dtype.itemsize
        top = 2 if dtype == torch.bool else 256
        raw = torch.randint(0, top, (length,), generator=generator, dtype=torch.uint8)
        tensors.append(raw.view(dtype).view(shape))
    buffer = to_bytes(tensors, device=CPU)
    assert len(buffer) == count_bytes(shapes_of(tensors))
    value = {"all": tensors, "twice": tensors[:1] * 2, "round": 7}
    for found in (from_bytes(buffer, shapes_of(tensors)), unpack(pack(value, device=CPU))["all"]):
        assert [(one.dtype, one.shape) for one in found] == [(one.dtype, one.shape) for one in tensors]
        assert [bits(one) for one in found] == [bits(one) for one in tensors]


def test_views_are_sent_as_what_they_show():
    base = torch.arange(24.0).view(4, 6)
    complex_values = torch.tensor([1.0 + 2.0j])
    values = [base.t(), base[:, ::2], base[0].expand(3, 6), complex_values.conj(), base.clone().requires_grad_() * 2]
    found = unpack(pack(values, device=CPU))
    assert all(torch.equal(one, value) for one, value in zip(found, values, strict=True))
    assert not any(one.requires_grad for one in found)
    assert found[3].imag.item() == -2.0


def test_facts_travel_with_their_tensors_and_stand_ins_stay_stand_ins():
    payload = Payload(
        sender=3,
        activations=torch.empty((5, 2), device="meta"),
        labels=torch.empty(5, dtype=torch.uint8, device="meta"),
        records=np.array([4, 1]),
    )
    state, found = unpack(pack((State(weights={"w": torch.ones(2)}), payload), device=CPU))
    assert torch.equal(state.weights["w"], torch.ones(2))
    assert found.activations.is_meta
    assert (found.activations.shape, found.labels.dtype, found.records.tolist()) == ((5, 2), torch.uint8, [4, 1])


def test_a_stand_in_costs_no_bytes():
    """Catches values that go along with what should be their shape alone."""
    packed = pack(torch.ones(1000, 1000).to("meta"), device=CPU)
    assert len(packed.host) == len(packed.device) == 0
    assert len(packed.skeleton) < 1000


def test_a_sparse_tensor_is_refused():
    with pytest.raises(ValueError, match=r"sparse.* cannot go to another rank.*convert it"):
        pack({"w": torch.eye(3).to_sparse()}, device=CPU)
