"""The kernels that write to KV caches: append and copy_pages."""
