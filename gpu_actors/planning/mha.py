"""Converts cuDNN's messages to FlashAttention's layout and back. Only strides change: heads and rows swap places."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gpu_actors.arrays.adopt import Adopted
from gpu_actors.attention.mha import AttentionParams, MhaBackward, MhaForward, MhaOutput
from gpu_actors.attention.requests import AttentionGradients, FlashBackward, FlashForward
from gpu_actors.devices.interface import Outputs
from gpu_actors.errors import InvalidRequest
from gpu_actors.fields import describe, shape_of
from gpu_actors.planning.backward import attention_gradients
from gpu_actors.planning.forward import attention_output

__all__ = ["backward_request", "forward_request", "mha_gradients", "mha_output"]


def forward_request(message: MhaForward) -> FlashForward:
    return FlashForward(**_shared(message), return_lse=message.return_stats)


def backward_request(message: MhaBackward) -> FlashBackward:
    shared, params = _shared(message), message.params
    rows = (params.batch, params.heads_q, params.seq_q)
    out = _checked("o", message.o, (*rows, params.head_dim))
    dout = _checked("do", message.do, (*rows, params.head_dim))
    return FlashBackward(
        **shared,
        out=out.transpose(0, 2, 1, 3),
        dout=dout.transpose(0, 2, 1, 3),
        lse=_checked("stats", message.stats, (*rows, 1))[..., 0],
        deterministic=message.deterministic,
    )


def mha_output(template: Adopted | None, outputs: Outputs) -> Sequence[MhaOutput]:
    stats = outputs.get("lse")
    heads_first = {"out": outputs["out"].transpose(0, 2, 1, 3), "lse": None if stats is None else stats[..., None]}
    (found,) = attention_output(template, None, heads_first)
    return (MhaOutput(found.out, found.lse),)


def mha_gradients(template: Adopted | None, outputs: Outputs) -> Sequence[AttentionGradients]:
    heads_first = {name: outputs[name].transpose(0, 2, 1, 3) for name in ("dq", "dk", "dv")}
    return attention_gradients(template, {**outputs, **heads_first})


def _shared(message: MhaForward | MhaBackward) -> dict[str, Any]:
    params = message.params
    if not isinstance(params, AttentionParams):
        raise InvalidRequest("params", type(params).__name__, "must be AttentionParams")
    kv = (params.batch, params.heads_kv, params.seq_kv, params.head_dim)
    q = _checked("q", message.q, (params.batch, params.heads_q, params.seq_q, params.head_dim))
    k, v = _checked("k", message.k, kv), _checked("v", message.v, kv)
    return {
        "q": q.transpose(0, 2, 1, 3),
        "k": k.transpose(0, 2, 1, 3),
        "v": v.transpose(0, 2, 1, 3),
        "bias": message.bias,
        "causal": params.mask.is_causal,
        "window_size": params.mask.window,
        "alignment": params.alignment,
        "softmax_scale": params.scale,
        "dropout_p": params.dropout_p,
        "dropout_seed": params.dropout_seed,
    }


def _checked(field: str, array: Any, wanted: tuple[int, ...]) -> Any:
    if getattr(array, "shape", None) == wanted:
        return array
    shape_of(field, array, "batch, heads, seq, dim")
    raise InvalidRequest(field, describe(array), f"must have the shape that the params give it, {wanted}")
