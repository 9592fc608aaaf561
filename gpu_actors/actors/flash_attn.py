"""FlashAttnActor: answers attention requests in FlashAttention's layouts."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, ClassVar

from gpu_actors.actors.answering import Attention, place_of, unreadable
from gpu_actors.actors.attention import adopt_arrays, attention_output, forward_families, is_plain
from gpu_actors.actors.base import ServiceActor
from gpu_actors.actors.call import Call
from gpu_actors.actors.coalescing import Coalescer, Flush, Waiting
from gpu_actors.actors.completion import Finish
from gpu_actors.actors.decoding import adopt_cache_request, cache_families, cache_problem
from gpu_actors.actors.decoding_calls import DecodingCalls
from gpu_actors.actors.gradients import attention_gradients
from gpu_actors.actors.handle import ActorHandle
from gpu_actors.errors import GpuActorsError, InvalidRequest
from gpu_actors.kernels.dispatch import answering_key, dispatch_key
from gpu_actors.plans import PlanCacheStats
from gpu_actors.problem import AttentionProblem, DispatchKey
from gpu_actors.reply import Reply
from gpu_actors.requests import (
    Array,
    AttentionGradients,
    AttentionOutput,
    BatchedDecode,
    FlashBackward,
    FlashForward,
    PagedForward,
)
from gpu_actors.validation import backward_problem, forward_problem

if TYPE_CHECKING:
    from gpu_actors.actors.post import Post

__all__ = ["FlashAttnActor", "FlashAttnHandle"]

_host_output: Finish = functools.partial(attention_output, None, None)


class FlashAttnHandle(DecodingCalls):
    """``ctx.flash_attn``."""

    __slots__ = ()

    def forward(
        self,
        q: Array,
        k: Array,
        v: Array,
        *,
        causal: bool = False,
        alignment: str = "bottom_right",
        window_size: tuple[int, int] = (-1, -1),
        softmax_scale: float | None = None,
        softcap: float = 0.0,
        alibi_slopes: Array | None = None,
        sinks: Array | None = None,
        sink_tokens: int = 0,
        bias: Array | None = None,
        dropout_p: float = 0.0,
        dropout_seed: int = 0,
        cu_seqlens_q: Array | None = None,
        cu_seqlens_k: Array | None = None,
        max_seqlen_q: int | None = None,
        max_seqlen_k: int | None = None,
        q_descale: Array | None = None,
        k_descale: Array | None = None,
        v_descale: Array | None = None,
        compute: str | None = None,
        return_lse: bool = False,
        out: Array | None = None,
        deadline: float | None = None,
        timeout: float | None = None,
        priority: int = 0,
    ) -> Reply[AttentionOutput]:
        """Attention of q to k and v; returns at once. The arguments are those of `FlashForward`.

        deadline, timeout, priority: as in `ActorHandle.submit`. The reply gives an `AttentionOutput`, or raises one of
        `gpu_actors.errors`. Do not change the arrays before it is done.
        """
        # By position, in the order of the fields: naming 24 arguments takes as long as answering an empty request.
        request = FlashForward(
            q,
            k,
            v,
            causal,
            alignment,
            window_size,
            softmax_scale,
            softcap,
            alibi_slopes,
            sinks,
            sink_tokens,
            bias,
            dropout_p,
            dropout_seed,
            cu_seqlens_q,
            cu_seqlens_k,
            max_seqlen_q,
            max_seqlen_k,
            q_descale,
            k_descale,
            v_descale,
            compute,
            return_lse,
            out,
        )
        attention: Attention = self._post.kept
        return Reply(self.send(request, deadline, timeout, priority, attention.recall(request)))

    def backward(
        self,
        dout: Array,
        q: Array,
        k: Array,
        v: Array,
        out: Array,
        lse: Array,
        *,
        causal: bool = False,
        alignment: str = "bottom_right",
        window_size: tuple[int, int] = (-1, -1),
        softmax_scale: float | None = None,
        softcap: float = 0.0,
        alibi_slopes: Array | None = None,
        sinks: Array | None = None,
        sink_tokens: int = 0,
        bias: Array | None = None,
        dropout_p: float = 0.0,
        dropout_seed: int = 0,
        cu_seqlens_q: Array | None = None,
        cu_seqlens_k: Array | None = None,
        max_seqlen_q: int | None = None,
        max_seqlen_k: int | None = None,
        compute: str | None = None,
        deterministic: bool = False,
        deadline: float | None = None,
        timeout: float | None = None,
        priority: int = 0,
    ) -> Reply[AttentionGradients]:
        """The gradients of sum(dout * out) by q, k, v, bias and sinks; returns at once.

        dout: shaped like out and of its dtype. out, lse: what `forward` answered with ``return_lse=True``, for the same
        q, k, v and options, all of which must be given again: dropout is replayed from its seed. The other arguments
        are those of `FlashBackward`. deadline, timeout, priority: as in `ActorHandle.submit`.

        The reply gives `AttentionGradients`, each shaped like what it belongs to and of its dtype, dbias and dsinks
        None without bias and sinks; or raises one of `gpu_actors.errors`. Rows that see no key have gradient 0.
        Tri Dao, FlashAttention-2 (arXiv 2307.08691), section 3.1.
        """
        request = FlashBackward(
            q=q,
            k=k,
            v=v,
            causal=causal,
            alignment=alignment,
            window_size=window_size,
            softmax_scale=softmax_scale,
            softcap=softcap,
            alibi_slopes=alibi_slopes,
            sinks=sinks,
            sink_tokens=sink_tokens,
            bias=bias,
            dropout_p=dropout_p,
            dropout_seed=dropout_seed,
            cu_seqlens_q=cu_seqlens_q,
            cu_seqlens_k=cu_seqlens_k,
            max_seqlen_q=max_seqlen_q,
            max_seqlen_k=max_seqlen_k,
            compute=compute,
            out=out,
            dout=dout,
            lse=lse,
            deterministic=deterministic,
        )
        return Reply(self.send(request, deadline, timeout, priority))

    def inspect_key(self, request: FlashForward | FlashBackward | PagedForward | BatchedDecode) -> DispatchKey:
        """The dispatch key that a request would be answered by. Validates it and launches nothing.

        Raises `InvalidRequest` and `Unsupported` itself, for there is no reply.
        """
        services = self._post.services
        info, place = services.device.info, place_of(services)
        problem = problem_of(request, place)
        if isinstance(request, FlashForward) and not isinstance(request, FlashBackward):
            adopted, _ = adopt_arrays(request, is_plain(request), place)
            return dispatch_key(problem, info.arch, forward_families(adopted))
        if isinstance(request, FlashBackward):
            return answering_key(problem, info.arch, info.runs_kernels)
        families = cache_families(adopt_cache_request(request, place)[0])
        return answering_key(problem, info.arch, info.runs_kernels, families)

    def plan_cache_stats(self) -> PlanCacheStats:
        """hits, misses, evicted, entries of the cache of validated problems."""
        attention: Attention = self._post.kept
        return attention.plans.stats()


class FlashAttnActor(ServiceActor):
    """Takes `FlashForward`, `FlashBackward`, `PagedForward` and `BatchedDecode`."""

    label: ClassVar[str] = "flash_attn"
    handle_type: ClassVar[type[ActorHandle]] = FlashAttnHandle

    @classmethod
    def keep(cls, post: Post) -> Attention:
        return Attention(post, plans=4096)

    def open(self) -> None:
        self._attention: Attention = self.post.kept
        self._coalescer = Coalescer(self, self._attention.decoding)

    def flush(self) -> None:
        if self._coalescer.gathered:
            self._coalescer.flush()

    def on_message(self, message: Any) -> None:
        if isinstance(message, Flush):
            self._coalescer.flush(due=True)

    def handle(self, call: Call[Any]) -> None:
        message = call.message
        if isinstance(message, FlashForward):
            if self._coalescer.turned_away:
                self._coalescer.flush(due=True)
                if self.post.mailbox.saturated:
                    self.post.mailbox.give_back((call,))
                    return
            attention = self._attention
            if call.prepared is not None:
                attention.answer(self, call, message, True, _host_output)
                return
            plain = is_plain(message)
            request, like = adopt_arrays(message, plain, attention.place, call.caller)
            finish: Finish = functools.partial(attention_output, like, message.out)
            if isinstance(message, FlashBackward):
                finish = functools.partial(attention_gradients, like)
            attention.answer(self, call, request, plain, finish)
            return
        if isinstance(message, PagedForward | BatchedDecode):
            self._decode(call, message)
            return
        raise not_attention(message)

    def _decode(self, call: Call[Any], message: PagedForward | BatchedDecode) -> None:
        try:
            request, like = adopt_cache_request(message, self._attention.place, call.caller)
            plan = self._attention.decoding.plan(request)
            plan.check(request)
            kernels = self._attention.decode_kernels(call, plan.launching(request))
        except GpuActorsError:
            raise
        except Exception as error:
            raise unreadable(message, error) from error
        if kernels is not None:
            self._coalescer.add(Waiting(call, request, plan, like, message.out, kernels))


def problem_of(request: object, place: str) -> AttentionProblem:
    """Validate any attention message."""
    try:
        if isinstance(request, FlashBackward):
            return backward_problem(adopt_arrays(request, is_plain(request), place)[0])
        if isinstance(request, FlashForward):
            return forward_problem(adopt_arrays(request, is_plain(request), place)[0])
        if isinstance(request, PagedForward | BatchedDecode):
            return cache_problem(adopt_cache_request(request, place)[0])
    except GpuActorsError:
        raise
    except Exception as error:
        raise unreadable(request, error) from error
    raise not_attention(request)


def not_attention(message: object) -> InvalidRequest:
    """What to answer a message with that is none of this actor's."""
    kinds = "FlashForward, FlashBackward, PagedForward or BatchedDecode"
    return InvalidRequest("message", type(message).__name__, f"must be {kinds}")
