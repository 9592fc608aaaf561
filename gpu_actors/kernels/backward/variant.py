"""The three kernels of a backward request: their macros and the threads of their blocks.

backward_prepare and backward_finish belong to backward_mma: they share its tile and its parameters, and their keys are
its key under their names.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from gpu_actors.attention.problem import DispatchKey
from gpu_actors.kernels.macros import Macros, flags, forward_macros
from gpu_actors.kernels.support import ELEMENTS, capability
from gpu_actors.kernels.tiles import backward_warp_tile, tile_of

__all__ = ["NAMES", "backward_macros", "backward_threads", "dq_floats", "gradient_macros", "keys_of"]

NAMES = "backward_prepare", "backward_mma", "backward_finish"

_PREPARE_THREADS = 128
_WARP = 32
_DS_BITS, _DS_BITS_OF_MODS = 14, 7  # of 15 that float16 has, and with room for derivatives up to 256
_FIRST_VECTOR_REDUCTION = 90  # compute capability from which four floats are added to global memory at once

# The macros of the outer kernels. Options that they do not read would only make more variants.
_COMMON = ("BLOCK_M", "ELEMENT", "KV_ELEMENT", "OUT_ELEMENT", "VARLEN", "SINKS", "DS_BITS")
_PREPARE = (*_COMMON, "HEAD_DIM_V", "COMPUTE_BITS", "TIES_AWAY", "NATURAL_LSE")
_FINISH = (*_COMMON, "HEAD_DIM", "WARPS", "BIAS_ELEMENT", "SUMMED_Q")


def keys_of(key: DispatchKey, names: Sequence[str]) -> tuple[DispatchKey, ...]:
    """The keys of the kernels of these names that are launched for the key of any of them, in order."""
    return tuple(dataclasses.replace(key, kernel=name) for name in names)


def gradient_macros(key: DispatchKey, names: Sequence[str], own: Macros) -> Macros:
    """The macros of the kernel before, in or after the products that a key names. own: of those but the first."""
    prepare, main, finish = keys_of(key, names)
    macros = {name: value for name, value in forward_macros(main).items() if name != "LSE"}
    if key.dtype == "float16":  # bf16 and what floats are rounded to have float's range
        macros["DS_BITS"] = _DS_BITS if key.score_mod is None else _DS_BITS_OF_MODS
    scored = key.softcap or key.alibi or key.bias is not None or key.score_mod is not None
    macros |= flags(NATURAL_LSE=scored)
    if key == prepare:
        return {name: macros[name] for name in _PREPARE if name in macros} | {"HEAD_DIM": key.head_dim_v}
    if key == finish:
        if key.bias == "bool":
            del macros["BIAS_ELEMENT"]  # a mask has no gradient
        return {name: macros[name] for name in _FINISH if name in macros} | {"HEAD_DIM_V": key.head_dim} | own
    return macros | own | {"STAGES": tile_of(main).stages} | ({"DETERMINISTIC": 1} if key.deterministic else {})


def backward_macros(key: DispatchKey) -> Macros:
    """The macros of kernels_cu/backward/params.cuh, for any of the three kernels."""
    width = 4 if capability(key.arch) >= _FIRST_VECTOR_REDUCTION else 1
    return gradient_macros(
        key, NAMES, {"DQ_FLOATS": dq_floats(key), "REDUCE_WIDTH": width, "WARP_TILE": _warp_tile(key)}
    )


def backward_threads(key: DispatchKey) -> int:
    """The threads of a block of one of the three kernels."""
    return _PREPARE_THREADS if key.kernel == NAMES[0] else tile_of(keys_of(key, NAMES)[1]).warps * _WARP


def dq_floats(key: DispatchKey) -> int:
    """Floats of dQ that a slot holds: what the lanes have in registers, columns that do not exist included.

    As Columns in kernels_cu/mma/shares.cuh deals out pairs of blocks of 8 columns; the kernels assert that it agrees.
    """
    tile = tile_of(keys_of(key, NAMES)[1])
    chunk = 16 // ELEMENTS[key.dtype].itemsize
    chunks = -(-key.head_dim // chunk // 2) * 2
    factor = next(factor for factor in (8, 4, 2) if chunks % factor == 0)
    pair = 16 // chunk
    group = max(factor, pair)
    pairs_a_group = group // pair
    rows = _warp_tile(key)
    sharing = tile.warps // (tile.block_m // rows)
    parts = pairs_a_group if sharing % pairs_a_group == 0 else 2 if sharing % 2 == 0 else 1
    groups = -(-chunks // group)
    pairs = -(-groups // (sharing // parts)) * (pairs_a_group // parts)
    return 2 * pairs * 4 * (rows // 16) * tile.warps * _WARP


def _warp_tile(key: DispatchKey) -> int:
    return backward_warp_tile(tile_of(keys_of(key, NAMES)[1]), key.dtype, key.head_dim, key.head_dim_v)
