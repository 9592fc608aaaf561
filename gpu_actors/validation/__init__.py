"""What makes a request sound, whatever the device: shapes, dtypes, lengths and options that agree.

Checks of what a given device or kernel can do are in `gpu_actors.kernels.support`.
"""
