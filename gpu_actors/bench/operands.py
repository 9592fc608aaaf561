"""The arrays of a case, and the requests with them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np

from gpu_actors.bench.arrays import Arrays
from gpu_actors.bench.cases import Case
from gpu_actors.handles.gpu_context import GpuContext
from gpu_actors.runtime.reply import Reply

__all__ = ["OperandSet", "make_operands", "submit"]

OperandSet: TypeAlias = dict[str, Any]
"""q, k, v, and for a backward dout, out and lse; for a decode q, k_cache, v_cache, block_table, cache_seqlens and, on
the host, pages."""

_POISON_PAGE = 2_147_480_000


def make_operands(case: Case, arrays: Arrays, context: GpuContext, seed: int) -> OperandSet:
    """Random operands. A backward's out and lse come from the context's forward, whose errors are raised."""
    if case.kind == "decode":
        return _paged(case, arrays, seed)
    shapes = {"q": case.q_shape, "k": case.kv_shape, "v": case.kv_shape}
    operands: OperandSet = {name: arrays.random(shape, case.dtype) for name, shape in shapes.items()}
    if case.kind == "backward":
        operands["dout"] = arrays.random(case.q_shape, case.dtype)
        inputs = (operands["q"], operands["k"], operands["v"])
        answer = context.flash_attn.forward(*inputs, **case.options(), return_lse=True).result()
        operands |= {"out": answer.out, "lse": answer.lse}
    return operands


def submit(case: Case, context: GpuContext, operands: OperandSet) -> Reply[Any]:
    return _SUBMIT[case.kind](case, context, operands)


def _forward(case: Case, context: GpuContext, one: OperandSet) -> Reply[Any]:
    return context.flash_attn.forward(one["q"], one["k"], one["v"], **case.options())


def _backward(case: Case, context: GpuContext, one: OperandSet) -> Reply[Any]:
    from gpu_actors.attention.requests import FlashBackward

    names = ("q", "k", "v", "dout", "out", "lse")
    operands = {name: one[name] for name in names}
    return context.flash_attn.submit(FlashBackward(**operands, **case.options(), deterministic=case.deterministic))


def _decode(case: Case, context: GpuContext, one: OperandSet) -> Reply[Any]:
    from gpu_actors.attention.requests import PagedForward

    names = ("q", "k_cache", "v_cache", "block_table", "cache_seqlens")
    return context.flash_attn.submit(PagedForward(**{name: one[name] for name in names}))


_SUBMIT: dict[str, Callable[[Case, GpuContext, OperandSet], Reply[Any]]] = {
    "forward": _forward,
    "backward": _backward,
    "decode": _decode,
}


def _paged(case: Case, arrays: Arrays, seed: int) -> OperandSet:
    """A pool of the exact size, with each sequence's pages scattered over it."""
    rng = np.random.default_rng(seed)
    pages = rng.permutation(case.batch * case.pages).astype(np.int32).reshape(case.batch, case.pages)
    unused = np.full((case.batch, 1), _POISON_PAGE, np.int32)
    pool = (case.batch * case.pages, case.page_size, case.kv_heads, case.head_dim)
    return {
        "q": arrays.random(case.q_shape, case.dtype),
        "k_cache": arrays.random(pool, case.dtype),
        "v_cache": arrays.random(pool, case.dtype),
        "block_table": arrays.integers(np.concatenate([pages, unused], axis=1)),
        "cache_seqlens": arrays.integers(np.full(case.batch, case.keys)),
        "pages": pages,
    }
