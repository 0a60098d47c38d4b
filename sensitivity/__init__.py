"""Certified p→q sensitivity (Lipschitz) bounds of torch modules."""
