"""The examples of docs/training.md, docs/transformers.md and docs/jax.md that need torch or JAX run unchanged."""

from __future__ import annotations

from typing import Any

import pytest
from support.docs import examples, run_example, wants_torch
from support.service import REPOSITORY

torch = pytest.importorskip("torch")


def run_page(page: str) -> dict[str, Any]:
    sources = [source for source in examples(REPOSITORY / page) if wants_torch(source)]
    assert sources
    names: dict[str, Any] = {}
    for number, source in enumerate(sources, 1):
        run_example(source, names, f"{page}, example {number}")
    return names


def test_the_example_of_torch_gives_gradients() -> None:
    names = run_page("docs/training.md")
    assert all(tensor.grad.abs().sum() > 0 for tensor in (names["q"], names["k"], names["v"]))
    assert names["slopes"].grad.abs().sum() > 0


def test_the_example_of_transformers_generates() -> None:
    pytest.importorskip("transformers")
    names = run_page("docs/transformers.md")
    assert names["texts"].shape == (1, 7)
    assert names["ctx"].stats()["flash_attn"].completed > 0
    assert [len(result.generated_tokens) for result in names["results"].values()] == [2, 2]


def test_the_example_of_jax_gives_gradients() -> None:
    pytest.importorskip("jax", reason="the page is about JAX")
    names = run_page("docs/jax.md")
    assert all(abs(gradient).sum() > 0 for gradient in names["gradients"])
