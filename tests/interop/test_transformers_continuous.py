"""Transformers' continuous batching over its paged cache, with a context's attention: the tokens are the same."""

from __future__ import annotations

import copy
import pickle
import re
from collections.abc import Iterator
from typing import Any

import pytest

import gpu_actors as ga

torch = pytest.importorskip("torch", reason="Transformers' models are torch's")
transformers = pytest.importorskip("transformers", reason="its continuous batching is what is tested")
bridge = pytest.importorskip("gpu_actors.interop.transformers")
pages: Any = pytest.importorskip("gpu_actors.interop.transformers_pages")

SIZES: dict[str, Any] = {
    "vocab_size": 60,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
MODELS = {
    "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)),
    "windows": lambda: transformers.MistralForCausalLM(transformers.MistralConfig(**SIZES, sliding_window=4)),
    "both": lambda: transformers.Qwen2ForCausalLM(
        transformers.Qwen2Config(**SIZES, use_sliding_window=True, sliding_window=4, max_window_layers=1)
    ),
}
WINDOW: dict[str, Any] = {"head_dim": 8, "sliding_window": 5}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
TYPES = ["sliding_attention", "full_attention"]
# Each against eager alone: sdpa has no softcap and no sinks.
OTHERS = {
    "scaled rope": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, rope_parameters=LLAMA3)),
    "qwen3": lambda: transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SIZES, head_dim=8)),
    "mistral": lambda: transformers.MistralForCausalLM(transformers.MistralConfig(**SIZES, **WINDOW)),
    "gemma2": lambda: transformers.Gemma2ForCausalLM(transformers.Gemma2Config(**SIZES, **WINDOW)),
    "gemma3": lambda: transformers.Gemma3ForCausalLM(
        transformers.Gemma3TextConfig(**SIZES, **WINDOW, layer_types=TYPES)
    ),
    "gpt-oss": lambda: transformers.GptOssForCausalLM(
        transformers.GptOssConfig(**SIZES, **WINDOW, num_local_experts=4, num_experts_per_tok=2)
    ),
}
SHARED = [7, 3, 9, 9, 1, 4, 4, 2]
PROMPTS = [[5, 6, 7, 8, 9], [11, 12], [*SHARED, *SHARED, 3], [*SHARED, *SHARED, 8, 8]]
GREEDY = transformers.GenerationConfig(max_new_tokens=6, do_sample=False, eos_token_id=-1, pad_token_id=0)


@pytest.fixture(scope="module")
def ctx() -> Iterator[ga.GpuContext]:
    with ga.open_context("mock") as ctx:
        yield ctx


