"""The kernels of gradients on sm_90a: backward_prepare_sm90, backward_sm90 and backward_finish_sm90."""
