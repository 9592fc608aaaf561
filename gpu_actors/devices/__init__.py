"""Devices behind one small interface: cuda, emulated and mock.

Imports from other rooms: arrays, compiling.
"""
