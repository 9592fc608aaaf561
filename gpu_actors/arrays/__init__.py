"""Reads arrays of any library, and returns results as arrays of that library."""
