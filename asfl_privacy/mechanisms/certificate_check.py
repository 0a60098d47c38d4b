"""Is a certificate still that of the head about to release? Asked for every release; recorded once a head."""

from torch import nn

from asfl_privacy.mechanisms.stateless import holdings_digest
from sensitivity import Certificate, UnsupportedModuleError
from sensitivity.capturing.inspection import require_certifiable_tree
from sensitivity.fingerprint import Fingerprint, take_fingerprint

CAPACITY = 16
_passed: tuple[tuple[bytes, Fingerprint], ...] = ()
"""What heads held when they passed the whole check, latest first; replaced as a whole, so that threads may share it."""


def check_certificate(certificate: Certificate, head: nn.Module) -> None:
    """Refuse a head that differs from the certified one.

    Args:
        certificate: of the head as it was.
        head: the head about to release.

    Raises:
        StaleCertificateError: naming what changed.

    Guarantee:
        Module types, code of forward, parameters, buffers, simple attributes, modes, hooks, element types and precision
        settings are compared on every call. What forward computes is recorded and compared too (``Certificate.check``)
        unless it was before, in this process, for the same fingerprint and a head that held the same bit for bit:
        attributes of any depth, closures and named globals (``run_stateless``). What could differ then is state outside
        the head, about which neither claims anything.
    """
    global _passed
    entry = (holdings_digest(head), certificate.fingerprint)
    if entry in _passed and _looks_the_same(certificate, head):
        return
    certificate.check(head)
    _passed = (entry, *(other for other in _passed[: CAPACITY - 1] if other != entry))


def _looks_the_same(certificate: Certificate, head: nn.Module) -> bool:
    try:
        require_certifiable_tree(head)
    except UnsupportedModuleError:
        return False
    now = take_fingerprint(head, input_shape=certificate.fingerprint.input_shape)
    return not certificate.fingerprint.changes(now)
