"""The only module that knows kinds of arrays: NumPy, torch, CuPy, JAX, and anything else with DLPack.

`adopt` turns the caller's array into one that the package works with, without a copy: an ndarray if it lies on the
host, a `DeviceArray` if it lies on a GPU. `restore` turns a result into an array of the caller's kind. `adopt` imports
no library: it looks only at those that the program has imported.

Work that a GPU array's producer enqueued may still be writing it. torch and CuPy keep the stream of that work in a
variable of the calling thread, so `caller_streams` must be called on the thread that submits a request. JAX and other
DLPack producers, when asked, order their work before the legacy default stream. Torch's grad mode belongs to the
submitting thread, too, and decides whether a tensor may be taken without its history.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import ml_dtypes
import numpy as np

from gpu_actors.arrays import dlpack
from gpu_actors.arrays.device_array import AnyArray, DeviceArray, element_strides
from gpu_actors.arrays.dlpack import host_view, read_capsule
from gpu_actors.errors import InvalidRequest, OutOfDeviceMemory, RequestError
from gpu_actors.values import show

__all__ = [
    "Adopted",
    "AnyArray",
    "CallerNotes",
    "DeviceArray",
    "Kind",
    "Reinterpreted",
    "adopt",
    "caller_streams",
    "check_device",
    "check_output",
    "describe",
    "dtype_of",
    "element_strides",
    "is_on_device",
    "name_of",
    "on_every_thread",
    "restore",
    "with_grad_mode",
]

Kind: TypeAlias = Literal["numpy", "torch", "cupy", "jax", "dlpack"]
Dtype: TypeAlias = "np.dtype[Any]"
Host: TypeAlias = "np.ndarray[Any, Any]"

_ML_DTYPES: dict[str, Dtype] = {
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float8_e4m3fn": np.dtype(ml_dtypes.float8_e4m3fn),
    "float8_e5m2": np.dtype(ml_dtypes.float8_e5m2),
}
_NUMPY_NAMES = ("float16", "float32", "float64", "bool")
_INTEGER_NAMES = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
_DTYPES: dict[str, Dtype] = {
    **{name: np.dtype(name) for name in _NUMPY_NAMES + _INTEGER_NAMES},
    **_ML_DTYPES,
}
_KNOWN = {dtype: name for name, dtype in _DTYPES.items()}

_LEGACY_STREAM, _PER_THREAD_STREAM = 1, 2
_NOT_AN_ARRAY = "must be an array: NumPy, torch, CuPy, JAX, or anything with DLPack"


@dataclass(frozen=True, slots=True)
class CallerNotes:
    """What must be known of the thread that submits a request.

    torch, cupy: the streams that those libraries would enqueue on; None if the library is not in use.
    grad: whether torch's grad mode was on.
    """

    torch: Any = None
    cupy: Any = None
    grad: bool = True


def caller_streams(device: int) -> CallerNotes | None:
    """The streams of CUDA device ``device`` that are current on this thread. This does not access the device."""
    torch, cupy = loaded("torch"), loaded("cupy")
    torch_stream = torch.cuda.current_stream(device) if torch and torch.cuda.is_initialized() else None
    cupy_stream = cupy.cuda.get_current_stream(device) if cupy else None
    if torch_stream is None and cupy_stream is None:
        return None
    return CallerNotes(torch_stream, cupy_stream)


def on_every_thread(stream: int) -> int:
    """The handle of a stream that other threads may use for it. The handle 2 is another stream on each thread.

    The legacy default stream takes its place. It waits for the default streams of all threads, and they for it.
    """
    return _LEGACY_STREAM if stream == _PER_THREAD_STREAM else stream


def with_grad_mode(notes: CallerNotes | None) -> CallerNotes | None:
    """The notes of the calling thread, with torch's grad mode."""
    torch = loaded("torch")
    if torch is None or torch.is_grad_enabled():
        return notes
    return dataclasses.replace(notes or CallerNotes(), grad=False)


def loaded(name: str) -> Any:
    """The library, if the program has imported it completely; else None."""
    module = sys.modules.get(name)
    if module is None or getattr(module.__spec__, "_initializing", False):
        return None
    return module


