"""Tiny models of gpu_actors.generation, and engines on them. For tests."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from inside.generation import tensor_names
from safetensors.numpy import save_file

import gpu_actors as ga
from gpu_actors.generation import Engine, Generation, Llama, LlamaConfig, Settings, plain_logits, random_weights

EXAMPLES = Path(__file__).parents[3] / "examples"


def tiny(seed: int = 0, **sizes: int) -> Llama:
    """Two layers, 4 heads over 2 KV heads and head_dim 32, unless ``sizes`` says otherwise."""
    config = LlamaConfig.tiny(**{"hidden": 64, **sizes})
    return Llama(config, random_weights(config, seed))


def hugging_face_json(config: LlamaConfig, **changes: Any) -> dict[str, Any]:
    """A config.json with the sizes of ``config``."""
    return {
        "model_type": "llama",
        "hidden_act": "silu",
        "vocab_size": config.vocab,
        "hidden_size": config.hidden,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.intermediate,
        "max_position_embeddings": config.positions,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": 10000.0,
        "bos_token_id": 256,
        "eos_token_id": 257,
        "tie_word_embeddings": config.tied,
        **changes,
    }


def draw_tensors(config: LlamaConfig, dtype: Any, seed: int = 0) -> dict[str, Any]:
    """A model's tensors by Hugging Face's names."""
    rng = np.random.default_rng(seed)
    return {name: (0.2 * rng.standard_normal(shape)).astype(dtype) for name, shape in tensor_names(config).items()}


def write_safetensors(path: Path, tensors: dict[str, Any]) -> None:
    save_file({name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}, path, {"format": "pt"})


def write_model(folder: Path, config: LlamaConfig, dtype: Any = np.float32, **changes: Any) -> dict[str, Any]:
    """Write a model in Hugging Face's layout. Returns its tensors."""
    (folder / "config.json").write_text(json.dumps(hugging_face_json(config, **changes)))
    tensors = draw_tensors(config, dtype)
    write_safetensors(folder / "model.safetensors", tensors)
    return tensors


def write_tokenizer(folder: Path, config: Mapping[str, Any] | None = None, special: Sequence[str] = ()) -> Any:
    """Save a tokenizer of bytes, ids 0 to 255, then special tokens; and ``config`` as its tokenizer_config.json."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({character: token for token, character in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(special))
    tokenizer.save(str(folder / "tokenizer.json"))
    if config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return tokenizer


def write_scripted(folder: Path, follows: Mapping[int, int], vocab: int = 320, **changes: Any) -> None:
    """Write a model that generates after each token the one that ``follows`` names, or else the same token."""
    config = LlamaConfig.tiny(vocab=vocab, hidden=vocab, layers=1, heads=4, kv_heads=4, head_dim=vocab // 4)
    (folder / "config.json").write_text(json.dumps(hugging_face_json(config, **changes)))
    tensors = {name: np.zeros(shape, np.float32) for name, shape in tensor_names(config).items()}
    # The layer adds nothing, so each row remains its token's embedding.
    names = ("model.layers.0.input_layernorm.weight", "model.layers.0.post_attention_layernorm.weight")
    tensors |= {name: np.ones(vocab, np.float32) for name in (*names, "model.norm.weight")}
    tensors["model.embed_tokens.weight"] = np.eye(vocab, dtype=np.float32)
    for token in range(vocab):
        tensors["lm_head.weight"][follows.get(token, token), token] = 1
    write_safetensors(folder / "model.safetensors", tensors)


def prompts(count: int, longest: int = 40, seed: int = 0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 256, int(rng.integers(1, longest + 1))).tolist() for _ in range(count)]


def drift(model: Llama, generation: Generation, tokens: Sequence[int], dtype: Any) -> float:
    """The largest difference of a logit from the plain model's, in units of their standard deviation."""
    whole = np.array([*generation.prompt, *tokens[:-1]])
    expected = plain_logits(model, whole, dtype)[len(generation.prompt) - 1 :]
    logits = np.stack(generation.logits)
    assert logits.shape == expected.shape
    return float(np.abs(logits - expected).max() / expected.std())


async def generate_all(
    ctx: ga.GpuContext, model: Llama, prompts: list[list[int]], settings: Settings, new_tokens: int = 6
) -> tuple[list[Generation], list[list[int]], Any]:
    """Generations of all prompts at once, their tokens, and the engine's stats."""
    async with Engine.open(ctx, model, settings, keep_logits=True) as engine:
        generations = [engine.submit(prompt, max_new_tokens=new_tokens + n % 3) for n, prompt in enumerate(prompts)]
        tokens = [await generation.tokens() for generation in generations]
    return generations, tokens, engine.stats
