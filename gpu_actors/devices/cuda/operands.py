"""Operands: the memory of one launch on the device, and the copies to it and back.

Host inputs are packed into one staging block and uploaded in one copy. Outputs for the host are downloaded in one copy
behind the kernels, into a second block. Both kinds share one block of device memory with the launch's scratch:

    staging [ q | k | v ] --upload--> device [ q | k | v | out | lse | scratch ] --download--> staging [ out | lse ]

An array of the host that a kernel changes is between the two, and is copied both ways. An array on the device is used
in place, without a copy. Arrays on the device of several requests that share the launch are copied next to each other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from gpu_actors.arrays.adopt import check_output, dtype_of, name_of
from gpu_actors.arrays.device_array import DeviceArray, Joined, element_strides
from gpu_actors.arrays.dlpack import contiguous_strides
from gpu_actors.devices.cuda.api import CudaApi, MemoryBlock
from gpu_actors.devices.cuda.memory import DeviceMemory, Layout, MemoryPools, StagingBlock
from gpu_actors.devices.interface import Buffer, Launch, OutputSpec, ScratchSpec
from gpu_actors.errors import InvalidRequest, LaunchError

__all__ = ["Armed", "Operands"]

Host = np.ndarray[Any, Any]


class _Download(NamedTuple):
    """An output that is downloaded to the host. offset: in the staging block."""

    name: str
    spec: OutputSpec
    offset: int


class _Late(NamedTuple):
    """Scratch whose contents depend on the other buffers' addresses. offset: in the staging block."""

    spec: ScratchSpec
    offset: int


class Armed:
    """Memory of a stream that its launches find as 0 and leave as 0. The first of them clears it."""

    BYTES = 256

    def __init__(self, pools: MemoryPools) -> None:
        self._memory = DeviceMemory(pools, self.BYTES)
        self.address: int = self._memory.address
        self.cleared: bool = False


