"""From a DispatchKey to the source that is compiled for it and the grid that it is launched with.

A cubin serves every key with equal macros: what a kernel decides at run time (the GQA ratio, say) is not among them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import TypeAlias

from gpu_actors.devices.interface import LaunchGeometry
from gpu_actors.errors import InvalidRequest, Unsupported
from gpu_actors.kernels.append import AppendKey, append_source
from gpu_actors.kernels.assets import asset_source
from gpu_actors.kernels.backward_variants import (
    BACKWARD_PARTS,
    PREPARE_THREADS,
    backward_geometry,
    backward_keys,
    backward_macros,
)
from gpu_actors.kernels.copy_pages import PageCopyKey, copy_source
from gpu_actors.kernels.decode_variants import DECODE_MACROS, decode_keys, usual_decode_problems
from gpu_actors.kernels.dispatch import dispatch_key
from gpu_actors.kernels.sm90_variants import sm90_geometry, sm90_macros
from gpu_actors.kernels.source import KernelSource
from gpu_actors.kernels.support import ELEMENTS, FIRST_FP8_CAPABILITY, capability
from gpu_actors.kernels.tiles import Tile, num_q_tiles, shared_mem_bytes, tile_for
from gpu_actors.kernels.transposition import TRANSPOSE, parts_of, transposition_geometry, transposition_macros
from gpu_actors.problem import AttentionProblem, DispatchKey, MaskKind
from gpu_actors.score_mod import SCORE_HEADER

__all__ = [
    "KernelKey",
    "block_threads",
    "kernel_source",
    "launch_geometry",
    "standard_variants",
    "tile_of",
    "usual_backward_keys",
    "usual_decode_keys",
]

KernelKey: TypeAlias = DispatchKey | AppendKey | PageCopyKey
"""What a kernel is compiled and kept under."""

# Kernels that run before or after another, whose tile they share, by name.
_PARTS = {**BACKWARD_PARTS, TRANSPOSE: "forward_sm90"}

_MAX_BLOCKS = (1 << 31) - 1  # of grid.x; y and z end at 65,535, so grids are flat
_WARP = 32

# Significant bits of operands, where a float32 request computes in less. Of f16 the precision counts and not the range,
# which kernels keep as wide as float's, so that large inputs do not become infinite.
_COMPUTE_BITS = {"tf32": 11, "f16": 11, "bf16": 8}


@functools.lru_cache(maxsize=1024)
def kernel_source(key: KernelKey) -> KernelSource:
    """What is compiled for a key. Raises InvalidRequest for a key whose kernel is not compiled (the oracle's)."""
    if isinstance(key, AppendKey):
        return append_source(key)
    if isinstance(key, PageCopyKey):
        return copy_source(key)
    macros = _builder(key)(key)
    headers: dict[str, str] = {}
    if key.score_mod is not None and key.kernel not in BACKWARD_PARTS:  # which know no scores
        headers[SCORE_HEADER] = key.score_mod.header
    return asset_source(f"{key.kernel}.cu", (key.kernel,), macros=macros, headers=headers, arch=key.arch)


def block_threads(key: KernelKey) -> int:
    """Threads of a block of the key's kernel."""
    if key.kernel == "backward_prepare":
        return PREPARE_THREADS
    return _WARP * int(kernel_source(key).macros["WARPS"])


def launch_geometry(key: DispatchKey, problem: AttentionProblem, multiprocessors: int | None = None) -> LaunchGeometry:
    """The grid, block and dynamic shared memory in bytes of a problem's launch.

    multiprocessors: of the device, where it says, for kernels whose blocks stay for the whole launch.
    Raises Unsupported where the problem has more blocks than a grid can hold.
    """
    _builder(key)
    tile = tile_of(key)
    if key.kernel == TRANSPOSE:
        return transposition_geometry(problem, tile)
    if key.kernel == "forward_sm90":
        return sm90_geometry(key, problem, tile, multiprocessors)
    if key.direction == "backward":
        return backward_geometry(key, tile, _shared_bytes(key, tile), problem)
    blocks = num_q_tiles(problem.seqlen_q, tile.block_m) * problem.heads_q * problem.batch
    if blocks > _MAX_BLOCKS:
        reason = f"the request makes {blocks} blocks of {tile.block_m} rows, and a grid holds {_MAX_BLOCKS}"
        raise Unsupported("batch", problem.batch, reason, max(1, problem.batch * _MAX_BLOCKS // blocks))
    return LaunchGeometry((blocks, 1, 1), (tile.warps * _WARP, 1, 1), _shared_bytes(key, tile))


def standard_variants(arch: str) -> list[DispatchKey]:
    """The keys worth compiling ahead for ``arch``: the usual dtypes, head dims and masks, dense and varlen.

    fp8 is among them where the architecture has it. Every other variant compiles when it is first asked for.
    """
    dtypes = ["bfloat16", "float16"]
    if capability(arch) >= FIRST_FP8_CAPABILITY:
        dtypes.append("float8_e4m3fn")
    shapes: list[tuple[str, int, MaskKind, bool]] = []
    for dtype in dtypes:
        shapes += [(dtype, dim, mask, False) for dim in (64, 128) for mask in ("full", "causal")]
        shapes += [(dtype, dim, "causal", False) for dim in (80, 96, 192, 256)]
        shapes += [(dtype, dim, "causal_window", False) for dim in (64, 128)]
        shapes += [(dtype, dim, "causal", True) for dim in (64, 128)]
    shapes += [("float32", 64, mask, False) for mask in ("full", "causal")]
    shapes.append(("float32", 32, "full", True))  # what `gpu-actors embed` asks for
    keys = [dispatch_key(_usual_problem(*shape), arch) for shape in shapes]
    return keys + _transpositions(keys) + usual_decode_keys(arch)


def _transpositions(keys: list[DispatchKey]) -> list[DispatchKey]:
    """What runs before those of the kernels that want V transposed: a key for each cubin."""
    found: dict[KernelSource, DispatchKey] = {}
    for key in keys:
        for part in parts_of(key)[:-1]:
            found.setdefault(kernel_source(part), part)
    return list(found.values())


def usual_decode_keys(arch: str) -> list[DispatchKey]:
    """The kernels of the usual requests over caches, with what splits and merges their work: a key for each cubin."""
    found: dict[KernelSource, DispatchKey] = {}
    for problem in usual_decode_problems(arch):
        for key in decode_keys(problem, dispatch_key(problem, arch), planned=False):
            found.setdefault(kernel_source(key), key)
    return list(found.values())


def usual_backward_keys(arch: str) -> list[DispatchKey]:
    """The kernels of the usual gradients, those before and after the products included: a key for each cubin."""
    shapes: list[tuple[int, MaskKind, bool]] = [(dim, mask, False) for dim in (64, 128) for mask in ("full", "causal")]
    shapes += [(256, "causal", False), (64, "causal", True), (128, "causal", True)]
    found: dict[KernelSource, DispatchKey] = {}
    for dtype in ("bfloat16", "float16"):
        for shape in shapes:
            problem = replace(_usual_problem(dtype, *shape), direction="backward")
            for key in backward_keys(dispatch_key(problem, arch)):
                found.setdefault(kernel_source(key), key)
    return list(found.values())


def _usual_problem(dtype: str, head_dim: int, mask: MaskKind, varlen: bool) -> AttentionProblem:
    element = ELEMENTS[dtype]
    return AttentionProblem(
        layout="varlen" if varlen else "dense",
        batch=1,
        seqlen_q=1024,
        seqlen_k=1024,
        total_q=1024,
        total_k=1024,
        heads_q=1,
        heads_kv=1,
        head_dim=head_dim,
        head_dim_v=head_dim,
        dtype=dtype,
        kv_dtype=dtype,
        out_dtype=element.out,
        compute=element.computes[0],
        softmax_scale=head_dim**-0.5,
        causal=mask in ("causal", "causal_window"),
        window=(255, 0) if mask in ("window", "causal_window") else (-1, -1),
        descales=element.fp8,
    )


def tile_of(key: DispatchKey) -> Tile:
    """The tile that a key's kernel is compiled for."""
    widest = max(key.head_dim, key.head_dim_v)
    scale_only = not (key.softcap or key.alibi or key.bias or key.dropout or key.score_mod)
    kernel = _PARTS.get(key.kernel, key.kernel)
    return tile_for(kernel, key.direction, key.arch, key.dtype, widest, key.mask, scale_only, key.layout)


def _shared_bytes(key: DispatchKey, tile: Tile) -> int:
    kernel = _PARTS.get(key.kernel, key.kernel)
    return shared_mem_bytes(kernel, tile, key.dtype, key.head_dim, key.head_dim_v)


def _forward_macros(key: DispatchKey) -> dict[str, str | int]:
    """The macros of kernels_cu/forward_params.cuh. Options that are off are left to their defaults there."""
    tile = tile_of(key)
    macros: dict[str, str | int] = {
        "HEAD_DIM": key.head_dim,
        "HEAD_DIM_V": key.head_dim_v,
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "WARPS": tile.warps,
        "SHARED_BYTES": _shared_bytes(key, tile),
        "ELEMENT": ELEMENTS[key.dtype].c_type,
        "KV_ELEMENT": ELEMENTS[key.kv_dtype].c_type,
        "OUT_ELEMENT": ELEMENTS[key.out_dtype].c_type,
    }
    options = {
        "VARLEN": key.varlen,
        "CAUSAL": key.causal,
        "WINDOW": key.sliding_window,
        # Sink tokens are exempt from a window, and only from that.
        "SINK_TOKENS": key.sink_tokens and key.sliding_window,
        # The diagonal matters where something is measured from it.
        "TOP_LEFT": key.alignment == "top_left" and (key.mask != "full" or key.alibi),
        "SOFTCAP": key.softcap,
        "ALIBI": key.alibi,
        "SINKS": key.sinks,
        "DROPOUT": key.dropout,
        "DESCALES": key.descales,
        "LSE": key.lse,
    }
    macros |= {name: 1 for name, on in options.items() if on}
    if key.bias is not None:
        macros["BIAS_ELEMENT"] = ELEMENTS[key.bias].c_type
    if key.dtype == "float32" and key.compute in _COMPUTE_BITS:
        macros["COMPUTE_BITS"] = _COMPUTE_BITS[key.compute]
        if key.compute == "tf32":
            # As the conversion instruction rounds; f16 and bf16 round to even.
            macros["TIES_AWAY"] = 1
    return macros


def _mma_macros(key: DispatchKey) -> dict[str, str | int]:
    """The forward macros, and the stages of the ring."""
    return _forward_macros(key) | {"STAGES": tile_of(key).stages}


def _sm90_macros(key: DispatchKey) -> dict[str, str | int]:
    return sm90_macros(_forward_macros(key), key, tile_of(key))


def _backward_macros(key: DispatchKey) -> dict[str, str | int]:
    return backward_macros(key, tile_of(key), _forward_macros(key))


_MACROS: dict[str, Callable[[DispatchKey], dict[str, str | int]]] = {
    "forward_mma": _mma_macros,
    "forward_simple": _forward_macros,
    "forward_sm90": _sm90_macros,
    TRANSPOSE: lambda key: transposition_macros(key, tile_of(key)),
    **DECODE_MACROS,
    "backward_prepare": _backward_macros,
    "backward_mma": _backward_macros,
    "backward_finish": _backward_macros,
}


def _builder(key: DispatchKey) -> Callable[[DispatchKey], dict[str, str | int]]:
    builder = _MACROS.get(key.kernel)
    if builder is None:
        raise InvalidRequest("kernel", key.kernel, f"compiled kernels are {', '.join(_MACROS)}")
    return builder
