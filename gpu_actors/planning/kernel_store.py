"""KernelStore: the kernels of a context, and the calls of its actors that wait for one to be compiled.

A miss never holds a mailbox: the call is parked, the NvrtcActor compiles, and when the kernel is there every call
parked for it goes back to its place in its queue. The store outlives the actors, so no parked call is forgotten.
"""

from __future__ import annotations

import functools
import threading
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

from gpu_actors.compiling.source import Cubin
from gpu_actors.compiling.variant import Variant
from gpu_actors.devices.interface import Kernel, Kernels
from gpu_actors.errors import GpuActorsError
from gpu_actors.kernels.variants import Prepare
from gpu_actors.runtime.call import Call
from gpu_actors.runtime.cell import ActorCell
from gpu_actors.runtime.environment import Environment

__all__ = ["KernelStore"]


# A program may ask for any number of kernels, because each score modification is a kernel of its own.
_CAPACITY = 256


@dataclass(slots=True, eq=False)
class _Entry:
    """The kernel of a variant. product: None while it is compiled. parked: calls that wait, by their cell."""

    product: Cubin | Kernel | None = None
    parked: dict[ActorCell, list[Call[Any]]] = field(default_factory=dict)


class KernelStore:
    """Kernels by variant, as many as ``capacity``, for all actors of a context and from any of their threads.

    A request may take several kernels, so variants come in tuples: a call waits for all of them. Those used longest ago
    are dropped first; the device unloads a kernel once no plan and no launch holds it either. One that is asked for
    again comes from the cubin cache.
    """

    def __init__(self, environment: Environment, capacity: int = _CAPACITY) -> None:
        self._environment = environment
        self._capacity = capacity
        self._entries: OrderedDict[Variant, _Entry] = OrderedDict()
        self._together: dict[tuple[Variant, ...], Kernels] = {}
        # Re-entrant: the garbage collector may end a task, whose request then asks for its kernels here.
        self._lock = threading.RLock()

    def get(self, variants: tuple[Variant, ...], cell: ActorCell) -> Kernels | None:
        """The loaded kernels, or None if one must be compiled first. Raises what ``Device.load`` raises.

        Called on the thread of the cell's actor, which loads those that no actor has loaded yet.
        """
        with self._lock:
            kernels = self._together.get(variants)
            if kernels is not None:
                for variant in variants:
                    self._entries.move_to_end(variant)
                return kernels
            products = [product for variant in variants if (product := self.product(variant)) is not None]
        if len(products) < len(variants):
            return None
        try:
            kernels = Kernels(map(self._load, variants, products))
        except GpuActorsError as error:
            cell.progress.launch_ended(error)
            raise
        with self._lock:
            if all(variant in self._entries for variant in variants):
                self._together[variants] = kernels
        return kernels

    def product(self, variant: Variant) -> Cubin | Kernel | None:
        """What was compiled, or what a device has built or loaded of it. None if it must be compiled first."""
        with self._lock:
            entry = self._entries.get(variant)
            if entry is None or entry.product is None:
                return None
            self._entries.move_to_end(variant)
            return entry.product

    def wait_for(self, variants: tuple[Variant, ...], call: Call[Any], cell: ActorCell) -> None:
        """Park a call of the cell's actor until its kernels are there, and have those compiled that are not yet."""
        missing: list[Variant] = []
        with self._lock:
            awaited = [variant for variant in variants if self.product(variant) is None]
            for variant in awaited:
                if variant not in self._entries:
                    self._entries[variant] = _Entry()
                    missing.append(variant)
            if awaited:
                # If several are missing, the call is given back when the first is there, and waits for the next.
                cell.mailbox.park(call)
                self._entries[awaited[0]].parked.setdefault(cell, []).append(call)
        if not awaited:  # compiled since the actor looked
            cell.mailbox.requeue([call])
            return
        environment = self._environment
        if call.traced:
            environment.trace.emit("request.compiling", actor=cell.name, request=call.number, key=awaited[0])
        for variant in missing:
            # The compile has its caller's priority, and no deadline: other calls may wait for it later.
            compiling = environment.compiler.send(Prepare(variant), None, None, call.priority)
            compiling.when_done(functools.partial(self._compiled, variant))

    def _load(self, variant: Variant, product: Cubin | Kernel) -> Kernel:
        if isinstance(product, Kernel):
            return product
        kernel = self._environment.device.load(product, product.entry_points[0])
        with self._lock:
            if variant in self._entries:
                self._entries[variant].product = kernel
        return kernel

    def _compiled(self, variant: Variant, compiling: Call[Any]) -> None:
        error = compiling.error
        with self._lock:
            # The next request for a variant that failed has it compiled again.
            parked = self._entries.pop(variant).parked
            if error is None:
                self._entries[variant] = _Entry(compiling.answer())
                self._drop_oldest()
        for cell, calls in parked.items():
            if error is None:
                cell.mailbox.requeue(calls)
                continue
            if variant.own is None:  # a user's kernel that does not compile is no fault of the service
                cell.progress.launch_ended(error)
            for call in calls:
                call.fail(error if isinstance(error, GpuActorsError) else GpuActorsError(repr(error)))

    def _drop_oldest(self) -> None:
        compiled = [variant for variant, entry in self._entries.items() if entry.product is not None]
        for variant in compiled[: max(0, len(compiled) - self._capacity)]:
            del self._entries[variant]
            self._together = {key: kernels for key, kernels in self._together.items() if variant not in key}
