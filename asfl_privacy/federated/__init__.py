"""Room: federated."""
