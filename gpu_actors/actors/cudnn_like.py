"""CudnnLikeActor: attention as cuDNN's users ask for it, with plans cached by signature."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from gpu_actors.actors.attention import adopt_arrays, is_plain
from gpu_actors.actors.base import ServiceActor
from gpu_actors.actors.call import Call
from gpu_actors.actors.flash_attn import Attention
from gpu_actors.actors.handle import ActorHandle
from gpu_actors.devices.interface import Outputs
from gpu_actors.errors import InvalidRequest
from gpu_actors.interop.arrays import Adopted, CallerStreams, restore
from gpu_actors.mha import AttentionParams, MhaForward, MhaOutput
from gpu_actors.plans import PlanCacheStats
from gpu_actors.reply import Reply
from gpu_actors.requests import Array, FlashForward
from gpu_actors.validation.fields import describe, shape_of

if TYPE_CHECKING:
    from gpu_actors.actors.post import Post

__all__ = ["CudnnLikeActor", "CudnnLikeHandle"]

_PLANS = 256


class CudnnLikeHandle(ActorHandle):
    """``ctx.cudnn``."""

    __slots__ = ()

    def mha_forward(
        self,
        params: AttentionParams,
        q: Array,
        k: Array,
        v: Array,
        *,
        bias: Array | None = None,
        return_stats: bool = False,
        deadline: float | None = None,
        timeout: float | None = None,
        priority: int = 0,
    ) -> Reply[MhaOutput]:
        """Multi-head attention on (batch, heads, seq, dim). The arguments are those of `MhaForward`.

        The reply gives an `MhaOutput`, or raises `InvalidRequest` where an array does not agree with the params.
        """
        request = MhaForward(params=params, q=q, k=k, v=v, bias=bias, return_stats=return_stats)
        return self.submit(request, deadline=deadline, timeout=timeout, priority=priority)

    def plan_cache_stats(self) -> PlanCacheStats:
        """hits, misses, evicted, entries of the plan cache."""
        attention: Attention = self._post.kept
        return attention.plans.stats()


class CudnnLikeActor(ServiceActor):
    """Takes `MhaForward`."""

    label: ClassVar[str] = "cudnn"
    handle_type: ClassVar[type[ActorHandle]] = CudnnLikeHandle

    @classmethod
    def keep(cls, post: Post) -> Attention:
        return Attention(post, plans=_PLANS)

    def open(self) -> None:
        self._attention: Attention = self.post.kept

    def handle(self, call: Call[Any]) -> None:
        message = call.message
        if not isinstance(message, MhaForward):
            raise InvalidRequest("message", type(message).__name__, "CudnnLikeActor takes MhaForward")
        request, like = _flash_request(message, self._attention.place, call.caller)

        def finish(outputs: Outputs) -> Sequence[MhaOutput]:
            return (_mha_output(like, outputs),)

        self._attention.answer(self, call, request, is_plain(request), finish)


def _flash_request(
    message: MhaForward, place: str, streams: CallerStreams | None
) -> tuple[FlashForward, Adopted | None]:
    """The same request in FlashAttention's layout: heads and rows change places by their strides alone."""
    params = message.params
    if not isinstance(params, AttentionParams):
        raise InvalidRequest("params", type(params).__name__, "must be AttentionParams")
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
    kv = (params.batch, params.heads_kv, params.seq_kv, params.head_dim)
    _check("q", request.q, (params.batch, params.heads_q, params.seq_q, params.head_dim))
    _check("k", request.k, kv)
    _check("v", request.v, kv)
    request.q, request.k, request.v = (array.transpose(0, 2, 1, 3) for array in (request.q, request.k, request.v))
    return request, like


def _check(field: str, array: Any, wanted: tuple[int, ...]) -> None:
    shape = shape_of(field, array, "batch, heads, seq, dim")
    if shape != wanted:
        raise InvalidRequest(field, describe(array), f"must have the shape that the params give it, {wanted}")


def _mha_output(like: Adopted | None, outputs: Outputs) -> MhaOutput:
    out, stats = outputs["out"].transpose(0, 2, 1, 3), outputs.get("lse")
    stats = None if stats is None else stats[..., None]
    if like is not None:
        out = restore(out, like)
        stats = None if stats is None else restore(stats, like)
    return MhaOutput(out, stats)
