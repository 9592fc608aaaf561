"""Buffers, arguments and tensor maps: what is refused before a launch, and what a launch does not change."""

from __future__ import annotations

import gc
import re
import struct
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
from inside.compiling import asset_text
from inside.package import Delivery, Schedule

from gpu_actors.devices.emulation import (
    EmulatedBuffer,
    EmulatedModule,
    EmulationFault,
    build_module,
    encode_tensor_map,
    runtime,
)
from gpu_actors.errors import InvalidRequest

SOURCE = """
#include "ptx/types.cuh"
struct Mixed {
  double scale;
  char tag;
  ptx::TensorMap map;
};
extern "C" __global__ void arguments(float* out, char byte, short half, Mixed mixed, long long wide) {
  if (reinterpret_cast<unsigned long long>(&mixed.map) % 64) __trap();
  out[threadIdx.x] = static_cast<float>(byte + half + mixed.scale + mixed.tag + wide + mixed.map.opaque[0]);
}
extern "C" __global__ void shape(unsigned* out) {
  const unsigned block = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
  const unsigned thread = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
  out[block * blockDim.x * blockDim.y * blockDim.z + thread] = block * 1000 + thread;
}
extern "C" __global__ void fresh(float* out) {
  DYNAMIC_SHARED(dynamic);
  __shared__ float fixed[32];
  out[threadIdx.x] = reinterpret_cast<float*>(dynamic)[threadIdx.x] + fixed[threadIdx.x];
  fixed[threadIdx.x] = reinterpret_cast<float*>(dynamic)[threadIdx.x] = 1.0f;
}
extern "C" __global__ void counter(int* count, int* order) {
  if (threadIdx.x == 0) order[atomicAdd(count, 1)] = blockIdx.x;
}
"""


@pytest.fixture(scope="module")
def module(module_cache: Path) -> EmulatedModule:
    return build_module(SOURCE, cache_dir=module_cache)


@pytest.mark.parametrize("name", ["MAX_THREADS", "STACK_BYTES", "STACK_GUARD", "MAX_SHARED_BYTES", "MAX_FRAMES"])
def test_python_and_the_emulation_have_the_same_limits(name: str) -> None:
    value = re.search(rf"constexpr \w+ {name} = (\d+)u?(?: << (\d+))?;", asset_text("emulation/core.cuh"))
    assert value is not None
    assert getattr(runtime, f"_{name}") == int(value[1]) << int(value[2] or 0)


@pytest.mark.parametrize(("enumeration", "names"), [("Delivery", Delivery), ("Schedule", Schedule)])
def test_python_and_the_emulation_number_choices_alike(enumeration: str, names: Any) -> None:
    listed = re.search(rf"enum class {enumeration} : uint32_t \{{ (.*?) \}};", asset_text("emulation/core.cuh"))
    assert listed is not None
    assert tuple(listed[1].split(", ")) == get_args(names)


def pointer(buffer: EmulatedBuffer) -> bytes:
    return struct.pack("<Q", buffer.address)


def test_arguments_of_every_size_arrive(module: EmulatedModule) -> None:
    out = EmulatedBuffer(16, "out")
    mixed = struct.pack("<db", 0.5, 3).ljust(64, b"\0") + struct.pack("<16Q", 7, *[0] * 15)
    params = [pointer(out), struct.pack("<b", -4), struct.pack("<h", 1000), mixed, struct.pack("<q", 1 << 20)]
    module.launch("arguments", 1, 4, 0, params, [out])
    assert (out.view(np.float32) == -4 + 1000 + 0.5 + 3 + (1 << 20) + 7).all()


@pytest.mark.parametrize(
    ("params", "text"),
    [
        ([b"12345678"], "1 arguments for a kernel that takes 5"),
        ([b"12345678"] * 5, "argument 1 has 8 bytes, the kernel takes 1"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(module: EmulatedModule, params: list[bytes], text: str) -> None:
    with pytest.raises(EmulationFault, match=text) as caught:
        module.launch("arguments", 1, 4, 0, params, [])
    assert caught.value.kind == "argument"


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"entry": "absent"}, "entry"),
        ({"grid": 0}, "grid"),
        ({"grid": (1, 1, 1, 1)}, "grid"),
        ({"block": (32, 64)}, "block"),
        ({"shared_bytes": 232449}, "shared_bytes"),
        ({"delivery": "never"}, "delivery"),
        ({"schedule": "fair"}, "schedule"),
        ({"threads": 0}, "threads"),
    ],
)
def test_a_launch_that_makes_no_sense_is_refused_by_field(
    module: EmulatedModule, change: dict[str, Any], field: str
) -> None:
    out = EmulatedBuffer(128, "out")
    launch = {"entry": "shape", "grid": 1, "block": 32, "shared_bytes": 0, "params": pointer(out), "buffers": [out]}
    with pytest.raises(InvalidRequest) as caught:
        module.launch(**{**launch, **change})
    assert caught.value.field == field


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_grids_and_blocks_have_three_dimensions(module: EmulatedModule, threads: int) -> None:
    grid, block = (2, 3, 4), (5, 3, 7)
    out = EmulatedBuffer(4 * 24 * 105, "out")
    module.launch("shape", grid, block, 0, pointer(out), [out], threads=threads)
    expected = np.arange(24)[:, None] * 1000 + np.arange(105)
    np.testing.assert_array_equal(out.view(np.uint32, (24, 105)), expected)


