"""Checks of keys that come from callers, such as those given to ``ctx.nvrtc.warm``."""

from __future__ import annotations

from typing import get_args

from gpu_actors.attention.key_mask import Alignment, MaskKind
from gpu_actors.attention.problem import FLAGS, Direction, DispatchKey, Layout
from gpu_actors.attention.score_mod import ScoreMod
from gpu_actors.compiling.source import check_arch
from gpu_actors.compiling.variant import Variant
from gpu_actors.errors import InvalidRequest, Unsupported
from gpu_actors.fields import flag, integer, one_of
from gpu_actors.kernels.dispatch import family_of
from gpu_actors.kernels.support import check_support
from gpu_actors.kernels.trials import example_of

__all__ = ["check_key"]

_CHOICES = {"direction": Direction, "layout": Layout, "mask": MaskKind, "alignment": Alignment}
_NAMES = ("kernel", "dtype", "kv_dtype", "out_dtype", "compute")
_COUNTS = {"head_dim": 1, "head_dim_v": 1, "gqa_ratio": 1, "page_size": 0, "num_splits": 1, "row_tile": 0}
_SUMMED = ("", "q", "k", "v", "qk", "qv", "kv")


def check_key(key: object) -> DispatchKey | Variant:
    """Return ``key`` itself if its kernel computes what its fields say. `Variant.source` checks variants later.

    Raises InvalidRequest for a field outside its domain, Unsupported for one that the kernel does not take. For an
    object that is no `DispatchKey`, the error names the field "key".
    """
    if isinstance(key, Variant):
        return key
    if not isinstance(key, DispatchKey):
        raise InvalidRequest("key", key, "must be a DispatchKey, as inspect_key gives")
    check_arch(key.arch)
    for field, literal in _CHOICES.items():
        one_of(field, getattr(key, field), get_args(literal))
    for field in _NAMES if key.bias is None else (*_NAMES, "bias"):
        if not isinstance(getattr(key, field), str):
            raise InvalidRequest(field, getattr(key, field), "must be a name, such as a dtype's")
    for field, low in _COUNTS.items():
        integer(field, getattr(key, field), low)
    for field in FLAGS:
        flag(field, getattr(key, field))
    if key.score_mod is not None and not isinstance(key.score_mod, ScoreMod):
        raise InvalidRequest("score_mod", key.score_mod, "must be a ScoreMod, as a graph's plan has it, or None")
    one_of("summed", key.summed, _SUMMED, f"must be one of {', '.join(map(repr, _SUMMED))}")
    if key.summed and key.direction == "forward":
        raise Unsupported("summed", key.summed, "forward gives no gradients to add up", "")
    family = family_of(key)
    problem = example_of(key)
    check_support(problem, key.arch)
    refusal = family.refusal(problem, key.arch)
    if refusal is not None:
        raise refusal
    for field in ("num_splits", "persistent"):
        given, wanted = getattr(key, field), getattr(family, field)
        if given != wanted:
            raise Unsupported(field, given, f"{family.name} is compiled with {field}={wanted} alone", wanted)
    if key.row_tile not in family.row_tiles:
        names = " or ".join(map(str, family.row_tiles))
        raise Unsupported("row_tile", key.row_tile, f"{family.name} takes {names} rows a block", family.row_tiles[0])
    return key
