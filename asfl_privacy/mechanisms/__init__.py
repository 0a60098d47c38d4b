"""Room: mechanisms."""
