"""Bugs to seed into decode_simple and its merge; decode_simple.py runs them."""

from __future__ import annotations

from mutation.forward_mutants import Mutant

__all__ = ["DEFECTS", "MUTANTS"]

_SIMPLE, _COMBINE, _OUTPUT = (
    "decode/decode_simple.cu",
    "decode/decode_simple_combine.cu",
    "decode/simple_output.cuh",
)


def _bug(name: str, old: str, new: str, *probes: str, file: str = _SIMPLE) -> Mutant:
    return Mutant(name, "decode_simple", file, old, new, probes or ("plain",))


# What kernels over caches have shipped with.
DEFECTS = (
    _bug(
        "pieces are merged without their weights",
        "add_weighted(sum, weight,",
        "add_weighted(sum, Real(1),",
        file=_COMBINE,
    ),
    _bug("keys that no row sees are read", "keys.has(key) ? source.row(rows, key) : nullptr", "source.row(rows, key)"),
    _bug("a row without keys divides by 0", "l == 0 ? Real(0) : sum * factor", "sum * factor", file=_OUTPUT),
    _bug("the old maximum is read after it was overwritten", "exp_of(m[r] - base)", "exp_of(maximum - base)")._replace(
        file="common/weighted_rows.cuh"
    ),
)

MUTANTS = (
    *DEFECTS,
    _bug("the first row of a tile is another row", "entry.packed_begin + first_row + r)", "entry.packed_begin + r)"),
    _bug(
        "every head reads the first one's query",
        "packed / ratio, kv_head * ratio + packed % ratio);",
        "packed / ratio, kv_head);",
    ),
    _bug(
        "rows of a head lie as those of all heads",
        "entry.lengths.q_start + packed / ratio,",
        "entry.lengths.q_start + packed,",
        "rows",
    ),
    _bug(
        "the KV head is left out of scores",
        "kv_head * ratio + packed % ratio, kv_head, entry",
        "packed % ratio, kv_head, entry",
        "alibi",
    ),
    _bug("sequences in front are left out", "entry.lengths.q_start + row.row", "row.row", "varlen tree"),
    _bug("the tree names all keys", "fresh = key - entry.first_new()", "fresh = key", "tree"),
    _bug("the tree is not looked at", "!TREE || fresh < 0 ||", "TREE ||", "tree"),
    _bug("positions are indices", "  row.score.positions = entry.mask.positions;\n", "", "last keys"),
    _bug("a column of q and k is left out", "column < WIDTH; column += 32", "column < WIDTH - 1; column += 32"),
    _bug(
        "operands are not rounded",
        "round_operand<COMPUTE_BITS>(Real(to_real(from[column])))",
        "Real(to_real(from[column]))",
        "tf32",
    ),
    _bug(
        "K overwrites V that is still read",
        "    __syncthreads();  // all have read the previous V\n",
        "",
        "wide",
        "plain",
    ),
    _bug(
        "V overwrites K that is still read",
        "    __syncthreads();  // all have read K and written P\n",
        "",
        "wide",
        "plain",
    ),
    _bug(
        "K is read before it has come",
        "source.k, keys, key_begin);\n    __syncthreads();\n",
        "source.k, keys, key_begin);\n",
    ),
    _bug(
        "V is read before it has come",
        "source.v, keys, key_begin);\n    __syncthreads();\n",
        "source.v, keys, key_begin);\n",
    ),
    _bug(
        "values are those of keys",
        "load_cached<HEAD_DIM_V>(kv_tile, source, source.v",
        "load_cached<HEAD_DIM_V>(kv_tile, source, source.k",
    ),
    _bug(
        "masks are left out",
        "packed[r].exists && (unmasked || packed[r].visible(entry, key))",
        "packed[r].exists",
        "rows",
    ),
    _bug(
        "every tile is seen whole",
        "const bool unmasked = all_visible(entry, key_begin);",
        "const bool unmasked = true;",
        "rows",
    ),
    _bug("tiles are those of an item without sink tokens", "entry.tiles.at(n) * BLOCK_N", "n * BLOCK_N", "window"),
    _bug("the second row of a half-warp is the first", "packed[r].row, key)", "packed[0].row, key)", "alibi rows"),
    _bug("rows past the end are stored", "    if (!packed[r].exists) continue;\n", "", "varlen"),
    _bug(
        "rows past the end speak for the half-warp",
        "const bool has_rows = entry",
        "const bool has_rows = 1 + entry",
        "plain",
    )._replace(old="if (has_rows) add_values", new="if (!has_rows) add_values"),
    _bug(
        "values are not descaled",
        "* out_scale;\n        if (column < HEAD_DIM_V) to.out",
        ";\n        if (column < HEAD_DIM_V) to.out",
        "fp8",
    ),
    _bug("pieces are not descaled", "/ l * out_scale;", "/ l;", "fp8 pinned"),
    _bug("a piece lacks its maximum", "= {rows.m[r], l};", "= {Real(0), l};"),
    _bug("a piece's sum is no average", "rows.o[r][c] / l * out_scale", "rows.o[r][c] * out_scale", "pinned"),
    _bug("a last column is left out", "if (column < HEAD_DIM_V) to.out", "if (column < HEAD_DIM_V - 1) to.out", "one"),
    _bug(
        "a last column of pieces is left out",
        "if (column < HEAD_DIM_V) partial",
        "if (column < HEAD_DIM_V - 1) partial",
    ),
    _bug(
        "every piece has the first one's slot",
        "int64_t(blockIdx.x) * BLOCK_M + row",
        "int64_t(blockIdx.x) / params.splits * params.splits * BLOCK_M + row",
    ),
    _bug("pieces begin where the first does", "piece_begin(piece, pieces, count), piece", "0, piece"),
    _bug("a piece's end is the item's", "piece_begin(piece + 1, pieces, count), pieces", "count, pieces"),
    _bug("every piece is all of its item", "count), pieces == 1,", "count), true,"),
    _bug("broken lengths are read", "  if (entry.lengths.broken) {", "  if (false) {", "broken"),
    _bug(
        "only the first tile of a broken sequence is answered",
        "last ? all : entry.packed_end",
        "entry.packed_begin",
        "broken",
    ),
    _bug("the heads are one", "item % params.attention.heads_kv", "0"),
    # The merge
    _bug(
        "the first piece is left out",
        "for (int piece = 0; piece < pieces; piece++) {",
        "for (int piece = 1; piece < pieces; piece++) {",
        file=_COMBINE,
    ),
    _bug(
        "the largest maximum is the first",
        "top = max_of(top, sums[piece * BLOCK_M].m)",
        "top = sums[0].m",
        "steep",
        file=_COMBINE,
    ),
    _bug("pieces of empty rows are no numbers", "top == -INFINITY ? Real(0) : top", "top", "early rows", file=_COMBINE),
    _bug(
        "pieces lie as rows do",
        "values[int64_t(piece) * BLOCK_M * HEAD_DIM_V]",
        "values[int64_t(piece) * HEAD_DIM_V]",
        file=_COMBINE,
    ),
    _bug(
        "sums of pieces lie as rows do",
        "exp_of(sums[piece * BLOCK_M].m - base)",
        "exp_of(sums[piece].m - base)",
        "rows",
        file=_COMBINE,
    ),
    _bug("the merge has another head", "item % params.attention.heads_kv", "0", file=_COMBINE),
    _bug(
        "items have as many slots as pieces", "int64_t(item) * params.splits", "int64_t(item) * pieces", file=_COMBINE
    ),
    _bug("what was written is merged", "|| pieces == 1", "", file=_COMBINE),
    _bug(
        "rows past the end are merged",
        "entry.packed_end - entry.packed_begin",
        "BLOCK_M",
        "varlen pinned",
        file=_COMBINE,
    ),
    # What both share
    _bug("the sink is counted in each piece", "max_of(m, sink)", "max_of(m, sink) + 1", "sinks", file=_OUTPUT)._replace(
        old="l = l * factor + exp_of(sink - top);", new="l = l * factor + 2 * exp_of(sink - top);"
    ),
    _bug("the sink is left out", "l = l * factor + exp_of(sink - top);", "l = l * factor;", "sinks", file=_OUTPUT),
    _bug("sums are not brought to the sink's maximum", "      factor = exp_of(m - top);\n", "", "sinks", file=_OUTPUT),
    _bug("the LSE is that without the sink", "      m = top;\n", "", "sinks", file=_OUTPUT),
    _bug(
        "every head has the first one's sink",
        "sink_logit(params.attention, head)",
        "sink_logit(params.attention, 0)",
        "sinks",
        file=_OUTPUT,
    ),
    _bug("an address is of 16 bytes", "% CACHE_ALIGNMENT != 0", "% 16 != 0", "pointers", file="decode/plan.cuh"),
    _bug(
        "strides are chunks of 16 bytes",
        "CHUNK = CACHE_ALIGNMENT / sizeof(KV_ELEMENT)",
        "CHUNK = 16 / sizeof(KV_ELEMENT)",
        "odd",
        file="decode/source.cuh",
    ),
)
