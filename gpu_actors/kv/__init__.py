"""The bookkeeping of a paged KV cache: pages, prefixes, sequences and writes on their way. No threads, and no
arrays but those of a sequence that moves to another cache (transfer).
"""