class Operands:
    """The operands of one launch. It owns their memory until `release`.

    buffers: by name, for packing the kernel's parameters.
    producers: the streams to wait for first.
    armed: returns the stream's memory that kernels leave as 0. None: it is not used.
    Making one raises OutOfDeviceMemory, and InvalidRequest for an array in other memory or one that cannot be written.
    """

    def __init__(self, pools: MemoryPools, launch: Launch, armed: Callable[[], Armed] | None = None) -> None:
        self.buffers: dict[str, Buffer] = {}
        self.producers: set[int] = set()
        self._pools = pools
        self._results: dict[str, Any] = {}
        self._uploads: list[tuple[str, Host, int]] = []
        self._returned: list[tuple[str, Host, int]] = []
        self._downloads: list[_Download] = []
        self._scratch: list[tuple[str, ScratchSpec, int]] = []
        self._late: dict[str, _Late] = {}
        self._cleared: list[str] = []
        self._arming: Armed | None = None
        self._joined: list[tuple[str, Joined, int]] = []
        self._block: MemoryBlock | None = None
        self._staging_in: StagingBlock | None = None
        self._staging_out: StagingBlock | None = None
        self._up, self._both, self._down, self._inner = Layout(), Layout(), Layout(), Layout()
        try:
            self._place_inputs(launch)
            self._place_outputs(launch)
            self._place_scratch(launch.scratch, armed)
            self._allocate()
            self._fill_staging()
        except BaseException:
            self.release()
            raise

    def upload(self, api: CudaApi, stream: int) -> None:
        """Enqueue the copies of the inputs, and the clearing of outputs and scratch."""
        if self._staging_in is not None and self._block is not None:
            api.copy_to_device(self._block.address, self._staging_in.address, self._up.size + self._both.size, stream)
        for name, joined, _ in self._joined:
            address = self.buffers[name].address
            for part in joined.parts:
                if part.nbytes:
                    api.copy_on_device(address, part.address, part.nbytes, stream)
                address += part.nbytes
        for name in self._cleared:
            buffer = self.buffers[name]
            api.fill(buffer.address, 0, math.prod(buffer.shape) * dtype_of(buffer.dtype).itemsize, stream)
        if self._arming is not None:
            api.fill(self._arming.address, 0, Armed.BYTES, stream)
            self._arming.cleared = True

    def download(self, api: CudaApi, stream: int) -> None:
        """Enqueue the copy of the outputs for the host."""
        if self._staging_out is not None and self._block is not None:
            source = self._block.address + self._up.size
            api.copy_to_host(self._staging_out.address, source, self._both.size + self._down.size, stream)

    def results(self) -> Mapping[str, Any]:
        """The outputs by name, once the launch is over: the caller's arrays, new ndarrays, DeviceArrays."""
        for _, array, offset in self._returned:
            assert self._staging_out is not None
            _bits(array)[...] = _staged(self._staging_out, offset, array.shape, array.itemsize)
        for name, spec, offset in self._downloads:
            dtype = dtype_of(spec.dtype)
            into = np.empty(spec.shape, dtype) if spec.into is None else spec.into
            if into.size:
                assert self._staging_out is not None
                _bits(into)[...] = _staged(self._staging_out, self._both.size + offset, spec.shape, dtype.itemsize)
            self._results[name] = into
        return self._results

    def rebind(self, launch: Launch) -> None:
        """Stage the operands of another launch of the same shapes, and write its outputs from now on."""
        self._uploads = [(name, launch.inputs[name], offset) for name, _, offset in self._uploads]
        self._returned = [(name, launch.inputs[name], offset) for name, _, offset in self._returned]
        self._downloads = [download._replace(spec=launch.outputs[download.name]) for download in self._downloads]
        self._results = {}
        self._fill_staging()

    def release(self) -> None:
        """Free the memory. No enqueued work may use it any more."""
        block, self._block = self._block, None
        staging = (self._staging_in, self._staging_out)
        self._staging_in = self._staging_out = None
        self._uploads, self._returned, self._downloads, self._results = [], [], [], {}
        self._arming = None
        if block is not None:
            self._pools.free(block)
        for staged in staging:
            if staged is not None:
                self._pools.release_staging(staged)

    # Placing

    def _place_inputs(self, launch: Launch) -> None:
        for name, array in launch.inputs.items():
            if isinstance(array, DeviceArray):
                self._place_on_device(name, array)
            elif isinstance(array, Joined):
                self._joined.append((name, array, self._inner.reserve(array.nbytes)))
                self.producers.update(part.stream for part in array.parts if part.stream is not None)
            elif name in launch.updates:
                raise InvalidRequest(name, "an array on the host", "is changed in place, so it must lie on the device")
            elif array.size == 0:
                self.buffers[name] = _buffer(0, array.shape, array.dtype)
            elif name in launch.returned:
                self._returned.append((name, array, self._both.reserve(array.nbytes)))
            else:
                self._uploads.append((name, array, self._up.reserve(array.nbytes)))

    def _place_outputs(self, launch: Launch) -> None:
        first = next(iter(launch.inputs.values()), None)
        if isinstance(first, Joined):
            first = first.parts[0]
        for name, spec in launch.outputs.items():
            if name in launch.inputs and spec.into is not launch.inputs[name]:
                raise LaunchError(f"operand {name!r} is an input and another output")
            if isinstance(spec.into, DeviceArray):
                check_output(spec.into, spec.shape, spec.dtype, name)
                if spec.zero and not spec.into.contiguous:
                    # Clearing goes byte by byte, over whatever lies between the elements.
                    raise LaunchError(f"operand {name!r} is cleared first, so it must be contiguous")
                self._place_on_device(name, spec.into)
                self._results[name] = spec.into
            elif spec.into is None and isinstance(first, DeviceArray):
                output = self._make(first, spec)
                self._place_on_device(name, output)
                self._results[name] = output
            else:
                self._place_download(name, spec, launch.inputs)
            if spec.zero and 0 not in spec.shape:
                self._cleared.append(name)

    def _place_scratch(self, scratch: Mapping[str, ScratchSpec], find_armed: Callable[[], Armed] | None) -> None:
        rearmed = Layout()
        for name, spec in scratch.items():
            dtype = dtype_of(spec.dtype)
            nbytes = math.prod(spec.shape) * dtype.itemsize
            if nbytes == 0:
                self.buffers[name] = _buffer(0, spec.shape, dtype)
            elif spec.rearmed and find_armed is not None and rearmed.size + nbytes <= Armed.BYTES:
                armed = find_armed()
                self.buffers[name] = _buffer(armed.address + rearmed.reserve(nbytes), spec.shape, dtype)
                if not armed.cleared:
                    self._arming = armed
            elif spec.contents is not None:
                self._late[name] = _Late(spec, self._up.reserve(nbytes))
            else:
                self._scratch.append((name, spec, self._inner.reserve(nbytes)))
                if spec.zero:
                    self._cleared.append(name)

    def _place_download(self, name: str, spec: OutputSpec, inputs: Mapping[str, Any]) -> None:
        if spec.into is not None:
            check_output(spec.into, spec.shape, spec.dtype, name)
        if name in inputs:
            raise LaunchError(f"operand {name!r} is changed in place, so it must lie on the device")
        dtype = dtype_of(spec.dtype)
        nbytes = math.prod(spec.shape) * dtype.itemsize
        self._downloads.append(_Download(name, spec, self._down.reserve(nbytes)))
        if nbytes == 0:
            self.buffers[name] = _buffer(0, spec.shape, dtype)

    def _place_on_device(self, name: str, array: DeviceArray) -> None:
        index = self._pools.driver.index
        if array.device != index:
            raise InvalidRequest(name, f"an array on cuda:{array.device}", f"must lie on cuda:{index} or the host")
        if array.stream is not None:
            self.producers.add(array.stream)
        self.buffers[name] = Buffer(array.address, array.shape, element_strides(array), name_of(array.dtype))

    def _make(self, like: DeviceArray, spec: OutputSpec) -> DeviceArray:
        if like.make is not None:
            return like.make(spec.shape, spec.dtype)
        return self._pools.empty(spec.shape, spec.dtype)

    # Memory

    def _allocate(self) -> None:
        down = self._up.size + self._both.size
        inner = down + self._down.size
        size = inner + self._inner.size
        if size == 0:
            return
        self._block = self._pools.allocate(size)
        base = self._block.address
        for name, array, offset in self._uploads:
            self.buffers[name] = _buffer(base + offset, array.shape, array.dtype)
        for name, array, offset in self._returned:
            self.buffers[name] = _buffer(base + self._up.size + offset, array.shape, array.dtype)
        for name, spec, offset in self._downloads:
            if name not in self.buffers:
                address = base + down + offset
                self.buffers[name] = _buffer(address, spec.shape, dtype_of(spec.dtype))
        for name, scratch, offset in self._scratch:
            address = base + inner + offset
            self.buffers[name] = _buffer(address, scratch.shape, dtype_of(scratch.dtype))
        for name, joined, offset in self._joined:
            address = base + inner + offset
            self.buffers[name] = _buffer(address, joined.shape, joined.dtype)
        for name, late in self._late.items():
            self.buffers[name] = _buffer(base + late.offset, late.spec.shape, dtype_of(late.spec.dtype))
        if down:
            self._staging_in = self._pools.acquire_staging(down)
        if inner > self._up.size:
            self._staging_out = self._pools.acquire_staging(inner - self._up.size)

    def _fill_staging(self) -> None:
        for _, array, offset in self._uploads:
            assert self._staging_in is not None
            _staged(self._staging_in, offset, array.shape, array.itemsize)[...] = _bits(array)
        for _, array, offset in self._returned:
            assert self._staging_in is not None
            _staged(self._staging_in, self._up.size + offset, array.shape, array.itemsize)[...] = _bits(array)
        for name, late in self._late.items():
            assert self._staging_in is not None
            assert late.spec.contents is not None
            contents = np.frombuffer(late.spec.contents(self.buffers), np.uint8)
            nbytes = math.prod(late.spec.shape) * dtype_of(late.spec.dtype).itemsize
            if contents.size != nbytes:
                raise LaunchError(f"scratch {name!r} holds {nbytes} bytes and was given {contents.size}")
            self._staging_in.bytes[late.offset : late.offset + contents.size] = contents


def _bits(array: Host) -> Host:
    # As unsigned integers: NumPy copies ml_dtypes' own types element by element and holds the GIL.
    return array.view(f"u{array.itemsize}")


def _staged(block: StagingBlock, offset: int, shape: tuple[int, ...], itemsize: int) -> Host:
    nbytes = math.prod(shape) * itemsize
    return block.bytes[offset : offset + nbytes].view(f"u{itemsize}").reshape(shape)


def _buffer(address: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Buffer:
    return Buffer(address, tuple(shape), contiguous_strides(shape, 1), name_of(dtype))
