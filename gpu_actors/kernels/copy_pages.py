"""The kernel that copies pages within a KV cache's pools, into them and out of them.

The pool is an `AppendProblem`. Only the shape and dtype of its cache count.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

from gpu_actors.compiling.variant import Variant
from gpu_actors.devices.interface import Buffer, LaunchGeometry
from gpu_actors.kernels.append import AppendProblem
from gpu_actors.kernels.params import Binder, struct_layout
from gpu_actors.kernels.program import flat_grid
from gpu_actors.kernels.support import ELEMENTS

__all__ = ["pack_page_copy", "page_copy_geometry", "page_copy_variant"]

_WARPS, _WARP = 4, 32
_PART_BYTES = 8192  # four rounds of 16 bytes per thread


@functools.cache
def page_copy_variant(arch: str) -> Variant:
    return Variant("copy_pages", arch, {"WARPS": _WARPS, "PART_BYTES": _PART_BYTES})


def page_copy_geometry(pairs: int, pool: AppendProblem) -> LaunchGeometry:
    blocks = pairs * sum(_parts(size) for size in _page_bytes(pool))
    return flat_grid(blocks, _WARPS * _WARP, 0, "pairs", pairs)


def pack_page_copy(
    pairs: int, pool: AppendProblem, buffers: Mapping[str, Buffer], source: str = "cache", target: str = "cache"
) -> bytes:
    """Return the parameters of a launch that copies ``pairs`` pages of a cache, each of them contiguous.

    source, target: "cache", or "pages" for the buffers k_pages and v_pages, (pairs, ...). page_pairs: int32 (pairs, 2)
    of (source, destination); no destination occurs twice, or among the sources of the same pool.
    """
    itemsize = ELEMENTS[pool.cache_dtype].itemsize
    found = {
        f"{side}_{role}": buffers[f"{side}_{name}"]
        for role, name in (("source", source), ("target", target))
        for side in "kv"
        if f"{side}_{name}" in buffers
    }
    more = {f"{name}_stride": buffer.strides[0] * itemsize for name, buffer in found.items()}
    # A list of pages has one page per pair; the pool has its own number of pages.
    blocks = tuple(pool.num_blocks if name == "cache" else pairs for name in (source, target))
    return _binder(pairs, pool, (source, target), blocks).pack(buffers, more)


@functools.lru_cache(maxsize=256)
def _binder(pairs: int, pool: AppendProblem, names: tuple[str, str], blocks: tuple[int, ...]) -> Binder:
    layout, axes = struct_layout("Params", "append/copy_pages.cu"), ("", ".", ".", ".")
    operands = [layout.operand("page_pairs", "..", (pairs, 2), "int32", field="pairs")]
    scalars: dict[str, int] = {}
    for role, name, count in zip(("source", "target"), names, blocks, strict=True):
        scalars[f"{role}_blocks"] = count
        for side, dim in pool.sides.items():
            shape = (count, pool.page_size, pool.heads_kv, dim)
            operands.append(layout.operand(f"{side}_{name}", axes, shape, pool.cache_dtype, field=f"{side}_{role}"))
    for side, size in zip("kv", _page_bytes(pool), strict=True):
        scalars |= {f"{side}_bytes": size, f"{side}_parts": _parts(size)}
    return Binder.of(layout, operands, scalars)


def _page_bytes(pool: AppendProblem) -> tuple[int, int]:
    rows = pool.page_size * pool.heads_kv * ELEMENTS[pool.cache_dtype].itemsize
    return rows * pool.sides["k"], rows * pool.sides.get("v", 0)


def _parts(size: int) -> int:
    """The blocks that share a page of ``size`` bytes."""
    return -(-size // _PART_BYTES)
