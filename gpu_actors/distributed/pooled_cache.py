"""PooledKvCache: a paged KV cache on every worker of a pool. Each sequence lives on one worker."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self, TypeVar

from gpu_actors.attention.requests import Array, AttentionOutput
from gpu_actors.catching import shielded, undo_on_error
from gpu_actors.distributed.member import Member
from gpu_actors.distributed.migration import copy_sequence
from gpu_actors.distributed.remote.context import RemoteContext
from gpu_actors.distributed.worker_pool import WorkerPool
from gpu_actors.errors import GpuActorsError, InvalidRequest, StaleBuffer, Unsupported
from gpu_actors.fields import expect
from gpu_actors.handles.gpu_context import GpuContext
from gpu_actors.handles.kv_cache import KvCache
from gpu_actors.handles.kv_step import KvStep
from gpu_actors.kernels.support import MAX_SEQLEN
from gpu_actors.kv.prefix import prompt_digests
from gpu_actors.kv.requests import KvCacheSpec, KvLayer, KvSequence
from gpu_actors.kv.sequences import KvCacheStats
from gpu_actors.process import Local
from gpu_actors.runtime.call import Call
from gpu_actors.runtime.mailbox import Mailbox
from gpu_actors.runtime.reply import Reply
from gpu_actors.values import show

__all__ = ["PooledKvCache", "PooledSequence"]

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class PooledSequence:
    """A sequence of a `PooledKvCache`.

    worker: the name of its home.
    handle: the sequence in the home's own cache.
    """

    worker: str
    handle: KvSequence

    @property
    def cached(self) -> int:
        """How many rows the sequence began with."""
        return self.handle.cached

    @property
    def generation(self) -> int:
        """The generation of its home. Once that is lost, every request with the sequence raises `StaleBuffer`."""
        return self.handle.generation


@dataclass(slots=True, eq=False)
class _Shard:
    """The cache of one worker's generation, and the task that opens it."""

    context: GpuContext
    cache: KvCache
    opening: asyncio.Task[KvCache]

    def serves(self, context: GpuContext) -> bool:
        """Whether it is the cache of the context's current generation, or will be once it has opened."""
        return self.context is context and self.cache._generation in (0, context.generation)


