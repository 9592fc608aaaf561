"""What the service costs, measured here and now. Each module has a function that returns plain, printable numbers.

bridge    requests end to end without a GPU, beside ``asyncio.to_thread`` in the same run
compile   compiling a kernel and looking one up
imports   importing the package, and the size of its wheel
"""

__all__: list[str] = []
