"""The kernel that copies pages within a KV cache's pools: its key, macros, grid and parameters.

The pool is an `AppendProblem`, of which only the shape and dtype of the cache count.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from gpu_actors.devices.interface import Buffer, LaunchGeometry
from gpu_actors.kernels.append.variant import AppendProblem
from gpu_actors.kernels.macros import Macros
from gpu_actors.kernels.params import Binder, struct_layout
from gpu_actors.kernels.program import flat_grid
from gpu_actors.kernels.support import ELEMENTS
from gpu_actors.values import StableText

__all__ = ["PageCopyKey", "pack_page_copy", "page_copy_geometry"]

_WARPS, _WARP = 4, 32
_PART_BYTES = 8192  # four rounds of 16 bytes a thread


@dataclass(frozen=True, slots=True, kw_only=True)
class PageCopyKey(StableText):
    """What compiles the kernel: one cubin an architecture."""

    kernel: ClassVar[str] = "copy_pages"
    arch: str

    @property
    def macros(self) -> Macros:
        """What the kernel is compiled for."""
        return {"WARPS": _WARPS, "PART_BYTES": _PART_BYTES}


def page_copy_geometry(pairs: int, pool: AppendProblem) -> LaunchGeometry:
    """The launch that copies so many pages of a cache; no dynamic shared memory. Raises Unsupported as `flat_grid`."""
    blocks = pairs * sum(_parts(size) for size in _page_bytes(pool))
    return flat_grid(blocks, _WARPS * _WARP, 0, "pairs", pairs)


def pack_page_copy(pairs: int, pool: AppendProblem, buffers: Mapping[str, Buffer]) -> bytes:
    """The parameters of a launch that copies ``pairs`` pages of a cache.

    buffers: k_cache, v_cache, whose pages are contiguous in themselves; page_pairs int32 (pairs, 2) of (source,
    destination), no destination among the sources or twice. Raises InvalidRequest for what is not as described.
    """
    itemsize = ELEMENTS[pool.cache_dtype].itemsize
    pools = {side: buffers[f"{side}_cache"] for side in "kv" if f"{side}_cache" in buffers}
    strides = {f"{side}_stride": cache.strides[0] * itemsize for side, cache in pools.items()}
    return _binder(pairs, pool).pack(buffers, strides)


@functools.lru_cache(maxsize=256)
def _binder(pairs: int, pool: AppendProblem) -> Binder:
    layout, axes = struct_layout("Params", "append/copy_pages.cu"), ("", ".", ".", ".")
    outer = (pool.num_blocks, pool.page_size, pool.heads_kv)
    operands = [layout.operand("page_pairs", "..", (pairs, 2), "int32", field="pairs")]
    scalars = layout.named(pool)
    for side, dim, size in zip("kv", (pool.head_dim, pool.head_dim_v), _page_bytes(pool), strict=True):
        operands.append(layout.operand(f"{side}_cache", axes, (*outer, dim), pool.cache_dtype))
        scalars |= {f"{side}_bytes": size, f"{side}_parts": _parts(size)}
    return Binder.of(layout, operands, scalars)


def _page_bytes(pool: AppendProblem) -> tuple[int, int]:
    """The bytes of a page of K, and of V."""
    rows = pool.page_size * pool.heads_kv * ELEMENTS[pool.cache_dtype].itemsize
    return rows * pool.head_dim, rows * pool.head_dim_v


def _parts(size: int) -> int:
    """Blocks that share a page of so many bytes."""
    return -(-size // _PART_BYTES)
