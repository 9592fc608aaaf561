"""Bugs to seed into what kernels store of rows; tests/graph/test_row_stats.py runs them."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["MUTANTS", "RowMutant"]


class RowMutant(NamedTuple):
    """A bug. old: text of `file` that is replaced by `new`. probe: what must show it."""

    name: str
    file: str
    old: str
    new: str
    probe: str = "mma"


_STATS, _SOFTMAX, _HOPPER = "common/row_stats.cuh", "mma/softmax.cuh", "hopper/store.cuh"
_MMA, _WIDE, _SIMPLE = "forward/forward_mma.cu", "forward/forward_wide.cu", "forward/forward_simple.cu"

MUTANTS = (
    RowMutant("rows that see no key have a sum of 1", _SOFTMAX, "-INFINITY, 0.0f};", "-INFINITY, 1.0f};"),
    RowMutant("rows that see no key have a maximum of 0", _SOFTMAX, "-INFINITY, 0.0f};", "0.0f, 0.0f};"),
    RowMutant("the maximum is in base 2", _SOFTMAX, "LN_2, top), top, sum", "LN_2, top), top * LOG2_E, sum"),
    RowMutant(
        "the sum is the reciprocal that O takes", _SOFTMAX, "LN_2, top), top, sum};", "LN_2, top), top, ptx::rcp(sum)};"
    ),
    RowMutant("the sum is one lane's", _SOFTMAX, "sum_over_quad(row.l), exponents", "4.0f * row.l, exponents"),
    RowMutant("a NaN leaves the maximum of the others", _STATS, "sum == sum ? largest : sum", "largest", "nan"),
    RowMutant(
        "sums go where maxima go",
        _STATS,
        "to.score_sum_exp, to.score_sum_exp_strides",
        "to.score_max, to.score_max_strides",
    ),
    RowMutant("maxima lie as sums do", _STATS, "to.score_max_strides", "to.score_sum_exp_strides"),
    RowMutant("sequences share their stats", _STATS, "sequence, row, head) = sum;", "0, row, head) = sum;"),
    RowMutant(
        "heads share their KV head's stats",
        _MMA,
        "at.q_start + row, at.head, result.largest",
        "at.q_start + row, at.kv_head, result.largest",
    ),
    RowMutant(
        "every row is the tile's first half",
        _MMA,
        "at.q_start + row, at.head, result.largest",
        "at.q_start + (row & ~8), at.head, result.largest",
    ),
    RowMutant(
        "heads of two warps share their KV head's stats",
        _WIDE,
        "at.q_start + row, at.head, result.largest",
        "at.q_start + row, at.kv_head, result.largest",
        "sinks, wide",
    ),
    RowMutant(
        "neither of two warps stores them",
        _WIDE,
        "ROW_STATS && columns.warp == 0 &&",
        "ROW_STATS && columns.warp == 2 &&",
        "sinks, wide",
    ),
    RowMutant(
        "CUDA cores store one lane's sum",
        _SIMPLE,
        "float(rows.m[r]), float(sum)",
        "float(rows.m[r]), float(rows.l[r])",
        "simple",
    ),
    RowMutant(
        "CUDA cores store rounded sums for maxima",
        _SIMPLE,
        "float(rows.m[r]), float(sum)",
        "float(sum), float(rows.m[r])",
        "simple",
    ),
    RowMutant(
        "tiles without keys store nothing",
        _HOPPER,
        "store_stats(params, work, first_row + thread, {",
        "if (LSE && ROW_STATS < 0) store_stats(params, work, first_row + thread, {",
        "sm90",
    ),
    RowMutant(
        "Hopper's second rows have the first ones' stats",
        _HOPPER,
        "rows.row(1), results[1])",
        "rows.row(1), results[0])",
        "sm90",
    ),
    RowMutant(
        "the sum keeps the weights' exponent",
        _SOFTMAX,
        "fmaf(scale, 0.0f, l * unit)",
        "l",
        "fp8",
    ),
    RowMutant("CUDA cores count a sink of -inf", _SIMPLE, "? Real(0) : l", "? l : l", "sinks, simple"),
    RowMutant("a sink is no score", _SOFTMAX, "top = max_of(top, sink);", "", "sinks"),
    RowMutant(
        "a sink below the scores is the maximum",
        _SOFTMAX,
        "top = max_of(top, sink);",
        "top = sink;",
        "sinks",
    ),
    RowMutant(
        "a sink of no key counts twice",
        _HOPPER,
        "sink == -INFINITY ? 0.0f : 1.0f",
        "sink == -INFINITY ? 0.0f : 2.0f",
        "sinks, sm90",
    ),
    RowMutant("a sink of -inf is a key", _HOPPER, "sink == -INFINITY ? 0.0f : 1.0f", "1.0f", "sinks, sm90"),
    RowMutant(
        "8-bit sums count the sink at the weights' scale",
        _SOFTMAX,
        "(sink - top) * LOG2_E)",
        "(sink - top) * LOG2_E + WEIGHT_EXPONENT)",
        "sinks, fp8",
    ),
)
