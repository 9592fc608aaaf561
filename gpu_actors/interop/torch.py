"""attention: the service as a differentiable function of torch tensors, and torch's own function and modules over it.

`attention` is a custom operator with a fake implementation and an autograd formula, so that torch.compile and
torch.export trace through it. Tensors are handed over without a copy: by their addresses on a GPU, as NumPy views on
the host. Needs torch, which nothing else of this package imports.
"""

from __future__ import annotations

import asyncio
import functools
import math
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.nn.attention.bias import CausalBias, CausalVariant
from torch.overrides import TorchFunctionMode

from gpu_actors.context import GpuContext, open_contexts
from gpu_actors.errors import ActorStopped, InvalidRequest, Unsupported, WouldBlock
from gpu_actors.interop.flex import flex_attention
from gpu_actors.validation.fields import expect, flag, integer, one_of, real, window
from gpu_actors.validation.forward import check_seed

__all__ = ["Attention", "attention", "flex_attention", "routed", "scaled_dot_product_attention"]

# An operator takes tensors, numbers and strings, so a context goes by its number.
_OPERANDS = {
    "q": "Tensor",
    "k": "Tensor",
    "v": "Tensor",
    "alibi_slopes": "Tensor?",
    "sinks": "Tensor?",
    "bias": "Tensor?",
    "cu_seqlens_q": "Tensor?",
    "cu_seqlens_k": "Tensor?",
    "seqused_q": "Tensor?",
    "seqused_k": "Tensor?",
    "q_positions": "Tensor?",
    "k_positions": "Tensor?",
}
_SCALARS = {
    "causal": "bool",
    "alignment": "str",
    "window_left": "SymInt",
    "window_right": "SymInt",
    "softmax_scale": "float?",
    "softcap": "float",
    "sink_tokens": "SymInt",
    "attention_chunk": "SymInt",
    "alibi_signed": "bool",
    "dropout_p": "float",
    "dropout_seed": "SymInt",
    "max_seqlen_q": "SymInt?",
    "max_seqlen_k": "SymInt?",
    "compute": "str?",
    "deterministic": "bool",
    "context": "int",
}
_ARGUMENTS = ", ".join(f"{kind} {name}" for name, kind in (_OPERANDS | _SCALARS).items())
_AUTOCAST = (torch.float32, torch.float16, torch.bfloat16)
_GRADIENTS = ("q", "k", "v", "bias", "sinks")


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    context: GpuContext,
    causal: bool = False,
    alignment: str = "bottom_right",
    window_size: tuple[int, int] = (-1, -1),
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    sink_tokens: int = 0,
    attention_chunk: int = 0,
    alibi_signed: bool = False,
    bias: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_seed: int = 0,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    seqused_q: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    q_positions: torch.Tensor | None = None,
    k_positions: torch.Tensor | None = None,
    compute: str | None = None,
    deterministic: bool = False,
    return_lse: bool = False,
) -> Any:
    """Attention of q to k and v through a running context: a tensor, or (tensor, LSE) with ``return_lse``.

    q: (batch, seqlen_q, heads_q, head_dim); k, v: (batch, seqlen_k, heads_kv, head_dim), or packed (total, heads,
    head_dim) with cu_seqlens, whose max_seqlen must be given where they lie on a GPU. Tensors of float16, bfloat16,
    float32, float64, or fp8 without gradients; on the host, or on the context's own GPU. The other arguments, and all
    shapes and dtypes, are those of `gpu_actors.FlashForward`. deterministic: the gradients, too, are the same bits
    every time.

    Under ``torch.autocast`` q, k, v and bias are cast as for torch's own attention, unless they are float64 or fp8.
    float32 sinks stay; ``compute`` is then about the dtype that q was cast to.

    Differentiable once, backwards, by q, k, v, bias and sinks; the LSE, float32, has no gradient. Dropout draws from
    dropout_seed alone: give another one each step, and torch's own generators stay untouched.

    Blocks the calling thread until the result is there. Safe from any thread but that of a running event loop, where
    it raises `WouldBlock`: run the model in a worker thread there. Raises the request's error (`InvalidRequest`,
    `Unsupported`, ...), from ``backward()`` too; `ActorStopped` where the context is closed.
    """
    if not torch.compiler.is_compiling():
        _check(context, causal, alignment, window_size, softmax_scale, softcap, sink_tokens, dropout_p, compute)
        check_seed(dropout_seed)
        integer("attention_chunk", attention_chunk, 0)
        flag("alibi_signed", alibi_signed)
        flag("deterministic", deterministic)
        flag("return_lse", return_lse)
        for name, longest in (("max_seqlen_q", max_seqlen_q), ("max_seqlen_k", max_seqlen_k)):
            if longest is not None:
                integer(name, longest, 1)
    else:
        _check_traced(causal, window_size, dropout_seed, alibi_signed, deterministic)
    _check_not_dual(q=q, k=k, v=v, bias=bias, sinks=sinks)
    if alibi_slopes is not None and alibi_slopes.requires_grad and torch.is_grad_enabled():
        raise Unsupported("alibi_slopes", "a tensor that requires grad", "ALiBi's slopes have no gradient", "detached")
    q, k, v, sinks, bias = _autocast(q, k, v, sinks, bias)
    out, lse = torch.ops.gpu_actors.attention(
        q,
        k,
        v,
        alibi_slopes,
        sinks,
        bias,
        cu_seqlens_q,
        cu_seqlens_k,
        seqused_q,
        seqused_k,
        q_positions,
        k_positions,
        causal,
        alignment,
        window_size[0],
        window_size[1],
        softmax_scale,
        softcap,
        sink_tokens,
        attention_chunk,
        alibi_signed,
        dropout_p,
        # Operators have signed integers.
        dropout_seed if dropout_seed < 1 << 63 else dropout_seed - (1 << 64),
        max_seqlen_q,
        max_seqlen_k,
        compute,
        deterministic,
        context.number,
    )
    return (out, lse) if return_lse else out


