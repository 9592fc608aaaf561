"""What is counted, modelled and simulated beside the package; in a clone only, and nothing of the package imports it.

model       estimates the cases of `gpu-actors bench` without a GPU, from counts and data sheets
counts      what a block of a kernel does, by sass, which reads machine code; order, in which its blocks start
fit         fits the model's weights on published figures, and writes docs/reports/model.md
peer_sass   counts other libraries' kernels, and writes docs/reports/peers_sass.md
fleet       simulates 1 to 1,000 workers: fleet_costs, fleet_model, fleet_plot
isolation   what a context in a child process costs; channels, that and Ray's actors

Each but counts, sass and order is a command: ``python -m benchmarks.model --help``.
"""
