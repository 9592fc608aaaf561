"""attention: the service as a function of JAX arrays, under jit, grad and vmap.

Forward and backward requests are made in host callbacks of XLA (`jax.pure_callback`) of a `jax.custom_vjp`. Arrays on
the host are passed without a copy. Arrays on a GPU are copied to the host and back. Needs jax (the extra "jax").
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import os
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import jax
import numpy as np

from gpu_actors.attention.requests import FlashBackward, FlashForward
from gpu_actors.errors import InvalidRequest, Unsupported
from gpu_actors.fields import FP8, expect, flag, optional_array
from gpu_actors.handles.gpu_context import GpuContext
from gpu_actors.interop.contexts import check_context, open_context_of
from gpu_actors.planning.forward import broadcast_batch
from gpu_actors.process import refuse_on_loop
from gpu_actors.validation.forward import check_seed, forward_problem
from gpu_actors.values import show

__all__ = ["attention", "typed_errors"]

_GRADIENTS = ("q", "k", "v", "bias", "sinks")
_Arrays = dict[str, Any]
_FIELDS = {field.name for field in dataclasses.fields(FlashForward)}
# The other fields are arguments of their own, or belong to packed sequences, positions and fp8.
_OPTIONS = {
    *("causal", "alignment", "window_size", "attention_chunk", "sink_tokens", "softmax_scale", "softcap"),
    *("alibi_slopes", "alibi_signed", "sinks", "dropout_p", "seqused_q", "seqused_k", "compute"),
    *("out_dtype", "lse_dtype"),
}
_LSE, _OUT = "lse_dtype", "out_dtype"  # options of forward alone


class _Call(NamedTuple):
    """The part of a call that is not arrays. options: pairs, of `gpu_actors.FlashForward`. context: its number."""

    context: int
    options: tuple[tuple[str, Any], ...]
    deterministic: bool
    slopes_rank: int


def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    context: GpuContext,
    bias: Any = None,
    dropout_seed: Any = 0,
    deterministic: bool = False,
    return_lse: bool = False,
    **options: Any,
) -> Any:
    """Attention of q to k and v through a running context: an array, or (array, LSE) with ``return_lse``.

    q: (batch, seqlen_q, heads_q, head_dim); k, v: (batch, seqlen_k, heads_kv, head_dim), of float16, bfloat16, float32,
    or float64 if JAX has it enabled; an array with a batch of 1 serves every sequence. bias: (batch or 1, heads or 1,
    rows or 1, keys). options: the masks, scales, sinks, slopes, lengths (seqused) and dtypes of
    `gpu_actors.FlashForward`, with its names, shapes and dtypes; packed rows, positions and fp8 are not taken.
    dropout_seed: an int, or under jit an integer or key of JAX. deterministic: whether the gradients, too, have the
    same bits every time.

    Works under ``jit`` and ``vmap``, and once under ``grad`` with respect to q, k, v, sinks and a bias that is not
    bool. The LSE (batch, heads_q, seqlen_q), of ``lse_dtype``, and slopes have no gradient. With
    ``out_dtype="float32"`` gradients are computed from the output rounded to q's dtype. ``vmap`` makes one request with
    a larger batch. With sinks or dropout, and for the gradients of an operand that sequences share, it makes one
    request for each element, all at once. An element drops the same places as alone with its seed.

    Shapes, dtypes and options are checked when the call is traced. The checks raise `InvalidRequest`, and `Unsupported`
    for fields of `gpu_actors.FlashForward` that are not taken. An error of the service while the program runs arrives
    as an error of XLA, from which `typed_errors` recovers it. On the thread of a running event loop the program fails
    with `WouldBlock`.
    """
    check_context(context)
    flag("deterministic", deterministic)
    flag("return_lse", return_lse)
    options = {name: value for name, value in options.items() if value is not None or name not in _FIELDS}
    if unknown := options.keys() - _OPTIONS:
        for name in sorted(unknown & _FIELDS):
            reason = "is not taken under JAX, whose programs have dense batches: ask ctx.flash_attn.forward"
            raise Unsupported(name, show(options[name]), reason)
        raise TypeError(
            f"attention() takes no {', '.join(sorted(unknown))}; its options are {', '.join(sorted(_OPTIONS))}"
        )
    given = {"q": q, "k": k, "v": v, "bias": bias}
    given |= {name: value for name, value in options.items() if getattr(value, "ndim", 0)}
    operands = {name: jax.numpy.asarray(array) for name, array in given.items() if array is not None}
    options = {name: value for name, value in options.items() if name not in operands}
    if isinstance(options.get("window_size"), list):
        options["window_size"] = tuple(options["window_size"])
    _check(operands, options, return_lse)
    lse_dtype = options.pop(_LSE, "float32")
    slopes_rank = 0
    if "alibi_slopes" in operands:
        operands["alibi_slopes"] = _without_gradient("alibi_slopes", operands["alibi_slopes"])
        slopes_rank = operands["alibi_slopes"].ndim
    call = _Call(context.number, tuple(options.items()), deterministic, slopes_rank)
    if options.get("dropout_p"):
        operands["seed"] = _words(dropout_seed)
    out, lse = _attend(call, operands)
    return (out, _without_gradient("lse", lse.astype(lse_dtype))) if return_lse else out


@contextmanager
def typed_errors() -> Iterator[None]:
    """Raise the service's own errors in place of the errors of XLA that report them.

    Wait for the program's results inside (``jax.block_until_ready``), because errors come with them. Other errors pass.
    The last 64 errors of the process are kept for this.
    """
    try:
        yield
    except (jax.errors.JaxRuntimeError, ValueError) as error:  # a ValueError if it comes with a result
        found = re.search(r"gpu_actors error (\d+)\b", str(error))
        with _errors_lock:
            original = None if found is None else _errors.get(int(found[1]))
        if original is None:
            raise
        raise original.with_traceback(None) from error


def _check(operands: _Arrays, options: dict[str, Any], return_lse: bool) -> None:
    """Apply the service's own checks to arrays that have no data yet."""
    for name in ("q", "k", "v"):
        expect(operands[name].ndim == 4, name, operands[name].shape, "must be (batch, rows, heads, head_dim)")
        if (dtype := operands[name].dtype.name) in FP8:
            raise Unsupported(name, dtype, "is not taken under JAX: ask ctx.flash_attn.forward", "bfloat16")
    problem = forward_problem(_posed(FlashForward, operands, {**options, "return_lse": return_lse}))
    if problem.wide_lse and problem.dtype != "float64":
        reason = f"scores of {problem.dtype} inputs are float32, and a wider LSE would hold no more of them"
        raise Unsupported(_LSE, problem.lse_dtype, reason, "float32")
    for name in ("seqused_q", "seqused_k"):
        optional_array(name, operands.get(name, options.get(name)), ((problem.batch,),), ("int32",))


