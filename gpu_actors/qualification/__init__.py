"""Whether the kernels of a context compute on its machine what the oracle says, before they answer a request."""
