"""attention of torch tensors: a custom operator, ``gpu_actors::attention``, its gradients, and a module over it.

The operator has a schema, an implementation that asks the context, and a fake one, which tells tracers the shape, dtype
and strides of every result, so that torch.compile and torch.export trace through it.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.fx.experimental.symbolic_shapes import guard_or_true

from gpu_actors.errors import InvalidRequest, Unsupported
from gpu_actors.fields import expect, flag, integer, one_of, real, window
from gpu_actors.handles.gpu_context import GpuContext
from gpu_actors.interop.contexts import check_context, open_context_of
from gpu_actors.process import refuse_on_loop
from gpu_actors.validation.forward import check_seed

__all__ = [
    "Attention",
    "attention",
    "bias_of",
    "check_not_dual",
    "check_open",
    "expect_no_loop",
    "lse_dtype",
    "refuse_second",
    "rows_of",
    "seed_for",
]

# An operator takes tensors, numbers and strings, so a context is passed by its number.
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
# A seed that a traced program draws is a tensor, because it has no value while the program is traced.
_DRAWN = {"drawn_seed": "Tensor?"}
_NAMES = tuple(_OPERANDS | _SCALARS | _DRAWN)
_SCHEMA = ", ".join(f"{kind} {name}" for name, kind in (_OPERANDS | _SCALARS).items()) + ", Tensor? drawn_seed=None"
_GRADIENTS = ("q", "k", "v", "bias", "sinks")
_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_AUTOCAST = (torch.float32, torch.float16, torch.bfloat16)


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
    dropout_seed: int | torch.Tensor = 0,
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
    head_dim) with cu_seqlens. If cu_seqlens lie on a GPU, max_seqlen must be given. Tensors of float16, bfloat16,
    float32, float64, or fp8 without gradients; on the host, or on the context's own GPU. The other arguments, and all
    shapes and dtypes, are those of `gpu_actors.FlashForward`. deterministic: whether the gradients, too, have the same
    bits every time.

    Under ``torch.autocast`` q, k, v and bias are cast as for torch's own attention, unless they are float64 or fp8.
    float32 sinks are not cast. ``compute`` then refers to the dtype that q was cast to.

    Differentiable once, backwards, with respect to q, k, v, sinks and a bias that is not bool. The LSE has no gradient;
    it is float32, or float64 for float64 inputs. Dropout draws from dropout_seed alone, and torch's own generators stay
    untouched, so pass another seed each step. The seed may be an integer tensor of no axes, as `torch.randint` draws it
    in a compiled graph.

    Blocks the calling thread until the result is ready. Any thread may call it, except the thread of a running event
    loop, where it raises `WouldBlock`: run the model in a worker thread instead. Raises the request's error
    (`InvalidRequest`, `Unsupported`, ...), from ``backward()`` too, and `ActorStopped` if the context is closed.
    """
    flag("causal", causal)
    flag("alibi_signed", alibi_signed)
    flag("deterministic", deterministic)
    if not torch.compiler.is_compiling():
        _check(context, alignment, window_size, softmax_scale, softcap, sink_tokens, dropout_p, compute)
        if not isinstance(dropout_seed, torch.Tensor):
            check_seed(dropout_seed)
        integer("attention_chunk", attention_chunk, 0)
        flag("return_lse", return_lse)
        for name, longest in (("max_seqlen_q", max_seqlen_q), ("max_seqlen_k", max_seqlen_k)):
            if longest is not None:
                integer(name, longest, 1)
    else:  # check what a compiled call would change before the service sees it; numbers may be symbols
        if not isinstance(dropout_seed, torch.Tensor) and not 0 <= dropout_seed < 1 << 64:
            check_seed(dropout_seed)
        sound = isinstance(window_size, tuple | list) and len(window_size) == 2
        expect(sound, "window_size", window_size, "must be (left, right), two ints, each >= 0 keys or -1 for unbounded")
    drawn_seed = None
    if isinstance(dropout_seed, torch.Tensor):
        shown = f"{dropout_seed.dtype} {tuple(dropout_seed.shape)}"
        sound = dropout_seed.dtype in (torch.int64, torch.int32) and dropout_seed.dim() == 0
        expect(sound, "dropout_seed", shown, "must be an int, or an integer tensor of no axes")
        drawn_seed, dropout_seed = dropout_seed, 0
    check_not_dual(q=q, k=k, v=v, bias=bias, sinks=sinks)
    if alibi_slopes is not None and alibi_slopes.requires_grad and torch.is_grad_enabled():
        raise Unsupported("alibi_slopes", "a tensor that requires grad", "ALiBi's slopes have no gradient", "detached")
    q, k, v, sinks, bias = _autocast(q, k, v, sinks, bias)
    out, lse = _operator(
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
        drawn_seed,
    )
    return (out, lse) if return_lse else out