@dataclass(slots=True, eq=False)
class Adopted:
    """A caller's array as the package works with it.

    array: the same memory, as ndarray or `DeviceArray`. kind: the library it comes from.
    device: "cpu" or "cuda:N". source: the caller's own object.
    """

    array: AnyArray
    kind: Kind
    device: str
    source: Any


@dataclass(frozen=True, slots=True)
class Reinterpreted:
    """An array whose library has no name for its dtype: fp8 in a uint8 CuPy array, say. dtype: an ml_dtypes name."""

    array: Any
    dtype: str


def dtype_of(name: str) -> Dtype:
    """The dtype of a NumPy or ml_dtypes name. Raises KeyError for a dtype that no operand may have."""
    return _DTYPES[name]


def name_of(dtype: Dtype) -> str:
    """The name of a dtype, as `dtype_of` takes it. Far faster than ``dtype.name``."""
    return _KNOWN[dtype]


def adopt(array: Any, field: str, notes: CallerNotes | None = None) -> Adopted:
    """Adopt the caller's array, without a copy.

    notes: those of the thread that submitted the request; None: the calling thread's own.
    Raises InvalidRequest naming ``field`` for an object that is no array, cannot be read where it lies, has a dtype
    that no operand may have, or would lose its gradient: a torch tensor that requires grad while grad mode is on, or
    that has a tangent.
    """
    if type(array) is np.ndarray and array.dtype in _KNOWN:
        return Adopted(array, "numpy", "cpu", array)
    try:
        if type(array) is DeviceArray:
            check_placement(array, field)
            return Adopted(array, "dlpack", f"cuda:{array.device}", array)
        adopted = _adopt_foreign(array, field, notes)
        if isinstance(adopted.array, DeviceArray):
            check_placement(adopted.array, field)
        return adopted
    except RequestError:
        raise
    except Exception as error:  # any error of another library over a deleted, traced or lazy array
        raise InvalidRequest(field, describe(array), f"cannot be read: {show(error)}") from error


def is_on_device(array: Any) -> bool:
    """Whether it is a `DeviceArray`, or an array on a GPU of torch or CuPy, which are adopted without a wait."""
    try:
        if isinstance(array, DeviceArray):
            return True
        if (torch := loaded("torch")) and isinstance(array, torch.Tensor):
            return bool(array.is_cuda)
        return bool((cupy := loaded("cupy")) and isinstance(array, cupy.ndarray))
    except Exception:  # a faulty object of the caller's, which `adopt` refuses
        return False


def restore(result: AnyArray, template: Adopted) -> Any:
    """Return a result as an array of the kind of ``template``, without a copy if that library allows it.

    A result that was written into an array of the caller's is returned as that array. CuPy has no fp8, and gets uint8
    instead. For a library that is known by DLPack alone, the result is an array of that library if it follows the
    array API standard; otherwise an ndarray, or on a GPU a CuPy array.
    """
    if isinstance(result, DeviceArray):
        return _restore_device(result, template)
    if template.kind == "torch":
        return _torch_from_host(sys.modules["torch"], result)
    if template.kind == "jax":
        return sys.modules["jax"].device_put(result, template.source.device)
    if template.kind == "dlpack":
        return _by_namespace(result, template)
    return result


def check_device(adopted: Adopted, field: str, device: str) -> None:
    """Check that the array lies on the host or on ``device`` ("cpu", "cuda:N")."""
    if adopted.device not in ("cpu", device):
        there = "the host" if device == "cpu" else f"the host or {device}"
        raise InvalidRequest(field, describe(adopted.source), f"must lie on {there}, not on {adopted.device}")


def check_output(into: AnyArray, shape: tuple[int, ...], dtype: str, field: str) -> None:
    """Check that an output of this shape and dtype can be written into the array ``into``."""
    if into.shape != tuple(shape) or into.dtype != _DTYPES[dtype]:
        reason = f"must be {dtype} of shape {tuple(shape)}"
        raise InvalidRequest(field, f"{into.dtype} of shape {into.shape}", reason)
    writeable = into.writeable if isinstance(into, DeviceArray) else into.flags.writeable
    if not writeable:
        raise InvalidRequest(field, "a read-only array", "must be writeable")


