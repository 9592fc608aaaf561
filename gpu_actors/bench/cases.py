"""The cases of the GPU suites: attention problems, their work and their traffic.

FLOPs are counted as usual: 4 * rows * keys * dim * heads for a full mask, half of that for a causal mask, 2.5 times as
many for a backward pass. Bytes count each operand once, which is the minimum.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, TypeAlias

__all__ = ["Case", "Kind", "backward_cases", "decode_cases", "first_cases", "forward_cases"]

Kind: TypeAlias = Literal["forward", "backward", "decode"]

_SIZES = {"float16": 2, "bfloat16": 2, "float32": 4, "float8_e4m3fn": 1, "float8_e5m2": 1}
_BACKWARD = 2.5  # five products instead of two


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One problem.

    rows, keys: the rows and keys of each sequence.
    window: the left bound of the window, or None.
    page_size: the keys per page of a decode's cache.
    """

    kind: Kind = "forward"
    batch: int
    rows: int
    keys: int
    heads: int
    kv_heads: int
    head_dim: int
    dtype: str = "bfloat16"
    causal: bool = False
    window: int | None = None
    page_size: int = 64
    deterministic: bool = False

    @property
    def name(self) -> str:
        """A short name, for tables and plots."""
        dtype = {"bfloat16": "bf16", "float16": "fp16", "float8_e4m3fn": "e4m3"}.get(self.dtype, self.dtype)
        lengths = f"{_short(self.keys)}" if self.rows == self.keys else f"{self.rows}x{_short(self.keys)}"
        heads = f"h{self.heads}" if self.heads == self.kv_heads else f"h{self.heads}/{self.kv_heads}"
        parts = [dtype, f"d{self.head_dim}", f"b{self.batch}", heads, lengths]
        if self.kind != "decode":
            parts.append("causal" if self.causal else "full")
        if self.window is not None:
            parts.append(f"w{self.window}")
        return " ".join(parts + ["deterministic"] * self.deterministic)

    @property
    def pairs(self) -> int:
        """The pairs of a row and a key that it sees, for one head and the whole batch. A causal mask counts as half."""
        if self.window is not None:
            keys = [min(row + self.keys - self.rows, self.window) + 1 for row in range(self.rows)]
            return self.batch * sum(keys)
        pairs = self.batch * self.rows * self.keys
        return pairs // 2 if self.causal and self.kind != "decode" else pairs

    @property
    def flops(self) -> float:
        work = 4.0 * self.pairs * self.heads * self.head_dim
        return work * _BACKWARD if self.kind == "backward" else work

    @property
    def bytes(self) -> int:
        """The least traffic with the device's memory, in bytes."""
        item = _SIZES[self.dtype]
        out = max(item, 2)
        q = self.batch * self.rows * self.heads * self.head_dim
        kv = 2 * self.batch * self.keys * self.kv_heads * self.head_dim
        if self.kind == "backward":
            # q, k, v, out and dout are read, dq, dk and dv written; the LSE is read.
            return item * (4 * q + 2 * kv) + 4 * self.batch * self.rows * self.heads
        return item * (q + kv) + out * q

    @property
    def q_shape(self) -> tuple[int, ...]:
        return (self.batch, self.rows, self.heads, self.head_dim)

    @property
    def kv_shape(self) -> tuple[int, ...]:
        return (self.batch, self.keys, self.kv_heads, self.head_dim)

    @property
    def pages(self) -> int:
        """The number of pages of one sequence of a decode."""
        return math.ceil(self.keys / self.page_size)

    def options(self) -> dict[str, Any]:
        """Keyword arguments that the oracle and the requests both take."""
        options: dict[str, Any] = {"causal": True} if self.causal else {}
        if self.window is not None:
            options["window_size"] = (self.window, -1)
        return options

    def record(self) -> dict[str, Any]:
        """The case as a JSON object."""
        return {"name": self.name, **asdict(self), "flops": self.flops, "bytes": self.bytes}


