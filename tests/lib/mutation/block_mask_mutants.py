"""Bugs to seed into block masks; tests/graph/test_block_masks.py and test_packed_block_masks.py run them."""

from __future__ import annotations

from typing import NamedTuple

__all__ = [
    "HOPPER_MUTANTS",
    "MUTANTS",
    "PACKED_MUTANTS",
    "PAGED_MUTANTS",
    "SHOWN_MUTANTS",
    "TURN_MUTANTS",
    "BlockMutant",
]


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
    BlockMutant("all rows read the first block's list", _TILES, "row_begin / BLOCK_MASK_ROWS", "0"),
    BlockMutant(
        "heads read their KV head's list",
        "",
        "at.sequence, at.head, at.row_begin",
        "at.sequence, at.kv_head, at.row_begin",
    ),
    BlockMutant(
        "sequences read the first's list", "", "at.sequence, at.head, at.row_begin", "0, at.head, at.row_begin"
    ),
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

_KERNEL, _SCHEDULE, _CONSUMER, _NONFINITE = "", "hopper/schedule.cuh", "hopper/consumer.cuh", "hopper/nonfinite.cuh"
_HOPPER = "hopper"

HOPPER_MUTANTS = (
    BlockMutant("a block of rows takes the list of the first", _TILES, "row_begin / BLOCK_MASK_ROWS", "0", _HOPPER),
    BlockMutant(
        "Hopper leaves full blocks out", _LIST, "return partial.count + full.count;", "return partial.count;", _HOPPER
    ),
    BlockMutant(
        "heads take their KV head's list",
        _SCHEDULE,
        "mask, sequence, head, row",
        "mask, sequence, kv_head, row",
        _HOPPER,
    ),
    BlockMutant(
        "sequences take the first's list", _SCHEDULE, "mask, sequence, head, row", "mask, 0, head, row", _HOPPER
    ),
    BlockMutant(
        "values come from the next tile",
        _KERNEL,
        "load_values(work, n);\n    n = next;",
        "load_values(work, next);\n    n = next;",
        _HOPPER,
    ),
    BlockMutant("keys are loaded twice", _KERNEL, "load_keys(work, next);", "load_keys(work, n);", _HOPPER),
    BlockMutant(
        "hidden tiles are loaded",
        _SCHEDULE,
        "while (n >= 0 && !seen",
        "while (n >= 0 && false && !seen",
        "hopper, loads",
    ),
    BlockMutant(
        "tiles behind the diagonal are loaded",
        _SCHEDULE,
        "seen_keys(mask, row_begin, row_end())",
        "SeenKeys{0, 0, mask.seqlen_k}",
        "hopper, loads",
    ),
    BlockMutant(
        "the last listed tile is left out",
        _SCHEDULE,
        "return tile_before(keys.count());",
        "return tile_before(keys.count() - 1);",
        _HOPPER,
    ),
    BlockMutant(
        "the first listed tile is left out",
        _SCHEDULE,
        "return n;\n  }\n  // The lists",
        "return n > 0 ? n : -1;\n  }\n  // The lists",
        _HOPPER,
    ),
    BlockMutant(
        "rows without tiles load one",
        _SCHEDULE,
        "return last_tile() >= 0;",
        "return keys.count() >= 0;",
        "hopper, loads",
    ),
    BlockMutant(
        "the last tile is numbered by its place",
        _CONSUMER,
        "first_key = work.first_key(last);",
        "first_key = last * BLOCK_N;",
        "hopper, keys",
    ),
    BlockMutant(
        "further tiles are numbered by their place",
        _KERNEL,
        "const int first_key = work.first_key(n);",
        "const int first_key = n * BLOCK_N;",
        "hopper, keys",
    ),
    BlockMutant(
        "keys behind the last one count",
        _CONSUMER,
        "constexpr bool MASKS = true;",
        "constexpr bool MASKS = false;",
        _HOPPER,
    ),
    BlockMutant(
        "the diagonal is that of the last row",
        _CONSUMER,
        "all_visible(work.row_begin, work",
        "all_visible(work.row_end() - 1, work",
        "hopper, causal",
    ),
    BlockMutant(
        "tensors of keys are read behind their end", _KERNEL, "score<BLOCK_MASK>", "score<false>", "hopper, keys"
    ),
    BlockMutant(
        "consumers wait for keys once too often",
        _KERNEL,
        "mainloop_step(r, rows, next >= 0,",
        "mainloop_step(r, rows, true,",
        _HOPPER,
    ),
    BlockMutant(
        "nonfinite values are looked for in other tiles",
        _NONFINITE,
        "work.keys.at(n / BLOCK_N) * BLOCK_N",
        "n / BLOCK_N * BLOCK_N",
        "hopper, nonfinite",
    ),
)

_TURNS = "turns"

