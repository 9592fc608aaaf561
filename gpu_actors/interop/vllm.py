"""register: the service as vLLM's attention backend CUSTOM. Written for the interface of vLLM 0.33.0.

    vllm serve MODEL --attention-backend CUSTOM

vLLM calls `register` in each of its processes, by this package's entry point (docs/engines.md). A batch of prompts and
new tokens is one `PagedForward`, which reads vLLM's pages in place. Needs vLLM.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionImpl,
    AttentionMetadata,
    AttentionMetadataBuilder,
    AttentionType,
)
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

from gpu_actors.compiling.source import exact_arch
from gpu_actors.errors import Unsupported
from gpu_actors.handles.gpu_context import GpuContext
from gpu_actors.interop.paged import context_for, paged_attention, use_context, write_rows
from gpu_actors.kernels.dispatch import dispatch_key
from gpu_actors.kernels.support import MAX_HEAD_DIM, example_problem

__all__ = ["VllmBackend", "VllmImpl", "VllmMetadata", "VllmMetadataBuilder", "register"]


def register(context: GpuContext | None = None) -> None:
    """Make the service the backend ``CUSTOM`` of vLLM in this process.

    context: computes the attention of this process. None, as the engine passes it: the context of an earlier call, or
    else one that a worker opens on the GPU of its tensors, at the first batch, and keeps until the process ends.
    Raises `InvalidRequest` for an object that is no context.
    """
    if context is not None:
        use_context(context)
    register_backend(AttentionBackendEnum.CUSTOM, f"{VllmBackend.__module__}.{VllmBackend.__qualname__}")


class VllmBackend(AttentionBackend):  # type: ignore[misc]
    """Tells vLLM, before it builds a model, what the backend supports and which classes it has."""

    supported_dtypes: ClassVar = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes: ClassVar = ["auto", "float16", "bfloat16"]
    # vLLM asks for the writes separately, because it knows which layers share another's keys and write none.
    forward_includes_kv_cache_update = False

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"  # vLLM looks the backend up by this name

    @staticmethod
    def get_impl_cls() -> type[VllmImpl]:
        return VllmImpl

    @staticmethod
    def get_builder_cls() -> type[VllmMetadataBuilder]:
        return VllmMetadataBuilder

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        return 1 <= head_size <= MAX_HEAD_DIM

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    @classmethod
    def supports_combination(
        cls,
        head_size: int,
        dtype: torch.dtype,
        kv_cache_dtype: str | None,
        block_size: int | None,
        use_mla: bool,
        has_sink: bool,
        use_sparse: bool,
        use_mm_prefix: bool,
        device_capability: Any,
    ) -> str | None:
        """Why no kernel computes a model's attention on a GPU, in the words of `FlashAttnHandle.explain`, or None."""
        name = str(dtype).removeprefix("torch.")
        kept = name if kv_cache_dtype in (None, "auto") else kv_cache_dtype
        arch = exact_arch(10 * device_capability[0] + device_capability[1])
        pages: dict[str, Any] = {"layout": "paged", "kv_dtype": kept, "page_size": block_size or 16, "causal": True}
        try:
            dispatch_key(example_problem(name, head_size, **pages), arch)
        except Unsupported as refusal:
            return str(refusal)
        return None


@dataclass
class VllmMetadata(AttentionMetadata):  # type: ignore[misc]
    """A batch, as all layers share it.

    rows: new tokens of all sequences, without padding. options: of `PagedForward`, with arrays on the layers' device.
    """

    rows: int
    options: dict[str, Any]


class VllmMetadataBuilder(AttentionMetadataBuilder):  # type: ignore[misc]
    """Makes `VllmMetadata` of vLLM's batches. It lets vLLM capture no attention: a layer waits for its result."""

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> VllmMetadata:
        """The metadata of a batch. Raises `Unsupported` for a batch that is not causal."""
        common = common_attn_metadata
        if common.causal is not True:
            raise Unsupported("causal", common.causal, "the tokens of a batch see none after them here", True)
        options = {
            "block_table": common.block_table_tensor,
            "cache_seqlens": common.seq_lens,
            "cu_seqlens_q": common.query_start_loc,
            "max_seqlen_q": max(1, common.max_query_len),
        }
        return VllmMetadata(int(common.query_start_loc_cpu[-1]), options)


class VllmImpl(AttentionImpl):  # type: ignore[misc]
    """The attention of one layer. Raises `Unsupported` for a layer that `PagedForward` cannot express."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: Tensor | None = None,
        **others: Any,
    ) -> None:
        if attn_type != AttentionType.DECODER:
            raise Unsupported("attn_type", str(attn_type), "encoders and cross-attention keep no pages", "decoder")
        if kv_cache_dtype not in VllmBackend.supported_kv_cache_dtypes:
            reason = "keys and values are written to the pages as they are, unscaled"
            raise Unsupported("kv_cache_dtype", kv_cache_dtype, reason, "auto")
        for name, value in others.items():
            # vLLM marks an unused option with None, False or -1. 0 is a value, though it equals False.
            if not (value is None or value is False or (isinstance(value, int) and value == -1)):
                raise Unsupported(name, value, "PagedForward has no such option", None)
        self.num_heads = num_heads
        self.head_size = head_size
        self.scale = float(scale)
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.kv_cache_dtype = kv_cache_dtype
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self.alibi_slopes = None if alibi_slopes is None else torch.tensor(alibi_slopes, dtype=torch.float32)
        self.options: dict[str, Any] = {
            "softmax_scale": self.scale,
            "softcap": float(logits_soft_cap or 0.0),
            # vLLM's window counts the row's own key.
            "window_size": (-1 if sliding_window is None else sliding_window - 1, -1),
            "sinks": sinks,
        }

    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        """Write key and value, (rows, kv_heads, head_size), to the pages with `write_rows`."""
        for pages, rows in zip(self._pages(kv_cache), (key, value), strict=True):
            write_rows(pages, slot_mapping, rows)

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: VllmMetadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Compute the attention of query (rows, heads, head_size) to the keys in the pages, into ``output`` like query.

        kv_cache: (num_blocks, kv_heads, block_size, 2 * head_size), keys before values, with any outer strides.
        Rows of padding are not written. Raises what `paged_attention` raises.
        """
        if output_scale is not None or output_block_scale is not None:
            raise Unsupported("output_scale", "a tensor", "outputs have the dtype of the query", None)
        if attn_metadata is None:  # vLLM is measuring its memory, and has no pages yet
            return output.zero_()
        if self.alibi_slopes is not None:
            self.alibi_slopes = self.alibi_slopes.to(query.device)
        rows, (k_pages, v_pages) = attn_metadata.rows, self._pages(kv_cache)
        paged_attention(
            context_for(query.device),
            query[:rows],
            k_pages,
            v_pages,
            output[:rows],
            alibi_slopes=self.alibi_slopes,
            **self.options,
            **attn_metadata.options,
        )
        return output

    def _pages(self, kv_cache: Tensor) -> tuple[Tensor, Tensor]:
        k_pages, v_pages = kv_cache.transpose(1, 2).split(self.head_size, dim=-1)
        return k_pages, v_pages
