"""ShardedKvCache: sequences whose keys lie on several workers, and their attention, merged.

    old keys: not causal, on every worker that has some ──┐
    new rows among themselves: one causal forward ────────┴──> merge ──> append the new rows to their owners

All old keys come before the new rows, so no worker has to know the place of a key in the sequence. What needs that
place is refused. The merge is `gpu_actors.partial.merge`.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
from collections.abc import Coroutine
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import numpy as np

from gpu_actors.arrays.adopt import adopt, check_device, name_of
from gpu_actors.distributed.members import Member
from gpu_actors.distributed.parts import all_of
from gpu_actors.distributed.pool import ContextPool
from gpu_actors.errors import ContextLost, GpuActorsError, InvalidRequest, StaleBuffer, Unsupported
from gpu_actors.kv.requests import AttendCache, KvSequence
from gpu_actors.kv_cache import KvCache
from gpu_actors.partial import Partial, empty, merge
from gpu_actors.process import Local
from gpu_actors.requests import Array, AttentionOutput, CacheOptions
from gpu_actors.runtime.reply import need_asyncio
from gpu_actors.validation.fields import describe, expect, integer
from gpu_actors.values import show

__all__ = ["ShardedKvCache", "ShardedSequence"]

_DTYPES = ("float16", "bfloat16", "float32", "float64")
_NUMBERS = itertools.count(1)


@dataclass(slots=True, eq=False)
class ShardedSequence:
    """A sequence of a `ShardedKvCache`. number: unique in the process. length: rows that are written."""

    number: int
    length: int
    _cache: ShardedKvCache = field(repr=False)
    _handles: list[KvSequence] = field(repr=False)
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock, repr=False)
    _lost: str = field(default="", repr=False)
    _freed: bool = field(default=False, repr=False)


class ShardedKvCache(Local):
    """A paged KV cache whose sequences are dealt out over the workers of a pool, in runs of ``interleave`` rows.

    So a sequence may have as many keys as all workers together have pages for, and each reads its share of them. Enter
    it with ``async with`` on one event loop; it uses the workers that the pool has then.

    pool: a pool with at least one worker. interleave: rows in a row on one worker; None: ``page_size``.
    num_blocks: pages of each worker. The other arguments are those of `KvCacheSpec`, without fp8.

    Requests on a sequence take effect one after the other. Each takes effect wholly or leaves no trace, unless a worker
    is lost: then the sequence is lost with it, which raises `WorkerLost` first and `StaleBuffer` ever after.
    """

    def __init__(
        self,
        pool: ContextPool,
        *,
        num_blocks: int,
        page_size: int,
        kv_heads: int,
        head_dim: int,
        head_dim_v: int | None = None,
        dtype: str = "bfloat16",
        interleave: int | None = None,
    ) -> None:
        expect(isinstance(pool, ContextPool), "pool", show(pool), "must be a ContextPool")
        if dtype not in _DTYPES:
            reason = "new rows attend to each other before they are written, so the cache must hold them unchanged"
            raise Unsupported("dtype", dtype, reason, "bfloat16")
        self._pool = pool
        self._dtype = dtype
        self._dim_v = head_dim if head_dim_v is None else head_dim_v
        self._kv_heads = kv_heads
        self.interleave: int = integer("interleave", page_size if interleave is None else interleave, 1)
        self._spec: dict[str, Any] = {
            "num_blocks": num_blocks,
            "page_size": page_size,
            "kv_heads": kv_heads,
            "head_dim": head_dim,
            "head_dim_v": head_dim_v,
            "dtype": dtype,
        }
        self._members: list[Member] = []
        self._caches: list[KvCache] = []
        self._state = "new"

    async def __aenter__(self) -> Self:
        need_asyncio("ShardedKvCache")
        if self._state != "new":
            raise GpuActorsError("this cache has been entered already; make one for each use")
        self._state = "open"
        try:
            for member in self._pool.candidates().values():
                self._caches.append(await member.context.kv_cache(**self._spec).__aenter__())
                self._members.append(member)
        except BaseException:
            await self.__aexit__(None, None, None)
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._state = "closed"
        for cache in self._caches:
            await cache.__aexit__(None, None, None)

    @property
    def workers(self) -> list[str]:
        """The workers' names, in the order in which they get rows."""
        return [member.name for member in self._members]

    # Sequences

    async def create(self) -> ShardedSequence:
        """Begin a sequence, which is empty on every worker."""
        self._check()
        begun: list[KvSequence] = []
        try:
            for cache in self._caches:
                begun.append(await cache.create())  # noqa: PERF401  what was begun before one fails is freed
        except BaseException:
            for cache, handle in zip(self._caches, begun, strict=False):
                cache.free(handle)
            raise
        return ShardedSequence(next(_NUMBERS), 0, self, begun)

    async def free(self, seq: ShardedSequence) -> None:
        """Forget a sequence on every worker."""
        self._known(seq)
        async with seq._lock:
            self._known(seq)
            seq._freed = True
            freeing = [cache.free(handle) for cache, handle in zip(self._caches, seq._handles, strict=True)]
            for reply in freeing:
                with contextlib.suppress(ContextLost, StaleBuffer):  # with its rows
                    await reply

    # Rows

    async def append(self, seq: ShardedSequence, k: Array, v: Array) -> int:
        """Write rows behind those of a sequence. k: (rows, kv_heads, head_dim), v likewise, in the cache's dtype.

        Gives the new length. Raises `InvalidRequest`, `CacheFull`, and then nothing is written. If the task is
        cancelled while rows are written, they are written all the same.
        """
        self._known(seq)
        rows = self._rows(k, v)
        async with seq._lock:
            self._known(seq)
            return await self._append(seq, *rows)

    async def attend(
        self,
        q: Array,
        seq: ShardedSequence,
        *,
        k: Array | None = None,
        v: Array | None = None,
        causal: bool = True,
        sinks: Array | None = None,
        return_lse: bool = False,
        timeout: float | None = None,
        **options: Any,
    ) -> AttentionOutput:
        """Attention of q, the last rows of a sequence, to all of it; k and v are appended then, where given.

        q: (rows, heads_q, head_dim). k, v: the same rows', as for `append`; None for a row that is in the cache.
        causal, sinks, return_lse: as in `FlashForward`. timeout: seconds for the attention.
        options: of `AttendCache`. Those of a single score, its scale and its soft cap, are taken, others only at their
            defaults.
        The answer is rounded once more than one context's: by half a unit in the last place for each worker's part.

        Raises `Unsupported` for what needs the places of keys, which no worker knows: windows, their first keys, ALiBi,
        tree masks, rope, and several causal rows without their k and v. Raises what `append` raises, and then nothing
        is written.
        """
        _refuse({name: given for name, given in options.items() if name not in _OF_A_SCORE})
        self._known(seq)
        query = self._query(q)
        new = None
        if k is not None or v is not None:
            new = self._rows(k, v)
            rows = new[0].shape[0]
            expect(rows == query.shape[0], "k", describe(new[0]), f"must have q's rows, {query.shape[0]}")
        elif causal and query.shape[0] > 1:
            reason = "several rows of the cache see different keys, and no worker knows its keys' places: give k and v"
            raise Unsupported("q", describe(query), reason)
        asked = {**{name: given for name, given in options.items() if name in _OF_A_SCORE}, "return_lse": True}
        async with seq._lock:
            self._known(seq)
            asking: list[Coroutine[Any, Any, Any]] = [
                self._old(seq, rank, query, {**asked, "timeout": timeout})
                for rank, length in enumerate(self._lengths(seq.length))
                if length
            ]
            if new is not None and len(query):
                asking.append(self._new(query, *new, causal, asked, timeout))
            partials = [empty((*query.shape[:-1], self._dim_v), dtype=name_of(query.dtype))]
            partials += await all_of(asking)
            merged = merge(partials, sinks=sinks)
            if new is not None:
                await self._append(seq, *new)
        return AttentionOutput(merged.out, merged.lse if return_lse else None)

    # Inside

    async def _old(self, seq: ShardedSequence, rank: int, q: Any, options: dict[str, Any]) -> Partial:
        reply = self._caches[rank].attend(q[None], seq._handles[rank], causal=False, **options)
        self._members[rank].began(reply)
        try:
            found = await reply
        except GpuActorsError as error:
            self._note_loss(seq, error)
            raise
        return Partial(found.out[0], found.lse[0])

    async def _new(
        self, q: Any, k: Any, v: Any, causal: bool, options: dict[str, Any], timeout: float | None
    ) -> Partial:
        found = await self._pool.ask(
            lambda ctx: ctx.flash_attn.forward(q[None], k[None], v[None], causal=causal, **options), timeout=timeout
        )
        return Partial(found.out[0], found.lse[0])

    async def _append(self, seq: ShardedSequence, k: Any, v: Any) -> int:
        writing = asyncio.ensure_future(self._write(seq, k, v))
        # A sequence with the rows of some workers only would be no use to anyone.
        cancelled = None
        while not writing.done():
            try:
                await asyncio.shield(writing)
            except asyncio.CancelledError as error:
                if writing.cancelled():
                    raise
                cancelled = error
            except GpuActorsError:
                break
        length: int = writing.result()
        if cancelled is not None:
            raise cancelled
        return length

    async def _write(self, seq: ShardedSequence, k: Any, v: Any) -> int:
        begin: int = seq.length
        end: int = begin + k.shape[0]
        owners = (np.arange(begin, end) // self.interleave) % len(self._caches)
        before = self._lengths(begin)
        replies = {}
        for rank in np.unique(owners).tolist():
            mine = owners == rank
            options = {"expect_length": before[rank]}
            replies[rank] = self._caches[rank].append(seq._handles[rank], k[mine], v[mine], **options)
            self._members[rank].began(replies[rank])
        failure: GpuActorsError | None = None
        written = []
        for rank, reply in replies.items():
            try:
                await reply
                written.append(rank)
            except GpuActorsError as error:
                failure = failure if isinstance(failure, ContextLost) else error
        if failure is not None:
            self._note_loss(seq, failure)
            for rank in written:
                try:
                    await self._caches[rank].truncate(seq._handles[rank], before[rank])
                except GpuActorsError as error:
                    self._note_loss(seq, error, always=True)
            raise failure
        seq.length = end
        return end

    def _note_loss(self, seq: ShardedSequence, error: GpuActorsError, always: bool = False) -> None:
        if always or isinstance(error, ContextLost | StaleBuffer):
            seq._lost = f"a worker that had rows of the sequence is lost: {error}"

    def _lengths(self, length: int) -> list[int]:
        """Rows of each worker, of a sequence of this length."""
        workers, run = len(self._caches), self.interleave
        whole, rest = divmod(length, run * workers)
        return [whole * run + min(run, max(0, rest - rank * run)) for rank in range(workers)]

    def _check(self) -> None:
        if self._state == "new":
            raise InvalidRequest("cache", None, "must be entered first: async with ShardedKvCache(...) as cache")
        if self._state == "closed":
            raise StaleBuffer("the cache was closed, and its pages are given back")

    def _known(self, seq: ShardedSequence) -> None:
        self._check()
        sound = isinstance(seq, ShardedSequence) and seq._cache is self
        expect(sound, "seq", show(seq), "must be a sequence of this cache, as create() gives")
        expect(not seq._freed, "seq", show(seq), "was freed")
        if seq._lost:
            raise StaleBuffer(seq._lost)

    def _rows(self, k: Any, v: Any) -> tuple[Any, Any]:
        found = []
        for name, array, dim in (("k", k, self._spec["head_dim"]), ("v", v, self._dim_v)):
            expect(array is not None, name, None, "must be given: rows have keys and values")
            adopted = adopt(array, name)
            check_device(adopted, name, "cpu")
            host: Any = adopted.array
            wanted = f"must be (rows, {self._kv_heads}, {dim}) {self._dtype}"
            sound = host.ndim == 3 and host.shape[1:] == (self._kv_heads, dim) and name_of(host.dtype) == self._dtype
            expect(sound, name, describe(host), wanted)
            found.append(host)
        expect(len(found[0]) == len(found[1]), "v", describe(found[1]), f"must have k's rows, {len(found[0])}")
        return found[0], found[1]

    def _query(self, q: Any) -> Any:
        adopted = adopt(q, "q")
        check_device(adopted, "q", "cpu")
        host: Any = adopted.array
        dim = self._spec["head_dim"]
        sound = host.ndim == 3 and host.shape[-1] == dim and name_of(host.dtype) == self._dtype
        expect(sound, "q", describe(host), f"must be (rows, heads_q, {dim}) {self._dtype}")
        return host


# The floats among the options change each score by itself.
_OF_A_SCORE = tuple(each.name for each in dataclasses.fields(CacheOptions) if "float" in str(each.type))
_NOT_TAKEN = ("out", "num_splits", "tokens", "cu_seqlens_q", "max_seqlen_q", "expect_length")


def _refuse(others: dict[str, Any]) -> None:
    """Raise `Unsupported` for an option of `AttendCache` that is not at its default, TypeError for what is none."""
    options = {each.name: each.default for each in dataclasses.fields(AttendCache)}
    for name, given in others.items():
        if name not in options:
            raise TypeError(f"attend() got an unexpected keyword argument {name!r}")
        default = options[name]
        if given is default or (isinstance(given, int | tuple) and given == default):
            continue
        reason = "goes by the places of keys in the whole sequence, which no worker knows"
        if name in _NOT_TAKEN:
            reason = "is not taken by a cache over several workers"
        raise Unsupported(name, given if isinstance(given, int | tuple) else describe(given), reason, default)
