"""Words are fresh from the system whatever happens, and a key's own where they must repeat."""

import copy
import os
import pickle

import numpy as np
import pytest
import torch

from asfl_privacy.mechanisms.lattice.source import SeededSource, SystemSource, draw_integer


def in_a_child(act):
    """What ``act`` returns (bytes) in a forked child."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(writer, act())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        words = pipe.read()
    os.waitpid(child, 0)
    return words


def test_forked_children_and_their_parent_share_no_words():
    """Catches a buffer kept over a fork, and numpy or torch generators, which repeat in a child."""
    source = SystemSource()
    source.words(5)
    drawn = [in_a_child(lambda: source.words(8).tobytes()) for _ in range(3)] + [source.words(8).tobytes()]
    words = np.frombuffer(b"".join(drawn), dtype=np.uint64)
    assert words.size == 32
    assert np.unique(words).size == 32


def test_copies_pickles_and_seeds_leave_the_system_source_fresh():
    """Catches state in the source, and noise from torch's or numpy's global generators."""
    source, drawn = SystemSource(), []
    for twin in (source, copy.deepcopy(source), copy.copy(source), pickle.loads(pickle.dumps(source))):
        torch.manual_seed(0)
        np.random.seed(0)  # noqa: NPY002
        drawn.append(twin.words(8))
    assert np.unique(np.concatenate(drawn)).size == 32


@pytest.mark.parametrize("count", [0, 1, 8192, 8193, 20000])
def test_every_word_asked_for_is_drawn(count):
    """Catches a last chunk left as it was allocated."""
    words = SystemSource().words(count)
    assert words.shape == (count,)
    assert np.unique(words).size == count  # a repeat among 20,000 has probability 1e-11
    assert np.count_nonzero(words) == count


def test_bits_of_both_sources_are_fair():
    for source in (SystemSource(), SeededSource(b"fair")):
        bits = np.unpackbits(source.words(1 << 14).view(np.uint8).reshape(-1, 8), axis=1)
        assert abs(bits.mean(axis=0) - 0.5).max() < 6 * 0.5 / np.sqrt(1 << 14)


def test_a_key_repeats_its_stream_and_no_other():
    first, again, other = SeededSource(b"a"), SeededSource(b"a"), SeededSource(b"b")
    one = first.words(100)
    assert (one == np.concatenate([again.words(37), again.words(63)])).all()
    assert not np.isin(one, other.words(100)).any()
    assert not np.isin(one, first.words(100)).any()
    assert first.is_reproducible
    assert not SystemSource().is_reproducible


@pytest.mark.parametrize("act", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_seeded_source_is_never_copied(act):
    with pytest.raises(TypeError, match="both copies would draw the same noise; make a new one"):
        act(SeededSource(b"a"))


def test_integers_hold_all_their_words(scripted):
    assert draw_integer(scripted([3, 5]), num_words=2) == 3 + 5 * 2**64


def test_wrong_arguments_are_refused():
    with pytest.raises(ValueError, match="key is a int: a seeded source takes bytes"):
        SeededSource(0)
    with pytest.raises(ValueError, match="count is -1"):
        SystemSource().words(-1)
    with pytest.raises(ValueError, match=r"count is 1\.5"):
        SeededSource(b"a").words(1.5)
