"""Federated methods: explicit state, phases, activation sharing, the tail round, and what crosses the network."""

from asfl_privacy.federated.federation import Client, Federation, build_federation, sample_cohort
from asfl_privacy.federated.methods import METHODS, Method
from asfl_privacy.federated.phases import Charge, Collected, Delivery, Payload, State, Traffic, Update
from asfl_privacy.federated.settings import MethodOptions, Privacy, TrainingSettings
from asfl_privacy.federated.traffic import count_traffic

__all__ = [
    "METHODS",
    "Charge",
    "Client",
    "Collected",
    "Delivery",
    "Federation",
    "Method",
    "MethodOptions",
    "Payload",
    "Privacy",
    "State",
    "Traffic",
    "TrainingSettings",
    "Update",
    "build_federation",
    "count_traffic",
    "sample_cohort",
]
