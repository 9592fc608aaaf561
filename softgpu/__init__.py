"""A CUDA driver in software, for tests of this repository on machines without a GPU.

``python -m softgpu ARGUMENTS...`` runs Python with it; README.md says what it is. Never part of the package.
"""
