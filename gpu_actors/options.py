"""Everything that can be set when a context is opened."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeAlias

from gpu_actors.clock import SYSTEM_CLOCK, Clock
from gpu_actors.errors import InvalidRequest

if TYPE_CHECKING:
    from gpu_actors.actors.base import ServiceActor
    from gpu_actors.testing.faults import FaultPlan
    from gpu_actors.tracing import TraceEvent

__all__ = ["ContextOptions", "EmulationOptions", "MockOptions", "RestartPolicy"]

Delivery: TypeAlias = Literal["late", "eager", "random"]
Schedule: TypeAlias = Literal["round_robin", "greedy", "random", "lane"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MockOptions:
    """How the mock device answers.

    compute: run the NumPy oracle; False answers `MockModeError` to every launch. Default True.
    dtype: what the oracle accumulates in, "float64" (default) or "float32".
    latency: seconds that each launch takes on top of the oracle, one after the other as on a stream. Default 0.
    """

    compute: bool = True
    dtype: Literal["float64", "float32"] = "float64"
    latency: float = 0.0

    def __post_init__(self) -> None:
        require(self.dtype in ("float64", "float32"), "dtype", self.dtype, 'must be "float64" or "float32"')
        require(self.latency >= 0, "latency", self.latency, "must be seconds >= 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class EmulationOptions:
    """How the emulated device orders what a GPU leaves open.

    delivery: when asynchronous copies land: as late as allowed (default), at once, or at random.
    schedule: which warp or lane runs next. Default "greedy".
    seed: of the random deliveries and schedules. Default 0.
    threads: CPU threads that run independent blocks. Default 2.
    """

    delivery: Delivery = "late"
    schedule: Schedule = "greedy"
    seed: int = 0
    threads: int = 2

    def __post_init__(self) -> None:
        deliveries = ("late", "eager", "random")
        schedules = ("round_robin", "greedy", "random", "lane")
        require(self.delivery in deliveries, "delivery", self.delivery, f"must be one of {deliveries}")
        require(self.schedule in schedules, "schedule", self.schedule, f"must be one of {schedules}")
        require(self.threads >= 1, "threads", self.threads, "must be >= 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartPolicy:
    """What the ContextActor does when a child raises.

    strategy: "one_for_one" restarts the child alone, "all_for_one" its siblings with it. Default "one_for_one".
    max_restarts: restarts granted within ``window`` seconds; one more escalates. Defaults 5 in 60 s.
    backoff, backoff_factor, backoff_max: seconds before the first restart in a window, the factor from each to the
    next, and the ceiling. Defaults 0.02 s, 2, 5 s.
    """

    strategy: Literal["one_for_one", "all_for_one"] = "one_for_one"
    max_restarts: int = 5
    window: float = 60.0
    backoff: float = 0.02
    backoff_factor: float = 2.0
    backoff_max: float = 5.0

    def __post_init__(self) -> None:
        strategies = ("one_for_one", "all_for_one")
        require(self.strategy in strategies, "strategy", self.strategy, f"must be one of {strategies}")
        require(self.max_restarts >= 0, "max_restarts", self.max_restarts, "must be >= 0")
        require(self.window > 0, "window", self.window, "must be seconds > 0")
        require(self.backoff >= 0, "backoff", self.backoff, "must be seconds >= 0")
        require(self.backoff_factor >= 1, "backoff_factor", self.backoff_factor, "must be >= 1")
        require(self.backoff_max >= self.backoff, "backoff_max", self.backoff_max, "must be >= backoff")

    def delay(self, restarts: int) -> float:
        """Seconds to wait before the next restart when ``restarts`` lie in the window already."""
        return min(self.backoff_max, self.backoff * self.backoff_factor**restarts)


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextOptions:
    """Settings of one context. Frozen; make a changed copy with ``dataclasses.replace``.

    arch: whose kernels to use ("sm_80", "sm_90a", ...). Default: the device's own; on mock and emulated "sm_90a".
    max_in_flight: launches an actor may have unfinished at once. Default 8.
    mailbox_capacity: requests that may wait for an actor; one more is answered `Overloaded`. Default 1024.
    cache_dir: folder of the cubin cache. Default: the user's cache folder, or $GPU_ACTORS_CACHE_DIR.
    cache_max_bytes: its size bound; least recently used entries go first. Default 1 GiB.
    prewarmed: read-only cache folders that are searched before ``cache_dir``. Default none.
    offline: never compile; a variant that no cache holds is a `CompileError`. Default False.
    mock, emulation: how those devices behave. Default: `MockOptions()`, `EmulationOptions()`.
    fault_plan: faults to inject at launches (see `gpu_actors.testing.FaultPlan`). Default none.
    restart: the supervision policy of the children. Default: `RestartPolicy()`.
    actors: further actor types to start as children. Default none.
    default_timeout: seconds granted to a request that names neither deadline nor timeout. Default None: no limit.
    hang_timeout: seconds after which a launch that has not finished counts as hung and the context as lost. Default
        None: 30 s on CUDA, 600 s elsewhere.
    drain_timeout: seconds that leaving the context waits for unanswered requests before it stops them. Default 30.
    compile_threads: compilations that may run at once. Default: the number of CPUs, at most 8.
    compile_on_mock: compile each kernel that a request would use even though mock runs the oracle. Default False.
    clock: where time is read. Default: ``time.monotonic``.
    on_event: called with each `TraceEvent`, on the thread where it happens. Default none.
    """

    arch: str | None = None
    max_in_flight: int = 8
    mailbox_capacity: int = 1024
    cache_dir: str | os.PathLike[str] | None = None
    cache_max_bytes: int = 1 << 30
    prewarmed: tuple[str | os.PathLike[str], ...] = ()
    offline: bool = False
    mock: MockOptions | None = None
    emulation: EmulationOptions | None = None
    fault_plan: FaultPlan | None = None
    restart: RestartPolicy = field(default_factory=RestartPolicy)
    actors: tuple[type[ServiceActor], ...] = ()
    default_timeout: float | None = None
    hang_timeout: float | None = None
    drain_timeout: float = 30.0
    compile_threads: int = field(default_factory=lambda: min(8, os.cpu_count() or 1))
    compile_on_mock: bool = False
    clock: Clock = SYSTEM_CLOCK
    on_event: Callable[[TraceEvent], None] | None = None

    def __post_init__(self) -> None:
        for name in ("max_in_flight", "mailbox_capacity", "cache_max_bytes", "compile_threads"):
            value = getattr(self, name)
            require(isinstance(value, int) and value >= 1, name, value, "must be an int >= 1")
        for name in ("default_timeout", "hang_timeout"):
            value = getattr(self, name)
            require(value is None or value > 0, name, value, "must be seconds > 0, or None")
        require(self.drain_timeout >= 0, "drain_timeout", self.drain_timeout, "must be seconds >= 0")

    def hang_limit(self, kind: str) -> float:
        """``hang_timeout``, or its default on a device of that kind."""
        if self.hang_timeout is not None:
            return self.hang_timeout
        return 30.0 if kind == "cuda" else 600.0

    @property
    def cache_path(self) -> Path | None:
        return None if self.cache_dir is None else Path(self.cache_dir)


def require(condition: bool, field_name: str, value: object, reason: str) -> None:
    """Raise `InvalidRequest` for a setting that does not hold."""
    if not condition:
        raise InvalidRequest(field_name, value, reason)