def _autocast(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None, bias: torch.Tensor | None
) -> tuple[Any, ...]:
    """The operands, cast to the autocast dtype of their device as torch casts those of its own attention."""
    kind = q.device.type if isinstance(q, torch.Tensor) else "cpu"
    if kind not in ("cpu", "cuda") or not torch.is_autocast_enabled(kind):
        return q, k, v, sinks, bias
    dtype = torch.get_autocast_dtype(kind)

    def cast(operand: Any, kinds: tuple[torch.dtype, ...] = _AUTOCAST) -> Any:
        return operand.to(dtype) if isinstance(operand, torch.Tensor) and operand.dtype in kinds else operand

    # float32 sinks fit every dtype of q, so they keep their precision.
    return cast(q), cast(k), cast(v), cast(sinks, _AUTOCAST[1:]), cast(bias)


def _check(
    context: object,
    alignment: object,
    window_size: object,
    softmax_scale: object,
    softcap: object,
    sink_tokens: object,
    dropout_p: object,
    compute: object,
) -> None:
    """Check what the operator's signature would refuse without saying what is accepted. The service checks the rest."""
    check_context(context)
    one_of("alignment", alignment, ("bottom_right", "top_left"), 'must be "bottom_right" or "top_left"')
    window(window_size)
    if softmax_scale is not None:
        real("softmax_scale", softmax_scale)
    real("softcap", softcap)
    integer("sink_tokens", sink_tokens, 0)
    real("dropout_p", dropout_p)
    if compute is not None:
        one_of("compute", compute, ("f64", "f32", "tf32", "f16", "bf16", "fp8"), "must be the name of a precision")


def check_not_dual(**tensors: object) -> None:
    """Raise `Unsupported` for dual tensors. Operators without a forward-mode rule would drop their tangents."""
    if torch.compiler.is_compiling() and forward_ad._current_level >= 0:
        # A compiler traces tensors without their tangents. Calls that it does not trace run eagerly and are checked.
        reason = "is not compiled where forward-mode derivatives are taken: it has none"
        raise Unsupported("attention", "in a dual level", reason, "differentiated backwards")
    for name, tensor in tensors.items():
        if isinstance(tensor, torch.Tensor) and forward_ad.unpack_dual(tensor).tangent is not None:
            reason = "attention has no forward-mode derivative: differentiate backwards, as with torch.autograd.grad"
            raise Unsupported(name, "a dual tensor", reason, "a tensor without a tangent")


# The operator


