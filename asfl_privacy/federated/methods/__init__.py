"""Methods, one a file."""

from asfl_privacy.federated.methods.asfl import ASFL
from asfl_privacy.federated.methods.fedavg import FedAvg
from asfl_privacy.federated.phases import Method

METHODS: dict[str, Method] = {"asfl": ASFL(), "fedavg": FedAvg()}

__all__ = ["ASFL", "METHODS", "FedAvg", "Method"]
