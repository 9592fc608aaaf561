"""EmulatedApi: the driver of a `CudaDevice` that runs the project's own .cu kernels on the CPU.

Staging, flights, modules and closing are those of CUDA. Only the compiler and the processor differ. Every operand has
its own memory, which ends at an inaccessible page, so an access out of bounds is found. Outputs begin as NaN.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from gpu_actors.compiling.source import KernelSource
from gpu_actors.devices.cuda.api import DeviceProperties, Emulation, MemoryBlock
from gpu_actors.devices.cuda.errors import CudaFailure
from gpu_actors.devices.cuda.host_api import ILLEGAL_ADDRESS, HostApi, HostFunction, HostOrder, Operation, driver_call
from gpu_actors.devices.emulation.build import build_module
from gpu_actors.devices.emulation.memory import POISON, AddressSpace, EmulatedBuffer
from gpu_actors.devices.emulation.runtime import EmulatedModule
from gpu_actors.devices.emulation.tensor_map import encode_tensor_map
from gpu_actors.devices.emulation.toolchain import Toolchain
from gpu_actors.devices.interface import Buffer, DeviceInfo, LaunchGeometry, Params, TensorMap
from gpu_actors.errors import GpuActorsError, LaunchError
from gpu_actors.options import ContextOptions, EmulationOptions

__all__ = ["EmulatedApi"]

# An address means the same memory on every device of the process, as on GPUs.
_MEMORY = AddressSpace()


class EmulatedApi(HostApi):
    """Emulates a GPU of one architecture.

    order: the order in which the streams' work runs, for tests of the code on the host.
    Raises `GpuActorsError` if the machine has no C++ compiler for the kernels.
    """

    def __init__(
        self, arch: str, emulation: EmulationOptions, options: ContextOptions, order: HostOrder = "eager"
    ) -> None:
        super().__init__(order, emulation.seed)
        if emulation.contraction == "random":
            self._toolchain = Toolchain.fusing_at_random(emulation.seed)
        else:
            self._toolchain = replace(Toolchain.find(), contraction=emulation.contraction)
        self.info: DeviceInfo = DeviceInfo("emulated", f"emulated {arch} ({self._toolchain.name})", arch)
        self._options = emulation
        self._hang_timeout = options.hang_limit("emulated")
        self._cache_dir = None if options.cache_path is None else options.cache_path / "emulated"

    @property
    def emulation(self) -> Emulation:
        return self

    # Emulation

    def build(self, source: KernelSource) -> tuple[EmulatedModule, tuple[int, ...] | None]:
        module = build_module(
            source.source,
            {name: str(value) for name, value in source.macros.items()},
            source.headers,
            self._toolchain,
            self._cache_dir,
            entries=source.entry_points,
            name=source.name,
        )
        return module, module.parameter_bytes(source.entry_points[0])

    def discard(self, device: int, nbytes: int, stream: int) -> None:
        self.fill(device, POISON, nbytes, stream)

    @driver_call
    def expect_cleared(self, name: str, device: int, nbytes: int, stream: int) -> None:
        queue = self._find(self._streams, stream)

        def check() -> None:
            memory = self.device_bytes(device, nbytes)
            if memory.any():
                memory.fill(0)
                if queue.failure is None:
                    raise LaunchError(f"the kernels left {name!r} other than 0, as the next launch finds it")

        self._enqueue(stream, Operation(check, after_failure=True))

    # CudaApi

    def properties(self) -> DeviceProperties:
        return DeviceProperties(self.info.name, 0, 0, 0, uuid=repr(self._options))

    def allocate(self, nbytes: int) -> EmulatedBuffer:
        with self._lock:
            self.called("allocate")
        block = EmulatedBuffer(nbytes)  # without the lock: poisoning a pool takes long
        _MEMORY.add(block)
        return block

    def free(self, block: MemoryBlock) -> None:
        assert isinstance(block, EmulatedBuffer)
        _MEMORY.remove(block)

    def encode_tensor_map(self, tensor_map: TensorMap) -> bytes:
        return encode_tensor_map(*tensor_map)

    def load_module(self, image: Hashable) -> int:
        if isinstance(image, bytes):
            raise LaunchError("the emulated device runs kernels from their source, and a cubin holds none")
        return super().load_module(image)

    # HostApi

    def device_bytes(self, address: int, nbytes: int) -> npt.NDArray[np.uint8]:
        block = _MEMORY.find(address)
        if block is None or not block.address <= address <= address + nbytes <= block.address + block.nbytes:
            raise CudaFailure(ILLEGAL_ADDRESS, "copy", f"{nbytes} bytes at {address:#x}")
        start = address - block.address
        return block.array[start : start + nbytes]

    def run_kernel(
        self, function: HostFunction, geometry: LaunchGeometry, params: Params, operands: Mapping[str, Buffer]
    ) -> None:
        module: Any = function.image
        blocks = {name: _MEMORY.find(buffer.address) for name, buffer in operands.items()}
        buffers = [block.named(name) for name, block in blocks.items() if block is not None]
        try:
            module.launch(
                function.name,
                geometry.grid,
                geometry.block,
                geometry.shared_bytes,
                params,
                buffers,
                delivery=self._options.delivery,
                schedule=self._options.schedule,
                arithmetic=self._options.arithmetic,
                seed=self._options.seed,
                threads=self._options.threads,
                limit_seconds=self._hang_timeout,
            )
        except GpuActorsError:
            for buffer in buffers:
                buffer.renew_canaries()
            raise
