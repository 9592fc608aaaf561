"""How many blocks of a kernel fit on a multiprocessor, from its resources alone.

Figures: CUDA C++ Programming Guide, "Technical Specifications per Compute Capability". Registers are allocated per warp
in units of 256. From compute capability 8.0 on, a block takes 1 KiB of shared memory more than it asks for.
"""

from __future__ import annotations

from typing import NamedTuple

from gpu_actors.errors import Unsupported
from gpu_actors.kernels.support import capability

__all__ = ["Occupancy", "occupancy", "shared_a_multiprocessor", "shared_mem_limit"]

_REGISTERS = 65_536
_REGISTER_UNIT = 256
_RESERVED_SHARED = 1024
_WARP = 32


class _Limits(NamedTuple):
    warps: int
    blocks: int
    shared_kib: int


# The limits by the first compute capability that has them.
_LIMITS = {
    75: _Limits(32, 16, 64),
    80: _Limits(64, 32, 164),
    86: _Limits(48, 16, 100),
    87: _Limits(48, 16, 164),
    88: _Limits(48, 16, 100),
    89: _Limits(48, 24, 100),
    90: _Limits(64, 32, 228),
    110: _Limits(48, 24, 228),
    120: _Limits(48, 24, 100),
}


class Occupancy(NamedTuple):
    """blocks: those that run at once on a multiprocessor. warps: their warps, as a share of the most possible."""

    blocks: int
    warps: float


def occupancy(arch: str, registers: int, shared_bytes: int, threads: int) -> Occupancy:
    limits = _limits(capability(arch))
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
    """The bytes of shared memory that the blocks of a multiprocessor have together, with the 1 KiB for each block."""
    return _limits(capability(arch)).shared_kib * 1024


def shared_mem_limit(sm: int) -> int:
    """The most shared memory in bytes that a block may ask for on compute capability ``sm`` (90 for 9.0)."""
    return _limits(sm).shared_kib * 1024 - (_RESERVED_SHARED if sm >= 80 else 0)


def _limits(sm: int) -> _Limits:
    known = max((number for number in _LIMITS if number <= sm), default=None)
    if known is None:
        raise Unsupported("sm", sm, "the kernels need compute capability 7.5 or newer", nearest=75)
    return _LIMITS[known]
