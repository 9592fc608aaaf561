"""Arrays on a GPU are adopted in the order of their producers' streams, and results are made by their library."""

from __future__ import annotations

import gc
import sys
import weakref
from types import SimpleNamespace
from typing import Any

import cupy
import ml_dtypes
import numpy as np
import pytest
from fakes.cuda import FakeCuda
from fakes.tensor import DeviceTensor
from inside.actors import caller_launch

from gpu_actors.arrays.adopt import (
    CallerNotes,
    Reinterpreted,
    adopt,
    caller_streams,
    check_device,
    restore,
)
from gpu_actors.arrays.device_array import DeviceArray, element_strides
from gpu_actors.errors import InvalidRequest, OutOfDeviceMemory

stream_of = caller_launch.stream_of


def refusal(array: Any, field: str = "q", **how: Any) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        adopt(array, field, **how)
    assert caught.value.field == field
    return caught.value


# DLPack on a device


@pytest.fixture
def cuda() -> FakeCuda:
    made = FakeCuda()
    made.bind()
    return made


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "int32", "float8_e4m3fn"])
def test_a_device_tensor_is_described_as_its_producer_says(cuda: FakeCuda, dtype: str) -> None:
    tensor = DeviceTensor(cuda, np.zeros((4, 6), dtype), device=(2, 3), steps=(1, 4), offset=64)
    adopted = adopt(tensor, "q")
    array = adopted.array
    assert isinstance(array, DeviceArray)
    assert (adopted.kind, adopted.device, adopted.source) == ("dlpack", "cuda:3", tensor)
    assert (array.address, array.shape, array.dtype) == (tensor.block.address + 64, (4, 6), np.dtype(dtype))
    assert element_strides(array) == (1, 4)
    assert (array.device, array.stream) == (3, 1)
    assert (array.ndim, array.size, array.nbytes) == (2, 24, 24 * np.dtype(dtype).itemsize)
    assert not array.contiguous
    assert array.transpose().contiguous


def test_the_producer_is_asked_to_order_itself_before_the_legacy_stream(cuda: FakeCuda) -> None:
    tensor = DeviceTensor(cuda, np.zeros(3, np.float32), stream=cuda.new_stream())
    adopt(tensor, "q")
    assert tensor.asked == [1]
    assert "wait_event" in cuda.calls


def test_a_tensor_elsewhere_or_of_unknown_dtype_is_refused(cuda: FakeCuda) -> None:
    assert "DLDeviceType is 10" in refusal(DeviceTensor(cuda, np.zeros(3, np.float32), device=(10, 0))).reason
    assert "4 lanes" in refusal(DeviceTensor(cuda, np.zeros(3, np.float32), lanes=4)).reason


def test_an_array_must_lie_where_the_context_runs_or_on_the_host(cuda: FakeCuda) -> None:
    here = adopt(DeviceTensor(cuda, np.zeros(3, np.float32)), "k")
    check_device(here, "k", "cuda:0")
    check_device(adopt(np.zeros(3), "k"), "k", "cuda:0")
    for device in ("cuda:1", "cpu"):
        with pytest.raises(InvalidRequest, match="not on cuda:0"):
            check_device(here, "k", device)


# CuPy, over memory that only has an address


def cupy_array(shape: tuple[int, ...], dtype: Any, device: int = 0) -> Any:
    memory = cupy.cuda.UnownedMemory(0x7F00_0000_1000, 1 << 20, None, device)
    return cupy.ndarray(shape, dtype, cupy.cuda.MemoryPointer(memory, 64))


def on_stream(pointer: int) -> CallerNotes:
    return CallerNotes(cupy=SimpleNamespace(ptr=pointer, device_id=0))


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32])
def test_a_cupy_array_is_adopted_in_the_order_of_the_callers_stream(dtype: Any) -> None:
    array = cupy_array((4, 6), dtype).T
    streams = on_stream(1234)
    adopted = adopt(array, "q", streams)
    view = adopted.array
    assert isinstance(view, DeviceArray)
    assert (adopted.kind, adopted.device) == ("cupy", "cuda:0")
    assert adopted.source is array
    assert (view.address, view.shape, view.strides) == (array.data.ptr, (6, 4), array.strides)
    assert (view.dtype, view.stream, view.device) == (np.dtype(dtype), 1234, 0)
    assert view.owner[1] is streams.cupy
    assert restore(view, adopted) is array
    turned = restore(view.transpose(), adopted)
    assert turned is not array
    assert (turned.shape, turned.data.ptr) == ((4, 6), array.data.ptr)


