"""What decode_sm90 launches: that kernel, between the split and the merge of every decode kernel."""

from __future__ import annotations

import functools

from gpu_actors.attention.problem import AttentionProblem, DispatchKey
from gpu_actors.devices.interface import LaunchGeometry
from gpu_actors.kernels.decode.launch import UNKNOWN_MULTIPROCESSORS, split_program
from gpu_actors.kernels.family import KernelFamily
from gpu_actors.kernels.hopper_decode.params import pack_sm90_decode
from gpu_actors.kernels.hopper_decode.variant import (
    NAME,
    SM90_ROW_TILES,
    sm90_decode_macros,
    sm90_decode_refuses,
    sm90_decode_threads,
    sm90_decode_tile,
    sm90_row_tile,
)
from gpu_actors.kernels.program import Part, Program, Target

__all__ = ["DECODE_SM90"]


def sm90_decode_program(problem: AttentionProblem, key: DispatchKey, target: Target) -> Program:
    """The kernels of ``key``, which names decode_sm90: a range of the work for each multiprocessor."""
    tile = sm90_decode_tile(key)
    ranges = max(1, target.multiprocessors or UNKNOWN_MULTIPROCESSORS) * tile.blocks
    geometry = LaunchGeometry((ranges, 1, 1), (sm90_decode_threads(key), 1, 1), tile.shared_bytes)
    pack = functools.partial(pack_sm90_decode, problem, key, ranges, target.encode)
    return split_program(problem, Part(key, geometry, pack), ranges, target.lengths_on_host)


DECODE_SM90 = KernelFamily(
    NAME,
    "computes 16 packed rows and more over caches on Hopper with TMA and wgmma, splitting the keys",
    sm90_decode_program,
    sm90_decode_macros,
    sm90_decode_threads,
    "forward",
    ("cache", "paged"),
    ("float8_e5m2", "float8_e4m3fn", "float16", "bfloat16"),
    refuses=sm90_decode_refuses,
    row_tile=sm90_row_tile,
    row_tiles=SM90_ROW_TILES,
    tma=True,
    lacks=("latent", "cache_batch_idx", "cache_leftpad", "bias"),
)
