"""The objects that a program holds: a context, its KV caches and its health."""
