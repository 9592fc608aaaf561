"""KernelActor: compiles a user's own kernels and launches them on the actor's stream."""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np

from gpu_actors.actors.compiled_kernel import CompiledKernel, LaunchKernel
from gpu_actors.arrays.adopt import adopt, check_device, describe, dtype_of
from gpu_actors.arrays.device_array import AnyArray, DeviceArray
from gpu_actors.compiling.assets import completed_headers
from gpu_actors.compiling.elf import parameter_sizes
from gpu_actors.compiling.signature import KernelParameter, kernel_signature
from gpu_actors.compiling.source import Cubin, KernelSource
from gpu_actors.compiling.variant import Variant
from gpu_actors.devices.interface import Buffer, Kernel, Launch, LaunchGeometry, Outputs, Params, Step
from gpu_actors.errors import InvalidRequest, MockModeError
from gpu_actors.fields import integer
from gpu_actors.kernels.call_arguments import argument_field, arguments_by_place, value_bytes, written_places
from gpu_actors.kernels.occupancy import shared_mem_limit
from gpu_actors.kernels.support import capability
from gpu_actors.planning.kernel_store import KernelStore
from gpu_actors.runtime.actor import ServiceActor, reading
from gpu_actors.runtime.call import Call
from gpu_actors.runtime.children import Children
from gpu_actors.runtime.handle import ActorHandle
from gpu_actors.runtime.reply import Reply

__all__ = ["CompilesKernels", "KernelActor", "OpenKernel"]

_MAX_THREADS = 1024
_GRID_LIMITS = ((1 << 31) - 1, 65535, 65535)
_BLOCK_LIMITS = (1024, 1024, 64)


@dataclasses.dataclass(frozen=True, slots=True)
class OpenKernel:
    """The message of ``ctx.kernel``."""

    source: KernelSource | str
    entry: str


class CompilesKernels:
    """The method ``kernel`` of contexts."""

    _children: Children

    def kernel(
        self,
        source: KernelSource | str,
        entry: str,
        *,
        deadline: float | None = None,
        timeout: float | None = None,
        priority: int = 0,
    ) -> Reply[CompiledKernel]:
        """Compile a kernel of your own, or find it compiled, to be launched on this context's device.

        source: CUDA C++ that declares ``extern "C" __global__ void entry(...)`` in its own text. A `KernelSource` adds
            headers, macros and NVRTC's options; the emulated device ignores the options. The package's headers, such
            as "ptx/types.cuh", are always found.

        The reply raises `CompileError`; `InvalidRequest`, naming the field, if the source does not declare the kernel
        or its parameters cannot be read. The mock device compiles no kernel, unless ``compile_on_mock`` is set.
        deadline, timeout, priority: as in `ActorHandle.submit`.
        """
        handle: ActorHandle = self._children.handle(KernelActor)
        return handle.submit(OpenKernel(source, entry), deadline=deadline, timeout=timeout, priority=priority)


