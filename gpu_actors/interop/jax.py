"""attention: the service as a function of JAX arrays, under jit, grad and vmap.

A request forward and one backward are host callbacks of XLA (`jax.pure_callback`) behind a `jax.custom_vjp`. Arrays on
the host are handed over without a copy; those on a GPU come to the host and go back. Needs jax (the extra "jax").
"""

from __future__ import annotations

import asyncio
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

from gpu_actors.context import GpuContext, open_contexts
from gpu_actors.errors import ActorStopped, InvalidRequest, Unsupported, WouldBlock
from gpu_actors.requests import FlashForward
from gpu_actors.validation.fields import expect, flag
from gpu_actors.validation.forward import check_seed, forward_problem

__all__ = ["attention", "typed_errors"]

_RANKS = {"q": 4, "k": 4, "v": 4, "bias": 4, "sinks": 1, "seed": 1, "out": 4, "lse": 3, "dout": 4}
_GRADIENTS = ("q", "k", "v", "bias", "sinks")
_Arrays = dict[str, Any]
_ELSEWHERE = re.compile(r"q|k|v|bias|out|return_lse|dropout_(?!p$).*|cu_.*|max_.*|.*_descale|.*_positions|block_mask")
_OPTIONS = {field.name for field in dataclasses.fields(FlashForward) if not _ELSEWHERE.fullmatch(field.name)}


class _Call(NamedTuple):
    """What of a call is no array. options: of `gpu_actors.FlashForward`, as pairs. context: its number."""

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
    or float64 where JAX has it. bias: (batch or 1, heads or 1, rows, keys). options: the masks, scales, sinks and
    slopes of `gpu_actors.FlashForward`, with its names, shapes and dtypes; packed rows, places and fp8 are not taken.
    dropout_seed: an int, or under jit an integer or key of JAX. deterministic: the gradients, too, are the same bits
    every time.

    Works under ``jit``, ``vmap`` and, once, ``grad`` by q, k, v, bias and sinks. The LSE (batch, heads_q, seqlen_q),
    float32, and slopes have no gradient. ``vmap`` makes one request of a larger batch; with sinks or dropout one for
    each element, all at once. An element drops what it drops alone with its seed.

    Shapes, dtypes and options are checked when the call is traced: `InvalidRequest`, `Unsupported`. What the service
    raises while the program runs comes as an error of XLA, from which `typed_errors` recovers it. On the thread of a
    running event loop the program fails with `WouldBlock`.
    """
    if not isinstance(context, GpuContext):
        raise InvalidRequest("context", type(context).__name__, "must be a GpuContext, as open_context gives it")
    flag("deterministic", deterministic)
    flag("return_lse", return_lse)
    if unknown := options.keys() - _OPTIONS:
        raise TypeError(
            f"attention() takes no {', '.join(sorted(unknown))}; its options are {', '.join(sorted(_OPTIONS))}"
        )
    given = {"q": q, "k": k, "v": v, "bias": bias}
    given |= {name: value for name, value in options.items() if getattr(value, "ndim", 0)}
    operands = {name: jax.numpy.asarray(array) for name, array in given.items() if array is not None}
    options = {name: value for name, value in options.items() if name not in operands}
    if isinstance(options.get("window_size"), list):
        options["window_size"] = tuple(options["window_size"])
    _check(operands, options)
    fixed = [name for name in operands if name not in _RANKS]
    rank = max((operands[name].ndim for name in fixed), default=0)
    call = _Call(context.number, tuple(options.items()), deterministic, rank)
    for name in fixed:
        operands[name] = _without_gradient(name, operands[name])
    if options.get("dropout_p"):
        operands["seed"] = _words(dropout_seed)
    out, lse = _attend(call, operands)
    return (out, _without_gradient("lse", lse)) if return_lse else out


@contextmanager
def typed_errors() -> Iterator[None]:
    """Raises errors of the service, which XLA turns into errors of its own, as what they are.

    Wait for the program's results inside (``jax.block_until_ready``), because errors come with them. Other errors pass.
    The last 64 errors of the process are kept for it.
    """
    try:
        yield
    except (jax.errors.JaxRuntimeError, ValueError) as error:  # a ValueError where they come with a result
        found = re.search(r"gpu_actors error (\d+)\b", str(error))
        with _errors_lock:
            original = None if found is None else _errors.get(int(found[1]))
        if original is None:
            raise
        raise original.with_traceback(None) from error


def _check(operands: _Arrays, options: dict[str, Any]) -> None:
    """The service's own checks, of arrays that have no data yet."""
    blank: dict[str, Any] = {name: np.empty(array.shape, array.dtype) for name, array in operands.items()}
    for name in ("q", "k", "v"):
        expect(blank[name].ndim == 4, name, blank[name].shape, "must be (batch, rows, heads, head_dim)")
    forward_problem(FlashForward(**blank, **options))


