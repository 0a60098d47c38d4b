"""Private activation sharing for federated learning."""
