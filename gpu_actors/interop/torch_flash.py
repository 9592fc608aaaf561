"""register_flash_attention: the service as a flash attention implementation of torch.

    register_flash_attention(context)
    torch.nn.attention.activate_flash_attention_impl("gpu_actors")
    ... varlen_attn(q, k, v, ...), scaled_dot_product_attention(q, k, v) ...
    torch.nn.attention.restore_flash_attention_impl()

While it is active, torch's dispatcher calls the functions here for aten's operators of flash attention, forward and
backward, on tensors of the context's device. torch decides which calls reach these operators. Needs torch 2.13.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.attention import register_flash_attention_impl

from gpu_actors.errors import InvalidRequest, Unsupported
from gpu_actors.handles.gpu_context import GpuContext
from gpu_actors.interop.contexts import check_context
from gpu_actors.interop.torch_attention import bias_of, expect_no_loop, rows_of, seed_for

__all__ = ["register_flash_attention"]


def register_flash_attention(context: GpuContext, name: str = "gpu_actors") -> str:
    """Register a running context with torch as the flash attention implementation ``name``. Returns the name.

    `torch.nn.attention.activate_flash_attention_impl` switches the whole process to it, and
    `torch.nn.attention.restore_flash_attention_impl` switches back. Registering a name again replaces its context from
    the next activation on.

    While it is active, these calls on the context's device go through the context:
    `torch.nn.attention.varlen.varlen_attn` and ``varlen_attn_out``, with windows, GQA, pages (``block_table`` beside
    ``seqused_k``) and ``num_splits`` of pages; and `torch.nn.functional.scaled_dot_product_attention` if torch chooses
    flash attention, on the CPU also with a mask. Gradients and dropout work; the dropped places are not those of
    torch's own kernels.

    A call blocks its thread, and raises `WouldBlock` on the thread of a running event loop. A call that no kernel
    computes raises `Unsupported` in the words of the service's ``explain``; nothing falls back. Once the context is
    closed, calls raise `ActorStopped`. This function raises `InvalidRequest` for an unusable context or name.
    """
    check_context(context)
    if not isinstance(name, str) or not name:
        raise InvalidRequest("name", name, "must be a name, not an empty one")
    register_flash_attention_impl(name, register_fn=functools.partial(_Active, context))
    return name


class _Active:
    """Keeps the functions in torch's dispatcher, from its creation until `remove`."""

    def __init__(self, context: GpuContext) -> None:
        key = "CPU" if context.info.device_name == "cpu" else "CUDA"
        operators: dict[str, Callable[..., Any]] = {
            "_flash_attention_forward": _forward,
            "_flash_attention_forward_no_dropout_inplace": _forward_into,
            "_flash_attention_backward": _backward,
            "_scaled_dot_product_flash_attention": _sdpa,
            "_scaled_dot_product_flash_attention_backward": _sdpa_backward,
        }
        if key == "CPU":
            operators["_scaled_dot_product_flash_attention_for_cpu"] = _sdpa_cpu
            operators["_scaled_dot_product_flash_attention_for_cpu_backward"] = _sdpa_cpu_backward
        self._library: Any = torch.library.Library("aten", "IMPL")
        with warnings.catch_warnings():
            # Activation replaces torch's own kernels on purpose, but torch warns of it.
            warnings.filterwarnings("ignore", message="(?s).*Overriding a previously registered kernel")
            for operator, function in operators.items():
                self._library.impl(operator, functools.partial(function, context), key)

    def remove(self) -> None:
        self._library = None


# aten's operators, with the names and the order of torch's arguments


def _forward(
    context: GpuContext,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cum_seq_q: torch.Tensor | None,
    cum_seq_k: torch.Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    seqused_k: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    num_splits: int | None = None,
    out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, ...]:
    """query: (batch, rows, heads, dim), or (total, heads, dim) with cum_seq_q. key, value: likewise, or pages.

    If gradients are recorded, raises `Unsupported` for options that torch does not pass to backward.
    """
    if return_debug_mask:
        raise Unsupported("return_debug_mask", True, "the dropped places are not given", False)
    if torch.is_grad_enabled() and any(each.requires_grad for each in (query, key, value)):
        lost = {"alibi_slopes": alibi_slopes, "seqused_k": seqused_k, "block_table": block_table}
        for name, tensor in lost.items():
            if tensor is not None:
                reason = "torch's backward does not get it, so gradients would be wrong: compute without them"
                raise Unsupported(name, "a tensor", reason, None)
    window = _window(window_size_left, window_size_right)
    options: dict[str, Any] = {
        "causal": is_causal,
        "window_size": window,
        "softmax_scale": scale,
        "alibi_slopes": alibi_slopes,
        "cu_seqlens_q": cum_seq_q,
        "max_seqlen_q": None if cum_seq_q is None else max_q,
        "out": out,
    }
    if block_table is not None:
        if seqused_k is None:
            raise InvalidRequest("seqused_k", None, "must be given where block_table is")
        if dropout_p:
            raise Unsupported("dropout_p", dropout_p, "nothing is dropped from keys in pages", 0.0)
        options |= {"k_cache": key, "v_cache": value, "block_table": block_table, "cache_seqlens": seqused_k}
        found = _ask(context.flash_attn.paged_forward, q=query, **options, num_splits=num_splits or 0, return_lse=True)
        return (found.out, found.lse, *_dropout_state(query, 0))
    if num_splits is not None:
        reason = "must be None, but for keys in pages: other kernels do not cut keys into ranges"
        raise Unsupported("num_splits", num_splits, reason)
    seed = int(seed_for(dropout_p))
    options |= {"k": key, "v": value, "cu_seqlens_k": cum_seq_k, "seqused_k": seqused_k}
    options |= {"max_seqlen_k": None if cum_seq_k is None else max_k, "dropout_p": dropout_p, "dropout_seed": seed}
    found = _ask(context.flash_attn.forward, q=query, **options, return_lse=True)
    return (found.out, found.lse, *_dropout_state(query, seed))