def test_a_stream_that_means_another_on_every_thread_is_one_with_the_default_stream() -> None:
    """The two wait for each other."""
    array = cupy_array((4,), np.float32)
    adopted = adopt(array, "q", CallerNotes(cupy=cupy.cuda.Stream.ptds))
    assert isinstance(adopted.array, DeviceArray)
    assert (adopted.array.stream, adopted.array.owner[1], adopted.source) == (0, cupy.cuda.Stream.null, array)
    assert adopted.array.make is not None
    for own in (2, cupy.cuda.Stream.ptds, SimpleNamespace(cuda_stream=2)):
        assert stream_of(own, "cuda:0") == 1
    for other in (0, 1, 1234):
        assert stream_of(other, "cuda:0") == stream_of(SimpleNamespace(ptr=other), "cuda:0") == other


@pytest.mark.parametrize("index", [0, 1])
def test_a_stream_belongs_to_the_contexts_device(index: int) -> None:
    """Handle 0 is the default stream of every device, and a launch on a stream of another device fails."""
    torchs = SimpleNamespace(cuda_stream=0, device=SimpleNamespace(index=index))
    for stream in (torchs, SimpleNamespace(ptr=1234, device_id=index)):
        with pytest.raises(InvalidRequest, match=f"stream=.*cuda:{1 - index}, not of cuda:{index}"):
            stream_of(stream, f"cuda:{1 - index}")
        assert stream_of(stream, f"cuda:{index}") == stream_of(stream, "cpu") in (0, 1234)
    assert stream_of(cupy.cuda.Stream.null, f"cuda:{index}") == 0


@pytest.mark.parametrize("number", [-1, 1 << 64, 1.0, True, "0"])
def test_what_is_no_handle_of_a_stream_is_refused(number: Any) -> None:
    for given in (number, SimpleNamespace(ptr=number), SimpleNamespace(cuda_stream=number)):
        with pytest.raises(InvalidRequest, match=r"stream=.*must be an int, or a stream of torch or CuPy"):
            stream_of(given, "cuda:0")


def test_fp8_in_a_cupy_array_is_named_by_the_caller() -> None:
    bits = cupy_array((4, 6), np.uint8)
    adopted = adopt(Reinterpreted(bits, "float8_e5m2"), "q", on_stream(9))
    assert adopted.array.dtype == ml_dtypes.float8_e5m2
    assert adopted.array.strides == (6, 1)
    assert adopted.kind == "cupy"
    for wrong in ("bfloat16", "fp8"):
        error = refusal(Reinterpreted(bits, wrong), notes=on_stream(9))
        assert error.value == wrong
        assert "1 bytes an element" in error.reason


def test_reinterpreted_host_bits_are_a_view() -> None:
    bits = np.arange(6, dtype=np.uint16).reshape(2, 3)
    adopted = adopt(Reinterpreted(bits, "bfloat16"), "q")
    assert adopted.array.dtype == ml_dtypes.bfloat16
    assert np.shares_memory(adopted.array, bits)


def test_a_result_of_the_devices_own_becomes_a_cupy_array_that_keeps_it() -> None:
    class Owner:
        pass

    owner = Owner()
    alive = weakref.ref(owner)
    like = adopt(cupy_array((4,), np.float32), "q", on_stream(5))
    made = DeviceArray(0x7F00_0000_2000, (2, 3), (4, 8), np.dtype(np.float32), 0, owner=owner)
    del owner
    result = restore(made, like)
    del made
    assert isinstance(result, cupy.ndarray)
    assert (result.data.ptr, result.shape, result.strides) == (0x7F00_0000_2000, (2, 3), (4, 8))
    gc.collect()
    assert alive() is not None
    del result
    gc.collect()
    assert alive() is None


