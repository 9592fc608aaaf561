"""Attention requests: their messages and results, the problem that they state, and its masks and scores."""
