"""KernelStore: the loaded kernels of an actor, and the calls that wait for one to be compiled.

A miss never holds the mailbox: the call is parked, the NvrtcActor compiles, and when the cubin is there every call
parked for it goes back to its place in the queue. The store outlives the actor, so nobody parked is forgotten.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from gpu_actors.actors.call import Call
from gpu_actors.devices.interface import Kernel
from gpu_actors.errors import GpuActorsError
from gpu_actors.kernels.source import Cubin
from gpu_actors.problem import DispatchKey

if TYPE_CHECKING:
    from gpu_actors.actors.post import Post

__all__ = ["KernelStore"]


class KernelStore:
    """Kernels by dispatch key. `get` and `wait_for` are for the actor's thread."""

    def __init__(self, post: Post) -> None:
        self._post = post
        self._kernels: dict[DispatchKey, Kernel] = {}
        self._products: dict[DispatchKey, Cubin | Kernel] = {}
        self._parked: dict[DispatchKey, list[Call[Any]]] = {}
        self._lock = threading.Lock()

    def get(self, key: DispatchKey) -> Kernel | None:
        """The loaded kernel, or None where it must be compiled first. Raises what ``Device.load`` raises."""
        kernel = self._kernels.get(key)
        if kernel is not None:
            return kernel
        product = self._products.get(key)
        if product is None:
            return None
        if isinstance(product, Cubin):
            kernel = self._post.services.device.load(product, product.entry_points[0])
        else:
            kernel = product
        self._kernels[key] = kernel
        return kernel

    def wait_for(self, key: DispatchKey, call: Call[Any]) -> None:
        """Park a call until the key's kernel is there, and have it compiled if nobody has asked yet."""
        from gpu_actors.actors.nvrtc import NvrtcActor, Prepare

        post = self._post
        if call.traced:
            post.services.trace.emit("request.compiling", actor=post.name, request=call.number, key=key)
        with self._lock:
            parked = self._parked.get(key)
            first = parked is None
            if parked is None:
                parked = self._parked[key] = []
            post.park(call)
            parked.append(call)
        if first:
            nvrtc = post.services.handle(NvrtcActor)
            # As urgent as who waits for it, and never held to one waiter's deadline: others may come to wait too.
            compiling = nvrtc.send(Prepare(key), None, None, call.priority)
            compiling.when_done(lambda done: self._compiled(key, done))

    def _compiled(self, key: DispatchKey, compiling: Call[Any]) -> None:
        error = compiling.error
        if error is None:
            self._products[key] = compiling.answer()
        with self._lock:
            parked = self._parked.pop(key)
        if error is None:
            self._post.mailbox.give_back(parked)
            return
        for call in parked:
            call.fail(error if isinstance(error, GpuActorsError) else GpuActorsError(repr(error)))