class KernelActor(ServiceActor):
    """Takes the messages of ``ctx.kernel`` and ``CompiledKernel.launch``."""

    label: ClassVar[str] = "kernels"
    takes: ClassVar[tuple[type, ...]] = (OpenKernel, LaunchKernel)

    def open(self) -> None:
        environment = self.cell.environment
        info = environment.device.info
        self._device_name = info.device_name
        self._arch = info.arch
        self._runs = info.runs_kernels
        self._kernels: KernelStore | None = environment.kernels if environment.compiles else None
        self._most_shared = shared_mem_limit(capability(info.arch))

    def handle(self, call: Call[Any]) -> None:
        message = call.message
        if isinstance(message, OpenKernel):
            self._open(call, message)
        elif isinstance(message, LaunchKernel):
            self._launch(call, message)
        else:
            raise self.refusal(message)

    # Compiling

    def _open(self, call: Call[Any], message: OpenKernel) -> None:
        source, parameters = _read(message)
        if self._kernels is None:
            call.resolve(CompiledKernel(self.cell, message.entry, parameters, None, None, None), self.outbox)
            return
        if self.cell.environment.device.builds_kernels:
            # A device that makes no cubin learns the sizes of the parameters from this line.
            text = f"{source.source}\nGPU_ACTORS_PARAMETERS({message.entry})\n"
            source = dataclasses.replace(source, source=text)
        variant = Variant.of(source, source.arch or self._arch)
        product = self._kernels.product(variant)
        if product is None:
            self._kernels.wait_for((variant,), call, self.cell)
        else:
            call.resolve(self._kernel(message.entry, parameters, product), self.outbox)

    def _kernel(self, entry: str, parameters: tuple[KernelParameter, ...], product: Cubin | Kernel) -> CompiledKernel:
        cubin = product if isinstance(product, Cubin) else None
        sizes = parameter_sizes(product.data, entry) if isinstance(product, Cubin) else product.parameter_bytes
        _check_sizes(parameters, sizes, entry)
        loaded = self.cell.environment.device.load(product, entry) if isinstance(product, Cubin) else product
        return CompiledKernel(self.cell, entry, parameters, sizes, cubin, loaded)

    # Launching

    def _launch(self, call: Call[Any], message: LaunchKernel) -> None:
        kernel = message.kernel
        if not isinstance(kernel, CompiledKernel) or not kernel.belongs_to(self.cell):
            raise InvalidRequest("kernel", type(kernel).__name__, "must be one that ctx.kernel of this context gave")
        geometry = LaunchGeometry(
            _sizes("grid", message.grid, _GRID_LIMITS),
            _sizes("block", message.block, _BLOCK_LIMITS),
            integer("shared_bytes", message.shared_bytes, 0, self._most_shared),
        )
        threads = geometry.block[0] * geometry.block[1] * geometry.block[2]
        if threads > _MAX_THREADS:
            raise InvalidRequest("block", message.block, f"has {threads} threads: at most {_MAX_THREADS}")
        with reading(message):
            bound = _Arguments(kernel, message.args, message.out, self._device_name, call.caller_notes)
        if not self._runs or kernel.loaded is None:
            reason = (
                "the mock device has nothing to compute a kernel of your own with: open_context('emulated') runs it"
            )
            raise MockModeError(reason)
        step = Step(kernel.loaded, geometry, bound.pack)
        launch = Launch(None, bound.inputs, {}, _no_oracle, (step,), returned=bound.returned)
        if call.claim():
            self.launch((call,), launch, lambda outputs: (bound.results,))


def _no_oracle(inputs: Mapping[str, Any]) -> Outputs:
    raise MockModeError("a kernel of your own has no oracle")


def _read(message: OpenKernel) -> tuple[KernelSource, tuple[KernelParameter, ...]]:
    """The source to compile, with the package's headers that it includes, and the kernel's parameters."""
    given, entry = message.source, message.entry
    if not isinstance(entry, str):
        raise InvalidRequest("entry", entry, "must be the kernel's name, a str")
    if isinstance(given, str):
        given = KernelSource(f"{entry}.cu", given, (entry,))
    if not isinstance(given, KernelSource):
        raise InvalidRequest("source", type(given).__name__, "must be CUDA C++ in a str, or a KernelSource")
    source = dataclasses.replace(given, entry_points=(entry,), headers=completed_headers(given.source, given.headers))
    return source, kernel_signature(source.source, entry)


def _check_sizes(parameters: Sequence[KernelParameter], sizes: Sequence[int] | None, entry: str) -> None:
    """Raise InvalidRequest if the compiled kernel's parameters differ from those of its text."""
    if sizes is None:
        return
    stated = [8 if p.pointer else dtype_of(p.dtype).itemsize if p.dtype else None for p in parameters]
    agrees = len(stated) == len(sizes) and all(one in (None, size) for one, size in zip(stated, sizes, strict=True))
    if not agrees:
        reason = (
            f"takes parameters of {list(sizes)} bytes, and its declaration reads as {stated}: spell it without macros"
        )
        raise InvalidRequest("entry", entry, reason)


