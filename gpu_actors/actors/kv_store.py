"""CacheStore: the opened caches of a context. It outlives the incarnations of the KvCacheActor."""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from gpu_actors.actors.kv_order import Gate
from gpu_actors.arrays.adopt import Adopted, CallerNotes
from gpu_actors.arrays.adoption import adopt_request
from gpu_actors.devices.interface import Kernel
from gpu_actors.errors import GpuActorsError, InvalidRequest, OutOfDeviceMemory, StaleBuffer
from gpu_actors.kernels.append.variant import AppendProblem, append_key
from gpu_actors.kv.prefix import Tokens
from gpu_actors.kv.requests import KvCacheSpec, KvSequence
from gpu_actors.kv.sequences import CacheTables, PageTable, Sight, Write
from gpu_actors.options import MockOptions
from gpu_actors.planning.append_rows import NewRows, Pool
from gpu_actors.planning.cached import Decoding
from gpu_actors.planning.kernel_store import KernelStore
from gpu_actors.planning.plan import Plan
from gpu_actors.process import incarnation
from gpu_actors.requests import PagedForward
from gpu_actors.runtime.call import Call
from gpu_actors.validation.fields import FP8, describe, dtype_of, expect, integer, optional_array
from gpu_actors.validation.paged import check_page_size

if TYPE_CHECKING:
    from gpu_actors.runtime.cell import ActorCell

__all__ = ["CacheItem", "CacheStore", "OpenedCache"]

# Of the caches of all contexts of the process: a sequence of one must not be taken for one of another.
_NUMBERS = itertools.count(1)

_MOST_ELEMENTS = 1 << 58  # of a pool: their bytes, and the addresses in it, fit into 64 bits with room to spare


@dataclass(slots=True, eq=False)
class CacheItem:
    """A request on a cache that waits for its launch.

    order: counts such requests. sights: of the tables when it was reserved. request, plan: of its attention, None where
    it only appends. rows: new ones, or None. like, result: as for `attention_output`. single: the sequence was not in a
    list. kernels: those of its attention, then of appending and of copying pages.
    """

    call: Call[Any]
    cache: OpenedCache
    tables: list[PageTable]
    request: PagedForward | None = None
    plan: Plan | None = None
    rows: NewRows | None = None
    writes: list[Write] = field(default_factory=list)
    like: Adopted | None = None
    result: Any = None
    single: bool = False
    kernels: tuple[Kernel, ...] = ()
    lengths: Any = None
    table: Any = None
    sights: list[Sight] = field(default_factory=list)
    order: int = field(default_factory=itertools.count().__next__)

    @property
    def stale(self) -> bool:
        """Rows that it would have seen were never written."""
        return any(table.stale(sight) for table, sight in zip(self.tables, self.sights, strict=True))


