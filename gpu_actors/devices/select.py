"""Choose and open the device that the first argument of ``open_context`` names."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import logging
import re
import warnings

from gpu_actors.compiling.source import check_arch
from gpu_actors.devices.interface import Device
from gpu_actors.devices.mock import MockDevice
from gpu_actors.errors import CompileError, GpuActorsError, InvalidRequest
from gpu_actors.options import ContextOptions, EmulationOptions, MockOptions

__all__ = ["DEFAULT_ARCH", "MockDeviceWarning", "check_device", "choose_device", "open_device", "warn_of_mock"]

logger: logging.Logger = logging.getLogger("gpu_actors")

DEFAULT_ARCH = "sm_90a"
"""The architecture whose kernels the devices without a GPU run by default."""

# Modules that `import gpu_actors` does not import, to be quick. No request may import them: in a child that is forked
# in the middle of an import, no thread finishes that import, and the next import of the same module waits for ever.
_COMPILING = ("gpu_actors.compiling.compiler", "platformdirs")
_ORACLE = ("gpu_actors.reference.graph", "gpu_actors.reference", "gpu_actors.reference.append")

_SPEC = re.compile(r"auto|mock|emulated|cuda(?::[0-9]+)?")


class MockDeviceWarning(UserWarning):
    """``open_context("auto")`` found no GPU that it can use and computes on the CPU, slowly."""


def check_device(spec: object) -> str:
    """Return ``spec`` if it names a device. Raises `InvalidRequest`."""
    if not isinstance(spec, str) or not _SPEC.fullmatch(spec):
        raise InvalidRequest("device", spec, 'must be "auto", "cuda", "cuda:N", "emulated" or "mock"')
    return spec


def choose_device(spec: str) -> tuple[str, str | None]:
    """Return the device that ``spec`` means now, and a sentence that says what is missing if "auto" means "mock".

    "auto" means "cuda" if that runs attention, and "mock" otherwise. To find out may import CuPy, which takes a while.
    The sentence is None in all other cases.
    """
    if spec != "auto":
        return spec, None
    from gpu_actors.devices.cuda import attention_obstacle

    obstacle = attention_obstacle()
    if obstacle is None:
        logger.info("open_context('auto') runs on cuda: CUDA is usable")
        return "cuda", None
    return "mock", obstacle


def warn_of_mock(obstacle: str | None, stacklevel: int) -> None:
    """Warn in the log and by a `MockDeviceWarning` that "auto" has found no GPU, if there is an obstacle.

    stacklevel: the level of the program's own frame, as for `warnings.warn`. 1 is the frame of this function.
    """
    if obstacle is None:
        return
    message = (
        f"open_context('auto') runs on mock: {obstacle}. The mock device computes in NumPy on the CPU, which is "
        "slow. `gpu-actors doctor` says what a GPU needs; open_context('mock') asks for this device without a warning"
    )
    logger.warning("%s", message)
    warnings.warn(message, MockDeviceWarning, stacklevel)


def open_device(spec: str, options: ContextOptions) -> Device:
    """Open the device that ``spec`` names, with the faults of ``options.fault_plan``. `choose_device` resolves "auto".

    Also imports the modules that launches need. Raises `GpuActorsError` if the device cannot be used.
    """
    device = _open(choose_device(spec)[0], options)
    device.info = dataclasses.replace(device.info, invariant=options.invariant)
    _import_for_launches(device, options)
    if options.fault_plan is not None:
        from gpu_actors.devices.faulty import FaultyDevice

        return FaultyDevice(device, options.fault_plan, options.clock)
    return device


def _import_for_launches(device: Device, options: ContextOptions) -> None:
    cuda = device.info.kind == "cuda"
    for name in _COMPILING if cuda else (*_COMPILING, *_ORACLE):
        importlib.import_module(name)
    if (cuda or options.compile_on_mock) and not options.offline:
        from gpu_actors.compiling.toolchain import load_nvrtc

        with contextlib.suppress(CompileError):  # the first request that needs a compilation gets this error
            load_nvrtc()


def _open(spec: str, options: ContextOptions) -> Device:
    from gpu_actors.devices.cuda import CudaDevice, cuda_usable

    arch = check_arch(options.arch or DEFAULT_ARCH)
    if spec == "mock":
        return MockDevice(arch, options.mock or MockOptions(), options.clock)
    if spec == "emulated":
        from gpu_actors.devices.emulation.emulated_api import EmulatedApi

        return CudaDevice(0, options, EmulatedApi(arch, options.emulation or EmulationOptions(), options))
    index = int(spec.partition(":")[2] or 0)
    obstacle = cuda_usable(index)
    if obstacle is not None:
        raise GpuActorsError(f"device {spec!r} cannot be used: {obstacle}")
    return CudaDevice(index, options)