def _forward_into(context: GpuContext, out: torch.Tensor, *arguments: Any, **options: Any) -> torch.Tensor:
    return _forward(context, *arguments, **options, out=out)[1]


def _backward(
    context: GpuContext,
    grad_out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    cum_seq_q: torch.Tensor | None,
    cum_seq_k: torch.Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    rng_state: torch.Tensor,
    unused: torch.Tensor,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
) -> tuple[torch.Tensor, ...]:
    packed = cum_seq_q is not None
    return _gradients(
        context,
        (grad_out, query, key, value, out),
        logsumexp,
        causal=is_causal,
        window_size=_window(window_size_left, window_size_right),
        softmax_scale=scale,
        cu_seqlens_q=cum_seq_q,
        cu_seqlens_k=cum_seq_k,
        max_seqlen_q=max_q if packed else None,
        max_seqlen_k=max_k if packed else None,
        dropout_p=dropout_p,
        dropout_seed=int(rng_state[0]) if dropout_p else 0,
    )


def _sdpa(
    context: GpuContext,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    """query, key, value: (batch, heads, rows, dim). Causal is aligned to the first row and key."""
    if return_debug_mask:
        raise Unsupported("return_debug_mask", True, "the dropped places are not given", False)
    seed = int(seed_for(dropout_p))
    out, lse = _dense(context, query, key, value, is_causal, scale, dropout_p=dropout_p, dropout_seed=seed)
    return (out, lse, None, None, query.shape[2], key.shape[2], *_dropout_state(query, seed))


def _sdpa_backward(
    context: GpuContext,
    grad_out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    cum_seq_q: torch.Tensor | None,
    cum_seq_k: torch.Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    philox_seed: torch.Tensor,
    philox_offset: torch.Tensor,
    *,
    scale: float | None = None,
) -> tuple[torch.Tensor, ...]:
    seed = int(philox_seed[0]) if dropout_p else 0
    operands = (grad_out, query, key, value, out)
    return _dense_backward(context, operands, logsumexp, is_causal, scale, dropout_p=dropout_p, dropout_seed=seed)


def _sdpa_cpu(
    context: GpuContext,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: torch.Tensor | None = None,
    scale: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    if dropout_p:
        raise Unsupported("dropout_p", dropout_p, "this operator of torch hands no seed to its backward", 0.0)
    return _dense(context, query, key, value, is_causal, scale, bias=_bias(attn_mask, query, key))


def _sdpa_cpu_backward(
    context: GpuContext,
    grad_out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    dropout_p: float,
    is_causal: bool,
    *,
    attn_mask: torch.Tensor | None = None,
    scale: float | None = None,
) -> tuple[torch.Tensor, ...]:
    operands = (grad_out, query, key, value, out)
    return _dense_backward(context, operands, logsumexp, is_causal, scale, bias=_bias(attn_mask, query, key))


# What the operators share


def _dense(
    context: GpuContext,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    is_causal: bool,
    scale: float | None,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    # torch promises that the output has the query's memory layout.
    out = torch.empty_like(query)
    q, k, v = (each.transpose(1, 2) for each in (query, key, value))
    found = _ask(
        context.flash_attn.forward,
        q=q,
        k=k,
        v=v,
        causal=is_causal,
        alignment="top_left",
        softmax_scale=scale,
        return_lse=True,
        **options,
    )
    return out.copy_(found.out.transpose(1, 2)), found.lse


def _dense_backward(
    context: GpuContext,
    operands: tuple[torch.Tensor, ...],
    lse: torch.Tensor,
    is_causal: bool,
    scale: float | None,
    **options: Any,
) -> tuple[torch.Tensor, ...]:
    options |= {"causal": is_causal, "alignment": "top_left", "softmax_scale": scale}
    gradients = _gradients(context, tuple(each.transpose(1, 2) for each in operands), lse, **options)
    return tuple(each.transpose(1, 2) for each in gradients)


def _gradients(
    context: GpuContext, operands: tuple[torch.Tensor, ...], lse: torch.Tensor, **options: Any
) -> tuple[torch.Tensor, ...]:
    """dq, dk and dv. operands: dout, q, k, v and out."""
    dout, q, k, v, out = operands
    options |= {"q": q, "k": k, "v": v, "out": out, "lse": lse, "dout": rows_of(dout)}
    deterministic = torch.are_deterministic_algorithms_enabled()
    found = _ask(context.flash_attn.backward, **options, deterministic=deterministic)
    return found.dq, found.dk, found.dv


def _ask(call: Any, **options: Any) -> Any:
    expect_no_loop()
    with torch.no_grad():  # torch knows these operators' derivatives
        return call(**options).result()


def _window(left: int | None, right: int | None) -> tuple[int, int]:
    return (-1 if left is None else left, -1 if right is None else right)


def _bias(mask: torch.Tensor | None, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor | None:
    return None if mask is None else bias_of(mask, query, key, tuple(query.shape[:2]))


def _dropout_state(query: torch.Tensor, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What torch passes on to backward: the seed, an unused offset, and an empty mask of dropped places."""
    state = torch.zeros(2, dtype=torch.uint64, device=query.device)
    if seed:
        state[0] = seed
    return state, state.new_zeros(()), query.new_empty(0)
