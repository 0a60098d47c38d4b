"""Sensitivity control: keep a head's certified norm under a cap while it trains."""
