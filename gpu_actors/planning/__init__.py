"""From a request to a launch.

Imports from other rooms: arrays, compiling, devices, graph, kernels, kv, reference, runtime, validation.
"""
