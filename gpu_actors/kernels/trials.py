"""Trials: the small problems that prove a kernel on a machine, by comparison with the oracle.

A family has trials for each of its keys that take every path of its code: tiles that are full and that end early, more
tiles than the pipeline has stages, several heads that share keys, sequences without rows, without keys and with more
rows than keys, every option of the key. Sizes follow from the key's tile, and are as small as it allows.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from gpu_actors.attention.problem import FLAGS, AttentionProblem, DispatchKey
from gpu_actors.kernels.tiles import Tile

__all__ = ["BROKEN", "Trial", "batch_trials", "cache_trials", "crowded_trials", "example_of"]

BROKEN = -1
"""Stands for a sequence's number of keys: a length that contradicts the cache. The kernel answers its rows with NaN."""


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
    """Return a problem of one sequence that has this key."""
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
_SPARE = 11  # rows after the last packed sequence
_MOST_KEYS = 600  # of a sequence, where a pipeline has many stages


def batch_trials(key: DispatchKey, tile: Tile) -> list[Trial]:
    """The trials of a kernel of dense or packed batches, forward or backward."""
    heads: dict[str, Any] = {"heads_q": 2 * _HEADS_KV, "heads_kv": _HEADS_KV}
    problem, other = (dataclasses.replace(_with_options(key, tile, others), **heads) for others in (False, True))
    rows = tile.block_m + 9
    keys = _keys_before_an_edge(problem, tile, rows)
    problem = _with_left_edge(problem, tile, rows, keys)
    if key.layout == "varlen":
        fewer = tile.block_m + 5
        short = (3, 40), (fewer, _keys_to_an_edge(other, tile, fewer)), (1, 1)
        # Lengths on the device may exceed the caller's maxima.
        said = None if other.bias else 10
        return [_packed(problem, ((rows, keys), (0, 7), (5, 0), (37, 21))), _packed(other, short, said)]
    return [_dense(problem, rows, keys), _dense(other, rows, 5), _dense(other, 30, _keys_to_an_edge(other, tile, 30))]


# What a kernel masks in a tile of keys depends on where an edge of the mask lies in it. An error by one in this
# arithmetic shows only if the edge lies at the tile's end or one key beside it.


def _keys_before_an_edge(problem: AttentionProblem, tile: Tile, rows: int) -> int:
    """Return more keys than a pipeline holds. The first row of a block sees them up to the last key of a tile."""
    most = min((tile.stages + 2) * tile.block_n, _MOST_KEYS)
    return most - (most - (rows - 2 - _right_of(problem))) % tile.block_n


def _keys_to_an_edge(problem: AttentionProblem, tile: Tile, rows: int) -> int:
    """Return more keys than a tile holds. The first row sees whole tiles, or the last row leaves out whole tiles."""
    left = problem.window_size[0]
    first = rows - 1 - _right_of(problem) if left < 0 else rows - min(rows, tile.block_m) + 1 + left
    return tile.block_n + 1 + (first - 1) % tile.block_n


def _with_left_edge(problem: AttentionProblem, tile: Tile, rows: int, keys: int) -> AttentionProblem:
    """Return the problem with its window, if any, moved: a block's last row then leaves out one key of a tile."""
    left, right = problem.window_size
    if left < 0:
        return problem
    diagonal = 0 if problem.alignment == "top_left" else keys - rows
    least = tile.block_n // 2
    left = least + (tile.block_m - 2 + diagonal - least) % tile.block_n
    return dataclasses.replace(problem, window_size=(left, right))


def _right_of(problem: AttentionProblem) -> int:
    return max(0, problem.window_size[1])


def _packed(problem: AttentionProblem, lengths: tuple[tuple[int, int], ...], said: int | None = None) -> Trial:
    """said: the caller's maximum of rows, and of keys, of a sequence; by default the true ones."""
    rows, keys = zip(*lengths, strict=True)
    sizes: dict[str, Any] = {"batch": len(lengths), "seqlen_q": said or max(rows), "seqlen_k": said or max(keys)}
    sizes |= {"total_q": sum(rows) + _SPARE, "total_k": sum(keys) + _SPARE}
    return Trial(dataclasses.replace(problem, **sizes), lengths)


def _dense(problem: AttentionProblem, rows: int, keys: int) -> Trial:
    sizes: dict[str, Any] = {"batch": 2, "seqlen_q": rows, "seqlen_k": keys, "total_q": 2 * rows, "total_k": 2 * keys}
    return Trial(dataclasses.replace(problem, **sizes), ((rows, keys),) * 2)


# (rows, query heads per KV head), from the most rows that are packed together to the fewest. If the splits are pinned,
# or if each sequence has one row, the heads alone decide how many rows a block takes.
_PACKED = ((37, 2), (67, 2), (11, 2), (5, 3), (3, 2), (1, 3))
_PINNED = ((3, 37), (2, 67), (3, 22), (5, 15), (3, 6), (3, 3))
_SPLITS = 3
_PADDING = 13
_PAGES = (16, 64)  # keys; every kernel that takes pages of more than one key takes these
_CROWD = 258  # sequences: more than decode_plan has threads
_CROWDED = ((1, 3), (1, 22))  # as those above; with more rows per tile the oracle would take too long