def test_an_fp8_result_becomes_uint8_in_cupy() -> None:
    like = adopt(cupy_array((4,), np.float32), "q", on_stream(5))
    made = DeviceArray(0x7F00_0000_2000, (2,), (1,), np.dtype(ml_dtypes.float8_e4m3fn), 0)
    assert restore(made, like).dtype == np.uint8


# torch on a device: a stand-in has the few attributes that are read


class Stream:
    def __init__(self, handle: int, device: str = "cuda:0") -> None:
        self.cuda_stream = handle
        self.device = Place(device)
        self.entered = 0

    def __enter__(self) -> None:
        self.entered += 1

    def __exit__(self, *error: object) -> None: ...


class Place(SimpleNamespace):
    def __init__(self, name: str) -> None:
        kind, _, index = name.partition(":")
        super().__init__(type=kind, index=int(index or 0))


class Tensor:
    requires_grad = False
    layout = "strided"

    def __init__(self, dtype: str = "torch.bfloat16", device: str = "cuda:0", address: int = 0x7F00) -> None:
        self.dtype, self.device, self.shape = dtype, Place(device), (2, 3)
        self.address = address

    def is_neg(self) -> bool:
        return False

    is_conj = is_neg

    def stride(self) -> tuple[int, ...]:
        return (3, 1)

    def data_ptr(self) -> int:
        return self.address

    def detach(self) -> Tensor:
        return Tensor(self.dtype, address=self.address)


class OutOfMemory(RuntimeError):
    pass


@pytest.fixture
def torch(monkeypatch: pytest.MonkeyPatch) -> Any:
    current = Stream(77)
    fake = SimpleNamespace(
        __spec__=None,
        Tensor=Tensor,
        strided="strided",
        float32="torch.float32",
        autograd=SimpleNamespace(forward_ad=SimpleNamespace(_current_level=-1)),
        cuda=SimpleNamespace(
            current_stream=lambda device: current,
            is_initialized=lambda: True,
            stream=lambda stream: stream,
            OutOfMemoryError=OutOfMemory,
        ),
    )
    monkeypatch.setitem(sys.modules, "torch", fake)
    return fake


def test_a_torch_tensor_on_a_device_is_adopted_in_the_order_of_the_callers_stream(torch: Any) -> None:
    tensor, stream = Tensor(), Stream(55)
    tensor.requires_grad = True
    adopted = adopt(tensor, "q", CallerNotes(torch=stream, grad=False))
    view = adopted.array
    assert isinstance(view, DeviceArray)
    assert (adopted.kind, adopted.device, adopted.source) == ("torch", "cuda:0", tensor)
    assert (view.address, view.shape, view.strides, view.stream) == (0x7F00, (2, 3), (6, 2), 55)
    assert view.dtype == ml_dtypes.bfloat16
    assert restore(view, adopted) is tensor


def test_without_the_callers_stream_the_threads_own_is_taken(torch: Any) -> None:
    assert adopt(Tensor(), "q").array.stream == 77
    other_device = CallerNotes(torch=Stream(55, "cuda:1"))
    assert adopt(Tensor(), "q", other_device).array.stream == 77


def test_the_callers_streams_are_those_of_the_libraries_in_use(torch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cupy.cuda, "get_current_stream", lambda device: ("cupy", device))
    streams = caller_streams(0)
    assert streams is not None
    assert streams.torch.cuda_stream == 77
    assert streams.cupy == ("cupy", 0)
    torch.cuda.is_initialized = lambda: False
    monkeypatch.delitem(sys.modules, "cupy")
    assert caller_streams(0) is None
    torch.__spec__ = SimpleNamespace(_initializing=True)
    del torch.cuda
    assert caller_streams(0) is None, "a module that is still being imported is left alone"


