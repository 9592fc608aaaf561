"""The examples of docs/training.md and docs/transformers.md that want torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from docs_support import examples, run_example, wants_torch
from service_support import REPOSITORY

import gpu_actors as ga

torch = pytest.importorskip("torch")


def run_page(page: str, names: dict[str, Any]) -> dict[str, Any]:
    sources = [source for source in examples(REPOSITORY / page) if wants_torch(source)]
    assert sources
    for number, source in enumerate(sources, 1):
        run_example(source, names, f"{page}, example {number}")
    return names


def test_the_example_of_torch_gives_gradients() -> None:
    q, k, v = (torch.randn(1, 4, 2, 8, requires_grad=True) for _ in range(3))
    run_page("docs/training.md", {"ga": ga, "q": q, "k": k, "v": v, "step": 3})
    assert all(tensor.grad is not None and tensor.grad.abs().sum() > 0 for tensor in (q, k, v))


def test_the_example_of_transformers_generates(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 48}
    config = transformers.LlamaConfig(vocab_size=50, max_position_embeddings=64, **sizes)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    inputs = {"input_ids": torch.ones((1, 5), dtype=torch.int64), "max_new_tokens": 2}
    names = {"ga": ga, "AutoModelForCausalLM": transformers.AutoModelForCausalLM, "folder": tmp_path, "inputs": inputs}
    assert run_page("docs/transformers.md", names)["ctx"].stats()["flash_attn"].completed > 0
