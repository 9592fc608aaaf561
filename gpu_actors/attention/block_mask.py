"""BlockMask: the blocks of keys that each block of rows sees, as the lists of torch's BlockMask."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

__all__ = ["LISTS", "BlockMask"]

Array: TypeAlias = Any

LISTS = tuple(
    f"{full}{axis}_{what}" for axis in ("kv", "q") for full in ("", "full_") for what in ("num_blocks", "indices")
)
"""The names of the lists, counts before indices: the lists of rows come first, then the transposed lists."""


@dataclass(frozen=True, slots=True, eq=False)
class BlockMask:
    """A block mask of a request: kernels neither load nor multiply blocks that are not listed.

    With R blocks of rows and C blocks of keys in the longest sequence,

    kv_num_blocks, kv_indices: int32 (batch or 1, heads_q or 1, R) and (.., R, C), or larger: for each block of rows,
        the number of blocks of keys that it sees, and their indices. Blocks are counted within the sequence, from its
        first row and first key. Indices are 0 to C - 1, each listed once. Blocks after a sequence's end are ignored.
    full_kv_num_blocks, full_kv_indices: the same for further blocks, in which ``mask_mod`` shows every key.
    q_num_blocks, q_indices, full_q_num_blocks, full_q_indices: the transposed lists, (.., C) and (.., C, R), which
        gradients read. Deterministic gradients read both kinds: if these name different blocks the launch never ends,
        so lists on the host are checked.
    block_size: rows and keys of a block, multiples of 128.
    mask_mod: a function of ``(b, h, q_idx, kv_idx)`` that returns the bool tensor of `OperationGraph.mask_mod`: which
        keys of listed blocks count. It is called when a request is planned, and must return the same each time. A
        device in another process imports it by name, so it must then be a function of a module, not a lambda. None: all
        keys count.
    """

    kv_num_blocks: Array
    kv_indices: Array
    full_kv_num_blocks: Array | None = None
    full_kv_indices: Array | None = None
    q_num_blocks: Array | None = None
    q_indices: Array | None = None
    full_q_num_blocks: Array | None = None
    full_q_indices: Array | None = None
    block_size: tuple[int, int] = (128, 128)
    mask_mod: Callable[..., Any] | None = None