def _sizes(field: str, given: Any, limits: Sequence[int]) -> tuple[int, int, int]:
    sizes = tuple(given) if isinstance(given, tuple | list) else (given,)
    if not 1 <= len(sizes) <= 3:
        raise InvalidRequest(field, given, "must be one to three sizes")
    checked = [integer(field, size, 1, limit) for size, limit in zip(sizes, limits, strict=False)]
    x, y, z = (*checked, 1, 1)[:3]
    return x, y, z


class _Arguments:
    """The arguments of one launch.

    inputs: arrays by the names of their parameters. returned: the names of the inputs that receive the kernel's writes.
    results: the caller's own arrays for ``out``, by name or place.
    """

    def __init__(self, kernel: CompiledKernel, args: Any, out: Any, device_name: str, caller: Any) -> None:
        parameters, sizes = kernel.parameters, kernel.parameter_bytes
        wanted = written_places(parameters, out)
        self.inputs: dict[str, AnyArray] = {}
        self.results: dict[str | int, Any] = {}
        self._parts: list[bytes | str] = []
        self._spans: list[_Span] = []
        returned: dict[str, None] = {}
        for index, (parameter, value) in enumerate(zip(parameters, arguments_by_place(parameters, args), strict=True)):
            field = argument_field(parameters, index)
            if not parameter.pointer or value is None:
                size = None if sizes is None else sizes[index]
                self._parts.append(value_bytes(parameter, size, value, field))
                continue
            adopted = adopt(value, field, caller)
            check_device(adopted, field, device_name)
            _check_array(parameter, adopted.array, field, index in wanted)
            name = self._operand(parameter, parameter.name or str(index), adopted.array, field)
            self._parts.append(name)
            if index in wanted:
                returned[name] = None
                self.results[parameter.name or index] = value
        self.returned = tuple(returned)

    def pack(self, buffers: Mapping[str, Buffer]) -> Params:
        """The bytes of each parameter."""
        return tuple(
            part if isinstance(part, bytes) else struct.pack("<Q", buffers[part].address) for part in self._parts
        )

    def _operand(self, parameter: KernelParameter, name: str, array: AnyArray, field: str) -> str:
        """The name of the operand for an array. Parameters with the same host memory share one operand.

        Each host operand is copied to the device, where arrays that overlap in part on the host would not overlap:
        raises `InvalidRequest` for them if one is written.
        """
        if isinstance(array, np.ndarray):
            begin = array.ctypes.data
            span = _Span(name, field, begin, begin + array.nbytes, parameter.written)
            for other in self._spans:
                if (other.begin, other.end) == (span.begin, span.end):
                    if array.flags.writeable:
                        self.inputs[other.name] = array  # the earlier array may be a read-only view
                    return other.name
                overlaps = span.begin < other.end and other.begin < span.end
                if overlaps and (span.written or other.written):
                    raise InvalidRequest(field, describe(array), f"overlaps {other.field} in part: give a copy")
            self._spans.append(span)
        self.inputs[name] = array
        return name


class _Span(NamedTuple):
    """Where an array lies on the host."""

    name: str
    field: str
    begin: int
    end: int
    written: bool


def _check_array(parameter: KernelParameter, array: AnyArray, field: str, wanted: bool) -> None:
    if parameter.dtype is not None and array.dtype != dtype_of(parameter.dtype):
        raise InvalidRequest(field, describe(array), f"must be {parameter.dtype}, for {parameter.spelled}")
    on_device = isinstance(array, DeviceArray)
    contiguous = array.contiguous if isinstance(array, DeviceArray) else array.flags.c_contiguous
    if not contiguous:
        raise InvalidRequest(field, describe(array), "must be C-contiguous: a pointer knows no strides")
    writeable = array.writeable if isinstance(array, DeviceArray) else array.flags.writeable
    if not writeable and (wanted or (on_device and parameter.written)):
        raise InvalidRequest(field, describe(array), "is written by the kernel, and is read-only")
