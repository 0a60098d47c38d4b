"""Norm tables of single operators, one family per file."""