TURN_MUTANTS = (
    BlockMutant("blocks take no turns", _KERNEL, "      begin_turn(params.dq_turns + slot, turn);\n", "", _TURNS),
    BlockMutant("a tile waits for itself", _RING, "keys.at(n) < block", "keys.at(n) <= block", _TURNS),
    BlockMutant("a tile waits for those behind it", _RING, "keys.at(n) < block", "keys.at(n) > block", _TURNS),
    BlockMutant("blocks have one turn", _RING, "before * (BLOCK_MASK_KEYS / BLOCK_N)", "before", "turns, wide"),
    BlockMutant(
        "tiles of a block share a turn", _RING, " + key_begin % BLOCK_MASK_KEYS / BLOCK_N;", ";", "turns, wide"
    ),
    BlockMutant(
        "turns are of the KV head",
        _RING,
        "at.sequence, now.head, now.tile",
        "at.sequence, at.kv_head, now.tile",
        _TURNS,
    ),
    BlockMutant(
        "turns are of the first sequence", _RING, "at.sequence, now.head, now.tile", "0, now.head, now.tile", _TURNS
    ),
    BlockMutant(
        "turns are of the first block of rows",
        _RING,
        "now.tile * BLOCK_M / BLOCK_MASK_ROWS);\n    const int block",
        "0);\n    const int block",
        _TURNS,
    ),
    BlockMutant(
        "turns are of the tile's number",
        _RING,
        "now.tile * BLOCK_M / BLOCK_MASK_ROWS);\n    const int block",
        "now.tile);\n    const int block",
        _TURNS,
    ),
    BlockMutant("lanes do not share what they count", _RING, "apart > 0", "apart > 1", _TURNS),
    BlockMutant(
        "the first listed block is not counted", _RING, "n = lane_id(); n < keys", "n = lane_id() + 1; n < keys", _TURNS
    ),
    BlockMutant(
        "full blocks take no turns", _RING, "n < keys.count(); n += 32", "n < keys.partial.count; n += 32", _TURNS
    ),
    BlockMutant(
        "counts of full blocks of keys are the partial ones'",
        "common/score_mod.cuh",
        "(given.t6)",
        "(given.t4)",
        _TURNS,
    ),
)

_SOFTMAX, _SHOWN = "hopper/softmax.cuh", "hopper, shown"

SHOWN_MUTANTS = (
    BlockMutant(
        "the last partial block counts as full", _LIST, "n / BLOCK_TILES >= list", "n / BLOCK_TILES + 1 >= list", _SHOWN
    ),
    BlockMutant(
        "the first full block counts as partial",
        _LIST,
        "BLOCK_TILES >= list.partial",
        "BLOCK_TILES > list.partial",
        _SHOWN,
    ),
    BlockMutant("tiles are counted as blocks", _LIST, "n / BLOCK_TILES >= list", "n >= list", _SHOWN),
    BlockMutant("no block is full", _LIST, "n / BLOCK_TILES >= list.partial.count", "false", _SHOWN),
    BlockMutant("every block is full", _LIST, "n / BLOCK_TILES >= list.partial.count", "true", _SHOWN),
    BlockMutant(
        "the last tile has the mask", _CONSUMER, "first_key, work.is_full(last));", "first_key, false);", _SHOWN
    ),
    BlockMutant(
        "a tile is as full as the next one",
        _KERNEL,
        "masked, work.is_full(n));",
        "masked, work.is_full(next));",
        _SHOWN,
    ),
    BlockMutant("shown products are not scaled", _SOFTMAX, "shown(s[i] * rows.scale", "shown(s[i]", _SHOWN),
    BlockMutant(
        "shown scores are of the first row", _SOFTMAX, "int(row[i / 2 % 2]), key)", "int(row[0]), key)", _SHOWN
    ),
    BlockMutant(
        "shown keys are eight apart too early",
        _SOFTMAX,
        "i / 4 * 8 + i % 2;\n      if (LAST)",
        "i / 2 * 8 + i % 2;\n      if (LAST)",
        _SHOWN,
    ),
    BlockMutant(
        "neighbours are one shown key",
        _SOFTMAX,
        "i / 4 * 8 + i % 2;\n      if (LAST)",
        "i / 4 * 8;\n      if (LAST)",
        _SHOWN,
    ),
    BlockMutant("shown scores are masked after all", _SOFTMAX, "    return;\n  }\n#endif", "  }\n#endif", _SHOWN),
)

_FROM_THE_FIRST = "(params.cu_seqlens_q[sequence] + row_begin) / BLOCK_MASK_ROWS"

