"""The bookkeeping of a paged KV cache: pages, prefixes, sequences and writes in flight.

It has no threads. Only ``transfer`` holds arrays: the pages of a sequence that moves to another cache.
"""
