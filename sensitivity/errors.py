"""Errors of the certifier: each is a ValueError with one line of value, rule and fix."""

from __future__ import annotations


class UnsupportedModuleError(ValueError):
    """A head holds something that has no proven bound here.

    Guarantee: raised instead of a number whenever the certifier cannot see, or cannot bound, what the head computes.
    """


class StaleCertificateError(ValueError):
    """A certificate was checked against a head that differs from the head it was issued for."""