def describe(array: Any) -> str:
    """An array in a few words, for messages. Never raises."""
    name = type(array).__name__
    try:
        return f"{name} {array.dtype} of shape {tuple(array.shape)}"
    except Exception:
        return name


# Reading


def _adopt_foreign(array: Any, field: str, notes: CallerNotes | None) -> Adopted:
    if isinstance(array, np.ndarray):
        return _adopt_numpy(array, field)
    if isinstance(array, Reinterpreted):
        return _adopt_reinterpreted(array, field, notes)
    if isinstance(array, DeviceArray):
        return Adopted(array, "dlpack", f"cuda:{array.device}", array)
    if (torch := loaded("torch")) and isinstance(array, torch.Tensor):
        return _adopt_torch(torch, array, field, notes)
    if (cupy := loaded("cupy")) and isinstance(array, cupy.ndarray):
        return _adopt_cupy(cupy, array, field, notes)
    if (jax := loaded("jax")) and isinstance(array, jax.Array):
        return _adopt_jax(jax, array, field)
    if hasattr(array, "__dlpack__") and hasattr(array, "__dlpack_device__"):
        return _adopt_dlpack(array, field, "dlpack")
    raise InvalidRequest(field, describe(array), _NOT_AN_ARRAY)


def _adopt_numpy(array: Host, field: str) -> Adopted:
    if isinstance(array, np.ma.MaskedArray):
        raise InvalidRequest(field, describe(array), "must not be masked: the mask would be ignored")
    plain = array.view(np.ndarray)
    _check_dtype(plain.dtype, array, field)
    return Adopted(plain, "numpy", "cpu", array)


def _adopt_reinterpreted(given: Reinterpreted, field: str, notes: CallerNotes | None) -> Adopted:
    adopted = adopt(given.array, field, notes)
    dtype = _DTYPES.get(given.dtype)
    if dtype is None or dtype.itemsize != adopted.array.itemsize:
        size = adopted.array.itemsize
        raise InvalidRequest(field, given.dtype, f"must name a known dtype of {size} bytes an element")
    adopted.array = adopted.array.view(dtype)
    return adopted


def _adopt_torch(torch: Any, tensor: Any, field: str, notes: CallerNotes | None) -> Adopted:
    if tensor.layout is not torch.strided:
        raise InvalidRequest(field, describe(tensor), f"must be dense, not {tensor.layout}")
    if tensor.is_neg() or tensor.is_conj():
        raise InvalidRequest(field, describe(tensor), "must be resolved: call resolve_neg() or resolve_conj()")
    name = str(tensor.dtype).removeprefix("torch.")
    dtype = _check_dtype(_DTYPES.get(name, name), tensor, field)
    _check_gradient(torch, tensor, field, notes)
    plain = tensor.detach() if tensor.requires_grad else tensor
    place = tensor.device
    if place.type == "cpu":
        if name not in _ML_DTYPES:
            return Adopted(plain.numpy(), "torch", "cpu", tensor)
        bits = plain.view(torch.uint8 if dtype.itemsize == 1 else torch.int16)
        return Adopted(bits.numpy().view(dtype), "torch", "cpu", tensor)
    if place.type != "cuda":
        raise InvalidRequest(field, describe(tensor), f"must lie on the host or a CUDA device, not on {place}")
    stream = notes.torch if notes else None
    if stream is None or stream.device != place:
        stream = torch.cuda.current_stream(place)
    return Adopted(_torch_view(torch, plain, dtype, stream, tensor), "torch", f"cuda:{place.index}", tensor)


