"""Places of boxes that an H100 refuses, and the ends of rows that it writes, on the emulated device.

Both were measured on an H100, because the PTX ISA says neither. `test_conformance_tensors.py` and
`test_second_reading_tma.py` compare what is stored and added with the second reading.
"""

from __future__ import annotations

import dataclasses
import struct
from pathlib import Path

import numpy as np
import pytest
from isa import tma
from kernel_runs import emulated_module, launch_emulated
from second_reading import ORDER, TENSORS_FILE, box_case, box_run, refusal

from gpu_actors.devices.emulation import EmulatedBuffer, EmulatedModule, EmulationFault, build_module, encode_tensor_map

REFUSED = [  # bytes of an element, place, kind, what the text says
    (4, (-4, 0), "argument", "coordinate -4 of dimension 0 is negative"),
    (4, (0, -1), "argument", "coordinate -1 of dimension 1 is negative"),
    (2, (8, -40), "argument", "coordinate -40 of dimension 1 is negative"),  # a box wholly outside
    (4, (1, 0), "misaligned", "coordinate 1 of dimension 0 is byte 4 of a row, no multiple of 16"),
    (4, (2, 3), "misaligned", "coordinate 2 of dimension 0 is byte 8 of a row, no multiple of 16"),
    (2, (4, 0), "misaligned", "coordinate 4 of dimension 0 is byte 8 of a row, no multiple of 16"),
]


@pytest.fixture(scope="module")
def module(module_cache: Path) -> EmulatedModule:
    return emulated_module(TENSORS_FILE, {}, module_cache)


@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize(("size", "place", "kind", "text"), REFUSED)
def test_a_store_that_an_h100_refuses_is_a_fault(
    module: EmulatedModule, size: int, place: tuple[int, int], kind: str, text: str, add: bool
) -> None:
    made = tma.TensorMap(size, (48, 6), (192,), (8, 3))
    found = refusal(module, made, (0, 0), place, add)
    assert found == (kind, f"TMA {'reduction' if add else 'store'}: {text}")


def test_bytes_move_at_multiples_of_16_alone(module: EmulatedModule) -> None:
    made, first = tma.TensorMap(1, (48, 6), (64,), (16, 3)), (0, 0)
    for at in (-7, 5, 17):
        text = f"TMA load: coordinate {at} of dimension 0 is byte {at} of a row, no multiple of 16"
        assert refusal(module, made, (at, 0), first, False) == ("misaligned", text)
    assert refusal(module, made, first, (5, 0), False)[0] == "misaligned"
    assert refusal(module, made, (32, 1), (16, 0), False) == ("", "")


def test_a_load_may_begin_before_the_tensor(module: EmulatedModule) -> None:
    for load in ((-4, -2), (0, -1), (-40, 0)):
        case = box_case(tma.TensorMap(4, (40, 6), (160,), (8, 3)), load, (0, 0), False, 0)
        launch_emulated(module, case.run, ORDER).check(**case.expected)


@pytest.mark.parametrize("add", [False, True])
def test_the_end_of_a_row_is_written_inside_of_a_buffer_alone(module: EmulatedModule, add: bool) -> None:
    """The last row ends within 16 bytes, and so does the buffer."""
    run = box_run(tma.TensorMap(4, (5, 3), (32,), (8, 3)), (0, 0), (0, 0), add, 0)
    short = dataclasses.replace(run, arrays={**run.arrays, "target": run.arrays["target"][: 2 * 32 + 20]})
    with pytest.raises(EmulationFault, match="32 bytes at byte 64 of buffer 'target' \\(84 bytes\\)") as caught:
        launch_emulated(module, short, ORDER)
    assert caught.value.kind == "out_of_bounds"


UNFENCED = """
#include "ptx/atomic.cuh"
#include "ptx/fence.cuh"
#include "ptx/memory.cuh"
#include "ptx/tma.cuh"

extern "C" __global__ void store_five(const __grid_constant__ ptx::TensorMap map, float* out, int place) {
  DYNAMIC_SHARED(shared);
  const uint32_t base = ptx::shared_address(shared), zeros[4] = {0, 0, 0, 0};
  for (int i = 0; i < 4; i++) ptx::store_shared_v4(base + 16 * i, zeros);
  ptx::fence_proxy_async();
  ptx::reduce_add(out + place, 1.0f);
  ptx::tma_store(&map, base, 0);
  ptx::bulk_commit();
  ptx::bulk_wait<0>();
}
"""


@pytest.mark.parametrize(("place", "kind"), [(4, "unfenced"), (5, "unfenced"), (7, "unfenced"), (8, "")])
def test_the_end_of_a_row_is_known_to_both_proxies(module_cache: Path, place: int, kind: str) -> None:
    """A thread adds to a float near a row of five floats, for which a store writes eight."""
    out = EmulatedBuffer.of(np.ones(16, np.float32), "out")
    tensor = encode_tensor_map(out.address, "float32", (5,), (), (16,))
    params = [tensor, struct.pack("<Q", out.address), struct.pack("<i", place)]
    found = ""
    try:
        build_module(UNFENCED, cache_dir=module_cache).launch("store_five", 1, 1, 64, params, [out])
    except EmulationFault as fault:
        found = fault.kind
    assert found == kind
