"""BlockMask: which blocks of keys each block of rows sees, with the lists of torch's BlockMask."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

__all__ = ["LISTS", "BlockMask"]

Array: TypeAlias = Any

LISTS = tuple(
    f"{full}{axis}_{what}" for axis in ("kv", "q") for full in ("", "full_") for what in ("num_blocks", "indices")
)
"""The names of the lists, each counts and then indices: those of rows, and then the transposed ones."""


@dataclass(frozen=True, slots=True, eq=False)
class BlockMask:
    """A block mask of a request: kernels neither load nor multiply blocks that are not listed.

    With R blocks of rows and C blocks of keys in the longest sequence,

    kv_num_blocks, kv_indices: int32 (batch or 1, heads_q or 1, R) and (.., R, C), or larger: of each block of rows how
        many blocks of keys it sees, and their numbers. They are the sequence's own, counted from its first row and its
        first key, from 0 to C - 1, each listed once. What is listed behind the end of a sequence is passed over.
    full_kv_num_blocks, full_kv_indices: likewise, further blocks, in which ``mask_mod`` shows every key.
    q_num_blocks, q_indices, full_q_num_blocks, full_q_indices: the transposed lists, (.., C) and (.., C, R), which
        gradients read. Deterministic ones read both: a launch never ends whose lists name different blocks, so those on
        the host are checked.
    block_size: rows and keys of a block, multiples of 128.
    mask_mod: ``(b, h, q_idx, kv_idx)`` to the bool tensor of `OperationGraph.mask_mod`: which keys of listed blocks
        count. It is called when a request is planned, and must give the same each time. A device in another process
        finds it by its name, so there it is a function of a module, and no lambda. None: all of them count.
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
