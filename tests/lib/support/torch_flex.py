"""torch's FlexAttention written out: its operands, and its softmax over all scores at once in fp64."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

BATCH, HEADS, ROWS, KEYS, DIM = 2, 4, 12, 20, 8
Mod = Callable[..., Any]


def drawn(*shape: int, seed: int = 0, dtype: Any = torch.float64, grad: bool = True) -> Any:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_(grad)


def operands(dtype: Any = torch.float64, *, heads_kv: int = HEADS, grad: bool = True) -> tuple[Any, Any, Any]:
    q = drawn(BATCH, HEADS, ROWS, DIM, seed=1, dtype=dtype, grad=grad)
    k = drawn(BATCH, heads_kv, KEYS, DIM, seed=2, dtype=dtype, grad=grad)
    return q, k, drawn(BATCH, heads_kv, KEYS, DIM + 4, seed=3, dtype=dtype, grad=grad)


def explicit(q: Any, k: Any, v: Any, score_mod: Mod | None, mask_mod: Mod | None) -> tuple[Any, Any]:
    """Out and LSE in fp64: the functions are evaluated for all scores at once."""
    q, k, v = (x.double() for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = q @ k.transpose(2, 3) / math.sqrt(q.shape[3])
    full = scores.shape
    places = [torch.arange(n).reshape([-1 if i == a else 1 for i in range(4)]) for a, n in enumerate(full)]
    if score_mod is not None:
        scores = score_mod(scores, *places).to(q.dtype).expand(full)
    if mask_mod is not None:
        scores = torch.where(mask_mod(*places), scores, -math.inf)
    lse = torch.logsumexp(scores, -1)
    visible = lse.isfinite()[..., None]
    weights = torch.where(visible, (scores - torch.where(visible, lse[..., None], 0)).exp(), 0)
    return weights @ v, lse


def split(mod: Mod) -> tuple[Mod | None, Mod | None]:
    """A function as (score_mod, mask_mod), whichever it is."""
    return (None, mod) if mod.__code__.co_argcount == 4 else (mod, None)
