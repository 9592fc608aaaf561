"""Operands: the memory of one launch on the device, and the copies to it and back.

Host inputs are packed into one staging block and uploaded in one copy. After the kernels, outputs for the host are
downloaded in one copy into a second staging block. Both share one block of device memory with the launch's scratch:

    staging [ q | k | v ] --upload--> device [ q | k | v | out | lse | scratch ] --download--> staging [ out | lse ]

A host array that a kernel changes lies between inputs and outputs, and is copied both ways. An array on the device is
used in place, without a copy. If several requests share the launch, their arrays on the device are copied next to each
other.

On the emulated device each operand has its own piece of memory, which ends at an inaccessible page, and its own copy.

The first launch of given steps decides where each operand goes, and packs the kernels' parameters (`Placement`). Later
launches of the same kind on the same addresses reuse both.
"""

from __future__ import annotations

import math
import weakref
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from gpu_actors.arrays.adopt import check_output, dtype_of, name_of
from gpu_actors.arrays.device_array import DeviceArray, Joined, element_strides
from gpu_actors.arrays.dlpack import contiguous_strides
from gpu_actors.devices.cuda.api import CudaApi
from gpu_actors.devices.cuda.memory import BlockLayout, DeviceMemory, MemoryPools, StagingBlock
from gpu_actors.devices.cuda.module import CudaFunction
from gpu_actors.devices.interface import Buffer, Launch, LaunchGeometry, OutputSpec, Params, ScratchSpec
from gpu_actors.errors import GpuActorsError, InvalidRequest, LaunchError

__all__ = ["Bound", "Operands", "Placement", "StreamMemory", "first_on_device"]

Host = np.ndarray[Any, Any]
_BITS = {size: np.dtype(f"u{size}") for size in (1, 2, 4, 8)}
Kernels: TypeAlias = Sequence[tuple[CudaFunction, LaunchGeometry, Params]]


class ArmedMemory:
    """Memory that the launches of a stream find as 0 and leave as 0. cleared: the first clearing was enqueued."""

    __slots__ = ("cleared", "memory")

    def __init__(self, memory: DeviceMemory) -> None:
        self.memory: DeviceMemory = memory
        self.cleared: bool = False


class StreamMemory:
    """Device memory that the launches of one stream use one after the other, in the order of the stream.

    Memory for operands grows to what the largest launch needs, up to ``MOST`` bytes; a launch that needs more gets its
    own block. On the emulated device only launches of equal sizes reuse it, so that each piece ends where its operand
    ends.
    """

    ARMED = 1 << 14
    MOST = 1 << 25

    def __init__(self, pools: MemoryPools) -> None:
        self._pools = pools
        self._emulated = pools.driver.api.emulation is not None
        self._armed: dict[tuple[int, ...], ArmedMemory] = {}
        self._shared: DeviceMemory | None = None
        self._sizes: tuple[int, ...] = ()

    def armed(self, sizes: tuple[int, ...]) -> ArmedMemory:
        """The pieces of these sizes that launches leave as 0."""
        armed = self._armed.get(sizes)
        if armed is None:
            armed = self._armed[sizes] = ArmedMemory(DeviceMemory(self._pools, *sizes))
        return armed

    def block(self, sizes: tuple[int, ...]) -> DeviceMemory:
        """Memory for the next launch, which holds it until it has finished: a later launch may get another block."""
        if sum(sizes) > self.MOST:
            return DeviceMemory(self._pools, *sizes)
        if self._shared is None or (sizes != self._sizes if self._emulated else sizes > self._sizes):
            if not self._emulated:
                sizes = (1 << (sizes[0] - 1).bit_length(),)
            self._shared, self._sizes = DeviceMemory(self._pools, *sizes), sizes
        return self._shared

    def release(self) -> None:
        """Free the memory. No launch of the stream may be in flight."""
        self._armed.clear()
        self._shared = None
        self._sizes = ()


class _Place(NamedTuple):
    """An operand in the launch's own memory. offset: bytes from the start of its part of the block, staged or not."""

    name: str
    offset: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def staged(self, block: StagingBlock, start: int) -> Host:
        """The operand's bits in a staging block. start: the offset at which its part of that block begins."""
        return np.ndarray(self.shape, _BITS[self.dtype.itemsize], block.bytes, start + self.offset)


