"""Bytes of a released batch against float32, and the entropy that no lossless code beats.

    python experiments/benchmarks/privacy/payload_size.py [--records 8]

A record is 32×14×14 activations after a ReLU, clipped to ℓ2 (Gaussian) or ℓ1 (Laplace) norm C, released for any two records
(Δ = 2C) at several noise multipliers, hence at 32 to 64 lattice cells a scale. The entropy is that of the pooled values as
they came out (a plug-in estimate, at most a few hundredths of a bit too low here); `zlib` is level 6 and `lzma` its default
on the smallest integer type; `coarse` is the payload after rounding to a lattice four times coarser.
"""

from __future__ import annotations

import argparse
import lzma
import zlib
from collections.abc import Iterator

import numpy as np
import torch

from asfl_privacy.mechanisms import clip_rows
from asfl_privacy.mechanisms.lattice import SystemSource, coarsen, decode, encode, plan_lattice, truncate

SHAPE = (32, 14, 14)
CLIP = 1.0
CODES = ("payload", "entropy", "raw", "zlib", "lzma", "coarse")
MULTIPLIERS = (0.51, 1.0, 1.9, 4.0, 7.9)


def entropy_bits(values: np.ndarray) -> float:
    """Bits a value of the empirical distribution."""
    counts = np.unique(values, return_counts=True)[1]
    shares = counts / counts.sum()
    return float(-(shares * np.log2(shares)).sum())


def smallest_type(values: np.ndarray) -> np.ndarray:
    """The values in the smallest integer type that holds them."""
    for kind in (np.int8, np.int16, np.int32):
        if np.abs(values).max() <= np.iinfo(kind).max:
            return values.astype(kind)
    return values


def shares(records: int) -> Iterator[tuple[str, float, float, dict[str, float]]]:
    """Family, noise multiplier, cells a scale, and each code's bytes as a share of float32's.

    Raises:
        SystemExit: if a payload does not give the release back.
    """
    activations = torch.relu(torch.randn(records, *SHAPE, generator=torch.Generator().manual_seed(0)))
    for family, norm in (("gaussian", 2), ("laplace", 1)):
        for multiplier in MULTIPLIERS:
            noise = plan_lattice(
                family,
                sensitivity=2 * CLIP,
                noise_multiplier=multiplier,
                num_values=activations[0].numel(),
                clip_only=True,
            )
            rows = truncate(clip_rows(activations, max_norm=CLIP, norm=norm), spacing=noise.spacing)
            released = noise.release(rows, SystemSource())
            payload = encode(released, spacing=noise.spacing)
            if not np.array_equal(decode(payload)[0], released):
                raise SystemExit("the payload does not give the release back")
            coarse = encode(
                coarsen(released, spacing=noise.spacing, coarse_spacing=4 * noise.spacing), spacing=4 * noise.spacing
            )
            plain = smallest_type(released).tobytes()
            sizes = (
                len(payload),
                entropy_bits(released) * released.size / 8,
                len(plain),
                len(zlib.compress(plain)),
                len(lzma.compress(plain)),
                len(coarse),
            )
            found = {code: size / (4 * released.size) for code, size in zip(CODES, sizes, strict=True)}
            yield family, multiplier, noise.scale / noise.spacing, found


def main() -> None:
    """Print a line for each family and multiplier; ratios are to float32's bytes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--records", type=int, default=8)
    arguments = parser.parse_args()
    print("family     scale/Δ  cells " + "".join(f"{code:>8s}" for code in CODES))
    for family, multiplier, cells, found in shares(arguments.records):
        ratios = "".join(f"{share:8.3f}" for share in found.values())
        print(f"{family:10s} {multiplier:6.2f} {cells:6.1f} {ratios}", flush=True)


if __name__ == "__main__":
    main()
