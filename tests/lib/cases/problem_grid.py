"""The grid of problems that attention libraries are tested on: head dims, masks, groups of heads, pages, new rows."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias, TypeVar

import numpy as np
from cases.cached_batches import random_batch
from cases.decode_requests import request_of, result_of
from cases.finite_masks import hide_keys
from cases.poison import poison_unseen, poison_unseen_backward
from emulated.decode import DecodeCase, check_results

import gpu_actors as ga
from gpu_actors.reference import attention_forward
from gpu_actors.testing import ForwardCase, check_gradients, check_output, random_backward, random_forward

__all__ = ["ARCHES", "DIMS", "GRIDS", "Cell", "answer", "cells", "sample"]

Kind: TypeAlias = Literal["forward", "backward", "decode"]
T = TypeVar("T")

DIMS = (32, 40, 48, 64, 72, 80, 96, 104, 112, 128, 160, 192, 224, 256, 512)
ARCHES = ("sm_80", "sm_90a")
# True stands for an array that fits the problem.
MASKS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window_size": (17, 0)},
    "band": {"window_size": (23, 5)},
    "sink-tokens": {"window_size": (13, 0), "sink_tokens": 3},
    "chunks": {"causal": True, "attention_chunk": 32},
    "alibi": {"causal": True, "alibi_slopes": True},
    "softcap": {"causal": True, "softcap": 15.0},
    "sinks": {"causal": True, "sinks": True},
    "hidden": {"bias": True},
}
GROUPS = (1, 2, 4, 6, 8, 16)
_DTYPES = ("float16", "bfloat16")
# (seqlen_q, seqlen_k)
_LENGTHS = ((1, 1), (64, 64), (65, 33), (33, 97), (17, 130), (113, 67), (128, 128), (1, 150))
_ATTENTION: dict[str, Sequence[Any]] = {
    "dim": DIMS,
    "mask": tuple(MASKS),
    "group": GROUPS,
    "layout": ("dense", "varlen"),
    "rows": (0,),
    "dtype": _DTYPES,
}
GRIDS: dict[Kind, dict[str, Sequence[Any]]] = {
    "forward": _ATTENTION,
    "backward": _ATTENTION,
    "decode": _ATTENTION | {"layout": (0, 1, 3, 5, 8, 16, 64, 128, 256), "rows": tuple(range(1, 17))},
}


class Cell(NamedTuple):
    """group: q heads a KV head. layout: for decode the page size, 0 for a dense cache. rows: for decode, new rows."""

    kind: Kind
    dim: int
    mask: str
    group: int
    layout: Any
    rows: int
    dtype: str


def cells(kind: Kind, dim: int) -> Iterator[tuple[int, Cell]]:
    """Every cell of that head dim, with a seed. Cells of decode take the dtypes in turn."""
    grid = GRIDS[kind] | {"dim": (dim,)} | ({"dtype": ("",)} if kind == "decode" else {})
    for seed, values in enumerate(itertools.product(*grid.values())):
        cell = Cell(kind, *values)
        yield seed, cell if cell.dtype else cell._replace(dtype=_DTYPES[seed % 2])


def sample(kind: Kind, each: int, seed: int = 0) -> list[tuple[int, str, Cell]]:
    """(seed, arch, cell): ``each`` of each head dim and mask. The values of all else are equally frequent."""
    rng = np.random.default_rng(seed)
    grid = GRIDS[kind]
    strata = list(itertools.product(grid["dim"], grid["mask"])) * each
    others = [_balanced(grid[name], len(strata), rng) for name in ("group", "layout", "rows", "dtype")]
    arches = _balanced(ARCHES, len(strata), rng)
    drawn = zip(strata, arches, *others, strict=True)
    return [(number, arch, Cell(kind, *stratum, *rest)) for number, (stratum, arch, *rest) in enumerate(drawn)]


def _balanced(values: Sequence[T], count: int, rng: np.random.Generator) -> list[T]:
    repeated = [values[index % len(values)] for index in range(count)]
    return [repeated[index] for index in rng.permutation(count)]


def answer(ctx: ga.GpuContext, cell: Cell, seed: int) -> str:
    """Ask a context and compare with the oracle by the tolerance rule. Returns the kernel that answered.

    Keys that no row sees (not for decode) and unused rows of pages and caches are NaN.
    """
    if cell.kind == "decode":
        case = _decode(cell, seed)
        check_results(case, *result_of(ctx, case))
        return ctx.flash_attn.inspect_key(request_of(case)).kernel
    heads = _heads(cell.group)
    lengths = _LENGTHS[seed % len(_LENGTHS)]
    shape: dict[str, Any] = {
        "dtype": cell.dtype,
        "varlen": cell.layout == "varlen",
        "batch": 3 if cell.layout == "varlen" else 2,
        "seqlens": lengths,
        "heads": heads,
        "head_dim": cell.dim,
        "features": (),
    }
    options = _options(cell, seed, heads[0], *lengths)
    if cell.kind == "forward":
        return _forward(ctx, random_forward(seed, **shape), options)
    return _backward(ctx, seed, shape, options)


def _heads(group: int) -> tuple[int, int]:
    heads_kv = 2 if group <= 4 else 1
    return group * heads_kv, heads_kv


def _options(cell: Cell, seed: int, heads: int, rows: int, keys: int) -> dict[str, Any]:
    """rows, keys: of the longest sequence. A bias hides keys by numbers from frameworks' masks."""
    rng = np.random.default_rng([seed, 1])
    bias = rng.standard_normal((1, heads, rows, keys)).astype(np.float32)
    arrays = {
        "bias": hide_keys(bias, seed, finite=cell.kind == "backward"),  # the NaN of a poisoned q plus -inf is NaN
        "alibi_slopes": rng.uniform(0.01, 0.5, heads).astype(np.float32),
        "sinks": rng.standard_normal(heads).astype(np.float32),
    }
    return {
        name: arrays[name] if value is True and name in arrays else value for name, value in MASKS[cell.mask].items()
    }


