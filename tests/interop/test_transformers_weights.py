"""The engine on weights written by Transformers: every logit of a generated text agrees with Transformers'."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gpu_actors as ga
from gpu_actors.generation import Engine, Llama, LlamaConfig, Settings, load_weights, plain_logits

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

SIZES = {
    "vocab_size": 60,
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 80,
    "max_position_embeddings": 256,
}
ROTATIONS: dict[str, dict[str, Any]] = {
    "default": {"rope_theta": 10000.0, "rope_type": "default"},
    "linear": {"rope_theta": 500.0, "rope_type": "linear", "factor": 4.0},
    "llama3": {
        "rope_theta": 500000.0,
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
}


def written(folder: Path, **changes: Any) -> tuple[Any, Llama]:
    """A random model of Transformers, and ours from its saved files."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**{**SIZES, **changes})
    model = transformers.LlamaForCausalLM(config).eval()
    model.save_pretrained(folder)
    ours = LlamaConfig.load(folder)
    return model, Llama(ours, load_weights(folder, ours))


@pytest.mark.parametrize("rotation", ROTATIONS)
@pytest.mark.parametrize("tied", [False, True])
def test_the_plain_model_is_transformers_model(tmp_path, rotation, tied):
    model, ours = written(tmp_path, rope_parameters=ROTATIONS[rotation], tie_word_embeddings=tied)
    tokens = np.random.default_rng(0).integers(0, 60, 200)
    with torch.no_grad():
        wanted = model(torch.from_numpy(tokens)[None]).logits[0].numpy()
    np.testing.assert_allclose(plain_logits(ours, tokens), wanted, rtol=1e-3, atol=2e-5)


async def test_generated_texts_are_transformers_own(tmp_path):
    model, ours = written(tmp_path, rope_parameters=ROTATIONS["llama3"], eos_token_id=None)
    rng = np.random.default_rng(1)
    prompts = [rng.integers(0, 60, length).tolist() for length in (1, 7, 30)]
    async with (
        ga.open_context("mock") as ctx,
        Engine.open(ctx, ours, Settings(blocks=64, rows=16), keep_logits=True) as engine,
    ):
        begun = [engine.submit(prompt, max_new_tokens=12) for prompt in prompts]
        texts = [await generation.tokens() for generation in begun]
    for prompt, generation, tokens in zip(prompts, begun, texts, strict=True):
        made = torch.tensor([[*prompt, *tokens[:-1]]])
        with torch.no_grad():
            wanted = model(made).logits[0, len(prompt) - 1 :].numpy()
        got = np.stack(generation.logits)
        assert np.abs(got - wanted).max() < 1e-5 * wanted.std()
        assert tokens == [int(row.argmax()) for row in got]
