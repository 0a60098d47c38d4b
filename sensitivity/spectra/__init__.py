"""Certified norms of matrices and of linear maps."""
