"""How many blocks of a kernel fit on a multiprocessor, from its resources alone.

Figures: CUDA C++ Programming Guide, "Technical Specifications per Compute Capability". Registers are handed out by the
warp in units of 256; from compute capability 8.0 on a block pays 1 KiB of shared memory more than it asks for.
"""

from __future__ import annotations

from typing import NamedTuple

from gpu_actors.kernels.support import capability

__all__ = ["Occupancy", "occupancy", "shared_a_multiprocessor"]

_REGISTERS = 65_536
_REGISTER_UNIT = 256
_RESERVED_SHARED = 1024
_WARP = 32


class _Limits(NamedTuple):
    """The limits of one multiprocessor."""

    warps: int
    blocks: int
    shared_kib: int


# The limits by the first compute capability that has them.
_LIMITS = {
    80: _Limits(64, 32, 164),
    86: _Limits(48, 16, 100),
    87: _Limits(48, 16, 164),
    89: _Limits(48, 24, 100),
    90: _Limits(64, 32, 228),
    110: _Limits(48, 24, 228),
    120: _Limits(48, 24, 100),
}


class Occupancy(NamedTuple):
    """blocks: that run at once on a multiprocessor. warps: of them all, as a share of the most there can be."""

    blocks: int
    warps: float


def occupancy(arch: str, registers: int, shared_bytes: int, threads: int) -> Occupancy:
    """The occupancy of a kernel. registers: a thread. shared_bytes: a block, static and dynamic. threads: a block."""
    limits = _limits(arch)
    warps = -(-threads // _WARP)
    registers_a_warp = -(-max(registers, 1) * _WARP // _REGISTER_UNIT) * _REGISTER_UNIT
    blocks = min(
        limits.blocks,
        limits.warps // warps,
        _REGISTERS // registers_a_warp // warps,
        limits.shared_kib * 1024 // (shared_bytes + _RESERVED_SHARED),
    )
    return Occupancy(blocks, blocks * warps / limits.warps)


def shared_a_multiprocessor(arch: str) -> int:
    """Bytes of shared memory that the blocks of a multiprocessor have together, 1 KiB for each included."""
    return _limits(arch).shared_kib * 1024


def _limits(arch: str) -> _Limits:
    number = capability(arch)
    return _LIMITS[max((known for known in _LIMITS if known <= number), default=80)]
