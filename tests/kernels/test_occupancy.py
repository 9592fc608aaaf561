"""Occupancy follows from registers, shared memory and threads as in NVIDIA's calculator."""

from __future__ import annotations

import pytest

from gpu_actors.kernels.occupancy import occupancy


@pytest.mark.parametrize(
    ("arch", "registers", "shared", "threads", "blocks", "warps"),
    [
        ("sm_80", 32, 0, 256, 8, 1.0),  # warps
        ("sm_86", 32, 0, 256, 6, 1.0),
        ("sm_90a", 255, 0, 128, 2, 0.125),  # registers: 256 a thread are allocated, 65,536 / (256 * 32) = 8 warps
        ("sm_90a", 128, 0, 128, 4, 0.25),
        ("sm_80", 32, 81_920, 128, 2, 0.125),  # shared memory: 164 KiB hold two blocks of 81 KiB
        ("sm_80", 32, 82_944, 128, 2, 0.125),  # exactly two blocks of 82 KiB
        ("sm_80", 32, 82_945, 128, 1, 0.0625),
        ("sm_90a", 168, 196_608, 384, 1, 0.1875),
        ("sm_120a", 40, 0, 32, 24, 0.5),  # blocks
    ],
)
def test_the_scarcest_resource_decides(
    arch: str, registers: int, shared: int, threads: int, blocks: int, warps: float
) -> None:
    assert occupancy(arch, registers, shared, threads) == (blocks, warps)
