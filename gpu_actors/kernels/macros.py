"""The macros of kernels_cu/common/params.cuh, which every kernel over tiles of queries and keys is compiled for."""

from __future__ import annotations

from typing import TypeAlias

from gpu_actors.kernels.support import ELEMENTS
from gpu_actors.kernels.tiles import shared_bytes_of, tile_of
from gpu_actors.problem import DispatchKey

__all__ = ["Macros", "forward_macros", "mask_options"]

Macros: TypeAlias = dict[str, str | int]

# Significant bits of operands, where a float32 request computes in less. Of f16 the precision counts and not the range,
# which kernels keep as wide as float's, so that large inputs do not become infinite.
_COMPUTE_BITS = {"tf32": 11, "f16": 11, "bf16": 8}


def mask_options(key: DispatchKey) -> dict[str, bool]:
    """The macros of kernels_cu/common/mask.cuh, and whether they are set."""
    return {
        "CAUSAL": key.causal,
        "WINDOW": key.sliding_window,
        # Sink tokens are exempt from a window, and only from that.
        "SINK_TOKENS": key.sink_tokens and key.sliding_window,
    }


def forward_macros(key: DispatchKey) -> Macros:
    """The macros of a key whose kernel works on tiles of the table. Options that are off are left to their defaults."""
    tile = tile_of(key)
    macros: Macros = {
        "HEAD_DIM": key.head_dim,
        "HEAD_DIM_V": key.head_dim_v,
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "WARPS": tile.warps,
        "SHARED_BYTES": shared_bytes_of(key),
        "ELEMENT": ELEMENTS[key.dtype].c_type,
        "KV_ELEMENT": ELEMENTS[key.kv_dtype].c_type,
        "OUT_ELEMENT": ELEMENTS[key.out_dtype].c_type,
    }
    options = {
        "VARLEN": key.varlen,
        **mask_options(key),
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
