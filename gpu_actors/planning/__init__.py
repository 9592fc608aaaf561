"""Turns requests into launches: signatures, plans and operands."""
