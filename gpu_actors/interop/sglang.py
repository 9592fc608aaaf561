"""register: the service as an attention backend of SGLang. Written for the interface of SGLang 0.5.23.

    python -m sglang.launch_server --model-path MODEL --attention-backend gpu_actors \
        --cuda-graph-backend-decode disabled --cuda-graph-backend-prefill disabled

SGLang calls `register` in each of its processes, by this package's entry point (docs/engines.md). A batch of prompts or
new tokens is one `PagedForward`, which reads SGLang's pages in place. Needs SGLang.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.arg_groups.choices import ATTENTION_BACKEND_CHOICES, add_attention_backend_choices
from sglang.srt.layers.attention.attention_registry import register_attention_backend
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.mem_cache.memory_pool import KVWriteLoc, MHATokenToKVPool
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from gpu_actors.errors import Unsupported
from gpu_actors.handles.gpu_context import GpuContext
from gpu_actors.interop.paged import context_for, paged_attention, use_context

__all__ = ["SglangBackend", "register"]

_MODES = (ForwardMode.DECODE, ForwardMode.EXTEND, ForwardMode.MIXED)


def register(context: GpuContext | None = None, name: str = "gpu_actors") -> str:
    """Make the service the attention backend ``name`` of SGLang in this process. Returns the name.

    context: computes the attention of this process. None, as the engine passes it: the context of an earlier call, or
    else one that a worker opens on the GPU of its tensors, at the first batch, and keeps until the process ends.
    Raises `InvalidRequest` for an object that is no context.
    """
    if context is not None:
        use_context(context)
    if name not in ATTENTION_BACKEND_CHOICES:
        add_attention_backend_choices([name])
    register_attention_backend(name)(SglangBackend)
    return name


class SglangBackend(AttentionBackend):  # type: ignore[misc]
    """The attention of a model runner. Raises `Unsupported` for a pool or model that `PagedForward` cannot express."""

    def __init__(self, model_runner: Any) -> None:
        super().__init__()
        pool = model_runner.token_to_kv_pool
        if model_runner.use_mla_backend:
            raise Unsupported("attention_arch", "MLA", "this backend reads keys and values apart", "MHA")
        if not isinstance(pool, MHATokenToKVPool) or pool.requires_physical_write_loc:
            reason = (
                "pages are named by one table; --disable-hybrid-swa-memory gives such a pool to models with windows"
            )
            raise Unsupported("token_to_kv_pool", type(pool).__name__, reason, "MHATokenToKVPool")
        if pool.kv_cache_layout != "nhd":
            raise Unsupported("kv_cache_layout", pool.kv_cache_layout, "a page has rows of all heads", "nhd")
        if pool.is_quantized_kv_cache or pool.dtype != model_runner.dtype:
            reason = "keys and values have the model's dtype"
            raise Unsupported("kv_cache_dtype", str(pool.dtype), reason, str(model_runner.dtype))
        self.page_size = model_runner.page_size or 1
        self._pool = pool
        self._slots = model_runner.req_to_token_pool.req_to_token

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Raises `Unsupported`, because a layer waits for its result."""
        raise Unsupported(
            "cuda_graph", True, "a layer waits for its result: set --cuda-graph-backend-decode disabled", False
        )

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Gather what all layers of a batch share, as keyword arguments of `PagedForward`. Raises `Unsupported`."""
        mode = forward_batch.forward_mode
        if mode == ForwardMode.IDLE:
            return
        if in_capture:
            self.init_cuda_graph_state(0, 0)
        if mode not in _MODES or forward_batch.spec_info is not None:
            raise Unsupported(
                "forward_mode", mode.name, "is for prompts and single new tokens, not for drafts", "EXTEND"
            )
        if forward_batch.encoder_lens is not None:
            raise Unsupported("encoder_lens", "a tensor", "cross-attention is not causal over the pages", None)
        longest = int(forward_batch.seq_lens_cpu.max())
        first_slots = self._slots[forward_batch.req_pool_indices, : longest : self.page_size]
        shared: dict[str, Any] = {
            "block_table": (first_slots // self.page_size).to(torch.int32),
            "cache_seqlens": forward_batch.seq_lens.to(torch.int32),
        }
        if mode != ForwardMode.DECODE:
            ends = forward_batch.extend_seq_lens.cumsum(0)
            shared["cu_seqlens_q"] = torch.nn.functional.pad(ends, (1, 0)).to(torch.int32)
            shared["max_seqlen_q"] = max(1, *forward_batch.extend_seq_lens_cpu)
        self.forward_metadata = shared

    def forward_decode(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        **options: Any,
    ) -> torch.Tensor:
        """Attention of one new row of each sequence: (batch, heads * v_head_dim).

        Raises what `paged_attention` raises.
        """
        rows = q.reshape(-1, 1, layer.tp_q_head_num, layer.qk_head_dim)
        return self._attend(rows, k, v, layer, forward_batch, save_kv_cache, **options)

    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        **options: Any,
    ) -> torch.Tensor:
        """Attention of the new rows of all sequences: (rows, heads * v_head_dim).

        Raises what `paged_attention` raises.
        """
        rows = q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim)
        return self._attend(rows, k, v, layer, forward_batch, save_kv_cache, **options)

    def _attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool,
        sinks: torch.Tensor | None = None,
        **others: Any,
    ) -> torch.Tensor:
        _check_layer(layer, others)
        if save_kv_cache and k is not None:  # a layer that shares another layer's keys has none
            self._pool.set_kv_buffer(layer, KVWriteLoc.for_layer(forward_batch, layer), k, v)
        out = q.new_empty(*q.shape[:-1], layer.v_head_dim)
        reach = layer.sliding_window_size  # does not count the row's own key
        paged_attention(
            context_for(q.device),
            q,
            self._pages(self._pool.get_key_buffer(layer.layer_id)),
            self._pages(self._pool.get_value_buffer(layer.layer_id)),
            out,
            softmax_scale=layer.scaling,
            softcap=layer.logit_cap,
            window_size=(-1 if reach is None else reach, -1),
            sinks=sinks,
            **self.forward_metadata,
        )
        return out.reshape(-1, layer.tp_q_head_num * layer.v_head_dim)

    def _pages(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows (slots, heads, dim) as pages (num_blocks, page_size, heads, dim)."""
        whole = rows.shape[0] // self.page_size * self.page_size
        return rows[:whole].unflatten(0, (-1, self.page_size))


def _check_layer(layer: Any, others: dict[str, Any]) -> None:
    """Raise `Unsupported` for a layer that does not compute causal attention over the pages."""
    if layer.is_cross_attention or layer.attn_type != AttentionType.DECODER:
        kind = "cross-attention" if layer.is_cross_attention else layer.attn_type.value
        raise Unsupported("attn_type", kind, "rows see the keys before them", AttentionType.DECODER.value)
    if layer.logit_cap and layer.logit_capping_method != "tanh":
        raise Unsupported("logit_capping_method", layer.logit_capping_method, "softcap is by tanh", "tanh")
    unused = {"use_irope": False, "xai_temperature_len": -1, "pos_encoding_mode": "NONE"}
    for name, value in unused.items():
        if (found := getattr(layer, name)) != value:
            raise Unsupported(name, found, "PagedForward has no such option", value)
    for name, found in others.items():
        if found is not None and found is not False:
            raise Unsupported(name, "a tensor", "PagedForward has no such option", None)
