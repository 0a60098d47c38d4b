"""Certified p→q sensitivity (Lipschitz) bounds of torch modules.

`certify` proves an upper bound on how far a head's output moves when one record moves; `lower_bound` searches for a
pair of records that attains much of it. Uppers and lowers never share a type. Whatever has no proven bound is refused
by name.
"""

from sensitivity.certificate import Certificate
from sensitivity.certification import certify, operator_norm
from sensitivity.composing.norm_dp import LayerBound
from sensitivity.errors import StaleCertificateError, UnsupportedModuleError
from sensitivity.search import LowerBound, lower_bound

__all__ = [
    "Certificate",
    "LayerBound",
    "LowerBound",
    "StaleCertificateError",
    "UnsupportedModuleError",
    "certify",
    "lower_bound",
    "operator_norm",
]