def _posed(kind: type[FlashForward], operands: _Arrays, options: dict[str, Any]) -> FlashForward:
    """The request that a call will make, with arrays that have no data yet."""
    blank: dict[str, Any] = {name: np.empty(array.shape, array.dtype) for name, array in operands.items()}
    blank.pop("seed", None)
    return broadcast_batch(kind(**blank, **options))


def _words(seed: Any) -> Any:
    """A seed as two words of 32 bits, because JAX has 64-bit integers only if they are enabled."""
    if isinstance(seed, int | np.integer):
        check_seed(seed)
        return np.array([int(seed) & 0xFFFFFFFF, int(seed) >> 32], np.uint32)
    seed = jax.numpy.asarray(seed)
    expect(seed.ndim == 0, "dropout_seed", seed.shape, "must be a scalar: an integer, or a key of JAX")
    if jax.dtypes.issubdtype(seed.dtype, jax.dtypes.prng_key):
        return jax.random.bits(seed, (2,), "uint32")
    if not jax.dtypes.issubdtype(seed.dtype, np.integer):
        raise InvalidRequest("dropout_seed", str(seed.dtype), "must be an integer, or a key of JAX")
    if not isinstance(seed, jax.core.Tracer):
        return _words(int(seed))
    high = seed >> 32 if seed.dtype.itemsize == 8 else jax.numpy.zeros((), "uint32")
    return jax.numpy.stack([seed.astype("uint32"), high.astype("uint32")])


