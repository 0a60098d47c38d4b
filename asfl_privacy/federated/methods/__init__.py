"""Methods, one a file; each also after latent sharing, under its name and `+sharing`."""

from asfl_privacy.federated.methods.asfl import ASFL
from asfl_privacy.federated.methods.fedavg import FedAvg
from asfl_privacy.federated.methods.fedpvr import FedPVR
from asfl_privacy.federated.methods.fedvarp import FedVARP
from asfl_privacy.federated.methods.local_method import SHARING, LocalMethod
from asfl_privacy.federated.methods.scaffold import Scaffold
from asfl_privacy.federated.phases import Method

_ALONE: tuple[LocalMethod, ...] = (Scaffold(), FedPVR(), FedVARP())
METHODS: dict[str, Method] = {
    method.name: method for method in (ASFL(), FedAvg(), *_ALONE, *(method.sharing() for method in _ALONE))
}

__all__ = ["ASFL", "METHODS", "SHARING", "FedAvg", "FedPVR", "FedVARP", "Method", "Scaffold"]
