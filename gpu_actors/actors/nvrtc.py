"""NvrtcActor: compiles kernels on its own threads, or takes them from the cubin cache."""

from __future__ import annotations

import functools
import hashlib
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from gpu_actors.actors.compiled_kernel import raw_module
from gpu_actors.attention.problem import DispatchKey
from gpu_actors.compiling.source import Cubin, KernelResources, KernelSource
from gpu_actors.compiling.variant import Variant
from gpu_actors.devices.interface import Kernel
from gpu_actors.errors import GpuActorsError, InvalidRequest, caused
from gpu_actors.kernels.key_checks import check_key
from gpu_actors.kernels.variants import Prepare, variant_of
from gpu_actors.runtime.actor import ServiceActor
from gpu_actors.runtime.call import Call
from gpu_actors.runtime.cell import ActorCell
from gpu_actors.runtime.handle import ActorHandle
from gpu_actors.runtime.mailbox import Mailbox
from gpu_actors.runtime.meter import Histogram
from gpu_actors.runtime.reply import Reply

if TYPE_CHECKING:
    from gpu_actors.compiling.cubin_cache import CacheStats, CubinCache
    from gpu_actors.qualification.qualifier import Qualifier

__all__ = ["Compile", "KernelUse", "NvrtcActor", "NvrtcHandle", "Proofs", "Warm", "WarmedVariant"]

logger: logging.Logger = logging.getLogger("gpu_actors")


@dataclass(frozen=True, slots=True)
class Compile:
    """Compile ``source``. arch: the architecture; None: the source's architecture, or else the context's."""

    source: KernelSource
    arch: str | None = None


class WarmedVariant(NamedTuple):
    """A variant that is in the cache now. seconds: the time to compile or load it."""

    key: DispatchKey | Variant
    cubin: Cubin
    seconds: float


@dataclass(frozen=True, slots=True)
class Warm:
    """Bring the kernel of every key into the cache. progress: called as (done, total, key) on a worker's thread."""

    keys: Sequence[DispatchKey | Variant]
    progress: Callable[[int, int, DispatchKey | Variant], None] | None = None


class NvrtcHandle(ActorHandle):
    """``ctx.nvrtc``."""

    __slots__ = ()

    def compile(
        self,
        source: KernelSource,
        *,
        arch: str | None = None,
        deadline: float | None = None,
        timeout: float | None = None,
        priority: int = 0,
    ) -> Reply[Cubin]:
        """Compile a kernel, or find it in the cache.

        arch: an exact architecture such as "sm_90a". Default: the source's architecture, or else the context's.
        The reply raises `CompileError` with the log and the offending line, and `Unsupported` for an arch that the
        installed NVRTC does not know. deadline, timeout, priority: as in `submit`.
        """
        return self.submit(Compile(source, arch), deadline=deadline, timeout=timeout, priority=priority)

    def warm(
        self,
        keys: Iterable[DispatchKey | Variant],
        progress: Callable[[int, int, DispatchKey | Variant], None] | None = None,
        *,
        deadline: float | None = None,
        timeout: float | None = None,
        priority: int = 0,
    ) -> Reply[list[WarmedVariant]]:
        """Compile the kernels of all keys, in parallel, so that no request waits for one later.

        The reply gives the variants in the order of the keys, or raises the first error once all have been tried:
        `InvalidRequest` or `Unsupported`, naming the field, for a key that no kernel has.
        deadline, timeout, priority: as in `submit`.
        """
        given: Any = []
        anything: Iterable[object] = keys
        try:
            for key in anything:
                given.append(key)
                if not isinstance(key, DispatchKey | Variant):
                    break  # the actor refuses it, so that the reply raises, and the iterable may be endless
        except Exception:
            given = keys  # the actor refuses these as well
        return self.submit(Warm(given, progress), deadline=deadline, timeout=timeout, priority=priority)

    def raw_module(self, cubin: Cubin) -> Any:
        """A cubin as a ``cupy.RawModule``, whose ``get_function`` returns ``cupy.RawKernel``s with their attributes.

        cubin: a cubin of the context's architecture, from `compile`, or from `warm` for the key of a request. Kernels
        of this package take their parameters as one struct, which ``kernels_cu`` declares.
        As with `CompiledKernel.raw_module`, launches run on the caller's own CuPy stream, outside of this service.
        Raises `InvalidRequest` for anything but a `Cubin`, and `Unsupported` on a device that is not CUDA and for a
        cubin of another architecture.
        """
        if not isinstance(cubin, Cubin):
            raise InvalidRequest("cubin", type(cubin).__name__, "must be a Cubin, as compile and warm give")
        return raw_module(cubin, self._cell.environment.device.info)

    def cache_stats(self) -> CacheStats:
        """Statistics of the cubin cache: hits, misses, compiles, corrupt, evicted, entries, bytes."""
        cache: CubinCache = self._cell.shared.cache
        return cache.stats()


