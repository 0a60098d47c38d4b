"""Names and sentences that a reader meets: what a column, a radius, a cell means."""

import math
from collections.abc import Mapping, Sequence
from typing import Final

from asfl_privacy.reporting.cells import Cell
from asfl_privacy.reporting.numerals import exact
from asfl_privacy.reporting.rows import Value

SETTING_NAMES: Final[dict[str, str]] = {
    "method": "method",
    "mech": "mechanism",
    "data": "data",
    "partition": "partition",
    "clients": "clients",
    "cohort": "cohort",
    "model": "model",
    "rounds": "rounds",
    "tail_steps": "tail steps τ′",
    "full_steps": "full steps τ",
    "lr": "learning rate",
    "exchange_layer": "exchange layer",
    "target_epsilon": "ε asked, per release",
    "target_total_epsilon": "ε asked, total",
    "delta": "δ asked",
    "radius": "radius R",
    "p": "norm p",
    "q": "norm q",
    "placement": "placement",
    "noise": "noise drawn",
    "own": "own activations",
    "labels": "labels",
    "updates": "updates",
    "calibration": "calibration",
    "options": "steps and method",
    "reproducible": "noise from the seed",
}
PERSONAL_NAMES: Final = {
    "personal_accuracy": "personal accuracy",
    "prototype_accuracy_local": "nearest own prototype",
    "prototype_accuracy_all": "nearest of all prototypes",
}
_METHODS: Final = {
    "asfl": "ASFL",
    "fedavg": "FedAvg",
    "scaffold": "SCAFFOLD",
    "fedpvr": "FedPVR",
    "fedvarp": "FedVARP",
    "fedproto": "FedProto",
    "moon": "MOON",
    "splitfed-v1": "SplitFed V1",
    "splitfed-v2": "SplitFed V2",
}
_MECHANISMS: Final = {"none": "no noise", "gaussian": "Gaussian", "laplace": "Laplace"}
_NORM_MEANINGS: Final = {
    1.0: "the sum of the absolute pixel differences",
    2.0: "the root of the summed squared pixel differences",
    math.inf: "the largest single pixel difference",
}


def method_name(value: Value) -> str:
    """The method as it is written in text: ASFL, FedAvg, others as they are."""
    base, plus, sharing = str(value).partition("+")
    return _METHODS.get(base, base) + (" + " + sharing if plus else "")


def mechanism_name(value: Value) -> str:
    """The mechanism as it is written in text: Gaussian, Laplace, no noise, others as they are."""
    return _MECHANISMS.get(str(value), str(value))


def cell_name(settings: Mapping[str, Value]) -> str:
    """Method and mechanism of a cell in words.

    Example:
        >>> cell_name({"method": "asfl", "mech": "gaussian"}), cell_name({"method": "fedavg", "mech": "none"})
        ('ASFL, Gaussian', 'FedAvg, no noise')
    """
    return f"{method_name(settings['method'])}, {mechanism_name(settings['mech'])}"


def radius_in_words(radius: Value, p: Value) -> str:
    """Which two records count as neighbours, as a sentence.

    Args:
        radius: A distance in raw pixel units, "any", or None.
        p: The norm of that distance: 1, 2, infinity or None.

    Example:
        >>> radius_in_words("any", None)
        'Neighbours are any two images whatsoever.'
    """
    if radius == "any":
        return "Neighbours are any two images whatsoever."
    if radius is None or p is None:
        return "Which records count as neighbours was not recorded: read no promise into these rows."
    norm = "ℓ" + exact(p)
    meaning = _NORM_MEANINGS.get(float(p), "")
    return (
        f"Neighbours are two images whose pixel difference has {norm} norm at most {exact(radius)} ({meaning}); "
        "in the data's own units, before any normalisation: in the built-in image sets a pixel runs from 0 to 1."
    )


