"""Attention as cuDNN describes it: arrays (batch, heads, seq, dim) with any strides, params and a mask."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, NamedTuple, get_args

from gpu_actors.attention.key_mask import Alignment
from gpu_actors.attention.requests import Array
from gpu_actors.errors import InvalidRequest
from gpu_actors.fields import FURTHEST, expect, integer, one_of, real
from gpu_actors.values import brief

__all__ = ["AttentionParams", "Mask", "MhaBackward", "MhaForward", "MhaOutput"]

MaskName = Literal["none", "causal", "sliding_window", "causal_sliding_window"]

_WINDOWS = ("sliding_window", "causal_sliding_window")


@dataclass(frozen=True, slots=True)
class Mask:
    """The keys that a row sees. Use the constructors. Row i and key j are aligned as the params say.

    none: all. causal: j <= i. sliding_window(w): |i - j| < w. causal_sliding_window(w): the last w keys up to j = i.
    Raises `InvalidRequest` unless the kind is one of these, and width >= 1 for the windows and 0 for the others.
    """

    kind: MaskName = "none"
    width: int = 0

    def __post_init__(self) -> None:
        one_of("mask", self.kind, get_args(MaskName))
        if self.kind in _WINDOWS:
            object.__setattr__(self, "width", integer("window", self.width, 1))
        else:
            integer("window", self.width, 0)
            expect(self.width == 0, "window", self.width, f"must be 0: a {self.kind} mask has no window")

    @classmethod
    def none(cls) -> Mask:
        """Every row sees every key."""
        return cls("none")

    @classmethod
    def causal(cls) -> Mask:
        """A row sees the keys up to its own."""
        return cls("causal")

    @classmethod
    def sliding_window(cls, width: int) -> Mask:
        """A row sees the keys fewer than ``width`` away on either side. Raises `InvalidRequest` unless width >= 1."""
        return cls("sliding_window", width)

    @classmethod
    def causal_sliding_window(cls, width: int) -> Mask:
        """A row sees the last ``width`` keys up to and with its own. Raises `InvalidRequest` unless width >= 1."""
        return cls("causal_sliding_window", width)

    @property
    def window(self) -> tuple[int, int]:
        """FlashAttention's (left, right), inclusive, -1 for unbounded."""
        furthest = min(self.width - 1, FURTHEST)
        match self.kind:
            case "sliding_window":
                return furthest, furthest
            case "causal_sliding_window":
                return furthest, -1
            case "none" | "causal":
                return -1, -1

    @property
    def is_causal(self) -> bool:
        """Whether a row sees no key after its own."""
        return self.kind in ("causal", "causal_sliding_window")


@dataclass(frozen=True, slots=True)
class AttentionParams:
    """Sizes and options of multi-head attention.

    batch, seq_q, seq_kv, heads_q, heads_kv, head_dim: sizes of q (batch, heads_q, seq_q, head_dim) and of k and v
        (batch, heads_kv, seq_kv, head_dim). heads_kv divides heads_q.
    mask: the keys that each row sees. Default: every row sees every key.
    scale: default 1/sqrt(head_dim).
    dropout_p, dropout_seed: the probability in [0, 1) of dropping a weight, and the seed. Default 0.
    alignment: cuDNN's own default, "top_left", puts row 0 on key 0; "bottom_right" the last row on the last key.
    Raises `InvalidRequest` for heads or a head_dim below 1, negative sizes, heads that do not divide, and options of
    another type or out of range.
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
        for name in ("batch", "seq_q", "seq_kv"):
            integer(name, getattr(self, name), 0)
        for name in ("heads_q", "heads_kv", "head_dim"):
            integer(name, getattr(self, name), 1)
        if self.heads_q % self.heads_kv:
            raise InvalidRequest("heads_kv", self.heads_kv, f"must divide heads_q, {self.heads_q}")
        expect(isinstance(self.mask, Mask), "mask", self.mask, "must be a Mask, as Mask.causal()")
        if self.scale is not None:
            real("scale", self.scale, "a finite number, or None for 1/sqrt(head_dim)")
        dropout_p = real("dropout_p", self.dropout_p, "a number in [0, 1)")
        expect(0 <= dropout_p < 1, "dropout_p", self.dropout_p, "must be a number in [0, 1)")
        integer("dropout_seed", self.dropout_seed, 0, (1 << 64) - 1)
        one_of("alignment", self.alignment, get_args(Alignment))

    @property
    def is_gqa(self) -> bool:
        """True where several query heads share a KV head."""
        return self.heads_q != self.heads_kv

    def with_mask(self, mask: Mask) -> AttentionParams:
        """A copy with another mask."""
        return dataclasses.replace(self, mask=mask)

    def with_dropout(self, p: float, seed: int = 0) -> AttentionParams:
        """A copy with dropout of probability ``p``."""
        return dataclasses.replace(self, dropout_p=p, dropout_seed=seed)


_ARGUMENT_NAMES = {"dtype": "q", "kv_dtype": "k", "out": "o", "dout": "do", "lse": "stats", "softmax_scale": "scale"}


@dataclass(slots=True, kw_only=True, eq=False)
class MhaForward:
    """The message of ``mha_forward``.

    q: (batch, heads_q, seq_q, head_dim); k, v: (batch, heads_kv, seq_kv, head_dim); any strides; on a
    GPU the last axis must be contiguous. bias: (batch or 1, heads_q or 1, seq_q or 1, seq_kv), q's dtype or
    fp32; a bool bias is True where a key counts.
    """

    __repr__ = brief
    argument_names: ClassVar[Mapping[str, str]] = _ARGUMENT_NAMES

    params: AttentionParams
    q: Array
    k: Array
    v: Array
    bias: Array | None = None
    return_stats: bool = False


@dataclass(slots=True, kw_only=True, eq=False)
class MhaBackward:
    """The message of ``mha_backward``: the gradients of `MhaForward` at the same params and bias.

    q, k, v, bias: the forward's inputs. o, stats: its results, with ``return_stats=True``. do: the gradient of o.
    deterministic: whether gradients are bitwise the same every time.
    """

    __repr__ = brief
    argument_names: ClassVar[Mapping[str, str]] = _ARGUMENT_NAMES

    params: AttentionParams
    q: Array
    k: Array
    v: Array
    o: Array
    do: Array
    stats: Array
    bias: Array | None = None
    deterministic: bool = False


class MhaOutput(NamedTuple):
    """out: (batch, heads_q, seq_q, head_dim). stats: the natural-log LSE, fp32 (batch, heads_q, seq_q, 1), or None."""

    out: Any
    stats: Any = None

    def __repr__(self) -> str:
        return brief(self)
