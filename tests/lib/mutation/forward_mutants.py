"""Bugs to seed into the forward kernels; mutation.py runs them."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["DEFECTS", "FUSED_CORRECTION", "MUTANTS", "Mutant"]


class Mutant(NamedTuple):
    """A bug. old: text of `file` that is replaced by `new`, wherever it occurs. probes: names, tried in order."""

    name: str
    kernel: str
    file: str
    old: str
    new: str
    probes: tuple[str, ...] = ("plain",)


def _mma(name: str, file: str, old: str, new: str, *probes: str) -> Mutant:
    return Mutant(name, "forward_mma", file, old, new, probes or ("plain",))


def _simple(name: str, old: str, new: str, *probes: str) -> Mutant:
    return Mutant(name, "forward_simple", "forward/forward_simple.cu", old, new, probes or ("plain",))


def _rows(name: str, old: str, new: str, *probes: str) -> Mutant:
    return _simple(name, old, new, *probes)._replace(file="common/weighted_rows.cuh")


_MMA, _TILE, _FRAGMENTS = "forward/forward_mma.cu", "mma/tile.cuh", "mma/fragments.cuh"
_PRODUCTS, _SOFTMAX_TILE = "mma/products.cuh", "mma/softmax_tile.cuh"
_BLOCK_TILE, _SOFTMAX, _NONFINITE, _MASK = (
    "common/block_tile.cuh",
    "mma/softmax.cuh",
    "mma/nonfinite.cuh",
    "common/mask.cuh",
)

# Old and new text of mma/softmax.cuh: an exponent that is a product less a base, which compilers fuse into one.
FUSED_CORRECTION = ("ptx::ex2(before - base)", "ptx::ex2(last * factor - (base + WEIGHT_EXPONENT))")

# Defects that published attention kernels have shipped with.
DEFECTS = (
    _mma(
        "the old maximum is read after it was overwritten",
        _SOFTMAX,
        "ptx::ex2(before - base)",
        "ptx::ex2(base - base)",
    ),
    _mma("the correction is of a fused product", _SOFTMAX, *FUSED_CORRECTION, "steady"),
    _mma("the accumulator is never rescaled", _SOFTMAX_TILE, "o[c][r][i] *= correction[i / 2];", ";"),
    _mma("the sum is never rescaled", _SOFTMAX, "      l *= correction;\n", ""),
    _mma(
        "causal by tile only",
        _MASK,
        "if (CAUSAL && key - own > 0) return false;",
        "if (CAUSAL && key - own > BLOCK_N) return false;",
        "causal",
    ),
    _mma("keys past the end are seen", _MASK, "if (key >= seqlen_k) return false;", "", "batch"),
    _mma("the last tile of keys is skipped", _MASK, "(last + TILE - 1) / TILE : 0", "last / TILE : 0"),
    _mma(
        "a row that is no multiple of 16 is read past its end",
        _TILE,
        "(Tile::USED == Tile::CHUNKS || Mine::chunk() + chunks < Tile::USED)",
        "true",
        "padded",
    ),
    _mma("the maximum is a lane's, not the row's", _SOFTMAX, "max_of(m, max_over_quad(largest))", "max_of(m, largest)"),
    _mma("the sum is a lane's, not the row's", _SOFTMAX, "sum_over_quad(row.l)", "row.l"),
    _mma(
        "P is read from the wrong row",
        _FRAGMENTS,
        "pack(block[i % 2 * 2], block[i % 2 * 2 + 1])",
        "pack(block[2 - i % 2 * 2], block[3 - i % 2 * 2])",
    ),
)

MMA_MUTANTS = (
    # The ring
    _mma(
        "the barrier of a tile is dropped",
        _MMA,
        "    } else {\n      __syncthreads();\n    }",
        "    }",
        "wide",
        "plain",
    ),
    _mma("a tile is not waited for", _MMA, "ptx::cp_async_wait<STAGES - 2>();", "ptx::cp_async_wait<STAGES - 1>();"),
    _mma("tiles are not waited for at all", _MMA, "    ptx::cp_async_wait<STAGES - 2>();\n", ""),
    _mma("copies are not committed as a group", _MMA, "    ptx::cp_async_commit();\n", "", "wide", "plain"),
    _mma("a stage is refilled one tile early", _MMA, "fill(n + STAGES - 1)", "fill(n + STAGES)", "wide", "plain"),
    _mma("V has K's stage", _MMA, "k_tile(n).base + KTile::BYTES", "k_tile(n).base"),
    _mma("stages overlap by a row", _MMA, "(KTile::BYTES + VTile::BYTES)};", "(KTile::BYTES + VTile::BYTES - 64)};"),
    # Places in shared memory
    _mma(
        "writes and reads disagree on the swizzle",
        _TILE,
        "return row / (8 / FACTOR) % FACTOR;",
        "return row % 3;",
        "wide",
    ),
    _mma(
        "a lane's chunk is XORed with nothing",
        _TILE,
        "(uint32_t((chunks - whole) * 16) ^ spread)",
        "uint32_t((chunks - whole) * 16)",
    ),
    _mma(
        "whole factors of chunks are forgotten",
        _TILE,
        "(rows * Tile::PITCH + whole * 16)",
        "(rows * Tile::PITCH)",
        "wide",
    ),
    _mma(
        "Q's lanes 16 on read the first chunk",
        _FRAGMENTS,
        "tile.lane(first_row + lane_id() % 16, lane_id() / 16)",
        "tile.lane(first_row + lane_id() % 16, 0)",
    ),
    _mma("K's second eight keys are the first", _FRAGMENTS, "lane_id() % 8 + lane_id() / 16 * 8", "lane_id() % 8"),
    _mma("V's fragment is a step late", _FRAGMENTS, "(step * KEYS, 2 * pair)", "(step * 8, 2 * pair)"),
    _mma("V is not transposed", _FRAGMENTS, "ptx::ldmatrix_x4_trans(", "ptx::ldmatrix_x4("),
    _mma(
        "the columns of V swap places",
        _PRODUCTS,
        "low[r], a[r], values[0], values[1]",
        "low[r], a[r], values[2], values[1]",
    ),
    _mma("rows of Q repeat", _PRODUCTS, "a_lane.at<A>(16 * r, 2 * step)", "a_lane.at<A>(0, 2 * step)"),
    _mma(
        "warps share rows", _MMA, "int(threadIdx.x) / 32 * 16 * ROW_BLOCKS", "int(threadIdx.x) / 64 * 16 * ROW_BLOCKS"
    ),
    # Addresses in global memory
    _mma(
        "the row stride of K is V's",
        _MMA,
        "k.rows + first * k.stride, k.stride",
        "k.rows + first * k.stride, k.stride + 8",
    ),
    _mma("keys of every tile are the first tile's", _MMA, "v.rows + first * v.stride", "v.rows", "plain"),
    _mma(
        "offsets leave out the sequence", "common/params.cuh", "sequence * strides.batch", "0 * strides.batch", "batch"
    ),
    _mma(
        "offsets are 32 bits wide",
        "common/params.cuh",
        "sequence * strides.batch + row * strides.row + head * strides.head",
        "int32_t(sequence * strides.batch + row * strides.row + head * strides.head)",
        "far",
    ),
    _mma(
        "a tile of rows is taken twice, and one by no block",
        "common/block_order.cuh",
        "within / size}",
        "within / size / 2 * 2}",
        "causal",
    ),
    _mma(
        "every query head has a KV head of its own",
        _BLOCK_TILE,
        "at.head / (params.heads_q / params.heads_kv)",
        "at.head",
        "gqa",
    ),
    _mma(
        "query heads are dealt out to KV heads in turn",
        _BLOCK_TILE,
        "at.head / (params.heads_q / params.heads_kv)",
        "at.head % params.heads_kv",
        "gqa",
    ),
    _mma(
        "packed keys start at the queries' start",
        _BLOCK_TILE,
        "at.k_start = params.cu_seqlens_k[at.sequence];",
        "at.k_start = at.q_start;",
        "varlen",
    ),
    # Masks
    _mma(
        "the diagonal is one key off", _MASK, "if (CAUSAL && key - own > 0)", "if (CAUSAL && key - own > 1)", "causal"
    ),
    _mma(
        "the window's left bound is one key off",
        _MASK,
        "key - own >= -left",
        "key - own > -left",
        "window",
    ),
    _mma("sink tokens are forgotten", _MASK, "|| (SINK_TOKENS && key < sink_tokens)", "", "window"),
    _mma(
        "a tile on the diagonal passes as unmasked",
        _MASK,
        "key_end - 1 > row_begin + diagonal",
        "key_end - 1 > row_end + diagonal",
        "causal",
    ),
    _mma("nonfinite values stay in a tile with a mask", _NONFINITE, "words[w] &= ~nonfinite;", ";", "nonfinite"),
    _mma(
        "nonfinite values are never given to their rows",
        _MMA,
        "if (!unmasked(n)) add_nonfinite",
        "if (false) add_nonfinite",
        "nonfinite",
    ),
    _mma(
        "nonfinite values are given to all rows",
        _MMA,
        "!rows.mask.visible(row, key) ? HIDDEN : kept",
        "kept",
        "nonfinite",
    ),
    _mma("keys past the end are loaded", _MASK, "key >= begin && key < end", "key >= begin", "plain"),
    _mma("rows past the end of Q are loaded", _MMA, "return at.row_begin + row < row_end;", "return true;"),
    _mma("rows past the end are stored", _MMA, "      if (row >= rows.end) continue;\n", ""),
    # Softmax and options
    _mma(
        "the scale is folded in without log2(e)",
        _SOFTMAX,
        "scale * LOG2_E;",
        "scale;",
    ),
    _mma(
        "rows that see nothing keep a maximum of -inf",
        _SOFTMAX,
        "rows[1].m = exponents.lowest;",
        "rows[1].m = -INFINITY;",
        "few",
    ),
    _mma(
        "an empty sum is divided by",
        _SOFTMAX,
        "  if (sum == 0.0f) return {0.0f, -INFINITY, -INFINITY, 0.0f};\n",
        "",
        "few",
    ),
    _mma("the LSE is in base 2", _SOFTMAX, "fmaf(ptx::lg2(sum), LN_2, top)", "fmaf(ptx::lg2(sum), 1.0f, top)"),
    _mma("far maxima have rounded bases", _SOFTMAX, "fabsf(m) > far ? power : to_log2", "to_log2", "hidden"),
    _mma("the sink is not in the sum", _SOFTMAX, " + ptx::ex2((sink - top) * LOG2_E)", "", "sinks"),
    _mma("the sum is not brought down to a large sink", _SOFTMAX, "sum * correction +", "sum +", "sinks"),
    _mma(
        "lanes exchange the wrong dropout words",
        _SOFTMAX,
        "odd ? word[0] : word[2], 1)",
        "odd ? word[2] : word[0], 1)",
        "options",
    ),
    _mma(
        "dropped weights leave the sum",
        _SOFTMAX_TILE,
        "      softmax.l += x;\n",
        "      if (!DROPOUT || x > 0.5f) softmax.l += x;\n",
        "options",
    ),
    _mma("what is kept is not scaled up", _MMA, "DROPOUT ? float(params.dropout_scale) : 1.0f", "1.0f", "options"),
    _mma(
        "floats are not rounded",
        _MMA,
        "constexpr bool ROUNDED = sizeof(ELEMENT) == 4;",
        "constexpr bool ROUNDED = false;",
        "float",
    ),
    _mma("tf32 weights keep their keys in order", _FRAGMENTS, "p[step][i % 2 * 2 + i / 2]", "p[step][i]", "float"),
    _mma(
        "V's word is spread like its neighbour's",
        _FRAGMENTS,
        "lane.spread ^ (i % 2 * (Tile::FACTOR == 8 ? 16 : 0))",
        "lane.spread ^ (i % 2 * 16)",
        "float",
    ),
)

SIMPLE_MUTANTS = (
    _simple(
        "K overwrites V that is still read",
        "    __syncthreads();  // all have read the previous V\n",
        "",
        "wide",
        "plain",
    ),
    _simple("K is read before it has come", "keys);\n    __syncthreads();\n    Real scores", "keys);\n    Real scores"),
    _simple(
        "V overwrites K that is still read",
        "    __syncthreads();  // all have read K and written P\n",
        "",
        "wide",
        "plain",
    ),
    _simple("V is read before it has come", "keys);\n    __syncthreads();\n    add_values", "keys);\n    add_values"),
    _rows("the accumulator is never rescaled", "o[r][c] *= correction;", ";"),
    _rows("the sum is never rescaled", "    l[r] *= correction;\n", ""),
    _rows("the correction is always 1", "exp_of(m[r] - base)", "exp_of(base - base)"),
    _rows("the maximum is a lane's", "max_of(m[r], max_over_lanes(maximum))", "max_of(m[r], maximum)"),
    _simple("the sum is a lane's", "sum_over_lanes(rows.l[r])", "rows.l[r]"),
    _rows("P is read from the next row", "p_rows[r * BLOCK_N + key]", "p_rows[(r ^ 1) * BLOCK_N + key]"),
    _rows("hidden keys count as weights", "      if (p == HIDDEN) continue;\n", "", "causal"),
    _simple("the stride of V is K's of one tile", "v + key_begin * v_strides.row", "v + key_begin"),
    _simple("rows past the end are stored", "    if (row >= row_end) continue;\n", ""),
    _simple("keys past the end are loaded", "at_most(at.seqlen_k - key_begin, BLOCK_N)", "BLOCK_N"),
    _simple("a last column is left out", "if (column < HEAD_DIM_V) out", "if (column < HEAD_DIM_V - 1) out"),
    _simple("an empty row divides by 0", "l == 0 ? Real(0) : rows.o", "rows.o", "few"),
)

MUTANTS = (*DEFECTS, *MMA_MUTANTS, *SIMPLE_MUTANTS)