def _words(seed: Any) -> Any:
    """A seed as two words of 32 bits: JAX has 64 only where it is told to."""
    if isinstance(seed, int):
        check_seed(seed)
        return np.array([seed & 0xFFFFFFFF, seed >> 32], np.uint32)
    seed = jax.numpy.asarray(seed)
    expect(seed.ndim == 0, "dropout_seed", seed.shape, "must be a scalar: an integer, or a key of JAX")
    if jax.dtypes.issubdtype(seed.dtype, jax.dtypes.prng_key):
        return jax.random.bits(seed, (2,), "uint32")
    if not jax.dtypes.issubdtype(seed.dtype, np.integer):
        raise InvalidRequest("dropout_seed", str(seed.dtype), "must be an integer, or a key of JAX")
    return jax.numpy.stack([seed.astype("uint32"), jax.numpy.zeros((), "uint32")])


# Derivatives


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(call: _Call, operands: _Arrays) -> tuple[Any, Any]:
    q, v = operands["q"], operands["v"]
    out = jax.ShapeDtypeStruct((*q.shape[:3], v.shape[3]), q.dtype)
    lse = jax.ShapeDtypeStruct((q.shape[0], q.shape[2], q.shape[1]), np.float32)
    found: tuple[Any, Any] = _callback(call, operands, (out, lse))
    return found


def _keep(call: _Call, operands: _Arrays) -> tuple[Any, Any]:
    out, lse = _attend(call, operands)
    return (out, lse), (operands, out, lse)


def _differentiate(call: _Call, kept: tuple[_Arrays, Any, Any], gradients: tuple[Any, Any]) -> tuple[_Arrays]:
    operands, out, lse = kept
    names = [name for name in _GRADIENTS if name in operands]
    shapes = tuple(jax.ShapeDtypeStruct(operands[name].shape, operands[name].dtype) for name in names)
    found = _callback(call, {**operands, "out": out, "lse": lse, "dout": gradients[0]}, shapes)
    made = dict(zip(names, found, strict=True))
    for name in operands.keys() - _RANKS.keys():
        made[name] = jax.numpy.zeros_like(operands[name])  # _without_gradient refuses who asks for it
    if "seed" in operands:
        made["seed"] = np.zeros((2,), jax.dtypes.float0)
    return (made,)


_attend.defvjp(_keep, _differentiate)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _without_gradient(name: str, array: Any) -> Any:
    return array


def _refuse(name: str, kept: None, gradient: Any) -> Any:
    raise Unsupported(name, "differentiated", "has no gradient", "jax.lax.stop_gradient")


_without_gradient.defvjp(lambda name, array: (array, None), _refuse)


# Callbacks


def _callback(call: _Call, operands: _Arrays, results: tuple[Any, ...]) -> Any:
    names = tuple(operands)
    return jax.pure_callback(_answering(call, names), results, *operands.values(), vmap_method="expand_dims")


