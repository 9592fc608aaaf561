"""Runs of one kernel on given arrays, emulated or on a GPU, for the tests of this folder."""

from __future__ import annotations

import ctypes
import functools
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import pytest
from inside.compiling import Compiler, asset_headers, exact_arch

from gpu_actors import Cubin, KernelSource
from gpu_actors.devices.emulation import EmulatedBuffer, EmulatedModule, Toolchain, build_module, encode_tensor_map
from gpu_actors.devices.emulation.build import find_entries

Array = npt.NDArray[Any]
KERNELS = Path(__file__).parent / "kernels"

Order = tuple[Any, Any, int]  # delivery, schedule, seed

# Every delivery and every schedule at least once
ORDERS: tuple[Order, ...] = (
    ("late", "greedy", 0),
    ("late", "lane", 1),
    ("eager", "round_robin", 0),
    ("eager", "greedy", 2),
    ("random", "random", 3),
    ("random", "lane", 4),
)


@dataclass(frozen=True)
class TensorMapArgument:
    """A tensor map over one of the arrays; sizes innermost first, strides in bytes."""

    array: str
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: str = "none"


class Place(Protocol):
    """Where the arrays of a run are. Its parameters are made from this."""

    def address(self, array: str) -> int: ...

    def tensor_map(self, wanted: TensorMapArgument) -> bytes: ...


def pointers(*arrays: str) -> Callable[[Place], list[bytes]]:
    """Parameters that are the addresses of these arrays."""
    return lambda place: [pointer(place, name) for name in arrays]


def pointer(place: Place, array: str) -> bytes:
    return struct.pack("<Q", place.address(array))


@dataclass(frozen=True)
class KernelRun:
    """file: below tests/emulation/kernels. arrays: what it reads and writes. params: its arguments."""

    file: str
    entry: str
    arrays: Mapping[str, Array]
    params: Callable[[Place], list[bytes]]
    block: int = 32
    grid: int | tuple[int, ...] = 1
    shared_bytes: int = 0
    macros: Mapping[str, str] = field(default_factory=dict)


class Results(Mapping[str, Array]):
    """The arrays after a run. `order` says how it ran."""

    def __init__(self, arrays: Mapping[str, Array], order: str) -> None:
        self._arrays, self.order = arrays, order

    def __getitem__(self, name: str) -> Array:
        return self._arrays[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)

    def check(self, **expected: Array) -> None:
        """Assert that every named array equals the expected one in value."""
        for name, wanted in expected.items():
            got = self[name].reshape(wanted.shape)
            np.testing.assert_array_equal(got, wanted, err_msg=f"{name}, {self.order}")


Runner = Callable[[KernelRun], Iterator[Results]]


# ---- on the CPU


class _EmulatedPlace:
    def __init__(self, arrays: Mapping[str, Array]) -> None:
        self.buffers = {name: EmulatedBuffer.of(array, name) for name, array in arrays.items()}

    def address(self, array: str) -> int:
        return self.buffers[array].address

    def tensor_map(self, wanted: TensorMapArgument) -> bytes:
        address = self.address(wanted.array)
        return encode_tensor_map(
            address,
            wanted.dtype,
            wanted.shape,
            wanted.strides,
            wanted.box,
            wanted.swizzle,  # type: ignore[arg-type]
        )


def emulated_module(
    file: str, macros: Mapping[str, str], cache_dir: Path, toolchain: Toolchain | None = None
) -> EmulatedModule:
    source, headers = read_source(file)
    return build_module(source, macros, headers, toolchain, cache_dir, name=Path(file).name)


def read_source(file: str) -> tuple[str, dict[str, str]]:
    """The text of a file of tests/emulation/kernels, and the headers that it reaches, beside it or in kernels_cu."""
    path = KERNELS / file
    own = {header.name: header.read_text() for header in path.parent.glob("*.cuh")}
    text = path.read_text()
    return text, {**own, **asset_headers("\n".join([text, *own.values()]))}


def cubin_of(file: str, macros: Mapping[str, str], arch: str, absent: Sequence[str] = ()) -> Cubin:
    """The file compiled by NVRTC. absent: entries that this architecture lacks."""
    text, headers = read_source(file)
    entries = tuple(entry for entry in find_entries(text) if entry not in absent)
    return Compiler().compile(KernelSource(file, text, entries, headers=headers, macros=macros), arch)


def launch_emulated(module: EmulatedModule, wanted: KernelRun, order: Order, **launch: Any) -> Results:
    """One launch on fresh copies of the arrays. launch: further arguments of EmulatedModule.launch."""
    delivery, schedule, seed = order
    place = _EmulatedPlace(wanted.arrays)
    module.launch(
        wanted.entry,
        wanted.grid,
        wanted.block,
        wanted.shared_bytes,
        wanted.params(place),
        list(place.buffers.values()),
        delivery=delivery,
        schedule=schedule,
        seed=seed,
        **launch,
    )
    arrays = {n: b.view(wanted.arrays[n].dtype, wanted.arrays[n].shape) for n, b in place.buffers.items()}
    return Results(arrays, f"{delivery} delivery, {schedule} schedule, seed {seed}")


