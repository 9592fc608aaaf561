"""DecodingCalls: the calls of a handle whose actor answers requests over caches."""

from __future__ import annotations

from collections.abc import Sequence

from gpu_actors.actors.handle import ActorHandle
from gpu_actors.reply import Reply
from gpu_actors.requests import Array, AttentionOutput, BatchedDecode, PagedForward

__all__ = ["DecodingCalls"]


class DecodingCalls(ActorHandle):
    """``paged_forward`` and ``decode``."""

    __slots__ = ()

    def paged_forward(
        self,
        q: Array,
        k_cache: Array,
        v_cache: Array,
        *,
        cache_seqlens: Array,
        block_table: Array | None = None,
        cu_seqlens_q: Array | None = None,
        max_seqlen_q: int | None = None,
        causal: bool = True,
        window_size: tuple[int, int] = (-1, -1),
        softmax_scale: float | None = None,
        softcap: float = 0.0,
        alibi_slopes: Array | None = None,
        sinks: Array | None = None,
        sink_tokens: int = 0,
        tree_mask: Array | None = None,
        q_descale: Array | None = None,
        k_descale: Array | None = None,
        v_descale: Array | None = None,
        num_splits: int = 0,
        chunk_index: int = 0,
        num_chunks: int = 1,
        return_lse: bool = False,
        out: Array | None = None,
        deadline: float | None = None,
        timeout: float | None = None,
        priority: int = 0,
    ) -> Reply[AttentionOutput]:
        """Attention of the last rows of each sequence to pages, or to a dense cache where no block_table is given.

        The arguments are those of `PagedForward`; deadline, timeout and priority as in `ActorHandle.submit`.
        """
        request = PagedForward(
            q=q,
            k_cache=k_cache,
            v_cache=v_cache,
            block_table=block_table,
            cache_seqlens=cache_seqlens,
            cu_seqlens_q=cu_seqlens_q,
            max_seqlen_q=max_seqlen_q,
            causal=causal,
            window_size=window_size,
            softmax_scale=softmax_scale,
            softcap=softcap,
            alibi_slopes=alibi_slopes,
            sinks=sinks,
            sink_tokens=sink_tokens,
            tree_mask=tree_mask,
            q_descale=q_descale,
            k_descale=k_descale,
            v_descale=v_descale,
            num_splits=num_splits,
            chunk_index=chunk_index,
            num_chunks=num_chunks,
            return_lse=return_lse,
            out=out,
        )
        return Reply(self.send(request, deadline, timeout, priority))

    def decode(
        self,
        q: Array,
        k_caches: Sequence[Array] | Array,
        v_caches: Sequence[Array] | Array,
        seq_lens: Array,
        *,
        window_size: tuple[int, int] = (-1, -1),
        softmax_scale: float | None = None,
        softcap: float = 0.0,
        alibi_slopes: Array | None = None,
        sinks: Array | None = None,
        sink_tokens: int = 0,
        q_descale: Array | None = None,
        k_descale: Array | None = None,
        v_descale: Array | None = None,
        num_splits: int = 0,
        return_lse: bool = False,
        out: Array | None = None,
        deadline: float | None = None,
        timeout: float | None = None,
        priority: int = 0,
    ) -> Reply[AttentionOutput]:
        """Attention of one new row a sequence to a cache array a sequence. The arguments are those of `BatchedDecode`.

        q and the output are (batch, heads, head_dim), the LSE (batch, heads).
        """
        request = BatchedDecode(
            q=q,
            k_caches=k_caches,
            v_caches=v_caches,
            seq_lens=seq_lens,
            window_size=window_size,
            softmax_scale=softmax_scale,
            softcap=softcap,
            alibi_slopes=alibi_slopes,
            sinks=sinks,
            sink_tokens=sink_tokens,
            q_descale=q_descale,
            k_descale=k_descale,
            v_descale=v_descale,
            num_splits=num_splits,
            return_lse=return_lse,
            out=out,
        )
        return Reply(self.send(request, deadline, timeout, priority))
