"""NoiseLayer: fresh everywhere, refused where it must be."""

import copy
import os
import pickle
import warnings

import pytest
import torch

from asfl_privacy.mechanisms import Gaussian, Laplace, NoiseLayer


def in_a_fork(draw):
    """What ``draw`` returns in a forked child, as bytes."""
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # newer Pythons warn of threads at a fork
        child = os.fork()
    if child == 0:
        try:
            os.write(writer, draw())
        finally:
            os._exit(0)
    os.close(writer)
    os.waitpid(child, 0)
    with os.fdopen(reader, "rb") as stream:
        return stream.read()


@pytest.mark.parametrize("mechanism", [Gaussian(noise_stddev=1.0), Laplace(scale=1.0)])
def test_forks_and_copies_never_share_noise(mechanism):
    """Catches: noise from torch's or numpy's global generator, which forked children inherit."""
    layer = NoiseLayer(mechanism)
    x = torch.zeros(1, 64)
    draws = [in_a_fork(lambda: layer(x).numpy().tobytes()) for _ in range(2)] + [layer(x).numpy().tobytes()]
    torch.manual_seed(0)
    draws.append(copy.deepcopy(layer)(x).numpy().tobytes())
    torch.manual_seed(0)
    draws.append(layer(x).numpy().tobytes())
    draws.append(pickle.loads(pickle.dumps(layer))(x).numpy().tobytes())
    assert all(len(draw) == 256 for draw in draws)
    assert len(set(draws)) == len(draws)


def test_a_copy_of_a_seeded_layer_draws_on_from_the_same_generator():
    """Catches: deepcopy cloning the generator, so that both draw the same noise."""
    layer = NoiseLayer(Gaussian(noise_stddev=1.0), generator=torch.Generator().manual_seed(0))
    twin = copy.deepcopy(layer)
    x = torch.zeros(1, 64)
    assert not bool((layer(x) == twin(x)).any())


def test_a_seeded_layer_is_refused_in_another_process():
    layer = NoiseLayer(Gaussian(noise_stddev=1.0), generator=torch.Generator().manual_seed(0))

    def attempt():
        try:
            return layer(torch.zeros(1, 4)).numpy().tobytes()
        except ValueError as error:
            return str(error).encode()

    assert b"another process" in in_a_fork(attempt)
    with pytest.raises(ValueError, match="pickled copy"):
        pickle.dumps(layer)


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (torch.ones(2, 2, dtype=torch.float16), "float32 or float64"),
        (torch.ones(2, 2, dtype=torch.bfloat16), "float32 or float64"),
        (torch.ones(2, 2, dtype=torch.int64), "float32 or float64"),
        (torch.tensor([[float("nan"), 1.0, 2.0]]), "NaN or inf"),
        (torch.tensor([[float("inf")]]), "NaN or inf"),
        (torch.empty(0, 3), "at least one record"),
        (torch.tensor(1.0), "at least one record"),
        (torch.tensor([[1e9]]), "swallow the noise"),
        ([[1.0]], "torch tensor"),
    ],
)
def test_what_must_not_leave_is_refused_in_one_line(bad, words):
    """Catches: max(0., nan) and friends; noise lost to rounding; an empty batch."""
    layer = NoiseLayer(Gaussian(noise_stddev=1.0))
    with pytest.raises(ValueError, match=words) as caught:
        layer(bad)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("stddev", [1e-40, 1e-32, 1e37])
def test_noise_that_the_type_cannot_hold_is_refused(stddev):
    """Catches: noise that float32 rounds to zero beside activations of zero."""
    with pytest.raises(ValueError, match="cannot hold such noise"):
        NoiseLayer(Gaussian(noise_stddev=stddev))(torch.zeros(1, 4))
    assert bool(NoiseLayer(Gaussian(noise_stddev=stddev))(torch.zeros(1, 4, dtype=torch.float64)).all())


def test_autocast_is_refused():
    layer = NoiseLayer(Gaussian(noise_stddev=1.0))
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(ValueError, match="autocast"):
        layer(torch.ones(1, 2))


def test_a_batch_of_one_is_noised():
    assert NoiseLayer(Laplace(scale=1.0))(torch.zeros(1, 3)).shape == (1, 3)


def test_gradients_pass_through_unchanged():
    x = torch.ones(2, 3, requires_grad=True)
    NoiseLayer(Gaussian(noise_stddev=1.0))(x).sum().backward()
    assert torch.equal(x.grad, torch.ones(2, 3))


def test_a_mechanism_is_due():
    with pytest.raises(ValueError, match="a noise mechanism is due"):
        NoiseLayer(1.0)


def test_without_a_sensitivity_truncation_moves_nothing_that_counts():
    """Two inputs a hair apart may land one cell apart. Catches: cells of 2⁻¹⁰·σ, which add that to the caller's own Δ."""
    lattice = NoiseLayer(Gaussian(noise_stddev=3.0)).lattice_for(10**4)
    assert lattice.spacing <= 2.0**-36 * 3.0
    assert 3.0 <= lattice.scale <= 3.0 * (1 + 2.0**-9)
    known = NoiseLayer(Gaussian(noise_stddev=3.0, sensitivity=1e-3)).lattice_for(10**4)
    assert known.spacing * 100.0 <= 1e-3 * 2.0**-10


def test_a_vector_counts_as_one_record():
    """Catches: rows of one number, for which truncation's share is taken of the wrong length."""
    layer = NoiseLayer(Gaussian(noise_stddev=1.0, sensitivity=0.1))
    exact = layer(torch.zeros(4096)).double() / layer.lattice_for(4096).spacing
    assert torch.equal(exact, exact.round())
    assert not torch.equal(exact / 8, (exact / 8).round())


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_on_cuda_noise_comes_from_the_host():
    """Catches: noise from the device's generator, which a seed repeats."""
    layer = NoiseLayer(Gaussian(noise_stddev=1.0, sensitivity=1.0))
    x = torch.zeros(64, 32, device="cuda")
    torch.cuda.manual_seed(0)
    first = layer(x)
    torch.cuda.manual_seed(0)
    again = layer(x)
    assert first.device == x.device
    assert not (first == again).any()
    cells = first.double().cpu() / layer.lattice_for(32).spacing
    assert torch.equal(cells, cells.round())
