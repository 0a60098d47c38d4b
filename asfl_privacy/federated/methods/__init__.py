"""Methods, one a file; each also after latent sharing, under its name and `+sharing`."""

from asfl_privacy.federated.methods.asfl import ASFL
from asfl_privacy.federated.methods.fedavg import FedAvg
from asfl_privacy.federated.methods.fedproto import FedProto
from asfl_privacy.federated.methods.fedpvr import FedPVR
from asfl_privacy.federated.methods.fedvarp import FedVARP
from asfl_privacy.federated.methods.local_method import SHARING, LocalMethod
from asfl_privacy.federated.methods.moon import Moon
from asfl_privacy.federated.methods.scaffold import Scaffold
from asfl_privacy.federated.methods.splitfed import SplitFedV1
from asfl_privacy.federated.methods.splitfed_v2 import SplitFedV2
from asfl_privacy.federated.phases import Method

_ALONE: tuple[LocalMethod, ...] = (Scaffold(), FedPVR(), FedVARP(), Moon(), SplitFedV1())
METHODS: dict[str, Method] = {
    method.name: method
    for method in (ASFL(), FedAvg(), FedProto(), SplitFedV2(), *_ALONE, *(method.sharing() for method in _ALONE))
}

__all__ = [
    "ASFL",
    "METHODS",
    "SHARING",
    "FedAvg",
    "FedPVR",
    "FedProto",
    "FedVARP",
    "Method",
    "Moon",
    "Scaffold",
    "SplitFedV1",
    "SplitFedV2",
]
