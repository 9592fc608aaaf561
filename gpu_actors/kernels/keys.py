"""Checks of kernels' keys that come from outside, as those given to ``ctx.nvrtc.warm``."""

from __future__ import annotations

from typing import get_args

from gpu_actors.errors import InvalidRequest, Unsupported
from gpu_actors.kernels.append import AppendKey
from gpu_actors.kernels.cache_variants import check_cache_key
from gpu_actors.kernels.copy_pages import PageCopyKey
from gpu_actors.kernels.decode_variants import DECODE, ROW_TILES
from gpu_actors.kernels.dispatch import FAMILIES, KernelFamily
from gpu_actors.kernels.source import check_arch
from gpu_actors.kernels.support import check_support
from gpu_actors.kernels.variants import KernelKey
from gpu_actors.problem import Alignment, AttentionProblem, Direction, DispatchKey, Layout, MaskKind
from gpu_actors.score_mod import ScoreMod
from gpu_actors.validation.fields import flag, integer, one_of

__all__ = ["check_key"]

_CHOICES = {"direction": Direction, "layout": Layout, "mask": MaskKind, "alignment": Alignment}
_NAMES = ("dtype", "kv_dtype", "out_dtype", "compute")
_COUNTS = {"head_dim": 1, "head_dim_v": 1, "gqa_ratio": 1, "page_size": 0, "num_splits": 1, "row_tile": 0}
_FLAGS = (
    "softcap",
    "alibi",
    "sinks",
    "sink_tokens",
    "dropout",
    "descales",
    "lse",
    "varlen_q",
    "tree_mask",
    "persistent",
    "deterministic",
)
_SEQLEN = 128


def check_key(key: object) -> KernelKey:
    """``key`` itself if its kernel computes what its fields say.

    Raises InvalidRequest where a field is outside its domain, Unsupported where the kernel does not take it; both name
    the field. What is no `KernelKey` is the field "key".
    """
    if isinstance(key, AppendKey | PageCopyKey):
        return check_cache_key(key)
    if not isinstance(key, DispatchKey):
        raise InvalidRequest("key", key, "must be a DispatchKey, as inspect_key gives")
    _check_domains(key)
    family = _family(key)
    problem = _problem(key)
    check_support(problem, key.arch)
    refusal = family.refusal(problem, key.arch)
    if refusal is not None:
        raise refusal
    for field in ("num_splits", "persistent"):
        given, wanted = getattr(key, field), getattr(family, field)
        if given != wanted:
            raise Unsupported(field, given, f"{family.name} is compiled with {field}={wanted} alone", wanted)
    row_tiles = ROW_TILES if family.name == DECODE else (0,)
    if key.row_tile not in row_tiles:
        names = " or ".join(map(str, row_tiles))
        raise Unsupported("row_tile", key.row_tile, f"{family.name} takes {names} rows a block", row_tiles[0])
    return key


def _check_domains(key: DispatchKey) -> None:
    check_arch(key.arch)
    for field, choices in _CHOICES.items():
        names = get_args(choices)
        one_of(field, getattr(key, field), names, f"must be one of {', '.join(names)}")
    for field in _NAMES:
        _text(field, getattr(key, field))
    if key.bias is not None:
        _text("bias", key.bias)
    for field, low in _COUNTS.items():
        integer(field, getattr(key, field), low)
    for field in _FLAGS:
        flag(field, getattr(key, field))
    if key.score_mod is not None and not isinstance(key.score_mod, ScoreMod):
        raise InvalidRequest("score_mod", key.score_mod, "must be a ScoreMod, as a graph's plan has it, or None")


def _text(field: str, value: object) -> None:
    if not isinstance(value, str):
        raise InvalidRequest(field, value, "must be a name, such as a dtype's")


def _family(key: DispatchKey) -> KernelFamily:
    for family in FAMILIES:
        if isinstance(key.kernel, str) and key.kernel in (family.name, *family.companions):
            return family
    names = ", ".join(", ".join((family.name, *family.companions)) for family in FAMILIES)
    raise InvalidRequest("kernel", key.kernel, f"compiled kernels are {names}")


def _problem(key: DispatchKey) -> AttentionProblem:
    """A small problem with this key, for the checks that requests go through."""
    return AttentionProblem(
        direction=key.direction,
        layout=key.layout,
        batch=1,
        seqlen_q=_SEQLEN,
        seqlen_k=_SEQLEN,
        total_q=_SEQLEN,
        total_k=_SEQLEN,
        heads_q=key.gqa_ratio,
        heads_kv=1,
        head_dim=key.head_dim,
        head_dim_v=key.head_dim_v,
        dtype=key.dtype,
        kv_dtype=key.kv_dtype,
        out_dtype=key.out_dtype,
        compute=key.compute,
        softmax_scale=key.head_dim**-0.5,
        causal=key.causal,
        alignment=key.alignment,
        window=(_SEQLEN // 2, 0) if key.sliding_window else (-1, -1),
        softcap=1.0 if key.softcap else 0.0,
        alibi="heads" if key.alibi else None,
        sinks=key.sinks,
        sink_tokens=1 if key.sink_tokens else 0,
        bias=None if key.bias is None else (key.bias, False, False),
        dropout_p=0.5 if key.dropout else 0.0,
        descales=key.descales,
        return_lse=key.lse,
        page_size=key.page_size,
        deterministic=key.deterministic,
        score_mod=key.score_mod,
        varlen_q=key.varlen_q,
        tree_mask=key.tree_mask,
    )
