"""Bugs to seed into block masks; tests/graph/test_block_masks.py runs them."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["MUTANTS", "BlockMutant"]


class BlockMutant(NamedTuple):
    """A bug. old: text of `file`, "" for the kernel itself, that is replaced by `new`. probe: what must show it."""

    name: str
    file: str
    old: str
    new: str
    probe: str = "forward"


_LIST, _TILES, _RING = "common/block_list.cuh", "common/key_tiles.cuh", "backward/ring.cuh"
_BACK = "backward"

MUTANTS = (
    BlockMutant("full blocks are left out", _LIST, "return partial.count + full.count;", "return partial.count;"),
    BlockMutant("partial blocks are left out", _LIST, "n < partial.count ?", "n < 0 ?"),
    BlockMutant(
        "full blocks come from the partial list", _LIST, "full.indices[(n - partial.count)", "partial.indices[n"
    ),
    BlockMutant("a block has one tile", _LIST, "list.count() * BLOCK_TILES", "list.count()"),
    BlockMutant("tiles of a block repeat the first", _LIST, " + n % BLOCK_TILES", ""),
    BlockMutant("blocks are as far apart as tiles", _LIST, ") * BLOCK_TILES + n", ") + n"),
    BlockMutant("all rows read the first block's list", _TILES, "at.row_begin / BLOCK_MASK_ROWS", "0"),
    BlockMutant("heads read their KV head's list", _TILES, "at.sequence, at.head", "at.sequence, at.kv_head"),
    BlockMutant("sequences read the first's list", _TILES, "at.sequence, at.head", "0, at.head"),
    BlockMutant("counts are those of the first head", "common/score_mod.cuh", "head * given.t1_h", "0 * given.t1_h"),
    BlockMutant("counts of full blocks are the partial ones'", "common/score_mod.cuh", "(given.t2)", "(given.t0)"),
    BlockMutant("all keys read the first block's list", _RING, "key_begin / BLOCK_MASK_KEYS", "0", _BACK),
    BlockMutant(
        "gradients read the KV head's list", _RING, "at.sequence, head, key", "at.sequence, at.kv_head, key", _BACK
    ),
    BlockMutant("gradients read the first sequence's list", _RING, "at.sequence, head, key", "0, head, key", _BACK),
    BlockMutant(
        "one query head counts",
        "",
        "head < (at.kv_head + 1) * heads; head++",
        "head < at.kv_head * heads + 1; head++",
        _BACK,
    ),
    BlockMutant("places count on through the heads", _RING, "place -= tiles.count();", "", _BACK),
    BlockMutant(
        "every step is of the first head",
        _RING,
        "return {now.number + 1, head, tiles",
        "return {now.number + 1, at.kv_head * heads, tiles",
        _BACK,
    ),
    BlockMutant("the first step is left out", _RING, "const Step none{-1, 0, 0};", "const Step none{0, 0, 0};", _BACK),
    BlockMutant(
        "tiles behind the rows are multiplied",
        _RING,
        "now.number >= 0 && (!BLOCK_MASK || now.tile * BLOCK_M < at.seqlen_q)",
        "now.number >= 0",
        _BACK,
    ),
)
