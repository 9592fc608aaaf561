"""CacheStore: the opened caches of a context. It outlives the incarnations of the KvCacheActor."""

from __future__ import annotations

import dataclasses
import itertools
import math
import threading
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np

from gpu_actors.actors.coalescing import Work
from gpu_actors.actors.kv_order import KvOrder
from gpu_actors.actors.kv_spec import groups_of
from gpu_actors.arrays.adopt import CallerNotes
from gpu_actors.arrays.request_arrays import changed
from gpu_actors.attention.block_mask import BlockMask
from gpu_actors.attention.requests import PagedForward
from gpu_actors.compiling.variant import Variant
from gpu_actors.devices.interface import Kernel, Kernels, Launch, Outputs
from gpu_actors.errors import GpuActorsError, InvalidRequest, OutOfDeviceMemory, StaleBuffer, Unsupported
from gpu_actors.fields import describe, expect, integer, window
from gpu_actors.kernels.append import AppendProblem
from gpu_actors.kernels.support import MAX_SEQLEN
from gpu_actors.kv.page_map import PageMap, page_map
from gpu_actors.kv.prefix import Tokens
from gpu_actors.kv.requests import AppendRows, AttendCache, KvSequence
from gpu_actors.kv.sequences import (
    CacheTables,
    GroupSize,
    KvCacheStats,
    PageTable,
    Write,
    block_table,
    first_page,
    table_width,
)
from gpu_actors.planning.append_rows import NewRows
from gpu_actors.planning.cached import Decoding
from gpu_actors.planning.cascade import CascadeKeys, Cascader
from gpu_actors.planning.plan import Plan, PlanCache
from gpu_actors.planning.planner import Workbench
from gpu_actors.process import incarnation
from gpu_actors.runtime.cell import ActorCell
from gpu_actors.validation.paged import check_bias
from gpu_actors.values import show

__all__ = [
    "MOST_ELEMENTS",
    "CacheLook",
    "CacheStore",
    "KvWork",
    "LayerPlan",
    "OpenedCache",
    "PoolGroup",
    "RequestKind",
    "StepPlan",
]

# Numbers of caches are unique in the process: a sequence of one context must not be taken for one of another.
_NUMBERS = itertools.count(1)

_KINDS = 256  # the most kinds of requests, or of steps, that are remembered

# Options of attention that refer to places in the whole sequence, each with the value that turns it off.
_PLACES: tuple[tuple[str, Any], ...] = (
    ("sink_tokens", 0),
    ("attention_chunk", 0),
    ("bias", None),
    ("block_mask", None),
    ("q_positions", None),
    ("k_positions", None),
)

MOST_ELEMENTS = 1 << 58  # of one array: its bytes, and the addresses in it, fit into 64 bits with room to spare


@dataclass(slots=True, eq=False)
class RequestKind:
    """The state that requests of one kind on a cache share (see `kv_kind`). It has no reference to its cache.

    request, plan: the attention, None if requests only append. rows: the new rows, or None. request and rows do not
    keep the arrays of the request that the kind was made for. variants: for the kernels of a `KvWork`, in order.
    shared: the key of work that may share a launch, or None. columns: the width of the block table that the plan is
    for. number: unique in the process. launches: what `kv_kind` would remember with the kernels, if there are none.
    """

    request: PagedForward | None
    plan: Plan | None
    rows: NewRows | None
    variants: tuple[Variant, ...]
    shared: Hashable | None
    columns: int = field(init=False, default=0)
    number: int = field(init=False, default_factory=itertools.count().__next__)
    launches: dict[Hashable, Launch] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        if self.request is not None:
            table: Any = self.request.block_table
            self.columns = table.shape[1]
            self.request = changed(self.request, dict.fromkeys(("q", "out", "block_table", "cache_seqlens")))
        if self.rows is not None:
            self.rows = changed(self.rows, dict.fromkeys(("k", "v")))


class LayerPlan(NamedTuple):
    """What a step does to layers that are alike. layer: the first of them. layouts: the arrays' layouts by name."""

    layer: int
    kind: RequestKind
    layouts: Any


class StepPlan(NamedTuple):
    """The state that steps of one kind share. of_layer: the index of each layer's plan."""

    plans: tuple[LayerPlan, ...]
    of_layer: tuple[int, ...]


