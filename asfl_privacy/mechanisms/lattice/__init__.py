"""Releases on a lattice: exact integer noise from a cryptographic source, so that floating point leaks nothing."""

from asfl_privacy.mechanisms.lattice.noise import LatticeNoise, plan_lattice, round_scale_up
from asfl_privacy.mechanisms.lattice.payload import decode, encode
from asfl_privacy.mechanisms.lattice.rounded_gaussian import rounded_gaussian
from asfl_privacy.mechanisms.lattice.rounded_laplace import rounded_laplace
from asfl_privacy.mechanisms.lattice.rounding import coarsen, norm_at_most, to_float, truncate
from asfl_privacy.mechanisms.lattice.source import SeededSource, SystemSource, WordSource

__all__ = [
    "LatticeNoise",
    "SeededSource",
    "SystemSource",
    "WordSource",
    "coarsen",
    "decode",
    "encode",
    "norm_at_most",
    "plan_lattice",
    "round_scale_up",
    "rounded_gaussian",
    "rounded_laplace",
    "to_float",
    "truncate",
]
