"""Checks of a request that hold for every device: shapes, dtypes, lengths and options must agree.

Checks of what a given device or kernel can do are in `gpu_actors.kernels.support`.
"""
