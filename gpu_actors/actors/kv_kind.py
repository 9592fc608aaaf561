"""Kinds of requests on a cache. Requests of one kind differ only in their arrays, sequences and pages.

A model sends a cache requests of the same kind for every layer and every token. The first request of a kind is checked
and planned in full (`pose`). Later requests with the same key are bound to its plan.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeAlias

import numpy as np

from gpu_actors.actors.kv_launch import add_rows, append_launch, rows_oracle
from gpu_actors.actors.kv_store import CacheStore, KvWork, OpenedCache, PoolGroup, RequestKind
from gpu_actors.arrays.request_arrays import changed
from gpu_actors.attention.requests import PagedForward, array_fields, scalars_of
from gpu_actors.compiling.variant import Variant
from gpu_actors.devices.interface import Launch, Steps
from gpu_actors.errors import InvalidRequest, Unsupported
from gpu_actors.fields import describe, expect
from gpu_actors.kernels.append import append_variant
from gpu_actors.kernels.copy_pages import page_copy_variant
from gpu_actors.kv.requests import AppendRows, AttendCache, KvSequence
from gpu_actors.kv.sequences import PageTable
from gpu_actors.planning.append_rows import NEW_ROWS, NewRows, new_rows, pack_rows, place_rows, turn_apart
from gpu_actors.planning.cached import bind_cached, check_operands
from gpu_actors.planning.merging import merge_key
from gpu_actors.planning.tma_eligibility import alignments
from gpu_actors.validation.overlap import check_output_memory

__all__ = ["kind_launch", "kind_of", "pose_layers"]

Bound: TypeAlias = tuple[PagedForward | None, NewRows | None]
"""The attention of one request, and its new rows."""

# The options of attention that `PagedForward` has too.
_OPTIONS = tuple(
    field.name
    for field in dataclasses.fields(AttendCache)
    if field.name != "q" and field.name in PagedForward.__dataclass_fields__
)
_ROWS = ("k", "v", "c_kv", "k_pe")
# Fields that belong to one request, not to its kind. cache, seqs and layer are looked up for each request, and
# expect_length is checked at the launch.
_OWN = ("cache", "seqs", "expect_length", "layer")


class _Fields:
    """The fields of a message type, by what they mean for a kind.

    arrays: the arrays that requests of a kind may have. others: fields that a request with a key must leave None.
    scalars: the names of the fields that are a part of the key.
    """

    def __init__(self, kind: type, arrays: tuple[str, ...]) -> None:
        others = (*(name for name in array_fields(kind) if name not in arrays), "tokens", "block_mask")
        scalars = (name for name in scalars_of(kind) if name not in (*_OWN, *others))
        known = {each.name for each in dataclasses.fields(kind)}
        self.arrays: Callable[[Any], tuple[Any, ...]] = operator.attrgetter(*arrays)
        self.others: Callable[[Any], tuple[Any, ...]] = operator.attrgetter(*(name for name in others if name in known))
        self.scalars: tuple[str, ...] = tuple(scalars)


_APPEND = _Fields(AppendRows, _ROWS)
_ATTEND = _Fields(AttendCache, (*_ROWS, "q", "out"))


def kind_key(
    group: PoolGroup, message: AppendRows | AttendCache, tables: Sequence[PageTable], most: int
) -> Hashable | None:
    """The key of an adopted request's kind. None for a request with further arrays, tokens or a block mask."""
    fields = _ATTEND if isinstance(message, AttendCache) else _APPEND
    for other in fields.others(message):
        if other is not None:
            return None
    arrays = fields.arrays(message)
    scalars = [getattr(message, name) for name in fields.scalars]
    rows: Any = message.k if message.c_kv is None else message.c_kv
    longest = max([table.length for table in tables], default=0)
    new = rows.shape[1] if rows is not None and len(rows.shape) == 4 else 0
    longest += new
    described = [None if array is None else _described(array) for array in arrays]
    # As in `planning.cached.signature`: equal values may be of different types.
    kinds = [*map(type, scalars)]
    if isinstance(message, AttendCache):
        # The window is not checked yet, so it may be of any length.
        kinds += type(message.window_size[0]), type(message.window_size[1])
    last = max(new, message.q.shape[1]) if isinstance(message, AttendCache) else new
    where = isinstance(message.seqs, list | tuple), len(tables), group.columns(max(longest, most), last)
    of_q_and_out = alignments(*arrays[len(_ROWS) :])
    return type(message), *scalars, *kinds, where, of_q_and_out, *described


