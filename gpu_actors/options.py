"""The options of a context, which are set when it is opened."""

from __future__ import annotations

import math
import os
import warnings
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeAlias, get_args

from gpu_actors.clock import SYSTEM_CLOCK, Clock
from gpu_actors.compiling.source import check_arch
from gpu_actors.devices.fault_plan import FaultPlan
from gpu_actors.errors import InvalidRequest
from gpu_actors.fields import duration, expect, flag, integer, one_of, real
from gpu_actors.tracing import TraceEvent

__all__ = ["ContextOptions", "EmulationOptions", "MockOptions", "RestartPolicy"]

Delivery: TypeAlias = Literal["late", "eager", "random"]
Schedule: TypeAlias = Literal["round_robin", "greedy", "random", "lane"]
Arithmetic: TypeAlias = Literal["nearest", "hardware"]
Qualify: TypeAlias = Literal["off", "first-use", "all"]


class ActorType:
    """The type of ``ContextOptions(actors=...)``. Only `ServiceActor` derives from it: pass its subclasses."""

    label: ClassVar[str] = ""
    vital: ClassVar[bool] = False


@dataclass(frozen=True, slots=True, kw_only=True)
class MockOptions:
    """How the mock device answers.

    compute: whether to run the NumPy oracle. If False, every launch raises `MockModeError`. Default True.
    dtype: the dtype in which the oracle accumulates, "float64" (default) or "float32".
    latency: seconds that each launch takes besides the oracle. Launches run one after the other, as on a stream.
        Default 0.
    """

    compute: bool = True
    dtype: Literal["float64", "float32"] = "float64"
    latency: float = 0.0

    def __post_init__(self) -> None:
        flag("compute", self.compute)
        one_of("dtype", self.dtype, ("float64", "float32"))
        duration("latency", self.latency)


@dataclass(frozen=True, slots=True, kw_only=True)
class EmulationOptions:
    """How the emulated device orders events whose order a GPU leaves open, and how it rounds.

    delivery: when asynchronous copies land: as late as allowed (default), at once, or at random.
    schedule: which warp or lane runs next. Default "greedy".
    seed: the seed of random deliveries and schedules, and of the order in which blocks start. Default 0: in ascending
        order.
    threads: CPU threads that run independent blocks. Default 2.
    contraction: whether the compiler may fuse a product and a sum, as ptxas does; this saves a rounding. A kernel whose
        results depend on it returns other numbers on a GPU. "random" fuses them only in blocks of code that ``seed``
        picks, and needs clang++ or zig. Default False: each operation is rounded.
    arithmetic: with "nearest" (default) approximate functions are close to exact, and tensor cores sum 16-bit products
        in fp32. With "hardware" such functions have random errors, by ``seed``, up to the bounds that NVIDIA documents,
        and sums of tensor cores are cut off as measured on Ampere and Hopper.
    """

    delivery: Delivery = "late"
    schedule: Schedule = "greedy"
    seed: int = 0
    threads: int = 2
    contraction: bool | Literal["random"] = False
    arithmetic: Arithmetic = "nearest"

    def __post_init__(self) -> None:
        one_of("delivery", self.delivery, get_args(Delivery))
        one_of("schedule", self.schedule, get_args(Schedule))
        integer("seed", self.seed, 0, (1 << 64) - 1)
        integer("threads", self.threads, 1)
        if not (isinstance(self.contraction, str) and self.contraction == "random"):
            flag("contraction", self.contraction)
        one_of("arithmetic", self.arithmetic, get_args(Arithmetic))


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartPolicy:
    """What the ContextActor does when a child raises.

    strategy: "one_for_one" restarts the child alone, "all_for_one" its siblings too. Default "one_for_one".
    max_restarts: the restarts allowed within ``window`` seconds. Vital actors are counted together, each other actor
        alone. One more failure fails the context, or stops the actor if it is not vital. Defaults 5 in 60 s.
    backoff, backoff_factor, backoff_max: seconds before the first restart in a window, the factor from each delay to
    the next, and the longest delay. Defaults 0.02 s, 2, 5 s.
    """

    strategy: Literal["one_for_one", "all_for_one"] = "one_for_one"
    max_restarts: int = 5
    window: float = 60.0
    backoff: float = 0.02
    backoff_factor: float = 2.0
    backoff_max: float = 5.0

    def __post_init__(self) -> None:
        one_of("strategy", self.strategy, ("one_for_one", "all_for_one"))
        integer("max_restarts", self.max_restarts, 0)
        duration("window", self.window, above_0=True)
        duration("backoff", self.backoff)
        factor = real("backoff_factor", self.backoff_factor, "a finite number >= 1")
        expect(factor >= 1, "backoff_factor", self.backoff_factor, "must be a finite number >= 1")
        longest = duration("backoff_max", self.backoff_max)
        expect(longest >= self.backoff, "backoff_max", self.backoff_max, f"must be >= backoff, {self.backoff}")

    def delay(self, restarts: int) -> float:
        """Seconds to wait before the next restart, after ``restarts`` earlier ones in the window."""
        try:
            return min(self.backoff_max, self.backoff * float(self.backoff_factor) ** restarts)
        except OverflowError:
            return self.backoff_max if self.backoff else 0.0

    def grant(self, restarts: deque[float], now: float) -> float | None:
        """Count a restart, and return the seconds to wait before it. None if the window has ``max_restarts`` already.

        restarts: the times of earlier restarts. ``now`` is added, and times that have left the window are removed.
        """
        while restarts and now - restarts[0] > self.window:
            restarts.popleft()
        if len(restarts) >= self.max_restarts:
            return None
        delay = self.delay(len(restarts))
        restarts.append(now)
        return delay