@dataclass(slots=True, kw_only=True, eq=False)
class KvWork(Work):
    """A request on a cache that waits for its launch, or is in flight.

    request, plan: None if the request only appends. rows: the new rows, or None. kind: the request's kind, None once
    its plan is another than the kind's. loaded: all its kernels.
    expected: the lengths that its sequences must have before it, or None. appending: the kernels that append and that
    copy pages, or none. cascade: what a launch as a cascade takes, or why there is none. cascading: its kernels.
    single: the sequence was not in a list. layer: the layer that is attended to. columns: the least width of the table.
    by_layer: the new rows of each layer, if their arrays lie apart; rows are then the first layer's. by_group:
    the table and the lengths in each group, for by_layer.
    totals: the length of each sequence, with new rows. table, lengths: for a launch on the layer's group. These
    and writes are set by `OpenedCache.begin`.
    lost: a launch that the request builds on has failed.
    """

    request: PagedForward | None
    cache: OpenedCache
    tables: list[PageTable]
    rows: NewRows | None = None
    kind: RequestKind | None = None
    loaded: Kernels | None = None
    expected: list[int] | None = None
    appending: tuple[Kernel, ...] = ()
    cascade: CascadeKeys | str | None = None
    cascading: tuple[Kernel, ...] = ()
    single: bool = False
    layer: int = 0
    columns: int = 0
    by_layer: Sequence[NewRows] = ()
    by_group: Sequence[tuple[Any, Any]] = ()
    totals: list[int] = field(default_factory=list)
    table: Any = None
    lengths: Any = None
    writes: list[Write] = field(default_factory=list)
    lost: bool = False

    @property
    def rows_each(self) -> Any:
        """How many of each sequence's last rows are rows of q or new rows, int64 (batch,)."""
        new = np.zeros(len(self.tables), np.int64) if self.rows is None else self.rows.counts
        request = self.request
        if request is None:
            return new
        ends: Any = request.cu_seqlens_q
        return np.maximum(new, request.q.shape[1] if ends is None else np.diff(ends))

    @property
    def group(self) -> PoolGroup:
        """The group of the layer."""
        return self.cache.group_of[self.layer]

    def take_pages(self, decoding: Decoding) -> None:
        """Put the table and the lengths of the launch into the request. Plan anew if the kind's plan does not fit."""
        request = self.request
        if request is None or self.plan is None:
            return
        request.block_table, request.cache_seqlens = self.table, self.lengths
        if self.layer:
            pools = self.cache.by_layer[self.layer]
            request.k_cache, request.v_cache = pools["k_cache"], pools.get("v_cache")
        # Launches since the check may have added pages. A launch that failed is made again without a kind.
        if self.kind is None or self.table.shape[1] != self.kind.columns:
            self.plan, self.kind = decoding.plan(request, self.plan.key), None

    @property
    def shared(self) -> Hashable | None:
        """The key of work that may share a launch with this, or None."""
        shared = None if self.kind is None else self.kind.shared
        return (shared, self.layer) if shared is not None and self.layer else shared

    def answer(self, outputs: Outputs) -> Any:
        if self.request is not None:
            return super(KvWork, self).answer(outputs)
        return self.totals[0] if self.single else self.totals


