"""Loaded cubins and their kernels."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from gpu_actors.devices.cuda.api import CudaApi

if TYPE_CHECKING:
    from gpu_actors.devices.cuda.device import CudaDevice

__all__ = ["CudaFunction", "Modules"]


class CudaFunction:
    """A kernel of a loaded cubin: the handle inside an `interface.Kernel`."""

    def __init__(self, device: CudaDevice, handle: int) -> None:
        self.device = device
        self.handle = handle
        self._shared_bytes = 0
        self._lock = threading.Lock()

    def prepare(self, api: CudaApi, shared_bytes: int) -> None:
        """Allow a block that much dynamic shared memory. Raises CudaFailure."""
        if shared_bytes > self._shared_bytes:
            with self._lock:
                if shared_bytes > self._shared_bytes:
                    api.allow_shared_memory(self.handle, shared_bytes)
                    self._shared_bytes = shared_bytes


class Modules:
    """The cubins a device has loaded.

    Keyed by the images themselves: Python remembers a bytes object's hash, so that finding one again costs less than
    a digest, and equal images are equal for certain.
    """

    def __init__(self, device: CudaDevice) -> None:
        self._device = device
        self._modules: dict[bytes, int] = {}
        self._functions: dict[tuple[int, str], CudaFunction] = {}
        self._lock = threading.Lock()

    def function(self, image: bytes, entry: str) -> CudaFunction:
        """The kernel of that name, from a module that is loaded if it has not been. Raises CudaFailure."""
        api = self._device.api
        with self._lock:
            module = self._modules.get(image)
            if module is None:
                module = self._modules[image] = api.load_module(image)
            function = self._functions.get((module, entry))
            if function is None:
                handle = api.get_function(module, entry)
                function = self._functions[module, entry] = CudaFunction(self._device, handle)
            return function

    def close(self) -> None:
        """Unload everything. No kernel may be in flight."""
        with self._lock:
            modules, self._modules, self._functions = self._modules, {}, {}
        for module in modules.values():
            self._device.api.unload_module(module)
