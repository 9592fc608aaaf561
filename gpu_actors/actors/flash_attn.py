"""FlashAttnActor: answers attention requests in FlashAttention's layouts."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, TypeVar, Unpack

from gpu_actors.actors.coalescing import Coalescer, Flush, Work
from gpu_actors.actors.prepared import Prepare, PreparedAttention
from gpu_actors.arrays.request_arrays import adopt_request, is_brief
from gpu_actors.attention.problem import DispatchKey
from gpu_actors.attention.requests import (
    Array,
    AttentionGradients,
    AttentionOutput,
    BackwardKeywords,
    BatchedDecode,
    DecodeKeywords,
    FlashBackward,
    FlashForward,
    ForwardKeywords,
    LatentKeywords,
    PagedForward,
    PagedKeywords,
)
from gpu_actors.devices.interface import Device, Kernels, Launch
from gpu_actors.errors import InvalidRequest, RequestError, Unsupported
from gpu_actors.fields import shape_of
from gpu_actors.kernels.option_table import Explanation
from gpu_actors.partial import MergeBackward, MergeGradients, MergePartials, Partial, adopt_partials
from gpu_actors.planning.backward import attention_gradients
from gpu_actors.planning.cached import adopt_cache_request, bind_cached, check_cached
from gpu_actors.planning.concat import concat
from gpu_actors.planning.explanation import explain_request, key_of
from gpu_actors.planning.forward import attention_output, bind_forward, broadcast_batch, is_padded, is_plain
from gpu_actors.planning.merging import merge_key
from gpu_actors.planning.partials import bind_merge, bind_merge_gradients, merge_gradients_answer, merge_plan
from gpu_actors.planning.plan import Plan, PlanCacheStats
from gpu_actors.planning.planner import AttentionPlanner
from gpu_actors.planning.seqused import to_dense_answer, to_varlen
from gpu_actors.runtime.actor import ServiceActor, reading
from gpu_actors.runtime.call import Call
from gpu_actors.runtime.cell import ActorCell, Cell
from gpu_actors.runtime.completion import Finish
from gpu_actors.runtime.handle import ActorHandle, CallOptions
from gpu_actors.runtime.reply import Reply
from gpu_actors.values import show

__all__ = ["FlashAttnActor", "FlashAttnHandle"]

_FORWARD = CallOptions(FlashForward, ForwardKeywords)
_BACKWARD = CallOptions(FlashBackward, BackwardKeywords)
_PAGED = CallOptions(PagedForward, PagedKeywords)
_LATENT = CallOptions(PagedForward, LatentKeywords)
_DECODE = CallOptions(BatchedDecode, DecodeKeywords)

_Found = TypeVar("_Found")

_host_output: Finish = functools.partial(attention_output, None, None)


class FlashAttnHandle(ActorHandle):
    """``ctx.flash_attn``."""

    __slots__ = ()

    @_FORWARD
    def forward(
        self,
        q: Array,
        k: Array,
        v: Array,
        *,
        deadline: float | None = None,
        timeout: float | None = None,
        priority: int = 0,
        **options: Unpack[ForwardKeywords],
    ) -> Reply[AttentionOutput]:
        """Attention of q to k and v; returns at once. The arguments are those of `FlashForward`.

        deadline, timeout, priority: as in `ActorHandle.submit`. The reply gives an `AttentionOutput`, or raises one of
        `gpu_actors.errors`. Do not change the arrays before it is done.
        """
        _FORWARD.check(options)
        request = FlashForward(q, k, v, **options)
        planner: AttentionPlanner = self._cell.shared
        return Reply(self.send(request, deadline, timeout, priority, planner.recall(request, options)))

    @_BACKWARD
    def backward(
        self,
        dout: Array,
        q: Array,
        k: Array,
        v: Array,
        out: Array,
        lse: Array,
        *,
        deadline: float | None = None,
        timeout: float | None = None,
        priority: int = 0,
        **options: Unpack[BackwardKeywords],
    ) -> Reply[AttentionGradients]:
        """The gradients of sum(dout * out) by q, k, v, bias and sinks; returns at once.

        dout: shaped like out and of its dtype. out, lse: the results of `forward` with ``return_lse=True``, for the
        same q, k, v and options. Repeat all options: dropout is replayed from its seed. The other arguments are those
        of `FlashBackward`. deadline, timeout, priority: as in `ActorHandle.submit`.

        The reply gives `AttentionGradients`, each with the shape and dtype of its input, dbias and dsinks None
        without bias and sinks; or raises one of `gpu_actors.errors`. Rows that see no key have gradient 0.
        Tri Dao, FlashAttention-2 (arXiv 2307.08691), section 3.1.
        """
        _BACKWARD.check(options)
        request = FlashBackward(q, k, v, dout=dout, out=out, lse=lse, **options)
        return Reply(self.send(request, deadline, timeout, priority))

    @_PAGED
    def paged_forward(
        self,
        q: Array,
        k_cache: Array,
        v_cache: Array | None = None,
        *,
        cache_seqlens: Array | int,
        deadline: float | None = None,
        timeout: float | None = None,
        priority: int = 0,
        **options: Unpack[PagedKeywords],
    ) -> Reply[AttentionOutput]:
        """Attention of the last rows of each sequence to pages, or, without a block_table, to a dense cache.

        The arguments are those of `PagedForward`; deadline, timeout and priority as in `ActorHandle.submit`.
        """
        _PAGED.check(options)
        request = PagedForward(q=q, k_cache=k_cache, v_cache=v_cache, cache_seqlens=cache_seqlens, **options)
        return Reply(self.send(request, deadline, timeout, priority))

    @_LATENT
    def mla_decode(
        self,
        q_nope: Array,
        q_pe: Array,
        latent_cache: Array,
        *,
        cache_seqlens: Array | int,
        softmax_scale: float,
        deadline: float | None = None,
        timeout: float | None = None,
        priority: int = 0,
        **options: Unpack[LatentKeywords],
    ) -> Reply[AttentionOutput]:
        """Multi-head latent attention of new rows with absorbed projections: `paged_forward` over one cache.

        q_nope: (batch, rows, heads, latent), queries times the keys' up-projection; q_pe: their rotated part (batch,
        rows, heads, rotary); or both (total_q, heads, ..) with cu_seqlens_q. latent_cache: pages (num_blocks,
        page_size, 1, latent + rotary), or without block_table (batch, capacity, 1, latent + rotary). The output has
        latent columns, for the values' up-projection. Further arguments: those of `PagedForward`. Raises
        `InvalidRequest` if q_nope and q_pe do not belong together. DeepSeek-V2 (arXiv 2405.04434), section 2.1.
        """
        _LATENT.check(options)
        axes = "batch, rows, heads, latent" if options.get("cu_seqlens_q") is None else "total, heads, latent"
        latent = shape_of("q_nope", q_nope, axes)[-1]
        request = PagedForward(
            q=concat(("q_nope", "q_pe"), q_nope, q_pe),
            k_cache=latent_cache,
            latent_dim=latent,
            cache_seqlens=cache_seqlens,
            softmax_scale=softmax_scale,
            **options,
        )
        return Reply(self.send(request, deadline, timeout, priority))

    @_DECODE
    def decode(
        self,
        q: Array,
        k_caches: Sequence[Array] | Array,
        v_caches: Sequence[Array] | Array,
        seq_lens: Array | int,
        *,
        deadline: float | None = None,
        timeout: float | None = None,
        priority: int = 0,
        **options: Unpack[DecodeKeywords],
    ) -> Reply[AttentionOutput]:
        """Attention of one new row per sequence to one cache array per sequence.

        The arguments are those of `BatchedDecode`. q and the output are (batch, heads, head_dim), the LSE is
        (batch, heads).
        """
        _DECODE.check(options)
        request = BatchedDecode(q=q, k_caches=k_caches, v_caches=v_caches, seq_lens=seq_lens, **options)
        return Reply(self.send(request, deadline, timeout, priority))

    def merge(
        self,
        partials: Sequence[Partial | AttentionOutput],
        *,
        sinks: Array | None = None,
        out_dtype: str | None = None,
        deadline: float | None = None,
        timeout: float | None = None,
        priority: int = 0,
    ) -> Reply[AttentionOutput]:
        """Attention over the union of the partials' keys, on the device. The arguments are those of `MergePartials`.

        `gpu_actors.partial.merge` is the same on the host, for partials of any dtypes.
        """
        return Reply(self.send(MergePartials(partials, sinks, out_dtype), deadline, timeout, priority))

    def merge_backward(
        self,
        partials: Sequence[Partial | AttentionOutput],
        dout: Array,
        dlse: Array | None = None,
        *,
        sinks: Array | None = None,
        deadline: float | None = None,
        timeout: float | None = None,
        priority: int = 0,
    ) -> Reply[MergeGradients]:
        """The gradients of a merge by each out, each lse and the sinks. The arguments are those of `MergeBackward`.

        `gpu_actors.partial.merge_gradients` is the same on the host, for arrays of any dtypes.
        """
        return Reply(self.send(MergeBackward(partials, dout, dlse, sinks), deadline, timeout, priority))

    def prepare(
        self,
        request: FlashForward | PagedForward,
        *,
        deadline: float | None = None,
        timeout: float | None = None,
        priority: int = 0,
    ) -> Reply[PreparedAttention]:
        """Check, plan and compile a request now, to launch it many times without the actor: `PreparedAttention.run`.

        request: its arrays are shaped and placed like those of the runs. All runs use its tables, lengths and other
        arrays besides q, the keys and values. The reply raises one of `gpu_actors.errors`: also `Unsupported` for
        padded sequences (``seqused_q``), and in a context with ``isolation="process"``.
        """
        message = Prepare(request)
        cell: Cell = self._cell
        if not isinstance(cell, ActorCell):
            call: Call[Any] = Call(message, cell.mailbox)
            reason = "is launched on the caller's thread, and the device of this context is in another process"
            cell.mailbox.refuse(call, Unsupported("request", show(request), reason, "forward or paged_forward"))
            return Reply(call)
        return Reply(self.send(message, deadline, timeout, priority))

    def inspect_key(self, request: FlashForward | FlashBackward | PagedForward | BatchedDecode) -> DispatchKey:
        """The dispatch key of a request. Validates the request and launches nothing.

        Raises `InvalidRequest` and `Unsupported` directly, because there is no reply.
        """
        return self._inspect(key_of, request)

    def explain(self, request: FlashForward | FlashBackward | PagedForward | BatchedDecode) -> Explanation:
        """Why a request has the kernel that `inspect_key` names, or none. Validates it and launches nothing.

        str() of the result gives each kernel's answer, and the rows of docs/reports/options.md for the request's
        options on this context's architecture. Raises `InvalidRequest` directly. A request that no kernel takes is
        explained.
        """
        return self._inspect(explain_request, request)

    def _inspect(self, look: Callable[[Any, Device], _Found], request: object) -> _Found:
        if not isinstance(request, FlashForward | PagedForward | BatchedDecode):
            raise FlashAttnActor.refusal(request)
        try:
            with reading(request):
                return look(request, self._cell.environment.device)
        except RequestError as error:
            raise error.named_for(request) from error.__cause__

    def plan_cache_stats(self) -> PlanCacheStats:
        """Statistics of the cache of validated problems: hits, misses, evicted, entries."""
        planner: AttentionPlanner = self._cell.shared
        return planner.plans.stats()


class FlashAttnActor(ServiceActor):
    """Answers attention in FlashAttention's layouts."""

    label: ClassVar[str] = "flash_attn"
    handle_type: ClassVar[type[ActorHandle]] = FlashAttnHandle
    takes: ClassVar[tuple[type, ...]] = (
        FlashForward,
        FlashBackward,
        PagedForward,
        BatchedDecode,
        MergePartials,
        MergeBackward,
        Prepare,
    )
    vital: ClassVar[bool] = True

    @classmethod
    def make_shared(cls, cell: ActorCell) -> AttentionPlanner:
        return AttentionPlanner(cell, plans=4096)

    @classmethod
    def brief(cls, message: object) -> bool:
        return isinstance(message, FlashForward | PagedForward | BatchedDecode) and is_brief(message)

    def open(self) -> None:
        self._planner: AttentionPlanner = self.cell.shared
        self._coalescer: Coalescer[Work] = Coalescer(self, self._planner.decoding)

    def flush(self) -> None:
        if self._coalescer.gathered:
            self._coalescer.flush()

    def on_message(self, message: Any) -> None:
        if isinstance(message, Flush):
            self._coalescer.flush(due=True)

    def handle(self, call: Call[Any]) -> None:
        message = call.message
        if isinstance(message, FlashForward):
            if self._coalescer.held_up:
                self._coalescer.flush(due=True)
                if self.cell.mailbox.saturated:
                    self.cell.mailbox.requeue((call,))
                    return
            planner = self._planner
            if call.prepared is not None:
                planner.answer(self, call, message, True, _host_output)
                return
            plain, request, template = is_plain(message), message, None
            if not plain:
                request, template = adopt_request(message, planner.device_name, call.caller_notes)
            finish: Finish = functools.partial(attention_output, template, message.out)
            if isinstance(message, FlashBackward):
                finish = functools.partial(attention_gradients, template)
            with reading(message):
                request = broadcast_batch(request)
            if is_padded(request):
                with reading(message):
                    dense, request = request, to_varlen(request)
                finish = to_dense_answer(dense, finish)
            planner.answer(self, call, request, plain, finish)
            return
        if isinstance(message, PagedForward | BatchedDecode):
            self._decode(call, message)
            return
        if isinstance(message, MergePartials | MergeBackward):
            self._merge(call, message)
            return
        if isinstance(message, Prepare):
            self._prepare(call, message)
            return
        raise self.refusal(message)

    def _decode(self, call: Call[Any], message: PagedForward | BatchedDecode) -> None:
        with reading(message):
            request, template = adopt_cache_request(message, self._planner.device_name, call.caller_notes)
            plan = self._planner.decoding.plan(request)
            check_cached(plan, request)
        kernels = self._planner.kernels_of(call, plan.variants)
        if kernels is not None:
            work = Work(call=call, request=request, plan=plan, template=template, result=message.out, kernels=kernels)
            self._coalescer.add(work, merge_key(plan, request))

    def _prepare(self, call: Call[Any], message: Prepare) -> None:
        planner = self._planner
        request: Any = message.request
        plan: Plan
        with reading(message):
            if isinstance(request, PagedForward):
                cached, _ = adopt_cache_request(request, planner.device_name, call.caller_notes)
                plan = planner.decoding.plan(cached)
                check_cached(plan, cached)
                bind: Callable[[Kernels], Launch] = functools.partial(bind_cached, plan, cached)
                adopted: Any = cached
            elif isinstance(request, FlashForward) and not isinstance(request, FlashBackward):
                if is_padded(request):
                    name = "seqused_q" if request.seqused_q is not None else "seqused_k"
                    reason = "of a request that is prepared would be read once, from the host"
                    raise Unsupported(name, show(getattr(request, name)), reason, "cu_seqlens_q and cu_seqlens_k")
                adopted, _ = adopt_request(request, planner.device_name, call.caller_notes)
                plan = planner.plan(adopted, False)
                bind = functools.partial(bind_forward, plan, adopted, False)
            else:
                reason = "must be a FlashForward or a PagedForward to be prepared"
                raise InvalidRequest("request", type(request).__name__, reason)
        kernels = planner.kernels_of(call, plan.variants)
        if kernels is None or not call.claim():
            return
        with reading(message):
            prepared = PreparedAttention(self.cell, adopted, bind(kernels), request.out)
        ready = prepared.ready()
        if ready.done():
            call.resolve(prepared, self.outbox)
        else:
            self.cell.completion.watch(ready, (call,), lambda _: (prepared,), self.outbox)

    def _merge(self, call: Call[Any], message: MergePartials | MergeBackward) -> None:
        planner = self._planner
        with reading(message):
            request, template = adopt_partials(message, planner.device_name, call.caller_notes)
            plan = merge_plan(request, planner.device)
        kernels = planner.kernels_of(call, plan.variants)
        if kernels is None or not call.claim():
            return
        if isinstance(request, MergeBackward):
            answer: Finish = functools.partial(merge_gradients_answer, len(request.partials), template)
            self.launch((call,), bind_merge_gradients(plan, request, kernels), answer)
        else:
            finish: Finish = functools.partial(attention_output, template, None)
            self.launch((call,), bind_merge(plan, request, kernels), finish)
