"""The kernels of gradients: backward_prepare, backward_mma and backward_finish."""
