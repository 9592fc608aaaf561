"""Packs a launch of backward_sm90: tensor maps, then the parameters of every backward kernel.

struct Sm90BackwardParams of kernels_cu/hopper_backward/params.cuh:    q, k, v, dout | BackwardParams | ScoreParams
"""

from __future__ import annotations

from collections.abc import Mapping

from gpu_actors.attention.problem import AttentionProblem, DispatchKey
from gpu_actors.devices.interface import Buffer
from gpu_actors.kernels.backward.params import pack_backward
from gpu_actors.kernels.hopper.params import pad_to_maps, rows_map
from gpu_actors.kernels.program import EncodeTensorMap, Values
from gpu_actors.kernels.tiles import padded_backward_dims, shares_keys, tile_of

__all__ = ["pack_sm90_backward"]


def pack_sm90_backward(
    problem: AttentionProblem,
    key: DispatchKey,
    encode: EncodeTensorMap | None,
    buffers: Mapping[str, Buffer],
    values: Values,
) -> bytes:
    """The parameters of backward_sm90.

    buffers: as `gpu_actors.kernels.backward.params.pack_backward` wants them. encode: the device's own tensor maps.
    Raises InvalidRequest as pack_backward does, and for what TMA cannot move.
    """
    assert encode is not None, "a launch by TMA is packed for a device"
    params = pack_backward(problem, True, buffers, values)
    tile = tile_of(key)
    dim, dim_v = padded_backward_dims(tile, key.head_dim, key.head_dim_v)
    share = 2 if shares_keys(tile) else 1  # of the columns of Q and dO, which a consumer multiplies
    maps = (
        rows_map("q", buffers["q"], dim // share, tile.block_m, encode),
        rows_map("k", buffers["k"], dim, tile.block_n, encode),
        rows_map("v", buffers["v"], dim_v, tile.block_n, encode),
        rows_map("dout", buffers["dout"], dim_v // share, tile.block_m, encode),
    )
    return pad_to_maps(b"".join((*maps, params)))
