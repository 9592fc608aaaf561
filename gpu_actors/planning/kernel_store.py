"""KernelStore: the loaded kernels of an actor, and the calls that wait for one to be compiled.

A miss never holds the mailbox: the call is parked, the NvrtcActor compiles, and when the cubin is there every call
parked for it goes back to its place in the queue. The store outlives the actor, so no parked call is forgotten.
"""

from __future__ import annotations

import functools
import threading
from collections import OrderedDict
from typing import Any

from gpu_actors.compiling.source import Cubin
from gpu_actors.compiling.variant import Variant
from gpu_actors.devices.interface import Kernel, Kernels
from gpu_actors.errors import GpuActorsError
from gpu_actors.kernels.variants import Prepare
from gpu_actors.runtime.call import Call
from gpu_actors.runtime.cell import ActorCell

__all__ = ["KernelStore"]


# A program may ask for any number of kernels, because each score modification is a kernel of its own.
_CAPACITY = 256


class KernelStore:
    """Kernels by dispatch key, as many as ``capacity``. `get` and `wait_for` are for the thread that does the
    actor's work.

    A request may take several kernels, so keys come in tuples: a call waits for all of them. Those used longest ago are
    let go first; the device unloads a kernel once no plan and no launch holds it either. One that is asked for again
    comes from the cubin cache.
    """

    def __init__(self, cell: ActorCell, capacity: int = _CAPACITY) -> None:
        self._cell = cell
        self._capacity = capacity
        self._kernels: OrderedDict[tuple[Variant, ...], Kernels] = OrderedDict()
        self._products: OrderedDict[Variant, Cubin | Kernel] = OrderedDict()
        self._parked: dict[Variant, list[Call[Any]]] = {}
        self._lock = threading.Lock()

    def get(self, keys: tuple[Variant, ...]) -> Kernels | None:
        """The loaded kernels, or None where one must be compiled first. Raises what ``Device.load`` raises."""
        kernels = self._kernels.get(keys)
        if kernels is not None:
            self._kernels.move_to_end(keys)
            return kernels
        with self._lock:
            if not all(key in self._products for key in keys):
                return None
            for key in keys:
                self._products.move_to_end(key)
            products = [self._products[key] for key in keys]
        try:
            load = self._cell.environment.device.load
            kernels = Kernels(load(one, one.entry_points[0]) if isinstance(one, Cubin) else one for one in products)
        except GpuActorsError as error:
            self._cell.progress.launch_ended(error)
            raise
        self._kernels[keys] = kernels
        _let_go(self._kernels, self._capacity)
        return kernels

    def wait_for(self, keys: tuple[Variant, ...], call: Call[Any]) -> None:
        """Park a call until its kernels are there, and have those compiled that are not asked for yet."""
        cell = self._cell
        missing: list[Variant] = []
        with self._lock:
            awaited = [key for key in keys if key not in self._products]
            for key in awaited:
                if key not in self._parked:
                    self._parked[key] = []
                    missing.append(key)
            if awaited:
                # Where several are missing, the call is given back when the first is there, and waits for the next.
                cell.mailbox.park(call)
                self._parked[awaited[0]].append(call)
        if not awaited:  # compiled since the actor looked
            cell.mailbox.requeue([call])
            return
        if call.traced:
            cell.environment.trace.emit("request.compiling", actor=cell.name, request=call.number, key=awaited[0])
        for key in missing:
            # The compile has its caller's priority, and no deadline: other calls may wait for it later.
            compiling = cell.environment.compiler.send(Prepare(key), None, None, call.priority)
            compiling.when_done(functools.partial(self._compiled, key))

    def _compiled(self, key: Variant, compiling: Call[Any]) -> None:
        error = compiling.error
        with self._lock:
            if error is None:
                self._products[key] = compiling.answer()
                # Kernels that no call asks for any more are let go of; those of one request are among the newest.
                _let_go(self._products, self._capacity)
            parked = self._parked.pop(key)
        if error is None:
            self._cell.mailbox.requeue(parked)
            return
        self._cell.progress.launch_ended(error)
        for call in parked:
            call.fail(error if isinstance(error, GpuActorsError) else GpuActorsError(repr(error)))


def _let_go(held: OrderedDict[Any, Any], capacity: int) -> None:
    while len(held) > capacity:
        held.popitem(last=False)
