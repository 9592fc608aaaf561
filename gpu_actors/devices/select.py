"""From ``open_context("auto")`` to a device."""

from __future__ import annotations

import logging
import re

from gpu_actors.devices.interface import Device
from gpu_actors.devices.mock import MockDevice
from gpu_actors.errors import GpuActorsError, InvalidRequest
from gpu_actors.kernels.source import check_arch
from gpu_actors.options import ContextOptions, EmulationOptions, MockOptions

__all__ = ["DEFAULT_ARCH", "check_device", "open_device"]

logger = logging.getLogger("gpu_actors")

DEFAULT_ARCH = "sm_90a"
"""Whose kernels the devices without a GPU stand for."""

_SPEC = re.compile(r"auto|mock|emulated|cuda(?::[0-9]+)?")


def check_device(spec: object) -> str:
    """``spec`` itself if it names a device. Raises `InvalidRequest`."""
    if not isinstance(spec, str) or not _SPEC.fullmatch(spec):
        raise InvalidRequest("device", spec, 'must be "auto", "cuda", "cuda:N", "emulated" or "mock"')
    return spec


def open_device(spec: str, options: ContextOptions) -> Device:
    """Open the device that ``spec`` names, with the options' faults around it.

    "auto" is CUDA where it is usable and mock otherwise, and logs which and why. Raises `GpuActorsError` where the
    device named cannot be used.
    """
    device = _open(spec, options)
    if options.fault_plan is not None:
        from gpu_actors.devices.faulty import FaultyDevice

        return FaultyDevice(device, options.fault_plan, options.clock)
    return device


def _open(spec: str, options: ContextOptions) -> Device:
    from gpu_actors.devices.cuda import CudaDevice, cuda_usable

    arch = check_arch(options.arch or DEFAULT_ARCH)
    if spec == "auto":
        obstacle = cuda_usable()
        spec = "cuda" if obstacle is None else "mock"
        why = "CUDA is usable" if obstacle is None else obstacle
        logger.info("open_context('auto') runs on %s: %s", spec, why)
    if spec == "mock":
        return MockDevice(arch, options.mock or MockOptions(), options.clock)
    if spec == "emulated":
        from gpu_actors.devices.emulated import EmulatedDevice

        return EmulatedDevice(arch, options.emulation or EmulationOptions(), options)
    index = int(spec.partition(":")[2] or 0)
    obstacle = cuda_usable(index)
    if obstacle is not None:
        raise GpuActorsError(f"device {spec!r} cannot be used: {obstacle}")
    return CudaDevice(index, options)
