"""Operation graphs: described by hand, planned onto the kernels here, computed by NumPy on the mock device.

    graph -> validate -> signature -> match -> plan -> launch

Programs write with `graph` and `tensor`. `match` finds attention in a graph. `expression`, `derivative` and `cuda` turn
its score modification into CUDA. `gpu_actors.reference.graph` computes any graph with NumPy.
"""