@functools.lru_cache(maxsize=256)
def _answering(call: _Call, names: tuple[str, ...]) -> Callable[..., tuple[np.ndarray, ...]]:
    """JAX compiles a program anew for another function, so equal calls get the same."""

    def answer(*arrays: Any) -> tuple[np.ndarray, ...]:
        try:
            return _answer(call, dict(zip(names, map(np.asarray, arrays), strict=True)))
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
    """An error whose text, all that XLA keeps of it, says which one it was."""
    number = next(_error_numbers)
    with _errors_lock:
        _errors[number] = error
        while len(_errors) > 64:
            _errors.popitem(last=False)
    return RuntimeError(f"gpu_actors error {number}: {type(error).__name__}: {error}")


def _answer(call: _Call, operands: dict[str, np.ndarray]) -> tuple[np.ndarray, ...]:
    """The results for operands with the axes of `vmap` before their own, of extent 1 where they are not mapped."""
    if asyncio._get_running_loop() is not None:
        raise WouldBlock(
            "attention() waits for its result, which would block the running event loop; "
            "run the program in a worker thread, as with asyncio.to_thread"
        )
    context = open_contexts().get(call.context)
    if context is None:
        raise ActorStopped(f"context {call.context}, which this program was traced for, is not open in this process")
    mapped = operands["q"].ndim - 4
    if not mapped:
        return _submit(context, call, operands)()
    lead = np.broadcast_shapes(*(array.shape[:mapped] for array in operands.values()))
    if "seed" in operands or "sinks" in operands:
        # Draws are counted by the place in the batch, and the gradient of sinks is summed over it.
        return _one_by_one(context, call, operands, lead)
    return _folded(context, call, operands, lead)


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
    context: GpuContext, call: _Call, operands: dict[str, np.ndarray], lead: tuple[int, ...]
) -> tuple[np.ndarray, ...]:
    """One request, whose batch is the mapped axes and the batch."""
    batch = operands["q"].shape[len(lead)]
    count = math.prod(lead)
    backward = "dout" in operands

    def fold(name: str, array: np.ndarray) -> np.ndarray:
        own = array.shape[len(lead) :]
        alike = count == 1 or all(extent == 1 for extent in array.shape[: len(lead)])
        if name not in _RANKS:  # slopes, (heads,) or (batch, heads)
            if alike and call.slopes_rank == 1:
                return array.reshape(own)
            array = array if call.slopes_rank == 2 else array[..., None, :]
        if name == "bias" and alike and own[0] == 1 and not backward:
            return array.reshape(own)
        rest = array.shape[len(lead) + 1 :]
        return np.broadcast_to(array, (*lead, batch, *rest)).reshape(count * batch, *rest)

    found = _submit(context, call, {name: fold(name, array) for name, array in operands.items()})()
    made = [array.reshape(*lead, batch, *array.shape[1:]) for array in found]
    if backward and "bias" in operands and operands["bias"].shape[len(lead)] == 1:
        wide = np.promote_types(made[3].dtype, np.float32)
        made[3] = made[3].astype(wide).sum(len(lead), keepdims=True).astype(made[3].dtype)
    return tuple(made)


def _submit(context: GpuContext, call: _Call, operands: Mapping[str, Any]) -> Callable[[], tuple[np.ndarray, ...]]:
    """Send the request, forward or backward; gives what waits for it."""
    arrays = dict(operands)
    options = dict(call.options)
    if "seed" in arrays:
        low, high = arrays.pop("seed")
        options["dropout_seed"] = int(low) | int(high) << 32
    if "dout" not in arrays:
        reply = context.flash_attn.forward(**arrays, **options, return_lse=True)
        return lambda: (reply.result().out, reply.result().lse)
    gradients = context.flash_attn.backward(**arrays, **options, deterministic=call.deterministic)

    def wait() -> tuple[np.ndarray, ...]:
        found = gradients.result()
        return tuple(getattr(found, f"d{name}") for name in _GRADIENTS if name in arrays)

    return wait
