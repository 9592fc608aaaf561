"""The kernels of dense and varlen forward requests: forward_mma and forward_simple."""