def batching(page_size: int) -> Any:
    """24 tokens a batch: prompts are cut, and prefill and decoding share forward passes."""
    return transformers.ContinuousBatchingConfig(num_blocks=128 // page_size, page_size=page_size, max_batch_tokens=24)


def generated(model: Any, page_size: int = 8) -> dict[str, Any]:
    """The requests' results."""
    found = model.generate_batch(
        PROMPTS,
        generation_config=GREEDY,
        continuous_batching_config=batching(page_size),
        progress_bar=False,
    )
    assert len(found) == len(PROMPTS)
    return {name: (result.generated_tokens, result.error) for name, result in found.items()}


@pytest.mark.parametrize("family", MODELS)
def test_tokens_are_those_of_transformers_own_implementations(ctx: ga.GpuContext, family: str) -> None:
    torch.manual_seed(0)
    model = MODELS[family]().eval()
    model.set_attn_implementation("eager")
    expected = generated(model)
    assert all(len(tokens) == 6 and error is None for tokens, error in expected.values())
    before = ctx.stats()["flash_attn"].completed
    with bridge.continuous_batching(ctx, model):
        assert generated(model) == expected
    passes = ctx.stats()["flash_attn"].completed - before
    assert passes >= 2 * 6  # layers and steps
    model.set_attn_implementation("sdpa")
    assert generated(model) == expected
    assert ctx.stats()["flash_attn"].completed == before + passes


@pytest.mark.parametrize("page_size", [4, 8])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", OTHERS)
def test_tokens_are_those_of_eager_attention(ctx: ga.GpuContext, family: str, dtype: str, page_size: int) -> None:
    torch.manual_seed(0)
    model = OTHERS[family]().eval().to(getattr(torch, dtype))
    for sinks in (value for name, value in model.named_parameters() if name.endswith("sinks")):
        torch.nn.init.normal_(sinks)
    model.set_attn_implementation("eager")
    expected = generated(model, page_size)
    assert all(len(tokens) == 6 and error is None for tokens, error in expected.values())
    with bridge.continuous_batching(ctx, model):
        assert generated(model, page_size) == expected


def test_a_context_in_a_process_of_its_own_gets_copies() -> None:
    torch.manual_seed(0)
    model = MODELS["both"]().eval()
    model.set_attn_implementation("eager")
    expected = generated(model)
    with ga.open_context("mock", isolation="process") as isolated, bridge.continuous_batching(isolated, model):
        assert generated(model) == expected


def test_the_model_has_its_own_implementation_again(ctx: ga.GpuContext) -> None:
    model = MODELS["llama"]()
    model.set_attn_implementation("eager")

    def fail() -> None:
        with bridge.continuous_batching(ctx, model):
            assert re.fullmatch("gpu_actors_[0-9]+_flash", model.config._attn_implementation)
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert model.config._attn_implementation == "eager"
    assert model.model.config._attn_implementation == "eager"


def test_models_with_a_context_each_generate_at_once(ctx: ga.GpuContext) -> None:
    torch.manual_seed(0)
    first, second = (MODELS["llama"]().eval() for _ in range(2))
    known = set(transformers.AttentionInterface().valid_keys())
    with bridge.continuous_batching(ctx, first):
        before = ctx.stats()["flash_attn"].completed
        with ga.open_context("mock") as other, bridge.continuous_batching(other, second):
            generated(second)
            assert ctx.stats()["flash_attn"].completed == before
        assert all(error is None for _, error in generated(first).values())
        assert ctx.stats()["flash_attn"].completed > before
    assert set(transformers.AttentionInterface().valid_keys()) == known


def test_an_error_of_the_context_is_the_error_of_its_requests() -> None:
    torch.manual_seed(0)
    model = MODELS["llama"]().eval()
    with ga.open_context("mock") as closed:
        pass
    with bridge.continuous_batching(closed, model):
        found = generated(model)
    assert all("is not open in this process" in error for _, error in found.values())


def test_what_is_no_context_or_model_and_a_cache_of_another_kind_are_refused(ctx: ga.GpuContext) -> None:
    with pytest.raises(ga.InvalidRequest, match="GpuContext"), bridge.continuous_batching("mock", MODELS["llama"]()):
        pass
    with pytest.raises(ga.InvalidRequest, match="PreTrainedModel"), bridge.continuous_batching(ctx, torch.nn.ReLU()):
        pass
    query = torch.ones(1, 2, 3, 4)
    bridge.register(ctx, "paged_test")
    attend = transformers.AttentionInterface()["paged_test"]
    with pytest.raises(ga.Unsupported, match="no paged cache"):
        attend(torch.nn.Module(), query, query, query, None, cache=object())
    with pytest.raises(ga.Unsupported, match=r"cache=None.*loses its earlier keys"):
        attend(torch.nn.Module(), query, query, query, None, read_index=[])


def test_a_cache_is_its_own_again_after_a_pass(ctx: ga.GpuContext, monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer that updated the cache itself, as from Transformers 5.24 on, would copy all keys."""
    caches = []
    paged = pages.PagedAttention.attend

    def look(self: Any, *given: Any) -> Any:
        caches.extend(cache for cache, one in bridge._PAGED.items() if one is self and cache not in caches)
        return paged(self, *given)

    monkeypatch.setattr(pages.PagedAttention, "attend", look)
    torch.manual_seed(0)
    model = MODELS["llama"]().eval()
    with bridge.continuous_batching(ctx, model):
        generated(model)
        assert ["update" in vars(cache) for cache in caches] == [True]
        model.config._attn_implementation = "flash_attention_2"  # which needs no masks
        with bridge.continuous_batching(ctx, model):
            generated(model)
        assert ["update" in vars(cache) for cache in caches] == [True, False]
    assert vars(caches[0])["update"] is bridge._refuse_update
    assert not model._forward_pre_hooks


def test_a_manager_that_is_kept_generates_in_blocks_within_each_other_and_after_them(ctx: ga.GpuContext) -> None:
    torch.manual_seed(0)
    model = MODELS["llama"]().eval()
    model.set_attn_implementation("eager")
    expected = generated(model)["req_0"]
    manager = model.init_continuous_batching(generation_config=GREEDY, continuous_batching_config=batching(8))
    manager.start()
    former = model.config._attn_implementation

    def generates() -> None:
        result = manager.get_result(manager.add_request(PROMPTS[0], max_new_tokens=6), timeout=60)
        assert (result.generated_tokens, result.error) == expected

    generates()  # which makes the manager's masks
    with ga.open_context("mock") as other:
        with bridge.continuous_batching(ctx, model):
            generates()
            with bridge.continuous_batching(other, model):
                generates()
            generates()
        assert model.config._attn_implementation == former
        generates()
        with bridge.continuous_batching(other, model):
            generates()
        manager.stop(block=True)


@pytest.mark.parametrize("when", ["in the block", "a copy after it", "a pickle after it"])
def test_another_implementation_reads_all_keys(ctx: ga.GpuContext, when: str) -> None:
    torch.manual_seed(0)
    model = MODELS["llama"]().eval()
    model.set_attn_implementation("eager")
    expected = generated(model)
    with bridge.continuous_batching(ctx, model):
        manager = model.init_continuous_batching(generation_config=GREEDY, continuous_batching_config=batching(8))
        manager.start()
        assert manager.get_result(manager.add_request(PROMPTS[0], max_new_tokens=6), timeout=60).error is None
        if when == "in the block":
            model.set_attn_implementation("eager")
            assert generated(model) == expected
        elif when == "a copy after it":
            model = copy.deepcopy(model)
        else:
            model = pickle.loads(pickle.dumps(model))
        manager.stop(block=True)
    model.set_attn_implementation("eager")
    assert generated(model) == expected


def test_a_manager_of_a_block_generates_nothing_without_masks_after_it(ctx: ga.GpuContext) -> None:
    """It makes no masks, without which eager attention and sdpa see later rows and other requests."""
    torch.manual_seed(0)
    model = MODELS["llama"]().eval()
    model.set_attn_implementation("eager")
    expected = generated(model)["req_0"]

    def generates(manager: Any) -> Any:
        result = manager.get_result(manager.add_request(PROMPTS[0], max_new_tokens=6), timeout=60)
        return result.generated_tokens, result.error

    with bridge.continuous_batching(ctx, model):
        manager = model.init_continuous_batching(generation_config=GREEDY, continuous_batching_config=batching(8))
        manager.start()
        assert generates(manager) == expected
    with bridge.continuous_batching(ctx, model):
        assert generates(manager) == expected
    assert "make another manager" in generates(manager)[1]
    manager.stop(block=True)
    assert generated(model)["req_0"] == expected