class NvrtcActor(ServiceActor):
    """Compiles sources and the kernels of keys. Equal sources that are requested at the same time are compiled once."""

    label: ClassVar[str] = "nvrtc"
    handle_type: ClassVar[type[ActorHandle]] = NvrtcHandle
    takes: ClassVar[tuple[type, ...]] = (Compile, Prepare, Warm)
    vital: ClassVar[bool] = True

    @classmethod
    def make_shared(cls, cell: ActorCell) -> _Workshop:
        return _Workshop(cell)

    def open(self) -> None:
        self._workshop: _Workshop = self.cell.shared

    def handle(self, call: Call[Any]) -> None:
        message = call.message
        if isinstance(message, Compile):
            if not isinstance(message.source, KernelSource):
                raise InvalidRequest("source", type(message.source).__name__, "must be a KernelSource")
            self._compile(call, message)
        elif isinstance(message, Prepare):
            self._prepare(call, message.variant)
        elif isinstance(message, Warm):
            self._warm(call, message)
        else:
            raise self.refusal(message)

    def _compile(self, call: Call[Any], message: Compile) -> None:
        workshop = self._workshop
        named = message.arch is not None or message.source.arch is not None
        variant = Variant.of(message.source, message.arch if named else self.cell.environment.device.info.arch)
        cubin = workshop.cache.peek(variant)
        if cubin is not None:
            call.resolve(cubin, self.outbox)
        elif call.claim():
            workshop.start(variant, self._hand_over(call))

    def _prepare(self, call: Call[Any], variant: Variant) -> None:
        if not isinstance(variant, Variant):
            raise InvalidRequest("variant", variant, "must be a Variant")
        if call.claim():
            self._workshop.start(variant, self._hand_over(call), for_device=True)

    def _warm(self, call: Call[Any], message: Warm) -> None:
        if message.progress is not None and not callable(message.progress):
            raise InvalidRequest("progress", message.progress, "must be a function of (done, total, key), or None")
        variants = [variant_of(check_key(key)) for key in _keys(message.keys)]
        if not variants:
            call.resolve([], self.outbox)
            return
        if call.claim():
            self._hand_over(call)
            batch = _WarmBatch(call, self.cell.mailbox)
            for index, variant in enumerate(variants):
                self._workshop.start(variant, functools.partial(batch.done, index))

    def _hand_over(self, call: Call[Any]) -> Done:
        """Hand the call over to the workshop, which answers it by the returned function even if this actor stops."""
        mailbox = self.cell.mailbox
        mailbox.park(call)
        mailbox.launch_began()

        def done(product: Product | None, error: GpuActorsError | None, seconds: float) -> None:
            mailbox.launch_ended()
            call.settle(product, error, None)

        return done


def _keys(keys: object) -> Sequence[DispatchKey | Variant]:
    reason = "must be DispatchKeys, as inspect_key and standard_variants give them, or variants of other kernels"
    if not isinstance(keys, tuple | list):
        raise InvalidRequest("keys", keys, reason)
    for key in keys:
        if not isinstance(key, DispatchKey | Variant):
            raise InvalidRequest("keys", key, reason)
    return keys


