"""Room: execution."""
