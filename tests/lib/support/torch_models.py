"""Tiny models of Transformers with random weights, saved in folders. For tests that have torch."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from support.generation import write_tokenizer

__all__ = ["CACHE", "FAMILIES", "MLA", "eager", "save"]

CACHE = min({"cache", "past_key_values"} & inspect.signature(transformers.LlamaForCausalLM.forward).parameters.keys())
"""The argument of a forward pass for a cache: "past_key_values" before Transformers 5.24."""

SIZES: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 256,
    "eos_token_id": 257,
    "pad_token_id": None,
}
HEADS: dict[str, Any] = {**SIZES, "head_dim": 16}
WINDOWS: dict[str, Any] = {**HEADS, "sliding_window": 7}
EXPERTS: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2}
SCALED: dict[str, Any] = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}

FAMILIES: dict[str, Callable[[], Any]] = {
    "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)),
    "llama-scaled": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, rope_parameters=SCALED)),
    "llama-yarn": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, rope_parameters=YARN)),
    "qwen2": lambda: transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**SIZES)),
    "qwen3": lambda: transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**HEADS)),
    "mistral-window": lambda: transformers.MistralForCausalLM(transformers.MistralConfig(**SIZES, sliding_window=7)),
    "mixtral": lambda: transformers.MixtralForCausalLM(transformers.MixtralConfig(**SIZES, **EXPERTS)),
    "gemma2": lambda: transformers.Gemma2ForCausalLM(transformers.Gemma2Config(**WINDOWS)),
    "gemma3": lambda: transformers.Gemma3ForCausalLM(transformers.Gemma3TextConfig(**WINDOWS)),
    "gpt-oss": lambda: transformers.GptOssForCausalLM(
        transformers.GptOssConfig(**WINDOWS, **EXPERTS, rope_parameters=YARN)
    ),
}


def MLA() -> Any:
    """A tiny DeepSeek-V3, which has latent attention."""
    config = transformers.DeepseekV3Config(
        **{**SIZES, "num_key_value_heads": 4},
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_shared_experts=1,
        first_k_dense_replace=1,
        n_group=1,
        topk_group=1,
        moe_intermediate_size=24,
        kv_lora_rank=16,
        q_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=16,
        v_head_dim=24,
    )
    return transformers.DeepseekV3ForCausalLM(config)


def save(folder: Path, build: Callable[[], Any]) -> Path:
    """Save a model of random weights with a tokenizer of bytes, whose token 257 ends a text."""
    torch.manual_seed(0)
    model = build()
    for name, parameter in model.named_parameters():
        if "sinks" in name:  # Transformers does not set these at random
            torch.nn.init.normal_(parameter)
    model.save_pretrained(folder)
    template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant: "
    write_tokenizer(folder, {"eos_token": "<e>", "bos_token": "<b>", "chat_template": template}, ["<b>", "<e>"])
    return folder


def eager(folder: Path, prompts: Sequence[Sequence[int]], count: int, **options: Any) -> list[list[int]]:
    """The tokens that Transformers' own eager attention generates greedily from each prompt alone, in float32."""
    loaded = transformers.AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", dtype=torch.float32
    ).eval()
    texts = []
    for prompt in prompts:
        given = torch.tensor([list(prompt)])
        with torch.no_grad():
            made = loaded.generate(
                given,
                attention_mask=torch.ones_like(given),
                do_sample=False,
                max_new_tokens=count,
                pad_token_id=0,
                **options,
            )
        texts.append(made[0, len(prompt) :].tolist())
    return texts
