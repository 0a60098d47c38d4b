"""Layers that break their claims, one realistic fault each, and the honest layer they were made from."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import nn

from asfl_privacy.audit import Claim

SHAPE = (4, 4, 4)
WIDTH = 64
CLIP = 1.0
MULTIPLIER = 3.7306316  # Gaussian (1, 1e-5), rounded up
SIGMA = MULTIPLIER * 2 * CLIP
GAUSSIAN = Claim(family="gaussian", scale=SIGMA, clip=CLIP, unit="any", input_shape=SHAPE)
LAPLACE = Claim(family="laplace", scale=2 * CLIP, clip=CLIP, unit="any", input_shape=SHAPE)
LATTICE = replace(GAUSSIAN, spacing=2.0**-9)


def fresh():
    """A numpy generator keyed by the operating system."""
    return np.random.default_rng()


def normal(shape, scale):
    return torch.from_numpy(fresh().normal(0.0, scale, tuple(shape)))


def laplace(shape, scale):
    return torch.from_numpy(fresh().laplace(0.0, scale, tuple(shape)))


def clip_rows(x, *, norm=2, clip=CLIP):
    """Every row scaled into the ball of radius C; NaN and inf refused."""
    if not torch.isfinite(x).all():
        raise ValueError("activations hold NaN or inf")
    rows = x.flatten(1).double()
    norms = torch.linalg.vector_norm(rows, ord=norm, dim=1, keepdim=True)
    return (rows * torch.clamp(clip / norms.clamp_min(1e-300), max=1.0)).reshape(x.shape)


class Release(nn.Module):
    """clip, noise, round: honest unless a part is swapped.

    Args:
        centre: inputs → what is noised.
        noise: (layer, shape, centre) → noise.
        spacing: of the lattice, or None.
    """

    def __init__(self, *, noise, centre=clip_rows, spacing=None):
        super().__init__()
        self.noise, self.centre, self.spacing = noise, centre, spacing

    def tap(self, x):
        centre = self.centre(x)
        return centre if self.spacing is None else torch.trunc(centre / self.spacing) * self.spacing

    def forward(self, x):
        centre = self.tap(x)
        out = centre + self.noise(self, centre.shape, centre)
        return (out if self.spacing is None else torch.round(out / self.spacing) * self.spacing).to(x.dtype)


def honest(claim):
    """The honest layer of a claim."""
    draw = normal if claim.family == "gaussian" else laplace

    def centre(x):
        return clip_rows(x, norm=claim.norm, clip=claim.clip or torch.inf)

    return Release(noise=lambda layer, shape, _: draw(shape, claim.scale), centre=centre, spacing=claim.spacing)


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """A fault.

    Args:
        name: what is wrong.
        make: a new layer.
        seen_by: parts that must see it in every run.
        claim: what it claims.
        sole: whether no other part sees it.
        with_tap: whether the audit is given the layer's tap.
    """

    name: str
    make: Callable[[], nn.Module]
    seen_by: tuple[str, ...]
    claim: Claim = GAUSSIAN
    sole: bool = False
    with_tap: bool = True


def noisy(noise, **keywords):
    """Factory of a release with another noise."""
    return lambda: Release(noise=noise, **keywords)


def scaled(factor, draw=normal, scale=SIGMA):
    return noisy(lambda layer, shape, _: draw(shape, factor * scale))


def masked(mask):
    """Noise on the coordinates of the mask alone."""
    return noisy(lambda layer, shape, _: normal(shape, SIGMA) * mask.reshape(SHAPE))


def all_but(*missing):
    mask = torch.ones(WIDTH, dtype=torch.float64)
    mask[list(missing)] = 0.0
    return mask


def fixed_seed(layer, shape, _):
    return torch.from_numpy(np.random.default_rng(0).normal(0.0, SIGMA, tuple(shape)))


def pool():
    """Each row's noise is picked from 4,096 rows drawn beforehand."""
    rows = normal((4096, *SHAPE), SIGMA)
    return Release(noise=lambda layer, shape, _: rows[torch.from_numpy(fresh().integers(0, len(rows), shape[0]))])


def cached():
    """Noise drawn once for each batch size."""
    kept = {}

    def noise(layer, shape, _):
        return kept.setdefault(tuple(shape), normal(shape, SIGMA))

    return Release(noise=noise)


def two_rows_equal(layer, shape, _):
    noise = normal(shape, SIGMA)
    noise[1:2] = noise[: len(noise[1:2])]
    return noise


