"""KeyMask: the keys of its sequence that a query row sees, as one value.

Requests, problems and the oracle use the same names for its options. This module defines their meaning: for the oracle
as a table of rows and keys, for the planner of decode launches as ranges of keys. For kernels it is in
kernels_cu/common/mask.cuh.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias, TypedDict, get_args

import numpy as np
import numpy.typing as npt

from gpu_actors.fields import FURTHEST, flag, integer, one_of, window

__all__ = ["MASK_OPTIONS", "Alignment", "KeyMask", "KeyRanges", "MaskKind", "MaskOptions"]

Alignment: TypeAlias = Literal["bottom_right", "top_left"]
MaskKind: TypeAlias = Literal["full", "causal", "window", "causal_window"]


class MaskOptions(TypedDict, total=False):
    """The fields of `KeyMask` as keyword arguments."""

    causal: bool
    alignment: Alignment
    window_size: tuple[int, int]
    attention_chunk: int
    sink_tokens: int


class KeyRanges(NamedTuple):
    """The keys that a tile of rows sees: [0, sinks) and [first, last), which may overlap or be empty."""

    sinks: npt.NDArray[np.int64]
    first: npt.NDArray[np.int64]
    last: npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyMask:
    """The keys of its sequence that a query row sees.

    causal: keys after the row's own are hidden.
    alignment: "bottom_right" puts the last row on the last key, "top_left" the first row on the first key.
    window_size: (left, right), inclusive, in keys from the row's own; -1 is unbounded.
    sink_tokens: the first n keys stay visible outside of every window; causal still hides them.
    attention_chunk: n > 0 cuts the keys into chunks of n, from key 0 on: a row sees only the chunk of its own key, as
        far as its window reaches. Sink tokens stay visible. 0: no chunks.

    Raises `InvalidRequest` for an option of another type or out of range.
    """

    causal: bool = False
    alignment: Alignment = "bottom_right"
    window_size: tuple[int, int] = (-1, -1)
    attention_chunk: int = 0
    sink_tokens: int = 0

    def __post_init__(self) -> None:
        flag("causal", self.causal)
        one_of("alignment", self.alignment, get_args(Alignment), 'must be "bottom_right" or "top_left"')
        object.__setattr__(self, "window_size", window(self.window_size))
        object.__setattr__(self, "sink_tokens", integer("sink_tokens", self.sink_tokens, 0))
        object.__setattr__(self, "attention_chunk", min(integer("attention_chunk", self.attention_chunk, 0), FURTHEST))

    @property
    def mask(self) -> MaskKind:
        """The mask's kind, which decides which loops a kernel needs."""
        left, right = self.window_size
        chunked = self.attention_chunk > 0
        if self.causal:
            return "causal_window" if left >= 0 or chunked else "causal"
        return "window" if left >= 0 or right >= 0 or chunked else "full"

    def visible_keys(self, rows: npt.NDArray[Any], seqlen_q: int, seqlen_k: int) -> npt.NDArray[np.bool_] | None:
        """The keys of a sequence that each of its rows sees: bool (R, seqlen_k), or None if every row sees every key.

        rows: (R,) row indices inside the sequence. The diagonal of row i is key i + seqlen_k - seqlen_q
        ("bottom_right") or key i ("top_left").
        """
        return self.visible_positions(self._diagonal(rows, seqlen_q, seqlen_k), np.arange(seqlen_k))

    def visible_positions(self, diagonal: npt.NDArray[Any], keys: npt.NDArray[Any]) -> npt.NDArray[np.bool_] | None:
        """`visible_keys` for keys at the positions ``keys`` (K,) and rows at the positions ``diagonal`` (R, 1)."""
        if self.mask == "full":
            return None
        first, last = self._reach(diagonal)
        visible = np.ones((diagonal.size, keys.size), dtype=np.bool_)
        if first is not None:
            visible &= keys >= first
        if last is not None:
            visible &= keys <= last
        visible |= keys < self.sink_tokens
        if self.causal:
            visible &= keys <= diagonal
        return visible

    def key_distance(self, rows: npt.NDArray[Any], seqlen_q: int, seqlen_k: int) -> npt.NDArray[Any]:
        """(R, seqlen_k): each key's distance before a row's diagonal. ALiBi multiplies it (arXiv 2108.12409)."""
        return self._diagonal(rows, seqlen_q, seqlen_k) - np.arange(seqlen_k)

    def key_ranges(
        self, row_begin: npt.NDArray[Any], row_end: npt.NDArray[Any], offset: npt.NDArray[Any], seqlen_k: Any
    ) -> KeyRanges:
        """The keys that any row of [row_begin, row_end) sees: Mask::tiles of kernels_cu/common/mask.cuh, in keys.

        offset: the key on the diagonal of row 0, for each sequence. The arrays are broadcast with each other.
        """
        last = np.minimum(row_end + offset, seqlen_k) if self.causal else np.broadcast_to(seqlen_k, row_end.shape)
        first = sinks = np.zeros((1, 1), np.int64)
        if self.mask in ("window", "causal_window"):
            sinks = np.clip(last, 0, self.sink_tokens)
            greatest = self._reach(row_end - 1 + offset)[1]
            if not self.causal and greatest is not None:
                last = np.minimum(greatest + 1, last)
            least = self._reach(row_begin + offset)[0]
            if least is not None:
                first = np.maximum(0, least)
        return KeyRanges(sinks, first, last)

    def _reach(self, own: npt.NDArray[Any]) -> tuple[npt.NDArray[Any] | None, npt.NDArray[Any] | None]:
        """The first and the last key in the window and chunk of rows whose own keys are ``own``. None: unbounded."""
        left, right = self.window_size
        first, last = own - left if left >= 0 else None, own + right if right >= 0 else None
        if self.attention_chunk:
            chunk = own - own % self.attention_chunk
            end = chunk + self.attention_chunk - 1
            first = chunk if first is None else np.maximum(first, chunk)
            last = end if last is None else np.minimum(last, end)
        return first, last

    def _diagonal(self, rows: npt.NDArray[Any], seqlen_q: int, seqlen_k: int) -> npt.NDArray[Any]:
        """(R, 1): the key that lies on each row's diagonal."""
        offset = seqlen_k - seqlen_q if self.alignment == "bottom_right" else 0
        return rows[:, None] + offset


MASK_OPTIONS: tuple[str, ...] = tuple(field.name for field in dataclasses.fields(KeyMask))
"""The names of the fields of `KeyMask`."""
