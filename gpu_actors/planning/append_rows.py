"""NewRows: the rows that a request appends to a KvCache, checked, packed, and merged with those of other requests."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gpu_actors.arrays.device_array import DeviceArray
from gpu_actors.errors import InvalidRequest
from gpu_actors.fields import describe, dtype_name, dtype_of, expect, optional_array, shape_of
from gpu_actors.kernels.append import AppendProblem, Rope
from gpu_actors.kernels.support import MAX_SEQLEN
from gpu_actors.kv.prefix import Tokens, token_ids
from gpu_actors.kv.requests import AppendRows, AttendCache
from gpu_actors.planning.merging import ends_of, join, joining_kind, memory_of
from gpu_actors.validation.forward import steps_of

__all__ = ["NEW_ROWS", "NewRows", "counts_of", "merge_rows", "new_rows", "pack_rows", "place_rows", "turn_apart"]

_AXES = "batch, rows, kv_heads, head_dim"
_WHOLE, _LATENT = ("k", "v"), ("k_pe", "c_kv")

NEW_ROWS = (*_WHOLE, *_LATENT)
"""The fields of a message that hold new rows. Which two it uses depends on the kind of the cache."""


@dataclass(slots=True, eq=False)
class NewRows:
    """Rows of several sequences, packed: k (total, kv_heads, head_dim), v (total, kv_heads, head_dim_v).

    For a latent cache k is k_pe and v is c_kv, as in `AppendProblem`. layers: if there are several, k and v begin with
    an axis of layers.
    counts: rows of each sequence, int32 (batch,). rows: the rows of a sequence if all have the same number, else 0.
    tokens: those of each sequence, or None if they are not known.
    turned: the number of q's rows in each sequence, if q is rotated separately because it has other rows or other
    positions; turned_rows and turned_positions are to q what rows and positions are to k.
    """

    k: Any
    v: Any
    counts: Any
    rows: int
    rope: Rope | None = None
    positions: Any = None
    rope_cos: Any = None
    rope_sin: Any = None
    tokens: list[Tokens] | None = None
    turned: Any = None
    turned_rows: int = 0
    turned_positions: Any = None
    layers: int = 1

    @property
    def total(self) -> int:
        return int(self.k.shape[self.layers > 1])

    @property
    def ends(self) -> Any:
        """The bounds of the sequences, int32 (batch + 1,), like cu_seqlens."""
        return ends_of(self.counts)

    @property
    def merge_key(self) -> Hashable | None:
        """Rows with equal keys may go into one launch. None: they cannot be joined with others."""
        kinds = [joining_kind(array) for array in (self.k, self.v, self.positions, self.turned_positions)]
        if "apart" in kinds or self.layers > 1:
            return None
        tables = (memory_of(self.rope_cos), memory_of(self.rope_sin))
        apart = self.turned is not None, self.turned_rows
        return self.k.dtype, self.rows, self.rope, tables, apart, *kinds

    def check_reach(self, lengths: Any) -> None:
        """Raise `InvalidRequest` if a row lies beyond its rotation's tables. lengths: of sequences with these rows."""
        rope = self.rope
        if rope is None or not rope.table_rows:
            return
        rotated = [("positions", self.counts, self.positions), ("positions_q", self.turned, self.turned_positions)]
        for field, counts, positions in rotated:
            if counts is None or not counts.any():
                continue
            if positions is None:
                longest = int(lengths[counts > 0].max())
                reason = f"must reach to the last row of each sequence, which makes {longest} rows"
                expect(longest <= rope.table_rows, "rope.table_rows", rope.table_rows, reason)
                first = int((lengths - counts)[counts > 0].min())
                expect(first >= 0, field, first, "must be given where q has more rows than there are keys")
            elif isinstance(positions, np.ndarray):
                for position in (int(positions.min()), int(positions.max())):
                    reason = f"must lie in the rope's tables: 0 to {rope.table_rows - 1}"
                    expect(0 <= position < rope.table_rows, field, position, reason)

    def angles(self, lengths: Any, of_q: bool = False) -> tuple[Any, Any]:
        """The cosines and sines that rotate the rows, (total, pairs) each. lengths: of sequences with these rows."""
        # Only a mock device and keys over several workers compute here, so only their programs pay for the import.
        from gpu_actors.reference.rope import rope_angles

        counts, positions = (self.turned, self.turned_positions) if of_q else (self.counts, self.positions)
        rope = self.rope
        assert rope is not None
        if positions is None:
            starts = lengths - counts
            ranges = [np.arange(start, start + count) for start, count in zip(starts, counts, strict=True)]
            positions = np.concatenate(ranges)
        if rope.table_rows:
            return self.rope_cos[positions], self.rope_sin[positions]
        radians = rope_angles(positions, np.array(rope.frequencies))
        return np.cos(radians), np.sin(radians)

    def problem(self, pool: AppendProblem, max_blocks: int = 1, heads_q: int = 0) -> AppendProblem:
        """The append of these rows. pool: as in `PoolGroup`."""
        dtype = dtype_name(self.k)
        return _problem_of(
            pool,
            batch=len(self.counts),
            total=self.total,
            rows=self.rows,
            dtype=dtype,
            max_blocks=max_blocks,
            rope=self.rope,
            positions=self.positions is not None,
            heads_q=heads_q if self.rope is not None and self.turned is None else 0,
            descales=pool.descales and dtype != pool.cache_dtype,
        )

    def turning(self, pool: AppendProblem, max_blocks: int, heads_q: int) -> AppendProblem:
        """The separate rotation of q: an append without new rows."""
        return _problem_of(
            pool,
            batch=len(self.turned),
            total=int(self.turned.sum()),
            rows=self.turned_rows,
            heads_kv=0,
            dtype=dtype_name(self.k),
            max_blocks=max_blocks,
            rope=self.rope,
            positions=self.turned_positions is not None,
            heads_q=heads_q,
            descales=False,
        )

    def problems(self, pool: AppendProblem, heads_q: int, max_blocks: int = 1) -> list[AppendProblem]:
        """The appends of a launch: of these rows, and of q if it is rotated separately."""
        own = [self.problem(pool, max_blocks, heads_q)]
        return own if self.turned is None else [*own, self.turning(pool, max_blocks, heads_q)]