class _Spot(NamedTuple):
    """Where an operand lies on the device. piece: the number of the launch's piece of memory. offset: in that piece."""

    place: _Place
    piece: int
    offset: int


class _Copy(NamedTuple):
    """A copy between a piece of memory and a staging block. offset: in the piece. staged: offset in the block."""

    piece: int
    offset: int
    staged: int
    nbytes: int


@dataclass(slots=True, eq=False)
class Bound:
    """A launch bound to certain addresses.

    kernels: functions with geometries and packed parameters. cleared: address and bytes of memory that is cleared
    first. joined: the addresses to which joined arrays are copied. late: the contents of scratch that holds addresses.
    The rest is for the emulated device. operands: where each operand lies, in the order of the launch. discarded:
    address and bytes of memory that holds nothing yet. rearmed: the names of scratch that the kernels leave as 0.
    """

    kernels: Kernels
    cleared: Sequence[tuple[int, int]]
    joined: Sequence[int]
    late: Sequence[bytes]
    operands: Mapping[str, Buffer]
    discarded: Sequence[tuple[int, int]]
    rearmed: Sequence[str]


@dataclass(slots=True, eq=False)
class Placement:
    """Where the operands go in launches of one kind: with the same steps and equal shapes. Made for the first launch.

    stream: the stream of those launches. emulated: whether each operand has its own piece of memory. uploads to armed:
    the operands, by what is done with them. pieces, armed_pieces: bytes of each piece of memory. spots, armed_spots:
    where the operands lie in the pieces. copies_in, copies_out: the copies from and to the staging blocks, which have
    ``staged_in`` and ``staged_out`` bytes. up, both: bytes of the host inputs, and of the host arrays that are copied
    both ways. bound: the latest launches by the addresses of their operands, because allocators reuse addresses.
    """

    MOST_BOUND = 512

    stream: weakref.ref[Any]
    functions: Sequence[CudaFunction]
    specs: Mapping[str, ScratchSpec]
    kind: tuple[Any, ...]
    emulated: bool
    device: list[str] = field(default_factory=list)
    uploads: list[_Place] = field(default_factory=list)
    late: list[tuple[_Place, ScratchSpec]] = field(default_factory=list)
    returned: list[_Place] = field(default_factory=list)
    downloads: list[_Place] = field(default_factory=list)
    scratch: list[_Place] = field(default_factory=list)
    joined: list[_Place] = field(default_factory=list)
    armed: list[_Place] = field(default_factory=list)
    empty: dict[str, Buffer] = field(default_factory=dict)
    cleared: list[str] = field(default_factory=list)
    pieces: tuple[int, ...] = ()
    spots: list[_Spot] = field(default_factory=list)
    armed_pieces: tuple[int, ...] = ()
    armed_spots: list[_Spot] = field(default_factory=list)
    copies_in: list[_Copy] = field(default_factory=list)
    copies_out: list[_Copy] = field(default_factory=list)
    up: int = 0
    both: int = 0
    staged_in: int = 0
    staged_out: int = 0
    bound: OrderedDict[tuple[int, ...], Bound] = field(default_factory=OrderedDict)

    @property
    def stays(self) -> bool:
        """Whether launches on other device arrays copy nothing to or from the host, and join no arrays."""
        return not (self.late or self.returned or self.downloads or self.joined)

    @classmethod
    def of(
        cls, launch: Launch, stream: object, functions: Sequence[CudaFunction], *, emulated: bool = False
    ) -> Placement:
        """Make the placement for a launch. Raises `LaunchError`, and `InvalidRequest` for an array in other memory."""
        placement = cls(weakref.ref(stream), functions, launch.scratch, _kind_of(launch), emulated)
        up, both, down, inner = BlockLayout(), BlockLayout(), BlockLayout(), BlockLayout()
        placement._place_inputs(launch, up, both, inner)
        placement._place_outputs(launch, down)
        placement._place_scratch(launch.scratch, up, inner)
        placement._lay_out(up.size, both.size, down.size, inner.size)
        return placement

    def fits(self, launch: Launch, stream: object) -> bool:
        """Whether a launch with the same steps as the first launch is of the same kind."""
        return self.stream() is stream and self.specs is launch.scratch and self.kind == _kind_of(launch)

    def _place_inputs(self, launch: Launch, up: BlockLayout, both: BlockLayout, inner: BlockLayout) -> None:
        for name, array in launch.inputs.items():
            if isinstance(array, DeviceArray):
                self.device.append(name)
            elif isinstance(array, Joined):
                self.joined.append(_Place(name, inner.reserve(array.nbytes), array.shape, array.dtype))
            elif name in launch.updates and not self.emulated:
                raise InvalidRequest(name, "an array on the host", "is changed in place, so it must lie on the device")
            elif array.size == 0 and not self.emulated:
                self.empty[name] = _buffer(0, array.shape, array.dtype)
            else:
                changed = name in launch.returned or name in launch.updates
                places, layout = (self.returned, both) if changed else (self.uploads, up)
                places.append(_Place(name, layout.reserve(array.nbytes), array.shape, array.dtype))

    def _place_outputs(self, launch: Launch, down: BlockLayout) -> None:
        makes = first_on_device(launch) is not None
        for name, spec in launch.outputs.items():
            if name in launch.inputs and spec.into is not launch.inputs[name]:
                raise LaunchError(f"operand {name!r} is an input and another output")
            if isinstance(spec.into, DeviceArray):
                if spec.zero and not spec.into.contiguous:
                    # Clearing would also overwrite what lies between the elements.
                    raise LaunchError(f"operand {name!r} is cleared first, so it must be contiguous")
            elif spec.into is not None or not makes:
                if name in launch.inputs:
                    raise LaunchError(f"operand {name!r} is changed in place, so it must lie on the device")
                place = _place(name, spec, down)
                self.downloads.append(place)
                if 0 in spec.shape and not self.emulated:
                    self.empty[name] = _buffer(0, spec.shape, place.dtype)
            if spec.zero and 0 not in spec.shape:
                self.cleared.append(name)

    def _place_scratch(self, scratch: Mapping[str, ScratchSpec], up: BlockLayout, inner: BlockLayout) -> None:
        rearmed = BlockLayout()
        for name, spec in scratch.items():
            dtype = dtype_of(spec.dtype)
            nbytes = math.prod(spec.shape) * dtype.itemsize
            if nbytes == 0 and not self.emulated:
                self.empty[name] = _buffer(0, spec.shape, dtype)
            elif spec.rearmed and rearmed.size + nbytes <= StreamMemory.ARMED:
                self.armed.append(_place(name, spec, rearmed))
            elif spec.contents is not None:
                self.late.append((_place(name, spec, up), spec))
            else:
                self.scratch.append(_place(name, spec, inner))
                if spec.zero:
                    self.cleared.append(name)

    def _lay_out(self, up: int, both: int, down: int, inner: int) -> None:
        """Decide the pieces of memory and the copies. The arguments are the sizes of the layouts in bytes."""
        self.up, self.both, self.staged_in, self.staged_out = up, both, up + both, both + down
        groups: tuple[tuple[Sequence[_Place], int, int | None, int | None], ...] = (
            ((*self.uploads, *[place for place, _ in self.late]), up, 0, None),
            (self.returned, both, up, 0),
            (self.downloads, down, None, both),
            ((*self.scratch, *self.joined), inner, None, None),
        )
        if self.emulated:
            for places, _, staged_in, staged_out in groups:
                for place in places:
                    piece, nbytes = len(self.spots), place.nbytes
                    self.spots.append(_Spot(place, piece, 0))
                    if staged_in is not None and nbytes:
                        self.copies_in.append(_Copy(piece, 0, staged_in + place.offset, nbytes))
                    if staged_out is not None and nbytes:
                        self.copies_out.append(_Copy(piece, 0, staged_out + place.offset, nbytes))
            self.pieces = tuple([spot.place.nbytes for spot in self.spots])
            self.armed_pieces = tuple([place.nbytes for place in self.armed])
            self.armed_spots = [_Spot(place, piece, 0) for piece, place in enumerate(self.armed)]
            return
        begin = 0
        for places, size, _, _ in groups:
            self.spots += [_Spot(place, 0, begin + place.offset) for place in places]
            begin += size
        self.pieces = (begin,) if begin else ()
        self.copies_in = [_Copy(0, 0, 0, self.staged_in)] if self.staged_in else []
        self.copies_out = [_Copy(0, up, 0, self.staged_out)] if self.staged_out else []
        self.armed_pieces = (StreamMemory.ARMED,) if self.armed else ()
        self.armed_spots = [_Spot(place, 0, place.offset) for place in self.armed]

    def bind(
        self, launch: Launch, on_device: Mapping[str, DeviceArray], memory: Sequence[int], armed: Sequence[int]
    ) -> Bound:
        """Pack the parameters of a launch. memory, armed: the addresses of its pieces, and of the armed pieces.

        Raises `InvalidRequest` for an operand that the kernels cannot read where it lies.
        """
        buffers = dict(self.empty)
        for name, array in on_device.items():
            buffers[name] = Buffer(array.address, array.shape, element_strides(array), name_of(array.dtype))
        for spots, addresses in ((self.spots, memory), (self.armed_spots, armed)):
            for place, piece, offset in spots:
                if place.name not in buffers:
                    buffers[place.name] = _buffer(addresses[piece] + offset, place.shape, place.dtype)
        late = []
        for place, spec in self.late:
            assert spec.contents is not None
            late.append(spec.contents(buffers))
            if len(late[-1]) != place.nbytes:
                raise LaunchError(f"scratch {place.name!r} holds {place.nbytes} bytes and was given {len(late[-1])}")
        kernels = [
            (function, step.geometry, step.pack(buffers))
            for function, step in zip(self.functions, launch.steps, strict=True)
        ]
        cleared = [_extent(buffers[name]) for name in self.cleared]
        joined = [buffers[place.name].address for place in self.joined]
        if not self.emulated:
            return Bound(kernels, cleared, joined, late, {}, (), ())
        discarded = [
            _extent(buffers[place.name])
            for place in (*self.downloads, *self.scratch)
            if place.name not in self.cleared and place.nbytes
        ]
        rearmed = [name for name, spec in self.specs.items() if spec.rearmed]
        operands = {name: buffers[name] for name in (*launch.inputs, *launch.outputs, *self.specs)}
        return Bound(kernels, cleared, joined, late, operands, discarded, rearmed)