class OpenedCache:
    """One cache: its pool on the device, its tables, and the gate that keeps its calls in order.

    descales: "k_descale" and "v_descale", fp32 (kv_heads,), where the pool has some.
    """

    def __init__(
        self, number: int, pool: Pool, arrays: tuple[Any, Any], descales: Mapping[str, Any], cell: ActorCell
    ) -> None:
        self.number = number
        self.pool = pool
        self.k_pool, self.v_pool = arrays
        self.descales = descales
        self.tables = CacheTables(pool.num_blocks, pool.page_size)
        self.gate = Gate(cell)
        self.generation = cell.environment.generation
        # Held while what is in flight changes: what comes again must be known before anyone sees the tables without it.
        self.lock = threading.RLock()
        self.disturbed = 0
        self._reserved: set[CacheItem] = set()
        self._in_flight: list[list[CacheItem]] = []
        self._before: dict[Call[Any], CacheItem] = {}

    def sequence(self, table: PageTable) -> KvSequence:
        """What a caller knows a new sequence by."""
        return KvSequence(self.number, table.number, self.generation, table.length)

    def table(self, seq: object, field: str = "seq") -> PageTable:
        """The table of a caller's sequence. Raises `InvalidRequest`, which calls the sequence ``field``, and
        `StaleBuffer` for one of another process."""
        if not isinstance(seq, KvSequence):
            raise InvalidRequest(field, seq, "must be a KvSequence, as create() and fork() give")
        # Before its numbers are looked at: they begin anew in every process.
        if seq.incarnation != incarnation():
            raise StaleBuffer("the sequence belongs to a cache of another process, or of this one before it was forked")
        expect(seq.cache == self.number, field, seq, "must be a sequence of this cache, and is one of another")
        return self.tables.find(seq.number, field)

    def tables_of(self, seqs: object) -> tuple[bool, list[PageTable]]:
        """The tables of one sequence or of a list of them, and whether it was one. Raises `InvalidRequest`."""
        if isinstance(seqs, KvSequence):
            return True, [self.table(seqs, "seqs")]
        if not isinstance(seqs, list | tuple):
            raise InvalidRequest("seqs", seqs, "must be a KvSequence or a list of them")
        return False, [self.table(seq, f"seqs[{index}]") for index, seq in enumerate(seqs)]

    def request(self, q: Any, lengths: Any, options: Mapping[str, Any]) -> PagedForward:
        """The attention of q to sequences of these lengths. Its block table has the right shape, and no pages yet."""
        batch, size = len(lengths), self.pool.page_size
        table = np.zeros((batch, max(1, -(-int(lengths.max(initial=0)) // size))), np.int32)
        descales: dict[str, Any] = {
            name: np.ascontiguousarray(np.broadcast_to(factors, (batch, self.pool.kv_heads)))
            for name, factors in self.descales.items()
        }
        return PagedForward(
            q=q,
            k_cache=self.k_pool,
            v_cache=self.v_pool,
            block_table=table,
            cache_seqlens=lengths,
            **descales,
            **options,
        )

    def lengths(self, call: Call[Any], tables: list[PageTable]) -> Any:
        """The rows that a call is to see, int32: as many as there are, or as it saw when it was launched before."""
        return np.array([sight.length for sight in self._sights(call, tables)], np.int32)

    def reserve(self, item: CacheItem) -> None:
        """Take the pages that a request needs, and remember what it sees. Raises `CacheFull`."""
        tables = item.tables
        sights = self._sights(item.call, tables)
        if item.rows is not None:
            counts = item.rows.counts.tolist()
            tokens: Sequence[Tokens | None] = item.rows.tokens or [None] * len(tables)
            growing = [one for one in zip(tables, counts, tokens, strict=True) if one[1]]
            if growing:
                item.writes = self.tables.reserve(*zip(*growing, strict=True))
            sights = [table.sight if count else seen for table, count, seen in zip(tables, counts, sights, strict=True)]
        self.tables.enter(tables)
        item.sights = sights
        item.lengths = np.array([sight.length for sight in sights], np.int32)
        self._reserved.add(item)

    def _sights(self, call: Call[Any], tables: list[PageTable]) -> list[Sight]:
        """What a call may see of each sequence. One that comes again keeps to what it saw of those that it only reads:
        others, which were made after it, may have appended to them since."""
        before = self._before.get(call)
        if before is None:
            return [table.sight for table in tables]
        written = {write.table.number for write in before.writes}
        return [
            table.sight if table.number in written or table.stale(seen) else seen
            for table, seen in zip(tables, before.sights, strict=True)
        ]

    # What is in flight

    def launching(self, group: list[CacheItem]) -> bool:
        """Note that these items are launched together. False where one of them is stale already."""
        with self.lock:
            if any(item.stale for item in group):
                return False
            self._reserved.difference_update(group)
            self._in_flight.append(group)
            return True

    def succeeded(self, group: list[CacheItem]) -> set[Call[Any]]:
        """The launch is over; gives the calls that have to come again because what they saw was undone."""
        with self.lock:
            again: list[CacheItem] = []
            for item in group:
                # What one of these wrote is undone in turn, which the next one may have seen.
                if item.stale:
                    self._undo(group, item, True)
                    again.append(item)
                else:
                    self._before.pop(item.call, None)
                    self.tables.commit(item.writes)
            self._ended(group)
        self.gate.settle(item.call for item in group)
        return {item.call for item in again}

    def failed(self, group: list[CacheItem], again: Collection[Call[Any]]) -> Collection[Call[Any]]:
        """The launch has failed. again: of its calls, those that are to come again.

        Gives those that do: none of a launch that had succeeded before something else failed, for its rows are there.
        """
        with self.lock:
            if group not in self._in_flight:
                return ()
            for item in reversed(group):
                self._undo(group, item, item.call in again)
            self._ended(group)
        self.gate.settle(item.call for item in group)
        return again

    def _undo(self, group: list[CacheItem], item: CacheItem, again: bool) -> None:
        """What an item of a group in flight has written, if anything, was never written. again: it comes again."""
        changed = {write.table.number for write in item.writes}
        behind = self._in_flight[self._in_flight.index(group) + 1 :]
        self.gate.expect(
            follower.call
            for later in behind
            for follower in later
            if changed & {table.number for table in follower.tables}
        )
        if again:
            self.gate.returned((item.call,))
            self._before = {call: before for call, before in self._before.items() if not call.done}
            self._before[item.call] = item
        else:
            self._before.pop(item.call, None)
        self.disturbed += 1
        self.tables.undo(item.writes)

    def withdraw(self, items: Iterable[CacheItem]) -> None:
        """These are not launched. Everything that was reserved after them must be among them."""
        for item in sorted(items, key=lambda item: item.order, reverse=True):
            self._reserved.discard(item)
            self.tables.withdraw(item.writes)
            self.tables.leave(item.tables)

    def withdraw_all(self) -> None:
        """An incarnation has died: what it had reserved is not going to be launched."""
        self.withdraw(list(self._reserved))

    def _ended(self, group: list[CacheItem]) -> None:
        self._in_flight.remove(group)
        for item in group:
            self.tables.leave(item.tables)


class CacheStore:
    """Opened caches by number. Used by the actor's thread; looked at by others."""

    def __init__(self, cell: ActorCell) -> None:
        environment = cell.environment
        info = environment.device.info
        self._cell = cell
        self._caches: dict[int, OpenedCache] = {}
        self._newest = 0
        self.arch = info.arch
        self.runs_kernels = info.runs_kernels
        self.kernels = KernelStore(cell) if environment.compiles else None
        self.place = info.device_name
        accumulate = (environment.options.mock or MockOptions()).dtype
        self.decoding = Decoding(environment.device, self.place, accumulate)
        self._left: Callable[[], GpuActorsError] | None = None

    def open(self, spec: object, notes: CallerNotes | None) -> int:
        """Make a pool on the device. notes: as for `adopt_request`.

        Raises `InvalidRequest`, `Unsupported` and `OutOfDeviceMemory`.
        """
        pool, descales = _checked(spec, self.arch, self.place, notes)
        allocate = self._cell.environment.device.allocate
        pages = (pool.num_blocks, pool.page_size, pool.kv_heads)
        if math.prod(pages) * max(pool.head_dim, pool.head_dim_v) > _MOST_ELEMENTS:
            raise OutOfDeviceMemory(f"no memory can be addressed that holds {pages} rows of {pool.head_dim} elements")
        arrays = tuple(allocate((*pages, dim), pool.dtype) for dim in (pool.head_dim, pool.head_dim_v))
        number = self._newest = next(_NUMBERS)
        self._caches[number] = OpenedCache(number, pool, (arrays[0], arrays[1]), descales, self._cell)
        return number

    def forget(self, number: int) -> None:
        """Give up a cache. Its memory goes once nothing in flight uses it any more."""
        self._caches.pop(number, None)

    def close(self) -> None:
        """Give up every cache."""
        self._caches.clear()

    def after_fork(self, reason: Callable[[], GpuActorsError]) -> None:
        """In a child process: there is nothing to look at, and its lock may be held by a thread that is not there."""
        self._left = reason

    def find(self, number: object) -> OpenedCache:
        """The cache of that number. Raises `StaleBuffer` for one that was closed, `InvalidRequest` for what is none."""
        if self._left is not None:
            raise self._left()
        cache = self._caches.get(number) if isinstance(number, int) else None
        if cache is not None:
            return cache
        if isinstance(number, int) and 0 < number <= self._newest:
            raise StaleBuffer(f"cache {number} was closed, and its pages are given back")
        raise InvalidRequest("cache", number, "is no cache of this context")

    def withdraw_all(self) -> None:
        """An incarnation has died: what it had reserved is not going to be launched."""
        for cache in self._caches.values():
            cache.withdraw_all()


def _checked(spec: object, arch: str, place: str, notes: CallerNotes | None) -> tuple[Pool, dict[str, Any]]:
    """The pool and the descales that a spec asks for. Raises `InvalidRequest` and `Unsupported`."""
    if not isinstance(spec, KvCacheSpec):
        raise InvalidRequest("spec", spec, "must be a KvCacheSpec")
    spec = adopt_request(spec, place, notes)[0]
    blocks = integer("num_blocks", spec.num_blocks, 1, (1 << 31) - 1)
    page_size = integer("page_size", spec.page_size, 1)
    check_page_size(page_size)
    heads = integer("kv_heads", spec.kv_heads, 1)
    dim = integer("head_dim", spec.head_dim, 1)
    dim_v = dim if spec.head_dim_v is None else integer("head_dim_v", spec.head_dim_v, 1)
    dtype = _dtype_name(spec.dtype)
    descales: dict[str, Any] = {}
    for name in ("k_descale", "v_descale"):
        factors = getattr(spec, name)
        if factors is None:
            continue
        expect(dtype in FP8, name, describe(factors), f"goes with an fp8 pool only, and dtype is {dtype}")
        optional_array(name, factors, ((heads,),), ("float32",))
        sound = isinstance(factors, np.ndarray) and bool((np.isfinite(factors) & (factors > 0)).all())
        expect(sound, name, describe(factors), "must be positive numbers, on the host")
        descales[name] = factors.copy()
    pool = Pool(blocks, page_size, heads, dim, dim_v, dtype, bool(descales))
    append_key(
        AppendProblem(
            layout="paged", batch=1, total=1, rows=1, heads_kv=heads, head_dim=dim, head_dim_v=dim_v, dtype=dtype,
            cache_dtype=dtype, page_size=page_size, num_blocks=blocks, max_blocks=1,
        ),
        arch,
    )  # fmt: skip
    return pool, descales


def _dtype_name(dtype: Any) -> str:
    """By its name, or as NumPy, ml_dtypes or torch have it."""
    name = str(dtype).removeprefix("torch.")
    try:
        name = np.dtype(dtype).name
    except Exception:  # whatever a foreign object makes of it: as text it is refused, or known, below
        pass
    return dtype_of("dtype", _Named(name))


class _Named:
    def __init__(self, dtype: str) -> None:
        self.dtype = dtype
