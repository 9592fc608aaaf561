"""Runs the decode kernels on the CPU over batches of cached sequences and compares them with the float64 oracle."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from cases.cached_batches import Batch
from cases.poison import POISON_PAGE, nan_filled
from emulated import contraction
from emulated.forward import module_of
from emulated.memory import host_view, run_launch
from inside.cuda import CudaDevice
from inside.devices import Kernel, Launch, OutputSpec, Step
from inside.emulation import EmulatedApi
from inside.kernels import (
    DECODE,
    ELEMENTS,
    FAMILIES,
    NO_VALUES,
    PLAN,
    Target,
    decode_keys,
    decode_packer,
    dispatch_key,
    program_of,
    step_geometry,
)
from inside.validation import own_positions
from support.gate import kernel_source

from gpu_actors import AttentionProblem, ContextOptions, DispatchKey, EmulationOptions, KernelSource
from gpu_actors.testing import check_output

DESCALES = ("q_descale", "k_descale", "v_descale")
POSITIONS = ("q_positions", "k_positions")
ARRAYS = ("alibi_slopes", "sinks", *DESCALES, *POSITIONS)


@dataclass
class DecodeCase:
    """A batch, the layout of its keys and values, and the options of the request.

    layout: "paged", "cache" or "pointers". rows: new rows of each sequence, the last of q's; None where all are q's.
    latent: values are the first columns of keys.
    tree: uint64 (batch, rows of q). options: as of the oracle, and num_splits.
    leftpad: rows before each sequence's keys. places: of each sequence in a cache of more. own: the arrays of
    "pointers" have capacities and strides of their own.
    """

    batch: Batch
    layout: str = "paged"
    page_size: int = 16
    rows: list[int] | None = None
    tree: Any = None
    options: dict[str, Any] = field(default_factory=dict)
    leftpad: list[int] | None = None
    places: list[int] | None = None
    own: bool = False
    latent: bool = False

    @functools.cached_property
    def packed_rows(self) -> Any:
        """Which rows of q exist, bool (batch, rows)."""
        most = self.batch.q.shape[1]
        rows = np.full(len(self.batch.k), most) if self.rows is None else np.array(self.rows)
        return np.arange(most) >= most - rows[:, None]

    @property
    def q(self) -> Any:
        return self.batch.q if self.rows is None else self.batch.q[self.packed_rows]

    @property
    def tree_mask(self) -> Any:
        return self.tree if self.rows is None or self.tree is None else self.tree[self.packed_rows]

    @property
    def ends(self) -> Any:
        """cu_seqlens_q, also where the request has none."""
        return np.concatenate([[0], np.cumsum(self.packed_rows.sum(axis=1))]).astype(np.int32)

    def alone(self, index: int) -> DecodeCase:
        """The same request with one of its sequences."""
        batch = Batch(self.batch.q[index : index + 1], [self.batch.k[index]], [self.batch.v[index]])
        options = dict(self.options)
        for name in ("alibi_slopes", *DESCALES, *POSITIONS):
            if name in options and (options[name].ndim == 2 or name in POSITIONS):
                options[name] = options[name][index : index + 1]
        rows = None if self.rows is None else [self.rows[index]]
        tree = None if self.tree is None else self.tree[index : index + 1]
        leftpad = None if self.leftpad is None else self.leftpad[index : index + 1]
        places = None if self.places is None else [0]
        return replace(self, batch=batch, rows=rows, tree=tree, options=options, leftpad=leftpad, places=places)

    @property
    def stored(self) -> Batch:
        """The sequences as the cache has them, behind their padding of NaN."""
        if self.leftpad is None:
            return self.batch
        k, v = (
            [
                np.concatenate([nan_filled((count, *rows.shape[1:]), rows.dtype.name), rows])
                for count, rows in zip(self.leftpad, side, strict=True)
            ]
            for side in (self.batch.k, self.batch.v)
        )
        return Batch(self.batch.q, k, v)

    def operands(self) -> dict[str, Any]:
        """The operands of the kernels for a request of this layout, by name."""
        arrays = {name: self.options[name] for name in ARRAYS if name in self.options}
        stored = self.stored
        arrays |= {"q": self.q, "cache_seqlens": stored.lengths}
        for name, values in (("cache_leftpad", self.leftpad), ("cache_batch_idx", self.places)):
            if values is not None:
                arrays[name] = np.array(values, np.int32)
        if self.rows is not None:
            arrays["cu_seqlens_q"] = self.ends
        if self.tree is not None:
            arrays["tree_mask"] = self.tree_mask
        if self.layout == "paged":
            pages = stored.pages(self.page_size, len(stored.k))
            for index, count in enumerate(self.leftpad or ()):
                pages.block_table[index, : count // self.page_size] = POISON_PAGE
            arrays |= {"k_cache": pages.k, "block_table": pages.block_table}
            return arrays if self.latent else arrays | {"v_cache": pages.v}
        if self.layout == "cache":
            k, v = stored.dense()
            if self.places is not None:
                more = max(self.places, default=0) + 2
                wide = [nan_filled((more, *one.shape[1:]), one.dtype.name) for one in (k, v)]
                for one, cache in zip((k, v), wide, strict=True):
                    cache[self.places] = one
                k, v = wide
            return arrays | ({"k_cache": k} if self.latent else {"k_cache": k, "v_cache": v})
        k, v = self.batch.arrays()
        if self.own:
            sides = enumerate((self.batch.k, self.batch.v))
            k, v = ([_laid_out(one.swapaxes(0, 1), n, side) for n, one in enumerate(rows)] for side, rows in sides)
        for index in range(len(k)):
            arrays |= {f"k_cache.{index}": k[index], f"v_cache.{index}": v[index]}
        return arrays


def _laid_out(array: Any, index: int, side: int) -> Any:
    """An array (heads, rows, dim) in device memory, with more rows for a larger index, and strides of its own."""
    number, more = index + side, 1 + index * 3 // 2
    heads, rows, dim = array.shape
    room = rows + more
    wide = (room + 2, heads + 1, dim) if number % 2 else (heads, room, dim + 16 * (number % 3))
    memory = allocate(wide, array.dtype.name)
    memory[...] = np.nan
    view = memory[:room, :heads].swapaxes(0, 1) if number % 2 else memory[..., :dim]
    view[:, :rows] = array
    return view


def problem_of(case: DecodeCase, operands: dict[str, Any]) -> AttentionProblem:
    """The problem of a case, LSE included."""
    q, options = operands["q"], case.options
    element, batch = ELEMENTS[q.dtype.name], len(case.batch.k)
    if case.layout == "paged":
        k = operands["k_cache"]
        capacity, total = operands["block_table"].shape[1] * case.page_size, len(k) * case.page_size
    elif case.layout == "cache":
        k = operands["k_cache"]
        capacity, total = k.shape[1], len(k) * k.shape[1]
    else:
        k = operands["k_cache.0"].swapaxes(0, 1)
        capacity = max(operands[f"k_cache.{index}"].shape[1] for index in range(batch))
        total = batch * capacity
    slopes = options.get("alibi_slopes")
    return AttentionProblem(
        layout=case.layout,  # type: ignore[arg-type]
        batch=batch,
        seqlen_q=case.batch.q.shape[1],
        seqlen_k=capacity,
        total_q=math.prod(q.shape[:-2]),
        total_k=total,
        heads_q=q.shape[-2],
        heads_kv=k.shape[-2],
        head_dim=q.shape[-1],
        head_dim_v=case.batch.v[0].shape[-1],
        latent=case.latent,
        dtype=q.dtype.name,
        kv_dtype=k.dtype.name,
        out_dtype=element.out,
        compute=element.computes[0],
        softmax_scale=options.get("softmax_scale", q.shape[-1] ** -0.5),
        causal=options.get("causal", False),
        window_size=options.get("window_size", (-1, -1)),
        softcap=options.get("softcap", 0.0),
        alibi=None if slopes is None else "heads" if slopes.ndim == 1 else "batch",
        sinks="sinks" in options,
        sink_tokens=options.get("sink_tokens", 0),
        attention_chunk=options.get("attention_chunk", 0),
        descales=any(name in options for name in DESCALES),
        return_lse=True,
        page_size=case.page_size if case.layout == "paged" else 0,
        varlen_q=case.rows is not None,
        tree_mask=case.tree is not None,
        num_splits=options.get("num_splits", 0),
        cache_leftpad=case.leftpad is not None,
        cache_batch_idx=case.places is not None,
        own_layouts=case.own,
        **{name: options[name].ndim for name in POSITIONS if name in options},
    )


def outputs_of(problem: AttentionProblem, operands: dict[str, Any]) -> dict[str, OutputSpec]:
    packed = (problem.heads_q, problem.total_q)
    return {
        "out": OutputSpec((*operands["q"].shape[:-1], problem.head_dim_v), problem.out_dtype),
        "lse": OutputSpec(
            packed if problem.varlen_q else (problem.batch, problem.heads_q, problem.seqlen_q), "float32"
        ),
    }


def key_of(problem: AttentionProblem, arch: str, kernel: str = DECODE) -> DispatchKey:
    """The key of that kernel, whichever the problem would be dispatched to."""
    return dispatch_key(problem, arch, tuple(family for family in FAMILIES if family.name == kernel))


def kernel_of(device: CudaDevice, source: KernelSource) -> Kernel:
    (entry, *_), module = source.entry_points, module_of(source)
    return Kernel(entry, device._modules.function(module, entry))


@functools.cache
def device_of(arch: str = "sm_80", **emulation: Any) -> CudaDevice:
    options = ContextOptions()
    return CudaDevice(0, options, EmulatedApi(arch, EmulationOptions(**emulation), options))


def allocate(shape: tuple[int, ...], dtype: str) -> Any:
    """Device memory as an array of the host, which launches on any device read and write in place."""
    return host_view(device_of().allocate(shape, dtype))


def run(
    case: DecodeCase,
    *,
    arch: str = "sm_80",
    multiprocessors: int = 3,
    planned: bool = True,
    operands: dict[str, Any] | None = None,
    problem: AttentionProblem | None = None,
    kernel: str = DECODE,
    zero: bool = False,
    padding: int = 0,
    **emulation: Any,
) -> tuple[Any, Any]:
    """(out, lse) of the kernels. operands, problem: instead of the case's own. kernel: the one that attends.

    zero: whether the output begins as 0, not as NaN. padding: elements between the rows of q and of the output, which
    are NaN and must stay NaN.
    """
    operands = case.operands() if operands is None else operands
    problem = problem_of(case, operands) if problem is None else problem
    key = key_of(problem, arch, kernel)
    device = device_of(arch, **{"arithmetic": contraction.arithmetic(), **emulation})
    program = program_of(problem, key, Target(multiprocessors, device.encode_tensor_map, lengths_on_host=planned))
    inputs = operands
    if program.split is not None:
        inputs = operands | program.split(operands)
    outputs = outputs_of(problem, operands)
    outputs["out"] = outputs["out"]._replace(zero=zero)
    memory, dim = None, problem.head_dim_v
    if padding:  # the output is an input that kernels write in place, because the device allocates outputs itself
        memory = _spaced((*outputs["out"].shape[:-1], dim + padding), outputs.pop("out").dtype)
        q = _spaced((*operands["q"].shape[:-1], problem.head_dim + padding), problem.dtype)
        q[..., : problem.head_dim] = operands["q"]
        inputs = inputs | {"q": q[..., : problem.head_dim], "out": memory[..., :dim]}
    steps = program.steps(tuple(kernel_of(device, kernel_source(part)) for part in program.keys), NO_VALUES)
    updates = () if memory is None else ("out",)
    results = run_launch(device, Launch(key, inputs, outputs, lambda _: {}, steps, program.scratch, updates))
    if memory is None:
        return results["out"], results["lse"]
    assert np.isnan(memory[..., dim:].astype(np.float32)).all(), "only the rows were written"
    return memory[..., :dim].copy(), results["lse"]


def _spaced(shape: tuple[int, ...], dtype: str) -> Any:
    memory = allocate(shape, dtype)
    memory[...] = np.nan
    return memory


def positions_on_the_device(case: DecodeCase, ranges: int) -> Any:
    """The plan that decode_plan makes, int32 (ranges + 1, 4)."""
    operands = case.operands()
    problem = problem_of(case, operands)
    key = decode_keys(problem, key_of(problem, "sm_80"), planned=False)[0]
    assert key.kernel == PLAN
    outputs = outputs_of(problem, operands) | {
        "plan": OutputSpec((ranges + 1, 4), "int32"),
        "sums": OutputSpec((10_000,), "int64"),
    }

    packed = decode_packer(problem, key, ranges)

    def pack(buffers: Any) -> bytes:
        pointers = {f"{side}_ptrs": buffers["cache_seqlens"]._replace(dtype="uint64") for side in "kv"}
        return packed({**buffers, **(pointers if problem.layout == "pointers" else {})}, NO_VALUES)

    step = Step(kernel_of(device_of(), kernel_source(key)), step_geometry(key, problem, ranges), pack)
    return run_launch(device_of(), Launch(key, operands, outputs, lambda _: {}, (step,)))["plan"]


def check_results(case: DecodeCase, out: Any, lse: Any) -> float:
    """Compare results with the oracle's for packed sequences."""
    k, v, ends_k = case.batch.packed
    q = case.q.reshape(-1, *case.q.shape[-2:])
    if case.rows is None:
        out, lse = out.reshape(len(q), *out.shape[2:]), lse.swapaxes(0, 1).reshape(lse.shape[1], -1)
    options = {name: value for name, value in case.options.items() if name != "num_splits"}
    if "k_positions" in options and "q_positions" not in options:
        positions = own_positions(options["k_positions"], case.batch.lengths.astype(np.int64), np.diff(case.ends))
        options["q_positions"] = np.stack(positions, axis=1)
    if case.tree is not None:
        options["tree_mask"] = case.tree_mask.reshape(-1)
    return check_output(out, lse, q, k, v, cu_seqlens_q=case.ends, cu_seqlens_k=ends_k, repro=repr_of(case), **options)


def repr_of(case: DecodeCase) -> str:
    options = {name: "array" if isinstance(value, np.ndarray) else value for name, value in case.options.items()}
    shape = (case.batch.q.shape, case.batch.q.dtype.name, case.batch.k[0].dtype.name, case.batch.k[0].shape[1:])
    return f"{case.layout} page {case.page_size} q {shape} lengths {case.batch.lengths} rows {case.rows} {options}"


def check(case: DecodeCase, **launch: Any) -> float:
    return check_results(case, *run(case, **launch))
