"""Bugs to seed into biases of packed sequences and caches; tests/planning/test_packed_bias.py runs them."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["MUTANTS", "BiasMutant"]


class BiasMutant(NamedTuple):
    """A bug. old: text of ``file`` that is replaced by ``new``. probe: the bias that must show it."""

    name: str
    file: str
    old: str
    new: str
    probe: str = "own"


_SCORE, _SUMS = "common/score.cuh", "backward/scores.cuh"
_BIAS, _DBIAS = "params.bias_strides, sequence, 0, head", "strides, work.ring.at.sequence, 0, now.head"

MUTANTS = (
    BiasMutant("all sequences read the first's", _SCORE, _BIAS, "params.bias_strides, 0, 0, head"),
    BiasMutant("all heads read the first's", _SCORE, _BIAS, "params.bias_strides, sequence, 0, 0", "of heads"),
    BiasMutant(
        "rows are counted through the batch",
        _SCORE,
        _BIAS,
        "params.bias_strides, sequence, params.cu_seqlens_q[sequence], head",
    ),
    BiasMutant(
        "keys are counted through the batch",
        _SCORE,
        f"(params.bias, {_BIAS});",
        f"(params.bias, {_BIAS}) + params.cu_seqlens_k[sequence];",
    ),
    BiasMutant("rows of one are many", _SCORE, "row * bias_row_stride", "row * (bias_row_stride + 1)", "one row"),
    BiasMutant("a key is one off", _SCORE, "* bias_row_stride + key]", "* bias_row_stride + key + 1]"),
    BiasMutant("gradients go to the first sequence", _SUMS, _DBIAS, "strides, 0, 0, now.head"),
    BiasMutant("gradients go to the first head", _SUMS, _DBIAS, "strides, work.ring.at.sequence, 0, 0"),
    BiasMutant("gradients go to one row", _SUMS, "dbias + row * strides.row", "dbias + 0 * strides.row"),
    BiasMutant("gradients go to every other key", _SUMS, "work.key(r, e / 2), ds", "work.key(r, 0), ds"),
)

_ROWS, _MMA = "decode/rows.cuh", "decode/decode_mma.cu"
_CACHED = "make_score<float>(attention, entry.sequence, head, kv_head"
_SIMPLE, _FLOATS = "decode/decode_simple.cu", "paged, own, float32"
_SCORED = "packed[r].score(scores[r][c], packed[r].row, key)"

CACHE_MUTANTS = (
    BiasMutant(
        "new rows of all sequences read the first's",
        _ROWS,
        _CACHED,
        _CACHED.replace("entry.sequence", "0"),
        "paged, own",
    ),
    BiasMutant("heads read their KV head's", _ROWS, _CACHED, _CACHED.replace(" head,", " kv_head,"), "paged, own"),
    BiasMutant(
        "a packed row is a row", _ROWS, "rows.row[half] = packed / ratio;", "rows.row[half] = packed;", "paged, own"
    ),
    BiasMutant("all rows are the first", _MMA, "(x, rows.row[half], key);", "(x, 0, key);", "paged, own"),
    BiasMutant(
        "keys count from the tile",
        _MMA,
        "(x, rows.row[half], key);",
        "(x, rows.row[half], key - key_begin);",
        "cache, own",
    ),
    BiasMutant(
        "a key's bias is that of its neighbour",
        _MMA,
        "(x, rows.row[half], key);",
        "(x, rows.row[half], key ^ 1);",
        "pointers, own",
    ),
    BiasMutant(
        "rows read each other's", _MMA, "(x, rows.row[half], key);", "(x, rows.row[1 - half], key);", "paged, own"
    ),
    BiasMutant(
        "a bias is read past the keys",
        _MMA,
        "BIAS && masked && !rows.visible(half, key)",
        "false",
        "paged, own, float16, bool",
    ),
    BiasMutant(
        "a masked tile has no bias", _MMA, "BIAS && masked && !rows.visible(half, key)", "BIAS && masked", "cache, own"
    ),
    BiasMutant(
        "a mask hides nothing of a cache",
        _SCORE,
        "return bias ? score : Real(-INFINITY);",
        "return score;",
        "paged, own, float16, bool",
    ),
    BiasMutant(
        "one row of a bias is many",
        _SCORE,
        "row * bias_row_stride",
        "row * (bias_row_stride + 1)",
        "packed, of one row",
    ),
    BiasMutant("all packed rows are the first", _SIMPLE, _SCORED, _SCORED.replace("packed[r].row", "0"), _FLOATS),
    BiasMutant(
        "keys of floats count from the tile", _SIMPLE, _SCORED, _SCORED.replace("key)", "key - key_begin)"), _FLOATS
    ),
    BiasMutant(
        "heads of floats read their KV head's",
        _SIMPLE,
        "entry.sequence, kv_head * ratio + packed % ratio, kv_head, entry",
        "entry.sequence, kv_head, kv_head, entry",
        _FLOATS,
    ),
    BiasMutant(
        "new rows of floats read the first sequence's",
        _SIMPLE,
        "make_score<Real>(attention, entry.sequence",
        "make_score<Real>(attention, 0",
        _FLOATS,
    ),
    BiasMutant(
        "a bias of floats is read past the keys",
        _SIMPLE,
        f"shown[c] ? {_SCORED} : -INFINITY",
        f"{_SCORED} + (shown[c] ? 0 : -INFINITY)",
        _FLOATS,
    ),
)
