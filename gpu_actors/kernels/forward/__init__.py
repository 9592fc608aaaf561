"""The kernels of dense and varlen forward requests: forward_mma, forward_wide and forward_simple."""
