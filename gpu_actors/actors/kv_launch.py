"""Launches on a KvCache's pool: copies of shared pages, then new rows, then attention, in one launch.

    page_pairs ──copy──> k_cache, v_cache <──append── k, v (rotated, quantised)
                                │                     q ──rotated──┐
                                └────────────> attention <─────────┘──> out, lse

Operands are named as `pack_append`, `pack_page_copy` and `gpu_actors.planning.cached` say. If q is rotated, attention
reads q_rotated in its place.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from gpu_actors.actors.kv_store import KvWork, PoolGroup
from gpu_actors.devices.interface import Buffer, Kernel, Launch, Outputs, Params, ScratchSpec, Step, StepPack
from gpu_actors.kernels.append import AppendProblem, append_geometry, pack_append
from gpu_actors.kernels.copy_pages import pack_page_copy, page_copy_geometry
from gpu_actors.kv.layers import each_layer, join_launches
from gpu_actors.kv.sequences import PageCopy
from gpu_actors.planning.append_rows import NewRows, merge_rows, pack_rows
from gpu_actors.planning.merging import ends_of, merge_tables

__all__ = ["add_rows", "append_launch", "append_layers", "copy_launch", "rows_oracle"]


def append_launch(works: Sequence[KvWork]) -> Launch:
    """A launch with the operands of requests that only append. `add_rows` adds its steps."""
    inputs = {
        **works[0].group.pools,
        "block_table": merge_tables([work.table for work in works]),
        "cache_seqlens": np.concatenate([work.lengths for work in works]),
    }
    return Launch(None, inputs, {}, lambda _: {})


def copy_launch(group: PoolGroup, copies: Sequence[PageCopy], kernels: Sequence[Kernel]) -> Launch:
    """The launch that copies pages in all layers of a group. kernels: the copy kernel, none if the device runs none."""
    inputs = {"page_pairs": _pairs(copies), **group.pools}
    copied, layers = (len(copies), group.pool), len(group.layers)
    pack = functools.partial(pack_page_copy, *copied)
    steps = each_layer([Step(kernel, page_copy_geometry(*copied), pack) for kernel in kernels], layers)
    return Launch(None, inputs, {}, functools.partial(_copy_oracle, layers), steps, updates=tuple(group.pools))


def _pairs(copies: Sequence[PageCopy]) -> Any:
    return np.array([(copy.source, copy.destination) for copy in copies], np.int32)


def _copy_oracle(layers: int, inputs: Mapping[str, Any]) -> Outputs:
    from gpu_actors.reference.append import copy_pages

    pools = [inputs[name] for name in ("k_cache", "v_cache") if name in inputs]
    for layer in range(layers):
        copy_pages([pool[layer] for pool in pools] if layers > 1 else pools, inputs["page_pairs"])
    return {}


def add_rows(launch: Launch, works: Sequence[KvWork]) -> Launch:
    """Return a launch that copies pages and appends the new rows of ``works``, and then does what ``launch`` does."""
    group, kernels = works[0].group, works[0].appending
    rows = merge_rows([work.rows for work in works if work.rows is not None])
    copies = [write.copies[group.number] for work in works for write in work.writes if group.number in write.copies]
    return _with_rows(launch, group, rows, copies, kernels)


def append_layers(work: KvWork) -> Launch:
    """The launch that appends a request's rows to each layer, if the layers' arrays lie apart.

    The names of a layer's operands begin with its number, and the names of a group's with "group" and its number.
    """
    parts: list[tuple[Launch, dict[str, str]]] = []
    for layer, rows in enumerate(work.by_layer):
        group, pools = work.cache.group_of[layer], work.cache.by_layer[layer]
        table, lengths = work.by_group[group.number]
        operands = {**pools, "block_table": table, "cache_seqlens": lengths}
        copies = [write.copies[group.number] for write in work.writes if group.number in write.copies]
        kernels = work.appending[2 * layer : 2 * layer + 2]
        part = _with_rows(Launch(None, operands, {}, lambda _: {}), group, rows, copies, kernels)
        names = {
            name: f"{layer}.{name}" if name in ("k", "v", *pools) else f"group{group.number}.{name}"
            for name in part.inputs
        }
        parts.append((part, names))
    return join_launches(parts)


def _with_rows(
    launch: Launch, group: PoolGroup, rows: NewRows, copies: Sequence[PageCopy], kernels: tuple[Kernel, ...]
) -> Launch:
    """A launch that copies pages of a group, appends rows, and then does what ``launch`` does."""
    # The first input, which is q if there is one, decides whether the outputs are on the host.
    inputs = {**launch.inputs, "k": rows.k, "v": rows.v}
    for name, factors in group.descales_of(len(rows.counts)).items():
        inputs.setdefault(name, factors)
    if not rows.rows:
        inputs["cu_seqlens_new"] = rows.ends
    for name in ("positions", "turned_positions", "rope_cos", "rope_sin"):
        if getattr(rows, name) is not None:
            inputs[name] = getattr(rows, name)
    if rows.turned is not None and not rows.turned_rows:
        inputs["cu_seqlens_q"] = ends_of(rows.turned)
    if copies:
        inputs["page_pairs"] = _pairs(copies)
    scratch = dict(launch.scratch)
    rotates = rows.rope is not None and "q" in inputs
    if rotates:
        scratch["q_rotated"] = ScratchSpec(tuple(inputs["q"].shape), inputs["q"].dtype.name)
    return dataclasses.replace(
        launch,
        inputs=inputs,
        oracle=functools.partial(rows_oracle, rows, group.pool, launch.oracle),
        updates=tuple(group.pools),
        scratch=scratch,
        steps=_steps(launch, rows, group.pool, inputs, kernels) if kernels else (),
    )


def _steps(
    launch: Launch,
    rows: NewRows,
    pool: AppendProblem,
    inputs: Mapping[str, Any],
    kernels: tuple[Kernel, ...],
) -> tuple[Step, ...]:
    *appends, copies = kernels
    heads_q = inputs["q"].shape[-2] if "q" in inputs else 0
    problems = rows.problems(pool, heads_q, inputs["block_table"].shape[1])
    steps: list[Step] = []
    for kernel, problem, arrange in zip(appends, problems, (_pack_packed, _pack_turned)[: len(problems)], strict=True):
        if problem.total:
            pack = functools.partial(arrange, functools.partial(pack_append, problem))
            steps += each_layer([Step(kernel, append_geometry(problem), pack)], rows.layers)
    if "page_pairs" in inputs:
        copied = len(inputs["page_pairs"]), pool
        copy = Step(copies, page_copy_geometry(*copied), functools.partial(pack_page_copy, *copied))
        steps[:0] = each_layer([copy], rows.layers)
    for step in launch.steps:
        rotated = any(problem.heads_q for problem in problems)
        steps.append(step._replace(pack=functools.partial(_pack_rotated, step.pack)) if rotated else step)
    return tuple(steps)


def _pack_packed(pack: StepPack, buffers: Mapping[str, Buffer]) -> Params:
    """Pack the parameters of the append kernel, which takes packed rows of q."""
    changed = {name: _packed(buffers[name]) for name in ("q", "q_rotated") if name in buffers}
    if "cu_seqlens_new" in buffers:
        changed["cu_seqlens_q"] = buffers["cu_seqlens_new"]
    return pack({**buffers, **changed})


def _pack_turned(pack: StepPack, buffers: Mapping[str, Buffer]) -> Params:
    """Pack the parameters of the append kernel that only rotates q and appends no rows."""
    changed = {name: _packed(buffers[name]) for name in ("q", "q_rotated")}
    total = changed["q"].shape[0]
    for name in ("k", "v", "k_cache", "v_cache"):
        *outer, _, dim = buffers[name].shape
        shape = (*(outer if len(outer) == 2 else (total,)), 0, dim)
        changed[name] = buffers[name]._replace(shape=shape, strides=(0,) * (len(shape) - 1) + (1,))
    if "turned_positions" in buffers:
        changed["positions"] = buffers["turned_positions"]
    return pack({**buffers, **changed})


def _pack_rotated(pack: StepPack, buffers: Mapping[str, Buffer]) -> Params:
    """Pack the parameters of attention that reads the rotated q."""
    return pack({**buffers, "q": buffers["q_rotated"]})


def _packed(buffer: Buffer) -> Buffer:
    if len(buffer.shape) == 3:
        return buffer
    (batch, rows, *shape), (stride, row_stride, *strides) = buffer.shape, buffer.strides
    return buffer._replace(shape=(batch * rows, *shape), strides=(stride if rows == 1 else row_stride, *strides))


def rows_oracle(rows: NewRows, pool: AppendProblem, attend: Any, inputs: Mapping[str, Any]) -> Outputs:
    """The oracle of a launch that appends rows before it attends. Takes the rows' k and v from ``inputs``."""
    # Only a mock device computes here, so only its programs pay for the import.
    from gpu_actors.reference.append import append_rows, copy_pages
    from gpu_actors.reference.rope import apply_rope

    if rows.layers > 1:
        for layer in range(rows.layers):
            own = {name: inputs[name][layer] for name in ("k", "v", "k_cache", "v_cache") if name in inputs}
            rows_oracle(dataclasses.replace(rows, layers=1), pool, attend, {**inputs, **own})
        return {}
    caches = [inputs[name] for name in ("k_cache", "v_cache") if name in inputs]
    if "page_pairs" in inputs:
        copy_pages(caches, inputs["page_pairs"])
    if pool.latent:
        caches = [caches[0][..., pool.head_dim_v :], caches[0][..., : pool.head_dim_v]]
    angles = None if rows.rope is None else rows.angles(inputs["cache_seqlens"])
    append_rows(
        inputs["k"],
        inputs["v"],
        caches[0],
        caches[1],
        rows.ends,
        inputs["cache_seqlens"],
        block_table=inputs["block_table"],
        rope=angles,
        interleaved=rows.rope is not None and rows.rope.interleaved,
        k_descale=inputs.get("k_descale"),
        v_descale=inputs.get("k_descale" if pool.latent else "v_descale"),
    )
    if angles is not None and "q" in inputs:
        q = inputs["q"]
        packed = q if q.ndim == 3 else pack_rows("q", q)
        assert rows.rope is not None
        if rows.turned is not None:
            angles = rows.angles(inputs["cache_seqlens"], of_q=True)
        rotated = apply_rope(packed, *angles, interleaved=rows.rope.interleaved).astype(q.dtype)
        inputs = {**inputs, "q": rotated.reshape(q.shape)}
    outputs: Outputs = attend(inputs)
    return outputs
