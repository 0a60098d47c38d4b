"""Certified p→q sensitivity (Lipschitz) bounds of torch modules.

`certify` proves an upper bound on how far a head's output moves when one record moves; `lower_bound` searches for a
pair of records that attains much of it. Uppers and lowers never share a type. Whatever has no proven bound is refused
by name.
"""

from sensitivity.certificate import Certificate
from sensitivity.certification import certify, operator_norm
from sensitivity.composing.norm_dp import LayerBound
from sensitivity.control.projection import cap_sensitivity
from sensitivity.control.registration import LayerCap, register_cap
from sensitivity.errors import StaleCertificateError, UnsupportedModuleError
from sensitivity.operators.registry import register_bound, unregister_bound
from sensitivity.search import LowerBound, lower_bound

__all__ = [
    "Certificate",
    "LayerBound",
    "LayerCap",
    "LowerBound",
    "StaleCertificateError",
    "UnsupportedModuleError",
    "cap_sensitivity",
    "certify",
    "lower_bound",
    "operator_norm",
    "register_bound",
    "register_cap",
    "unregister_bound",
]
