"""Room: accounting."""
