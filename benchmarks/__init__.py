"""Counts, models and simulations beside the package. They exist only in a clone, and the package imports none of them.

model       estimates the cases of `gpu-actors bench` without a GPU, from counts and data sheets
counts      counts what a block of a kernel does, with sass, which reads machine code
order       the order in which a kernel's blocks start
fit         fits the model's weights on published figures, and writes docs/reports/model.md
peer_sass   counts other libraries' kernels, and writes docs/reports/peers_sass.md
fleet       simulates 1 to 1,000 workers, with fleet_costs, fleet_model and fleet_plot
isolation   what a context in a child process costs
channels    what a child process and a Ray actor cost

model, fit, peer_sass, fleet, isolation and channels are commands: ``python -m benchmarks.model --help``.
"""
