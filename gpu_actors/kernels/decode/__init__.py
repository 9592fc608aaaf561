"""The kernels of requests over caches: decode_plan, decode_mma and decode_combine; decode_simple and its merge."""
