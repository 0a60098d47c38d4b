"""Semidefinite bounds on networks: quadratic constraints, multipliers found by lifting, and their proof."""
