"""The parts of vLLM 0.33.0 that an attention backend uses: its abstract classes and its registry."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum, StrEnum
from types import ModuleType
from typing import Any


class AttentionType(StrEnum):
    DECODER = "decoder"
    ENCODER_ONLY = "encoder_only"
    ENCODER_DECODER = "encoder_decoder"


class AttentionMetadata:
    pass


@dataclass
class CommonAttentionMetadata:
    query_start_loc: Any
    query_start_loc_cpu: Any
    seq_lens: Any
    num_reqs: int
    num_actual_tokens: int
    max_query_len: int
    max_seq_len: int
    block_table_tensor: Any
    slot_mapping: Any
    causal: Any = True


class AttentionBackend(ABC):
    supported_dtypes: list[Any] = []
    supported_kv_cache_dtypes: list[str] = ["auto", "float16", "bfloat16"]
    forward_includes_kv_cache_update = True

    @staticmethod
    @abstractmethod
    def get_name() -> str: ...

    @staticmethod
    @abstractmethod
    def get_impl_cls() -> Any: ...

    @staticmethod
    @abstractmethod
    def get_builder_cls() -> Any: ...

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        return True

    @classmethod
    def supports_sink(cls) -> bool:
        return False

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return False

    @classmethod
    def is_mla(cls) -> bool:
        return False

    @classmethod
    def validate_configuration(
        cls,
        *,
        head_size: int,
        dtype: Any,
        device_capability: Any,
        kv_cache_dtype: str = "auto",
        block_size: int = 16,
        use_mla: bool = False,
        has_sink: bool = False,
        has_sliding_window: bool = False,
    ) -> list[str]:
        reasons = {
            "head_size not supported": cls.supports_head_size(head_size),
            "dtype not supported": dtype in cls.supported_dtypes,
            "kv_cache_dtype not supported": kv_cache_dtype in cls.supported_kv_cache_dtypes,
            "MLA not supported": use_mla == cls.is_mla(),
            "attention sinks not supported": not has_sink or cls.supports_sink(),
            "sliding window not supported": not has_sliding_window or cls.supports_sliding_window(),
        }
        options = (head_size, dtype, kv_cache_dtype, block_size, use_mla, has_sink, False, False, device_capability)
        combination = cls.supports_combination(*options)  # type: ignore[attr-defined]
        return [reason for reason, holds in reasons.items() if not holds] + ([combination] if combination else [])


class AttentionMetadataBuilder(ABC):
    @abstractmethod
    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: Any) -> None:
        self.device = device

    @abstractmethod
    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any: ...


class AttentionImpl(ABC):
    @abstractmethod
    def __init__(self, *arguments: Any) -> None: ...

    @abstractmethod
    def forward(self, *arguments: Any) -> Any: ...


class AttentionBackendEnum(Enum):
    FLASH_ATTN = "vllm.v1.attention.backends.flash_attn.FlashAttentionBackend"
    CUSTOM = None


OVERRIDES: dict[AttentionBackendEnum, str] = {}


def register_backend(backend: AttentionBackendEnum, class_path: str) -> None:
    OVERRIDES[backend] = class_path


@contextmanager
def installed() -> Iterator[None]:
    """While entered, imports of vLLM get this module."""
    here = sys.modules[__name__]
    names = ("vllm", "vllm.v1", "vllm.v1.attention", "vllm.v1.attention.backends")
    made: dict[str, ModuleType] = {name: ModuleType(name) for name in names}
    made |= {"vllm.v1.attention.backend": here, "vllm.v1.attention.backends.registry": here}
    former = {name: sys.modules.get(name) for name in (*made, "gpu_actors.interop.vllm")}
    sys.modules.update(made)
    try:
        yield
    finally:
        for name, module in former.items():
            if module is None:
                sys.modules.pop(name, None)
            else:
                sys.modules[name] = module
