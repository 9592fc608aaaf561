"""From CUDA sources to cubins, in a cache that processes share."""
