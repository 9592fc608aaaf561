"""Attention for the arrays and engines of other libraries."""