def antithetic_rows(layer, shape, _):
    half = normal(((shape[0] + 1) // 2, *shape[1:]), SIGMA)
    return torch.cat([half, -half])[: shape[0]]


def antithetic_calls():
    """Every second call subtracts what the call before it added."""
    last = []

    def noise(layer, shape, _):
        if last and last[0].shape == shape:
            return -last.pop()
        last[:] = [normal(shape, SIGMA)]
        return last[0]

    return Release(noise=noise)


def blurred(layer, shape, _):
    """Neighbours along the width share part of their noise; each coordinate keeps its variance."""
    noise = normal(shape, SIGMA)
    return 0.98 * noise + (1 - 0.98**2) ** 0.5 * noise.roll(1, dims=-1)


def tilted(layer, shape, _):
    """The noise of a row sums to zero, so the mean activation is sent in the clear; marginals are right."""
    noise = normal(shape, SIGMA).flatten(1)
    return ((noise - noise.mean(dim=1, keepdim=True)) * (WIDTH / (WIDTH - 1)) ** 0.5).reshape(shape)


def drifting():
    """Noise follows on from that of the call before (an AR process with the right variance)."""
    state = {}

    def noise(layer, shape, _):
        drawn = normal(shape, SIGMA)
        before = state.get(tuple(shape))
        state[tuple(shape)] = drawn if before is None else 0.3 * before + (1 - 0.09) ** 0.5 * drawn
        return state[tuple(shape)]

    return Release(noise=noise)


def without_last_row(layer, shape, _):
    noise = normal(shape, SIGMA)
    if shape[0] > 1:
        noise[-1] = 0.0
    return noise


def clamped(layer, shape, _):
    return normal(shape, SIGMA).clamp(-3 * SIGMA, 3 * SIGMA)


def student(layer, shape, _):
    """Heavy tails of the right variance (5 degrees of freedom)."""
    return torch.from_numpy(fresh().standard_t(5, tuple(shape))) * SIGMA * (3 / 5) ** 0.5


class OwnGenerator(Release):
    """Noise from a generator that the layer keeps: fresh until it is forked or copied."""

    def __init__(self):
        super().__init__(noise=None)
        self.generator = np.random.default_rng()

    def forward(self, x):
        centre = self.tap(x)
        return (centre + torch.from_numpy(self.generator.normal(0.0, SIGMA, tuple(x.shape)))).to(x.dtype)


class NoiseThenClip(Release):
    def forward(self, x):
        return self.centre(x + normal(x.shape, SIGMA)).to(x.dtype)


def clip_whole_batch(x):
    if not torch.isfinite(x).all():
        raise ValueError("activations hold NaN or inf")
    largest = torch.linalg.vector_norm(x.flatten(1).double(), dim=1).max()
    return x.double() * min(1.0, CLIP / max(float(largest), 1e-300))


def normalise_batch(x):
    return clip_rows(nn.functional.batch_norm(x, None, None, training=True))


def clip_letting_nan_through(x):
    rows = x.flatten(1).double()
    norms = torch.linalg.vector_norm(rows, dim=1, keepdim=True)
    return (rows / torch.clamp(norms / CLIP, min=1.0)).reshape(x.shape)


def clip_in_l1_norm_of_mean(x):
    """Clips the mean magnitude instead of the norm."""
    if not torch.isfinite(x).all():
        raise ValueError("activations hold NaN or inf")
    rows = x.flatten(1).double()
    return (rows / (rows.abs().mean(dim=1, keepdim=True) / CLIP).clamp_min(1.0)).reshape(x.shape)


def uniform(layer, shape, _):
    return torch.from_numpy(fresh().uniform(-(3**0.5) * SIGMA, 3**0.5 * SIGMA, tuple(shape)))


HONEST_NOISE = noisy(lambda layer, shape, _: normal(shape, SIGMA))
SMALL_CLAIM = replace(GAUSSIAN, sensitivity=CLIP, scale=MULTIPLIER * CLIP, epsilon=None)
CLASSIC = Claim(family="gaussian", scale=0.3028, sensitivity=1.0, epsilon=16.0, input_shape=SHAPE)

MUTANTS = (
    Mutant(name="σ halved", make=scaled(0.5), seen_by=("scale", "family", "likelihood")),
    Mutant(name="σ × .9", make=scaled(0.9), seen_by=("scale", "family")),
    Mutant(name="σ × .97", make=scaled(0.97), seen_by=("scale",)),
    Mutant(
        name="b × .97",
        make=lambda: Release(
            noise=lambda layer, shape, _: laplace(shape, 0.97 * 2 * CLIP), centre=lambda x: clip_rows(x, norm=1)
        ),
        seen_by=("scale",),
        claim=LAPLACE,
    ),
    Mutant(
        name="C where 2C is due",
        make=lambda: honest(SMALL_CLAIM),
        seen_by=("likelihood",),
        claim=SMALL_CLAIM,
        sole=True,
    ),
    Mutant(
        name="ε of the classic formula",
        make=lambda: honest(CLASSIC),
        seen_by=("likelihood",),
        claim=CLASSIC,
        sole=True,
    ),
    Mutant(
        name="divided by √batch",
        make=noisy(lambda layer, shape, _: normal(shape, SIGMA / shape[0] ** 0.5)),
        seen_by=("scale", "family", "likelihood"),
    ),
    Mutant(
        name="scaled by the input",
        make=noisy(
            lambda layer, shape, centre: (
                normal(shape, SIGMA) * torch.linalg.vector_norm(centre.flatten(1), dim=1).reshape(-1, 1, 1, 1)
            )
        ),
        seen_by=("scale",),
    ),
    Mutant(name="half the coordinates", make=masked(all_but(*range(0, WIDTH, 2))), seen_by=("scale", "family")),
    Mutant(name="one coordinate missing", make=masked(all_but(17)), seen_by=("scale",)),
    Mutant(
        name="off in eval",
        make=noisy(lambda layer, shape, _: normal(shape, SIGMA) * layer.training),
        seen_by=("scale", "likelihood"),
    ),
    Mutant(name="fixed seed", make=noisy(fixed_seed), seen_by=("pairs", "reuse", "freshness")),
    Mutant(name="noise pool", make=pool, seen_by=("reuse",), sole=True),
    Mutant(name="cached noise", make=cached, seen_by=("pairs", "reuse", "freshness")),
    Mutant(
        name="shared over the batch",
        make=noisy(lambda layer, shape, _: normal((1, *shape[1:]), SIGMA).expand(shape)),
        seen_by=("pairs", "reuse"),
    ),
    Mutant(
        name="shared over the coordinates",
        make=noisy(lambda layer, shape, _: normal((shape[0], 1, 1, 1), SIGMA).expand(shape)),
        seen_by=("pairs",),
    ),
    Mutant(name="two rows equal", make=noisy(two_rows_equal), seen_by=("pairs", "reuse")),
    Mutant(name="antithetic rows", make=noisy(antithetic_rows), seen_by=("pairs", "reuse")),
    Mutant(name="antithetic calls", make=antithetic_calls, seen_by=("pairs", "reuse")),
    Mutant(name="noise before the clip", make=lambda: NoiseThenClip(noise=None), seen_by=("scale",)),
    Mutant(
        name="no clip",
        make=noisy(lambda layer, shape, _: normal(shape, SIGMA), centre=lambda x: x.double()),
        seen_by=("tap", "likelihood"),
    ),
    Mutant(
        name="no clip, and no tap to see it",
        make=noisy(lambda layer, shape, _: normal(shape, SIGMA), centre=lambda x: x.double()),
        seen_by=("likelihood",),
        with_tap=False,
    ),
    Mutant(
        name="clipped in another norm",
        make=noisy(lambda layer, shape, _: normal(shape, SIGMA), centre=clip_in_l1_norm_of_mean),
        seen_by=("tap", "likelihood"),
    ),
    Mutant(name="uniform of equal variance", make=noisy(uniform), seen_by=("family",)),
    Mutant(
        name="Laplace of equal variance",
        make=noisy(lambda layer, shape, _: laplace(shape, SIGMA / 2**0.5)),
        seen_by=("family",),
        sole=True,
    ),
    Mutant(name="Student of equal variance", make=noisy(student), seen_by=("family",)),
    Mutant(name="clamped at 3σ", make=noisy(clamped), seen_by=("family",)),
    Mutant(
        name="whole-batch clipping",
        make=noisy(lambda layer, shape, _: normal(shape, SIGMA), centre=clip_whole_batch),
        seen_by=("tap",),
        sole=True,
    ),
    Mutant(
        name="BatchNorm in train mode",
        make=noisy(lambda layer, shape, _: normal(shape, SIGMA), centre=normalise_batch),
        seen_by=("tap",),
        sole=True,
    ),
    Mutant(
        name="NaN let through",
        make=noisy(lambda layer, shape, _: normal(shape, SIGMA), centre=clip_letting_nan_through),
        seen_by=("tap",),
        sole=True,
    ),
    Mutant(name="blurred noise", make=noisy(blurred), seen_by=("pairs",), sole=True),
    Mutant(name="noise that drifts from call to call", make=drifting, seen_by=("pairs",)),
    Mutant(name="noise that sums to zero", make=noisy(tilted), seen_by=("likelihood",)),
    Mutant(name="last row without noise", make=noisy(without_last_row), seen_by=("scale",), sole=True),
    Mutant(
        name="batches of one let through",
        make=noisy(lambda layer, shape, _: normal(shape, SIGMA) * (shape[0] > 1)),
        seen_by=("scale",),
    ),
    Mutant(
        name="float noise claimed to lie on a lattice",
        make=HONEST_NOISE,
        seen_by=("freshness",),
        claim=LATTICE,
        sole=True,
    ),
    Mutant(
        name="torch's global generator",
        make=noisy(lambda layer, shape, _: torch.randn(shape, dtype=torch.float64) * SIGMA),
        seen_by=("freshness",),
        sole=True,
    ),
    Mutant(name="a generator of its own", make=OwnGenerator, seen_by=("freshness",), sole=True),
)
