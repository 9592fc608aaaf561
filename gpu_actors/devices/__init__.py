"""Devices behind one small interface: cuda, emulated and mock."""
