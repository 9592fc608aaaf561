"""The kernel families, and what dispatch, plans and programs ask of them: one folder a family.

Imports from other rooms: arrays, compiling, devices, validation.
"""