def emulated_runner(cache_dir: Path, toolchain: Toolchain | None = None, orders: Sequence[Order] = ORDERS) -> Runner:
    """Runs a kernel in each of these orders."""

    def run(wanted: KernelRun) -> Iterator[Results]:
        module = emulated_module(wanted.file, wanted.macros, cache_dir, toolchain)
        for order in orders:
            yield launch_emulated(module, wanted, order)

    return run


# ---- on a GPU

_MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_DRIVER_TYPES = {"uint8": 0, "uint16": 1, "uint32": 2, "int32": 3, "float16": 6, "float32": 7, "bfloat16": 9}
_DRIVER_SWIZZLES = {"none": 0, "32B": 1, "64B": 2, "128B": 3}


class _CudaPlace:
    def __init__(self, arrays: Mapping[str, Array]) -> None:
        import cupy

        self.buffers = {name: cupy.asarray(array.reshape(-1).view(np.uint8)) for name, array in arrays.items()}

    def address(self, array: str) -> int:
        return int(self.buffers[array].data.ptr)

    def tensor_map(self, wanted: TensorMapArgument) -> bytes:
        """cuTensorMapEncodeTiled, straight from the driver."""
        storage = ctypes.create_string_buffer(128 + 64)
        aligned = -(-ctypes.addressof(storage) // 64) * 64
        rank = len(wanted.shape)
        status = ctypes.CDLL("libcuda.so.1").cuTensorMapEncodeTiled(
            ctypes.c_void_p(aligned),
            ctypes.c_int(_DRIVER_TYPES[wanted.dtype]),
            ctypes.c_uint32(rank),
            ctypes.c_void_p(self.address(wanted.array)),
            (ctypes.c_uint64 * 5)(*wanted.shape),
            (ctypes.c_uint64 * 5)(*wanted.strides),
            (ctypes.c_uint32 * 5)(*wanted.box),
            (ctypes.c_uint32 * 5)(*[1] * rank),
            ctypes.c_int(0),
            ctypes.c_int(_DRIVER_SWIZZLES[wanted.swizzle]),
            ctypes.c_int(0),
            ctypes.c_int(0),
        )
        assert status == 0, f"cuTensorMapEncodeTiled: {status}"
        return ctypes.string_at(aligned, 128)


# The compute capability that a file, or an entry of one, needs. The others need 80.
_CAPABILITY = {"pipelines": 90, "tensors": 90, "wgmma": 90, "second_reading": 90, "mma_e4m3": 89, "mma_e5m2": 89}


@functools.cache
def _cuda_module(file: str, macros: tuple[tuple[str, str], ...], capability: int) -> int:
    from cupy.cuda import driver

    absent = [entry for entry, needed in _CAPABILITY.items() if needed > capability]
    return int(driver.moduleLoadData(cubin_of(file, dict(macros), exact_arch(capability), absent).data))


def launch_on_cuda(module: int, wanted: KernelRun, params: Sequence[bytes]) -> None:
    """One launch on the current device's default stream. Each parameter is passed by value, whatever its size."""
    from cupy.cuda import driver

    function = driver.moduleGetFunction(module, wanted.entry)
    driver.funcSetAttribute(function, _MAX_DYNAMIC_SHARED, wanted.shared_bytes)
    values = [ctypes.create_string_buffer(data, len(data)) for data in params]
    pointers = (ctypes.c_void_p * len(values))(*map(ctypes.addressof, values))
    grid = (wanted.grid,) if isinstance(wanted.grid, int) else wanted.grid
    shape = (*grid, 1, 1)[:3]
    driver.launchKernel(function, *shape, wanted.block, 1, 1, wanted.shared_bytes, 0, ctypes.addressof(pointers), 0)


def cuda_runner() -> Runner:
    """Runs a kernel once on the current GPU. Skips kernels for which that GPU has no instructions."""

    def run(wanted: KernelRun) -> Iterator[Results]:
        import cupy

        capability = int(cupy.cuda.Device().compute_capability)
        needed = max(_CAPABILITY.get(name, 80) for name in (Path(wanted.file).stem, wanted.entry))
        if capability < needed:
            pytest.skip(
                f"{wanted.file}:{wanted.entry} needs compute capability {needed / 10}, this GPU has {capability / 10}"
            )
        place = _CudaPlace(wanted.arrays)
        module = _cuda_module(wanted.file, tuple(wanted.macros.items()), capability)
        launch_on_cuda(module, wanted, wanted.params(place))
        cupy.cuda.runtime.deviceSynchronize()
        arrays = {n: cupy.asnumpy(b).view(wanted.arrays[n].dtype) for n, b in place.buffers.items()}
        yield Results({n: a.reshape(wanted.arrays[n].shape) for n, a in arrays.items()}, "on the GPU")

    return run
