"""Room: federated/methods."""
