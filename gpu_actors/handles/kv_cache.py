"""KvCache: a paged KV cache on the device of a context.

async with ctx.kv_cache(num_blocks=256, page_size=16, kv_heads=8, head_dim=128) as cache:
    seq = await cache.create()
    result = await cache.attend(q, [seq], k=k, v=v)
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar, Unpack, cast

import anyio

from gpu_actors.attention.requests import Array, AttentionOutput
from gpu_actors.catching import undo_on_error
from gpu_actors.errors import GpuActorsError, InvalidRequest, StaleBuffer
from gpu_actors.fields import describe, expect
from gpu_actors.handles.kv_step import BegunStep, KvStep
from gpu_actors.kv.requests import (
    AppendKeywords,
    AppendRows,
    AttendCache,
    AttendKeywords,
    BeginStep,
    CloseCache,
    CreateSequence,
    ExportSequence,
    ForkSequence,
    FreeSequence,
    ImportSequence,
    KvCacheSpec,
    KvSequence,
    OpenCache,
    StepKeywords,
    TruncateSequence,
)
from gpu_actors.kv.sequences import KvCacheStats
from gpu_actors.planning.concat import concat
from gpu_actors.process import Local, refuse_on_loop
from gpu_actors.runtime.call import Call
from gpu_actors.runtime.handle import CallOptions
from gpu_actors.runtime.reply import Reply, need_asyncio
from gpu_actors.values import show

if TYPE_CHECKING:
    from gpu_actors.actors.kv_store import CacheStore, OpenedCache
    from gpu_actors.kv.transfer import SequencePages
    from gpu_actors.runtime.children import Children
    from gpu_actors.runtime.handle import ActorHandle

__all__ = ["KvCache"]

_APPEND = CallOptions(AppendRows, AppendKeywords)
_ATTEND = CallOptions(AttendCache, AttendKeywords)
_STEP = CallOptions(AttendCache, StepKeywords)

T = TypeVar("T")


class KvCache(Local):
    """A pool of pages and the sequences in it. Made by ``ctx.kv_cache``; enter it with ``async with`` or ``with``.

    Safe to share between tasks, loops and threads. Requests of equal priority on a sequence take effect in the order in
    which they are made, whether or not one is awaited before the next; each takes effect completely or not at all. If
    a launch fails, requests that were launched after it and build on its rows fail with the same error, and each
    sequence has the length that its last success left. Leaving frees the pool. If a task is cancelled before it
    receives its new sequence, the sequence is freed.

    Every call takes deadline, timeout and priority as `ActorHandle.submit` does. Besides the errors that each method
    lists, its reply raises `InvalidRequest` for a sequence that was freed or belongs to another cache, and
    `StaleBuffer` once another task has closed the cache, or the context that the cache was made in is lost.
    """

    def __init__(self, children: Children, handle: ActorHandle, spec: KvCacheSpec) -> None:
        self._children = children
        self._handle = handle
        self._spec = spec
        self._number = 0
        self._generation = 0
        self._lock = threading.Lock()
        # Set by a pool, which counts the requests to its workers: a step ends without another call of the pool.
        self._count_of_step: Callable[[Reply[Any]], None] | None = None

    @classmethod
    def at(cls, children: Children, handle: ActorHandle, spec: KvCacheSpec, number: int, generation: int) -> KvCache:
        """Another handle of an open pool, for functions that run in the process of its context."""
        cache = cls(children, handle, spec)
        cache._number, cache._generation = number, generation
        return cache

    def __repr__(self) -> str:
        spec = self._spec
        state = {0: "not entered", -1: "opening"}.get(self._number, f"#{self._number}")
        if isinstance(spec.layers, list | tuple):
            return f"<KvCache {state}, {len(spec.layers)} layers of their own>"
        return f"<KvCache {state}, {spec.num_blocks} pages of {spec.page_size} x {spec.kv_heads} x {spec.head_dim}>"

    # Opening and closing

    async def __aenter__(self) -> Self:
        need_asyncio("ctx.kv_cache()")
        opening = self._open()
        with undo_on_error(self._abandon, opening):
            self._number = await opening
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with anyio.CancelScope(shield=True):
            try:
                await self._close()
            except GpuActorsError:
                return  # the context, and so the pool, is closed or lost

    def __enter__(self) -> Self:
        refuse_on_loop("with ctx.kv_cache()", "async with")
        opening = self._open()
        with undo_on_error(self._abandon, opening):
            self._number = opening.result()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            self._close().result()
        except GpuActorsError:
            return

    # Sequences

    def create(
        self,
        tokens: Sequence[int] | Any = None,
        *,
        deadline: float | None = None,
        timeout: float | None = None,
        priority: int = 0,
    ) -> Reply[KvSequence]:
        """Begin a sequence.

        tokens: the ids of its whole prompt. The sequence then shares the first pages of sequences that were appended
            with the same first tokens, and begins with ``cached`` rows: those of whole pages, without the last token.
            None: it begins empty.
        """
        return self._begin(CreateSequence(self._number, tokens), deadline, timeout, priority)

    def fork(
        self,
        seq: KvSequence,
        *,
        deadline: float | None = None,
        timeout: float | None = None,
        priority: int = 0,
    ) -> Reply[KvSequence]:
        """Begin a sequence with the rows of ``seq``, in the same pages. A write to a shared page copies it first."""
        return self._begin(ForkSequence(self._number, seq), deadline, timeout, priority, seq)

    def truncate(
        self,
        seq: KvSequence,
        length: int,
        *,
        deadline: float | None = None,
        timeout: float | None = None,
        priority: int = 0,
    ) -> Reply[None]:
        """Keep only the first ``length`` rows, for example after drafts that were not accepted."""
        return self._submit(TruncateSequence(self._number, seq, length), deadline, timeout, priority, seq)

    def free(
        self,
        seq: KvSequence,
        *,
        deadline: float | None = None,
        timeout: float | None = None,
        priority: int = 0,
    ) -> Reply[None]:
        """Free a sequence, as soon as earlier requests on it have ended."""
        return self._submit(FreeSequence(self._number, seq), deadline, timeout, priority, seq)

    # Sequences that move

    def export_pages(
        self,
        seq: KvSequence,
        *,
        deadline: float | None = None,
        timeout: float | None = None,
        priority: int = 0,
    ) -> Reply[SequencePages]:
        """Read the pages of a sequence, for `import_pages` of another cache, on any machine.

        The sequence stays. Rows that are appended to it later are not in these pages: a lease keeps the pages unchanged
        until `release`, or until the cache is closed. If no task receives the pages, the lease ends.
        """
        return _Begun(self._submit(ExportSequence(self._number, seq), deadline, timeout, priority, seq), self)

    def import_pages(
        self,
        pages: SequencePages,
        *,
        deadline: float | None = None,
        timeout: float | None = None,
        priority: int = 0,
    ) -> Reply[KvSequence]:
        """Begin a sequence with exported pages. It has the same rows, and the same prefixes if their tokens are known.

        Pages whose prefix this cache knows already are shared, and not written again: ``cached`` is their number of
        rows. The reply raises `InvalidRequest`, naming the field, if the cache has other layers, another layout, dtype,
        window or descales, and for a page that does not match its digest; `CacheFull` if there is no room. In these
        cases nothing has changed. If layers differ, the field names the group of layers, as in "groups[1].window".
        """
        return _Begun(self._submit(ImportSequence(self._number, pages), deadline, timeout, priority), self)

    def release(
        self,
        pages: SequencePages,
        *,
        deadline: float | None = None,
        timeout: float | None = None,
        priority: int = 0,
    ) -> Reply[None]:
        """End the lease of exported pages. The sequence itself stays."""
        return self.free(pages.lease, deadline=deadline, timeout=timeout, priority=priority)

    # Rows

    @_APPEND
    def append(
        self,
        seqs: KvSequence | Sequence[KvSequence],
        k: Array | Sequence[Array | None] | None = None,
        v: Array | Sequence[Array | None] | None = None,
        *,
        deadline: float | None = None,
        timeout: float | None = None,
        priority: int = 0,
        **options: Unpack[AppendKeywords],
    ) -> Reply[Any]:
        """Append rows to a sequence, or to several at once. The arguments are those of `AppendRows`.

        The reply returns the new length, or a list of lengths for a list of sequences. It raises `CacheFull`, and then
        nothing is written.
        """
        _APPEND.check(options)
        message = AppendRows(cache=self._number, seqs=seqs, k=k, v=v, **options)
        return self._submit(message, deadline, timeout, priority, seqs)

    @_ATTEND
    def attend(
        self,
        q: Array,
        seqs: KvSequence | Sequence[KvSequence],
        *,
        q_pe: Array | None = None,
        deadline: float | None = None,
        timeout: float | None = None,
        priority: int = 0,
        **options: Unpack[AttendKeywords],
    ) -> Reply[AttentionOutput]:
        """Attention of q, the last rows of each sequence, to the sequences. If k and v are given, appends them first.

        The arguments are those of `AttendCache`. q_pe: for a latent cache, the rotated columns of q; q then has only
        the other columns. Raises `InvalidRequest` if q and q_pe do not fit together. The reply raises `CacheFull`, and
        then nothing is written.
        """
        _ATTEND.check(options)
        if q_pe is not None:
            expect(self._has_latents(), "q_pe", describe(q_pe), "goes with a latent cache")
            q = concat(("q", "q_pe"), q, q_pe)
        message = AttendCache(cache=self._number, seqs=seqs, q=q, **options)
        return self._submit(message, deadline, timeout, priority, seqs)

    @_STEP
    def step(
        self,
        seqs: Sequence[KvSequence],
        *,
        heads_q: int | Sequence[int],
        rows: int | Sequence[int] = 1,
        append: bool = True,
        dtype: Any = None,
        like: Mapping[str, Array] | Mapping[int, Mapping[str, Array]] | None = None,
        layer_options: Mapping[int, Mapping[str, Any]] | None = None,
        max_length: int | None = None,
        deadline: float | None = None,
        timeout: float | None = None,
        priority: int = 0,
        **options: Unpack[StepKeywords],
    ) -> Reply[KvStep]:
        """Begin one pass of a model over all layers. The arguments are those of `BeginStep`, its options as keywords.

        This takes pages for the new rows, checks everything once, and compiles kernels. The reply returns the step; it
        raises `CacheFull`, and then no page is taken. A deadline applies to the whole step, which is aborted when it
        passes.
        """
        _STEP.check(options)
        message = BeginStep(
            cache=self._number, seqs=seqs, heads_q=heads_q, rows=rows, append=append, dtype=dtype, like=like,
            options=options, layer_options=layer_options, max_length=max_length,
        )  # fmt: skip
        return self._begin_step(message, deadline, timeout, priority)

    # Inspection

    def length(self, seq: KvSequence) -> int:
        """The rows of a sequence, rows of launches in flight included. Raises `InvalidRequest` and `StaleBuffer`."""
        stale = self._stale(seq)
        if stale is not None:
            raise stale
        cache = self._find()
        return cache.table(seq).length

    def stats(self) -> KvCacheStats:
        """blocks, free_blocks, sequences, shared_blocks, and more. Raises `StaleBuffer` when closed.

        If layers differ, these are the counts of the group of layers with the smallest fraction of free pages.
        """
        return self._find().tables.stats()

    def group_stats(self) -> list[KvCacheStats]:
        """`stats` of each group of layers, in the order of their first layers."""
        return self._find().tables.group_stats()

    # Inside

    def _has_latents(self) -> bool:
        layers = self._spec.layers if isinstance(self._spec.layers, list | tuple) else ()
        return bool(self._spec.latent_dim) or any(layer.latent_dim for layer in layers)

    def _open(self) -> Reply[int]:
        layers: object = self._spec.layers
        if isinstance(layers, Iterator):  # an iterator cannot be sent to another process, where the spec is checked
            raise InvalidRequest("layers", show(layers), "must be an int, or a list or tuple of KvLayer")
        with self._lock:
            if self._number:
                raise GpuActorsError("this cache has been entered already; make one for each use")
            self._number = -1
        self._generation = self._children.generation
        return self._handle.submit(OpenCache(self._spec))

    def _abandon(self, opening: Reply[int]) -> None:
        """Free a pool once it is made, because its opener was cancelled or interrupted."""

        def give_back(call: Call[int]) -> None:
            if call.error is None:
                self._handle.submit(CloseCache(call.answer()))

        opening._call.when_done(give_back)

    def _close(self) -> Reply[None]:
        closing = self._handle.submit(CloseCache(self._number))
        # A callback keeps the call alive when the task that waits for it is cancelled.
        closing._call.when_done(_closed)
        return closing

    def _free_unknown(self, beginning: Call[Any]) -> None:
        if beginning.error is None:
            begun = beginning.answer()
            if isinstance(beginning.message, BeginStep):
                KvStep(self, begun).abort()
                return
            self.free(getattr(begun, "lease", begun))

    def _find(self) -> OpenedCache:
        store = cast("CacheStore", self._handle._cell.shared)
        return store.find(self._number)

    def _begin(
        self, message: Any, deadline: float | None, timeout: float | None, priority: int, seqs: Any = ()
    ) -> Reply[KvSequence]:
        return _Begun(self._submit(message, deadline, timeout, priority, seqs), self)

    def _begin_step(
        self, message: BeginStep, deadline: float | None, timeout: float | None, priority: int
    ) -> Reply[KvStep]:
        return _Step(self._submit(message, deadline, timeout, priority, message.seqs), self)

    def _submit(
        self, message: Any, deadline: float | None, timeout: float | None, priority: int, seqs: Any = ()
    ) -> Reply[Any]:
        refusal = self._stale(*(seqs if isinstance(seqs, list | tuple) else (seqs,)))
        if refusal is None and self._number <= 0:
            refusal = InvalidRequest("cache", None, "must be entered first: async with ctx.kv_cache(...) as cache")
        if refusal is not None:
            call: Call[Any] = Call(message, self._handle._cell.mailbox)
            self._handle._cell.mailbox.refuse(call, refusal)
            return Reply(call)
        return self._handle.submit(message, deadline=deadline, timeout=timeout, priority=priority)

    def _stale(self, *seqs: object) -> GpuActorsError | None:
        now = self._children.generation
        stamps = [self._generation or now]
        stamps += [seq.generation for seq in seqs if isinstance(seq, KvSequence)]
        for stamp in stamps:
            if stamp != now:
                return StaleBuffer(f"it belongs to generation {stamp} of the context, which is at generation {now}")
        return None


class _Begun(Reply[T]):
    """The reply with a new sequence or a lease, which is freed if the reply is dropped before any caller has taken it.

    A task may be cancelled just before it receives the answer.
    """

    __slots__ = ("_cache", "_taken")

    def __init__(self, reply: Reply[T], cache: KvCache) -> None:
        super().__init__(reply._call)
        self._cache = cache
        self._taken = False

    def __await__(self) -> Generator[Any, None, T]:
        begun = yield from super().__await__()
        self._taken = True
        return begun

    def result(self, timeout: float | None = None) -> T:
        begun = super().result(timeout)
        self._taken = True
        return begun

    def __del__(self) -> None:
        if not self._taken:
            self._call.when_done(self._cache._free_unknown)


class _Step(Reply[KvStep]):
    """The reply with a step, the same for each reader. If it is dropped before one took it, the step is aborted."""

    __slots__ = ("_begun", "_cache", "_step")

    def __init__(self, reply: Reply[BegunStep], cache: KvCache) -> None:
        super().__init__(reply._call)  # type: ignore[arg-type]
        self._cache = cache
        self._begun = _Begun(reply, cache)
        self._step: list[KvStep] = []

    def __await__(self) -> Generator[Any, None, KvStep]:
        return self._given((yield from self._begun.__await__()))

    def result(self, timeout: float | None = None) -> KvStep:
        return self._given(self._begun.result(timeout))

    def _given(self, begun: BegunStep) -> KvStep:
        if not self._step:  # all readers share one: a step is aborted with the last reference to it
            with self._cache._lock:
                self._step = self._step or [KvStep(self._cache, begun)]
        return self._step[0]


def _closed(_: Call[None]) -> None:
    return
