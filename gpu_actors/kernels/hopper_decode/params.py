"""Packs a launch of decode_sm90: tensor maps, then the parameters of every decode kernel.

struct Sm90DecodeParams of kernels_cu/hopper_decode/params.cuh:    k, v | DecodeParams
"""

from __future__ import annotations

from collections.abc import Mapping

from gpu_actors.attention.problem import AttentionProblem, DispatchKey
from gpu_actors.devices.interface import Buffer
from gpu_actors.kernels.decode.params import pack_decode
from gpu_actors.kernels.hopper.params import pad_to_maps, rows_map
from gpu_actors.kernels.hopper_decode.variant import sm90_decode_tile
from gpu_actors.kernels.program import NO_VALUES, EncodeTensorMap, Values
from gpu_actors.kernels.tiles import padded_head_dim

__all__ = ["pack_sm90_decode", "part_of"]


def part_of(page_size: int, keys: int) -> int:
    """The keys that one copy brings: of a tile of ``keys``, or the largest power of two that divides the page size."""
    return min(keys, page_size & -page_size) if page_size else keys


def pack_sm90_decode(
    problem: AttentionProblem,
    key: DispatchKey,
    ranges: int,
    encode: EncodeTensorMap | None,
    buffers: Mapping[str, Buffer],
    values: Values = NO_VALUES,
) -> bytes:
    """The parameters of decode_sm90.

    buffers: as `gpu_actors.kernels.decode.params.pack_decode` wants them. encode: the device's own tensor maps.
    Raises InvalidRequest as pack_decode does, and for what TMA cannot move.
    """
    assert encode is not None, "a launch by TMA is packed for a device"
    params = pack_decode(problem, key, ranges, buffers, values)
    part = part_of(problem.page_size, sm90_decode_tile(key).tile.block_n)
    dims = {"k_cache": problem.head_dim, "v_cache": problem.head_dim_v}
    maps = (
        rows_map(name, buffers[name], padded_head_dim(dim, problem.kv_dtype), part, encode)
        for name, dim in dims.items()
    )
    return pad_to_maps(b"".join((*maps, params)))
