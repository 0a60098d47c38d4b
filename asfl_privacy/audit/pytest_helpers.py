"""For test suites: an assertion that a noise layer keeps its claim.

def test_our_layer_is_private():
    claim = Claim(family="gaussian", scale=7.4613, clip=1.0, unit="any", input_shape=(64,))
    assert_private(OurLayer(), claim, tap=clip_to_one)
"""

from __future__ import annotations

from asfl_privacy.audit.claim import Claim
from asfl_privacy.audit.probe import Layer, NoiseOf
from asfl_privacy.audit.procedure import PARTS, run
from asfl_privacy.audit.report import AuditReport


def assert_private(
    layer: Layer,
    claim: Claim,
    alpha: float = 1e-6,
    *,
    tap: Layer | None = None,
    noise_of: NoiseOf | None = None,
    parts: tuple[str, ...] = PARTS,
    seed: int = 0,
) -> AuditReport:
    """Raise AssertionError with the summary if an audit sees a breach.

    Args:
        layer: see ``audit.run``.
        claim: see ``audit.run``.
        alpha: how often an honest layer may fail the assertion.
        tap: see ``audit.run``.
        noise_of: see ``audit.run``.
        parts: see ``audit.run``.
        seed: of the test inputs.

    Returns:
        The report, for further assertions.

    Raises:
        AssertionError: if the audit does not pass.

    Example:
        A layer of someone else's, written for vision models, that adds Laplace noise to (N, C, H, W):

        >>> import numpy as np, torch
        >>> class TheirNoise(torch.nn.Module):
        ...     def forward(self, images):
        ...         noise = np.random.default_rng().laplace(0.0, 4.0, tuple(images.shape))
        ...         return images + torch.from_numpy(noise).to(images.dtype)
        >>> claim = Claim(family="laplace", scale=4.0, sensitivity=2.0, input_shape=(3, 8, 8))
        >>> report = assert_private(TheirNoise(), claim)
        >>> 0.4 < report.epsilon_low <= report.epsilon_claimed == 0.5
        True
    """
    report = run(layer, claim, alpha=alpha, tap=tap, noise_of=noise_of, parts=parts, seed=seed)
    if not report.passed:
        raise AssertionError(report.summary())
    return report
