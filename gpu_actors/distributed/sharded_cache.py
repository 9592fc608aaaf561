"""ShardedKvCache: keeps sequences whose keys lie on several workers, and merges the workers' attention.

    old keys: on every worker that has some ──────────┐
    new rows among themselves: one forward request ───┴──> merge ──> append the new rows to their owners

`gpu_actors.distributed.key_split` says which keys of a worker a row sees. If a worker's keys are equally far apart, and
the rows would need several requests or have slopes, the worker gets the positions of rows and keys instead
(`k_positions`). The merge is `gpu_actors.partial.merge`.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import math
from collections.abc import Collection, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, NamedTuple, Self, Unpack

import numpy as np

from gpu_actors.actors.kv_step import LATE
from gpu_actors.arrays.adopt import name_of
from gpu_actors.attention.key_mask import MASK_OPTIONS, KeyMask
from gpu_actors.attention.requests import Array, AttentionOutput
from gpu_actors.catching import shielded, undo_on_error
from gpu_actors.distributed.key_split import KeySplit, RowRequest
from gpu_actors.distributed.member import Member
from gpu_actors.distributed.parts import all_of
from gpu_actors.distributed.pool import ContextPool
from gpu_actors.distributed.shard_rows import ROTATION, dense_operands, on_host, rotate_and_quantise, tree_matrix
from gpu_actors.distributed.sharded_step import ShardedStep
from gpu_actors.errors import ContextLost, DeadlineExceeded, GpuActorsError, InvalidRequest, StaleBuffer, Unsupported
from gpu_actors.fields import (
    FP8,
    describe,
    expect,
    flag,
    heads_of_layers,
    integer,
    optional_array,
    output_dtype,
    real,
)
from gpu_actors.handles.kv_cache import KvCache
from gpu_actors.kernels.append import AppendProblem, Rope
from gpu_actors.kernels.support import MAX_SEQLEN
from gpu_actors.kv.requests import AttendCache, BeginStep, KvCacheKeywords, KvCacheSpec, KvSequence
from gpu_actors.partial import Partial, empty, merge
from gpu_actors.process import Local
from gpu_actors.runtime.handle import CallOptions
from gpu_actors.runtime.reply import need_asyncio
from gpu_actors.values import show

__all__ = ["ShardedKvCache", "ShardedSequence"]

_KV_CACHE = CallOptions(KvCacheSpec, KvCacheKeywords)

_HALVES = ("float16", "bfloat16")
_NUMBERS = itertools.count(1)


@dataclass(slots=True, eq=False)
class ShardedSequence:
    """A sequence of a `ShardedKvCache`.

    number: unique in the process.
    length: how many rows have been written.
    """

    number: int
    length: int
    _cache: ShardedKvCache = field(repr=False)
    _handles: list[KvSequence] = field(repr=False)
    # Sequences of a worker's first keys, by worker and number of keys.
    _prefixes: dict[tuple[int, int], KvSequence] = field(default_factory=dict, repr=False)
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock, repr=False)
    _loss_reason: str = field(default="", repr=False)
    _freed: bool = field(default=False, repr=False)


class _Attention(NamedTuple):
    """The arguments of an attention to one layer, on the host. options: the options that each worker gets."""

    q: Any
    new: tuple[Any, Any] | None
    rotation: Mapping[str, Any]
    mask: KeyMask
    slopes: Any
    tree: Any
    sinks: Any
    options: Mapping[str, Any]


class ShardedKvCache(Local):
    """A paged KV cache whose sequences are divided among the workers of a pool, in runs of ``interleave`` rows.

    So a sequence may have as many keys as all workers together have pages for, and each worker reads its share. Enter
    it with ``async with`` on one event loop. It uses the workers that the pool has at that time.

    pool: a pool with at least one worker.
    interleave: how many consecutive rows a worker gets in turn. None: ``page_size``.
    num_blocks: the pages of each worker.
    k_descale, v_descale: arrays on the host.
    layers: a number. A sequence has the same rows on the same workers in all layers. A list raises `Unsupported`.
    The other arguments are those of `KvCacheSpec`. latent_dim and float64 raise `Unsupported`: a `PooledKvCache` takes
    them.

    Requests on a sequence take effect one after the other. Each takes effect wholly or not at all, unless a worker is
    lost. Then the sequence is lost: the request raises `WorkerLost`, and later requests raise `StaleBuffer`.
    """

    @_KV_CACHE
    def __init__(self, pool: ContextPool, *, interleave: int | None = None, **options: Unpack[KvCacheKeywords]) -> None:
        _KV_CACHE.check(options)
        expect(isinstance(pool, ContextPool), "pool", show(pool), "must be a ContextPool")
        spec = KvCacheSpec(**options)
        dtype = spec.dtype
        if spec.latent_dim != 0:
            reason = "new rows attend to each other in a forward request, which takes no latents: use a PooledKvCache"
            raise Unsupported("latent_dim", spec.latent_dim, reason, 0)
        if isinstance(spec.layers, list | tuple):
            raise Unsupported("layers", show(spec.layers), "must be a number: they are alike", len(spec.layers))
        if dtype == "float64":
            reason = "the answers of workers are merged by their LSE, which is fp32: use a PooledKvCache"
            raise Unsupported("dtype", dtype, reason, "float32")
        expect(isinstance(dtype, str), "dtype", show(dtype), "must be the name of a dtype")
        self._pool = pool
        self._dtype = dtype
        descales = (("k_descale", spec.k_descale), ("v_descale", spec.v_descale))
        self._descales = {name: on_host(name, factors) for name, factors in descales if factors is not None}
        heads, dim = spec.kv_heads, spec.head_dim
        if heads is None or dim is None:
            raise InvalidRequest("kv_heads" if heads is None else "head_dim", None, "must be given")
        self._dim_v = dim if spec.head_dim_v is None else spec.head_dim_v
        self._kv_heads = heads
        self._layers = integer("layers", spec.layers, 1)
        self.interleave: int = integer("interleave", spec.page_size if interleave is None else interleave, 1)
        self._spec: dict[str, Any] = {**options, **self._descales}
        self._layout = AppendProblem(
            layout="paged", batch=1, total=1, rows=1, heads_kv=heads, head_dim=dim,
            head_dim_v=self._dim_v, dtype=dtype, cache_dtype=dtype, page_size=spec.page_size,
            num_blocks=spec.num_blocks, max_blocks=1,
        )  # fmt: skip
        self._members: list[Member] = []
        self._caches: list[KvCache] = []
        self._state = "new"

    async def __aenter__(self) -> Self:
        need_asyncio("ShardedKvCache")
        if self._state != "new":
            raise GpuActorsError("this cache has been entered already; make one for each use")
        self._state = "open"
        async with undo_on_error(self.__aexit__, None, None, None):
            for member in self._pool.candidates().values():
                if member.context.info.invariant:
                    reason = "the answers of workers are merged, so bits depend on where keys lie: use a PooledKvCache"
                    raise Unsupported("pool", f"{member.name} with invariant=True", reason, None)
                self._caches.append(await member.context.kv_cache(**self._spec).__aenter__())
                self._members.append(member)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._state = "closed"
        await shielded(self._close())

    @property
    def split(self) -> KeySplit:
        """Which worker has which keys."""
        return KeySplit(len(self._caches), self.interleave)

    @property
    def workers(self) -> list[str]:
        """The workers' names, in the order in which they get rows."""
        return [member.name for member in self._members]

    # Sequences

    async def create(self) -> ShardedSequence:
        """Begin an empty sequence."""
        self._check()
        handles: list[KvSequence] = []
        with undo_on_error(self._free, handles):
            for cache in self._caches:
                handles.append(await cache.create())  # noqa: PERF401  what was begun before one fails is freed
        return ShardedSequence(next(_NUMBERS), 0, self, handles)

    def _free(self, handles: list[KvSequence]) -> None:
        for cache, handle in zip(self._caches, handles, strict=False):
            cache.free(handle)

    async def free(self, seq: ShardedSequence) -> None:
        """Forget a sequence on every worker."""
        self._check_sequence(seq)
        async with seq._lock:
            self._check_sequence(seq)
            seq._freed = True
            freeing = [cache.free(handle) for cache, handle in zip(self._caches, seq._handles, strict=True)]
            freeing += [self._caches[rank].free(prefix) for (rank, _), prefix in seq._prefixes.items()]
            for reply in freeing:
                with contextlib.suppress(ContextLost, StaleBuffer):  # the rows are lost too
                    await reply

    # Rows

    async def append(
        self,
        seq: ShardedSequence,
        k: Array,
        v: Array,
        *,
        rope: Rope | None = None,
        positions: Array | None = None,
        rope_cos: Array | None = None,
        rope_sin: Array | None = None,
    ) -> int:
        """Write rows after those of a sequence. Returns the new length.

        k: (rows, kv_heads, head_dim), in the cache's dtype; for an fp8 cache in float16, bfloat16 or its own dtype.
        v: likewise, with head_dim_v. If the cache has several layers, both have an axis of layers before all others.
        rope, positions, rope_cos, rope_sin: as in `AppendRows`. Rows are rotated and quantised before they are sent.
        Raises `InvalidRequest` and `CacheFull`, and then nothing is written. A write that has begun is completed even
        if the task is cancelled.
        """
        self._check_sequence(seq)
        rows = self._rows(k, v, self._layers)
        rotation = dict(zip(ROTATION, (rope, positions, rope_cos, rope_sin), strict=True))
        async with seq._lock:
            self._check_sequence(seq)
            layers = [rows] if self._layers == 1 else zip(*rows, strict=True)
            new = [
                rotate_and_quantise(self._layout, self._descales, *layer, None, seq.length, rotation)[:2]
                for layer in layers
            ]
            return await self._append(seq, new)

    async def attend(
        self,
        q: Array,
        seq: ShardedSequence,
        *,
        k: Array | None = None,
        v: Array | None = None,
        layer: int = 0,
        causal: bool = True,
        sinks: Array | None = None,
        tree_mask: Array | None = None,
        rope: Rope | None = None,
        positions: Array | None = None,
        rope_cos: Array | None = None,
        rope_sin: Array | None = None,
        q_descale: Array | None = None,
        return_lse: bool = False,
        timeout: float | None = None,
        **options: Any,
    ) -> AttentionOutput:
        """Attend with q, the last rows of a sequence, to the whole sequence. Then append k and v, if given.

        q: (rows, heads_q, head_dim), in the cache's dtype, or float16 or bfloat16 over fp8. The output has q's dtype,
            or bfloat16 for fp8. k, v: of the same rows, as for `append`; None for rows that are in the cache.
        layer: of a cache of several layers. A `step` or `append` appends its rows, so k and v must be None.
        q_descale: fp32 (kv_heads,), for an fp8 q, which cannot be rotated.
        causal, sinks, return_lse: as in `FlashForward`. timeout: seconds for the attention.
        tree_mask: in place of causal, as in `PagedForward`: uint64 (rows,) or bool (rows, rows).
        rope, positions, rope_cos, rope_sin: as in `AttendCache`; they rotate q too.
        options: of `AttendCache`: scale, soft cap, window, chunks, the first keys that stay visible, and ALiBi's
            slopes, (heads_q,). Other options must have their defaults.
        The answer is rounded once more than one context's: by half a unit in the last place for each worker's part.

        Raises `Unsupported` for other options; for ALiBi if neighbouring keys of a worker are not equally far apart
        (``interleave=1`` makes them so); and for a tree mask without k and v together with a window,
        chunks or ALiBi, because a worker that has some keys of the tree does not know their places. Raises what
        `append` raises, and then nothing is written.
        """
        _check_options("attend", options, _SUPPORTED)
        self._check_sequence(seq)
        number = integer("layer", layer, 0, self._layers - 1)
        for name, rows in (("k", k), ("v", v)):
            reason = f"must be None: a cache of {self._layers} layers gets rows by a step, or by append of all layers"
            expect(rows is None or self._layers == 1, name, describe(rows), reason)
        attention = self._checked(
            q, k, v, causal=causal, sinks=sinks, tree_mask=tree_mask, rope=rope, positions=positions,
            rope_cos=rope_cos, rope_sin=rope_sin, q_descale=q_descale, **options,
        )  # fmt: skip
        async with seq._lock:
            self._check_sequence(seq)
            merged, new = await self._attend(seq, number, attention, timeout)
            if new is not None:
                await self._append(seq, [new])
        return AttentionOutput(merged.out, merged.lse if return_lse else None)

    async def step(
        self,
        seq: ShardedSequence,
        *,
        heads_q: int | Sequence[int],
        rows: int = 1,
        append: bool = True,
        layer_options: Mapping[int, Mapping[str, Any]] | None = None,
        timeout: float | None = None,
        **options: Any,
    ) -> ShardedStep:
        """Begin one pass of a model over all layers of a sequence, as `KvCache.step` does.

        heads_q: the heads of q, or a list with one number per layer. rows: how many last rows of the sequence q has.
        append: whether each layer gets keys and values of these rows.
        options: of `attend`. layer_options: options of single layers, which replace these.
        timeout: seconds for the whole step, after which it is aborted.
        The layers are requests that the workers answer, so a CUDA graph cannot capture them: use a `PooledKvCache`. The
        step takes no pages before the commit. Raises `InvalidRequest`, and `Unsupported` for other options.
        """
        self._check_sequence(seq)
        count = integer("rows", rows, 1, MAX_SEQLEN)
        appends = flag("append", append)
        heads = heads_of_layers(heads_q, [self._kv_heads] * self._layers)
        own: Any = {} if layer_options is None else layer_options
        expect(isinstance(own, Mapping), "layer_options", show(own), "must give options by layer")
        for layer, each in own.items():
            integer("layer_options", layer, 0, self._layers - 1)
            expect(isinstance(each, Mapping), f"layer_options[{layer}]", show(each), "must give options by name")
        for where, each in (("", options), *((f"layer_options[{layer}].", each) for layer, each in own.items())):
            _check_options("step", each, _STEP_OPTIONS, where)
            flag(f"{where}return_lse", each.get("return_lse", False))
        by_layer = [{**options, **own.get(layer, {})} for layer in range(self._layers)]
        deadline = None
        if timeout is not None and timeout != math.inf:
            seconds = real("timeout", timeout, "a finite number of seconds, or None")
            deadline = asyncio.get_running_loop().time() + seconds
        try:
            async with asyncio.timeout_at(deadline):
                await seq._lock.acquire()
        except TimeoutError:
            raise DeadlineExceeded(LATE) from None
        with undo_on_error(seq._lock.release):
            self._check_sequence(seq)
            return ShardedStep(self, seq, count, appends, heads, by_layer, deadline)

    # Inside

    async def _close(self) -> None:
        await asyncio.gather(*(cache.__aexit__(None, None, None) for cache in self._caches))

    def _checked(
        self,
        q: Array,
        k: Array | None,
        v: Array | None,
        *,
        causal: bool = True,
        sinks: Array | None = None,
        tree_mask: Array | None = None,
        rope: Rope | None = None,
        positions: Array | None = None,
        rope_cos: Array | None = None,
        rope_sin: Array | None = None,
        q_descale: Array | None = None,
        **options: Any,
    ) -> _Attention:
        """The arguments of `attend`, checked as far as they do not depend on the sequence."""
        query = self._query(q)
        factors = self._query_factors(q_descale, query)
        new = None
        if k is not None or v is not None:
            new = self._rows(k, v)
            rows = new[0].shape[0]
            expect(rows == query.shape[0], "k", describe(new[0]), f"must have q's rows, {query.shape[0]}")
        rotation = dict(zip(ROTATION, (rope, positions, rope_cos, rope_sin), strict=True))
        if new is None:
            for name, value in rotation.items():
                expect(value is None, name, show(value), "goes with k and v: rows in the cache have been rotated")
        tree = None if tree_mask is None else tree_matrix(tree_mask, len(query))
        masking = {name: value for name, value in options.items() if name in MASK_OPTIONS}
        mask = KeyMask(causal=causal and tree is None, **masking)
        per_score: dict[str, Any] = {"return_lse": True}
        per_score |= {name: value for name, value in options.items() if name in ("softmax_scale", "softcap")}
        per_score |= {} if factors is None else {"q_descale": factors}
        slopes = self._slopes(options.get("alibi_slopes"), query)
        return _Attention(query, new, rotation, mask, slopes, tree, sinks, per_score)

    async def _attend(
        self, seq: ShardedSequence, layer: int, attention: _Attention, timeout: float | None = None
    ) -> tuple[Partial, tuple[Any, Any] | None]:
        """The merged answer, and the new rows as the cache stores them."""
        q, new, rotation, mask, slopes, tree, sinks, per_score = attention
        options = {**per_score, "timeout": timeout}
        if new is not None:
            rotated = rotate_and_quantise(self._layout, self._descales, *new, q, seq.length, rotation)
            new, q = rotated[:2], rotated[2]
        length, count = seq.length, len(q)
        begin = length if new is not None else length - count
        positions = np.arange(begin, begin + count)
        within = tree if new is None else None  # a tree whose keys lie on the workers
        if within is not None and (mask.mask != "full" or slopes is not None):
            reason = "a worker does not know the places of its keys of the tree: give k and v, or no window and slopes"
            raise Unsupported("tree_mask", describe(within), reason, None)
        step = self.split.step(length)
        if slopes is not None and not step:
            reason = "the keys of a worker are not equally far apart: interleave=1 makes them so"
            raise Unsupported("alibi_slopes", f"interleave={self.interleave}", reason, None)
        early = max(0, -begin)  # rows before the first key
        if slopes is not None and early and not mask.causal:
            raise Unsupported(
                "alibi_slopes", describe(slopes), f"{early} rows come before the first key and see it", None
            )
        attentions: list[Coroutine[Any, Any, Any]] = []
        for rank in range(len(self._caches)):
            parts = self.split.asked(rank, positions, length, mask)
            if not parts:
                continue
            overrides: dict[str, Any] = (
                {} if within is None else {"tree_mask": self.split.tree(rank, begin, within)[None]}
            )
            placed = step and (mask.causal or not early)
            if placed and (slopes is not None or len(parts) > 1 or parts[0].apart):
                parts = [RowRequest(slice(early, count), self.split.before(rank, length), -1, 0, False)]
                keys = np.array([[self.split.position(rank, 0), step]], np.int32)
                overrides = {name: getattr(mask, name) for name in _MASKS} | {"alibi_slopes": slopes}
                overrides |= {"q_positions": np.array([begin + early], np.int32), "k_positions": keys}
            attentions.append(self._attend_cached(seq, rank, q, parts, {**options, "layer": layer}, overrides))
        if new is not None and count:
            sinks_left = max(0, mask.sink_tokens - length)
            among: dict[str, Any] = {
                "causal": mask.causal,
                "window_size": mask.window_size,
                "sink_tokens": sinks_left,
                "alibi_slopes": slopes,
            }
            if mask.attention_chunk:  # chunks begin at keys of the whole sequence
                first = np.array([length], np.int32)
                among |= {"sink_tokens": mask.sink_tokens, "q_positions": first, "k_positions": first}
                among["attention_chunk"] = mask.attention_chunk
            if tree is not None:
                among["bias"] = tree[None, None]
            attentions.append(self._attend_new(q, new, {**options, **among}))
        dtype = output_dtype(name_of(q.dtype))
        partials = [empty((*q.shape[:-1], self._dim_v), dtype=dtype)]
        merged = merge(partials + await all_of(attentions), sinks=sinks, out_dtype=dtype)
        return Partial(merged.out, merged.lse.astype(np.float32)), new

    async def _attend_cached(
        self,
        seq: ShardedSequence,
        rank: int,
        q: Any,
        parts: list[RowRequest],
        options: dict[str, Any],
        overrides: dict[str, Any],
    ) -> Partial:
        """The attention of rows to the keys of one worker. overrides: options that replace those of a part."""
        partial = empty((*q.shape[:-1], self._dim_v), dtype=output_dtype(name_of(q.dtype)))
        partial = Partial(partial.out, partial.lse.astype(np.float64))
        cache, replies = self._caches[rank], []
        try:
            handles = [await self._prefix(seq, rank, part.keys) for part in parts]
            for part, handle in zip(parts, handles, strict=True):
                rows = q[part.rows]
                query, seqs = (rows[:, None], [handle] * len(rows)) if part.apart else (rows[None], [handle])
                part_mask = {"causal": False, "window_size": (part.reach, -1), "sink_tokens": part.sinks}
                part_options = {**options, **part_mask, **overrides}
                if "q_descale" in options:
                    part_options["q_descale"] = np.tile(options["q_descale"], (len(seqs), 1))
                replies.append(cache.attend(query, seqs, **part_options))
                self._members[rank].began(replies[-1])
            for part, reply in zip(parts, replies, strict=True):
                answer = await reply
                partial.out[part.rows] = answer.out.reshape(-1, *partial.out.shape[1:])
                partial.lse[:, part.rows] = answer.lse[:, :, 0].T if part.apart else answer.lse[0]
        except GpuActorsError as error:
            self._note_loss(seq, error)
            raise
        finally:
            for reply in replies:
                reply.cancel()
        return partial

    async def _prefix(self, seq: ShardedSequence, rank: int, keys: int) -> KvSequence:
        """A sequence on one worker that has the worker's first ``keys`` keys of ``seq``."""
        if keys == self.split.before(rank, seq.length):
            return seq._handles[rank]
        prefix = seq._prefixes.get((rank, keys))
        if prefix is None:
            prefix = await self._caches[rank].fork(seq._handles[rank])
            with undo_on_error(self._caches[rank].free, prefix):
                await self._caches[rank].truncate(prefix, keys)
            seq._prefixes[rank, keys] = prefix
        return prefix

    async def _attend_new(self, q: Any, new: Any, options: dict[str, Any]) -> Partial:
        timeout = options.pop("timeout")
        factors = {**self._descales, "q_descale": options.pop("q_descale", None)}
        q, k, v = (array[None] for array in dense_operands(factors, q, *new))
        answer = await self._pool.ask(lambda ctx: ctx.flash_attn.forward(q, k, v, **options), timeout=timeout)
        return Partial(answer.out[0], answer.lse[0].astype(np.float64))

    async def _append(self, seq: ShardedSequence, new: Sequence[tuple[Any, Any]]) -> int:
        """Write the new keys and values of each layer."""
        k, v = new[0] if len(new) == 1 else map(np.stack, zip(*new, strict=True))
        writing = asyncio.ensure_future(self._write(seq, k, v))
        # Not cancelled: half of a write would leave a sequence that cannot be used.
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
        end: int = begin + k.shape[-3]
        owners = self.split.owners(begin, end)
        lengths = self.split.lengths(begin)
        replies = {}
        for rank in np.unique(owners).tolist():
            own_rows = owners == rank
            for key in [key for key in seq._prefixes if key[0] == rank]:  # the write would need one more page
                self._caches[rank].free(seq._prefixes.pop(key))
            options = {"expect_length": lengths[rank]}
            own_k, own_v = k[..., own_rows, :, :], v[..., own_rows, :, :]
            replies[rank] = self._caches[rank].append(seq._handles[rank], own_k, own_v, **options)
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
                    await self._caches[rank].truncate(seq._handles[rank], lengths[rank])
                except GpuActorsError as error:
                    self._note_loss(seq, error, always=True)
            raise failure
        seq.length = end
        return end

    def _note_loss(self, seq: ShardedSequence, error: GpuActorsError, always: bool = False) -> None:
        if always or isinstance(error, ContextLost | StaleBuffer):
            seq._loss_reason = f"a worker that had rows of the sequence is lost: {error}"

    def _check(self) -> None:
        if self._state == "new":
            raise InvalidRequest("cache", None, "must be entered first: async with ShardedKvCache(...) as cache")
        if self._state == "closed":
            raise StaleBuffer("the cache was closed, and its pages are given back")

    def _check_sequence(self, seq: ShardedSequence) -> None:
        self._check()
        sound = isinstance(seq, ShardedSequence) and seq._cache is self
        expect(sound, "seq", show(seq), "must be a sequence of this cache, as create() gives")
        expect(not seq._freed, "seq", show(seq), "was freed")
        if seq._loss_reason:
            raise StaleBuffer(seq._loss_reason)

    def _rows(self, k: Any, v: Any, layers: int = 1) -> tuple[Any, Any]:
        dtypes = (self._dtype, *_HALVES) if self._dtype in FP8 else (self._dtype,)
        leading = () if layers == 1 else (layers,)
        arrays = []
        for name, array, dim in (("k", k, self._spec["head_dim"]), ("v", v, self._dim_v)):
            expect(array is not None, name, None, "must be given: rows have keys and values")
            host = on_host(name, array)
            axes = ", ".join(map(str, (*leading, "rows", self._kv_heads, dim)))
            shaped = host.ndim == len(leading) + 3 and host.shape[:-3] == leading
            sound = shaped and host.shape[-2:] == (self._kv_heads, dim) and name_of(host.dtype) in dtypes
            expect(sound, name, describe(host), f"must be ({axes}) {' or '.join(dtypes)}")
            arrays.append(host)
        rows = arrays[0].shape[-3]
        expect(arrays[1].shape[-3] == rows, "v", describe(arrays[1]), f"must have k's rows, {rows}")
        return arrays[0], arrays[1]

    def _slopes(self, slopes: Any, q: Any) -> Any:
        if slopes is None:
            return None
        host = on_host("alibi_slopes", slopes)
        sound = host.shape == q.shape[1:2] and name_of(host.dtype) == "float32"
        expect(sound, "alibi_slopes", describe(host), f"must be ({q.shape[1]},) float32")
        return host

    def _query(self, q: Any) -> Any:
        host, dim = on_host("q", q), self._spec["head_dim"]
        dtypes = (*_HALVES, self._dtype) if self._dtype in FP8 else (self._dtype,)
        sound = host.ndim == 3 and host.shape[-1] == dim and name_of(host.dtype) in dtypes
        expect(sound, "q", describe(host), f"must be (rows, heads_q, {dim}) {' or '.join(dtypes)}")
        whole = host.shape[1] > 0 and host.shape[1] % self._kv_heads == 0
        expect(whole, "q", describe(host), f"must have the cache's {self._kv_heads} heads or a multiple of them")
        return host

    def _query_factors(self, factors: Any, q: Any) -> Any:
        if factors is None:
            return None
        host, dtype = on_host("q_descale", factors), name_of(q.dtype)
        expect(dtype in FP8, "q_descale", describe(host), f"goes with fp8 inputs only, and q is {dtype}")
        optional_array("q_descale", host, ((self._kv_heads,),), ("float32",))
        return host


_MASKS = tuple(name for name in MASK_OPTIONS if name != "alignment")
_SUPPORTED = ("softmax_scale", "softcap", *_MASKS, "alibi_slopes")
_STEP_OPTIONS = (*_SUPPORTED, *ROTATION, "causal", "sinks", "tree_mask", "q_descale", "return_lse")


def _check_options(method: str, given: Mapping[str, Any], supported: Collection[str], where: str = "") -> None:
    """Raise `Unsupported` for other options that are not at their defaults, TypeError for one that no cache has.

    where: the text before an option's name in the error.
    """
    messages = (AttendCache, BeginStep) if method == "step" else (AttendCache,)
    options = {each.name: each.default for message in messages for each in dataclasses.fields(message)}
    for name, value in given.items():
        if name in supported:
            continue
        if name not in options:
            raise TypeError(f"{method}() got an unexpected keyword argument {name!r}")
        default = options[name]
        if value is default or (isinstance(value, int | tuple) and value == default):
            continue
        reason = "is not taken by a cache over several workers"
        shown = value if isinstance(value, int | tuple) else describe(value)
        raise Unsupported(f"{where}{name}", shown, reason, default)
