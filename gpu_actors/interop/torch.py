"""attention: the service as a differentiable function of torch tensors, and torch's own function and modules over it.

Tensors are passed without a copy: by their addresses on a GPU, as NumPy views on the host. Needs torch, which nothing
else of this package imports.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch.nn.attention.bias import CausalBias, CausalVariant
from torch.overrides import TorchFunctionMode

from gpu_actors.errors import InvalidRequest
from gpu_actors.fields import expect, flag, real
from gpu_actors.handles.gpu_context import GpuContext
from gpu_actors.interop.contexts import check_context
from gpu_actors.interop.flex import flex_attention
from gpu_actors.interop.torch_attention import Attention, attention, bias_of, seed_for

__all__ = ["Attention", "attention", "flex_attention", "routed", "scaled_dot_product_attention"]

# torch's own function for attention


def scaled_dot_product_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    context: GpuContext,
    dropout_seed: int | torch.Tensor | None = None,
) -> torch.Tensor:
    """``torch.nn.functional.scaled_dot_product_attention`` through a running context, with its arguments and shapes.

    query: (..., heads, L, E); key: (..., heads, S, E); value: (..., heads, S, Ev). Leading axes broadcast, and may be
    absent, heads included. Axes may have length 0, except those of heads and the last ones. With ``enable_gqa`` key and
    value may have fewer heads, a divisor of the query's.
    attn_mask: broadcasts to (..., heads, L, S). Bool: True for keys that are seen. The query's dtype or float32: added
    to the scores, and may require a gradient. May also be a `torch.nn.attention.bias.CausalBias`.
    is_causal: aligned to the first row and key, for any L and S. scale: None takes 1 / sqrt(E).
    dropout_p: applied as torch does, whether or not a module trains. dropout_seed: None draws one from torch's default
    generator, in compiled graphs too, so ``torch.manual_seed`` decides it; the dropped places are not those of torch's
    own function.

    Returns (..., heads, L, Ev). A row that sees no key is 0. It is differentiable, blocks and raises as `attention`
    does. It also raises `InvalidRequest` for shapes that do not broadcast and for a mask beside ``is_causal``.
    """
    flag("is_causal", is_causal)
    flag("enable_gqa", enable_gqa)
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if not isinstance(tensor, torch.Tensor) or tensor.dim() < 2:
            raise InvalidRequest(name, _described(tensor), "must be a tensor of at least two axes")
    causal, alignment = is_causal, "top_left"
    if attn_mask is not None:
        expect(not is_causal, "is_causal", is_causal, "must be False where attn_mask is given")
        if isinstance(attn_mask, CausalBias):
            causal = True
            alignment = "bottom_right" if attn_mask.variant == CausalVariant.LOWER_RIGHT else "top_left"
            attn_mask = None
    q, k, v, lead = _four_axes(query, key, value, enable_gqa)
    bias = None if attn_mask is None else bias_of(attn_mask, q, k, lead)
    dropout_p = real("dropout_p", dropout_p)
    out = attention(
        *(operand.transpose(1, 2) for operand in (q, k, v)),
        context=context,
        causal=causal,
        alignment=alignment,
        softmax_scale=scale,
        bias=bias,
        dropout_p=dropout_p,
        dropout_seed=seed_for(dropout_p) if dropout_seed is None else dropout_seed,
    )
    answer: torch.Tensor = out.transpose(1, 2).reshape(*lead, q.shape[2], v.shape[3])
    return answer


def _four_axes(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, enable_gqa: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, tuple[int, ...]]:
    """The operands as (batch, heads, rows, dim), and the result's axes before its rows."""
    tensors = (query, key, value)
    for name, tensor in zip(("query", "key", "value"), tensors, strict=True):
        sound = tensor.shape[-1] > 0 and (tensor.dim() < 3 or tensor.shape[-3] > 0)
        expect(sound, name, tuple(tensor.shape), "must have heads, and a last axis of at least 1")
    heads = [tensor.shape[-3] if tensor.dim() > 2 else 1 for tensor in tensors]
    batches = [tuple(tensor.shape[:-3]) for tensor in tensors]
    try:
        batch = torch.broadcast_shapes(*batches)
        shared = (heads[0],) if enable_gqa else torch.broadcast_shapes(*((count,) for count in heads))
    except RuntimeError:
        shown = " and ".join(str(tuple(tensor.shape)) for tensor in tensors)
        raise InvalidRequest("key", shown, "must broadcast to the query, but for rows and head_dim") from None
    counts = (heads[0], heads[1], heads[1]) if enable_gqa else (shared[0],) * 3
    if enable_gqa:
        sound = heads[1] == heads[2] and heads[0] % max(heads[1], 1) == 0
        expect(sound, "enable_gqa", tuple(heads), "wants key and value of equal heads that divide the query's")
    made = []
    for tensor, count in zip(tensors, counts, strict=True):
        spread = tensor if tensor.dim() > 2 else tensor.unsqueeze(0)
        made.append(spread.expand(*batch, count, *spread.shape[-2:]).reshape(batch.numel(), count, *spread.shape[-2:]))
    lead = (*batch, shared[0]) if max(tensor.dim() for tensor in tensors) > 2 else ()
    return made[0], made[1], made[2], lead


