"""Mechanisms: clipping, noise, placements, and the release that joins certificate and noise."""

from asfl_privacy.mechanisms.auto import PlacementChoice, choose_placement
from asfl_privacy.mechanisms.clipping import clip_rows
from asfl_privacy.mechanisms.families import make_mechanism
from asfl_privacy.mechanisms.gaussian import Gaussian
from asfl_privacy.mechanisms.laplace import Laplace
from asfl_privacy.mechanisms.mechanism import Mechanism
from asfl_privacy.mechanisms.noise_layer import NoiseLayer
from asfl_privacy.mechanisms.noisy_head import NoisyHead, insert_noise
from asfl_privacy.mechanisms.placement import split_head, valid_placements
from asfl_privacy.mechanisms.release import (
    add_noise,
    apply_release,
    finish_both,
    finish_release,
    noise_rows,
    noised_and_clean,
    payload_bytes,
    rows_before_noise,
)
from asfl_privacy.mechanisms.release_plan import ReleasePlan, plan_release
from asfl_privacy.mechanisms.release_sensitivity import ReleaseSensitivity, release_sensitivity
from asfl_privacy.mechanisms.stateless import run_stateless

__all__ = [
    "Gaussian",
    "Laplace",
    "Mechanism",
    "NoiseLayer",
    "NoisyHead",
    "PlacementChoice",
    "ReleasePlan",
    "ReleaseSensitivity",
    "add_noise",
    "apply_release",
    "choose_placement",
    "clip_rows",
    "finish_both",
    "finish_release",
    "insert_noise",
    "make_mechanism",
    "noise_rows",
    "noised_and_clean",
    "payload_bytes",
    "plan_release",
    "release_sensitivity",
    "rows_before_noise",
    "run_stateless",
    "split_head",
    "valid_placements",
]
