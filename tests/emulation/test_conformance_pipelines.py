"""mbarriers, bulk copies and reductions, stmatrix and warp specialisation."""

from __future__ import annotations

import struct
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from inside.compiling import asset_headers
from kernel_runs import KernelRun, Runner, pointers

from gpu_actors.devices.emulation import EmulationFault, build_module

FILE = "conformance/pipelines.cu"


@pytest.mark.parametrize("rounds", [1, 2, 3, 7])
def test_bulk_loads_feed_consumers_through_mbarriers(runner: Runner, rounds: int) -> None:
    tiles = np.random.default_rng(0).integers(-50, 50, (rounds, 512)).astype(np.float32)
    run = KernelRun(
        FILE,
        "bulk_pipeline",
        {"in": tiles, "out": np.zeros(512, np.float32)},
        lambda place: [*pointers("in", "out")(place), struct.pack("<i", rounds)],
        block=160,
        shared_bytes=2 * 2048 + 32,
    )
    for result in runner(run):
        result.check(out=tiles.sum(0))


def test_mbarriers_track_async_copies(runner: Runner) -> None:
    words = np.random.default_rng(1).integers(0, 1 << 32, 512, dtype=np.uint32)
    arrays = {"in": words, "out": np.zeros(512, np.uint32)}
    run = KernelRun(FILE, "copy_arrivals", arrays, pointers("in", "out"), block=64, shared_bytes=2064)
    for result in runner(run):
        result.check(out=np.concatenate([words[255::-1], words[:255:-1]]))


def test_bulk_stores_copy_and_add(runner: Runner) -> None:
    rng = np.random.default_rng(2)
    copied = rng.integers(0, 1 << 32, 256, dtype=np.uint32)
    added: dict[str, Any] = {
        "f32": rng.standard_normal(256).astype(np.float32),
        "f16": rng.standard_normal(512).astype(np.float16),
        "bf16": rng.standard_normal(512).astype(ml_dtypes.bfloat16),
    }
    before = {name: rng.standard_normal(x.shape).astype(x.dtype) for name, x in added.items()}
    source = np.concatenate([copied, *(x.view(np.uint32) for x in added.values())])
    words = {name: np.zeros(256, np.uint32) for name in ("copy", "seen")}
    params = pointers("in", "copy", *added, "seen")
    run = KernelRun(FILE, "bulk_stores", {"in": source, **words, **before}, params, block=128, shared_bytes=4096)
    for result in runner(run):
        result.check(copy=copied, seen=copied, **{name: before[name] + x for name, x in added.items()})


def test_matrix_stores_gather_rows_from_lanes(runner: Runner) -> None:
    words = np.random.default_rng(3).integers(0, 1 << 32, (14, 32), dtype=np.uint32)
    tiles = words.view(np.uint16).reshape(14, 8, 8)  # word i of all lanes is one matrix
    turned = (1, 4, 5, 10, 11, 12, 13)
    expected = np.stack([tile.T if i in turned else tile for i, tile in enumerate(tiles)])
    arrays = {"in": words, "out": np.zeros(448, np.uint32)}
    for result in runner(KernelRun(FILE, "matrix_stores", arrays, pointers("in", "out"), shared_bytes=1792)):
        result.check(out=np.ascontiguousarray(expected).view(np.uint32).reshape(448))


def test_specialised_warps_elect_one_lane_each(runner: Runner) -> None:
    arrays = {"elected": np.zeros(1, np.int32), "sums": np.zeros(8, np.float32), "lanes": np.zeros(1, np.int32)}
    run = KernelRun(FILE, "specialised", arrays, pointers(*arrays), block=384, grid=3)
    evens, odds = sum(range(0, 384, 2)), sum(range(1, 384, 2))
    sums = 3 * np.array([192, 384, 576, evens, 192, 384, 576, odds], np.float32)
    for result in runner(run):
        result.check(elected=np.array([36]), sums=sums, lanes=np.array([3 * 12 * 496]))


GIVES = """
#include "ptx.cuh"
extern "C" __global__ void __launch_bounds__(384, 1) gives(int kept) {
  if (threadIdx.x >= 128) ptx::setmaxnreg_inc<240>();
  else if (kept == 24) ptx::setmaxnreg_dec<24>();
  else ptx::setmaxnreg_dec<32>();
}
"""


def test_warps_share_the_registers_of_the_launch_and_no_others() -> None:
    """384 threads start with 168 registers each. A warpgroup of 32 beside two of 240 would need 1,024 more in all."""
    module = build_module(GIVES, {}, asset_headers(GIVES))
    module.launch("gives", 1, 384, 0, struct.pack("<i", 24), [])
    with pytest.raises(EmulationFault, match=r"setmaxnreg\.inc") as fault:
        module.launch("gives", 1, 384, 0, struct.pack("<i", 32), [])
    assert fault.value.kind == "deadlock"


def test_a_bulk_load_reads_what_threads_wrote_before_the_fence(runner: Runner) -> None:
    numbers = np.random.default_rng(2).integers(0, 1 << 31, 128).astype(np.uint32)
    arrays = {"in": numbers, "middle": np.zeros(128, np.uint32), "out": np.zeros(128, np.uint32)}
    params = pointers("in", "middle", "out")
    run = KernelRun(FILE, "written_then_loaded", arrays, params, block=128, shared_bytes=520)
    for result in runner(run):
        result.check(out=numbers + 1, middle=numbers + 1)