_COMPILE_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)

Product = Cubin | Kernel
Done = Callable[[Product | None, GpuActorsError | None, float], None]


class KernelUse(NamedTuple):
    """A kernel that requests have asked for. digest: a hash of its whole source.

    source: where it came from first: "cache", "compiled" or "built". asked: how often it was made ready: once, unless
    the context has dropped it meanwhile. resources: for each entry point, empty if they are not known.
    """

    name: str
    arch: str
    digest: str
    source: str
    asked: int
    macros: Mapping[str, Any]
    resources: Mapping[str, KernelResources]


class Proofs(NamedTuple):
    """The outcomes of proofs. counts: how many kernels are "qualified" and "quarantined". seconds: of new proofs."""

    counts: Mapping[str, int]
    seconds: Histogram


_MOST_USES = 256


class _Workshop:
    """The cache, the compiler and the worker threads. It outlives the actor's incarnations."""

    def __init__(self, cell: ActorCell) -> None:
        # Imported here, so that `import gpu_actors` stays quick.
        from gpu_actors.compiling.compiler import Compiler
        from gpu_actors.compiling.cubin_cache import CubinCache, default_cache_dir

        options = cell.environment.options
        self._cell = cell
        self.cache: CubinCache = CubinCache(
            options.cache_path or default_cache_dir(),
            max_bytes=options.cache_max_bytes,
            readonly_paths=options.prewarmed_paths,
            offline=options.offline,
            explicit=options.cache_path is not None,
            on_event=self._event,
        )
        self._compiler = Compiler()
        self.compile_seconds: Histogram = Histogram(_COMPILE_SECONDS)
        self._pool = ThreadPoolExecutor(options.compile_threads, thread_name_prefix="nvrtc-worker")
        self.qualifier: Qualifier | None = None
        qualify = options.qualifies(cell.environment.device.info.kind)
        if qualify != "off" and cell.environment.compiles:
            from gpu_actors.qualification.qualifier import Qualifier
            from gpu_actors.qualification.verdicts import Verdicts

            verdicts = Verdicts(options.cache_path or default_cache_dir(), cell.environment.device.identity)
            make = functools.partial(self._make, for_device=True)
            again = qualify == "all"
            self.qualifier = Qualifier(cell.environment, verdicts, self.cache.key, make, again)
        self._lock = threading.Lock()
        self._uses: OrderedDict[Variant, KernelUse] = OrderedDict()

    def uses(self) -> list[KernelUse]:
        """The kernels that requests have asked for, the latest last: 256 at most."""
        with self._lock:
            return list(self._uses.values())

    @property
    def proofs(self) -> Proofs | None:
        """What proofs have shown. None if kernels are not proved here."""
        return None if self.qualifier is None else Proofs(dict(self.qualifier.counts), self.qualifier.seconds)

    def start(self, variant: Variant, done: Done, for_device: bool = False) -> None:
        """Make a variant on a worker's thread, and call ``done`` there with the product or the error and the seconds.

        for_device: the product is what the device runs: a cubin, or a kernel that the device builds itself. Otherwise
        it is a cubin in any case.
        """
        waiting = [done]
        try:
            self._pool.submit(self._work, variant, waiting, for_device)
        except RuntimeError as error:  # no worker could be started, or the pool is shut down
            waiting.clear()  # the pool may have kept the work, and would answer a second time
            done(None, GpuActorsError(f"compiling {variant.source.name} could not begin: {error}"), 0.0)

    def close(self) -> None:
        # Jobs that have not begun are dropped: their calls are answered by the context that is closing.
        self._pool.shutdown(wait=False, cancel_futures=True)
        if self.qualifier is not None:
            self.qualifier.close()

    def _work(self, variant: Variant, waiting: list[Done], for_device: bool) -> None:
        began = time.monotonic()
        product: Product | None = None
        failure: GpuActorsError | None = None
        try:
            product = self._make(variant, for_device)
        except GpuActorsError as error:
            failure = error.with_traceback(None)
        except BaseException as error:
            name = variant.source.name
            logger.exception("compiling %s raised", name)
            failure = caused(GpuActorsError(f"compiling {name} raised {error!r}"), error.with_traceback(None))

        def answer(failure: GpuActorsError | None) -> None:
            for done in waiting:
                done(product, failure, time.monotonic() - began)

        if product is None or not for_device or self.qualifier is None:
            answer(failure)
            return
        try:
            self.qualifier.judge(variant, product, answer)
        except Exception as error:
            logger.exception("asking whether %s is qualified raised", variant.source.name)
            text = f"asking whether {variant.source.name} is qualified raised {error!r}"
            answer(caused(GpuActorsError(text), error.with_traceback(None)))

    def _make(self, variant: Variant, for_device: bool) -> Product:
        if for_device and self._cell.environment.device.builds_kernels:
            built = self._build(variant)
            self._use(variant, "built", {})
            return built
        origin = "cache"

        def compile(source: KernelSource, arch: str) -> Cubin:
            nonlocal origin
            origin = "compiled"
            return self._compiler.compile(source, arch)

        cubin = self.cache.get_or_compile(variant, compile)
        if for_device:
            self._use(variant, origin, cubin.resources)
        return cubin

    def _use(self, variant: Variant, origin: str, resources: Mapping[str, KernelResources]) -> None:
        source, digest = variant.source, _digest(variant.source)
        with self._lock:
            former = self._uses.pop(variant, None)
            asked = 1 if former is None else former.asked + 1
            first = origin if former is None else former.source
            self._uses[variant] = KernelUse(
                source.name, variant.arch, digest, first, asked, dict(source.macros), dict(resources)
            )
            if len(self._uses) > _MOST_USES:
                self._uses.popitem(last=False)

    def _build(self, variant: Variant) -> Product:
        from gpu_actors.compiling.cubin_cache import traced_compile

        source, arch = variant.source, variant.arch
        about = {"variant": f"{source.name}:{_digest(source)}", "arch": arch}
        return traced_compile(
            lambda name, **fields: self._event(name, about | fields),
            lambda: self._cell.environment.device.build(source, arch),
        )

    def _event(self, name: str, fields: dict[str, Any]) -> None:
        if name == "compile.completed":
            with self._lock:
                self.compile_seconds.observe(fields["seconds"])
        self._cell.environment.trace.emit(name, **fields)


