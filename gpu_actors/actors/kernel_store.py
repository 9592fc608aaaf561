"""KernelStore: the loaded kernels of an actor, and the calls that wait for one to be compiled.

A miss never holds the mailbox: the call is parked, the NvrtcActor compiles, and when the cubin is there every call
parked for it goes back to its place in the queue. The store outlives the actor, so nobody parked is forgotten.
"""

from __future__ import annotations

import functools
import threading
from typing import TYPE_CHECKING, Any

from gpu_actors.actors.call import Call
from gpu_actors.devices.interface import Kernel
from gpu_actors.errors import GpuActorsError
from gpu_actors.kernels.source import Cubin
from gpu_actors.kernels.variants import KernelKey

if TYPE_CHECKING:
    from gpu_actors.actors.post import Post

__all__ = ["KernelStore"]


class KernelStore:
    """Kernels by dispatch key. `get` and `wait_for` are for the actor's thread.

    A request may take several kernels, so keys come in tuples: a call waits for all of them.
    """

    def __init__(self, post: Post) -> None:
        self._post = post
        self._kernels: dict[tuple[KernelKey, ...], tuple[Kernel, ...]] = {}
        self._products: dict[KernelKey, Cubin | Kernel] = {}
        self._parked: dict[KernelKey, list[Call[Any]]] = {}
        self._lock = threading.Lock()

    def get(self, keys: tuple[KernelKey, ...]) -> tuple[Kernel, ...] | None:
        """The loaded kernels, or None where one must be compiled first. Raises what ``Device.load`` raises."""
        kernels = self._kernels.get(keys)
        if kernels is None and all(key in self._products for key in keys):
            kernels = self._kernels[keys] = tuple(self._load(self._products[key]) for key in keys)
        return kernels

    def wait_for(self, keys: tuple[KernelKey, ...], call: Call[Any]) -> None:
        """Park a call until its kernels are there, and have those compiled that nobody has asked for yet."""
        from gpu_actors.actors.nvrtc import NvrtcActor, Prepare

        post = self._post
        missing: list[KernelKey] = []
        with self._lock:
            awaited = [key for key in keys if key not in self._products]
            for key in awaited:
                if key not in self._parked:
                    self._parked[key] = []
                    missing.append(key)
            if awaited:
                # With several missing, the call comes back when the first is there and waits again, for the next one.
                post.park(call)
                self._parked[awaited[0]].append(call)
        if not awaited:  # compiled since the actor looked
            post.mailbox.give_back([call])
            return
        if call.traced:
            post.services.trace.emit("request.compiling", actor=post.name, request=call.number, key=awaited[0])
        nvrtc = post.services.handle(NvrtcActor)
        for key in missing:
            # As urgent as who waits for it, and never held to one waiter's deadline: others may come to wait too.
            compiling = nvrtc.send(Prepare(key), None, None, call.priority)
            compiling.when_done(functools.partial(self._compiled, key))

    def _load(self, product: Cubin | Kernel) -> Kernel:
        if isinstance(product, Cubin):
            return self._post.services.device.load(product, product.entry_points[0])
        return product

    def _compiled(self, key: KernelKey, compiling: Call[Any]) -> None:
        error = compiling.error
        with self._lock:
            if error is None:
                self._products[key] = compiling.answer()
            parked = self._parked.pop(key)
        if error is None:
            self._post.mailbox.give_back(parked)
            return
        for call in parked:
            call.fail(error if isinstance(error, GpuActorsError) else GpuActorsError(repr(error)))