def _described(array: Any) -> Hashable:
    # A launch joins arrays on a device only if one stream orders them.
    return type(array), array.shape, array.strides, array.dtype, getattr(array, "stream", None)


def bind(group: PoolGroup, kind: RequestKind, message: AppendRows | AttendCache) -> Bound:
    """The attention of a request of a kind, and its new rows. Raises `InvalidRequest` if ``out`` overlaps an input."""
    request, rows = kind.request, kind.rows
    if request is not None and isinstance(message, AttendCache):
        request = changed(request, {"q": message.q, "out": message.out})
        if message.out is not None:
            check_output_memory(message.out, {"q": message.q, **group.pools})  # of all layers
    if rows is not None:
        k: Any
        v: Any
        k, v = (message.k_pe, message.c_kv) if group.pool.latent else (message.k, message.v)
        axis = int(len(group.layers) > 1 and isinstance(message, AppendRows))
        if not isinstance(message.seqs, list | tuple) and isinstance(message, AppendRows):
            k, v = (k[:, None], v[:, None]) if axis else (k[None], v[None])
        rows = changed(rows, {"k": pack_rows("k", k, axis), "v": pack_rows("v", v, axis)})
    return request, rows


def kind_launch(kind: RequestKind, work: KvWork) -> Launch:
    """The launch of one request of a kind. The request must copy no page and make no cascade.

    The state that launches of the kind share is remembered with the kernels, without any array, and is freed with them.
    """
    place = kind.number, work.table.shape
    known: Launch | None = work.loaded.memo.get(place) if work.loaded else kind.launches.get(place)
    if known is None:
        return _first_launch(kind, work)
    group, request, rows, plan = work.group, work.request, work.rows, kind.plan
    pools = group.pools if request is None else work.cache.by_layer[work.layer]
    own = {**pools, **group.descales_of(len(work.tables))}
    own |= {"block_table": work.table, "cache_seqlens": work.lengths}
    outputs = known.outputs
    ends = None if request is None else request.cu_seqlens_q  # of a step of packed rows
    if request is not None:
        own["q"], own["cu_seqlens_q"] = request.q, ends
        if request.out is not None:
            outputs = {**outputs, "out": outputs["out"]._replace(into=request.out)}
    if rows is not None:
        own["k"], own["v"], own["cu_seqlens_new"] = rows.k, rows.v, rows.ends
    if plan is not None and plan.program is not None and plan.program.split is not None and work.kernels:
        own |= plan.program.split(own)
    if group.pool.latent and "k_descale" in own:
        own["v_descale"] = own["k_descale"]  # values are columns of keys
    inputs = {name: own[name] for name in known.inputs}
    return Launch(known.key, inputs, outputs, known.oracle, known.steps, known.scratch, known.updates)


def _first_launch(kind: RequestKind, work: KvWork) -> Launch:
    """The first launch of a kind. All of it but the arrays is remembered."""
    rows = kind.rows
    if work.request is None or work.plan is None:
        launch = append_launch([work])
    else:
        launch = bind_cached(work.plan, work.request, work.kernels)
    oracle = launch.oracle
    if rows is not None:
        launch = add_rows(launch, [work])
        oracle = functools.partial(rows_oracle, rows, work.group.pool, oracle)
    if kind.plan is None or not kind.plan.vacuous:
        inputs = dict.fromkeys(launch.inputs)
        outputs = {name: spec._replace(into=None) for name, spec in launch.outputs.items()}
        known = Launch(launch.key, inputs, outputs, oracle, Steps(launch.steps), launch.scratch, launch.updates)
        place = kind.number, work.table.shape
        if work.loaded:
            work.loaded.remember(place, known)
        else:
            kind.launches[place] = known
    return launch


