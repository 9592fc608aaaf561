"""CudaApi: the few CUDA calls that the device makes, and nothing else between it and the driver.

Handles and addresses are ints. Every call may raise `CudaFailure`. Only `synchronize_event`, `trim` and `close` wait
for the device, and a hung kernel would block them.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from contextlib import AbstractContextManager
from typing import NamedTuple, Protocol

from gpu_actors.compiling.source import KernelSource
from gpu_actors.devices.interface import Buffer, DeviceInfo, Params, TensorMap

__all__ = ["CudaApi", "DeviceProperties", "Emulation", "MemoryBlock"]


class DeviceProperties(NamedTuple):
    """Properties of a GPU. capability: 90 for 9.0. memory: bytes. uuid: hexadecimal. driver: its version."""

    name: str
    capability: int
    memory: int
    multiprocessors: int
    uuid: str = ""
    driver: str = ""


class MemoryBlock(Protocol):
    """A piece of device memory from the pool, aligned to 256 bytes at least."""

    @property
    def address(self) -> int: ...


class Emulation(Protocol):
    """What the emulated device does beside a GPU's calls.

    It takes sources in place of cubins, changes arrays of the host in place, and gives each operand memory of its own.
    """

    @property
    def info(self) -> DeviceInfo: ...

    def build(self, source: KernelSource) -> tuple[Hashable, tuple[int, ...] | None]:
        """An image for `CudaApi.load_module`, and the bytes of each parameter of its first kernel if they are known.

        May take seconds. Raises `CompileError`.
        """

    def discard(self, device: int, nbytes: int, stream: int) -> None:
        """Enqueue that these bytes hold nothing until they are written."""

    def expect_cleared(self, name: str, device: int, nbytes: int, stream: int) -> None:
        """Enqueue a check that the kernels before left these bytes as 0. After a launch that failed they become 0."""


class CudaApi(Protocol):
    """One device's calls. A thread must call `bind` first, but for `free` and `close`.

    emulation: None for a GPU.
    """

    @property
    def emulation(self) -> Emulation | None: ...

    def bind(self) -> None:
        """Make the device current on the calling thread."""

    def allow_captures(self) -> None:
        """Let this thread, which is none of a caller's, go on while another thread captures a stream.

        In CUDA's global mode of capture, torch's default, an event's query or an allocation by any other thread would
        fail and break the capture (cudaThreadExchangeStreamCaptureMode).
        """

    def relaxed(self) -> AbstractContextManager[None]:
        """A block in which a caller's thread may do what `allow_captures` allows. The calls here need no such block."""

    def is_current(self) -> bool:
        """Whether the device is current on the calling thread, or would be the first to be."""

    def properties(self) -> DeviceProperties: ...

    # Memory

    def allocate(self, nbytes: int) -> MemoryBlock:
        """A block that no enqueued work uses."""

    def free(self, block: MemoryBlock) -> None:
        """Return a block to the pool. Its work must be over."""

    def trim(self) -> None:
        """Return the pool's free blocks to the driver."""

    def allocate_pinned(self, nbytes: int) -> int:
        """The address of page-locked host memory."""

    def free_pinned(self, address: int) -> None: ...

    # Work

    def create_stream(self) -> int:
        """A stream that does not wait for the legacy default stream."""

    def destroy_stream(self, stream: int) -> None: ...

    def copy_to_device(self, device: int, host: int, nbytes: int, stream: int) -> None: ...

    def copy_to_host(self, host: int, device: int, nbytes: int, stream: int) -> None: ...

    def copy_on_device(self, device: int, source: int, nbytes: int, stream: int) -> None: ...

    def fill(self, device: int, value: int, nbytes: int, stream: int) -> None:
        """Set each byte."""

    def launch_kernel(
        self,
        function: int,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        shared_bytes: int,
        stream: int,
        params: Params,
        operands: Mapping[str, Buffer] | None = None,
    ) -> None:
        """Enqueue a kernel. params: the bytes of its only parameter, or of each, passed by value.

        operands: all memory that it may touch, for the emulated device alone.
        """

    def is_capturing(self, stream: int) -> bool:
        """Whether work for the stream is recorded now, by whatever began it."""

    # Order

    def create_event(self, asked: bool = True) -> int:
        """An event without timing, whose wait sleeps and does not spin.

        asked: whether the host asks for it. Others only order streams.
        """

    def destroy_event(self, event: int) -> None: ...

    def record_event(self, event: int, stream: int) -> None: ...

    def event_done(self, event: int) -> bool:
        """Whether all work before the event's record is over. True for an event that was never recorded."""

    def synchronize_event(self, event: int) -> None:
        """Sleep until `event_done`, without the GIL."""

    def wait_event(self, stream: int, event: int) -> None:
        """Delay the stream's later work, on the device, until the event is done."""

    def encode_tensor_map(self, tensor_map: TensorMap) -> bytes:
        """The driver's 128 bytes for the map."""

    # Code

    def load_module(self, image: Hashable) -> int:
        """Load a cubin's bytes, or what `Emulation.build` gave."""

    def unload_module(self, module: int) -> None: ...

    def get_function(self, module: int, name: str) -> int: ...

    def allow_shared_memory(self, function: int, nbytes: int) -> None:
        """Allow a block of this kernel ``nbytes`` of dynamic shared memory."""

    # The end

    def close(self) -> None:
        """Release the pool. Blocks that are still in use are freed with their last reference."""
