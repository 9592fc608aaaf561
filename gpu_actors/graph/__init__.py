"""Operation graphs: a program describes them, kernels compute them on a GPU, and NumPy on the mock device.

    graph -> validate -> signature -> match -> plan -> launch

Programs use `graph` and `tensor`. `match` finds attention in a graph. `expression`, `derivative` and `cuda` turn its
score modification into CUDA. `gpu_actors.reference.graph` computes any graph with NumPy.
"""
