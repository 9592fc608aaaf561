"""Plan: everything about a request that does not depend on its data. PlanCache keeps it for similar requests."""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, NamedTuple, TypeAlias, TypeVar

from gpu_actors.attention.problem import AttentionProblem, DispatchKey
from gpu_actors.attention.score_mod import ScoreMod
from gpu_actors.compiling.variant import Variant
from gpu_actors.devices.interface import Device, Kernel, Launch, Outputs, OutputSpec, zero_launch
from gpu_actors.kernels.dispatch import REFERENCE, program_of
from gpu_actors.kernels.few_rows import packed_program
from gpu_actors.kernels.program import NO_VALUES, Program, Target, Values
from gpu_actors.kernels.variants import variants_of

__all__ = [
    "Accumulate",
    "Oracle",
    "Plan",
    "PlanCache",
    "PlanCacheStats",
    "Planned",
    "PlannedMask",
    "attention_outputs",
    "described",
    "forget_plans",
    "program_for",
]

P = TypeVar("P")

Accumulate: TypeAlias = Literal["float64", "float32"]

Oracle: TypeAlias = Callable[[Mapping[str, Any]], Outputs]


def described(array: Any) -> Hashable:
    """The properties of an adopted array, or of None, that decide a plan."""
    return None if array is None else (array.shape, array.strides, array.dtype)


class PlannedMask(NamedTuple):
    """A block mask as kernels take it. lists: names of the lists that a launch reads, in the order of mod's tensors.

    numbers: those of its mask_mod, in the order of the modification's scalars.
    """

    mod: ScoreMod
    lists: tuple[str, ...]
    numbers: tuple[float, ...]


@dataclass(slots=True)
class Plan:
    """A problem with the kernels that answer it.

    program: None if the NumPy oracle answers, which sums in ``accumulate``, or if every answer is 0.
    outputs: what a launch makes if the caller gives no ``out``.
    vacuous: that of the problem, computed once for all requests.
    variants: those of the kernels that `launch` takes, in their order. block_mask: that of the request, or None.
    """

    problem: AttentionProblem
    key: DispatchKey
    program: Program | None
    outputs: Mapping[str, OutputSpec]
    accumulate: Accumulate
    block_mask: PlannedMask | None = None
    vacuous: bool = field(init=False)
    variants: tuple[Variant, ...] = field(init=False)

    def __post_init__(self) -> None:
        self.vacuous = self.problem.vacuous
        self.variants = variants_of(self.program)

    def launch(
        self,
        inputs: Mapping[str, Any],
        oracle: Oracle,
        kernels: Sequence[Kernel],
        values: Values = NO_VALUES,
        into: Any = None,
    ) -> Launch:
        """Return a launch on the operands of one request. into: where its output goes, if the caller gives an array.

        kernels: those of `variants`; empty if the device runs none.
        """
        outputs = self.outputs
        if into is not None:
            outputs = {**outputs, "out": outputs["out"]._replace(into=into)}
        if self.vacuous:
            return zero_launch(self.key, inputs["q"], outputs)
        program = self.program
        if program is None or not kernels:
            return Launch(self.key, inputs, outputs, oracle)
        if program.split is not None:
            inputs = {**inputs, **program.split(inputs)}
        return Launch(self.key, inputs, outputs, oracle, program.steps(kernels, values), program.scratch)


def program_for(
    problem: AttentionProblem, key: DispatchKey, device: Device, lengths_on_host: bool = True
) -> Program | None:
    """What a device launches for a problem, or None if it launches nothing."""
    if key.kernel == REFERENCE.name or problem.vacuous:
        return None
    target = Target(device.info.multiprocessors, device.encode_tensor_map, lengths_on_host)
    make = packed_program if key.decoding and not problem.decoding else program_of
    return make(problem, key, target)


def attention_outputs(problem: AttentionProblem, rows: Sequence[int]) -> dict[str, OutputSpec]:
    """The outputs of a forward launch. rows: the shape of out without its last axis."""
    outputs = {"out": OutputSpec((*rows, problem.head_dim_v), problem.out_dtype)}
    if problem.return_lse:
        outputs["lse"] = OutputSpec(problem.lse_shape, problem.lse_dtype)
    return outputs


class PlanCacheStats(NamedTuple):
    hits: int
    misses: int
    evicted: int
    entries: int


_CACHES: weakref.WeakSet[PlanCache[Any]] = weakref.WeakSet()
_CACHES_LOCK = threading.Lock()


def forget_plans() -> None:
    """Forget every plan of the process, because some may use a kernel that must not run. Any thread may call it."""
    with _CACHES_LOCK:
        caches = list(_CACHES)
    for cache in caches:
        cache.forget()


@dataclass(slots=True, eq=False)
class Planned(Generic[P]):
    """A plan in a cache. brief: whether requests with its signature are `is_brief`; None until one was examined."""

    signature: Hashable
    plan: P
    brief: bool | None = None


class PlanCache(Generic[P]):
    """A bounded map from signatures to plans that forgets the least recently used.

    One actor's thread uses it; any thread may use `peek`, `forget`, `stats` and ``called``.

    called: plans by what their callers wrote (`call_signature`), which is shorter than a signature.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._plans: OrderedDict[Hashable, Planned[P]] = OrderedDict()
        self.called: dict[Hashable, Planned[P]] = {}
        self._latest: Planned[P] | None = None
        self._hits = self._misses = self._evicted = 0
        with _CACHES_LOCK:
            _CACHES.add(self)

    def forget(self) -> None:
        self._latest = None
        self._plans = OrderedDict()
        self.called = {}  # last, so that a thread that adds a plan to it found the plan among the new plans

    def find(self, signature: Hashable) -> P | None:
        """Return the plan of a signature, or None. Raises TypeError for a signature that cannot be hashed."""
        planned = self._plans.get(signature)
        return None if planned is None else self.use(planned)

    def peek(self, signature: Hashable, called: Hashable = None) -> Planned[P] | None:
        """Return what `find` would find, for callers other than the actor. `use` counts the look-up.

        called: the key under which to keep the plan in ``called``, if not None.
        """
        kept = self.called  # before the look-up: `forget` may come after it
        planned = self._plans.get(signature)
        if planned is not None and called is not None:
            if len(kept) >= self._capacity:
                kept.clear()
            kept[called] = planned
        return planned

    def use(self, planned: Planned[P]) -> P:
        """Count a plan as found and return it. It may have been forgotten since."""
        self._hits += 1
        # Most requests have the same plan as the request before, and that plan is at the end already.
        if planned is not self._latest:
            plans = self._plans  # another thread may have replaced it by now
            if planned.signature in plans:
                plans.move_to_end(planned.signature)
                self._latest = planned
        return planned.plan

    def of(self, signature: Callable[[], Hashable], make: Callable[[], P]) -> P:
        """Return the plan of a signature. If there is none, make it and keep it."""
        try:
            known = signature()
            plan = self.find(known)
        except Exception:
            # An option cannot be hashed, or an operand is no array. Validation, in ``make``, names it.
            return make()
        if plan is None:
            plan = make()
            self.add(known, plan)
        return plan

    def add(self, signature: Hashable, plan: P) -> None:
        self._misses += 1
        plans = self._plans
        plans[signature] = self._latest = Planned(signature, plan)
        if len(plans) > self._capacity:
            plans.popitem(last=False)
            self._evicted += 1

    def stats(self) -> PlanCacheStats:
        return PlanCacheStats(self._hits, self._misses, self._evicted, len(self._plans))