def _forward(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    context, options = _request(arguments)
    del options["deterministic"]  # forward always is deterministic
    with torch.no_grad():  # the operator has a derivative of its own
        dtype = str(lse_dtype(options["q"])).removeprefix("torch.")
        result = context.flash_attn.forward(**options, return_lse=True, lse_dtype=dtype).result()
    return result.out, result.lse


def lse_dtype(q: torch.Tensor) -> torch.dtype:
    """The dtype of the LSE. Gradients are computed from the LSE, and are no more exact than it is."""
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def _fake_forward(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    given = _named(arguments)
    q, k, v = (given[name] for name in ("q", "k", "v"))
    *batch, rows, heads, _ = q.shape
    if batch:  # a batch of 1 serves every sequence; a batch whose size the tracer does not know counts as several
        batch = [next((x.shape[0] for x in (q, k, v) if guard_or_true(x.shape[0] != 1)), 1)]
    out = q.new_empty((*batch, rows, heads, v.shape[-1]), dtype=torch.bfloat16 if q.dtype in _FP8 else q.dtype)
    if given["seqused_q"] is None and given["seqused_k"] is None:
        return out, q.new_empty((*batch, heads, rows), dtype=lse_dtype(q))
    # Padded sequences are computed as packed ones, and heads come first in the LSE of packed sequences.
    return out, q.new_empty((heads, *batch, rows), dtype=lse_dtype(q)).transpose(0, 1)


def _backward(dout: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, *arguments: Any) -> Any:
    context, options = _request(arguments)
    with torch.no_grad():
        gradients = context.flash_attn.backward(dout=rows_of(dout), out=out, lse=lse, **options).result()
    found = (getattr(gradients, f"d{name}") for name in _GRADIENTS)
    # Operators cannot return None. The gradient of padded sequences' bias is a part of a larger array.
    return tuple(dout.new_empty(0) if gradient is None else gradient.contiguous() for gradient in found)


def _fake_backward(dout: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, *arguments: Any) -> Any:
    given = _named(arguments)
    operands = (given[name] for name in _GRADIENTS)
    return tuple(each.new_empty(each.shape) if _is_learnt(each) else dout.new_empty(0) for each in operands)


def _is_learnt(operand: torch.Tensor | None) -> bool:
    """Whether backward has a gradient of an operand. A mask of bools has none."""
    return operand is not None and operand.is_floating_point()


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    ctx.save_for_backward(*output, *inputs[: len(_OPERANDS)], *inputs[len(_OPERANDS) + len(_SCALARS) :])
    ctx.scalars = inputs[len(_OPERANDS) : len(_OPERANDS) + len(_SCALARS)]
    ctx.mark_non_differentiable(output[1])


def _differentiate(ctx: Any, dout: torch.Tensor, dlse: torch.Tensor) -> tuple[Any, ...]:
    out, lse, *operands, seed = ctx.saved_tensors
    gradients = torch.ops.gpu_actors.attention_backward(dout, out, lse, *operands, *ctx.scalars, seed)
    given = dict(zip(_OPERANDS, operands, strict=True))
    by_name = {name: each for name, each in zip(_GRADIENTS, gradients, strict=True) if _is_learnt(given[name])}
    return tuple(by_name.get(name) for name in _NAMES)


def refuse_second(ctx: Any, *gradients: torch.Tensor) -> Any:
    """Raises `Unsupported`, in place of the derivative of gradients."""
    raise Unsupported("create_graph", True, "attention is differentiable once: its gradients have none", False)


def _named(arguments: tuple[Any, ...]) -> dict[str, Any]:
    """The arguments by name. torch leaves out the last argument if it has the default value."""
    return dict.fromkeys(_NAMES) | dict(zip(_NAMES, arguments, strict=False))


def _request(arguments: tuple[Any, ...]) -> tuple[GpuContext, dict[str, Any]]:
    """The context and the keyword arguments of `FlashAttnHandle.forward` and `.backward`.

    Raises WouldBlock on the thread of a running loop, before anything is submitted.
    """
    options = _named(arguments)
    context = check_open(options.pop("context"))
    options["window_size"] = (options.pop("window_left"), options.pop("window_right"))
    drawn = options.pop("drawn_seed")
    options["dropout_seed"] = (options["dropout_seed"] if drawn is None else int(drawn)) % (1 << 64)
    return context, options


def check_open(number: int) -> GpuContext:
    """The open context with that number, for a call that blocks. Raises `WouldBlock` and `ActorStopped`."""
    expect_no_loop()
    return open_context_of(number)


def expect_no_loop() -> None:
    """Raise `WouldBlock` on the thread of a running loop."""
    refuse_on_loop("attention()", "a worker thread, as with asyncio.to_thread, or await ctx.flash_attn.forward")


def rows_of(x: torch.Tensor) -> torch.Tensor:
    """The tensor with contiguous rows, as kernels read them. Autograd may make a gradient by expanding one number."""
    return x if x.stride(-1) == 1 else x.contiguous()


def seed_for(dropout_p: float) -> int | torch.Tensor:
    """A seed from torch's default generator, or 0 without dropout. A graph that is traced draws its seeds itself."""
    return torch.randint(1 << 62, (), device="cpu") if dropout_p else 0


def bias_of(mask: torch.Tensor, q: torch.Tensor, k: torch.Tensor, lead: tuple[int, ...]) -> torch.Tensor:
    """A mask of torch as a bias (batch or 1, heads or 1, rows, keys)."""
    rows, keys = q.shape[2], k.shape[2]
    if not isinstance(mask, torch.Tensor):
        raise InvalidRequest("attn_mask", type(mask).__name__, "must be a tensor or None")
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
        mask = mask.reshape(1, *heads) if one else mask.expand(*full[:-3], *heads).reshape(q.shape[0], *heads)
    # Kernels read each row of a bias in memory, so a mask that broadcasts along rows or keys is written out.
    return mask.expand(*mask.shape[:2], rows, keys).contiguous()


# A call waits for its result, so a compiler must capture none into a CUDA graph, as mode="reduce-overhead" would.
_TAGS = (torch.Tag.cudagraph_unsafe,)
_operator = torch.library.custom_op(
    "gpu_actors::attention", _forward, mutates_args=(), schema=f"({_SCHEMA}) -> (Tensor, Tensor)", tags=_TAGS
)
_operator.register_fake(_fake_forward)
_operator.register_autograd(_differentiate, setup_context=_keep)
_operator_backward = torch.library.custom_op(
    "gpu_actors::attention_backward",
    _backward,
    mutates_args=(),
    schema=f"(Tensor dout, Tensor out, Tensor lse, {_SCHEMA}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    tags=_TAGS,
)
_operator_backward.register_fake(_fake_backward)
_operator_backward.register_autograd(refuse_second)


# A module


class Attention(torch.nn.Module):  # type: ignore[misc]
    """Self- or cross-attention with its projections, through a context.

    dim: of the input and output. heads: query heads, which divide dim. kv_heads: heads of keys and values, a divisor of
    heads. bias: whether the projections have one. causal, window_size, softcap, alignment: as for `attention`.
    dropout_p: applied in training mode alone.

    Parameters are those of the four `torch.nn.Linear` layers ``q``, ``k``, ``v`` and ``out``. The module keeps only the
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
        flag("causal", causal)
        _check(context, alignment, window_size, None, softcap, 0, dropout_p, None)
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
        """Attend from x (batch, rows, dim) to memory (batch, keys, dim); None: to x itself. Returns x's shape.

        Raises what `attention` raises, and `ActorStopped` once the context is closed.
        """
        context = open_context_of(self._context)
        read = x if memory is None else memory
        q = self.q(x).unflatten(-1, (self.heads, -1))
        k, v = (layer(read).unflatten(-1, (self.kv_heads, -1)) for layer in (self.k, self.v))
        drops = self.dropout_p if self.training else 0.0
        found = attention(q, k, v, context=context, dropout_p=drops, dropout_seed=seed_for(drops), **self._options)
        answer: torch.Tensor = self.out(found.flatten(-2))
        return answer