def test_results_are_made_by_torch_on_the_callers_stream(torch: Any) -> None:
    asked = []

    def empty(shape: tuple[int, ...], dtype: str, device: Any) -> Tensor:
        asked.append((shape, dtype, device.index))
        return Tensor("torch.float32", address=0x8000)

    torch.empty = empty
    stream = Stream(55)
    make = adopt(Tensor(), "q", CallerNotes(torch=stream)).array.make
    made = make((2, 3), "float32")
    assert asked == [((2, 3), "torch.float32", 0)]
    assert (made.address, made.stream, made.dtype) == (0x8000, 55, np.dtype(np.float32))
    assert isinstance(made.source, Tensor)
    assert stream.entered == 1

    def full(*args: Any, **kwargs: Any) -> None:
        raise OutOfMemory("CUDA out of memory")

    torch.empty = full
    with pytest.raises(OutOfDeviceMemory, match="torch has no room"):
        make((2, 3), "float32")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"device": Place("mps")}, "not on"),
        ({"layout": "sparse_coo"}, "dense"),
        ({"is_neg": lambda: True}, "resolve_neg"),
        ({"dtype": "torch.complex64"}, "one of the dtypes"),
        ({"data_ptr": lambda: 1 / 0}, "cannot be read"),
    ],
    ids=["place", "layout", "negative bit", "dtype", "broken"],
)
def test_a_torch_tensor_that_is_not_plain_memory_is_refused(torch: Any, change: dict[str, Any], words: str) -> None:
    tensor = Tensor()
    for name, value in change.items():
        setattr(tensor, name, value)
    assert words in refusal(tensor).reason


@pytest.mark.parametrize(
    "index",
    [0, -1, (slice(1, 3), 2), (..., 0), (..., None), (slice(None), None), (0, ..., slice(1, None)), slice(2, 99), ...],
    ids=str,
)
def test_views_of_a_device_array_lie_where_those_of_an_ndarray_do(index: Any) -> None:
    host = np.arange(4 * 5 * 6, dtype=np.float32).reshape(4, 5, 6)[:, ::2].transpose(1, 0, 2)
    base = host.__array_interface__["data"][0]
    device = DeviceArray(base, host.shape, host.strides, host.dtype, 0)[index]
    wanted = host[index]
    assert device.shape == wanted.shape
    assert device.address == wanted.__array_interface__["data"][0]
    steps = zip(device.shape, device.strides, wanted.strides, strict=True)
    assert all(extent == 1 or own == theirs for extent, own, theirs in steps)


@pytest.mark.parametrize(("index", "error"), [(slice(None, None, 2), ValueError), (4, IndexError), (-5, IndexError)])
def test_what_is_no_view_of_a_device_array_is_refused(index: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        DeviceArray(0, (4, 2), (8, 4), np.dtype(np.float32), 0)[index]


@pytest.mark.parametrize(
    ("strides", "offset", "words"),
    [
        ((20, 5), 0, "a stride of 5 bytes"),
        ((18, 4), 0, "a stride of 18 bytes"),
        ((16, -3), 0, "a stride of -3 bytes"),
        ((16, 4), 2, "an address of 0x"),
    ],
)
def test_an_array_that_no_element_aligned_address_reaches_is_refused(
    strides: tuple[int, int], offset: int, words: str
) -> None:
    memory = cupy.cuda.UnownedMemory(0x7000_0000, 1 << 16, None, 0)
    array = cupy.ndarray((3, 4), np.float32, cupy.cuda.MemoryPointer(memory, 1024 + offset), strides)
    error = refusal(array, notes=on_stream(7))
    assert words in str(error)
    assert "must be a multiple of the element's 4 bytes: copy the array" in str(error)


def test_strides_that_are_never_taken_and_empty_arrays_may_be_odd() -> None:
    memory = cupy.cuda.UnownedMemory(0x7000_0000, 1 << 16, None, 0)
    for shape in ((1, 4), (0, 4)):
        array = cupy.ndarray(shape, np.float32, cupy.cuda.MemoryPointer(memory, 0), (5, 4))
        assert adopt(array, "q", on_stream(7)).array.strides == (5, 4)
