"""Loaded cubins and their kernels."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Hashable

from gpu_actors.devices.cuda.api import CudaApi
from gpu_actors.devices.cuda.driver import Driver
from gpu_actors.devices.cuda.errors import CudaFailure

__all__ = ["CudaFunction", "Modules"]


class _Module:
    """A loaded cubin. Its functions keep it alive."""

    __slots__ = ("__weakref__", "handle")

    def __init__(self, handle: int) -> None:
        self.handle: int = handle


class CudaFunction:
    """A kernel of a loaded cubin: the handle in an `interface.Kernel`.

    Plans and launches in flight refer to it. The cubin is unloaded once no reference is left.
    """

    def __init__(self, driver: Driver, module: _Module, handle: int) -> None:
        self.driver = driver
        self.handle = handle
        self._module = module
        self._shared_bytes = 0
        self._lock = threading.Lock()

    def prepare(self, api: CudaApi, shared_bytes: int) -> None:
        """Allow a block ``shared_bytes`` of dynamic shared memory. Raises CudaFailure."""
        if shared_bytes > self._shared_bytes:
            with self._lock:
                if shared_bytes > self._shared_bytes:
                    api.allow_shared_memory(self.handle, shared_bytes)
                    self._shared_bytes = shared_bytes


class Modules:
    """The cubins that a device has loaded.

    The keys are the images themselves. Python caches the hash of a bytes object, so a lookup costs less than a digest,
    and two images are never confused.
    """

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._modules: weakref.WeakValueDictionary[Hashable, _Module] = weakref.WeakValueDictionary()
        self._functions: weakref.WeakValueDictionary[tuple[Hashable, str], CudaFunction] = weakref.WeakValueDictionary()
        self._loaded: set[int] = set()
        self._dropped: deque[int] = deque()
        self._lock = threading.Lock()

    def function(self, image: Hashable, entry: str) -> CudaFunction:
        """Return the kernel with this name. Load its image first if it is not loaded. Raises CudaFailure."""
        api = self._driver.api
        with self._lock:
            self._unload()
            function = self._functions.get((image, entry))
            if function is None:
                module = self._modules.get(image) or self._load(image)
                function = CudaFunction(self._driver, module, api.get_function(module.handle, entry))
                self._functions[image, entry] = function
            return function

    def close(self) -> None:
        """Unload everything. No kernel may be in flight."""
        with self._lock:
            self._dropped.clear()
            loaded, self._loaded = self._loaded, set()
        for module in loaded:
            self._driver.api.unload_module(module)

    def _load(self, image: Hashable) -> _Module:
        module = self._modules[image] = _Module(self._driver.api.load_module(image))
        self._loaded.add(module.handle)
        # The finalizer runs on the thread that drops the last reference. It must not wait for the driver or a lock.
        weakref.finalize(module, self._dropped.append, module.handle).atexit = False
        return module

    def _unload(self) -> None:
        """Unload the modules that have no reference left."""
        while self._dropped:
            handle = self._dropped.popleft()
            if handle in self._loaded:
                self._loaded.remove(handle)
                try:
                    self._driver.api.unload_module(handle)
                except CudaFailure as failure:
                    self._driver.failed(failure)  # after a sticky failure the next call raises
