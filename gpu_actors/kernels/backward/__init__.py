"""The kernels of gradients: backward_mma with those before and after it, and backward_simple."""
