"""Operation graphs: described by hand, planned onto the kernels here, computed by NumPy on the mock device.

    graph -> validate -> signature -> match -> plan -> launch

`graph` and `tensor` are what programs write with; `match` finds attention in a graph, `expression`, `derivative` and
`cuda` turn what it does to scores into CUDA, `evaluate` and `differentiate` compute any graph with NumPy.

Imports from other rooms: arrays, kernels, validation.
"""