@functools.lru_cache(maxsize=1024)
def _problem_of(pool: AppendProblem, **changes: Any) -> AppendProblem:
    # A cache asks for the same few again and again, three times per request.
    return dataclasses.replace(pool, **changes)


def counts_of(field: str, ends: Any, batch: int) -> Any:
    """The rows of each sequence, int32 (batch,), from cu_seqlens."""
    optional_array(field, ends, ((batch + 1,),), ("int32",))
    on_host = isinstance(ends, np.ndarray)
    expect(on_host, field, describe(ends), "must be a NumPy array: pages are taken on the host")
    counts = np.diff(ends.astype(np.int64))
    expect(int(ends[0]) == 0, field, int(ends[0]), "must begin with 0")
    least = int(counts.min(initial=0))
    expect(least >= 0, field, least, "must not fall: a sequence cannot have a negative length")
    return counts.astype(np.int32)


def new_rows(message: AppendRows | AttendCache, pool: AppendProblem, batch: int | None, layers: int = 1) -> NewRows:
    """Return the rows of an adopted message. batch: the sequences that it lists; None for a single one without a list.

    layers: those of the cache. If there are several, each array begins with an axis of layers.
    """
    names, others = (_LATENT, _WHOLE) if pool.latent else (_WHOLE, _LATENT)
    for name in others:
        given: Any = getattr(message, name)
        if given is not None:
            kind = "whose keys and values lie apart" if pool.latent else "of latents (latent_dim)"
            raise InvalidRequest(
                name, describe(given), f"goes with a cache {kind}: this one takes {' and '.join(names)}"
            )
    k: Any
    v: Any
    k, v = (getattr(message, name) for name in names)
    if isinstance(message, AppendRows):
        ends_field = "cu_seqlens"
    elif message.cu_seqlens_k_new is not None:
        ends_field = "cu_seqlens_k_new"
    else:
        ends_field = "cu_seqlens_q"
    ends = getattr(message, ends_field)
    if ends_field == "cu_seqlens_q" and len(getattr(k, "shape", ())) == 4:
        ends = None  # each sequence has equally many new rows; cu_seqlens_q is about q alone
    if k is None or v is None:
        raise InvalidRequest(names[k is not None], None, f"must be given: rows have {' and '.join(names)}")
    whole = k, v
    if layers > 1:
        for name, array in zip(names, whole, strict=True):
            of_layers = getattr(array, "shape", ())[:1] == (layers,)
            expect(of_layers, name, describe(array), f"must have an axis of the {layers} layers first")
        k, v = k[0], v[0]
    leading: tuple[int, ...]
    alone, given = batch is None, (k, v)
    if batch is None:
        expect(ends is None, ends_field, describe(ends), "goes with a list of sequences only")
        shape_of(names[0], k, "rows, kv_heads, head_dim")
        shape_of(names[1], v, "rows, kv_heads, head_dim_v")
        k, v, batch = k[None], v[None], 1
    if ends is None:
        leading = shape_of(names[0], k, _AXES)[:2]
        if leading[0] != batch:
            raise InvalidRequest(names[0], describe(k), f"must have the rows of {batch} sequences")
        reason = f"must have at most {MAX_SEQLEN} rows of a sequence"
        expect(leading[1] <= MAX_SEQLEN, names[0], describe(given[0]), reason)
        counts = np.full(batch, leading[1], np.int32)
    else:
        counts = counts_of(ends_field, ends, batch)
        leading = (int(ends[-1]),)
    for name, array, dim in zip(names, given, (pool.head_dim, pool.head_dim_v), strict=True):
        wanted = (*(leading[1:] if alone else leading), pool.heads_kv, dim)
        optional_array(name, array, (wanted,), (dtype_of(names[0], k),))
    if layers > 1:
        k, v = (array[:, None] for array in whole) if alone else whole
    if ends is None:
        k, v = pack_rows(names[0], k, int(layers > 1)), pack_rows(names[1], v, int(layers > 1))
    rows = 0 if ends is not None else leading[1]
    made = NewRows(k, v, counts, rows, message.rope, layers=layers)
    if message.tokens is not None:
        ids = token_ids(message.tokens, leading[1:] if alone else leading)
        made.tokens = np.split(ids, np.cumsum(counts)[:-1])
    _add_rotation(made, message)
    return made


