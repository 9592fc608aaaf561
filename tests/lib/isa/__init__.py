"""What instructions of the PTX ISA do with layouts, descriptors, tensor maps and mbarriers, in NumPy.

This second reading of the ISA's text was written without knowledge of kernels_cu/emulation and shares nothing with it.
A misreading of one shows as a difference between both (docs/testing.md). Sections are those of PTX ISA 9.0.
"""
