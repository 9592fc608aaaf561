"""Trials: the small problems that prove a kernel on a machine, beside the oracle.

A family names those of its keys, so that each path of its code is taken: tiles that are full and that end early, more
tiles than the pipeline has stages, several heads that share keys, sequences without rows, without keys and with more
rows than keys, every option that the key has. Sizes follow from the key's tile, so that they are as small as that
allows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from gpu_actors.attention.problem import FLAGS, AttentionProblem, DispatchKey
from gpu_actors.kernels.tiles import Tile

__all__ = ["Trial", "batch_trials", "cache_trials", "example_of"]


class Trial(NamedTuple):
    """A problem, with the length of each of its sequences.

    lengths: (rows, keys) of each. lengths_on_host: whether the host splits the work of a problem over a cache.
    """

    problem: AttentionProblem
    lengths: tuple[tuple[int, int], ...]
    lengths_on_host: bool = True


_SEQLEN = 128
_DEFAULTS: dict[str, Any] = {
    field.name: field.default
    for field in dataclasses.fields(AttentionProblem)
    if field.name not in ("alibi", "bias", "num_splits")
}


def example_of(key: DispatchKey) -> AttentionProblem:
    """A problem of one sequence with this key."""
    carried = {name: getattr(key, name) for name in _DEFAULTS if hasattr(key, name)}
    # A flag of the key may be a number in the problem.
    carried |= {name: type(default)(carried[name]) for name, default in _DEFAULTS.items() if name in FLAGS}
    carried |= dict.fromkeys(("seqlen_q", "seqlen_k", "total_q", "total_k"), _SEQLEN)
    return AttentionProblem(
        **carried,
        batch=1,
        heads_q=key.gqa_ratio,
        heads_kv=1,
        softmax_scale=key.head_dim**-0.5,
        window_size=(_SEQLEN // 2, 0) if key.sliding_window else (-1, -1),
        alibi="heads" if key.alibi else None,
        bias=None if key.bias is None else (key.bias, False, False),
        dropout_p=0.5 if key.dropout else 0.0,
        return_lse=key.lse,
        lse_dtype="float64" if key.wide_lse else "float32",
        score_max=key.row_stats,
        q_positions=1 if key.positions else 0,
    )


_HEADS_KV = 2
_SPARE = 11  # rows behind the last packed sequence
_TAIL = 13  # keys of the last tile
_MOST_KEYS = 600  # of a sequence, where a pipeline has many stages


def batch_trials(key: DispatchKey, tile: Tile) -> list[Trial]:
    """Those of a kernel of dense or packed batches, forward or backward. tile: of the key."""
    rows, keys = tile.block_m + 9, min((tile.stages + 1) * tile.block_n + _TAIL, _MOST_KEYS)
    problem = dataclasses.replace(_with_options(key, tile), heads_q=2 * _HEADS_KV, heads_kv=_HEADS_KV)
    if key.layout == "varlen":
        lengths = ((rows, keys), (0, 7), (5, 0), (37, 21))
        total_q, total_k = (sum(one) + _SPARE for one in zip(*lengths, strict=True))
        sizes: dict[str, Any] = {
            "batch": len(lengths),
            "seqlen_q": rows,
            "seqlen_k": keys,
            "total_q": total_q,
            "total_k": total_k,
        }
        return [Trial(dataclasses.replace(problem, **sizes), lengths)]
    return [_dense(problem, rows, keys), _dense(problem, rows, 5), _dense(problem, 1, tile.block_n)]


def _dense(problem: AttentionProblem, rows: int, keys: int) -> Trial:
    sizes: dict[str, Any] = {"batch": 2, "seqlen_q": rows, "seqlen_k": keys, "total_q": 2 * rows, "total_k": 2 * keys}
    return Trial(dataclasses.replace(problem, **sizes), ((rows, keys),) * 2)


# (rows, query heads a KV head), from the most rows that are packed together to the fewest. Where the splits are pinned,
# the heads alone decide how many rows a block takes, and so they do where each sequence has one row.
_PACKED = ((37, 2), (67, 2), (11, 2), (5, 3), (3, 2), (1, 3))
_PINNED = ((3, 37), (2, 67), (3, 22), (5, 15), (3, 6), (3, 3))
_SPLITS = 3
_PAGES = (16, 64)  # keys, which every kernel takes that takes pages of more than one key


def cache_trials(
    key: DispatchKey, tile: Tile, row_tile: Callable[[AttentionProblem], int] | None = None
) -> Iterator[Trial]:
    """Those of a kernel of new rows over a cache: with its own splits, and with pinned ones where it has those.

    tile: of the key. row_tile: of the family.
    """
    problem = dataclasses.replace(_with_options(key, tile), heads_kv=1 if key.latent else _HEADS_KV)
    keys = min((tile.stages + 1) * tile.block_n + _TAIL, _MOST_KEYS)
    if row_tile is None:
        yield _cached(problem, tile.block_m + 9, 2, keys, tile, _PAGES[1])
        return
    for splits, sizes, page_size in ((0, _PACKED, _PAGES[0]), (_SPLITS, _PINNED, _PAGES[1])):
        for rows, ratio in _PINNED if key.layout == "pointers" else sizes:
            own = 1 if key.layout == "pointers" else rows
            pinned = dataclasses.replace(problem, num_splits=splits)
            trial = _cached(pinned, own, ratio, keys, tile, page_size)
            if row_tile(trial.problem) == key.row_tile:
                yield trial
                break


def _cached(problem: AttentionProblem, rows: int, ratio: int, keys: int, tile: Tile, page_size: int) -> Trial:
    lengths = [(rows, length) for length in (keys, tile.block_n, 1, 0, 2 * tile.block_n - 3)]
    if problem.varlen_q:
        lengths = [(own, length) for own, (_, length) in zip((rows, 1, 0, rows, rows), lengths, strict=True)]
    batch, total_q = len(lengths), sum(own for own, _ in lengths)
    sizes: dict[str, Any] = {"batch": batch, "seqlen_q": rows, "total_q": total_q, "heads_q": ratio * problem.heads_kv}
    longest = max(length for _, length in lengths) + (problem.cache_leftpad * _TAIL)
    capacity, total_k = longest + 7, batch * (longest + 7)
    if problem.page_size:
        page_size = 1 if problem.page_size == 1 else page_size
        pages = -(-longest // page_size) + 1
        capacity, total_k = pages * page_size, batch * pages * page_size
        sizes["page_size"] = page_size
    elif problem.cache_batch_idx:
        total_k = (batch + 2) * capacity
    sizes |= {"seqlen_k": capacity, "total_k": total_k}
    return Trial(dataclasses.replace(problem, **sizes), tuple(lengths))


def _with_options(key: DispatchKey, tile: Tile) -> AttentionProblem:
    """A problem whose options, where the key has them, are such that each takes part in a result."""
    reach = tile.block_n // 2 + 5
    options: dict[str, Any] = {}
    if key.sliding_window:
        # A chunk is a window, too: it alone leaves the key no other sign of one.
        right = 0 if key.causal else 9
        options["window_size"] = (-1, -1) if key.attention_chunk and not key.sink_tokens else (reach, right)
    if key.sink_tokens:
        options["sink_tokens"] = 3
    if key.attention_chunk:
        options["attention_chunk"] = tile.block_n + 11
    if key.softcap:
        options["softcap"] = 5.0
    if key.alibi:
        options["alibi"] = "batch"
    if key.dropout:
        options["dropout_p"] = 0.17
    if key.row_stats:
        options["score_sum_exp"] = True
    if key.positions:
        options |= {"q_positions": 1, "k_positions": 1}
    return dataclasses.replace(example_of(key), **options)
