"""The kernels of requests over caches: decode_plan, decode_mma and decode_combine."""
