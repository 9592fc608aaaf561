"""The kernels of sm_90a: forward_sm90, and transpose_v before it."""