def kind_of(
    store: CacheStore,
    group: PoolGroup,
    message: AppendRows | AttendCache,
    tables: list[PageTable],
    most: int = 0,
) -> tuple[RequestKind, Bound]:
    """The kind of an adopted request, and its own attention and rows. Raises `InvalidRequest` and `Unsupported`.

    most: the block table is as wide as for sequences of ``most`` rows, or wider if the sequences are longer.
    """
    try:
        key = kind_key(group, message, tables, most)
        kind = None if key is None else group.kinds.find(key)
    except Exception:  # an option that cannot be hashed, or no array where one belongs: `pose` reports it
        key = kind = None
    if kind is not None:
        return kind, bind(group, kind, message)
    kind, bound = pose(store, group, message, tables, most)
    if key is not None:
        group.kinds.add(key, kind)
    return kind, bound


def pose(
    store: CacheStore, group: PoolGroup, message: AppendRows | AttendCache, tables: Sequence[PageTable], most: int = 0
) -> tuple[RequestKind, Bound]:
    """Check an adopted request in full, and plan it. Raises `InvalidRequest` and `Unsupported`."""
    if isinstance(message, AttendCache):
        return _pose_attend(store, group, message, tables, most)
    batch = None if isinstance(message.seqs, KvSequence) else len(tables)
    rows = new_rows(message, group.pool, batch, len(group.layers))
    _check_places(group, rows)
    shared = None if rows.merge_key is None else ("append", *group.key, rows.merge_key)
    return RequestKind(None, None, rows, _append_variants(store, group, rows), shared), (None, rows)


def pose_layers(
    store: CacheStore, cache: OpenedCache, message: AppendRows, tables: Sequence[PageTable]
) -> tuple[RequestKind, list[NewRows]]:
    """Check an adopted append to all layers whose arrays lie apart. Raises `InvalidRequest` and `Unsupported`."""
    given = {name: array for name in NEW_ROWS if (array := getattr(message, name)) is not None}
    for name, array in given.items():
        listed = isinstance(array, list | tuple)
        count = len(array) if listed or array.shape else 0
        what = count if listed else describe(array)
        expect(count == cache.layers, name, what, f"must have an array for each of the {cache.layers} layers")
    batch = None if isinstance(message.seqs, KvSequence) else len(tables)
    by_layer: list[NewRows] = []
    variants: list[Variant] = []
    for layer, group in enumerate(cache.group_of):
        own = {name: array[layer] for name, array in given.items()}
        try:
            rows = new_rows(changed(message, own), group.pool, batch)
            _check_places(group, rows)
            variants += _append_variants(store, group, rows)
        except (InvalidRequest, Unsupported) as error:
            if error.field not in NEW_ROWS:
                raise
            raise type(error)(f"{error.field}[{layer}]", *error.args[1:]) from None
        by_layer.append(rows)
        alike = np.array_equal(rows.counts, by_layer[0].counts)
        name = next(name for name in given if own[name] is not None)
        expect(alike, f"{name}[{layer}]", describe(own[name]), "must have as many rows as the first layer's")
    return RequestKind(None, None, by_layer[0], tuple(variants), None), by_layer


def _pose_attend(
    store: CacheStore, group: PoolGroup, message: AttendCache, tables: Sequence[PageTable], most: int
) -> tuple[RequestKind, Bound]:
    rows = _rows_to_attend(message, group, tables)
    # The lengths now. Requests that wait for their launch may add rows before this request is launched.
    lengths = np.array([table.length for table in tables], np.int32)
    last: Any = _rows_of_q(message, len(tables))
    if rows is not None:
        lengths += rows.counts
        last = np.maximum(last, rows.counts)
    columns = group.columns(int(lengths.max(initial=most)), int(last.max(initial=0)), message.block_mask)
    begins = group.begins(lengths, last)
    if begins is not None:
        lengths = (lengths - begins * group.pool.page_size).astype(np.int32)
    request = group.request(message.q, lengths, columns, {name: getattr(message, name) for name in _OPTIONS})
    plan = store.decoding.plan(request)
    check_operands(plan, request)
    variants = plan.variants
    if rows is not None:
        turn_apart(rows, message, request.q)
        place_rows(rows, message)
        _check_places(group, rows)
        if rows.rope is not None:
            reason = f"must have k's dtype, {rows.k.dtype}, to be rotated with it"
            expect(request.q.dtype == rows.k.dtype, "q", describe(request.q), reason)
        appending = _append_variants(store, group, rows, request.q.shape[-2])
        if rows.counts.any() or rows.turned is not None:
            variants += appending
        else:
            rows = None  # no kernel has to append or to rotate anything
    shared, of_rows = merge_key(plan, request), None if rows is None else rows.merge_key
    apart = shared is None or (rows is not None and of_rows is None)
    key = None if apart else ("attend", *group.key, shared, of_rows)
    return RequestKind(request, plan, rows, variants, key), (request, rows)