def _autocast(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None, bias: torch.Tensor | None
) -> tuple[Any, ...]:
    """The operands in the dtype of the autocast for their device, cast as torch casts those of its own attention."""
    kind = q.device.type if isinstance(q, torch.Tensor) else "cpu"
    if not torch.amp.is_autocast_available(kind) or not torch.is_autocast_enabled(kind):
        return q, k, v, sinks, bias
    dtype = torch.get_autocast_dtype(kind)

    def cast(operand: Any, kinds: tuple[torch.dtype, ...] = _AUTOCAST) -> Any:
        return operand.to(dtype) if isinstance(operand, torch.Tensor) and operand.dtype in kinds else operand

    # Sinks of float32 go with every dtype of q and keep their precision.
    return cast(q), cast(k), cast(v), cast(sinks, _AUTOCAST[1:]), cast(bias)


def _check(
    context: object,
    causal: object,
    alignment: object,
    window_size: object,
    softmax_scale: object,
    softcap: object,
    sink_tokens: object,
    dropout_p: object,
    compute: object,
) -> None:
    """What the operator's own signature would refuse without saying what is wanted; the service checks the rest."""
    if not isinstance(context, GpuContext):
        raise InvalidRequest("context", type(context).__name__, "must be a GpuContext, as open_context gives it")
    flag("causal", causal)
    one_of("alignment", alignment, ("bottom_right", "top_left"), 'must be "bottom_right" or "top_left"')
    window(window_size)
    if softmax_scale is not None:
        real("softmax_scale", softmax_scale)
    real("softcap", softcap)
    integer("sink_tokens", sink_tokens, 0)
    real("dropout_p", dropout_p)
    if compute is not None:
        one_of("compute", compute, ("f64", "f32", "tf32", "f16", "bf16", "fp8"), "must be the name of a precision")


def _check_traced(
    causal: object, window_size: object, dropout_seed: int, alibi_signed: object, deterministic: object
) -> None:
    """What a compiled call would lose before the service sees it; the rest is checked there. Numbers may be symbols."""
    flag("causal", causal)
    flag("alibi_signed", alibi_signed)
    flag("deterministic", deterministic)
    if not 0 <= dropout_seed < 1 << 64:
        check_seed(dropout_seed)
    sound = isinstance(window_size, tuple | list) and len(window_size) == 2
    expect(sound, "window_size", window_size, "must be (left, right), two ints, each >= 0 keys or -1 for unbounded")


