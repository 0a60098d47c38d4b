"""Attacks: what a curious recipient rebuilds, tells apart and reads off, with the head known."""

from asfl_privacy.attacks.decoder import reconstruct, train_decoder
from asfl_privacy.attacks.evaluate import AttackResult, attack_release
from asfl_privacy.attacks.inversion import invert, invert_then_denoise, total_variation_weight
from asfl_privacy.attacks.measures import psnr, ssim
from asfl_privacy.attacks.membership import MembershipGuess, farthest_neighbours, guess_membership, membership_bound
from asfl_privacy.attacks.property_guess import PropertyGuess, guess_property
from asfl_privacy.attacks.rebuilding import Effort, Reconstruction
from asfl_privacy.attacks.view import RecipientView

__all__ = [
    "AttackResult",
    "Effort",
    "MembershipGuess",
    "PropertyGuess",
    "RecipientView",
    "Reconstruction",
    "attack_release",
    "farthest_neighbours",
    "guess_membership",
    "guess_property",
    "invert",
    "invert_then_denoise",
    "membership_bound",
    "psnr",
    "reconstruct",
    "ssim",
    "total_variation_weight",
    "train_decoder",
]