def _short(length: int) -> str:
    return f"{length >> 10}k" if length % 1024 == 0 else str(length)


_TOKENS, _WIDTH = 16_384, 2048  # batch * rows and heads * head_dim: constant in the usual plots


def _usual(dim: int, length: int, **more: Any) -> Case:
    heads = _WIDTH // dim
    return Case(
        batch=max(1, _TOKENS // length), rows=length, keys=length, heads=heads, kv_heads=heads, head_dim=dim, **more
    )


def forward_cases(quick: bool = False) -> list[Case]:
    """The cases of the forward suite. The most important ones are first, for runs that end early."""
    cases = [_usual(128, 8192, causal=causal) for causal in (False, True)]
    cases += [Case(batch=2, rows=8192, keys=8192, heads=64, kv_heads=8, head_dim=128, causal=True)]
    cases += [_usual(dim, 8192, causal=causal) for dim in (64, 256) for causal in (False, True)]
    if quick:
        return cases[:5]
    cases += [_usual(128, 8192, causal=causal, dtype="float8_e4m3fn") for causal in (False, True)]
    cases += [_usual(128, length, causal=causal) for length in (1024, 2048, 4096, 16_384) for causal in (False, True)]
    cases += [_usual(dim, length, causal=True) for dim in (64, 256) for length in (2048, 16_384)]
    cases += [_usual(dim, 8192, causal=True) for dim in (96, 192)]
    cases += [_usual(128, 8192, causal=True, dtype="float16"), _usual(128, 8192, causal=True, window=1023)]
    return cases


def backward_cases(quick: bool = False) -> list[Case]:
    """The cases of the backward suite, the most important ones first."""
    cases = [_usual(128, 8192, causal=causal, kind="backward") for causal in (True, False)]
    cases += [_usual(64, 8192, causal=True, kind="backward")]
    if quick:
        return cases
    cases += [replace(_usual(128, 4096, causal=True, kind="backward"), heads=32, kv_heads=8)]
    for length in (2048, 4096):
        cases += [_usual(128, length, causal=causal, kind="backward") for causal in (True, False)]
    cases += [_usual(128, 8192, causal=True, kind="backward", deterministic=True)]
    return cases


def _decode(batch: int, keys: int, rows: int = 1, **more: Any) -> Case:
    sizes: dict[str, Any] = {"heads": 64, "kv_heads": 8, "head_dim": 128, **more}
    return Case(kind="decode", batch=batch, rows=rows, keys=keys, causal=True, **sizes)


def decode_cases(quick: bool = False) -> list[Case]:
    """The cases of the decode suite, important ones first: one new row, or several (speculative decoding)."""

    cases = [_decode(8, 8192), _decode(32, 8192), _decode(1, 2048)]
    if quick:
        return cases
    return [
        *cases,
        _decode(1, 32_768),
        _decode(8, 32_768),
        _decode(128, 8192),
        _decode(64, 32_768),
        _decode(8, 8192, 8),
        _decode(32, 8192, 16),
    ]


def first_cases(small: bool = False) -> list[Case]:
    """The cases to measure first on a GPU: long prompts, decodes of one and of many sequences, and a backward.

    small: return cases that a CPU runs in seconds.
    """
    if small:
        sizes: dict[str, Any] = {"heads": 2, "kv_heads": 2, "head_dim": 64, "dtype": "float16"}
        prompts = [Case(batch=1, rows=length, keys=length, causal=True, **sizes) for length in (128, 256)]
        return [*prompts, _decode(1, 256, **sizes), _decode(4, 256, **sizes), replace(prompts[0], kind="backward")]
    prompts = [_usual(128, length, causal=True) for length in (4096, 16_384)]
    return [*prompts, _decode(1, 8192), _decode(64, 8192), replace(prompts[0], kind="backward")]