def _check_not_dual(**tensors: object) -> None:
    """Operators without a forward-mode rule drop tangents, which would be derivatives of 0."""
    if torch.compiler.is_compiling() and forward_ad._current_level >= 0:
        # A compiler traces tensors without their tangents. Calls that it does not trace run eagerly and are checked.
        reason = "is not compiled where forward-mode derivatives are taken: it has none"
        raise Unsupported("attention", "in a dual level", reason, "differentiated backwards")
    for name, tensor in tensors.items():
        if isinstance(tensor, torch.Tensor) and forward_ad.unpack_dual(tensor).tangent is not None:
            reason = "attention has no forward-mode derivative: differentiate backwards, as with torch.autograd.grad"
            raise Unsupported(name, "a dual tensor", reason, "a tensor without a tangent")


def _forward(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    context, options = _request(arguments)
    del options["deterministic"]  # forward always is
    with torch.no_grad():  # the operator has a derivative of its own
        result = context.flash_attn.forward(**options, return_lse=True).result()
    return result.out, result.lse


def _fake_forward(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    q, v = arguments[0], arguments[2]
    fp8 = q.dtype in (torch.float8_e4m3fn, torch.float8_e5m2)
    *batch, rows, heads, _ = q.shape
    out = q.new_empty((*q.shape[:-1], v.shape[-1]), dtype=torch.bfloat16 if fp8 else q.dtype)
    return out, q.new_empty((*batch, heads, rows), dtype=torch.float32)


def _backward(dout: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, *arguments: Any) -> Any:
    context, options = _request(arguments)
    # Autograd makes gradients by expanding a single number; kernels read rows.
    dout = dout if dout.stride(-1) == 1 else dout.contiguous()
    with torch.no_grad():
        gradients = context.flash_attn.backward(dout=dout, out=out, lse=lse, **options).result()
    found = (getattr(gradients, f"d{name}") for name in _GRADIENTS)
    # Operators cannot return None.
    return tuple(dout.new_empty(0) if gradient is None else gradient for gradient in found)


def _fake_backward(dout: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, *arguments: Any) -> Any:
    inputs = dict(zip(_OPERANDS, arguments, strict=False))
    operands = (inputs[name] for name in _GRADIENTS)
    return tuple(dout.new_empty(0) if each is None else each.new_empty(each.shape) for each in operands)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    ctx.save_for_backward(*output, *inputs[: len(_OPERANDS)])
    ctx.scalars = inputs[len(_OPERANDS) :]
    ctx.mark_non_differentiable(output[1])


def _differentiate(ctx: Any, dout: torch.Tensor, dlse: torch.Tensor) -> tuple[Any, ...]:
    out, lse, *operands = ctx.saved_tensors
    gradients = torch.ops.gpu_actors.attention_backward(dout, out, lse, *operands, *ctx.scalars)
    by_name = dict(zip(_GRADIENTS, gradients, strict=True))
    given = dict(zip(_OPERANDS, operands, strict=True))
    of_operands = (None if given[name] is None else by_name.get(name) for name in _OPERANDS)
    return (*of_operands, *(None for _ in _SCALARS))


def _refuse_second(ctx: Any, *gradients: torch.Tensor) -> Any:
    raise Unsupported("create_graph", True, "attention is differentiable once: its gradients have none", False)


def _request(arguments: tuple[Any, ...]) -> tuple[GpuContext, dict[str, Any]]:
    """The context and the keyword arguments of `FlashAttnHandle.forward` and `.backward`.

    Raises WouldBlock on the thread of a running loop, before anything is submitted.
    """
    if asyncio._get_running_loop() is not None:
        raise WouldBlock(
            "attention() waits for its result, which would block the running event loop; "
            "call it in a worker thread, as with asyncio.to_thread, or await ctx.flash_attn.forward"
        )
    options = dict(zip(_OPERANDS | _SCALARS, arguments, strict=True))
    context = open_contexts().get(number := options.pop("context"))
    if context is None:
        raise ActorStopped(f"context {number}, which this call was made or traced for, is not open in this process")
    options["window_size"] = (options.pop("window_left"), options.pop("window_right"))
    options["dropout_seed"] %= 1 << 64
    return context, options


_RESULTS = "(Tensor, Tensor)"
_RESULTS_BACKWARD = "(Tensor, Tensor, Tensor, Tensor, Tensor)"
_operator = torch.library.custom_op(
    "gpu_actors::attention", _forward, mutates_args=(), schema=f"({_ARGUMENTS}) -> {_RESULTS}"
)
_operator.register_fake(_fake_forward)
_operator.register_autograd(_differentiate, setup_context=_keep)
_operator_backward = torch.library.custom_op(
    "gpu_actors::attention_backward",
    _backward,
    mutates_args=(),
    schema=f"(Tensor dout, Tensor out, Tensor lse, {_ARGUMENTS}) -> {_RESULTS_BACKWARD}",
)
_operator_backward.register_fake(_fake_backward)
_operator_backward.register_autograd(_refuse_second)


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
    dropout_seed: int | None = None,
) -> torch.Tensor:
    """``torch.nn.functional.scaled_dot_product_attention`` through a running context, with its arguments and shapes.

    query: (..., heads, L, E); key: (..., heads, S, E); value: (..., heads, S, Ev). Leading axes broadcast, and may be
    absent, heads included. With ``enable_gqa`` key and value may have fewer heads, a divisor of the query's.
    attn_mask: broadcast to (..., heads, L, S); bool, True for keys that are seen, or a number that is added to the
    score, of the query's dtype or float32, which may require a gradient. A `torch.nn.attention.bias.CausalBias` too.
    is_causal: aligned to the first row and key, whatever L and S. scale: None takes 1 / sqrt(E).
    dropout_p: applied as torch does, whether or not a module trains. dropout_seed: None draws one from torch's default
    generator, so ``torch.manual_seed`` decides it; the dropped places are not those of torch's own function.

    Returns (..., heads, L, Ev). A row that sees no key is 0. Differentiable, blocks and raises as `attention` does;
    `InvalidRequest` for shapes that do not broadcast and for a mask beside ``is_causal``.
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
    bias = None if attn_mask is None else _bias_of(attn_mask, q, k, lead)
    dropout_p = real("dropout_p", dropout_p)
    if dropout_seed is None:
        dropout_seed = int(torch.randint(0, 1 << 62, ()).item()) if dropout_p else 0
    out = attention(
        *(operand.transpose(1, 2) for operand in (q, k, v)),
        context=context,
        causal=causal,
        alignment=alignment,
        softmax_scale=scale,
        bias=bias,
        dropout_p=dropout_p,
        dropout_seed=dropout_seed,
    )
    answer: torch.Tensor = out.transpose(1, 2).reshape(*lead, q.shape[2], v.shape[3])
    return answer


def _four_axes(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, enable_gqa: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, tuple[int, ...]]:
    """The operands as (batch, heads, rows, dim), and the result's axes before its rows."""
    tensors = (query, key, value)
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
        made.append(spread.expand(*batch, count, *spread.shape[-2:]).reshape(-1, count, *spread.shape[-2:]))
    lead = (*batch, shared[0]) if max(tensor.dim() for tensor in tensors) > 2 else ()
    return made[0], made[1], made[2], lead


def _bias_of(mask: torch.Tensor, q: torch.Tensor, k: torch.Tensor, lead: tuple[int, ...]) -> torch.Tensor:
    """A mask of torch as a bias (batch or 1, heads or 1, rows, keys)."""
    rows, keys = q.shape[2], k.shape[2]
    if not isinstance(mask, torch.Tensor):
        raise InvalidRequest("attn_mask", _described(mask), "must be a tensor or None")
    full = (*lead, rows, keys) if lead else (1, rows, keys)
    try:
        fits = torch.broadcast_shapes(tuple(mask.shape), full) == torch.Size(full)
    except RuntimeError:
        fits = False
    if not fits:
        raise InvalidRequest("attn_mask", tuple(mask.shape), f"must broadcast to {full}")
    if mask.dtype == torch.bool:
        mask = torch.zeros(mask.shape, dtype=q.dtype, device=q.device).masked_fill(~mask, -math.inf)
    mask = mask[(None,) * (max(4, len(full)) - mask.dim())]
    if len(full) > 4:
        # Several leading axes become one, so a mask that differs along any of them is spread along all.
        one = all(count == 1 for count in mask.shape[:-3])
        heads = mask.shape[-3:]
        mask = mask.reshape(1, *heads) if one else mask.expand(*full[:-3], *heads).reshape(-1, *heads)
    # Kernels read rows of a bias as they lie, so what is broadcast along rows or keys is written out.
    return mask.expand(*mask.shape[:2], rows, keys).contiguous()


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
    """Takes calls of torch's function by whatever name, as of a module that imported it."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        context = _route.get()
        if func is _torch_sdpa and context is not None:
            return scaled_dot_product_attention(*args, **(kwargs or {}), context=context)
        return func(*args, **(kwargs or {}))


def _dispatch(*args: Any, **kwargs: Any) -> Any:
    """Stands for torch's function in ``torch.nn.functional`` while there are routes, for functions that look it up."""
    context = _route.get()
    if context is None:
        return _torch_sdpa(*args, **kwargs)
    return scaled_dot_product_attention(*args, **kwargs, context=context)


@contextmanager
def routed(context: GpuContext, module: torch.nn.Module | None = None) -> Iterator[None]:
    """While entered, calls of ``torch.nn.functional.scaled_dot_product_attention`` go through a context.

    Those of this thread; given a module, those in its ``forward`` alone, in any thread. `torch.nn.MultiheadAttention`
    calls it where it is asked for no weights (``need_weights=False``), and Transformers' models with
    ``attn_implementation="sdpa"``. What a call asks for and the service does not do raises: nothing falls back.

    For eager calls; `torch.compile` traces `scaled_dot_product_attention` of this module itself. Raises
    `InvalidRequest` for what is no context or module.
    """
    if not isinstance(context, GpuContext):
        raise InvalidRequest("context", type(context).__name__, "must be a GpuContext, as open_context gives it")
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


class Attention(torch.nn.Module):  # type: ignore[misc]
    """Self- or cross-attention with its projections, through a context.

    dim: of the input and output. heads: query heads, which divide dim. kv_heads: of keys and values, a divisor of
    heads. bias: of the projections. causal, window_size, softcap, alignment: as for `attention`. dropout_p: while it
    trains.

    Parameters are those of the four `torch.nn.Linear` layers ``q``, ``k``, ``v`` and ``out``. The module keeps the
    context's number, so it can be copied and pickled. Raises `InvalidRequest` for numbers that do not divide.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        context: GpuContext,
        kv_heads: int | None = None,
        bias: bool = True,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        softcap: float = 0.0,
        alignment: str = "bottom_right",
        dropout_p: float = 0.0,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        heads = integer("heads", heads, 1)
        kv_heads = heads if kv_heads is None else integer("kv_heads", kv_heads, 1)
        expect(integer("dim", dim, 1) % heads == 0, "dim", dim, f"must be a multiple of heads, {heads}")
        expect(heads % kv_heads == 0, "kv_heads", kv_heads, f"must divide heads, {heads}")
        _check(context, causal, alignment, window_size, None, softcap, 0, dropout_p, None)
        self.heads = heads
        self.kv_heads = kv_heads
        self.dropout_p = dropout_p
        self._context = context.number
        self._options: dict[str, Any] = {
            "causal": causal,
            "window_size": window_size,
            "softcap": softcap,
            "alignment": alignment,
        }
        width = dim // heads * kv_heads
        made = {"bias": bias, "device": device, "dtype": dtype}
        self.q = torch.nn.Linear(dim, dim, **made)
        self.k = torch.nn.Linear(dim, width, **made)
        self.v = torch.nn.Linear(dim, width, **made)
        self.out = torch.nn.Linear(dim, dim, **made)

    def forward(self, x: torch.Tensor, memory: torch.Tensor | None = None) -> torch.Tensor:
        """x: (batch, rows, dim). memory: (batch, keys, dim) to attend to; None: x itself. Returns x's shape.

        Raises what `attention` raises, and `ActorStopped` once the context is closed.
        """
        context = open_contexts().get(self._context)
        if context is None:
            raise ActorStopped(f"context {self._context}, which this module was made for, is not open in this process")
        read = x if memory is None else memory
        q = self.q(x).unflatten(-1, (self.heads, -1))
        k, v = (layer(read).unflatten(-1, (self.kv_heads, -1)) for layer in (self.k, self.v))
        drops = self.dropout_p if self.training else 0.0
        seed = int(torch.randint(0, 1 << 62, ()).item()) if drops else 0
        found = attention(q, k, v, context=context, dropout_p=drops, dropout_seed=seed, **self._options)
        answer: torch.Tensor = self.out(found.flatten(-2))
        return answer
