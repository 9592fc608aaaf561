"""Checks that the kernels of a context agree with the oracle on its machine, before they answer a request."""
