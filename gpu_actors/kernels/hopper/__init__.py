"""The forward kernel of sm_90a: forward_sm90."""
