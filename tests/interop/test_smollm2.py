"""SmolLM2 generates the same tokens as Transformers from the same GGUF file, however requests are batched."""

from __future__ import annotations

import functools
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from inside.generation import installed
from support.openai_server import Serving
from support.smollm2 import loaded, prompts

import gpu_actors as ga
from gpu_actors.generation import Engine, Settings

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")  # Transformers reads GGUF with it

pytestmark = pytest.mark.timeout(1800)

TIE = 1e-4
"""The difference between two tokens' logits within which sums in another order may swap them."""

SETTINGS = Settings(blocks=30 * 16 * 30)


@functools.cache
def transformers_model() -> Any:
    path = installed()
    return transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    ).eval()


@functools.cache
def expected(prompt: tuple[int, ...], count: int) -> list[int]:
    """The tokens that Transformers generates greedily up to the model's end of text."""
    given = torch.tensor([prompt])
    with torch.no_grad():
        made = transformers_model().generate(
            given, attention_mask=torch.ones_like(given), do_sample=False, max_new_tokens=count, eos_token_id=2
        )
    return made[0, len(prompt) :].tolist()  # type: ignore[no-any-return]


def expect_same(prompt: list[int], found: list[int], count: int, how: str) -> None:
    """Compare tokens with Transformers'. At the first difference, their logits must be within TIE."""
    wanted = expected(tuple(prompt), count)
    # A text that ends by itself includes its end token in both.
    if found == wanted:
        return
    at = next((at for at, pair in enumerate(zip(found, wanted, strict=False)) if pair[0] != pair[1]), None)
    assert at is not None, f"{how}: {len(found)} tokens where Transformers has {len(wanted)}"
    with torch.no_grad():
        logits = transformers_model()(torch.tensor([[*prompt, *wanted[:at]]])).logits[0, -1].numpy()
    gap = float(logits[wanted[at]] - logits[found[at]])
    sys.stdout.write(f"{how}: token {at} is {found[at]}, Transformers' is {wanted[at]}, its logit {gap:.2e} larger\n")
    assert 0 <= gap < TIE, how


async def hold(device: str, given: list[list[int]], count: int) -> None:
    """Check prompts one after another without shared prefixes, then with cached prefixes, then 16 at once."""
    model = loaded().model
    whole = replace(SETTINGS, share_prefixes=False)
    async with ga.open_context(device) as ctx, Engine.open(ctx, model, whole) as engine:
        for prompt in given:
            expect_same(prompt, await engine.submit(prompt, max_new_tokens=count).tokens(), count, "alone")
        assert engine.stats.cached == 0
    async with ga.open_context(device) as ctx, Engine.open(ctx, model, SETTINGS) as engine:
        for prompt in given:
            await engine.submit(prompt, max_new_tokens=1).tokens()
            generation = engine.submit(prompt, max_new_tokens=count)
            expect_same(prompt, await generation.tokens(), count, "cached prefix")
            assert generation.cached >= len(prompt) - SETTINGS.page_size
    async with ga.open_context(device) as ctx, Engine.open(ctx, model, SETTINGS) as engine:
        for first in range(0, len(given), 16):
            some = given[first : first + 16]
            begun = [engine.submit(prompt, max_new_tokens=count) for prompt in some]
            for prompt, generation in zip(some, begun, strict=True):
                expect_same(prompt, await generation.tokens(), count, "16 at once")
        assert engine.stats.most_texts == min(16, len(given))


def test_the_weights_are_transformers_own() -> None:
    """Transformers reads the file with code of its own."""
    theirs, ours = transformers_model().state_dict(), loaded().model.weights
    for layer in (0, 29):
        for field, name in {"q": "self_attn.q_proj", "k": "self_attn.k_proj", "down": "mlp.down_proj"}.items():
            matrix = getattr(ours.layers[layer], field)
            np.testing.assert_array_equal(matrix.T, theirs[f"model.layers.{layer}.{name}.weight"].numpy())
    np.testing.assert_array_equal(ours.embedding, theirs["model.embed_tokens.weight"].numpy())


async def test_a_few_greedy_texts_are_transformers_own() -> None:
    chosen = prompts()
    await hold("mock", [chosen[0], chosen[9], chosen[14]], 8)


def test_the_tokens_of_a_prompt_are_transformers_own() -> None:
    """Except digits, which the model's own tokenizer splits and Transformers does not."""
    path = installed()
    theirs = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    for text in ("Hello, world!", "¿Qué es   la fotosíntesis? 😀\n\n\tdef f(x):", "<|im_start|>user\nHi<|im_end|>\n"):
        assert loaded().tokenizer.encode(text) == theirs.encode(text)
    assert len(loaded().tokenizer.encode("12345")) == 5


@pytest.mark.sweep
async def test_twenty_greedy_texts_of_64_tokens_are_transformers_own() -> None:
    assert len(prompts()) == 20
    await hold("mock", prompts(), 64)


@pytest.mark.sweep
@pytest.mark.parametrize("stream", [False, True])
def test_twenty_texts_of_the_server_are_transformers_own(stream: bool) -> None:
    tokenizer = loaded().tokenizer

    def text_of(tokens: list[int]) -> str:
        pieces = tokenizer.stream()
        return "".join(pieces.feed(token) for token in tokens if token != 2) + pieces.end()

    with Serving(models=("smollm2",)) as serving:
        for prompt in prompts():
            asked = {"model": "smollm2", "prompt": prompt, "max_tokens": 64, "temperature": 0}
            if stream:
                events = serving.stream("/v1/completions", asked)
                found = "".join(choice["text"] for event in events for choice in event["choices"])
            else:
                found = serving.post("/v1/completions", asked).json["choices"][0]["text"]
            wanted = text_of(expected(tuple(prompt), 64))
            if found != wanted:
                tokens = tokenizer.encode(found)
                expect_same(prompt, tokens, 64, f"server, stream={stream}")


async def test_the_first_token_on_the_emulated_device_is_transformers_own() -> None:
    prompt = prompts()[0]
    async with ga.open_context("emulated") as ctx, Engine.open(ctx, loaded().model, Settings(blocks=30 * 3)) as engine:
        found = await engine.submit(prompt, max_new_tokens=1).tokens()
        assert ctx.stats()["kv_cache"].launched == 30
    expect_same(prompt, found, 1, "emulated")