def cache_trials(
    key: DispatchKey, tile: Tile, row_tile: Callable[[AttentionProblem], int] | None = None
) -> Iterator[Trial]:
    """Yield the trials of a kernel of new rows over a cache: with its own splits, and pinned ones if it has any."""
    own, pinned = _over_caches(key, tile)

    def lengths(problem: AttentionProblem, rows: int) -> list[int]:
        edge = _keys_to_an_edge(problem, tile, rows)
        return [_keys_before_an_edge(problem, tile, rows), tile.block_n, 1, 0, edge]

    if row_tile is None:
        for problem, rows, page_size in ((own, tile.block_m + 9, _PAGES[1]), (pinned, tile.block_m - 9, _PAGES[0])):
            yield _cached(problem, rows, 2, lengths(problem, rows), page_size)
        return
    packed = _PINNED if key.layout == "pointers" else _PACKED
    pinned = dataclasses.replace(pinned, num_splits=_SPLITS)
    for problem, sizes, page_size in ((own, packed, _PAGES[0]), (pinned, _PINNED, _PAGES[1])):
        # A kernel that splits checks lengths on the device, where they may lie.
        yield from _of_row_tile(key, problem, sizes, lambda *of: [*lengths(*of), BROKEN], page_size, row_tile)


def crowded_trials(key: DispatchKey, tile: Tile, row_tile: Callable[[AttentionProblem], int]) -> Iterator[Trial]:
    """Yield trials of the kernel that splits work on the device, with enough sequences that a thread counts several."""
    problem = dataclasses.replace(next(_over_caches(key, tile)), heads_kv=1 if key.latent else _HEADS_KV + 1)
    yield from _of_row_tile(key, problem, _CROWDED, lambda *_: [1, 2, 3] * (_CROWD // 3), _PAGES[0], row_tile)


def _over_caches(key: DispatchKey, tile: Tile) -> Iterator[AttentionProblem]:
    """Yield two problems with a key's options, which have different values."""
    for others in (False, True):
        problem = _with_options(key, tile, others)
        yield dataclasses.replace(problem, heads_kv=1 if key.latent else _HEADS_KV)


def _of_row_tile(
    key: DispatchKey,
    problem: AttentionProblem,
    sizes: Sequence[tuple[int, int]],
    lengths: Callable[[AttentionProblem, int], Sequence[int]],
    page_size: int,
    row_tile: Callable[[AttentionProblem], int],
) -> Iterator[Trial]:
    """Yield the trial of the first sizes whose tile is the key's. lengths: returns keys of sequences for their rows."""
    for rows, ratio in sizes:
        own = 1 if key.layout == "pointers" else rows
        trial = _cached(problem, own, ratio, lengths(problem, own), page_size)
        if row_tile(trial.problem) == key.row_tile:
            yield trial
            return


def _cached(problem: AttentionProblem, rows: int, ratio: int, keys: Sequence[int], page_size: int) -> Trial:
    """keys: the number of keys of each sequence."""
    pattern = (rows, 1, 0, rows, rows) if problem.varlen_q else (rows,)
    lengths = list(zip(itertools.cycle(pattern), keys, strict=False))
    batch, total_q = len(lengths), sum(own for own, _ in lengths)
    sizes: dict[str, Any] = {"batch": batch, "seqlen_q": rows, "total_q": total_q, "heads_q": ratio * problem.heads_kv}
    longest = max(keys) + (problem.cache_leftpad * _PADDING)
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


def _with_options(key: DispatchKey, tile: Tile, others: bool) -> AttentionProblem:
    """Return a problem with the key's options, each with a value that takes part in the result.

    others: whether to use the other values of options that a kernel learns only at its launch: the sides of a window,
    whether sequences and heads share a bias, the steps of positions.
    """
    # The window is longer than a tile, so that the diagonal alone may hide a part of a tile within it.
    reach, right = tile.block_n + 21, 0 if key.causal else 9
    options: dict[str, Any] = {}
    if key.sliding_window:
        # A chunk counts as a window, and the key does not say whether there is another.
        sides = (-1, -1) if key.attention_chunk and not key.sink_tokens else (3, right) if key.causal else (-1, right)
        options["window_size"] = sides if others else (reach, right)
    if key.sink_tokens:
        options["sink_tokens"] = 3
    if key.attention_chunk:
        options["attention_chunk"] = tile.block_n + 11
    if key.softcap:
        options["softcap"] = 5.0
    if key.alibi:
        options["alibi"] = "heads" if others else "batch"
    if key.bias is not None:
        options["bias"] = (key.bias, others, others)
    if key.dropout:
        options["dropout_p"] = 0.17
    if key.row_stats:
        options["score_sum_exp"] = True
    if key.positions:
        # If rows stand apart and there is a window, blocks have no order in which to take turns.
        steps = 2 if others and not (key.deterministic and key.sliding_window) else 1
        options |= {"q_positions": steps, "k_positions": steps}
    return dataclasses.replace(example_of(key), **options)