def _digest(source: KernelSource) -> str:
    # The hash of a text, because Python's own hashes differ between processes.
    text = repr((source.entry_points, dict(source.macros), source.source, dict(source.headers)))
    return hashlib.sha256(text.encode()).hexdigest()[:12]


@dataclass(slots=True, eq=False)
class _WarmBatch:
    """Answers a `Warm` call once its last variant is done."""

    call: Call[Any]
    mailbox: Mailbox
    warmed: dict[int, WarmedVariant] = field(default_factory=dict)
    count: int = 0
    error: GpuActorsError | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)

    def done(self, index: int, product: Product | None, error: GpuActorsError | None, seconds: float) -> None:
        """Called when the variant with this index is in the cache, or has failed."""
        message: Warm = self.call.message
        key = message.keys[index]
        with self.lock:
            self.count += 1
            done = self.count
            if isinstance(product, Cubin):
                self.warmed[index] = WarmedVariant(key, product, seconds)
            elif self.error is None:
                self.error = error
        try:
            if message.progress is not None:
                message.progress(done, len(message.keys), key)
        except BaseException as raised:
            self.error = self.error or caused(GpuActorsError(f"warm's progress callback raised {raised!r}"), raised)
        if done == len(message.keys):
            self.mailbox.launch_ended()
            self.call.settle([variant for _, variant in sorted(self.warmed.items())], self.error, None)