_RECORDS_NOTHING = (
    "record_launches has no effect: no launch is recorded. Capture a step of a KvCache (KvStep.captured) or a request "
    "of flash_attn.prepare into a CUDA graph of your own"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextOptions:
    """Settings of one context. Frozen; make a changed copy with ``dataclasses.replace``.

    Raises `InvalidRequest` (`Unsupported` for an inexact arch), which names the setting.

    arch: the architecture whose kernels are used ("sm_80", "sm_90a", ...). Default: the device's own; on mock and
        emulated "sm_90a".
    max_in_flight: the launches that an actor may have in flight at once. Default 8.
    coalesce_max: the number of requests over caches (decode, paged and of a KvCache) that may share a launch if they
        wait together and agree; with 1 each has its own launch. Default 256.
    coalesce_delay_us: microseconds that such a request waits for others before its launch. Default 0: it joins only
        requests that wait already.
    record_launches: deprecated and without effect: nothing is recorded. Capture a step of a `KvCache`, or a request of
        `flash_attn.prepare`, into a CUDA graph instead. True issues a DeprecationWarning. Default False.
    mailbox_capacity: requests that may wait for an actor; the next raises `Overloaded`. Default 1024.
    cache_dir: folder of the cubin cache; "~" is the home folder. If the folder cannot be used, the context does not
        open. Default: $GPU_ACTORS_CACHE_DIR, or the user's cache folder; the first compile opens it.
    cache_max_bytes: the cache's size bound; least recently used entries are evicted first. Default 1 GiB.
    prewarmed: read-only cache folders that are searched before ``cache_dir``. Default none.
    offline: never compile; a variant that no cache holds raises `CompileError`. Default False.
    mock, emulation: how those devices behave. Default: `MockOptions()`, `EmulationOptions()`.
    fault_plan: faults to inject at launches (see `gpu_actors.testing.FaultPlan`). Default none.
    restart: the supervision policy of the children. Default: `RestartPolicy()`.
    actors: further actor types to start as children. Default none.
    degraded_after: consecutive failures of an actor, of its launches or its incarnations, after which health is
        "degraded". The context is then not ready if the actor is vital (see `ServiceActor`). A request's own fault does
        not count. Default 5.
    probe_interval: seconds between the launches by which a context that is not ready for that reason tests itself. It
        is ready again once a probe's or a request's launch succeeds. Default 1.
    default_timeout: the timeout, in seconds, of a request without deadline or timeout, unless it frees memory. Default
        None: no limit.
    qualify: when each kernel must prove that it computes correctly on this machine, before any request is launched on
        it. "first-use": when this machine first uses it; the verdict is kept beside the cubin. "all": once in each
        context, even if a verdict was kept. "off": never. Default None: "first-use" on CUDA, "off" elsewhere.
    invariant: whether a row of attention has the same bits in any batch, in a prompt, in a chunk of it and decoded, and
        gradients have the same bits each time (docs/invariance.md). Requests that cannot keep the same bits raise
        `Unsupported`. Default False.
    hang_timeout: seconds after which an unfinished launch counts as hung and the context as lost. Default None: 30 s on
        CUDA, 600 s elsewhere. A worker or child process that sends nothing for this time is lost too, by default after
        30 s on any device: a long launch does not keep it from answering.
    drain_timeout: seconds that leaving the context waits for unanswered requests before it stops them. Default 30.
    compile_threads: compiles that may run at once. Default: the number of CPUs, at most 8.
    compile_on_mock: compile each kernel that a request would use, although mock runs the oracle. Default False.
    clock: the source of time. Default: ``time.monotonic``.
    on_event: called with each `TraceEvent`, on the thread where it happens. Default none.
    """

    arch: str | None = None
    max_in_flight: int = 8
    coalesce_max: int = 256
    coalesce_delay_us: float = 0.0
    record_launches: bool = False
    mailbox_capacity: int = 1024
    cache_dir: str | os.PathLike[str] | None = None
    cache_max_bytes: int = 1 << 30
    prewarmed: tuple[str | os.PathLike[str], ...] = ()
    offline: bool = False
    mock: MockOptions | None = None
    emulation: EmulationOptions | None = None
    fault_plan: FaultPlan | None = None
    restart: RestartPolicy = field(default_factory=RestartPolicy)
    actors: tuple[type[ActorType], ...] = ()
    degraded_after: int = 5
    probe_interval: float = 1.0
    default_timeout: float | None = None
    qualify: Qualify | None = None
    invariant: bool = False
    hang_timeout: float | None = None
    drain_timeout: float = 30.0
    compile_threads: int = field(default_factory=lambda: min(8, os.cpu_count() or 1))
    compile_on_mock: bool = False
    clock: Clock = SYSTEM_CLOCK
    on_event: Callable[[TraceEvent], None] | None = None

    def __post_init__(self) -> None:
        if self.arch is not None:
            check_arch(self.arch)
        counts = ("max_in_flight", "coalesce_max", "mailbox_capacity", "cache_max_bytes", "compile_threads")
        for name in (*counts, "degraded_after"):
            integer(name, getattr(self, name), 1)
        delay = real("coalesce_delay_us", self.coalesce_delay_us, "a finite number of microseconds >= 0")
        expect(delay >= 0, "coalesce_delay_us", delay, "must be a finite number of microseconds >= 0")
        for name in ("offline", "compile_on_mock", "record_launches"):
            flag(name, getattr(self, name))
        if self.record_launches:
            warnings.warn(_RECORDS_NOTHING, DeprecationWarning, stacklevel=3)
        if self.qualify is not None:
            one_of("qualify", self.qualify, get_args(Qualify), 'must be "off", "first-use", "all" or None')
        if self.cache_dir is not None:
            _path("cache_dir", self.cache_dir)
        object.__setattr__(self, "prewarmed", _several("prewarmed", self.prewarmed, "paths"))
        for path in self.prewarmed:
            _path("prewarmed", path)
        self._check_types()
        self._check_actors()
        flag("invariant", self.invariant)
        duration("probe_interval", self.probe_interval, above_0=True)
        if self.default_timeout is not None:
            duration("default_timeout", self.default_timeout, above_0=True)
        # An infinite limit is valid: a user may want to wait without a limit.
        if self.hang_timeout is not None and not _endless(self.hang_timeout):
            duration("hang_timeout", self.hang_timeout, above_0=True)
        if not _endless(self.drain_timeout):
            duration("drain_timeout", self.drain_timeout)

    def _check_types(self) -> None:
        optional = {"mock": MockOptions, "emulation": EmulationOptions, "fault_plan": FaultPlan}
        for name, kind in optional.items():
            value = getattr(self, name)
            expect(value is None or isinstance(value, kind), name, value, f"must be {kind.__name__}, or None")
        expect(isinstance(self.restart, RestartPolicy), "restart", self.restart, "must be RestartPolicy")
        methods = [getattr(self.clock, name, None) for name in ("now", "wait")]
        holds = not isinstance(self.clock, type) and all(map(callable, methods))
        expect(holds, "clock", self.clock, "must be a Clock, an object with now() and wait()")
        holds = self.on_event is None or callable(self.on_event)
        expect(holds, "on_event", self.on_event, "must be a function that takes a TraceEvent, or None")

    def _check_actors(self) -> None:
        object.__setattr__(self, "actors", _several("actors", self.actors, "ServiceActor subclasses"))
        labels = set()
        for kind in self.actors:
            holds = isinstance(kind, type) and issubclass(kind, ActorType) and ActorType not in kind.__bases__
            expect(holds, "actors", kind, "must be subclasses of ServiceActor")
            label = kind.label or kind.__name__
            expect(label not in labels, "actors", kind, f"must have distinct labels: two have the label {label!r}")
            labels.add(label)

    def hang_limit(self, kind: str) -> float:
        """``hang_timeout``, or its default on a device of that kind."""
        if self.hang_timeout is not None:
            return self.hang_timeout
        return 30.0 if kind == "cuda" else 600.0

    def qualifies(self, kind: str) -> Qualify:
        """``qualify``, or its default on a device of that kind."""
        if self.qualify is not None:
            return self.qualify
        return "first-use" if kind == "cuda" else "off"

    @property
    def cache_path(self) -> Path | None:
        """``cache_dir`` as an absolute path, or None for the default."""
        return None if self.cache_dir is None else _path("cache_dir", self.cache_dir).absolute()

    @property
    def prewarmed_paths(self) -> tuple[Path, ...]:
        """``prewarmed`` as absolute paths."""
        return tuple(_path("prewarmed", path).absolute() for path in self.prewarmed)


def _endless(seconds: object) -> bool:
    return isinstance(seconds, float) and seconds == math.inf


def _path(name: str, value: object) -> Path:
    try:
        text = os.fspath(value)  # type: ignore[call-overload]
        if isinstance(text, str) and text and "\0" not in text:
            os.fsencode(text)
            return Path(text).expanduser()
    except (TypeError, UnicodeError, RuntimeError):  # expanduser raises RuntimeError for an unknown "~user"
        pass
    raise InvalidRequest(name, value, "must name a folder: a str or os.PathLike, not empty")


def _several(name: str, values: object, of: str) -> tuple[Any, ...]:
    if not isinstance(values, tuple | list):
        raise InvalidRequest(name, values, f"must be a tuple of {of}")
    return tuple(values)
