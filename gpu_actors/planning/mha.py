"""From cuDNN's messages to FlashAttention's layout and back: heads and rows change places by their strides alone."""

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
    """An adopted message in FlashAttention's layout. Raises `InvalidRequest`."""
    params = _params(message)
    request = FlashForward(**_shared(message, params), return_lse=message.return_stats)
    _exchange(request, params)
    return request


def backward_request(message: MhaBackward) -> FlashBackward:
    """An adopted message in FlashAttention's layout. Raises `InvalidRequest`."""
    params = _params(message)
    request = FlashBackward(
        **_shared(message, params),
        out=message.o,
        dout=message.do,
        lse=message.stats,
        deterministic=message.deterministic,
    )
    _exchange(request, params)
    rows = (params.batch, params.heads_q, params.seq_q)
    for field, name in (("o", "out"), ("do", "dout")):
        _check(field, getattr(request, name), (*rows, params.head_dim))
        setattr(request, name, getattr(request, name).transpose(0, 2, 1, 3))
    _check("stats", request.lse, (*rows, 1))
    request.lse = request.lse[..., 0]
    return request


def mha_output(template: Adopted | None, outputs: Outputs) -> Sequence[MhaOutput]:
    """The answer to one forward request, in the kind of its q."""
    stats = outputs.get("lse")
    heads_first = {"out": outputs["out"].transpose(0, 2, 1, 3), "lse": None if stats is None else stats[..., None]}
    (found,) = attention_output(template, None, heads_first)
    return (MhaOutput(found.out, found.lse),)


def mha_gradients(template: Adopted | None, outputs: Outputs) -> Sequence[AttentionGradients]:
    """The answer to one backward request, in the kind of its q."""
    heads_first = {name: outputs[name].transpose(0, 2, 1, 3) for name in ("dq", "dk", "dv")}
    return attention_gradients(template, {**outputs, **heads_first})


def _params(message: MhaForward | MhaBackward) -> AttentionParams:
    if not isinstance(message.params, AttentionParams):
        raise InvalidRequest("params", type(message.params).__name__, "must be AttentionParams")
    return message.params


def _shared(message: MhaForward | MhaBackward, params: AttentionParams) -> dict[str, Any]:
    """What forward and backward have in common."""
    return {
        "q": message.q,
        "k": message.k,
        "v": message.v,
        "bias": message.bias,
        "causal": params.mask.is_causal,
        "window_size": params.mask.window,
        "alignment": params.alignment,
        "softmax_scale": params.scale,
        "dropout_p": params.dropout_p,
        "dropout_seed": params.dropout_seed,
    }


def _exchange(request: FlashForward, params: AttentionParams) -> None:
    kv = (params.batch, params.heads_kv, params.seq_kv, params.head_dim)
    _check("q", request.q, (params.batch, params.heads_q, params.seq_q, params.head_dim))
    _check("k", request.k, kv)
    _check("v", request.v, kv)
    request.q, request.k, request.v = (array.transpose(0, 2, 1, 3) for array in (request.q, request.k, request.v))


def _check(field: str, array: Any, wanted: tuple[int, ...]) -> None:
    shape = shape_of(field, array, "batch, heads, seq, dim")
    if shape != wanted:
        raise InvalidRequest(field, describe(array), f"must have the shape that the params give it, {wanted}")
