"""The bookkeeping of a paged KV cache: pages, prefixes, sequences and writes on their way. No arrays, no threads.

Imports from other rooms: kernels.
"""