def _rows_to_attend(message: AttendCache, group: PoolGroup, tables: Sequence[PageTable]) -> NewRows | None:
    """The new rows of an adopted request, checked with its q against the cache and the sequences."""
    rows = None
    if message.rope is not None and group.pool.latent:
        reason = "a launch rotates whole heads of q, and a latent cache has rotated columns behind others"
        raise Unsupported("rope", message.rope, f"{reason}: rotate q_pe and k_pe before", None)
    if any(getattr(message, name) is not None for name in NEW_ROWS):
        rows = new_rows(message, group.pool, len(tables))
    else:
        with_rows = "goes with c_kv and k_pe" if group.pool.latent else "goes with k and v"
        expect(message.rope is None, "rope", message.rope, f"{with_rows}: rows in the cache have been rotated")
        for name in ("tokens", "positions", "rope_cos", "rope_sin", "positions_q", "cu_seqlens_k_new"):
            expect(getattr(message, name) is None, name, describe(getattr(message, name)), with_rows)
    shape: tuple[int, ...] = getattr(message.q, "shape", ())
    if message.cu_seqlens_q is None and len(shape) == 4:
        expect(len(tables) == shape[0], "seqs", len(tables), f"must name q's sequences, {shape[0]}")
    ends: tuple[int, ...] = getattr(message.cu_seqlens_q, "shape", ())
    if len(ends) == 1:
        expect(len(tables) == ends[0] - 1, "seqs", len(tables), f"must name cu_seqlens_q's, {ends[0] - 1}")
    if shape:
        dim = group.k_pool.shape[-1]
        expect(shape[-1] == dim, "q", describe(message.q), f"must have the cache's head_dim, {dim}")
    return rows


def _rows_of_q(message: AttendCache, batch: int) -> Any:
    """The number of rows of q of each sequence, int64 (batch,). Zeros if they are not known yet, or not valid."""
    q, ends = message.q, message.cu_seqlens_q
    if isinstance(ends, np.ndarray) and ends.shape == (batch + 1,):
        return np.diff(ends.astype(np.int64))
    rows = q.shape[1] if ends is None and len(getattr(q, "shape", ())) == 4 else 0
    return np.full(batch, rows, np.int64)


def _check_places(group: PoolGroup, rows: NewRows) -> None:
    """Check that positions are given if a layer with a window rotates rows. Raises `InvalidRequest`.

    Such a layer keeps only the last rows, so it does not know the places of rows in the whole sequence.
    """
    if group.window is None or rows.rope is None:
        return
    reason = "must be given where a rope rotates rows of a layer with a window, which does not know their places"
    expect(rows.positions is not None, "positions", None, reason)
    expect(rows.turned is None or rows.turned_positions is not None, "positions_q", None, reason)


def _append_variants(store: CacheStore, group: PoolGroup, rows: NewRows, heads_q: int = 0) -> tuple[Variant, ...]:
    """The kernels that append rows and copy pages. Raises `Unsupported`."""
    variants: list[Variant] = []
    for problem in rows.problems(group.pool, heads_q):
        try:
            variants.append(append_variant(problem, store.arch))
        except Unsupported as error:
            if error.field != "dtype":
                raise
            # The error names the field of the request.
            raise Unsupported("k_pe" if problem.latent else "k", *error.args[1:]) from None
    return *variants, page_copy_variant(store.arch)
