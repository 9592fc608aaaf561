"""New rows over caches on Hopper: decode_sm90, beside decode_plan and decode_combine."""
