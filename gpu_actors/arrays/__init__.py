"""Arrays of any library, taken in and given back.

Imports from no other room.
"""