def how_to_read(cells: Sequence[Cell]) -> list[tuple[str, str]]:
    """Term and explanation, for a reader who has not met differential privacy.

    Args:
        cells: The cells of the table; sentences about what they do not contain are left out.
    """
    noised = [cell for cell in cells if cell.is_noised]
    entries = [
        ("Runs", "Each line is one cell of the grid: runs that differ in nothing but the seed. Accuracy is in per "
         "cent, mean ± standard deviation over seeds (n − 1). Failed runs are counted and enter no mean."),
        (
            "MB sent",
            "All that the method sends over the whole run, down and up: weights (with them control variates or prototypes), "
            "activations (with them gradients) and labels, in millions of bytes.",
        ),
        ("Points below", "Percentage points of accuracy lost against the unnoised ASFL line, and against FedAvg, of "
         "the same settings, paired by seed: mean ± standard deviation. Below zero means better than that line."),
    ]  # fmt: skip
    if any(cell.by_seed("personal_accuracy") for cell in cells):
        entries.append(
            ("Personal accuracy", "Where each client keeps a network of its own there is no global accuracy. Personal "
             "accuracy is the mean over clients, each judged on test records in the proportions of its own classes: an "
             "easier task, not to be compared with accuracy. Nearest prototype: the same, naming the class whose global "
             "prototype is nearest, among the client's own classes or among all.")
        )  # fmt: skip
    if len(noised) < len(cells):
        entries.append(("No noise", "A line without noise makes no privacy promise at all."))
    if not noised:
        return entries
    neighbours = dict.fromkeys(radius_in_words(cell.settings["radius"], cell.settings["p"]) for cell in noised)
    entries += [
        ("Unit", " ".join(neighbours) + " An image is one record of the data as it enters the model."),
        ("ε and δ", "Whatever a recipient sees is at most e^ε times as likely for a record as for a neighbour of it, "
         "up to an extra probability δ. Smaller is more private: ε = 1 means 2.7 times, ε = 8 already 2,981 times."),
        ("ε per release", "What one noised activation, sent once, gives away about its record."),
        ("ε total", "What everything sent over the whole run gives away about the most exposed record, all "
         "recipients pooling what they received. Runs on the same data add up: this is the total of one run."),
        ("ε whole record", "The total for any two images, however different. Where it is large, differences up "
         "to R are hidden but the image as a whole is not."),
        ("Noise sd", "Standard deviation of the noise on each coordinate where it is added, the largest over rounds."),
    ]  # fmt: skip
    if any(cell.settings["calibration"] == "paper" for cell in noised):
        entries.append(
            ("Calibration paper", "Noise by the formula that PixelDP prints, with the noise layer in the head while it "
             "trains too. ε asked is what that formula claims; ε per release is what is proven of the same noise.")
        )  # fmt: skip
    if any(cell.settings["reproducible"] == "yes" for cell in noised):
        entries.append(
            ("Noise from the seed", "These runs can be repeated to the digit because their noise can: whoever knows or "
             "guesses the seed can remove it. The figures are what the same runs promise with --reproducible no.")
        )  # fmt: skip
    if any(cell.settings["updates"] in ("dp-sgd", "dp-fedavg") for cell in noised):
        entries.append(
            ("Updates", "dp-sgd: each record's gradient is clipped and every step noised; dp-fedavg: each client's update "
             "is clipped and noised. Either way ε total counts them together with activations and labels.")
        )  # fmt: skip
    drawn = {cell.settings["noise"] for cell in noised}
    if "fresh" in drawn:
        entries.append(("Noise fresh", "Noise is drawn anew for each release, so every release adds to the total."))
    if "once" in drawn:
        entries.append(
            ("Noise once", "Each record is noised once at the input and its client keeps that copy, so any number of "
             "rounds totals one release. It amounts to sharing noised inputs through the head.")
        )  # fmt: skip
    return entries


def setting_texts(settings: Mapping[str, Value]) -> list[str]:
    """The settings that tell cells of one grid apart, as short texts; blank ones are left out.

    Example:
        >>> setting_texts({"target_epsilon": 4.0, "delta": 1e-5, "radius": None})
        ['ε asked, per release 4', 'δ asked 1e-5']
    """
    columns = ("target_epsilon", "target_total_epsilon", "delta", "radius", "p", "placement", "noise", "labels", "updates",
               "exchange_layer")  # fmt: skip
    return [f"{SETTING_NAMES[c]} {exact(settings[c])}" for c in columns if settings.get(c) is not None]
