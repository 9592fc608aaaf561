"""The variants of the kernels that write to KV caches that are worth compiling ahead, and checks of their keys."""

from __future__ import annotations

import dataclasses
from typing import get_args

from gpu_actors.compiling.source import check_arch
from gpu_actors.errors import InvalidRequest
from gpu_actors.kernels.append.copy_pages import PageCopyKey
from gpu_actors.kernels.append.variant import AppendKey, AppendLayout, AppendProblem, Rope, append_key
from gpu_actors.validation.fields import flag, integer, one_of

__all__ = ["check_kv_key", "kv_variants"]

_LAYOUTS = get_args(AppendLayout)


def kv_variants(arch: str) -> list[AppendKey | PageCopyKey]:
    """What a `KvCache` of the usual dtypes and head dims launches besides attention, with a `Rope` of halves or none.

    Every other variant compiles when it is first asked for.
    """
    plain = AppendProblem(
        layout="paged", batch=1, total=1, heads_kv=1, head_dim=128, head_dim_v=128, dtype="bfloat16",
        cache_dtype="bfloat16", page_size=16, num_blocks=1, max_blocks=1,
    )  # fmt: skip
    problems = []
    for dim in (64, 128):
        rows = dataclasses.replace(plain, head_dim=dim, head_dim_v=dim)
        turned = dataclasses.replace(rows, rope=Rope(dim=dim), heads_q=1)
        problems += [
            dataclasses.replace(problem, dtype=dtype, cache_dtype=dtype)
            for dtype in ("bfloat16", "float16")
            for problem in (rows, turned)
        ]
        problems.append(dataclasses.replace(turned, cache_dtype="float8_e4m3fn", descales=True))
    return [*(append_key(problem, arch) for problem in problems), PageCopyKey(arch=arch)]


def check_kv_key(key: AppendKey | PageCopyKey) -> AppendKey | PageCopyKey:
    """``key`` itself if its kernel does what its fields say.

    Raises InvalidRequest and Unsupported, naming the field.
    """
    check_arch(key.arch)
    if isinstance(key, PageCopyKey):
        return key
    one_of("layout", key.layout, _LAYOUTS, f"must be one of {', '.join(_LAYOUTS)}")
    for field in ("dtype", "cache_dtype"):
        if not isinstance(getattr(key, field), str):
            raise InvalidRequest(field, getattr(key, field), "must be a dtype's name")
    for field in ("head_dim", "head_dim_v", "rotary_dim"):
        integer(field, getattr(key, field), 0)
    for field in ("interleaved", "tables", "positions", "query", "descales"):
        flag(field, getattr(key, field))
    rotated = key.rotary_dim > 0
    problem = AppendProblem(
        layout=key.layout, batch=1, total=1, heads_kv=1, head_dim=key.head_dim, head_dim_v=key.head_dim_v,
        dtype=key.dtype, cache_dtype=key.cache_dtype, page_size=8, num_blocks=1, max_blocks=1, max_seq=1,
        rope=Rope(dim=key.rotary_dim, interleaved=key.interleaved, table_rows=int(key.tables)) if rotated else None,
        positions=key.positions, heads_q=int(key.query), descales=key.descales,
    )  # fmt: skip
    if append_key(problem, key.arch) != key:
        raise InvalidRequest("rotary_dim", key.rotary_dim, "nothing is rotated, so nothing is interleaved or in tables")
    return key