class PooledKvCache(Local):
    """A KV cache over a pool, made by `ContextPool.kv_cache`. Enter it with ``async with``, on one event loop.

    `create` chooses a home by the pages that workers have, and by their load. All later requests with a sequence go to
    its home, in the order in which they are made, and are never repeated elsewhere. If the home is lost, its requests
    are answered with `WorkerLost`. Later requests with the sequence raise `StaleBuffer`: create it again.

    Methods that return a `Reply` take the arguments of the same method of `KvCache`, including timeout and priority.
    """

    def __init__(self, pool: WorkerPool, spec: KvCacheSpec) -> None:
        if isinstance(spec.layers, list):  # it may change before a later worker opens its cache
            spec = dataclasses.replace(spec, layers=tuple(spec.layers))
        self._pool = pool
        self._homes = pool.homes
        self._spec = spec
        self._shards: dict[str, _Shard] = {}
        self._entered = self._closed = False

    def __repr__(self) -> str:
        return f"<PooledKvCache on {', '.join(self._shards) or 'no worker yet'}>"

    async def __aenter__(self) -> Self:
        if self._entered:
            raise GpuActorsError("this cache has been entered already; make one for each use")
        self._entered = True
        async with undo_on_error(self._leave):
            # A bad spec is refused here, not by the first sequence.
            for member in self._pool.candidates().values():
                await self._shard(member)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await shielded(self._leave())

    # Sequences

    async def create(self, tokens: Any = None, *, timeout: float | None = None) -> PooledSequence:
        """Begin a sequence, and choose its home.

        tokens: the ids of its whole prompt, as for `KvCache.create`. A worker that has the pages of the prompt's
        beginning is chosen, unless the worker's load is too high.
        If the home is lost meanwhile, another worker gets the sequence. Raises what `KvCache.create` raises.
        """
        self._check()
        spec = self._spec
        digests = [] if tokens is None else prompt_digests(tokens, spec.page_size, _most_rows(spec))

        def choose(members: Mapping[str, Member]) -> Member:
            return members[self._homes.choose(digests, {name: one.sequences for name, one in members.items()})]

        async def begin(member: Member) -> PooledSequence:
            shard = await self._shard(member)
            reply = shard.cache.create(tokens, timeout=timeout)
            member.began(reply)
            return self._housed(member, await reply)

        return await self._pool.attempt(choose, begin, lambda error, member: True)

    async def fork(self, seq: PooledSequence, *, timeout: float | None = None) -> PooledSequence:
        """Begin a sequence with the rows of another, at the same home, as `KvCache.fork` does."""
        member, cache = self._home(seq)
        reply = cache.fork(seq.handle, timeout=timeout)
        member.began(reply)
        return self._housed(member, await reply)

    async def move(
        self, seq: PooledSequence, worker: str | None = None, *, timeout: float | None = None
    ) -> PooledSequence:
        """Move a sequence to another home, with its rows and prefixes. ``seq`` is then freed.

        Use it to decode on another worker than the one that prefilled, or before a home is removed.
        worker: the new home. None: one of the others, as for a sequence without tokens.
        timeout: seconds for reading the pages and writing them.
        If this raises, the sequence stays where it was. The move waits for an open `step` of the sequence. Rows that
        are appended later do not move, and neither do those of a step that begins later.
        Raises `InvalidRequest` for a worker that takes no new sequence, `CacheFull`, and `WorkerLost` if either worker
        is lost.
        """
        member, source = self._home(seq)
        others = {name: one for name, one in self._pool.candidates().items() if name != member.name}
        if worker is None:
            expect(bool(others), "worker", None, "must be another worker that takes sequences: there is none")
            worker = self._homes.choose([], {name: one.sequences for name, one in others.items()})
        expect(worker in others, "worker", worker, f"must be one of {', '.join(others) or 'no other worker'}")
        home = others[worker]
        shard = await self._shard(home)

        def count(cache: KvCache, reply: Reply[Any]) -> None:
            (member if cache is source else home).began(reply)

        def arrived(digests: tuple[bytes, ...]) -> None:
            self._homes.directory.note(digests, home.name)

        handle = await copy_sequence(source, seq.handle, shard.cache, timeout=timeout, asked=count, arrived=arrived)
        self.free(seq)
        return self._housed(home, handle)

    def truncate(self, seq: PooledSequence, length: int, **options: Any) -> Reply[None]:
        """Keep the first ``length`` rows, as `KvCache.truncate` does."""
        return self._ask(seq, lambda cache, handle: cache.truncate(handle, length, **options))

    def free(self, seq: PooledSequence, **options: Any) -> Reply[None]:
        """Forget a sequence, as `KvCache.free` does."""
        reply = self._ask(seq, lambda cache, handle: cache.free(handle, **options))

        def freed(call: Any) -> None:
            member = self._pool.member(seq.worker)
            if call.error is None and member is not None:
                member.housed(seq.generation, -1)

        reply._call.when_done(freed)
        return reply

    # Rows

    def append(
        self,
        seqs: PooledSequence | Sequence[PooledSequence],
        k: Array | None = None,
        v: Array | None = None,
        **options: Any,
    ) -> Reply[Any]:
        """Write rows after those of sequences with one home. The arguments are those of `KvCache.append`."""
        return self._ask(seqs, lambda cache, handles: cache.append(handles, k, v, **options))

    def attend(
        self, q: Array, seqs: PooledSequence | Sequence[PooledSequence], **options: Any
    ) -> Reply[AttentionOutput]:
        """Attention to sequences with one home. The arguments are those of `KvCache.attend`."""
        return self._ask(seqs, lambda cache, handles: cache.attend(q, handles, **options))

    def step(self, seqs: Sequence[PooledSequence], **options: Any) -> Reply[KvStep]:
        """Begin one pass of a model over the layers, for sequences with one home, as `KvCache.step` does.

        The stream and the arrays of a step belong to one device, so a step is not divided over workers: begin one at
        each home, or bring the sequences to one home with `move`. A `move` or a `free` of one of its sequences waits
        until the step has ended. If the home is lost, layers and the commit raise what a request raises.
        `KvStep.captured` belongs to the home's cache, whose steps take ``[seq.handle for seq in seqs]``.
        """
        return self._ask(seqs, lambda cache, handles: cache.step(handles, **options))

    def run(
        self, seqs: PooledSequence | Sequence[PooledSequence], function: Callable[..., Any], *arguments: Any
    ) -> Reply[Any]:
        """Call ``function(context, cache, seqs, *arguments)`` at the sequences' home, as `RemoteContext.run` does.

        The reply raises `Unsupported` if the home is no `RemoteContext`.
        """
        try:
            member, cache = self._home(seqs)
            context = member.context
            if not isinstance(context, RemoteContext):
                raise Unsupported("seqs", member.name, "must live on a RemoteContext, beside which functions run")
        except GpuActorsError as error:
            return _refused(error)
        reply = context.run(function, cache, _handles(seqs), *arguments)
        member.began(reply)
        return reply

    # Observation

    def length(self, seq: PooledSequence) -> int:
        """The number of rows of a sequence, as `KvCache.length` returns it."""
        _, cache = self._home(seq)
        return cache.length(seq.handle)

    def stats(self) -> Mapping[str, KvCacheStats]:
        """`KvCache.stats` of the cache of each worker that answers."""
        return self._answers(KvCache.stats)

    def group_stats(self) -> Mapping[str, list[KvCacheStats]]:
        """`KvCache.group_stats` of the cache of each worker that answers."""
        return self._answers(KvCache.group_stats)

    # Inside

    def _answers(self, read: Callable[[KvCache], T]) -> dict[str, T]:
        answers = {}
        for name, shard in list(self._shards.items()):
            with contextlib.suppress(GpuActorsError):
                answers[name] = read(shard.cache)
        return answers

    def _check(self) -> None:
        if not self._entered:
            raise InvalidRequest("cache", None, "must be entered first: async with pool.kv_cache(...) as cache")
        if self._closed:
            raise StaleBuffer("the cache was closed, and its pages are given back")

    async def _shard(self, member: Member) -> _Shard:
        """The cache of a worker's generation, opened once."""
        context, name = member.context, member.name
        shard = self._shards.get(name)
        if shard is None or not shard.serves(context):
            if shard is not None:
                self._homes.forget(name)
            spec = self._spec
            cache = context.kv_cache(**{each.name: getattr(spec, each.name) for each in dataclasses.fields(spec)})
            cache._count_of_step = member.began
            opening = asyncio.create_task(cache.__aenter__())
            shard = self._shards[name] = _Shard(context, cache, opening)
            opening.add_done_callback(functools.partial(self._opened, name, shard))
        await asyncio.shield(shard.opening)
        return shard

    def _opened(self, name: str, shard: _Shard, opening: asyncio.Task[KvCache]) -> None:
        failed = opening.cancelled() or opening.exception() is not None
        if failed and self._shards.get(name) is shard:
            del self._shards[name]  # the next request tries again

    def _housed(self, member: Member, handle: KvSequence) -> PooledSequence:
        member.housed(handle.generation, 1)
        return PooledSequence(member.name, handle)

    def _ask(self, seqs: Any, request: Callable[[KvCache, Any], Reply[T]]) -> Reply[T]:
        try:
            member, cache = self._home(seqs)
        except GpuActorsError as error:
            return _refused(error)
        reply = request(cache, _handles(seqs))
        member.began(reply)
        return reply

    def _home(self, seqs: Any) -> tuple[Member, KvCache]:
        """The home that all these sequences share, and its cache. Raises `InvalidRequest` and `StaleBuffer`."""
        self._check()
        listed = list(seqs) if isinstance(seqs, list | tuple) else [seqs]
        sound = bool(listed) and all(isinstance(seq, PooledSequence) for seq in listed)
        expect(sound, "seqs", show(seqs), "must be a PooledSequence or a list of them, as create() and fork() give")
        name = listed[0].worker
        if any(seq.worker != name for seq in listed):
            homes: dict[str, list[int]] = {}
            for place, seq in enumerate(listed):
                homes.setdefault(seq.worker, []).append(place)
            reason = "must have one home: group them by seq.worker, or move them to one"
            raise InvalidRequest("seqs", homes, reason)
        member, shard = self._pool.member(name), self._shards.get(name)
        if (
            member is None
            or shard is None
            or shard.context is not member.context
            or any(seq.handle.cache != shard.cache._number for seq in listed)  # of a worker that had the name before
        ):
            raise StaleBuffer(f"the home of the sequence, {name}, has left the pool or was lost")
        return member, shard.cache

    async def _leave(self) -> None:
        self._closed = True
        shards, self._shards = list(self._shards.values()), {}

        async def close(shard: _Shard) -> None:
            await asyncio.wait([shard.opening])
            if not shard.opening.cancelled() and shard.opening.exception() is None:
                await shard.cache.__aexit__(None, None, None)

        await asyncio.gather(*(close(shard) for shard in shards))


def _most_rows(spec: KvCacheSpec) -> int:
    """The most rows that a sequence of such a cache can have, as its actor computes it."""
    layers = spec.layers if isinstance(spec.layers, list | tuple) else [KvLayer()]
    kept = [layer.num_blocks or spec.num_blocks for layer in layers if layer.window is None]
    return min(kept) * spec.page_size if kept else MAX_SEQLEN


def _handles(seqs: Any) -> Any:
    return [seq.handle for seq in seqs] if isinstance(seqs, list | tuple) else seqs.handle


def _refused(error: GpuActorsError) -> Reply[Any]:
    call: Call[Any] = Call(None, Mailbox("pool", 1, 1))
    call.fail(error)
    return Reply(call)