def _add_rotation(rows: NewRows, message: AppendRows | AttendCache) -> None:
    rope = rows.rope
    names = ("positions", "rope_cos", "rope_sin")
    given = {name: getattr(message, name) for name in names}
    if rope is None:
        for name, array in given.items():
            if array is not None:
                raise InvalidRequest(name, describe(array), "goes with a rope only")
        return
    expect(isinstance(rope, Rope), "rope", rope, "must be a Rope, or None")
    total = rows.total
    optional_array("positions", given["positions"], ((total,),), ("int32",))
    for name in ("rope_cos", "rope_sin"):
        array = given[name]
        if not rope.table_rows:
            expect(array is None, name, None if array is None else describe(array), "goes with rope.table_rows only")
            continue
        wanted = (rope.table_rows, rope.dim // 2)
        expect(array is not None, name, None, f"must be a float32 array of shape {wanted}: the rope takes tables")
        optional_array(name, array, (wanted,), ("float32",))
    rows.positions, rows.rope_cos, rows.rope_sin = (given[name] for name in names)


def place_rows(rows: NewRows, message: AttendCache) -> None:
    """Let a rope rotate rows by q_positions if the message gives no other positions."""
    places: Any = message.q_positions
    if rows.rope is None or rows.positions is not None or (places is None and message.k_positions is None):
        return
    if rows.turned is not None:
        reason = "must be given where a rope rotates rows that have positions, and q has other rows"
        raise InvalidRequest("positions", None, reason)
    rows.positions = _placed(places, rows.counts)


def turn_apart(rows: NewRows, message: AttendCache, q: Any) -> None:
    """Let a rope rotate q, an adopted array, separately from the new rows if it has other rows or other positions."""
    given: Any = message.positions_q
    if rows.rope is None:
        if given is not None:
            raise InvalidRequest("positions_q", describe(given), "goes with a rope only")
        return
    if message.cu_seqlens_q is None:
        counts = np.full(len(rows.counts), q.shape[1], np.int32)
    elif message.cu_seqlens_k_new is None and not rows.rows:
        counts = rows.counts
    else:
        counts = counts_of("cu_seqlens_q", message.cu_seqlens_q, len(rows.counts))
    if given is None and np.array_equal(counts, rows.counts):
        return
    optional_array("positions_q", given, ((int(counts.sum()),),), ("int32",))
    rows.turned, rows.turned_positions = counts, given
    rows.turned_rows = q.shape[1] if message.cu_seqlens_q is None else 0
    if given is None and message.q_positions is not None:
        rows.turned_positions = _placed(message.q_positions, counts)


def _placed(places: Any, counts: Any) -> Any:
    """The positions of packed rows, int32 (total,), from those of their sequences."""
    reason = "must be a NumPy array where a rope rotates rows that have positions, or give their positions"
    expect(isinstance(places, np.ndarray), "q_positions", None if places is None else describe(places), reason)
    first, step = steps_of(places)
    index = np.arange(int(counts.sum())) - np.repeat(ends_of(counts)[:-1], counts)
    return (np.repeat(first, counts) + index * np.repeat(step, counts)).astype(np.int32)


def pack_rows(field: str, array: Any, axis: int = 0) -> Any:
    """Reshape (batch, rows, ...) to (batch * rows, ...), without a copy on a device. axis: the batch's."""
    if not isinstance(array, DeviceArray):
        before, (batch, rows), behind = array.shape[:axis], array.shape[axis : axis + 2], array.shape[axis + 2 :]
        return array.reshape(*before, batch * rows, *behind)
    try:
        return array.packed(axis)
    except ValueError:
        reason = "must have the sequences' rows one after the other"
        raise InvalidRequest(field, f"strides {array.strides}", reason) from None


def merge_rows(parts: Sequence[NewRows]) -> NewRows:
    """The rows of several requests with equal `NewRows.merge_key`s, in their order."""
    if len(parts) == 1:
        return parts[0]
    names = ["k", "v", "counts"]
    names += [name for name in ("positions", "turned", "turned_positions") if getattr(parts[0], name) is not None]
    changes: dict[str, Any] = {name: join([getattr(part, name) for part in parts]) for name in names}
    return dataclasses.replace(parts[0], **changes)
