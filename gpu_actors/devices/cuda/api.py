"""CudaApi: the few CUDA calls that a `CudaDevice` makes. It is the only layer between the device and the driver.

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
    """Properties of a GPU. capability: 90 for 9.0. memory: bytes. uuid: hexadecimal. driver: the driver's version."""

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
    """The calls of the emulated device that a GPU does not have.

    The emulated device takes sources instead of cubins, lets kernels change arrays of the host, and gives each operand
    its own memory.
    """

    @property
    def info(self) -> DeviceInfo: ...

    def build(self, source: KernelSource) -> tuple[Hashable, tuple[int, ...] | None]:
        """Build an image for `CudaApi.load_module`. Returns it, and the size of each parameter of its first kernel.

        The sizes, in bytes, are None if they are not known. May take seconds. Raises `CompileError`.
        """

    def discard(self, device: int, nbytes: int, stream: int) -> None:
        """Enqueue that these bytes become undefined, until they are written."""

    def expect_cleared(self, name: str, device: int, nbytes: int, stream: int) -> None:
        """Enqueue a check that the earlier kernels left these bytes as 0. If they did not, the launch fails.

        The bytes are 0 afterwards in any case, also if the launch had failed before. name: the operand's name.
        """


class CudaApi(Protocol):
    """The calls of one device. Before any call but `free` and `close` a thread must call `bind`.

    emulation: the emulated device's further calls, None for a GPU.
    lent_after: the stream in whose order blocks of `lend` are reused, None if they are allocated as by `allocate`.
    """

    @property
    def lent_after(self) -> int | None: ...

    @property
    def emulation(self) -> Emulation | None: ...

    def bind(self) -> None:
        """Make the device current on the calling thread."""

    def allow_captures(self) -> None:
        """Let the calling thread, which must be this package's own, make calls while another thread captures a stream.

        In CUDA's global capture mode, torch's default, an event query or an allocation by any other thread would fail
        and break the capture (cudaThreadExchangeStreamCaptureMode).
        """

    def relaxed(self) -> AbstractContextManager[None]:
        """A block in which a caller's thread may do what `allow_captures` allows. The calls here need no such block."""

    def is_current(self) -> bool:
        """Whether the device is current on the calling thread, or is the default of a thread that has set none."""

    def properties(self) -> DeviceProperties: ...

    # Memory

    def allocate(self, nbytes: int) -> MemoryBlock:
        """Allocate a block that no enqueued work uses."""

    def lend(self, nbytes: int) -> MemoryBlock:
        """Allocate a block that may be freed while work still uses it. The next work on it waits for ``lent_after``."""

    def free(self, block: MemoryBlock) -> None:
        """Return a block to the pool. Work on a block of `allocate` must have finished."""

    def trim(self) -> None:
        """Return the pool's free blocks to the driver."""

    def allocate_pinned(self, nbytes: int) -> int:
        """Allocate page-locked host memory and return its address."""

    def free_pinned(self, address: int) -> None: ...

    # Work

    def create_stream(self) -> int:
        """Create a stream that does not wait for the legacy default stream."""

    def destroy_stream(self, stream: int) -> None: ...

    def copy_to_device(self, device: int, host: int, nbytes: int, stream: int) -> None: ...

    def copy_to_host(self, host: int, device: int, nbytes: int, stream: int) -> None: ...

    def copy_on_device(self, device: int, source: int, nbytes: int, stream: int) -> None: ...

    def fill(self, device: int, value: int, nbytes: int, stream: int) -> None:
        """Enqueue setting each byte to ``value``."""

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

        operands: all memory that the kernel may touch. Only the emulated device uses it.
        """

    def is_capturing(self, stream: int) -> bool:
        """Whether the stream is being captured, no matter who began the capture.

        A capture that an error has invalidated goes on until the program ends it. Raises `CudaFailure` with the status
        `CAPTURE_IMPLICIT` for the legacy default stream while a stream that it waits for is being captured. Any use of
        it would break that capture.
        """

    # Order

    def create_event(self, asked: bool = True) -> int:
        """Create an event without timing. A wait for it sleeps and does not spin.

        asked: whether the host will query the event or wait for it. Other events only order streams.
        """

    def destroy_event(self, event: int) -> None: ...

    def record_event(self, event: int, stream: int) -> None: ...

    def event_done(self, event: int) -> bool:
        """Whether all work before the event's record has finished. True for an event that was never recorded."""

    def synchronize_event(self, event: int) -> None:
        """Sleep, without the GIL, until the event is done."""

    def wait_event(self, stream: int, event: int) -> None:
        """Make the stream's later work wait, on the device, until the event is done."""

    def encode_tensor_map(self, tensor_map: TensorMap) -> bytes:
        """The 128 bytes that the driver makes for the map."""

    # Code

    def load_module(self, image: Hashable) -> int:
        """Load the bytes of a cubin, or an image that `Emulation.build` returned."""

    def unload_module(self, module: int) -> None: ...

    def get_function(self, module: int, name: str) -> int: ...

    def allow_shared_memory(self, function: int, nbytes: int) -> None:
        """Allow a block of this kernel ``nbytes`` of dynamic shared memory."""

    # The end

    def close(self) -> None:
        """Release the pool. Blocks that are still in use are freed with their last reference."""
