"""The macros of kernels_cu/common/params.cuh, for which every kernel over tiles of queries and keys is compiled."""

from __future__ import annotations

from typing import TypeAlias

from gpu_actors.attention.problem import DispatchKey
from gpu_actors.kernels.support import ELEMENTS
from gpu_actors.kernels.tiles import Tile, shared_bytes_of, tile_of

__all__ = [
    "Macros",
    "bias_macros",
    "compute_macros",
    "flags",
    "forward_macros",
    "mask_macros",
    "score_macros",
    "tile_macros",
]

Macros: TypeAlias = dict[str, str | int]

# Significant bits of operands of a float32 request in a lower precision. f16 stands for its precision alone: kernels
# keep the range of float, so that large inputs do not become infinite.
_COMPUTE_BITS = {"tf32": 11, "f16": 11, "bf16": 8}


def flags(**options: bool) -> Macros:
    """The macros of options that are on. Options that are off keep their defaults."""
    return {name: 1 for name, on in options.items() if on}


def mask_macros(key: DispatchKey) -> Macros:
    """The macros of kernels_cu/common/mask.cuh."""
    # Sink tokens are exempt from a window, and from nothing else.
    sinks = key.sink_tokens and key.sliding_window
    return flags(CAUSAL=key.causal, WINDOW=key.sliding_window, SINK_TOKENS=sinks, CHUNKED=key.attention_chunk)


def score_macros(key: DispatchKey) -> Macros:
    """The macros of the score options that every kernel has, and of the LSE."""
    alibi = flags(ALIBI=key.alibi, ALIBI_SIGNED=key.alibi_signed)
    return alibi | flags(SOFTCAP=key.softcap, SINKS=key.sinks, DESCALES=key.descales, LSE=key.lse)


def bias_macros(key: DispatchKey) -> Macros:
    """The macros of a bias that is added to scores, or of a mask that hides them."""
    if key.bias == "bool":
        return {"BIAS_ELEMENT": "uint8_t", "BIAS_HIDES": 1}
    return {} if key.bias is None else {"BIAS_ELEMENT": ELEMENTS[key.bias].c_type}


def tile_macros(key: DispatchKey, tile: Tile, shared_bytes: int) -> Macros:
    return {
        "HEAD_DIM": key.head_dim,
        "HEAD_DIM_V": key.head_dim_v,
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "WARPS": tile.warps,
        "SHARED_BYTES": shared_bytes,
        "ELEMENT": ELEMENTS[key.dtype].c_type,
        "KV_ELEMENT": ELEMENTS[key.kv_dtype].c_type,
        "OUT_ELEMENT": ELEMENTS[key.out_dtype].c_type,
    }


def forward_macros(key: DispatchKey) -> Macros:
    macros = tile_macros(key, tile_of(key), shared_bytes_of(key)) | mask_macros(key) | score_macros(key)
    # The alignment matters if a mask or ALiBi measures from the diagonal.
    top_left = key.alignment == "top_left" and (key.mask != "full" or key.alibi)
    macros |= flags(VARLEN=key.varlen, TOP_LEFT=top_left, DROPOUT=key.dropout, POSITIONS=key.positions)
    macros |= flags(ROW_STATS=key.row_stats, WIDE_LSE=key.wide_lse)
    macros |= {f"SUMMED_{name.upper()}": 1 for name in key.summed}
    return macros | bias_macros(key) | compute_macros(key)


def compute_macros(key: DispatchKey) -> Macros:
    """The macros of the precision to which operands of a float32 request are rounded, if it asks for a lower one."""
    if key.dtype != "float32" or key.compute not in _COMPUTE_BITS:
        return {}
    # The conversion instruction rounds ties away from 0; f16 and bf16 round to even.
    return {"COMPUTE_BITS": _COMPUTE_BITS[key.compute]} | flags(TIES_AWAY=key.compute == "tf32")
