"""Cascade attention over a KvCache: pages that neighbours in a batch share are read once for all of them.

The rows of a group's sequences are packed as the rows of one sequence over the prefix that they share. Every row sees
the whole prefix, so nothing is masked there. Each sequence's own keys are its tail. The two partial results of a row,
in float32, are merged and rounded once:

    q of a group, packed ──> prefix, once ──> prefix.out, prefix.lse ──┐
    q of each sequence ────> its own tail ──> tail.out, tail.lse ──────┴──merge──> out, lse

The idea is FlashInfer's (docs/decoding.md), the rule is vLLM's: `gpu_actors.kernels.rules`. Learned sinks go to the
tails. Each row has exactly one tail, so sinks count once.

The operands are those of `gpu_actors.planning.cached`, "prefix.cu_seqlens_q", and for each part, with "prefix." or
"tail." before the name: block_table, cache_seqlens, out, lse and the scratch of its kernels.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from gpu_actors.attention.problem import AttentionProblem, DispatchKey
from gpu_actors.attention.requests import PagedForward
from gpu_actors.compiling.variant import Variant
from gpu_actors.devices.interface import (
    Buffer,
    Device,
    Kernel,
    Launch,
    LaunchGeometry,
    Outputs,
    Params,
    ScratchSpec,
    Step,
    StepPack,
)
from gpu_actors.errors import Unqualified, Unsupported
from gpu_actors.kernels.decode_mma import DECODE
from gpu_actors.kernels.decode_sm90 import NAME as DECODE_SM90
from gpu_actors.kernels.family import KernelFamily
from gpu_actors.kernels.merge import (
    TERM_FIELDS,
    MergeProblem,
    merge_geometry,
    merge_variant,
    pack_merge,
    pack_terms,
)
from gpu_actors.kernels.params import ITEMSIZES
from gpu_actors.kernels.program import NO_VALUES, Pack, Program
from gpu_actors.kernels.rules import SHARED_KEYS, SHARING_SEQUENCES
from gpu_actors.kernels.variants import variant_of
from gpu_actors.kv.sharing import SharedPrefixes, shared_prefixes
from gpu_actors.partial import Partial, oracle_merge
from gpu_actors.planning.cached import cached_oracle, operands
from gpu_actors.planning.plan import Accumulate, Plan, PlanCache, program_for
from gpu_actors.planning.tma_eligibility import device_key, eligible_families

__all__ = ["CascadeKeys", "Cascader", "Cascading", "prefix_problem", "tail_problem"]

_KERNELS = (DECODE, DECODE_SM90)  # their launches have the same kernels for all sizes
_PLANS = 4096
_FEWER = f"no prefix of {SHARED_KEYS} keys has {SHARING_SEQUENCES} neighbours that share it"
_FLOAT = "float32"
_MANY_ROWS = 128  # assumed of a packed group, for the largest tile of rows: one kernel then serves groups of any size
_PARTS = _PREFIX, _TAIL = "prefix.", "tail."


class CascadeKeys(NamedTuple):
    """The keys of what a cascade launches: the kernels of each part, and the merge."""

    prefix: tuple[DispatchKey, ...]
    tail: tuple[DispatchKey, ...]
    merge: Variant

    @property
    def variants(self) -> tuple[Variant, ...]:
        """The variants, in the order in which `Cascader.bind` takes their kernels."""
        return (*map(variant_of, (*self.prefix, *self.tail)), self.merge)


class Cascading(NamedTuple):
    """Whether a launch is a cascade. reason: why, in a sentence. groups: those that share a prefix. sequences: in them.

    prefix_keys: the keys of all groups' prefixes. saved_bytes: bytes of keys and values that are not read again.
    """

    taken: bool
    reason: str
    groups: int = 0
    sequences: int = 0
    prefix_keys: int = 0
    saved_bytes: int = 0


class Cascader:
    """Decides which launches over a KvCache are cascades, and makes them. Used by one actor's thread."""

    def __init__(self, device: Device, accumulate: Accumulate) -> None:
        self._device = device
        self._accumulate = accumulate
        self._parts: PlanCache[_Parts | None] = PlanCache(_PLANS)
        self._keys: PlanCache[CascadeKeys | None] = PlanCache(_PLANS)

    def keys(self, plan: Plan, request: PagedForward, most_pages: int, forced: bool) -> CascadeKeys | str:
        """Return the kernels that a cascade of such requests would take, or why there is none.

        most_pages: the most pages that sharing could save. forced: whether to ignore the rule.
        """
        p = plan.problem
        reason = _refusal(plan, request)
        if reason is not None:
            return reason
        # In a group that is large enough, all sequences but one can save the prefix.
        if not forced and most_pages * p.page_size < (SHARING_SEQUENCES - 1) * SHARED_KEYS:
            return _FEWER
        families = eligible_families({name: getattr(request, name) for name in ("q", "k_cache", "v_cache")})
        keys = self._keys.of(lambda: (p, families), lambda: self._find_keys(p, families))
        if keys is None:
            return "no kernels give its two parts in float32"
        if not forced and p.gqa_ratio * p.seqlen_q >= keys.prefix[0].row_tile:
            return "the rows of one sequence fill a tile, so that several read a prefix as often together"
        return keys

    def _find_keys(self, p: AttentionProblem, families: tuple[KernelFamily, ...]) -> CascadeKeys | None:
        parts = prefix_problem(p, 1, _MANY_ROWS, _MANY_ROWS, p.seqlen_k), tail_problem(p, p.seqlen_k)
        found: list[tuple[DispatchKey, ...]] = []
        try:
            for part in parts:
                key = device_key(part, self._device, families)
                program = program_for(part, key, self._device)
                if key.kernel not in _KERNELS or program is None:
                    return None
                found.append(program.keys)
            return CascadeKeys(found[0], found[1], merge_variant(_merge_problem(p), self._device.info.arch))
        except (Unsupported, Unqualified):
            return None

    def bind(
        self,
        plan: Plan,
        request: PagedForward,
        keys: CascadeKeys,
        kernels: Sequence[Kernel],
        forced: bool,
    ) -> tuple[Launch | None, Cascading]:
        """Return a launch on the arrays of a request, or None if a cascade does not pay, and the reason.

        kernels: of `CascadeKeys.variants`, or none.
        """
        table, lengths, ends = request.block_table, request.cache_seqlens, request.cu_seqlens_q
        p = plan.problem
        if not isinstance(table, np.ndarray) or not (ends is None or isinstance(ends, np.ndarray)):
            return None, Cascading(False, "how many rows a sequence has is known on the device alone")
        if not _packed_in_place(request.q):
            return None, Cascading(False, "the rows of q do not lie evenly")
        rows = np.full(p.batch, p.seqlen_q) if ends is None else np.diff(ends).astype(np.int64)
        # Every row of a sequence sees all keys before the first row's own.
        found = shared_prefixes(table, np.maximum(0, lengths.astype(np.int64) - rows) // p.page_size)
        if found is None:
            return None, Cascading(False, "no neighbours begin with a whole page in common")
        gain = _gain(p, found, rows, keys)
        if not forced and not gain.taken:
            return None, gain
        inputs = _inputs(p, request, found, rows)
        table, longest = inputs["prefix.block_table"], int(np.diff(inputs["prefix.cu_seqlens_q"]).max())
        shapes = (*table.shape, longest, inputs["tail.block_table"].shape[1])
        made = self._parts.of(lambda: (p, keys, shapes), lambda: _parts(p, keys, shapes, self._device))
        if made is None:
            return None, gain._replace(taken=False, reason="its grids have no room for so many rows")
        if kernels:
            for name, program in ((_PREFIX, made.prefix), (_TAIL, made.tail)):
                if program.split is not None:
                    counts = inputs.get(f"{name}cu_seqlens_q", ends)
                    split = program.split({"cache_seqlens": inputs[f"{name}cache_seqlens"], "cu_seqlens_q": counts})
                    inputs |= {f"{name}{local}": array for local, array in split.items()}
        steps = [Step(kernel, *work) for kernel, work in zip(kernels, made.steps, strict=bool(kernels))]
        outputs = plan.outputs
        if request.out is not None:
            outputs = {**outputs, "out": outputs["out"]._replace(into=request.out)}
        oracle = functools.partial(_oracle, made.problems, self._accumulate)
        launch = Launch(plan.key, inputs, outputs, oracle, tuple(steps), made.scratch if steps else {})
        return launch, gain if gain.taken else gain._replace(taken=True, reason="cascade=True")


class _Parts(NamedTuple):
    """What launches of the same shapes share. steps: grids, and what packs the parameters."""

    problems: tuple[AttentionProblem, AttentionProblem]
    prefix: Program
    tail: Program
    scratch: dict[str, ScratchSpec]
    steps: list[tuple[LaunchGeometry, StepPack]]


def _parts(p: AttentionProblem, keys: CascadeKeys, shapes: tuple[int, int, int, int], device: Device) -> _Parts | None:
    """shapes: groups, pages of the longest prefix, packed rows of the largest group, pages of the longest tail."""
    groups, columns, longest, tail_columns = shapes
    prefix = prefix_problem(p, groups, longest, p.total_q, columns * p.page_size)
    problems = prefix, tail_problem(p, tail_columns * p.page_size)
    merged = _merge_problem(p)
    scratch = {
        "prefix.out": ScratchSpec((p.total_q, p.heads_q, p.head_dim_v), _FLOAT),
        "prefix.lse": ScratchSpec((p.heads_q, p.total_q), _FLOAT),
        "tail.out": ScratchSpec(
            (*((p.total_q,) if p.varlen_q else (p.batch, p.seqlen_q)), p.heads_q, p.head_dim_v), _FLOAT
        ),
        "tail.lse": ScratchSpec(p.lse_shape, _FLOAT),
    }
    programs: list[Program] = []
    steps: list[tuple[LaunchGeometry, StepPack]] = []
    try:
        geometry = merge_geometry(merged)
        for name, problem, own in zip(_PARTS, problems, keys[:2], strict=True):
            program = program_for(problem, next(key for key in own if key.kernel in _KERNELS), device)
            assert program is not None, "a cascade has rows"
            programs.append(program)
            scratch |= {f"{name}{local}": spec for local, spec in program.scratch.items()}
            for part in program.parts:
                pack = functools.partial(_pack_part, name, groups, part.pack)
                steps.append((part.geometry, pack))
    except Unsupported:
        return None
    if not p.return_lse:
        scratch["lse"] = ScratchSpec(p.lse_shape, _FLOAT)
    scratch["terms"] = ScratchSpec((2, TERM_FIELDS), "uint64", contents=functools.partial(_pack_terms, merged))
    steps.append((geometry, functools.partial(pack_merge, merged)))
    return _Parts(problems, programs[0], programs[1], scratch, steps)


def _refusal(plan: Plan, request: PagedForward) -> str | None:
    """Why a cascade would not be exact, because rows would see other keys or score them differently, or None."""
    p = plan.problem
    if plan.vacuous:
        return "there are no rows"
    if p.mask not in ("full", "causal"):
        return "a row does not see all keys before its sequence's rows"
    if p.bias is not None:
        return "a bias has rows and keys of one sequence"
    if p.alibi is not None or p.positions or p.cache_leftpad:
        return "scores depend on where rows and keys stand"
    if request.q_descale is not None:
        return "each sequence's queries have a factor of their own"
    # Kernels take sinks in float32 or in the output's dtype, which is float32 for the parts of a cascade.
    if not isinstance(request.sinks, np.ndarray) and getattr(request.sinks, "dtype", _FLOAT) != _FLOAT:
        return "its sinks lie on the device in another dtype than float32"
    if p.invariant:
        return "invariant=True promises the same bits whatever sequences share"
    if p.num_splits:
        return "num_splits promises the same bits alone and in any batch"
    if p.layout != "paged" or plan.key.kernel not in _KERNELS:
        return f"{plan.key.kernel} is none of {', '.join(_KERNELS)}"
    return None


def _gain(p: AttentionProblem, found: SharedPrefixes, rows: Any, keys: CascadeKeys) -> Cascading:
    """What a cascade of these groups would save, and whether the rule takes it."""
    ratio, tiles = p.gqa_ratio, [part[0].row_tile for part in (keys.tail, keys.prefix)]
    sizes = np.diff(found.ends)
    # A tile of packed rows reads all keys that it sees.
    alone = np.add.reduceat(-(-rows * ratio // tiles[0]), found.ends[:-1])
    together = -(-np.add.reduceat(rows, found.ends[:-1]) * ratio // tiles[1])
    saved = int(((alone - together) * found.pages).sum())
    shared = found.pages > 0
    enough = (sizes >= SHARING_SEQUENCES) & (found.pages * p.page_size >= SHARED_KEYS)
    if not enough.any():
        reason = _FEWER
    elif saved <= 0:
        reason = "the rows of a group take as many tiles together as alone"
    else:
        reason = f"{sizes[enough].max()} sequences share a prefix of at least {SHARED_KEYS} keys"
    return Cascading(
        bool(enough.any()) and saved > 0,
        reason,
        int(shared.sum()),
        int(sizes[shared].sum()),
        int(found.pages.sum()) * p.page_size,
        saved * _page_bytes(p),
    )


def _page_bytes(p: AttentionProblem) -> int:
    columns = p.head_dim + (0 if p.latent else p.head_dim_v)
    return p.page_size * p.heads_kv * columns * ITEMSIZES[p.kv_dtype]


# Problems


def prefix_problem(p: AttentionProblem, groups: int, longest: int, total: int, capacity: int) -> AttentionProblem:
    """The rows of groups, each over its shared prefix. longest: most rows of a group. total: rows. capacity: keys."""
    sizes: dict[str, Any] = {"batch": groups, "seqlen_q": longest, "total_q": total, "seqlen_k": capacity}
    # A causal mask may come with a window, whose right edge has no effect then.
    seen: dict[str, Any] = {"causal": False, "window_size": (-1, -1), "tree_mask": False, "sinks": False}
    return dataclasses.replace(p, **sizes, **seen, varlen_q=True, return_lse=True, out_dtype=_FLOAT)


def tail_problem(p: AttentionProblem, capacity: int) -> AttentionProblem:
    """The rows of sequences, each over its own keys. capacity: the most of these keys."""
    return dataclasses.replace(p, seqlen_k=capacity, return_lse=True, out_dtype=_FLOAT)


def _merge_problem(p: AttentionProblem) -> MergeProblem:
    return MergeProblem(
        count=2,
        batch=0 if p.varlen_q else p.batch,
        rows=p.total_q if p.varlen_q else p.seqlen_q,
        heads=p.heads_q,
        columns=p.head_dim_v,
        dtype=_FLOAT,
        lse_dtype=_FLOAT,
        out_dtype=p.out_dtype,
        out_lse_dtype=_FLOAT,
    )


# Operands


def _packed_in_place(q: Any) -> bool:
    """Whether the stride between rows of q is the same within a sequence and from one sequence to the next."""
    if q.ndim == 3 or isinstance(q, np.ndarray):
        return True  # rows on the host are copied next to each other
    batch, rows = q.shape[:2]
    return bool(batch == 1 or rows == 1 or q.strides[0] == rows * q.strides[1])


def _inputs(p: AttentionProblem, request: PagedForward, found: SharedPrefixes, rows: Any) -> dict[str, Any]:
    table: Any = request.block_table
    sizes, pages = np.diff(found.ends), found.pages
    own = np.repeat(pages, sizes)
    held = -(-request.cache_seqlens.astype(np.int64) // p.page_size) - own
    inputs = operands(request)
    if isinstance(request.q, np.ndarray):
        inputs["q"] = np.ascontiguousarray(request.q)
    if isinstance(request.sinks, np.ndarray):
        inputs["sinks"] = request.sinks.astype(_FLOAT)
    columns = int(pages.max())
    prefix = np.where(np.arange(columns) < pages[:, None], table[found.ends[:-1], :columns], -1).astype(np.int32)
    tail = np.full((p.batch, max(1, int(held.max()))), -1, np.int32)
    at = own[:, None] + np.arange(tail.shape[1])
    kept = np.arange(tail.shape[1]) < held[:, None]
    tail[kept] = np.take_along_axis(table, np.minimum(at, table.shape[1] - 1), axis=1)[kept]
    return inputs | {
        "prefix.block_table": prefix,
        "prefix.cache_seqlens": (pages * p.page_size).astype(np.int32),
        "prefix.cu_seqlens_q": np.concatenate([[0], np.cumsum(rows)])[found.ends].astype(np.int32),
        "tail.block_table": tail,
        "tail.cache_seqlens": (request.cache_seqlens - own * p.page_size).astype(np.int32),
    }


def _pack_part(name: str, groups: int, pack: Pack, buffers: Mapping[str, Buffer]) -> Params:
    """Pack the parameters of one part's kernel, which takes its operands by names without the part's prefix."""
    own = {key.removeprefix(name): buffer for key, buffer in buffers.items() if key.startswith(name)}
    if name == _PREFIX:
        own["q"] = _flat(buffers["q"])
        for factor in ("k_descale", "v_descale"):
            if factor in buffers:  # they are the pool's, so all sequences have the same
                one = buffers[factor]
                own[factor] = one._replace(shape=(groups, *one.shape[1:]))
    return pack({**buffers, **own}, NO_VALUES)


def _pack_terms(problem: MergeProblem, buffers: Mapping[str, Buffer]) -> bytes:
    out, lse = buffers["prefix.out"], buffers["prefix.lse"]
    if problem.batch:  # packed rows, by sequence
        b, r = problem.batch, problem.rows
        (row, *inner), (head, one) = out.strides, lse.strides
        out = out._replace(shape=(b, r, *out.shape[1:]), strides=(r * row, row, *inner))
        lse = lse._replace(shape=(b, lse.shape[0], r), strides=(r * one, head, one))
    tail = {"out.1": buffers["tail.out"], "lse.1": buffers["tail.lse"]}
    return pack_terms(problem, {"out.0": out, "lse.0": lse, **tail})


def _flat(q: Buffer) -> Buffer:
    """Return q with the rows of all sequences along one axis."""
    if len(q.shape) == 3:
        return q
    (batch, rows, *shape), (stride, row, *strides) = q.shape, q.strides
    return q._replace(shape=(batch * rows, *shape), strides=(stride if rows == 1 else row, *strides))


def _oracle(
    problems: tuple[AttentionProblem, AttentionProblem], accumulate: Accumulate, inputs: Mapping[str, Any]
) -> Outputs:
    q, (prefix, tail) = inputs["q"], problems
    shared = {key: array for key, array in inputs.items() if not key.startswith(_PARTS)}
    groups = prefix.batch
    own = {name: inputs[name][:groups] for name in ("k_descale", "v_descale") if name in inputs}
    own |= {"q": q.reshape(-1, *q.shape[-2:])}
    found = []
    for name, problem, changes in ((_PREFIX, prefix, own), (_TAIL, tail, {})):
        part = {key.removeprefix(name): array for key, array in inputs.items() if key.startswith(name)}
        given = {**shared, **changes, **part}
        for option, asked in (("sinks", problem.sinks), ("tree_mask", problem.tree_mask)):
            if not asked:
                given.pop(option, None)
        outputs = cached_oracle(problem, accumulate, given)
        found.append(Partial(outputs["out"], outputs["lse"]))
    if q.ndim == 4:
        (batch, rows, heads, _), (out, lse) = q.shape, found[0]
        by_sequence = np.moveaxis(lse.reshape(heads, batch, rows), 0, 1)
        found[0] = Partial(out.reshape(batch, rows, heads, -1), by_sequence)
    merged = oracle_merge(found, None)
    return {"out": merged.out, "lse": merged.lse}