def test_shared_memory_is_nan_at_the_start_of_every_block(module: EmulatedModule) -> None:
    for block in range(3):
        out = EmulatedBuffer(128, "out")
        module.launch("fresh", 1 + block, 32, 128, pointer(out), [out], threads=1)
        assert np.isnan(out.view(np.float32)).all()


def starts(module: EmulatedModule, blocks: int, **how: Any) -> list[int]:
    """The numbers of the blocks in the order in which they increment a counter."""
    count, order = EmulatedBuffer(4, "count"), EmulatedBuffer(4 * blocks, "order")
    count.array[...] = 0
    module.launch("counter", blocks, 32, 0, [pointer(count), pointer(order)], [count, order], **how)
    assert count.view(np.int32)[0] == blocks
    return [int(block) for block in order.view(np.int32)]


@pytest.mark.parametrize("blocks", [1, 2, 6, 64, 97])
def test_the_seed_picks_the_order_in_which_blocks_start(module: EmulatedModule, blocks: int) -> None:
    orders = [starts(module, blocks, threads=1, seed=seed) for seed in range(12)]
    assert sorted(starts(module, blocks, threads=2)) == orders[0] == list(range(blocks))
    assert orders[1] == list(range(blocks))[::-1]
    assert all(sorted(order) == list(range(blocks)) for order in orders)
    if blocks >= 64:
        assert len({tuple(order) for order in orders}) > 8


def test_launches_from_many_threads_do_not_mix(module: EmulatedModule) -> None:
    def work(seed: int) -> None:
        for _ in range(10):
            out, small = EmulatedBuffer(4 * 6 * 64, "out"), EmulatedBuffer(16, "small")
            module.launch("shape", 6, 64, 0, pointer(out), [out], seed=seed)
            with pytest.raises(EmulationFault) as caught:
                module.launch("shape", 6, 64, 0, pointer(small), [small])
            assert caught.value.buffer == "small"
            expected = np.arange(6)[:, None] * 1000 + np.arange(64)
            np.testing.assert_array_equal(out.view(np.uint32, (6, 64)), expected)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))


def test_buffers_start_as_nan_end_at_a_guard_and_live_as_long_as_their_arrays() -> None:
    buffer = EmulatedBuffer(40, "x")
    assert buffer.address % 16 == 0
    assert np.isnan(buffer.view(np.float32)).all()
    array = buffer.view(np.float32, (2, 5))
    array[...] = 3.0
    del buffer
    gc.collect()
    assert (array == 3.0).all()
    assert EmulatedBuffer(0, "empty").array.size == 0
    with pytest.raises(InvalidRequest, match="nbytes=-1"):
        EmulatedBuffer(-1)


def test_a_copy_keeps_the_elements_of_any_strides() -> None:
    array = np.arange(24, dtype=np.int16).reshape(4, 6)[::2, ::-1]
    np.testing.assert_array_equal(EmulatedBuffer.of(array).view(np.int16, (2, 6)), array)


GOOD_MAP: dict[str, Any] = {
    "address": 1024,
    "dtype": "float16",
    "shape": (64, 10),
    "strides": (128,),
    "box": (64, 8),
    "swizzle": "128B",
}


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"address": 1032}, "address"),
        ({"dtype": "float64"}, "dtype"),
        ({"shape": ()}, "shape"),
        ({"shape": (64, 0)}, "shape"),
        ({"strides": (100,)}, "strides"),
        ({"strides": ()}, "strides"),
        ({"box": (64, 257)}, "box"),
        ({"box": (4, 8)}, "box"),
        ({"box": (128, 8)}, "box"),
        ({"swizzle": "256B"}, "swizzle"),
    ],
)
def test_tensor_maps_follow_the_rules_of_the_driver(change: dict[str, Any], field: str) -> None:
    assert len(encode_tensor_map(**GOOD_MAP)) == 128
    with pytest.raises(InvalidRequest) as caught:
        encode_tensor_map(**{**GOOD_MAP, **change})
    assert caught.value.field == field