# Derivatives


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(call: _Call, operands: _Arrays) -> tuple[Any, Any]:
    """The output and the LSE. The LSE of float64 operands is float64, else their gradients would lose precision."""
    problem = forward_problem(_posed(FlashForward, operands, dict(call.options)))
    out = jax.ShapeDtypeStruct((*operands["q"].shape[1:-1], problem.head_dim_v), problem.out_dtype)
    out = out.update(shape=(problem.batch, *out.shape))
    lse = jax.ShapeDtypeStruct(problem.lse_shape, _lse_dtype(operands["q"]))
    found: tuple[Any, Any] = _callback(call, operands, (out, lse))
    return found


def _lse_dtype(q: Any) -> str:
    return "float64" if q.dtype == np.float64 else "float32"


def _keep(call: _Call, operands: _Arrays) -> tuple[Any, Any]:
    _posed(FlashBackward, operands, {})
    out, lse = _attend(call, operands)
    return (out, lse), (operands, out, lse)


def _differentiate(call: _Call, kept: tuple[_Arrays, Any, Any], gradients: tuple[Any, Any]) -> tuple[_Arrays]:
    operands, out, lse = kept
    of_out = {"out": out.astype(operands["q"].dtype), "dout": gradients[0].astype(operands["q"].dtype), "lse": lse}
    names = [name for name in _GRADIENTS if name in operands and _is_float(operands[name])]
    shapes = tuple(jax.ShapeDtypeStruct(operands[name].shape, operands[name].dtype) for name in names)
    made = dict(zip(names, _callback(call, {**operands, **of_out}, shapes), strict=True))
    for name in operands.keys() - made.keys():
        # Nothing reads the gradient of another float: _without_gradient refuses to compute it.
        dtype = operands[name].dtype if _is_float(operands[name]) else jax.dtypes.float0
        made[name] = np.zeros(operands[name].shape, dtype)
    return (made,)


def _is_float(array: Any) -> bool:
    return bool(jax.dtypes.issubdtype(array.dtype, np.floating))


_attend.defvjp(_keep, _differentiate)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _without_gradient(name: str, array: Any) -> Any:
    return array


def _refuse(name: str, kept: None, gradient: Any) -> Any:
    raise Unsupported(name, "differentiated", "has no gradient", "jax.lax.stop_gradient")


_without_gradient.defvjp(lambda name, array: (array, None), _refuse)


# Callbacks


def _callback(call: _Call, operands: _Arrays, results: tuple[Any, ...]) -> Any:
    answer = _answering(call, tuple(operands), results)
    return jax.pure_callback(answer, results, *operands.values(), vmap_method="expand_dims")


@functools.lru_cache(maxsize=256)
def _answering(call: _Call, names: tuple[str, ...], results: tuple[Any, ...]) -> Callable[..., tuple[np.ndarray, ...]]:
    """The callback of a call. Equal calls get the same function, because JAX compiles a program anew for another."""

    def answer(*arrays: Any) -> tuple[np.ndarray, ...]:
        try:
            return _answer(call, dict(zip(names, map(np.asarray, arrays), strict=True)), results)
        except Exception as error:
            raise _carried(error) from error

    return answer


_errors: OrderedDict[int, BaseException] = OrderedDict()
_errors_lock = threading.RLock()
os.register_at_fork(
    before=_errors_lock.acquire, after_in_parent=_errors_lock.release, after_in_child=_errors_lock.release
)
_error_numbers = itertools.count(1)


def _carried(error: BaseException) -> RuntimeError:
    """An error for XLA, which keeps only the text. The text has the number of the original error."""
    number = next(_error_numbers)
    with _errors_lock:
        _errors[number] = error
        while len(_errors) > 64:
            _errors.popitem(last=False)
    return RuntimeError(f"gpu_actors error {number}: {type(error).__name__}: {error}")


