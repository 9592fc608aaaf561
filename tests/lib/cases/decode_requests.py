"""Decode cases as requests of a context."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from emulated.decode import DecodeCase

import gpu_actors as ga

__all__ = ["request_of", "result_of"]

Move = Callable[[Any], Any]


def request_of(case: DecodeCase, move: Move = lambda array: array) -> ga.PagedForward | ga.BatchedDecode:
    """The request of a case. move: copies each array to where the request reads it."""
    operands = {name: move(array) for name, array in case.operands().items()}
    options = {
        name: move(value) if isinstance(value, np.ndarray) else value
        for name, value in case.options.items()
        if name != "causal" or case.layout != "pointers"
    }
    if case.layout == "pointers":
        k, v = ([operands[f"{side}_cache.{index}"] for index in range(len(case.batch.k))] for side in "kv")
        lengths = operands["cache_seqlens"]
        return ga.BatchedDecode(
            q=operands["q"][:, 0], k_caches=k, v_caches=v, seq_lens=lengths, return_lse=True, **options
        )
    named = ("q", "k_cache", "v_cache", "block_table", "cache_seqlens", "cu_seqlens_q", "tree_mask")
    named += ("cache_leftpad", "cache_batch_idx")
    given = {name: operands.get(name) for name in named}
    longest = {} if case.rows is None else {"max_seqlen_q": case.batch.q.shape[1]}
    return ga.PagedForward(**given, **longest, return_lse=True, **{"causal": False, **options})


def result_of(context: Any, case: DecodeCase, move: Move = lambda array: array) -> tuple[Any, Any]:
    """(out, lse), with an axis of rows."""
    answer = context.flash_attn.submit(request_of(case, move)).result(120)
    if case.layout == "pointers":
        return answer.out[:, None], answer.lse[..., None]
    return answer.out, answer.lse
