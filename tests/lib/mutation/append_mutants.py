"""Bugs to seed into the append and page-copy kernels; append_mutation.py runs them."""

from __future__ import annotations

from mutation.forward_mutants import Mutant

__all__ = ["MUTANTS"]

_ROWS = "common/vector_rows.cuh"


def _append(name: str, old: str, new: str, *probes: str, file: str = "append/append.cu") -> Mutant:
    return Mutant(name, "append", file, old, new, probes or ("copy",))


def _copy(name: str, old: str, new: str) -> Mutant:
    return Mutant(name, "copy_pages", "append/copy_pages.cu", old, new, ("pages",))


MUTANTS = (
    # Places
    _append(
        "places are read before they are written",
        "locate(params, first_row + int(threadIdx.x));\n  __syncthreads();",
        "locate(params, first_row + int(threadIdx.x));",
        "wide",
    ),
    _append(
        "rotations are read before they are written",
        "n % PAIRS);\n  }\n  __syncthreads();",
        "n % PAIRS);\n  }",
        "halves",
    ),
    _append("a row belongs to the sequence before", "if (ends[middle] <= row)", "if (ends[middle] < row)"),
    _append("the first sequence is never left", "low = middle;", "low = low;"),
    _append("lengths count the old keys only", "params.cache_seqlens[at.sequence] - (end - row)", "row"),
    _append(
        "new rows begin at the length",
        "params.cache_seqlens[at.sequence] - (end - row)",
        "params.cache_seqlens[at.sequence] + row - end + 1",
    ),
    _append("a full cache takes one row more", "place >= params.capacity", "place > params.capacity", "beyond"),
    _append("rows before the first are written", "if (place < 0 || place", "if (place", "before"),
    _append(
        "a page outside the pool is written", "if (block < 0 || block >= params.num_blocks) return at;", "", "unused"
    ),
    _append("a page of -1 is written", "if (block < 0 || block", "if (block", "minus"),
    _append("the last page of the pool is refused", "block >= params.num_blocks)", "block >= params.num_blocks - 1)"),
    _append("every page is the first", "place / params.page_size]", "0]"),
    _append("pages are one row short", "place % params.page_size", "place % (params.page_size - 1)"),
    _append(
        "the block table's rows are mixed up", "at.sequence * params.block_table_row", "at.sequence", "copy", "even"
    ),
    _append(
        "rows after the last sequence's are written",
        "if (row >= params.cu_seqlens[params.batch]) return at;",
        "",
        "left over",
    ),
    _append(
        "equal shares are off by one",
        "end = (at.sequence + 1) * params.rows",
        "end = at.sequence * params.rows",
        "even",
    ),
    # Addresses
    _append(
        "V goes to K's place",
        "base_of(params.v_cache, params.v_cache_block",
        "base_of(params.k_cache, params.v_cache_block",
    ),
    _append("V has K's row stride", "block_row * params.v_cache_row", "block_row * params.k_cache_row", "values wider"),
    _append(
        "offsets are 32 bits wide",
        "block_row * params.k_cache_row * bytes",
        "int32_t(block_row * params.k_cache_row * bytes)",
        "far",
    ),
    _append(
        "addresses of caches are taken for the caches",
        "return static_cast<const uint64_t*>(cache)[sequence];",
        "return reinterpret_cast<uint64_t>(cache);",
        "pointers",
    ),
    _append(
        "heads of K are V's number of units apart",
        "const int head = unit / K_UNITS;",
        "const int head = unit / V_UNITS;",
        "values wider",
    ),
    _append("the last unit of a row is left out", "min(rows * row_units, begin", "min(rows * row_units - 1, begin"),
    _append("parts overlap and leave a rest", "% params.parts * params.part_units", "% params.parts", "wide"),
    _append("blocks take each other's rows", "/ params.parts * params.block_rows", "* params.block_rows", "wide"),
    _append("columns past the end are moved", "end = min(DIM, first + N)", "end = first + N", "odd"),
    _append("rotated columns past the end are moved", "end = min(SPAN, first + N)", "end = first + N", "part"),
    _append("alignment is not looked at", "reinterpret_cast<uint64_t>(pointer) % 16 == 0", "true", "odd", file=_ROWS),
    # Rotation
    _append(
        "columns are turned the other way",
        "even * turn.x - odd * turn.y",
        "even * turn.x + odd * turn.y",
        "interleaved",
    ),
    _append(
        "the rotated half is used again",
        "y[i] = high * turn.x + low * turn.y",
        "y[i] = high * turn.x + x[i] * turn.y",
        "halves",
    ),
    _append(
        "pairs are taken from the wrong rotation", "rotations + first / PAIR", "rotations", "halves", "interleaved"
    ),
    _append(
        "halves are HEAD_DIM / 2 apart",
        "INTERLEAVED ? ROTATED : ROTATED / 2;\n  constexpr int ROTATED_UNITS",
        "INTERLEAVED ? ROTATED : DIM / 2;\n  constexpr int ROTATED_UNITS",
        "part",
    ),
    _append(
        "the pass-through begins at the wrong column",
        "ROTATED + (unit - ROTATED_UNITS) * N",
        "(unit - ROTATED_UNITS) * N",
        "part",
    ),
    _append("every row has the first row's rotation", "rotations + row * PAIRS", "rotations", "many"),
    _append("positions are not looked at", "POSITIONS ? params.positions[row] : place", "place", "positions"),
    _append("rotations know only whole turns", "int32_t(phase >> 32)", "int32_t(phase)", "halves"),
    _append("angles are half as large", "0x1p-31f", "0x1p-32f", "halves"),
    _append("a table's rows are one apart", "position * params.rope_sin_row", "position", "tables"),
    _append("V is rotated, too", "move_unit<HEAD_DIM_V, 0>", "move_unit<HEAD_DIM_V, ROTARY_DIM>", "halves"),
    _append("q's heads are K's", "/ Q_UNITS;", "/ Q_UNITS / 2;", "halves"),
    # fp8
    _append("descales multiply", "return 1.0f / descales[", "return descales[", "fp8"),
    _append("descales of heads are mixed up", "+ head * head_stride]", "]", "fp8"),
    _append("K has V's descales", "quantiser(params.k_descale,", "quantiser(params.v_descale,", "fp8"),
    _append("fp8 is not scaled", "IS_FP8<Element> ? x * scale : x", "x", "fp8", file=_ROWS),
    _append(
        "fp8 does not saturate", "if (magnitude > largest) magnitude = largest;", "", "fp8", file="common/types.cuh"
    ),
    _append("fp8 rounds ties away", "(dropped >> 1) + even", "(dropped >> 1) + 1", "ties", file="common/types.cuh"),
    _append("bytes of a word swap places", "x.bits) << (i % 4 * 8)", "x.bits) << (24 - i % 4 * 8)", "fp8", file=_ROWS),
    # Pages
    _copy(
        "pages swap roles",
        "from + source * from_stride, to + destination * to_stride",
        "to + destination * to_stride, from + source * from_stride",
    ),
    _copy("V's pages are K's", "is_k ? params.k_source : params.v_source", "params.k_source"),
    _copy("V's pages go to K", "is_k ? params.k_target : params.v_target", "params.k_target"),
    _copy("pages leave by the cache's number", "destination >= params.target_blocks", "false"),
    _copy(
        "a page's end is left out",
        "whole = begin + (end - begin) / 16 * 16;",
        "whole = begin + (end - begin) / 16 * 16; if (true) return;",
    ),
    _copy("only the first part is copied", "int64_t(is_k ? part : part - params.k_parts) * PART_BYTES", "0"),
    _copy("a page of -1 is copied", "source < 0 || ", ""),
    _copy("parts run past the page", "bytes - begin > PART_BYTES ? begin + PART_BYTES : bytes", "begin + PART_BYTES"),
)