def _kind_of(launch: Launch) -> tuple[Any, ...]:
    """The properties of a launch that decide, besides its steps and scratch, where the operands go."""
    inputs = [
        (name, type(array), array.shape, array.dtype, array.strides if type(array) is DeviceArray else None)
        for name, array in launch.inputs.items()
    ]
    outputs = [
        (name, shape, dtype, zero, type(into), into.strides if type(into) is DeviceArray else None)
        for name, (shape, dtype, into, zero) in launch.outputs.items()
    ]
    return inputs, outputs, launch.returned, launch.updates


class Operands:
    """The operands of one launch. It owns their memory until `release`.

    bound: the launch, bound to the addresses of the operands.
    producers: the streams to wait for first.
    The constructor raises OutOfDeviceMemory, and InvalidRequest for an array in other memory or an output that cannot
    be written.
    """

    __slots__ = (
        "_armed",
        "_fixed",
        "_launch",
        "_memory",
        "_names",
        "_placement",
        "_pools",
        "_results",
        "_staging_in",
        "_staging_out",
        "bound",
        "producers",
    )

    def __init__(self, pools: MemoryPools, launch: Launch, placement: Placement, memory: StreamMemory) -> None:
        """memory: the memory that the launches of the stream share."""
        self.producers: set[int] = set()
        self._pools = pools
        self._launch: Launch | None = launch
        self._placement = placement
        self._results: dict[str, Any] = {}
        self._memory: DeviceMemory | None = None
        self._staging_in: StagingBlock | None = None
        self._staging_out: StagingBlock | None = None
        self._armed: ArmedMemory | None = None
        try:
            on_device = self._find_on_device(launch)
            self._allocate(memory)
            self.bound: Bound = self._bind(launch, on_device, memory)
            self._fill_staging(launch)
        except BaseException:
            self.release()
            raise

    def move(self, launch: Launch, memory: StreamMemory) -> None:
        """Switch to a launch of the same kind on other arrays of the device. memory: the same as before."""
        self.producers, self._results, self._launch = set(), {}, launch
        self.bound = self._bind(launch, self._find_on_device(launch), memory)

    def on_device(self, launch: Launch, besides: Collection[str] = ()) -> list[DeviceArray]:
        """The launch's input arrays on the device, and its outputs there. besides: names of inputs to leave out."""
        names = [name for name in self._placement.device if name not in besides]
        return [*[launch.inputs[name] for name in names], *self._results.values()]

    def bound_before(self, arrays: Mapping[str, DeviceArray]) -> Bound | None:
        """The launch bound to the addresses of these arrays, or None if there was none.

        arrays: all inputs and outputs on the device by name.
        """
        try:
            addresses = [arrays[name].address for name in self._names]
        except KeyError:  # the launch has other arrays
            return None
        return self._placement.bound.get((*self._fixed, *addresses))

    def upload(self, api: CudaApi, stream: int) -> None:
        """Enqueue the copies of the host inputs, and the first clearing of the memory that launches leave as 0."""
        placement = self._placement
        # No local variable holds the memory, because the traceback of a call that fails would keep it alive.
        if self._staging_in is not None and self._memory is not None:
            for piece, offset, staged, nbytes in placement.copies_in:
                address = self._memory.addresses[piece] + offset
                api.copy_to_device(address, self._staging_in.address + staged, nbytes, stream)
        if self._armed is not None and not self._armed.cleared:
            for address, nbytes in zip(self._armed.memory.addresses, placement.armed_pieces, strict=True):
                api.fill(address, 0, nbytes, stream)
            self._armed.cleared = True

    def launch(self, api: CudaApi, stream: int) -> None:
        """Enqueue the copies of joined arrays, the clearing of outputs and scratch, and then the kernels."""
        try:
            self._launch_steps(api, stream)
        except BaseException:
            if self._armed is not None:  # a part of the kernels may be enqueued, and leave something else than 0
                self._armed.cleared = False
            raise

    def _launch_steps(self, api: CudaApi, stream: int) -> None:
        placement = self._placement
        if placement.joined and self._launch is not None:
            for place, address in zip(placement.joined, self.bound.joined, strict=True):
                for part in self._launch.inputs[place.name].parts:
                    if part.nbytes:
                        api.copy_on_device(address, part.address, part.nbytes, stream)
                    address += part.nbytes
        for address, nbytes in self.bound.cleared:
            api.fill(address, 0, nbytes, stream)
        if api.emulation is not None:
            for address, nbytes in self.bound.discarded:
                api.emulation.discard(address, nbytes, stream)
        for function, geometry, params in self.bound.kernels:
            if 0 not in geometry.grid:
                api.launch_kernel(function.handle, *geometry, stream, params, self.bound.operands)
        if api.emulation is not None:
            for name in self.bound.rearmed:
                api.emulation.expect_cleared(name, *_extent(self.bound.operands[name]), stream)

    def download(self, api: CudaApi, stream: int) -> None:
        """Enqueue the copies of the outputs for the host."""
        placement = self._placement
        if self._staging_out is not None and self._memory is not None:
            for piece, offset, staged, nbytes in placement.copies_out:
                address = self._memory.addresses[piece] + offset
                api.copy_to_host(self._staging_out.address + staged, address, nbytes, stream)

    @property
    def found(self) -> Mapping[str, Any]:
        """The outputs on the device by name. They may not be written yet."""
        return self._results

    def results(self) -> Mapping[str, Any]:
        """Fill the host arrays that the launch wrote. Call it once the launch has finished.

        Returns the outputs by name: the caller's arrays, new ndarrays, DeviceArrays.
        """
        launch, placement = self._launch, self._placement
        assert launch is not None
        for place in placement.returned:
            if not place.nbytes:
                continue
            assert self._staging_out is not None
            _bits(launch.inputs[place.name])[...] = place.staged(self._staging_out, 0)
        for place in placement.downloads:
            spec = launch.outputs[place.name]
            into = np.empty(place.shape, place.dtype) if spec.into is None else spec.into
            if into.size:
                assert self._staging_out is not None
                _bits(into)[...] = place.staged(self._staging_out, placement.both)
            self._results[place.name] = into
        return self._results

    def restage(self, launch: Launch) -> None:
        """Stage what another launch of the same kind reads from the host. The uploads before must have finished."""
        for place in self._placement.uploads:
            if launch.inputs[place.name].shape != place.shape:
                raise LaunchError(f"operand {place.name!r} has another shape than the one whose place it takes")
        self._fill_staging(launch)

    def release(self) -> None:
        """Free the memory. No enqueued work may use it any more."""
        staging = (self._staging_in, self._staging_out)
        self._staging_in = self._staging_out = self._launch = self._memory = self._armed = None
        self._results = {}
        for staged in staging:
            if staged is not None:
                self._pools.release_staging(staged)

    def _find_on_device(self, launch: Launch) -> dict[str, DeviceArray]:
        """The inputs and outputs on the device by name. Allocates the outputs that the caller does not give."""
        index = self._pools.driver.index
        found: dict[str, DeviceArray] = {name: launch.inputs[name] for name in self._placement.device}
        for place in self._placement.joined:
            self.producers.update(part.stream for part in launch.inputs[place.name].parts if part.stream is not None)
        first = first_on_device(launch)
        for name, spec in launch.outputs.items():
            if spec.into is not None:
                check_output(spec.into, spec.shape, spec.dtype, name)
                if isinstance(spec.into, DeviceArray):
                    found[name] = self._results[name] = spec.into
            elif first is not None:
                found[name] = self._results[name] = self._make(first, name, spec)
        for name, array in found.items():
            if array.device != index:
                raise InvalidRequest(name, f"an array on cuda:{array.device}", f"must lie on cuda:{index} or the host")
            if array.stream is not None:
                self.producers.add(array.stream)
        return found

    def _make(self, first: DeviceArray, name: str, spec: OutputSpec) -> DeviceArray:
        """Allocate an output, with the library of the first array if it has one.

        Raises `OutOfDeviceMemory`, and `LaunchError` for another error of the library.
        """
        make = first.make or self._pools.lend
        try:
            with self._pools.driver.api.relaxed():
                return make(spec.shape, spec.dtype)
        except GpuActorsError:
            raise
        except Exception as error:  # the library is the caller's: its error is no defect of the actor
            raise LaunchError(f"{name} could not be allocated: {error!r}") from error

    def _allocate(self, memory: StreamMemory) -> None:
        placement = self._placement
        if pieces := placement.pieces:
            self._memory = memory.block(pieces)
        if placement.staged_in:
            self._staging_in = self._pools.acquire_staging(placement.staged_in)
        if placement.staged_out:
            self._staging_out = self._pools.acquire_staging(placement.staged_out)

    def _bind(self, launch: Launch, on_device: Mapping[str, DeviceArray], memory: StreamMemory) -> Bound:
        placement = self._placement
        pieces = () if self._memory is None else self._memory.addresses
        armed: tuple[int, ...] = ()
        if placement.armed:
            self._armed = memory.armed(placement.armed_pieces)
            armed = self._armed.memory.addresses
        self._fixed, self._names = (*pieces, *armed), tuple(on_device)
        key = (*self._fixed, *[array.address for array in on_device.values()])
        bound = placement.bound.get(key)
        if bound is None:
            bound = placement.bound[key] = placement.bind(launch, on_device, pieces, armed)
            if len(placement.bound) > placement.MOST_BOUND:
                placement.bound.popitem(last=False)
        return bound

    def _fill_staging(self, launch: Launch) -> None:
        placement, staging = self._placement, self._staging_in
        if staging is None:
            return
        for place in placement.uploads:
            place.staged(staging, 0)[...] = _bits(launch.inputs[place.name])
        for place in placement.returned:
            place.staged(staging, placement.up)[...] = _bits(launch.inputs[place.name])
        for (place, _), contents in zip(placement.late, self.bound.late, strict=True):
            staging.bytes[place.offset : place.offset + len(contents)] = np.frombuffer(contents, np.uint8)


def first_on_device(launch: Launch) -> DeviceArray | None:
    """The launch's first input if it lies on the device, else None. New outputs lie where the first input does."""
    first = next(iter(launch.inputs.values()), None)
    if isinstance(first, Joined):
        first = first.parts[0]
    return first if isinstance(first, DeviceArray) else None


def _place(name: str, spec: OutputSpec | ScratchSpec, layout: BlockLayout) -> _Place:
    dtype = dtype_of(spec.dtype)
    return _Place(name, layout.reserve(math.prod(spec.shape) * dtype.itemsize), spec.shape, dtype)


def _bits(array: Host) -> Host:
    # As unsigned integers: NumPy copies ml_dtypes' own types element by element and holds the GIL.
    return array.view(_BITS[array.itemsize])


def _extent(buffer: Buffer) -> tuple[int, int]:
    """The address and the size in bytes of a contiguous operand."""
    return buffer.address, math.prod(buffer.shape) * dtype_of(buffer.dtype).itemsize


def _buffer(address: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Buffer:
    return Buffer(address, tuple(shape), contiguous_strides(shape, 1), name_of(dtype))
