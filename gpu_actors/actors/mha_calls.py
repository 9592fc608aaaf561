"""From cuDNN's messages to FlashAttention's layout and back: heads and rows change places by their strides alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gpu_actors.actors.attention import adopt_arrays
from gpu_actors.devices.interface import Outputs
from gpu_actors.errors import InvalidRequest, RequestError
from gpu_actors.interop.arrays import Adopted, CallerStreams, restore
from gpu_actors.mha import AttentionParams, MhaBackward, MhaForward, MhaOutput
from gpu_actors.requests import AttentionGradients, FlashBackward, FlashForward
from gpu_actors.validation.fields import describe, shape_of

__all__ = ["backward_request", "by_its_own_name", "forward_request", "mha_gradients", "mha_output"]

# What cuDNN's messages and params call the fields of FlashAttention's.
_FIELDS = {"out": "o", "dout": "do", "lse": "stats", "softmax_scale": "scale"}


def forward_request(
    message: MhaForward, place: str, streams: CallerStreams | None
) -> tuple[FlashForward, Adopted | None]:
    """The adopted request, and what its q was if that was no NumPy array. Raises `InvalidRequest`."""
    params = _params(message)
    request, like = adopt_arrays(
        FlashForward(
            q=message.q,
            k=message.k,
            v=message.v,
            bias=message.bias,
            causal=params.mask.is_causal,
            window_size=params.mask.window,
            alignment=params.alignment,
            softmax_scale=params.scale,
            dropout_p=params.dropout_p,
            dropout_seed=params.dropout_seed,
            return_lse=message.return_stats,
        ),
        message.bias is None,
        place,
        streams,
    )
    _exchange(request, params)
    return request, like


def backward_request(
    message: MhaBackward, place: str, streams: CallerStreams | None
) -> tuple[FlashBackward, Adopted | None]:
    """As `forward_request`."""
    params = _params(message)
    request, like = adopt_arrays(
        FlashBackward(
            q=message.q,
            k=message.k,
            v=message.v,
            bias=message.bias,
            causal=params.mask.is_causal,
            window_size=params.mask.window,
            alignment=params.alignment,
            softmax_scale=params.scale,
            dropout_p=params.dropout_p,
            dropout_seed=params.dropout_seed,
            out=message.o,
            dout=message.do,
            lse=message.stats,
            deterministic=message.deterministic,
        ),
        False,
        place,
        streams,
    )
    assert isinstance(request, FlashBackward)
    _exchange(request, params)
    rows = (params.batch, params.heads_q, params.seq_q)
    for field, name in (("o", "out"), ("do", "dout")):
        _check(field, getattr(request, name), (*rows, params.head_dim))
        setattr(request, name, getattr(request, name).transpose(0, 2, 1, 3))
    _check("stats", request.lse, (*rows, 1))
    request.lse = request.lse[..., 0]
    return request, like


def mha_output(like: Adopted | None, outputs: Outputs) -> Sequence[MhaOutput]:
    """The answer to one forward request, in the kind of its q."""
    out, stats = outputs["out"].transpose(0, 2, 1, 3), outputs.get("lse")
    stats = None if stats is None else stats[..., None]
    if like is not None:
        out = restore(out, like)
        stats = None if stats is None else restore(stats, like)
    return (MhaOutput(out, stats),)


def mha_gradients(like: Adopted | None, outputs: Outputs) -> Sequence[AttentionGradients]:
    """The answer to one backward request, in the kind of its q."""
    found = [outputs[name].transpose(0, 2, 1, 3) for name in ("dq", "dk", "dv")]
    if "dbias" in outputs:
        found.append(outputs["dbias"])
    return (AttentionGradients(*(array if like is None else restore(array, like) for array in found)),)


def by_its_own_name(error: RequestError) -> RequestError:
    """The same error, with the field as the caller of ``mha_forward`` and ``mha_backward`` knows it."""
    name = _FIELDS.get(error.field)
    return error if name is None else type(error)(name, *error.args[1:])


def _params(message: MhaForward | MhaBackward) -> AttentionParams:
    if not isinstance(message.params, AttentionParams):
        raise InvalidRequest("params", type(message.params).__name__, "must be AttentionParams")
    return message.params


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