def _decode(cell: Cell, seed: int) -> DecodeCase:
    """Three sequences, of which one may be empty. In every third problem their numbers of rows differ."""
    rng = np.random.default_rng([seed, 2])
    page = cell.layout or 16
    lengths = [
        int(rng.integers(0, 2)) * cell.rows,
        cell.rows + int(rng.integers(0, 150)),
        page * int(rng.integers(1, 3)),
    ]
    heads = _heads(cell.group)
    batch = random_batch(seed, lengths, rows=cell.rows, heads=heads, dim=cell.dim, dtype=cell.dtype)
    rows = None
    if seed % 3 == 0:
        rows = [0, int(rng.integers(1, cell.rows + 1)), cell.rows]
    layout = "paged" if cell.layout else "cache"
    options = _options(cell, seed, heads[0], cell.rows, max(lengths))
    return DecodeCase(batch, layout, page, rows, options=options)


def _forward(ctx: ga.GpuContext, case: ForwardCase, options: dict[str, Any]) -> str:
    case = poison_unseen(dataclasses.replace(case, options={**case.options, **options}))
    request = ga.FlashForward(*case.inputs, **case.options, return_lse=True)
    result = ctx.flash_attn.submit(request).result(120)
    check_output(result.out, result.lse, *case.inputs, repro=case.repro, **case.options)
    return ctx.flash_attn.inspect_key(request).kernel


def _backward(ctx: ga.GpuContext, seed: int, shape: dict[str, Any], options: dict[str, Any]) -> str:
    drawn = random_backward(seed, **shape)
    forward = dataclasses.replace(drawn.forward, options={**drawn.options, **options})
    result = attention_forward(*forward.inputs, **forward.options)
    out, lse = result.out.astype(drawn.out.dtype), result.lse.astype(np.float32)
    case = dataclasses.replace(drawn, forward=forward, out=out, lse=lse)
    poisoned = poison_unseen_backward(case)
    named = dict(zip(("dout", "q", "k", "v", "out", "lse"), poisoned.inputs, strict=True))
    request = ga.FlashBackward(**named, **poisoned.options)
    found = ctx.flash_attn.submit(request).result(120)
    check_gradients(found, *case.arguments, out=out, lse=lse, repro=case.repro, **case.options)
    return ctx.flash_attn.inspect_key(request).kernel
