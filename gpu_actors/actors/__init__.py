"""The actors of a context: what each takes, launches and answers.

Imports from other rooms: arrays, compiling, devices, graph, kernels, kv, planning, reference, runtime, tracing,
validation.
"""