def _described(value: object) -> str:
    return str(tuple(value.shape)) if isinstance(value, torch.Tensor) else type(value).__name__


# Modules that call torch's function

_torch_sdpa = torch.nn.functional.scaled_dot_product_attention
_route: ContextVar[GpuContext | None] = ContextVar("gpu_actors_route", default=None)
_routes_lock = threading.RLock()
os.register_at_fork(
    before=_routes_lock.acquire, after_in_parent=_routes_lock.release, after_in_child=_routes_lock.release
)
_routes = 0


class _Calls(TorchFunctionMode):  # type: ignore[misc]
    """Takes calls of torch's function under any name, such as calls in a module that imported it."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        context = _route.get()
        if func is _torch_sdpa and context is not None:
            return scaled_dot_product_attention(*args, **(kwargs or {}), context=context)
        return func(*args, **(kwargs or {}))


def _dispatch(*args: Any, **kwargs: Any) -> Any:
    """Replaces torch's function in ``torch.nn.functional`` while there are routes, for callers that look it up."""
    context = _route.get()
    if context is None:
        return _torch_sdpa(*args, **kwargs)
    return scaled_dot_product_attention(*args, **kwargs, context=context)


@contextmanager
def routed(context: GpuContext, module: torch.nn.Module | None = None) -> Iterator[None]:
    """While entered, calls of ``torch.nn.functional.scaled_dot_product_attention`` go through a context.

    Without a module these are the calls of this thread. With a module they are the calls in its ``forward``, in any
    thread. `torch.nn.MultiheadAttention` calls the function if it is asked for no weights (``need_weights=False``), and
    so do Transformers' models with ``attn_implementation="sdpa"``. A call that the service cannot answer raises;
    nothing falls back.

    Only eager calls are routed. For `torch.compile`, call `scaled_dot_product_attention` of this module. Raises
    `InvalidRequest` for an object that is no context or module.
    """
    check_context(context)
    if module is None:
        with _installed(), _calls_go_to(context):
            yield
        return
    if not isinstance(module, torch.nn.Module):
        raise InvalidRequest("module", type(module).__name__, "must be a torch.nn.Module, or None")
    own = module.__dict__.get("forward")
    former = module.forward

    @functools.wraps(former)
    def forward(*args: Any, **kwargs: Any) -> Any:
        with _calls_go_to(context):
            return former(*args, **kwargs)

    module.forward = forward
    try:
        with _installed():
            yield
    finally:
        if own is None:
            del module.forward
        else:
            module.forward = own


@contextmanager
def _calls_go_to(context: GpuContext) -> Iterator[None]:
    token = _route.set(context)
    try:
        with _Calls():
            yield
    finally:
        _route.reset(token)


@contextmanager
def _installed() -> Iterator[None]:
    global _routes
    with _routes_lock:
        _routes += 1
        torch.nn.functional.scaled_dot_product_attention = _dispatch
    try:
        yield
    finally:
        with _routes_lock:
            _routes -= 1
            if not _routes:
                torch.nn.functional.scaled_dot_product_attention = _torch_sdpa
