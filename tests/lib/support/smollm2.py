"""Prompts to generate from with SmolLM2. For tests."""

from __future__ import annotations

from functools import cache

from gpu_actors.generation import LoadedModel, load_model

__all__ = ["PLAIN", "QUESTIONS", "loaded", "prompts"]

QUESTIONS = (
    "What is the capital of France?",
    "Why is the sky blue?",
    "Name three colours.",
    "Write a haiku about the sea.",
    "What is 12345 + 67890?",
    "Explain what a stack is to a child.",
    "Translate 'good morning' into Spanish.",
    "Who wrote Hamlet, and when?",
    "Give me a recipe for pancakes.",
    "¿Qué es la fotosíntesis?",
    "List the planets of the solar system.",
    "Is 91 a prime number? Think step by step.",
    "What does HTTP 404 mean?",
    "Schreibe einen Satz über Katzen. 😀",
)
"""Asked through the chat template."""

PLAIN = (
    "Once upon a time",
    "def fibonacci(n):\n    ",
    "The quick brown fox jumps over the lazy dog. " * 40,
    "1, 1, 2, 3, 5, 8, 13,",
    "To be, or not to be",
    "In 1969, Apollo 11",
)
"""Continued without a template. One has more tokens than a step takes."""


@cache
def loaded() -> LoadedModel:
    """The model, loaded once in a process because it takes seconds and half a gigabyte."""
    return load_model("smollm2")


def prompts() -> list[list[int]]:
    """All twenty prompts, as tokens."""
    _, _, tokenizer, template = loaded()
    assert template is not None
    texts = [template.render([{"role": "user", "content": question}]) for question in QUESTIONS]
    return [tokenizer.encode(text) for text in (*texts, *PLAIN)]
