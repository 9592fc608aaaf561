"""The kernel that merges partial results."""
