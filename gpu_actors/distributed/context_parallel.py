"""context_split: one request of attention over several workers, each with some of the rows (context parallel).

Each worker gets the keys that its rows see, as after an all-gather of K and V, so every row is attended to in one place
and nothing is merged. The rows are dealt out in a zig-zag, because under a causal mask late rows see most keys.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from gpu_actors.arrays.adopt import restore
from gpu_actors.distributed.parts import SLOPES, Spread, all_of, host_operands
from gpu_actors.distributed.pool import ContextPool
from gpu_actors.errors import Unsupported
from gpu_actors.key_mask import MASK_OPTIONS, SINKS, KeyMask
from gpu_actors.requests import AttentionGradients, AttentionOutput, FlashBackward, FlashForward
from gpu_actors.validation.fields import describe, expect, integer
from gpu_actors.values import show

__all__ = ["context_split", "context_split_backward", "zigzag"]

# The axes of rows and of keys in operands.
_ROWS = {"q": 1, "dout": 1, "out": 1, "lse": 2, "bias": 2}
_KEYS = {"k": 1, "v": 1, "bias": 3}
_PLACES = ("q_positions", "k_positions")


def zigzag(rows: int, parts: int) -> list[tuple[slice, slice]]:
    """The two blocks of rows of each part: block i and block 2 * parts - 1 - i of 2 * parts that are alike in length.

    Raises `InvalidRequest` for ``rows`` below 0 and ``parts`` below 1.
    """
    rows, count = integer("rows", rows, 0), 2 * integer("parts", parts, 1)
    edges = [rows * block // count for block in range(count + 1)]
    blocks = [slice(*pair) for pair in itertools.pairwise(edges)]
    return [(blocks[part], blocks[-1 - part]) for part in range(parts)]


async def context_split(
    pool: ContextPool, request: FlashForward, *, parts: int, timeout: float | None = None
) -> AttentionOutput:
    """Answer a forward request by ``parts`` workers of a pool, each with its share of the rows, as `zigzag` says.

    request: dense, over arrays on the host. Each block of rows is a request with the keys that it sees: none after its
    last row under a causal mask, none before its window. Slopes, sinks, descales and dropout go with it unchanged, and
    of the bias its rows and keys.
    parts: each goes to a worker that has none yet, while there is one. A lost worker's requests are repeated as
    `ContextPool.ask` does. timeout: seconds for each block.

    Raises `InvalidRequest` for operands whose rows do not agree; `Unsupported` for varlen requests, for an ``out``, and
    for dropout where q and k differ in length and the mask or ALiBi goes by the diagonal; and what the pool raises.
    """
    expect(type(request) is FlashForward, "request", show(request), "must be a FlashForward")
    if request.out is not None:
        raise Unsupported("out", describe(request.out), "parts cannot write into one array; copy the result")
    split = _Split(request, parts)
    answers = await split.ask(pool, timeout)
    out = np.concatenate([answer.out for answer in answers], axis=1)
    lse = None if answers[0].lse is None else np.concatenate([answer.lse for answer in answers], axis=2)
    return AttentionOutput(split.restored(out), None if lse is None else split.restored(lse))


async def context_split_backward(
    pool: ContextPool, request: FlashBackward, *, parts: int, timeout: float | None = None
) -> AttentionGradients:
    """`context_split` for gradients.

    Blocks of rows share keys, so dk, dv and dsinks are sums over the blocks, in the order of rows, in float32 or
    float64, and rounded once more than one context's: by half a unit in the last place for each block. So is the
    gradient of a bias that all rows share. dq and other gradients of a bias belong to one block each.
    """
    expect(type(request) is FlashBackward, "request", show(request), "must be a FlashBackward")
    split = _Split(request, parts)
    answers = await split.ask(pool, timeout)
    found: list[Any] = [np.concatenate([answer.dq for answer in answers], axis=1)]
    found += [split.summed(name, [getattr(answer, f"d{name}") for answer in answers]) for name in ("k", "v")]
    dbias = dsinks = None
    if answers[0].dbias is not None:
        dbias = split.summed("bias", [answer.dbias for answer in answers])
    if answers[0].dsinks is not None:
        dsinks = np.sum([answer.dsinks for answer in answers], axis=0, dtype=answers[0].dsinks.dtype)
    return AttentionGradients(*(None if one is None else split.restored(one) for one in (*found, dbias, dsinks)))


class _Block(NamedTuple):
    part: int
    rows: slice
    keys: slice


class _Split:
    """A request cut into blocks of rows, in their order, each with its keys."""

    def __init__(self, request: FlashForward, parts: int) -> None:
        for name in ("cu_seqlens_q", "cu_seqlens_k"):
            given = getattr(request, name)
            if given is not None:
                raise Unsupported(name, describe(given), "one long sequence is split, and not several packed ones")
        self._request = request
        self._given = host_operands(request, (*dict.fromkeys((*_ROWS, *_KEYS)), *_PLACES))
        for name in ("q", "k", "v"):
            array = self._given[name].array if name in self._given else None
            expect(getattr(array, "ndim", 0) == 4, name, describe(array), "must be (batch, rows, heads, head_dim)")
        self._rows, self._keys = self.array("q").shape[1], self.array("k").shape[1]
        bias = self.array("bias") if "bias" in self._given else None
        self._axes = dict(_ROWS)
        if bias is not None and bias.ndim == 4 and bias.shape[_ROWS["bias"]] == 1:
            del self._axes["bias"]  # one row for all
        for axes, extent, kind in ((self._axes, self._rows, "q's rows"), (_KEYS, self._keys, "k's keys")):
            for name, axis in axes.items():
                if name in self._given:
                    array = self.array(name)
                    sound = array.ndim == 4 - (name == "lse") and array.shape[axis] == extent
                    expect(sound, name, describe(array), f"must have {kind}, {extent}, on axis {axis}")
        self._mask = KeyMask(**{name: getattr(request, name) for name in MASK_OPTIONS})
        self._placed = [name for name in _PLACES if name in self._given]
        for name in self._placed:
            places, batch = self.array(name), len(self.array("q"))
            sound = places.dtype == np.int32 and places.shape in ((batch,), (batch, 2))
            expect(sound, name, describe(places), f"must be int32, ({batch},) or ({batch}, 2)")
        diagonal = self._mask.mask != "full" or getattr(request, SLOPES) is not None
        self._offset = self._keys - self._rows if diagonal and self._mask.alignment == "bottom_right" else 0
        if request.dropout_p and diagonal and self._offset and not self._placed:
            reason = f"its random numbers count rows and keys from 0, and the diagonal begins at key {self._offset}"
            raise Unsupported("dropout_p", request.dropout_p, reason, 0.0)
        # The keys of a causal block end on its diagonal, where its last row lies without positions as well.
        ends_there = self._mask.causal and self._keys >= self._rows + self._offset
        chunked = request.attention_chunk > 0
        self._counts = bool(self._placed or request.dropout_p or chunked or (diagonal and not ends_there))
        cut = [
            _Block(part, rows, self._seen(rows))
            for part, pair in enumerate(zigzag(self._rows, parts))
            for rows in pair
            if rows.start < rows.stop
        ]
        self.blocks: list[_Block] = sorted(cut, key=lambda block: block.rows.start)
        if not cut:  # without rows the request is answered all the same
            self.blocks = [_Block(0, slice(0, 0), slice(0, self._keys))]

    def array(self, name: str) -> Any:
        return self._given[name].array

    def restored(self, array: Any) -> Any:
        """An array of the answer in q's kind."""
        return restore(array, self._given["q"])

    def summed(self, name: str, parts: Sequence[Any]) -> Any:
        """The gradients of keys, values or the bias, from those of each block."""
        given = self.array(name)
        total = np.zeros(given.shape, np.float64 if given.dtype == np.float64 else np.float32)
        for block, part in zip(self.blocks, parts, strict=True):
            cut = [slice(None)] * given.ndim
            cut[_KEYS[name]] = block.keys
            if name in self._axes:
                cut[self._axes[name]] = block.rows
            total[tuple(cut)] += part
        return total.astype(parts[0].dtype)

    async def ask(self, pool: ContextPool, timeout: float | None) -> list[Any]:
        """The answers of the blocks, in their order."""
        spread = Spread(pool.dice)

        def ask(block: _Block) -> Coroutine[Any, Any, Any]:
            part, choose = self._part(block), spread.choice(block.part)
            return pool.ask(lambda ctx: ctx.flash_attn.submit(part), timeout=timeout, choose=choose)

        return await all_of([ask(block) for block in self.blocks])

    def _seen(self, rows: slice) -> slice:
        """The keys that rows see, from the first to the last."""
        if self._placed:
            return slice(0, self._keys)
        bounds = [np.array([[edge]], np.int64) for edge in (rows.start, rows.stop, self._offset)]
        ranges = self._mask.key_ranges(bounds[0], bounds[1], bounds[2], self._keys)
        sinks, first, last = (int(np.clip(edge, 0, self._keys).flat[0]) for edge in ranges)
        first, last = 0 if sinks else first, max(last, sinks)
        return slice(min(first, last), last)

    def _part(self, block: _Block) -> FlashForward:
        changed: dict[str, Any] = {}
        for axes, cut in ((self._axes, block.rows), (_KEYS, block.keys)):
            for name, axis in axes.items():
                if name in self._given:
                    array = changed.get(name, self.array(name))
                    changed[name] = array[(*(slice(None),) * axis, cut)]
        changed = {name: np.ascontiguousarray(array) for name, array in changed.items()}
        return dataclasses.replace(self._request, **changed, **self._places(block))

    def _places(self, block: _Block) -> Mapping[str, Any]:
        """Where the rows and keys of a block stand in the whole, for what goes by that."""
        if self._placed:
            begin = dict.fromkeys(_PLACES, 0)
            places: dict[str, Any] = {}
        else:
            places = {"alignment": "bottom_right"}
            if not self._counts:
                return places
            chunk, sinks = max(1, self._mask.attention_chunk), getattr(self._mask, SINKS)
            first_key = -(min(0, self._offset) // chunk) * chunk  # chunks begin at multiples, so the first one must
            begin = {"q_positions": first_key + self._offset, "k_positions": first_key}
            places[SINKS] = sinks and sinks + first_key
        batch = self.array("q").shape[0]
        for name, cut in zip(_PLACES, (block.rows, block.keys), strict=True):
            first = np.array(self.array(name) if name in self._given else np.full(batch, begin[name]), np.int32)
            step = first[:, 1] if first.ndim == 2 else 1
            first.reshape(batch, -1)[:, 0] += cut.start * step
            places[name] = first
        return places
