"""The parts of SGLang 0.5.23 that an attention backend uses: its registry, a pool of keys, and a batch's modes."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum, auto
from types import ModuleType
from typing import Any

ATTENTION_BACKEND_CHOICES = ["triton", "fa3"]
add_attention_backend_choices = ATTENTION_BACKEND_CHOICES.extend
ATTENTION_BACKENDS: dict[str, Any] = {}


def register_attention_backend(name: str) -> Any:
    def keep(make: Any) -> Any:
        ATTENTION_BACKENDS[name] = make
        return make

    return keep


class AttentionType(Enum):
    DECODER = "decoder"
    ENCODER_ONLY = "encoder_only"


class ForwardMode(Enum):
    EXTEND = auto()
    DECODE = auto()
    MIXED = auto()
    IDLE = auto()
    TARGET_VERIFY = auto()


class AttentionBackend:
    forward_metadata: Any = None

    def init_forward_metadata(self, forward_batch: Any) -> None:
        self.init_forward_metadata_out_graph(forward_batch)  # type: ignore[attr-defined]

    def forward(self, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, **options: Any) -> Any:
        if forward_batch.forward_mode == ForwardMode.DECODE:
            return self.forward_decode(q, k, v, layer, forward_batch, **options)  # type: ignore[attr-defined]
        return self.forward_extend(q, k, v, layer, forward_batch, **options)  # type: ignore[attr-defined]


@dataclass
class KVWriteLoc:
    loc: Any

    @classmethod
    def for_layer(cls, forward_batch: Any, layer: Any) -> KVWriteLoc:
        return cls(forward_batch.out_cache_loc)


class MHATokenToKVPool:
    """Keys and values by layer, (slots, heads, dim) each. The first page takes rows that belong to no sequence."""

    requires_physical_write_loc = False
    kv_cache_layout = "nhd"
    is_quantized_kv_cache = False

    def __init__(self, k: Any, v: Any) -> None:
        self.k_buffer, self.v_buffer = k, v
        self.dtype = k[0].dtype

    def get_key_buffer(self, layer_id: int) -> Any:
        return self.k_buffer[layer_id]

    def get_value_buffer(self, layer_id: int) -> Any:
        return self.v_buffer[layer_id]

    def set_kv_buffer(self, layer: Any, loc_info: KVWriteLoc, cache_k: Any, cache_v: Any) -> None:
        self.k_buffer[layer.layer_id][loc_info.loc] = cache_k
        self.v_buffer[layer.layer_id][loc_info.loc] = cache_v


@dataclass
class RadixAttention:
    """An attention layer. sliding_window_size: keys before the row's own; -1 for no window."""

    tp_q_head_num: int
    qk_head_dim: int
    tp_k_head_num: int
    layer_id: int = 0
    scaling: float = 0.25
    logit_cap: float = 0.0
    sliding_window_size: int = -1
    is_cross_attention: bool = False
    attn_type: AttentionType = AttentionType.DECODER
    use_irope: bool = False
    pos_encoding_mode: str = "NONE"
    logit_capping_method: str = "tanh"
    xai_temperature_len: int = -1

    @property
    def v_head_dim(self) -> int:
        return self.qk_head_dim


@contextmanager
def installed() -> Iterator[None]:
    """While entered, imports of SGLang get this module."""
    here = sys.modules[__name__]
    srt = "sglang.srt"
    packages = ("sglang", srt, f"{srt}.arg_groups", f"{srt}.layers", f"{srt}.layers.attention")
    packages += (f"{srt}.mem_cache", f"{srt}.model_executor")
    modules = (
        *("arg_groups.choices", "layers.attention.attention_registry", "layers.attention.base_attn_backend"),
        *("layers.radix_attention", "mem_cache.memory_pool", "model_executor.forward_batch_info"),
    )
    made = {name: ModuleType(name) for name in packages} | {f"{srt}.{name}": here for name in modules}
    former = {name: sys.modules.get(name) for name in (*made, "gpu_actors.interop.sglang")}
    sys.modules.update(made)
    try:
        yield
    finally:
        for name, module in former.items():
            if module is None:
                sys.modules.pop(name, None)
            else:
                sys.modules[name] = module
