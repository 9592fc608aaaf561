"""Runs the project's own .cu kernels on the CPU: every CUDA thread of a block is a fiber.

    toolchain.py    which compiler builds them
    build.py        compiles a kernel to a shared object
    module_cache.py keeps the built modules
    memory.py       buffers that end at inaccessible pages
    tensor_map.py   tensor maps for the emulated TMA
    runtime.py      launches, faults
    emulated_api.py the driver of a CudaDevice, over all of these

How kernels are written for it, and what it checks: kernels_cu/emulation/README.md.
"""

from __future__ import annotations

from gpu_actors.devices.emulation.build import build_module
from gpu_actors.devices.emulation.memory import EmulatedBuffer
from gpu_actors.devices.emulation.runtime import EmulatedModule, EmulationFault
from gpu_actors.devices.emulation.tensor_map import encode_tensor_map
from gpu_actors.devices.emulation.toolchain import Toolchain

__all__ = [
    "EmulatedBuffer",
    "EmulatedModule",
    "EmulationFault",
    "Toolchain",
    "build_module",
    "encode_tensor_map",
]
