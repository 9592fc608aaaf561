"""Compiles CUDA sources to cubins, and caches them for all processes."""