@dataclass(eq=False)
class PoolGroup:
    """Layers of a cache with the same spec: their pools on the device, and the kinds of requests on them.

    key: the number of the cache, and the group's number in it, from 0. layers: their numbers in the cache, in
    order. pool: the problem of an append of one row, for what all appends share. descales: "k_descale" and
    "v_descale", fp32 (kv_heads,), if the pools have them. A latent cache has only k_pool. With several layers the pools
    have a layer axis before the page axis. kinds: the kinds of requests, by key. window, slack: as in `KvLayer`.
    by_layer: the pools of each layer, by the names of a launch's operands.
    """

    key: tuple[int, int]
    layers: Sequence[int]
    pool: AppendProblem
    k_pool: Any
    v_pool: Any
    descales: Mapping[str, Any]
    window: int | None = None
    slack: int = 0
    kinds: PlanCache[RequestKind] = field(init=False, default_factory=lambda: PlanCache(_KINDS))
    by_layer: list[dict[str, Any]] = field(init=False)

    def __post_init__(self) -> None:
        whole = self.pools
        several = ({name: pool[index] for name, pool in whole.items()} for index in range(len(self.layers)))
        self.by_layer = [whole] if len(self.layers) == 1 else list(several)

    @property
    def number(self) -> int:
        return self.key[1]

    @property
    def pools(self) -> dict[str, Any]:
        """The pools of all layers, by the names of a launch's operands."""
        pools = {"k_cache": self.k_pool}
        return pools if self.v_pool is None else {**pools, "v_cache": self.v_pool}

    def descales_of(self, batch: int) -> dict[str, Any]:
        """The descales for ``batch`` sequences, fp32 (batch, kv_heads)."""
        shape = batch, self.pool.heads_kv
        return {name: np.ascontiguousarray(np.broadcast_to(one, shape)) for name, one in self.descales.items()}

    def request(self, q: Any, lengths: Any, columns: int, options: Mapping[str, Any]) -> PagedForward:
        """The attention of q to sequences of these lengths. Its block table has this many columns, and no pages yet."""
        batch = len(lengths)
        return PagedForward(
            q=q,
            k_cache=self.by_layer[0]["k_cache"],
            v_cache=self.by_layer[0].get("v_cache"),  # a latent cache has none
            latent_dim=self.pool.head_dim_v if self.pool.latent else 0,
            block_table=np.zeros((batch, columns), np.int32),
            cache_seqlens=lengths,
            **self.descales_of(batch),
            **options,
        )

    def columns(self, length: int, rows: int, block_mask: BlockMask | None = None) -> int:
        """The width of the block table for sequences of at most ``length`` rows.

        rows: the most rows of q, or new rows, that a sequence has.
        """
        if self.window is not None:
            held = self.pool.num_blocks * self.pool.page_size  # by one sequence, at most
            length = min(length, self._reach(rows) + self.pool.page_size - 1, held)
        return table_width(-(-length // self.pool.page_size), self._most_columns(block_mask))

    def begins(self, totals: Any, rows: Any) -> Any:
        """The first page that the last ``rows`` rows of each sequence see, int64 (batch,). None without a window.

        totals: the lengths of the sequences.
        """
        if self.window is None:
            return None
        reach = self._reach(np.asarray(rows, np.int64))  # with a wide window int32 would overflow
        return np.maximum(0, np.array(totals, np.int64) - reach) // self.pool.page_size

    def read_tables(self, work: KvWork) -> tuple[Any, Any]:
        """The pages and the lengths that the sequences of a request have in this group, for a launch on its layers.

        With a window, table and lengths begin at the first page that a row of the request sees. So they do not depend
        on which earlier pages have been given back.
        """
        most = self._most_columns(None if work.request is None else work.request.block_mask)
        lengths = np.array(work.totals, np.int32)
        if self.window is None:
            return block_table(work.tables, self.number, most, work.columns), lengths
        rows = work.rows_each
        begins = self.begins(work.totals, rows)
        columns = max(work.columns, self.columns(int(lengths.max(initial=0)), int(rows.max(initial=0))))
        table = block_table(work.tables, self.number, most, columns, begins.tolist())
        return table, (lengths - begins * self.pool.page_size).astype(np.int32)

    def check_window(self, work: KvWork, totals: Sequence[int]) -> None:
        """Raise `InvalidRequest` if keys that q sees are given back, or will be once writes in flight have finished.

        totals: the lengths with the new rows.
        """
        if self.window is None or work.request is None:
            return
        rows, size = work.rows_each, self.pool.page_size
        added = [0] * len(totals) if work.rows is None else work.rows.counts.tolist()
        for index, (table, begin) in enumerate(zip(work.tables, self.begins(totals, rows).tolist(), strict=True)):
            kept = first_page(totals[index] - added[index], size, self.window, self.slack)
            first = max(kept, table.groups[self.number].first)
            if begin < first:
                most = totals[index] - self.window - first * size
                reason = f"must be at most {most} rows of sequence {index}, for earlier keys were given back"
                raise InvalidRequest("q", describe(work.request.q), reason)

    def bounded(self, message: AttendCache) -> AttendCache:
        """The message, limited to the window of these layers. Raises `InvalidRequest` and `Unsupported`."""
        if self.window is None:
            return message
        for name, none in _PLACES:
            given: Any = getattr(message, name)
            if given is not none and not (isinstance(given, int) and given == none):
                shown = describe(given) if hasattr(given, "shape") else show(given)
                reason = "is about places in the whole sequence, and a layer with a window keeps only the last ones"
                raise Unsupported(name, shown, reason, none)
        ends: Any = message.cu_seqlens_q
        on_host = ends is None or isinstance(ends, np.ndarray)
        expect(on_host, "cu_seqlens_q", describe(ends), "must be a NumPy array in a layer with a window")
        left, right = window(message.window_size)
        if (left, right) == (-1, -1):
            left = self.window
        reason = f"must see at most the {self.window} keys to the left that the layer keeps"
        expect(0 <= left <= self.window, "window_size", message.window_size, reason)
        return changed(message, {"window_size": (left, right)})

    def _reach(self, rows: Any) -> Any:
        """How many of a sequence's last rows its last ``rows`` rows see."""
        return rows + self.window

    def _most_columns(self, block_mask: BlockMask | None) -> int:
        """The most columns to which a table is rounded up. 0 for a block mask, which has columns for just the pages."""
        return 0 if block_mask is not None else min(self.pool.num_blocks, MAX_SEQLEN // self.pool.page_size)


@dataclass(eq=False)
class OpenedCache:
    """One cache: its groups of layers, its tables, and its launches in flight.

    cascade: as in `KvCacheSpec`. stepping: the tables of sequences in open steps, and the captures of these steps.
    by_layer: the pools of each layer. group_of: the group of each layer.
    """

    number: int
    groups: Sequence[PoolGroup]
    tables: CacheTables
    generation: int
    cascade: bool | Literal["auto"] = "auto"
    incarnation: bytes = field(default_factory=incarnation)
    # Held from a launch's reservation until the launch counts as in flight: an earlier launch that fails must find it.
    _lock: threading.Lock = field(init=False, default_factory=threading.Lock)
    _in_flight: list[list[KvWork]] = field(init=False, default_factory=list)
    stepping: set[object] = field(init=False, default_factory=set)
    closed: bool = field(init=False, default=False)
    steps: PlanCache[StepPlan] = field(init=False, default_factory=lambda: PlanCache(_KINDS))
    by_layer: list[dict[str, Any]] = field(init=False)
    group_of: list[PoolGroup] = field(init=False)

    def __post_init__(self) -> None:
        places = {
            layer: (group, pools)
            for group in self.groups
            for layer, pools in zip(group.layers, group.by_layer, strict=True)
        }
        self.group_of = [places[layer][0] for layer in range(len(places))]
        self.by_layer = [places[layer][1] for layer in range(len(places))]

    @property
    def layers(self) -> int:
        return len(self.by_layer)

    @property
    def page_size(self) -> int:
        return self.groups[0].pool.page_size

    @property
    def most_rows(self) -> int:
        """The most rows that a sequence can have."""
        rows = [group.pool.num_blocks * self.page_size for group in self.groups if group.window is None]
        return min(rows, default=MAX_SEQLEN)

    def sequence(self, table: PageTable) -> KvSequence:
        """The caller's record of a new sequence."""
        return KvSequence(self.number, table.number, self.generation, table.length)

    def table(self, seq: object, field: str = "seq") -> PageTable:
        """The table of a caller's sequence. field: the name of the sequence in errors.

        Raises `InvalidRequest`, and `StaleBuffer` for a sequence of another process.
        """
        if not isinstance(seq, KvSequence):
            reason = "must be a KvSequence, as create() and fork() give"
            if isinstance(getattr(seq, "handle", None), KvSequence):  # a pool's sequence, but captures are of one cache
                reason = "is a sequence of a pool: give its handle, which is the sequence in this cache"
            raise InvalidRequest(field, seq, reason)
        # Checked before the numbers, because numbers begin anew in every process.
        if seq.incarnation != self.incarnation:
            raise StaleBuffer("the sequence belongs to a cache of another process, or of this one before it was forked")
        expect(seq.cache == self.number, field, seq, "must be a sequence of this cache, and is one of another")
        return self.tables.find(seq.number, field)

    def tables_of(self, seqs: object) -> tuple[bool, list[PageTable]]:
        """Whether ``seqs`` is one sequence and no list, and the tables of its sequences. Raises `InvalidRequest`."""
        if isinstance(seqs, KvSequence):
            return True, [self.table(seqs, "seqs")]
        if not isinstance(seqs, list | tuple):
            raise InvalidRequest("seqs", seqs, "must be a KvSequence or a list of them")
        return False, [self.table(seq, f"seqs[{index}]") for index, seq in enumerate(seqs)]

    # Launches

    def begin(self, group: list[KvWork], begun: list[KvWork]) -> list[tuple[KvWork, GpuActorsError]]:
        """Claim the calls of a group for its launch, and take the pages that they need.

        Work that goes into the launch is put in ``begun``. Returns work that is refused, with the error to answer it.
        """
        refused: list[tuple[KvWork, GpuActorsError]] = []
        with self._lock:
            self._in_flight.append(begun)
            for work in group:
                if work.call.claim():
                    try:
                        self._reserve(work)
                    except GpuActorsError as error:
                        refused.append((work, error))
                    else:
                        begun.append(work)
            if not begun:
                self._in_flight.remove(begun)
        return refused

    def _reserve(self, work: KvWork) -> None:
        tables, rows = work.tables, work.rows
        lengths = [table.length for table in tables]
        if work.expected is not None and lengths != work.expected:
            reason = f"must be the rows that there are before the request, {lengths}: another one came first"
            raise InvalidRequest("expect_length", work.expected, reason)
        if work.group.window is not None:
            added = [0] * len(lengths) if rows is None else rows.counts.tolist()
            work.group.check_window(work, [length + more for length, more in zip(lengths, added, strict=True)])
        if rows is not None:
            counts = rows.counts.tolist()
            if rows.rope is not None:
                rows.check_reach(np.array(lengths, np.int32) + rows.counts)
        if work.plan is not None and work.request is not None and work.plan.problem.bias_keys:
            own = np.array(lengths, np.int32) + (0 if rows is None else rows.counts)
            check_bias(work.plan.problem, dataclasses.replace(work.request, cache_seqlens=own))
        if rows is not None:
            tokens: Sequence[Tokens | None] = rows.tokens or [None] * len(tables)
            growing = [one for one in zip(tables, counts, tokens, strict=True) if one[1]]
            work.writes = self.tables.reserve(*zip(*growing, strict=True)) if growing else []
            lengths = [table.length for table in tables]
        self.tables.enter(tables)
        work.totals = lengths
        work.table, work.lengths = work.group.read_tables(work)
        if work.by_layer:
            work.by_group = [group.read_tables(work) for group in self.groups]

    def read_tables(self, works: Sequence[KvWork], first: KvWork) -> None:
        """Give works on other layers the tables of their groups. All have the rows of ``first``, which has begun."""
        with self._lock:
            read = {first.group.key: (first.table, first.lengths)}
            for work in works:
                work.totals, group = first.totals, work.group
                if group.key not in read:
                    read[group.key] = group.read_tables(work)
                work.table, work.lengths = read[group.key]

    def succeeded(self, group: list[KvWork]) -> None:
        """Commit the writes of a group whose launch has succeeded."""
        with self._lock:
            for work in group:
                self.tables.commit(work.writes)
            self._ended(group)

    def failed(self, group: list[KvWork]) -> list[KvWork]:
        """Undo the writes of a group whose launch has failed or was not made, and of later launches that build on them.

        Returns the work of these later launches.
        """
        with self._lock:
            if group not in self._in_flight:
                return []
            changed = {write.table for work in group for write in work.writes}
            lost: list[KvWork] = []
            for later in self._in_flight[self._in_flight.index(group) + 1 :]:
                for work in later:
                    if not work.lost and not changed.isdisjoint(work.tables):
                        work.lost = True
                        lost.append(work)
                        changed.update(write.table for write in work.writes)
            for work in reversed([*group, *lost]):
                self.tables.undo(work.writes)
                work.writes = []
            self._ended(group)
        return lost

    def _ended(self, group: list[KvWork]) -> None:
        self._in_flight.remove(group)
        for work in group:
            self.tables.leave(work.tables)


class CacheLook(NamedTuple):
    """The state of a cache at one moment."""

    number: int
    page_size: int
    kv_heads: int
    head_dim: int
    dtype: str
    stats: KvCacheStats
    pages: PageMap


class CacheStore(Workbench):
    """The opened caches by number. Only the thread that does the actor's work changes it; other threads may read it."""

    def __init__(self, cell: ActorCell) -> None:
        super().__init__(cell)
        self._cell = cell
        self._caches: dict[int, OpenedCache] = {}
        self._newest = 0
        self.arch: str = self.device.info.arch
        self.order: KvOrder = KvOrder(cell)
        self.cascader: Cascader = Cascader(self.device, self.accumulate)
        self._left: Callable[[], GpuActorsError] | None = None

    def open(self, spec: object, notes: CallerNotes | None) -> int:
        """Open a cache with pools on the device, and return its number. notes: as for `adopt_request`.

        Raises `InvalidRequest`, `Unsupported` and `OutOfDeviceMemory`.
        """
        found = groups_of(spec, self.device.info, notes)
        number = next(_NUMBERS)
        groups = [
            PoolGroup((number, index), layers, pool, *self._allocate(pool, len(layers)), descales, width, slack)
            for index, (pool, descales, layers, width, slack) in enumerate(found)
        ]
        self._newest = number
        sizes = [GroupSize(group.pool.num_blocks, group.window, group.slack) for group in groups]
        tables = CacheTables(sizes, groups[0].pool.page_size)
        generation = self._cell.environment.generation
        self._caches[number] = OpenedCache(number, groups, tables, generation, spec.cascade)  # type: ignore[attr-defined]
        return number

    def _allocate(self, pool: AppendProblem, layers: int) -> tuple[Any, Any]:
        """Allocate the pages of K, and of V unless the cache is latent: then None. Raises `OutOfDeviceMemory`."""
        pages: tuple[int, ...] = (pool.num_blocks, pool.page_size, pool.heads_kv)
        if layers > 1:
            pages = layers, *pages
        if math.prod(pages) * max(pool.sides.values()) > MOST_ELEMENTS:
            raise OutOfDeviceMemory(f"no memory can be addressed that holds {pages} rows of {pool.sides['k']} elements")
        pools = {side: self.device.allocate((*pages, dim), pool.cache_dtype) for side, dim in pool.sides.items()}
        return pools["k"], pools.get("v")

    def forget(self, number: int) -> None:
        """Close a cache. Its memory is freed when no launch in flight uses it."""
        cache = self._caches.pop(number, None)
        if cache is not None:
            cache.closed = True
        self.order.look_again()

    def close(self) -> None:
        """Drop all caches."""
        self._caches.clear()

    def look(self) -> list[CacheLook]:
        """The caches that are open now. Any thread may call it. The actor waits at most while two lists are copied."""
        found = []
        for number, cache in list(self._caches.items()):
            fullest, references, indexed = cache.tables.snapshot()
            pages, pool, stats = page_map(references, indexed), cache.groups[fullest].pool, cache.tables.stats()
            sizes = pool.page_size, pool.heads_kv, pool.sides["k"]
            found.append(CacheLook(number, *sizes, pool.cache_dtype, stats, pages))
        return found

    def after_fork(self, reason: Callable[[], GpuActorsError]) -> None:
        """Refuse to look at a cache in a child process, where a thread that is missing may hold its lock."""
        self._left = reason

    def find(self, number: object) -> OpenedCache:
        """The cache with this number. Raises `StaleBuffer` for a closed cache, `InvalidRequest` for anything else."""
        if self._left is not None:
            raise self._left()
        cache = self._caches.get(number) if isinstance(number, int) else None
        if cache is not None:
            return cache
        if isinstance(number, int) and 0 < number <= self._newest:
            raise StaleBuffer(f"cache {number} was closed, and its pages are given back")
        raise InvalidRequest("cache", number, "is no cache of this context")


def expected_lengths(message: AppendRows | AttendCache) -> list[int] | None:
    """The lengths that the sequences must have before a request. Raises `InvalidRequest`."""
    given: Any = message.expect_length
    if given is None:
        return None
    if isinstance(message.seqs, KvSequence):
        return [integer("expect_length", given, 0)]
    count = len(message.seqs)
    reason = f"must be a list of {count} lengths, one a sequence"
    expect(isinstance(given, list | tuple) and len(given) == count, "expect_length", given, reason)
    return [integer(f"expect_length[{index}]", length, 0) for index, length in enumerate(given)]


def check_once(tables: Sequence[PageTable]) -> None:
    """Raise `InvalidRequest` if a sequence that gets rows is named twice."""
    numbers = [table.number for table in tables]
    expect(len(set(numbers)) == len(numbers), "seqs", numbers, "must name each sequence once where rows are appended")