PACKED_MUTANTS = (
    BlockMutant(
        "rows are counted from the first sequence", _TILES, "row_begin / BLOCK_MASK_ROWS", _FROM_THE_FIRST, "packed"
    ),
    BlockMutant("lists are the first sequence's", "", "at.sequence, at.head, at.row", "0, at.head, at.row", "packed"),
    BlockMutant(
        "tiles behind the longest sequence are loaded",
        "",
        "* BLOCK_N < keys.end",
        "* BLOCK_N < 1 << 30",
        "packed, loads",
    ),
    BlockMutant("tiles behind the sequence are loaded", "", "* BLOCK_N < keys.end", "* BLOCK_N < 520", "packed, loads"),
    BlockMutant(
        "rows behind the lists read on", _TILES, "row_begin >= params.seqlen_q", "row_begin < 0", "packed, longer"
    ),
    BlockMutant(
        "the last block of rows is behind the lists",
        _TILES,
        "row_begin >= params.seqlen_q",
        "row_begin + BLOCK_M >= params.seqlen_q",
        "packed",
    ),
    BlockMutant(
        "Hopper counts rows from the first sequence",
        _TILES,
        "row_begin / BLOCK_MASK_ROWS",
        _FROM_THE_FIRST,
        "packed, hopper",
    ),
    BlockMutant(
        "Hopper reads the first sequence's lists",
        _SCHEDULE,
        "mask, sequence, head, row",
        "mask, 0, head, row",
        "packed, hopper",
    ),
    BlockMutant(
        "Hopper reads behind the lists",
        _TILES,
        "row_begin >= params.seqlen_q",
        "row_begin < 0",
        "packed, hopper longer",
    ),
    BlockMutant(
        "Hopper loads tiles behind the sequence",
        _SCHEDULE,
        "while (n >= 0 && !seen",
        "while (n >= 0 && false && !seen",
        "packed, hopper loads",
    ),
    BlockMutant(
        "gradients count keys from the first sequence",
        _RING,
        "at.sequence, head, key_begin / BLOCK_MASK_KEYS",
        "at.sequence, head, (int(at.k_start) + key_begin) / BLOCK_MASK_KEYS",
        "packed, backward",
    ),
    BlockMutant(
        "gradients read the lists of the first sequence",
        _RING,
        "at.sequence, head, key",
        "0, head, key",
        "packed, backward",
    ),
    BlockMutant(
        "gradients read behind the lists",
        _RING,
        "key_begin >= params.forward.seqlen_k",
        "key_begin < 0",
        "packed, backward longer",
    ),
    BlockMutant(
        "gradients load rows of the next sequence",
        _RING,
        "now.number < count && (!BLOCK_MASK || now.tile * BLOCK_M < at.seqlen_q)",
        "now.number < count",
        "packed, backward loads",
    ),
    BlockMutant(
        "turns are counted in the lists of the first sequence",
        _RING,
        "at.sequence, now.head, now.tile",
        "0, now.head, now.tile",
        "packed, turns",
    ),
)

_PAGES = "pages, hopper"

PAGED_MUTANTS = (
    BlockMutant("a cache's rows take the lists of the first block", _TILES, "row_begin / BLOCK_MASK_ROWS", "0", _PAGES),
    BlockMutant(
        "a cache's sequences take the lists of the first",
        _SCHEDULE,
        "mask, sequence, head, row",
        "mask, 0, head, row",
        _PAGES,
    ),
    BlockMutant(
        "heads over a cache take the lists of their KV head",
        _SCHEDULE,
        "mask, sequence, head, row",
        "mask, sequence, kv_head, row",
        _PAGES,
    ),
    BlockMutant("pages are found by the place in the list", _SCHEDULE, "ptx::warp_uniform(keys.at(n))", "n", _PAGES),
    BlockMutant(
        "pages are those of the first sequence",
        _SCHEDULE,
        "work.sequence * schedule.block_table_stride",
        "0 * schedule.block_table_stride",
        _PAGES,
    ),
    BlockMutant("blocks are numbers of pages", _SCHEDULE, "pages[key / PAGE_SIZE]", "key / PAGE_SIZE", _PAGES),
    BlockMutant(
        "hidden pages are loaded",
        _SCHEDULE,
        "while (n >= 0 && !seen",
        "while (n >= 0 && false && !seen",
        "pages, hopper loads",
    ),
    BlockMutant(
        "the last listed block of a cache is left out",
        _SCHEDULE,
        "return tile_before(keys.count());",
        "return tile_before(keys.count() - 1);",
        _PAGES,
    ),
    BlockMutant(
        "values of a cache come from the next tile",
        _KERNEL,
        "load_values(work, n);\n    n = next;",
        "load_values(work, next);\n    n = next;",
        _PAGES,
    ),
    BlockMutant("keys of a cache are loaded twice", _KERNEL, "load_keys(work, next);", "load_keys(work, n);", _PAGES),
    BlockMutant(
        "full blocks of a cache are left out",
        _LIST,
        "return partial.count + full.count;",
        "return partial.count;",
        _PAGES,
    ),
    BlockMutant(
        "keys behind a cache's end count",
        _CONSUMER,
        "constexpr bool MASKS = true;",
        "constexpr bool MASKS = false;",
        _PAGES,
    ),
    BlockMutant(
        "rows behind the lists of a cache are read",
        _TILES,
        "row_begin >= params.seqlen_q",
        "row_begin < 0",
        _PAGES,
    ),
)
