"""What cuDNN's users know: attention over (batch, heads, seq, dim) with any strides, described by params and a mask."""

from __future__ import annotations

import dataclasses
import math
import numbers
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from gpu_actors.errors import InvalidRequest
from gpu_actors.problem import Alignment

__all__ = ["AttentionParams", "Mask", "MhaForward", "MhaOutput"]

MaskName = Literal["none", "causal", "sliding_window", "causal_sliding_window"]


@dataclass(frozen=True, slots=True)
class Mask:
    """Which keys a row sees. Use the constructors; i and j are row and key, aligned as the params say.

    none: all. causal: j <= i. sliding_window(w): |i - j| < w. causal_sliding_window(w): the last w keys up to j = i.
    """

    kind: MaskName = "none"
    width: int = 0

    @classmethod
    def none(cls) -> Mask:
        return cls("none")

    @classmethod
    def causal(cls) -> Mask:
        return cls("causal")

    @classmethod
    def sliding_window(cls, width: int) -> Mask:
        """Raises `InvalidRequest` unless width >= 1."""
        return cls("sliding_window", _width(width))

    @classmethod
    def causal_sliding_window(cls, width: int) -> Mask:
        """Raises `InvalidRequest` unless width >= 1."""
        return cls("causal_sliding_window", _width(width))

    @property
    def window(self) -> tuple[int, int]:
        """FlashAttention's (left, right), inclusive, -1 for unbounded."""
        match self.kind:
            case "sliding_window":
                return self.width - 1, self.width - 1
            case "causal_sliding_window":
                return self.width - 1, -1
            case _:
                return -1, -1

    @property
    def is_causal(self) -> bool:
        return self.kind in ("causal", "causal_sliding_window")


@dataclass(frozen=True, slots=True)
class AttentionParams:
    """Sizes and options of multi-head attention.

    scale: default 1/sqrt(head_dim). alignment: cuDNN's own default, "top_left", puts row 0 on key 0.
    Raises `InvalidRequest` for sizes below 1, heads that do not divide, a scale or dropout out of range.
    """

    batch: int
    seq_q: int
    seq_kv: int
    heads_q: int
    heads_kv: int
    head_dim: int
    mask: Mask = field(default_factory=Mask.none)
    scale: float | None = None
    dropout_p: float = 0.0
    dropout_seed: int = 0
    alignment: Alignment = "top_left"

    def __post_init__(self) -> None:
        for name in ("batch", "seq_q", "seq_kv", "heads_q", "heads_kv", "head_dim"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < 1:
                raise InvalidRequest(name, value, "must be an int >= 1")
        if self.heads_q % self.heads_kv:
            raise InvalidRequest("heads_kv", self.heads_kv, f"must divide heads_q, {self.heads_q}")
        if not isinstance(self.mask, Mask):
            raise InvalidRequest("mask", self.mask, "must be a Mask, as Mask.causal()")
        if self.scale is not None and not math.isfinite(self.scale):
            raise InvalidRequest("scale", self.scale, "must be a finite number, or None for 1/sqrt(head_dim)")
        if not 0 <= self.dropout_p < 1:
            raise InvalidRequest("dropout_p", self.dropout_p, "must be in [0, 1)")
        if not 0 <= self.dropout_seed < 1 << 64:
            raise InvalidRequest("dropout_seed", self.dropout_seed, "must be an int in [0, 2**64)")
        if self.alignment not in ("top_left", "bottom_right"):
            raise InvalidRequest("alignment", self.alignment, 'must be "top_left" or "bottom_right"')

    @property
    def is_gqa(self) -> bool:
        """True where several query heads share a KV head."""
        return self.heads_q != self.heads_kv

    def with_mask(self, mask: Mask) -> AttentionParams:
        return dataclasses.replace(self, mask=mask)

    def with_dropout(self, p: float, seed: int = 0) -> AttentionParams:
        return dataclasses.replace(self, dropout_p=p, dropout_seed=seed)


@dataclass(slots=True, kw_only=True, eq=False)
class MhaForward:
    """The message of ``mha_forward``.

    q: (batch, heads_q, seq_q, head_dim); k, v: (batch, heads_kv, seq_kv, head_dim); any strides with a contiguous last
    axis. bias: (batch or 1, heads_q or 1, seq_q, seq_kv), q's dtype or fp32.
    """

    params: AttentionParams
    q: Any
    k: Any
    v: Any
    bias: Any = None
    return_stats: bool = False


class MhaOutput(NamedTuple):
    """out: (batch, heads_q, seq_q, head_dim). stats: the natural-log LSE, fp32 (batch, heads_q, seq_q, 1), or None."""

    out: Any
    stats: Any = None


def _width(width: object) -> int:
    if isinstance(width, bool) or not isinstance(width, numbers.Integral) or width < 1:
        raise InvalidRequest("window", width, "must be an int >= 1: a row of its own needs a window of 1")
    return int(width)
