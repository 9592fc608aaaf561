"""Arrays of other libraries, taken in and given back.

Imports from other rooms: distributed, graph, isolation, planning, remote, validation.
"""