def _check_gradient(torch: Any, tensor: Any, field: str, notes: CallerNotes | None) -> None:
    """Refuse a tensor that asks for derivatives, because the result would have none."""
    forward_ad = torch.autograd.forward_ad
    if tensor.requires_grad and (torch.is_grad_enabled() if notes is None else notes.grad):
        given = "requires grad"
    elif forward_ad._current_level >= 0 and forward_ad.unpack_dual(tensor).tangent is not None:
        given = "is a dual tensor"
    else:
        return
    reason = (
        f"{given}, and the result would have no derivative: differentiate through "
        "gpu_actors.interop.torch.attention, or give tensor.detach(), or call under torch.no_grad()"
    )
    raise InvalidRequest(field, describe(tensor), reason)


def _adopt_cupy(cupy: Any, array: Any, field: str, notes: CallerNotes | None) -> Adopted:
    dtype = _check_dtype(array.dtype, array, field)
    index = array.data.device_id
    stream = notes.cupy if notes else None
    if stream is None or stream.device_id not in (-1, index):
        stream = cupy.cuda.get_current_stream(index)
    if on_every_thread(stream.ptr) != stream.ptr:
        stream = cupy.cuda.Stream.null
    return Adopted(_cupy_view(cupy, array, dtype, stream, array), "cupy", f"cuda:{index}", array)


def _adopt_jax(jax: Any, array: Any, field: str) -> Adopted:
    if isinstance(array, jax.core.Tracer):
        raise InvalidRequest(field, describe(array), "must be a concrete array: call from outside jax.jit")
    if len(array.devices()) != 1:
        raise InvalidRequest(field, describe(array), f"must lie on one device, not {len(array.devices())}")
    if next(iter(array.devices())).platform == "cpu":
        host = np.asarray(array)
        _check_dtype(host.dtype, array, field)
        return Adopted(host, "jax", "cpu", array)
    return _adopt_dlpack(array, field, "jax")


def _adopt_dlpack(array: Any, field: str, kind: Kind) -> Adopted:
    place = array.__dlpack_device__()[0]
    if place not in (dlpack.CPU, dlpack.CUDA_HOST, dlpack.CUDA, dlpack.CUDA_MANAGED):
        reason = f"must lie on the host or a CUDA device (its DLDeviceType is {int(place)})"
        raise InvalidRequest(field, describe(array), reason)
    on_host = place in (dlpack.CPU, dlpack.CUDA_HOST)
    stream = None if on_host else _LEGACY_STREAM
    try:
        capsule = array.__dlpack__(stream=stream, max_version=(1, 1))
    except TypeError:  # producers older than DLPack 1.0
        capsule = array.__dlpack__(stream=stream)
    tensor = read_capsule(capsule)
    if on_host:
        return Adopted(host_view(tensor), kind, "cpu", array)
    index = tensor.device[1]
    # The array itself is kept, too, because some exporters' capsules hold no more than its buffer.
    owner = (capsule, array)
    view = DeviceArray(
        tensor.address, tensor.shape, tensor.strides, tensor.dtype, index, stream, owner, tensor.writeable
    )
    return Adopted(view, kind, f"cuda:{index}", array)


def check_placement(array: DeviceArray, field: str) -> None:
    """Check that address and strides are multiples of the element's size, as kernels and a GPU's loads require."""
    size = array.dtype.itemsize
    step = _odd_step(array.shape, array.strides, size)
    if (step is None and not array.address % size) or 0 in array.shape:
        return
    what = f"an address of {array.address:#x}" if array.address % size else f"a stride of {step} bytes"
    raise InvalidRequest(field, what, f"must be a multiple of the element's {size} bytes: copy the array")


@functools.lru_cache(maxsize=1024)
def _odd_step(shape: tuple[int, ...], strides: tuple[int, ...], size: int) -> int | None:
    """The first stride that is no multiple of the element's size, or None."""
    return next((step for extent, step in zip(shape, strides, strict=True) if extent > 1 and step % size), None)


def _check_dtype(dtype: Dtype | str, array: Any, field: str) -> Dtype:
    if isinstance(dtype, np.dtype):
        if dtype in _KNOWN:
            return dtype
        if not dtype.isnative:
            reason = f"must be in this machine's byte order: array.astype({dtype.newbyteorder('=').name!r})"
            raise InvalidRequest(field, describe(array), reason)
    raise InvalidRequest(field, describe(array), f"must have one of the dtypes {', '.join(_DTYPES)}")


