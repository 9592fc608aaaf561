"""CompiledKernel: a kernel of a user's own, ready to be launched."""

from __future__ import annotations

import hashlib
import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpu_actors.attention.requests import Array
from gpu_actors.compiling.signature import KernelParameter
from gpu_actors.compiling.source import Cubin
from gpu_actors.devices.interface import DeviceInfo, Kernel
from gpu_actors.errors import Unsupported
from gpu_actors.process import Local, process_folder
from gpu_actors.runtime.handle import ActorHandle
from gpu_actors.runtime.reply import Reply

if TYPE_CHECKING:
    from gpu_actors.runtime.cell import ActorCell

__all__ = ["CompiledKernel", "LaunchKernel", "raw_module"]


class CompiledKernel(Local):
    """A kernel that ``ctx.kernel`` has compiled, for the context's device.

    entry: the kernel's name. parameters: its parameters, in order. cubin: the machine code that NVRTC made; None on the
    emulated device, and on the mock device without ``compile_on_mock``.
    Any number of launches may be in flight. The device keeps the kernel until this object and all launches are gone.
    """

    __slots__ = ("_cell", "_handle", "cubin", "entry", "loaded", "parameter_bytes", "parameters")

    def __init__(
        self,
        cell: ActorCell,
        entry: str,
        parameters: tuple[KernelParameter, ...],
        parameter_bytes: tuple[int, ...] | None,
        cubin: Cubin | None,
        loaded: Kernel | None,
    ) -> None:
        self.entry: str = entry
        self.parameters: tuple[KernelParameter, ...] = parameters
        self.parameter_bytes: tuple[int, ...] | None = parameter_bytes
        self.cubin: Cubin | None = cubin
        self.loaded: Kernel | None = loaded
        self._cell = cell
        self._handle: ActorHandle = cell.handle

    def __repr__(self) -> str:
        taken = ", ".join(parameter.spelled for parameter in self.parameters)
        return f"<CompiledKernel {self.entry}({taken})>"

    def belongs_to(self, cell: ActorCell) -> bool:
        """Whether the actor of that cell compiled it."""
        return self._cell is cell

    def launch(
        self,
        grid: int | Sequence[int],
        block: int | Sequence[int],
        args: Sequence[Any] | Mapping[str, Any] = (),
        *,
        out: str | int | Sequence[str | int] | None = None,
        shared_bytes: int = 0,
        deadline: float | None = None,
        timeout: float | None = None,
        priority: int = 0,
    ) -> Reply[dict[str | int, Array]]:
        """Launch the kernel on the stream of the context's KernelActor. Returns at once.

        grid, block: one to three sizes, in blocks and in threads.
        args: one argument for each parameter, in order or by name. A pointer takes a C-contiguous array of the type
            that it points to, on the host or the context's GPU, or None for a null pointer. A number takes a number in
            range. A struct, or a type that the source defines, takes its bytes: a structured NumPy scalar or a NumPy
            number, a ``ctypes.Structure``, or bytes.
        out: names, or places from 0, of the parameters whose arrays receive the kernel's writes; None: every pointer to
            a type that is not const. Arrays are written in place. NumPy arrays are copied to the device, and back after
            the launch. Writes to a host array that is not named are dropped.
        shared_bytes: bytes of dynamic shared memory per block.

        The reply gives the arrays of ``out`` themselves, by name (by place if a parameter has no name). It raises
        `InvalidRequest`, naming the argument (``args['x']``), for an argument that does not fit its parameter, for
        arrays of the host that overlap in part, or for a launch that no device could make; `LaunchError` if the kernel
        failed; `MockModeError` on the mock device. Do not change the arrays before the reply is done. After
        `DeadlineExceeded` the launch goes on and may still write them.
        deadline, timeout, priority: as in `ActorHandle.submit`.
        """
        message = LaunchKernel(self, grid, block, args, out, shared_bytes)
        return self._handle.submit(message, deadline=deadline, timeout=timeout, priority=priority)

    def raw_module(self) -> Any:
        """The same cubin as a ``cupy.RawModule``, whose ``get_function`` returns ``cupy.RawKernel``s.

        Their launches run on the caller's own CuPy stream, outside of this service: no reply, no deadline, no health.
        Raises `Unsupported` on a device that is not CUDA.
        """
        return raw_module(self.cubin, self._cell.environment.device.info)


class LaunchKernel:
    """The message of ``launch``."""

    __slots__ = ("args", "block", "grid", "kernel", "out", "shared_bytes")

    def __init__(self, kernel: CompiledKernel, grid: Any, block: Any, args: Any, out: Any, shared_bytes: Any) -> None:
        self.kernel: CompiledKernel = kernel
        self.grid: Any = grid
        self.block: Any = block
        self.args: Any = args
        self.out: Any = out
        self.shared_bytes: Any = shared_bytes


def raw_module(cubin: Cubin | None, info: DeviceInfo) -> Any:
    """A cubin as a ``cupy.RawModule`` for the device.

    Raises `Unsupported` for a device that is not CUDA, and for a cubin of another architecture.
    """
    if info.kind != "cuda" or cubin is None:
        raise Unsupported("device", info.kind, "CuPy launches on CUDA alone", nearest="cuda")
    if cubin.arch != info.arch:
        # CuPy loads it at its first use, and would fail only there.
        raise Unsupported("cubin", cubin.arch, "is for another architecture than the device's", info.arch)
    return importlib.import_module("cupy").RawModule(path=str(_cubin_file(cubin.data)))


def _cubin_file(data: bytes) -> Path:
    # CuPy loads a module at its first use and caches it by its path, so different contents need different paths.
    path = process_folder("cubins") / f"{hashlib.sha256(data).hexdigest()}.cubin"
    if not path.exists():
        partial = path.with_suffix(f".{id(data):x}")
        partial.write_bytes(data)
        partial.replace(path)
    return path
