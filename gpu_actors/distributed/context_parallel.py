"""context_split: divides an attention request over several workers, each with some of the rows (context parallel).

    2 parts       sequence 0          sequence 1
                  0 0 1 1 1 1 0 0     0 1 1 0            one request per block: 4 requests, each with rows of both

Each worker gets the keys that its rows see, as after an all-gather of K and V. So each row is computed by one worker,
and nothing is merged. The rows are divided in a zig-zag, because under a causal mask late rows see the most keys.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from gpu_actors.arrays.adopt import Adopted
from gpu_actors.attention.key_mask import KeyMask
from gpu_actors.attention.problem import AttentionProblem
from gpu_actors.attention.requests import AttentionGradients, AttentionOutput, FlashBackward, FlashForward
from gpu_actors.distributed.parts import ask_parts, check_forward, host_operands, restored
from gpu_actors.distributed.pool import ContextPool
from gpu_actors.errors import Unsupported
from gpu_actors.fields import describe, expect, integer
from gpu_actors.planning.forward import broadcast_batch
from gpu_actors.validation.forward import backward_problem, check_cu_seqlens, forward_problem
from gpu_actors.values import show

__all__ = ["context_split", "context_split_backward", "zigzag"]

# The axes of rows and of keys in dense operands. Packed operands have one axis less, and a bias matrix per sequence.
_ROWS = {"q": 1, "dout": 1, "out": 1, "lse": 2, "bias": 2}
_KEYS = {"k": 1, "v": 1, "bias": 3}
_ENDS = {"cu_seqlens_q": "max_seqlen_q", "cu_seqlens_k": "max_seqlen_k"}
_PLACES = ("q_positions", "k_positions")


def zigzag(rows: int, parts: int) -> list[tuple[slice, slice]]:
    """The two blocks of rows of each part: blocks i and 2 * parts - 1 - i of 2 * parts blocks of about equal length.

    Raises `InvalidRequest` for ``rows`` below 0 and ``parts`` below 1.
    """
    rows, count = integer("rows", rows, 0), 2 * integer("parts", parts, 1)
    edges = [rows * block // count for block in range(count + 1)]
    blocks = [slice(*pair) for pair in itertools.pairwise(edges)]
    return [(blocks[part], blocks[-1 - part]) for part in range(parts)]


async def context_split(
    pool: ContextPool, request: FlashForward, *, parts: int, timeout: float | None = None
) -> AttentionOutput:
    """Answer a forward request with ``parts`` workers of a pool. Each computes the rows that `zigzag` gives its part.

    request: over arrays on the host. Each block of rows becomes a request with the keys that the block sees: none after
    its last row under a causal mask, none before its window. It gets the slopes, sinks, descales and dropout unchanged,
    and the bias of its rows and keys. Each sequence of a varlen request is cut separately, and a block has rows of all.
    parts: how many. Each goes to a worker that has none yet, while there is such a worker. A lost worker's requests are
    repeated as `ContextPool.ask` does. timeout: seconds for each block.

    Raises `InvalidRequest` for operands whose rows do not agree; `Unsupported` for an ``out``, a block mask, padded
    sequences (``seqused_q``, ``seqused_k``), and dropout if q and k of a sequence differ in length and the mask or
    ALiBi depends on the diagonal; and what the pool raises.
    """
    check_forward(request)
    split = _Split(request, parts)
    answers = await split.ask(pool, timeout)
    out = split.joined("out", [answer.out for answer in answers])
    lse = None if answers[0].lse is None else split.joined("lse", [answer.lse for answer in answers])
    return restored(AttentionOutput(out, lse), split.template)


async def context_split_backward(
    pool: ContextPool, request: FlashBackward, *, parts: int, timeout: float | None = None
) -> AttentionGradients:
    """`context_split` for gradients.

    Blocks of rows share keys, so dk, dv and dsinks are sums over the blocks, in the order of rows, in float32 or
    float64. They are rounded once more than one context's: by half a unit in the last place for each block. The same
    holds for the gradient of a bias that all rows share. dq and other gradients of a bias belong to one block each.
    """
    expect(type(request) is FlashBackward, "request", show(request), "must be a FlashBackward")
    split = _Split(request, parts)
    answers = await split.ask(pool, timeout)
    gradients: list[Any] = [split.joined("q", [answer.dq for answer in answers])]
    gradients += [split.summed(name, [getattr(answer, f"d{name}") for answer in answers]) for name in ("k", "v")]
    dbias = dsinks = None
    if answers[0].dbias is not None:
        dbias = split.summed("bias", [answer.dbias for answer in answers])
    if answers[0].dsinks is not None:
        dsinks = np.sum([answer.dsinks for answer in answers], axis=0, dtype=answers[0].dsinks.dtype)
    return restored(AttentionGradients(*(*gradients, dbias, dsinks)), split.template)


class _Line(NamedTuple):
    """Rows and keys that are cut together: those of a packed sequence, or of all sequences of a dense request.

    rows, keys: how many of them there are.
    first_row, first_key: where they begin in the operands.
    offset: the key on the diagonal of row 0.
    """

    rows: int
    keys: int
    first_row: int
    first_key: int
    offset: int


class _Block(NamedTuple):
    """A block of rows, with the keys that they see.

    part: the part that computes it.
    rows, keys: one slice for each line, counted from the beginning of the line.
    """

    part: int
    rows: list[slice]
    keys: list[slice]


def _problem(request: FlashForward, operands: Mapping[str, Adopted]) -> AttentionProblem:
    """The problem of the whole request. Refuses the request as one context does."""
    arrays: dict[str, Any] = {name: operand.array for name, operand in operands.items()}
    whole = broadcast_batch(dataclasses.replace(request, **arrays))
    return backward_problem(whole) if isinstance(whole, FlashBackward) else forward_problem(whole)


class _Split:
    """A request cut into blocks of rows, in their order, each with its keys."""

    def __init__(self, request: FlashForward, parts: int) -> None:
        self._request = request
        for name in ("seqused_q", "seqused_k"):
            if (used := getattr(request, name)) is not None:
                reason = "counts rows or keys of whole sequences, and a part has others: give packed sequences"
                raise Unsupported(name, describe(used), reason, name.replace("seqused", "cu_seqlens"))
        self._operands = host_operands(request, (*dict.fromkeys((*_ROWS, *_KEYS)), *_PLACES, *_ENDS))
        problem = _problem(request, self._operands)
        self.template = self._operands["q"]
        self._packed = problem.layout == "varlen"
        self._batch = problem.batch
        self._axes = {name: axis - self._packed for name, axis in _ROWS.items()}
        self._key_axes = {name: axis - self._packed for name, axis in _KEYS.items()}
        if self._packed:
            del self._axes["bias"], self._key_axes["bias"]
        elif "bias" in self._operands and self.array("bias").shape[_ROWS["bias"]] == 1:
            del self._axes["bias"]  # one row for all
        extents = (self.array(name).shape[1 - self._packed] for name in ("q", "k"))
        ends = [self._ends(name, extent) for name, extent in zip(_ENDS, extents, strict=True)]
        self._mask: KeyMask = problem
        self._positions = [name for name in _PLACES if name in self._operands]
        diagonal = self._mask.mask != "full" or request.alibi_slopes is not None
        shifted = diagonal and self._mask.alignment == "bottom_right"
        self._lines = [
            _Line(row_end - row, key_end - key, row, key, (key_end - key - row_end + row) * shifted)
            for (row, row_end), (key, key_end) in zip(*map(itertools.pairwise, ends), strict=True)
        ]
        offsets = [line.offset for line in self._lines if line.offset]
        if request.dropout_p and offsets and not self._positions:
            reason = f"its random numbers count rows and keys from 0, and the diagonal begins at key {offsets[0]}"
            raise Unsupported("dropout_p", request.dropout_p, reason, 0.0)
        # A causal block's keys end on the diagonal of its last row, so bottom-right alignment needs no positions.
        ends_there = self._mask.causal and all(line.keys >= line.rows + line.offset for line in self._lines)
        chunked = request.attention_chunk > 0
        self._counts = bool(self._positions or request.dropout_p or chunked or (diagonal and not ends_there))
        parts = integer("parts", parts, 1)
        dealt = [zigzag(line.rows, parts) for line in self._lines]
        self.blocks: list[_Block] = []
        for block in range(2 * parts):
            part = min(block, 2 * parts - 1 - block)
            cut = [pairs[part][block >= parts] for pairs in dealt]
            if any(one.start < one.stop for one in cut):
                self.blocks.append(_Block(part, cut, self._visible_keys(cut)))
        if not self.blocks:  # a request without rows is answered too
            whole = [slice(0, line.keys) for line in self._lines]
            self.blocks = [_Block(0, [slice(0, 0)] * len(whole), whole)]

    def array(self, name: str) -> Any:
        return self._operands[name].array

    def joined(self, name: str, parts: Sequence[Any]) -> Any:
        """The answer for all rows, joined from the blocks' answers. name: an operand with the same axis of rows."""
        axis = self._axes[name]
        shape = list(parts[0].shape)
        shape[axis] = self.array("q").shape[self._axes["q"]]
        whole = np.empty(shape, parts[0].dtype)
        for block, part in zip(self.blocks, parts, strict=True):
            whole[(*(slice(None),) * axis, self._rows_of(block))] = part
        return whole

    def summed(self, name: str, parts: Sequence[Any]) -> Any:
        operand = self.array(name)
        total = np.zeros(operand.shape, np.float64 if operand.dtype == np.float64 else np.float32)
        for block, part in zip(self.blocks, parts, strict=True):
            if name not in self._key_axes:
                for there, here in self._bias_places(block):
                    total[there] += part[here]
                continue
            cut: list[Any] = [slice(None)] * operand.ndim
            cut[self._key_axes[name]] = self._keys_of(block)
            if name in self._axes:
                cut[self._axes[name]] = self._rows_of(block)
            total[tuple(cut)] += part
        return total.astype(parts[0].dtype)

    async def ask(self, pool: ContextPool, timeout: float | None) -> list[Any]:
        return await ask_parts(pool, [(block.part, self._part(block)) for block in self.blocks], timeout)

    def _ends(self, name: str, total: int) -> list[int]:
        """Where the lines begin and end, in rows or keys of the operands."""
        if not self._packed:
            return [0, total]
        ends = self.array(name)
        check_cu_seqlens(name, ends, total, total)
        bounds: list[int] = ends.tolist()
        return bounds

    def _visible_keys(self, cut: list[slice]) -> list[slice]:
        if self._positions:
            return [slice(0, line.keys) for line in self._lines]
        visible = []
        for line, rows in zip(self._lines, cut, strict=True):
            bounds = [np.array([[edge]], np.int64) for edge in (rows.start, rows.stop, line.offset)]
            ranges = self._mask.key_ranges(bounds[0], bounds[1], bounds[2], line.keys)
            sinks, first, last = (int(np.clip(edge, 0, line.keys).flat[0]) for edge in ranges)
            first, last = 0 if sinks else first, max(last, sinks)
            visible.append(slice(min(first, last), last if rows.start < rows.stop else min(first, last)))
        return visible

    def _rows_of(self, block: _Block) -> Any:
        return self._index([line.first_row for line in self._lines], block.rows)

    def _keys_of(self, block: _Block) -> Any:
        return self._index([line.first_key for line in self._lines], block.keys)

    def _index(self, firsts: Sequence[int], cut: Sequence[slice]) -> Any:
        """The index that selects the cut of each line from an operand."""
        if not self._packed:
            return cut[0]
        places = [np.arange(first + one.start, first + one.stop) for first, one in zip(firsts, cut, strict=True)]
        return np.concatenate([np.zeros(0, np.int64), *places])

    def _part(self, block: _Block) -> FlashForward:
        changed: dict[str, Any] = {}
        for axes, cut in ((self._axes, self._rows_of(block)), (self._key_axes, self._keys_of(block))):
            for name, axis in axes.items():
                if name in self._operands:
                    array = changed.get(name, self.array(name))
                    changed[name] = array[(*(slice(None),) * axis, cut)]
        changed = {name: np.ascontiguousarray(array) for name, array in changed.items()}
        if self._packed:
            for (ends, longest_of), cuts in zip(_ENDS.items(), (block.rows, block.keys), strict=True):
                lengths = [one.stop - one.start for one in cuts]
                changed |= {ends: np.cumsum([0, *lengths], dtype=np.int32), longest_of: None}
            if "bias" in self._operands:
                changed["bias"] = self._bias_of(block)
        return dataclasses.replace(self._request, **changed, **self._places(block))

    def _bias_of(self, block: _Block) -> Any:
        """A block's bias, if packed: one matrix per sequence, because their rows and keys begin in different places."""
        bias = self.array("bias")
        rows, keys = (max((1, *(one.stop - one.start for one in cuts))) for cuts in (block.rows, block.keys))
        cut = np.zeros((self._batch, bias.shape[1], min(rows, bias.shape[2]), keys), bias.dtype)
        for there, here in self._bias_places(block):
            cut[here] = bias[there]
        return cut

    def _bias_places(self, block: _Block) -> Iterator[tuple[Any, Any]]:
        """The index of each packed sequence's block in the whole bias, and in the block's own bias."""
        shape = self.array("bias").shape
        for n, (rows, keys) in enumerate(zip(block.rows, block.keys, strict=True)):
            rows = rows if shape[2] > 1 else slice(0, 1)  # one row for all
            here = [slice(0, one.stop - one.start) for one in (rows, keys)]
            yield (n if shape[0] > 1 else 0, slice(None), rows, keys), (n, slice(None), *here)

    def _places(self, block: _Block) -> Mapping[str, Any]:
        """The options that give the positions of a block's rows and keys in the whole request."""
        count = self._batch if not self._packed else 1  # sequences per line
        if self._positions:
            begin = dict.fromkeys(_PLACES, np.zeros(self._batch, np.int32))
            places: dict[str, Any] = {}
        else:
            places = {"alignment": "bottom_right"}
            if not self._counts:
                return places
            chunk, sinks = max(1, self._mask.attention_chunk), self._mask.sink_tokens
            offsets = np.repeat(np.array([line.offset for line in self._lines], np.int32), count)
            # Chunks begin at multiples of ``chunk``, so the first key must be at one.
            first_key = -(offsets.min(initial=0) // chunk) * chunk
            begin = {"q_positions": first_key + offsets, "k_positions": np.full_like(offsets, first_key)}
            places["sink_tokens"] = sinks and sinks + int(first_key)
        for name, cut in zip(_PLACES, (block.rows, block.keys), strict=True):
            first = np.array(self.array(name) if name in self._operands else begin[name], np.int32)
            step = first[:, 1] if first.ndim == 2 else 1
            starts = np.repeat(np.array([one.start for one in cut], np.int32), count)
            first.reshape(self._batch, -1)[:, 0] += starts * step
            places[name] = first
        return places