def _answer(call: _Call, operands: dict[str, np.ndarray], results: tuple[Any, ...]) -> tuple[np.ndarray, ...]:
    """The results for operands that begin with the axes of `vmap`. An axis that is not mapped has extent 1."""
    refuse_on_loop("attention()", "a worker thread for the program, as with asyncio.to_thread")
    context = open_context_of(call.context)
    mapped = operands["q"].ndim - 4
    if not mapped:
        return _submit(context, call, operands)()
    lead = np.broadcast_shapes(*(array.shape[:mapped] for array in operands.values()))
    if 0 in lead:
        return tuple(np.zeros(lead + result.shape, result.dtype) for result in results)
    batches = {operands[name].shape[mapped] for name in ("q", "k", "v")}
    if "seed" in operands or "sinks" in operands or ("dout" in operands and len(batches) > 1):
        # Dropout depends on the index in the batch; gradients of sinks and of a shared operand are sums over the batch.
        return _one_by_one(context, call, operands, lead)
    return _folded(context, call, operands, lead, max(batches))


def _one_by_one(
    context: GpuContext, call: _Call, operands: dict[str, np.ndarray], lead: tuple[int, ...]
) -> tuple[np.ndarray, ...]:
    spread = {name: np.broadcast_to(array, lead + array.shape[len(lead) :]) for name, array in operands.items()}
    waiting = [
        _submit(context, call, {name: array[place] for name, array in spread.items()}) for place in np.ndindex(*lead)
    ]
    results = [wait() for wait in waiting]
    return tuple(np.stack(column).reshape(lead + column[0].shape) for column in zip(*results, strict=True))


def _folded(
    context: GpuContext, call: _Call, operands: dict[str, np.ndarray], lead: tuple[int, ...], batch: int
) -> tuple[np.ndarray, ...]:
    """The results of one request whose batch combines the mapped axes and the batch."""
    summed = "dout" in operands and "bias" in operands and _is_float(operands["bias"])

    def fold(name: str, array: np.ndarray) -> np.ndarray:
        own = array.shape[len(lead) :]
        alike = all(extent == 1 for extent in array.shape[: len(lead)])
        if name == "alibi_slopes" and call.slopes_rank == 1:  # (heads,) and not (batch, heads)
            if alike:
                return array.reshape(own)
            array = array[..., None, :]
        if name == "bias" and alike and own[0] == 1 and not summed:
            return array.reshape(own)
        rest = array.shape[len(lead) + 1 :]
        return np.broadcast_to(array, (*lead, batch, *rest)).reshape(math.prod(lead) * batch, *rest)

    found = _submit(context, call, {name: fold(name, array) for name, array in operands.items()})()
    made = [array.reshape(*lead, batch, *array.shape[1:]) for array in found]
    if summed and operands["bias"].shape[len(lead)] == 1:
        wide = np.promote_types(made[3].dtype, np.float32)
        made[3] = made[3].astype(wide).sum(len(lead), keepdims=True).astype(made[3].dtype)
    return tuple(made)


def _submit(context: GpuContext, call: _Call, operands: Mapping[str, Any]) -> Callable[[], tuple[np.ndarray, ...]]:
    """Send the request, forward or backward. Returns a function that waits for its results."""
    arrays = dict(operands)
    options = dict(call.options)
    if "seed" in arrays:
        low, high = arrays.pop("seed")
        options["dropout_seed"] = int(low) | int(high) << 32
    if "dout" not in arrays:
        wide: dict[str, Any] = {_LSE: _lse_dtype(arrays["q"])}
        reply = context.flash_attn.forward(**arrays, **options, **wide, return_lse=True)
        return lambda: (reply.result().out, reply.result().lse)
    options.pop(_OUT, None)
    gradients = context.flash_attn.backward(**arrays, **options, deterministic=call.deterministic)

    def wait() -> tuple[np.ndarray, ...]:
        found = (getattr(gradients.result(), f"d{name}") for name in _GRADIENTS)
        return tuple(gradient for gradient in found if gradient is not None)

    return wait
