"""Mini-batches drawn up front against `draw_rows` step by step."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from asfl_privacy.federated.batched_draws import draw_batches, join_rows, to_device
from asfl_privacy.federated.steps import Pool, draw_rows


def make_pool(count, num_own):
    inputs, labels = torch.zeros(count, 1), torch.zeros(count, dtype=torch.int64)
    return Pool(inputs=inputs[:num_own], received=inputs[num_own:], labels=labels)


@given(counts=st.lists(st.integers(1, 30), min_size=1, max_size=5), batch_size=st.integers(1, 20))
def test_draws_are_those_of_one_client_after_the_other_and_leave_its_generator_there(counts, batch_size):
    """Catches: draws of all clients from one stream, of a batch at a time, or of the padded size."""
    pools = [make_pool(count, count // 2) for count in counts]
    rngs = [np.random.default_rng(i) for i in range(len(pools))]
    draws = draw_batches(pools, rngs=rngs, num_steps=3, batch_size=batch_size)
    for i, pool in enumerate(pools):
        twin, remote = np.random.default_rng(i), 0
        for step in range(3):
            batch = draw_rows(pool, batch_size=batch_size, rng=twin).numpy()
            assert draws.sizes[i] == len(batch)
            assert (draws.rows[i, step, : len(batch)] == batch).all()
            assert set(draws.rows[i, step]) == set(batch)  # padding repeats what the batch holds anyway
            remote += int((batch >= pool.num_own).sum())
        assert draws.num_remote[i] == remote
        assert rngs[i].bit_generator.state == twin.bit_generator.state


def check_joined(parts, *, copies):
    whole, starts = join_rows(parts)
    assert (whole.untyped_storage().data_ptr() != parts[0].untyped_storage().data_ptr()) == copies
    for part, start in zip(parts, starts, strict=True):
        assert torch.equal(whole[start : start + len(part)], part)


def test_views_of_one_tensor_are_joined_without_a_copy():
    data = torch.arange(60.0).reshape(10, 2, 3)
    check_joined([data[7:], data[2:5], data[2:3], data], copies=False)
    check_joined([data[4:]], copies=False)


def test_what_no_view_of_whole_rows_can_reach_is_copied():
    """Catches: rows read at another stride or from half a row on."""
    data = torch.arange(60.0).reshape(10, 6)
    check_joined([data[:4], data[::2]], copies=True)
    check_joined([data[:4, :3].contiguous(), data[:4, 3:]], copies=True)
    check_joined([data.flatten()[3:15].view(2, 6), data[:1]], copies=True)
    check_joined([data[:2], torch.zeros(3, 6)], copies=True)
    check_joined([data.T[:, :3], data.T[:, :3]], copies=True)


def test_what_goes_to_a_device_is_no_view_of_a_transposed_array():
    array = np.arange(6).reshape(2, 3)
    assert torch.equal(to_device(array.T, torch.device("cpu")), torch.tensor([[0, 3], [1, 4], [2, 5]]))
