"""Which kernels can read and write operands where they lie.

Operands on the host are copied to places that suit every kernel. Operands on the device are used in place, and a kernel
that loads by TMA does not take all strides and addresses.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from gpu_actors.arrays.device_array import DeviceArray, element_strides
from gpu_actors.attention.problem import AttentionProblem, DispatchKey
from gpu_actors.devices.interface import Device
from gpu_actors.errors import Unsupported
from gpu_actors.kernels.decode_mma import CHUNK, rows_refusal
from gpu_actors.kernels.dispatch import (
    FAMILIES,
    REFERENCE,
    WITHOUT_CHUNKS,
    WITHOUT_TMA,
    answering_key,
    family_of,
)
from gpu_actors.kernels.family import KernelFamily
from gpu_actors.kernels.forward_sm90 import TMA_ALIGNMENT, tma_refusal

__all__ = [
    "alignments",
    "array_families",
    "between_chunks",
    "device_key",
    "eligible_families",
    "invariant_key",
    "key_for",
]

_CACHES = ("k_cache", "v_cache", "k", "v")  # a dense batch may be answered as a cache

logger: logging.Logger = logging.getLogger("gpu_actors")


def alignments(*operands: Any) -> tuple[int | None, ...]:
    """What a signature needs, besides shapes and strides, to decide which kernels are eligible for adopted operands."""
    # None for each operand on the host, because the signature also says which operands lie on the device.
    return tuple([array.address % TMA_ALIGNMENT if isinstance(array, DeviceArray) else None for array in operands])


def key_for(problem: AttentionProblem, device: Device, request: object, names: Sequence[str]) -> DispatchKey:
    """The key that answers a problem on a device. names: of the request's adopted operands that move in tiles."""
    operands = {name: getattr(request, name) for name in names}
    if problem.invariant:
        families = {name: eligible_families({name: array}) for name, array in operands.items()}
        return invariant_key(problem, device, families)
    return device_key(problem, device, eligible_families(operands))


def device_key(problem: AttentionProblem, device: Device, families: tuple[KernelFamily, ...] = FAMILIES) -> DispatchKey:
    """`answering_key` for a device."""
    return answering_key(problem, device.info.arch, device.info.runs_kernels, families, device.barred)


def invariant_key(
    problem: AttentionProblem, device: Device, families: Mapping[str, tuple[KernelFamily, ...]]
) -> DispatchKey:
    """The key of an invariant problem. families: those that can read each operand where it lies, by its name.

    Raises Unsupported for an operand that the kernel cannot read: another kernel would give its rows other bits.
    """
    key = device_key(problem, device)
    for name, eligible in families.items():
        if key.kernel == REFERENCE.name or family_of(key) in eligible:
            continue
        nearest = "rows at multiples of 16 bytes" if family_of(key).chunks else "contiguous rows, aligned to 16 bytes"
        reason = f"{key.kernel} cannot read it where it lies, and with invariant=True no other kernel answers"
        raise Unsupported(name, "an array on the device", reason, nearest)
    return key


def eligible_families(operands: Mapping[str, Any]) -> tuple[KernelFamily, ...]:
    """The kernels to choose from for adopted operands that are loaded and stored in tiles, by name."""
    families: tuple[KernelFamily, ...] = FAMILIES
    for name, array in operands.items():
        if not isinstance(array, DeviceArray):
            continue
        refusal = tma_refusal(name, array.shape, element_strides(array), array.address, array.dtype.itemsize)
        if refusal is None:
            continue
        logger.info("a request goes to a kernel that does without TMA: %s", refusal)
        if name in _CACHES and rows_refusal(array.address, _strides(array)):
            return WITHOUT_CHUNKS
        families = WITHOUT_TMA
    return families


def array_families(caches: Iterable[Any]) -> tuple[KernelFamily, ...]:
    """The kernels to choose from for the adopted arrays of a `decode` request, which no kernel loads by TMA."""
    on_device = [array for array in caches if isinstance(array, DeviceArray)]
    refused = any(rows_refusal(array.address, _strides(array)) for array in on_device)
    return WITHOUT_CHUNKS if refused else FAMILIES


def between_chunks(caches: Iterable[Any]) -> bool:
    """What a signature needs, besides shapes and strides, to decide `array_families`."""
    return any(isinstance(array, DeviceArray) and array.address % CHUNK for array in caches)


def _strides(cache: DeviceArray) -> list[int]:
    """The strides, in bytes, of all axes but the last, without those of extent 1."""
    return [stride for extent, stride in zip(cache.shape[:-1], cache.strides, strict=False) if extent > 1]