# On the device
#
# torch and CuPy allocate the results that they will own, on the stream of the caller. Both reuse memory in the order of
# a stream, and only they can keep that order once the caller drops a result that its own kernels still read.


def _torch_view(torch: Any, tensor: Any, dtype: Dtype, stream: Any, source: Any) -> DeviceArray:
    return DeviceArray(
        address=tensor.data_ptr(),
        shape=tuple(tensor.shape),
        strides=tuple(step * dtype.itemsize for step in tensor.stride()),
        dtype=dtype,
        device=tensor.device.index,
        stream=on_every_thread(stream.cuda_stream),
        owner=(tensor, stream),
        source=source,
        make=functools.partial(_make_torch, torch, stream),
    )


def _make_torch(torch: Any, stream: Any, shape: tuple[int, ...], dtype: str) -> DeviceArray:
    try:
        with torch.cuda.stream(stream):
            made = torch.empty(shape, dtype=getattr(torch, dtype), device=stream.device)
    except torch.cuda.OutOfMemoryError as error:
        raise OutOfDeviceMemory(f"torch has no room for {dtype} of shape {shape}: {error}") from error
    return _torch_view(torch, made, _DTYPES[dtype], stream, made)


def _cupy_view(cupy: Any, array: Any, dtype: Dtype, stream: Any, source: Any) -> DeviceArray:
    index = array.data.device_id
    return DeviceArray(
        address=array.data.ptr,
        shape=array.shape,
        strides=array.strides,
        dtype=dtype,
        device=index,
        stream=stream.ptr,
        owner=(array, stream),
        source=source,
        make=functools.partial(_make_cupy, cupy, index, stream),
    )


def _make_cupy(cupy: Any, device: int, stream: Any, shape: tuple[int, ...], dtype: str) -> DeviceArray:
    bits = "uint8" if dtype.startswith("float8") else _DTYPES[dtype]
    try:
        with cupy.cuda.Device(device), stream:
            made = cupy.empty(shape, bits)
    except cupy.cuda.memory.OutOfMemoryError as error:
        raise OutOfDeviceMemory(f"CuPy has no room for {dtype} of shape {shape}: {error}") from error
    return _cupy_view(cupy, made, _DTYPES[dtype], stream, made)


# Giving back


def _torch_from_host(torch: Any, result: Host) -> Any:
    name = result.dtype.name
    if name in _ML_DTYPES:
        bits = np.uint8 if result.dtype.itemsize == 1 else np.int16
        return torch.from_numpy(result.view(bits)).view(getattr(torch, name))
    return torch.from_numpy(result)


def _restore_device(result: DeviceArray, template: Adopted) -> Any:
    if result.source is not None:
        return result.source
    name = name_of(result.dtype)
    if template.kind == "torch":
        torch = sys.modules["torch"]
        bits = result.view(np.dtype(f"i{result.itemsize}")) if name in _ML_DTYPES else result
        return torch.from_dlpack(_as_cupy(bits)).view(getattr(torch, name))
    array = _as_cupy(result.view(np.dtype("u1")) if name.startswith("float8") else result)
    if template.kind == "jax":
        return sys.modules["jax"].dlpack.from_dlpack(array)
    return _by_namespace(array, template) if template.kind == "dlpack" else array


def _as_cupy(array: DeviceArray) -> Any:
    """Return a CuPy array over the same memory. It keeps the memory alive."""
    import cupy

    reach = sum((n - 1) * abs(step) for n, step in zip(array.shape, array.strides, strict=True))
    nbytes = reach + array.itemsize if array.size else 0
    memory = cupy.cuda.UnownedMemory(array.address, nbytes, array, array.device)
    pointer = cupy.cuda.MemoryPointer(memory, 0)
    return cupy.ndarray(array.shape, array.dtype, pointer, array.strides)


def _by_namespace(result: Any, template: Adopted) -> Any:
    namespace = getattr(template.source, "__array_namespace__", None)
    return namespace().from_dlpack(result) if namespace is not None else result
