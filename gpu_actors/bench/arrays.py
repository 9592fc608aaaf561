"""Arrays for measurements, random or poisoned, on the host or on a GPU, and the requests of a case with them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Protocol, TypeAlias

import ml_dtypes
import numpy as np

from gpu_actors.arrays.adopt import AnyArray, Reinterpreted, adopt
from gpu_actors.bench.cases import Case
from gpu_actors.handles.gpu_context import GpuContext
from gpu_actors.runtime.reply import Reply

__all__ = ["Arrays", "CupyArrays", "HostArrays", "OperandSet", "adopted", "has_special", "make_operands", "submit"]

_POOL = 16_777_213
"""The size of the pool of random numbers: a prime near 2^24, so that rows that wrap around its end do not repeat."""
_POISON = 0xFF
"""A byte that fills a NaN of every floating-point format used here."""
_WITHOUT_NAME = ("float8_e4m3fn", "float8_e5m2")  # dtypes that CuPy lacks


class Arrays(Protocol):
    """Makes arrays. Dtypes are given by their NumPy or ml_dtypes names."""

    def random(self, shape: tuple[int, ...], dtype: str) -> Any:
        """An array of normally distributed numbers, different in every call."""

    def poisoned(self, shape: tuple[int, ...], dtype: str) -> Any:
        """An array full of NaN."""

    def integers(self, values: Any) -> Any:
        """An int32 array."""

    def host(self, array: Any) -> np.ndarray[Any, Any]:
        """A copy on the host. The work on the array must have finished."""

    def ready(self) -> None:
        """Wait until every array made so far has its values, for work on streams that do not wait for them."""

    def trim(self) -> None:
        """Free memory that no array uses."""


class HostArrays:
    def __init__(self, seed: int = 0) -> None:
        self._rng = np.random.default_rng(seed)

    def random(self, shape: tuple[int, ...], dtype: str) -> Any:
        return self._rng.standard_normal(shape, np.float32).astype(getattr(ml_dtypes, dtype, dtype))

    def poisoned(self, shape: tuple[int, ...], dtype: str) -> Any:
        kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
        return np.full(math.prod(shape) * kind.itemsize, _POISON, np.uint8).view(kind).reshape(shape)

    def integers(self, values: Any) -> Any:
        return np.asarray(values, np.int32)

    def host(self, array: Any) -> np.ndarray[Any, Any]:
        return np.array(array)

    def ready(self) -> None:
        return

    def trim(self) -> None:
        return


class CupyArrays:
    """Arrays in the memory of the current CUDA device, made only by copies: no generator or conversion runs there."""

    def __init__(self, seed: int = 0) -> None:
        import cupy

        self._cupy = cupy
        self._rng = np.random.default_rng(seed)
        self._numbers = self._rng.standard_normal(_POOL, np.float32)
        self._pools: dict[str, Any] = {}

    def random(self, shape: tuple[int, ...], dtype: str) -> Any:
        pool = self._pool(dtype)
        size = math.prod(shape)
        flat = self._cupy.empty(size, pool.dtype)
        start, filled = int(self._rng.integers(_POOL)), 0
        while filled < size:
            count = min(size - filled, _POOL - start)
            flat[filled : filled + count].data.copy_from_device(pool[start:].data, count * pool.itemsize)
            filled, start = filled + count, 0
        return self._named(flat.reshape(shape), dtype)

    def poisoned(self, shape: tuple[int, ...], dtype: str) -> Any:
        array = self._cupy.empty(shape, self._carrier(dtype))
        array.data.memset(_POISON, array.nbytes)
        return self._named(array, dtype)

    def integers(self, values: Any) -> Any:
        return self._cupy.asarray(np.asarray(values, np.int32))

    def host(self, array: Any) -> np.ndarray[Any, Any]:
        if isinstance(array, Reinterpreted):
            return self._cupy.asnumpy(array.array).view(getattr(ml_dtypes, array.dtype))  # type: ignore[no-any-return]
        return self._cupy.asnumpy(array)  # type: ignore[no-any-return]

    def ready(self) -> None:
        self._cupy.cuda.runtime.deviceSynchronize()

    def trim(self) -> None:
        self._cupy.get_default_memory_pool().free_all_blocks()

    def _pool(self, dtype: str) -> Any:
        if dtype not in self._pools:
            numbers = self._numbers.astype(getattr(ml_dtypes, dtype, dtype))
            self._pools[dtype] = self._cupy.asarray(numbers.view(f"u{numbers.itemsize}")).view(self._carrier(dtype))
        return self._pools[dtype]

    def _carrier(self, dtype: str) -> np.dtype[Any]:
        return np.dtype(np.uint8 if dtype in _WITHOUT_NAME else getattr(ml_dtypes, dtype, dtype))

    def _named(self, array: Any, dtype: str) -> Any:
        return Reinterpreted(array, dtype) if dtype in _WITHOUT_NAME else array


def has_special(array: np.ndarray[Any, Any]) -> bool:
    """Whether an array has a NaN or an infinity. For 16-bit floats it tests bits, which is many times faster."""
    masks = {"bfloat16": 0x7F80, "float16": 0x7C00}
    mask = masks.get(array.dtype.name)
    if mask is None:
        return not bool(np.isfinite(array).all())
    return bool(((array.view(np.uint16) & mask) == mask).any())


def adopted(array: Any) -> AnyArray:
    """The array as an operand of a launch."""
    return adopt(array, "array").array


OperandSet: TypeAlias = dict[str, Any]
"""The operands by name: q, k, v, and for a backward dout, out and lse. For a decode q, k_cache, v_cache, block_table,
cache_seqlens and, on the host, pages."""

_POISON_PAGE = 2_147_480_000


def make_operands(case: Case, arrays: Arrays, context: GpuContext, seed: int) -> OperandSet:
    """Random operands. A backward's out and lse come from a forward in the context. Raises the forward's errors."""
    if case.kind == "decode":
        return _paged(case, arrays, seed)
    shapes = {"q": case.q_shape, "k": case.kv_shape, "v": case.kv_shape}
    operands: OperandSet = {name: arrays.random(shape, case.dtype) for name, shape in shapes.items()}
    if case.kind == "backward":
        operands["dout"] = arrays.random(case.q_shape, case.dtype)
        inputs = (operands["q"], operands["k"], operands["v"])
        answer = context.flash_attn.forward(*inputs, **case.options(), return_lse=True).result()
        operands |= {"out": answer.out, "lse": answer.lse}
    return operands


def submit(case: Case, context: GpuContext, operands: OperandSet) -> Reply[Any]:
    return _SUBMIT[case.kind](case, context, operands)


def _forward(case: Case, context: GpuContext, one: OperandSet) -> Reply[Any]:
    return context.flash_attn.forward(one["q"], one["k"], one["v"], **case.options())


def _backward(case: Case, context: GpuContext, one: OperandSet) -> Reply[Any]:
    from gpu_actors.attention.requests import FlashBackward

    names = ("q", "k", "v", "dout", "out", "lse")
    operands = {name: one[name] for name in names}
    return context.flash_attn.submit(FlashBackward(**operands, **case.options(), deterministic=case.deterministic))


def _decode(case: Case, context: GpuContext, one: OperandSet) -> Reply[Any]:
    from gpu_actors.attention.requests import PagedForward

    names = ("q", "k_cache", "v_cache", "block_table", "cache_seqlens")
    return context.flash_attn.submit(PagedForward(**{name: one[name] for name in names}))


_SUBMIT: dict[str, Callable[[Case, GpuContext, OperandSet], Reply[Any]]] = {
    "forward": _forward,
    "backward": _backward,
    "decode": _decode,
}


def _paged(case: Case, arrays: Arrays, seed: int) -> OperandSet:
    """The operands of a decode: a pool of the exact size, with each sequence's pages scattered over it."""
    rng = np.random.default_rng(seed)
    pages = rng.permutation(case.batch * case.pages).astype(np.int32).reshape(case.batch, case.pages)
    unused = np.full((case.batch, 1), _POISON_PAGE, np.int32)
    pool = (case.batch * case.pages, case.page_size, case.kv_heads, case.head_dim)
    return {
        "q": arrays.random(case.q_shape, case.dtype),
        "k_cache": arrays.random(pool, case.dtype),
        "v_cache": arrays.random(pool, case.dtype),
        "block_table": arrays.integers(np.concatenate([pages, unused], axis=1)),
        "cache_seqlens": arrays.integers(np.full(case.batch, case.keys)),
        "pages": pages,
    }
