"""Small federations for the tests of this room and of execution."""

from asfl_privacy.data import Dataset
from asfl_privacy.federated import Federation, Privacy, TrainingSettings, build_federation


def make_federation(data: Dataset, *, privacy: Privacy | None = None, **changes: object) -> Federation:
    """Six clients of skewed digits, three rounds; anything can be changed by keyword."""
    model_name = changes.pop("model_name", "small-cnn")
    partition = changes.pop("partition", "dirichlet:0.5")
    settings = {
        "clients": 6,
        "cohort": 4,
        "rounds": 3,
        "tail_steps": 4,
        "full_steps": 3,
        "batch_size": 16,
        "lr": 0.1,
        "seed": 0,
        "exchange_layer": "conv2",
    } | changes
    return build_federation(
        data, model_name=model_name, partition=partition, settings=TrainingSettings(**settings), privacy=privacy
    )


def gaussian(**changes: object) -> Privacy:
    """Gaussian noise at the input for records within an ℓ2 distance of 1."""
    return Privacy(
        **{"mechanism": "gaussian", "noise_multiplier": 2.0, "p": 2.0, "radius": 1.0, "placement": "input", **changes}
    )
