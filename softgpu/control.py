"""What a test asks of the driver: findings, and faults on demand."""

from __future__ import annotations

import ctypes

from softgpu.activate import driver

__all__ = [
    "count",
    "fail_allocation",
    "fail_launch",
    "fail_pinned",
    "lose_event",
    "slow_copy",
    "take_findings",
]


def take_findings() -> list[str]:
    """What the program did that CUDA leaves undefined, since the last call."""
    found = []
    room = ctypes.create_string_buffer(4096)
    while driver().softgpu_take_finding(room, ctypes.c_size_t(len(room))) & 1:
        found.append(room.value.decode(errors="replace"))
    return found


def count(what: str) -> int:
    """The streams, events, graphs or modules that exist, or the bytes of memory or pinned memory."""
    ask = driver().softgpu_count
    ask.restype = ctypes.c_uint64
    return int(ask(what.encode()))


def fail_allocation(number: int = 1) -> None:
    """Make allocation ``number`` of device memory from now on fail: out of memory. 0: none fails."""
    driver().softgpu_fail_allocation(ctypes.c_long(number))


def fail_pinned(number: int = 1) -> None:
    """Make allocation ``number`` of page-locked memory from now on fail: out of memory."""
    driver().softgpu_fail_pinned(ctypes.c_long(number))


def fail_launch(status: int, number: int = 1) -> None:
    """Make kernel ``number`` from now on end with this cudaError, which the device then keeps."""
    driver().softgpu_fail_launch(ctypes.c_long(number), ctypes.c_int(status))


def lose_event(number: int = 1) -> None:
    """Make record ``number`` of an event from now on never complete."""
    driver().softgpu_lose_event(ctypes.c_long(number))


def slow_copy(seconds: float, number: int = 1) -> None:
    """Make copy ``number`` from now on take so long."""
    driver().softgpu_slow_copy(ctypes.c_long(number), ctypes.c_double(seconds))
