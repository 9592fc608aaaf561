"""KernelStore: the kernels of a context, and the calls of its actors that wait for one to be compiled.

A miss never blocks a mailbox: the call is parked while the NvrtcActor compiles. Once the kernel is compiled, every call
parked for it returns to its place in its queue. The store outlives the actors, so no parked call is lost.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from gpu_actors.attention.problem import DispatchKey
from gpu_actors.compiling.source import Cubin
from gpu_actors.compiling.variant import Variant
from gpu_actors.devices.interface import Kernel, Kernels
from gpu_actors.errors import GpuActorsError, Unqualified
from gpu_actors.kernels.dispatch import family_of
from gpu_actors.kernels.variants import Prepare, variant_of
from gpu_actors.planning.plan import forget_plans
from gpu_actors.runtime.call import Call
from gpu_actors.runtime.cell import ActorCell
from gpu_actors.runtime.environment import Environment

__all__ = ["KernelStore"]

# A program may ask for any number of kernels, because each score modification is a kernel of its own.
_CAPACITY = 256


@dataclass(slots=True, eq=False)
class _Entry:
    """The kernel of a variant.

    product: None until it is compiled. parked: waiting calls, by their cell. used: the store's count at the last use.
    """

    product: Cubin | Kernel | None = None
    used: int = 0
    parked: dict[ActorCell, list[Call[Any]]] = field(default_factory=dict)


class Quarantine:
    """The variants of a context that failed their proof and are not launched. It only grows; any thread may use it."""

    def __init__(self) -> None:
        self._failed: dict[Variant, Unqualified] = {}

    def add(self, variant: Variant, error: Unqualified) -> None:
        self._failed[variant] = error

    def of(self, variants: Iterable[Variant]) -> Unqualified | None:
        """The failure of the first of the variants that has one."""
        return next((error for variant in variants if (error := self._failed.get(variant)) is not None), None)

    def bars(self, key: DispatchKey) -> Unqualified | None:
        """The failure of the kernel of a key, or of one that may be launched beside it."""
        names = (key.kernel, *family_of(key).companions)
        return self.of(
            variant_of(key if name == key.kernel else dataclasses.replace(key, kernel=name)) for name in names
        )

    def failures(self) -> tuple[Unqualified, ...]:
        return tuple(self._failed.values())


class KernelStore:
    """Up to ``capacity`` kernels by variant, for all actors of a context. Any of their threads may use it.

    A request may take several kernels, so variants come in tuples: a call waits for all of them. The least recently
    used kernels are dropped first. The device unloads a dropped kernel once no plan and no launch holds it. A kernel
    that is needed again comes from the cubin cache.
    """

    def __init__(self, environment: Environment, capacity: int = _CAPACITY) -> None:
        self._environment = environment
        self._capacity = capacity
        self._entries: dict[Variant, _Entry] = {}
        self._together: dict[tuple[Variant, ...], tuple[Kernels, list[_Entry]]] = {}
        self._count = itertools.count(1)
        self.quarantine: Quarantine = Quarantine()
        # Re-entrant: the garbage collector may end a task, whose request then asks for its kernels here.
        self._lock = threading.RLock()

    def get(self, variants: tuple[Variant, ...], cell: ActorCell) -> Kernels | None:
        """Return the loaded kernels, or None if one must be compiled first.

        Called on the thread of the cell's actor. It loads the kernels that no actor has loaded yet.
        """
        together = self._together.get(variants)
        if together is None:
            entries = [entry for variant in variants if (entry := self._compiled_entry(variant)) is not None]
            if len(entries) < len(variants):
                return None
            try:
                together = Kernels(map(self._load, entries)), entries
            except GpuActorsError as error:
                cell.progress.launch_ended(error)
                raise
            with self._lock:
                if all(self._entries.get(variant) is entry for variant, entry in zip(variants, entries, strict=True)):
                    if len(self._together) >= self._capacity:
                        self._together.clear()
                    self._together[variants] = together
        used = next(self._count)
        for entry in together[1]:
            entry.used = used
        return together[0]

    def product(self, variant: Variant) -> Cubin | Kernel | None:
        """Return a variant's cubin, or the kernel that a device built or loaded. None if it must be compiled first."""
        entry = self._compiled_entry(variant)
        if entry is None:
            return None
        entry.used = next(self._count)
        return entry.product

    def wait_for(self, variants: tuple[Variant, ...], call: Call[Any], cell: ActorCell) -> None:
        """Park a call of the cell's actor until its kernels are compiled, and ask for those that are missing."""
        failure = self.quarantine.of(variants)
        if failure is not None:
            forget_plans()
            if call.prepared is None:
                raise failure
            # The call's plan is older than the quarantine. A new plan may have other kernels.
            call.prepared = None
            cell.mailbox.requeue([call])
            return
        missing: list[Variant] = []
        with self._lock:
            awaited = [variant for variant in variants if self._compiled_entry(variant) is None]
            for variant in awaited:
                if variant not in self._entries:
                    self._entries[variant] = _Entry()
                    missing.append(variant)
            if awaited:
                # If several are missing, the call is requeued after the first is compiled, and then waits for the next.
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

    def _compiled_entry(self, variant: Variant) -> _Entry | None:
        entry = self._entries.get(variant)
        return None if entry is None or entry.product is None else entry

    def _load(self, entry: _Entry) -> Kernel:
        product = entry.product  # another actor's thread may load it, too: the device returns the same to both
        if isinstance(product, Cubin):
            product = entry.product = self._environment.device.load(product, product.entry_points[0])
        assert product is not None
        return product

    def _compiled(self, variant: Variant, compiling: Call[Any]) -> None:
        error = compiling.error
        if isinstance(error, Unqualified):
            self.quarantine.add(variant, error)
            self._environment.device.barred = self.quarantine.bars
            forget_plans()
        with self._lock:
            # The next request for a failed variant compiles it again.
            parked = self._entries.pop(variant).parked
            if error is None:
                self._entries[variant] = _Entry(compiling.answer(), next(self._count))
                self._drop_oldest()
        for cell, calls in parked.items():
            if isinstance(error, Unqualified):
                for call in calls:
                    call.prepared = None  # to plan again, for other kernels if there are any
            if error is None or isinstance(error, Unqualified):
                cell.mailbox.requeue(calls)
                continue
            if variant.own is None:  # a user's kernel that does not compile is no fault of the service
                cell.progress.launch_ended(error)
            for call in calls:
                call.fail(error if isinstance(error, GpuActorsError) else GpuActorsError(repr(error)))

    def _drop_oldest(self) -> None:
        compiled = [variant for variant, entry in self._entries.items() if entry.product is not None]
        compiled.sort(key=lambda variant: self._entries[variant].used)
        for variant in compiled[: max(0, len(compiled) - self._capacity)]:
            del self._entries[variant]
            self._together = {key: kernels for key, kernels in self._together.items() if variant not in key}
