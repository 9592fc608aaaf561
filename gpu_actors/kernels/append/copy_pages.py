"""The kernel that copies pages within a KV cache's pools: its key, source, grid and parameters."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from gpu_actors.compiling.assets import asset_source
from gpu_actors.compiling.source import KernelSource
from gpu_actors.devices.interface import Buffer, LaunchGeometry
from gpu_actors.errors import Unsupported
from gpu_actors.kernels.params import Binder, describe_operand, struct_layout
from gpu_actors.kernels.support import ELEMENTS
from gpu_actors.values import StableText

__all__ = ["PageCopyKey", "PageCopyProblem", "copy_source", "pack_page_copy", "page_copy_geometry"]

_WARPS, _WARP = 4, 32
_PART_BYTES = 8192  # four rounds of 16 bytes a thread
_MAX_BLOCKS = (1 << 31) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class PageCopyProblem:
    """Copy ``pairs`` pages of pools (num_blocks, page_size, heads_kv, head_dim) and (..., head_dim_v) of ``dtype``."""

    pairs: int
    num_blocks: int
    page_size: int
    heads_kv: int
    head_dim: int
    head_dim_v: int
    dtype: str

    @property
    def bytes(self) -> tuple[int, int]:
        """The bytes of a page of K, and of V."""
        rows = self.page_size * self.heads_kv * ELEMENTS[self.dtype].itemsize
        return rows * self.head_dim, rows * self.head_dim_v

    @property
    def parts(self) -> tuple[int, int]:
        """Blocks that share a page of K, and of V."""
        k, v = self.bytes
        return -(-k // _PART_BYTES), -(-v // _PART_BYTES)


@dataclass(frozen=True, slots=True, kw_only=True)
class PageCopyKey(StableText):
    """What compiles the kernel: one cubin an architecture."""

    kernel: ClassVar[str] = "copy_pages"
    arch: str


@functools.lru_cache(maxsize=64)
def copy_source(key: PageCopyKey) -> KernelSource:
    """What is compiled for a key."""
    macros = {"WARPS": _WARPS, "PART_BYTES": _PART_BYTES}
    return asset_source("append/copy_pages.cu", (key.kernel,), macros=macros, arch=key.arch)


def page_copy_geometry(problem: PageCopyProblem) -> LaunchGeometry:
    """The grid and block; no dynamic shared memory. Raises Unsupported where a grid cannot hold the blocks."""
    blocks = problem.pairs * sum(problem.parts)
    if blocks > _MAX_BLOCKS:
        reason = f"the pages make {blocks} blocks, and a grid holds {_MAX_BLOCKS}"
        raise Unsupported("pairs", problem.pairs, reason, _MAX_BLOCKS // sum(problem.parts))
    return LaunchGeometry((blocks, 1, 1), (_WARPS * _WARP, 1, 1), 0)


def pack_page_copy(problem: PageCopyProblem, buffers: Mapping[str, Buffer]) -> bytes:
    """The parameters of a launch.

    buffers: k_cache, v_cache, whose pages are contiguous in themselves; page_pairs int32 (pairs, 2) of (source,
    destination), no destination among the sources or twice. Raises InvalidRequest for what is not as described.
    """
    itemsize = ELEMENTS[problem.dtype].itemsize
    pools = {side: buffers[f"{side}_cache"] for side in "kv" if f"{side}_cache" in buffers}
    strides = {f"{side}_stride": pool.strides[0] * itemsize for side, pool in pools.items()}
    return _binder(problem).pack(buffers, strides)


@functools.lru_cache(maxsize=256)
def _binder(p: PageCopyProblem) -> Binder:
    layout, axes = struct_layout("Params", "append/copy_pages.cu"), ("", ".", ".", ".")
    outer = (p.num_blocks, p.page_size, p.heads_kv)
    operands = (
        describe_operand(layout, "page_pairs", "..", (p.pairs, 2), "int32", field="pairs"),
        describe_operand(layout, "k_cache", axes, (*outer, p.head_dim), p.dtype),
        describe_operand(layout, "v_cache", axes, (*outer, p.head_dim_v), p.dtype),
    )
    scalars = {
        "k_bytes": p.bytes[0],
        "v_bytes": p.bytes[1],
        "num_blocks": p.num_blocks,
        "k_parts": p.parts[0],
        "v_parts": p.parts[1],
    }
    return Binder.of(layout, operands, scalars)
