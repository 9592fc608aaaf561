"""Models of Hugging Face Transformers with random weights: the service against Transformers' eager attention."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import gpu_actors as ga
from gpu_actors import FlashAttnHandle

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
bridge = pytest.importorskip("gpu_actors.interop.transformers")
models: Any = pytest.importorskip("support.torch_models")
routed = pytest.importorskip("gpu_actors.interop.torch").routed

SIZES = {
    "vocab_size": 50,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
}
MODELS: dict[str, Any] = {
    "llama": lambda: transformers.LlamaConfig(**SIZES, head_dim=12),
    "mistral": lambda: transformers.MistralConfig(**SIZES, sliding_window=4),
    "gemma2": lambda: transformers.Gemma2Config(
        **SIZES, head_dim=8, sliding_window=4, attn_logit_softcapping=2.0, query_pre_attn_scalar=6
    ),
    "gpt_oss": lambda: transformers.GptOssConfig(
        **SIZES, head_dim=8, sliding_window=4, num_local_experts=2, num_experts_per_tok=1
    ),
    "deepseek_v3": lambda: transformers.DeepseekV3Config(
        **SIZES | {"num_key_value_heads": 4},
        q_lora_rank=16,
        kv_lora_rank=8,
        qk_nope_head_dim=16,
        qk_rope_head_dim=8,
        v_head_dim=20,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        moe_intermediate_size=16,
        first_k_dense_replace=1,
    ),
    "gemma4_text": lambda: transformers.Gemma4TextConfig(
        **SIZES,
        head_dim=16,
        global_head_dim=512,
        sliding_window=4,
        layer_types=["sliding_attention", "full_attention"],
        hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=50,
    ),
    "llama4_text": lambda: transformers.Llama4TextConfig(
        **SIZES,
        head_dim=8,
        attention_chunk_size=4,
        num_local_experts=2,
        intermediate_size_mlp=48,
        no_rope_layers=[1, 0],
    ),
}


@pytest.fixture(scope="module")
def ctx() -> Iterator[ga.GpuContext]:
    with ga.open_context("mock") as ctx:
        bridge.register(ctx)
        yield ctx
        assert ctx.flash_attn.restarts == 0


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def model_of(config: Any, auto: str = "AutoModelForCausalLM") -> Any:
    model = getattr(transformers, auto).from_config(config, attn_implementation="eager").eval()
    for name, parameter in model.named_parameters():
        if name.endswith("sinks"):  # left uninitialised by from_config
            torch.nn.init.normal_(parameter)
    return model


def both(ctx: ga.GpuContext, model: Any, run: Any) -> tuple[Any, Any]:
    """The results of a function of the model through the service, which must be asked, and with eager attention."""
    model.set_attn_implementation("eager")
    with torch.no_grad():
        wanted = run(model)
    model.set_attn_implementation("gpu_actors")
    before = ctx.stats()["flash_attn"].completed
    with torch.no_grad():
        got = run(model)
    assert ctx.stats()["flash_attn"].completed > before, "no attention ran through the service"
    return got, wanted


def same(got: Any, wanted: Any) -> None:
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=2e-5)


def tokens(*shape: int) -> Any:
    return torch.randint(1, 50, shape, generator=torch.Generator().manual_seed(1))


LEFT = torch.tensor([[1] * 9, [0] * 5 + [1] * 4, [0] * 1 + [1] * 8])
MASKS = {"none": None, "left": LEFT, "right": LEFT.flip(1), "holes": torch.tensor([[1, 1, 0, 1, 1, 1, 0, 0, 1]] * 3)}


@pytest.mark.parametrize("padding", MASKS)
@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_eager_attention_whatever_is_padding(ctx, name, padding):
    logits_agree(ctx, model_of(MODELS[name]()), MASKS[padding])


def logits_agree(ctx, model, mask):
    """Compare the logits of every token that is not padding with eager attention's."""
    ids = tokens(3, 9)
    got, wanted = both(ctx, model, lambda model: model(ids, attention_mask=mask).logits)
    kept = torch.ones(3, 9, dtype=torch.bool) if mask is None else mask.bool()
    same(got[kept], wanted[kept])


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", MODELS)
def test_texts_are_generated_as_by_eager_attention(ctx, name, cache):
    model, ids = model_of(MODELS[name]()), tokens(3, 9)

    def run(model: Any) -> Any:
        how = {} if cache == "dynamic" else {"cache_implementation": "static", "disable_compile": True}
        return model.generate(
            ids,
            attention_mask=LEFT,
            max_new_tokens=8,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
            pad_token_id=0,
            **how,
        )

    got, wanted = both(ctx, model, run)
    assert (got.sequences == wanted.sequences).all()
    for one, other in zip(got.logits, wanted.logits, strict=True):
        same(one, other)


def test_a_static_cache_without_a_mask_is_not_read_past_its_end(ctx):
    model, ids = model_of(MODELS["llama"]()), tokens(2, 6)

    def run(model: Any) -> Any:
        cache = transformers.StaticCache(config=model.config, max_cache_len=32)
        first = model(ids[:, :4], **{models.CACHE: cache}, use_cache=True).logits
        return torch.cat([first, model(ids[:, 4:], **{models.CACHE: cache}, use_cache=True).logits], 1)

    same(*both(ctx, model, run))


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The arguments of each request from now on."""
    seen: list[dict[str, Any]] = []
    send = FlashAttnHandle.forward

    def watch(self: Any, *operands: Any, **options: Any) -> Any:
        seen.append(options)
        return send(self, *operands, **options)

    monkeypatch.setattr(FlashAttnHandle, "forward", watch)
    return seen


def test_keys_are_given_without_repeating_them_for_every_head(ctx, asked):
    both(ctx, model_of(MODELS["llama"]()), lambda model: model(tokens(2, 5)).logits)
    shapes = {tuple(tuple(options[name].shape) for name in ("q", "k", "v")) for options in asked}
    assert shapes == {((2, 5, 4, 12), (2, 5, 2, 12), (2, 5, 2, 12))}


def test_windows_and_padding_are_given_as_such_and_not_written_out(ctx, asked):
    both(ctx, model_of(MODELS["mistral"]()), lambda model: model(tokens(3, 9), attention_mask=LEFT).logits)
    for options in asked:
        assert options["bias"] is None
        assert options["window_size"] == (3, 0)
        assert options["cu_seqlens_q"].tolist() == [0, 9, 13, 21]


@pytest.mark.parametrize("padding", ["none", "left", "right"])
def test_chunks_are_given_as_such_and_not_written_out(ctx, asked, padding):
    model = model_of(MODELS["llama4_text"]())
    both(ctx, model, lambda model: model(tokens(3, 9), attention_mask=MASKS[padding]).logits)
    assert [(options["attention_chunk"], options["bias"], options["causal"]) for options in asked] == [
        (4, None, True),
        (0, None, True),
    ]


def test_chunks_with_hidden_keys_in_between_are_written_out(ctx, asked):
    """Without the hidden keys, a chunk would reach further."""
    model = model_of(MODELS["llama4_text"]())
    logits_agree(ctx, model, MASKS["holes"])
    assert asked[0]["attention_chunk"] == 0
    assert asked[0]["bias"] is not None


FALCONS = {
    "alibi": {"alibi": True, "multi_query": True},
    "rope": {"alibi": False, "multi_query": True},
    "groups": {"alibi": False, "new_decoder_architecture": True, "num_kv_heads": 2},
}


@pytest.mark.parametrize("padding", MASKS)
@pytest.mark.parametrize("kind", FALCONS)
def test_a_model_that_calls_torchs_own_function_is_routed(ctx, kind, padding):
    """In Transformers 5.23 Falcon's eager attention adds ALiBi twice, so torch's is the measure."""
    sizes = {"vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.FalconConfig(**sizes, **FALCONS[kind])
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()
    ids, mask = tokens(3, 9), MASKS[padding]
    with torch.no_grad():
        wanted = model(ids, attention_mask=mask).logits
    before = ctx.stats()["flash_attn"].completed
    with torch.no_grad(), routed(ctx, model):
        got = model(ids, attention_mask=mask).logits
    assert ctx.stats()["flash_attn"].completed == before + 2
    kept = torch.ones(3, 9, dtype=torch.bool) if mask is None else mask.bool()
    same(got[kept], wanted[kept])


WINDOWED: dict[str, Any] = {
    "phimoe": lambda: transformers.PhimoeConfig(**SIZES, sliding_window=4, num_local_experts=2),
    "qwen2_moe": lambda: transformers.Qwen2MoeConfig(
        **SIZES,
        use_sliding_window=True,
        sliding_window=4,
        layer_types=["sliding_attention"] * 2,
        num_experts=2,
        num_experts_per_tok=1,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
    ),
}


@pytest.mark.parametrize("padding", MASKS)
@pytest.mark.parametrize("name", WINDOWED)
def test_a_window_that_attention_is_not_told_of_is_the_masks(ctx, name, padding):
    logits_agree(ctx, model_of(WINDOWED[name]()), MASKS[padding])


def test_a_window_that_attention_is_told_of_in_another_measure_is_the_masks(ctx):
    """T5Gemma's encoder passes the width of its mask, which does not count a row's own key."""
    sizes = {**SIZES, "head_dim": 8, "sliding_window": 4, "query_pre_attn_scalar": 8}
    parts = {part: transformers.T5GemmaModuleConfig(**sizes) for part in ("encoder", "decoder")}
    config = transformers.T5GemmaConfig(**parts, vocab_size=SIZES["vocab_size"], attention_dropout=0.0)
    model = model_of(config, "AutoModelForSeq2SeqLM")
    ids, answer = tokens(3, 9), tokens(3, 5)
    got, wanted = both(ctx, model, lambda model: model(input_ids=ids, decoder_input_ids=answer).logits)
    same(got, wanted)


def test_padding_within_the_window_of_a_static_cache_stays_hidden(ctx):
    """`generate` passes masks that it prepared earlier."""
    model, ids = model_of(MODELS["mistral"]()), tokens(3, 9)
    padding = torch.tensor([[1] * 9, [0] * 7 + [1] * 2, [0] * 8 + [1]])

    def run(model: Any) -> Any:
        how = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "output_logits": True}
        how |= {"cache_implementation": "static", "disable_compile": True, "return_dict_in_generate": True}
        return model.generate(ids, attention_mask=padding, **how)

    got, wanted = both(ctx, model, run)
    for one, other in zip(got.logits, wanted.logits, strict=True):
        same(one, other)


class TestPackedRows:
    """Two texts in one row: 5 and 4 tokens."""

    POSITIONS = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3]])

    def apart(self, model: Any, ids: Any) -> Any:
        return torch.cat([model(ids[:, :5]).logits, model(ids[:, 5:]).logits], 1)

    @pytest.mark.parametrize("name", ["llama", "mistral"])
    def test_texts_packed_in_a_row_are_told_apart_by_their_positions(self, ctx, name):
        model, ids = model_of(MODELS[name]()), tokens(1, 9)
        got, _ = both(ctx, model, lambda model: model(ids, position_ids=self.POSITIONS, use_cache=False).logits)
        _, wanted = both(ctx, model, lambda model: self.apart(model, ids))
        same(got, wanted)

    @pytest.mark.parametrize("name", ["llama", "mistral"])
    def test_texts_packed_in_a_row_are_told_apart_by_cu_seq_lens(self, ctx, name):
        model, ids = model_of(MODELS[name]()), tokens(1, 9)
        ends = torch.tensor([0, 5, 9])
        how = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": 5, "max_length_k": 5}

        def run(model: Any) -> Any:
            if model.config._attn_implementation == "eager":
                return self.apart(model, ids)
            return model(ids, position_ids=self.POSITIONS, use_cache=False, **how).logits

        same(*both(ctx, model, run))


class TestOtherMasks:
    def test_a_mask_of_ones_own_is_followed_whatever_it_is(self, ctx):
        model, ids = model_of(MODELS["llama"]()), tokens(2, 7)
        shown = torch.rand(2, 1, 7, 7) < 0.5
        shown |= torch.eye(7, dtype=torch.bool)
        hidden = torch.where(shown, 0.0, torch.finfo(torch.float32).min)
        got, wanted = both(ctx, model, lambda model: model(ids, attention_mask=hidden).logits)
        same(got, wanted)
        model.set_attn_implementation("gpu_actors")
        with torch.no_grad():
            same(model(ids, attention_mask=shown).logits, wanted)

    def test_an_encoder_sees_both_ways_and_no_padding(self, ctx):
        config = transformers.BertConfig(
            vocab_size=50, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48
        )
        model, ids = model_of(config, "AutoModel"), tokens(3, 9)
        got, wanted = both(ctx, model, lambda model: model(ids, attention_mask=LEFT.flip(1)).last_hidden_state)
        same(got[LEFT.flip(1).bool()], wanted[LEFT.flip(1).bool()])

    def test_an_encoder_with_a_window(self, ctx):
        config = transformers.ModernBertConfig(
            **{**SIZES, "num_hidden_layers": 3}, local_attention=4, pad_token_id=0, reference_compile=False
        )
        model, ids = model_of(config, "AutoModel"), tokens(3, 9)
        got, wanted = both(ctx, model, lambda model: model(ids, attention_mask=LEFT.flip(1)).last_hidden_state)
        same(got[LEFT.flip(1).bool()], wanted[LEFT.flip(1).bool()])


class TestTraining:
    @pytest.mark.parametrize("padding", ["none", "left"])
    @pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss"])
    def test_gradients_are_those_of_eager_attention(self, ctx, name, padding):
        model, ids, mask = model_of(MODELS[name]()), tokens(3, 9), MASKS[padding]
        # A text's first token is predicted by the row before it, which may be padding.
        begun = torch.ones_like(ids) if mask is None else mask * mask.roll(1, 1)
        labels = ids.masked_fill(begun == 0, -100)
        found = []
        for implementation in ("eager", "gpu_actors"):
            model.set_attn_implementation(implementation)
            model.zero_grad()
            model(ids, attention_mask=mask, labels=labels).loss.backward()
            found.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
        assert found[0].keys() == found[1].keys()
        for parameter, gradient in found[0].items():
            torch.testing.assert_close(found[1][parameter], gradient, rtol=1e-3, atol=1e-5, msg=parameter)

    def test_dropout_follows_torchs_generator(self, ctx):
        config = transformers.LlamaConfig(**SIZES, attention_dropout=0.5)
        model, ids = model_of(config).train(), tokens(2, 9)
        model.set_attn_implementation("gpu_actors")

        def run(seed: int) -> Any:
            torch.manual_seed(seed)
            with torch.no_grad():
                return model(ids).logits

        assert torch.equal(run(3), run(3))
        assert not torch.equal(run(3), run(4))


class TestRefusals:
    def test_the_thread_of_a_running_loop_is_not_blocked(self, ctx):
        model = model_of(MODELS["llama"]())
        model.set_attn_implementation("gpu_actors")

        async def main() -> Any:
            with pytest.raises(ga.WouldBlock):
                model(tokens(1, 3))
            with torch.no_grad():
                return await asyncio.to_thread(lambda: model(tokens(1, 3)).logits)

        assert asyncio.run(main()).shape == (1, 3, 50)

    def test_a_closed_context_answers_no_more(self):
        with ga.open_context("mock") as closed:
            bridge.register(closed, "closed")
        model = model_of(MODELS["llama"]())
        model.set_attn_implementation("closed")
        with pytest.raises(ga.ActorStopped):
            model(tokens(1, 3))

    def test_what_is_no_context_or_name_is_refused_by_name(self, ctx):
        with pytest.raises(ga.InvalidRequest, match="context"):
            bridge.register("mock")
        for name in ("", "paged|gpu_actors", None):
            with pytest.raises(ga.InvalidRequest, match="name"):
                bridge.register(ctx, name)

    def test_a_dtype_that_no_kernel_takes_is_refused_by_the_service(self, ctx):
        query = torch.ones(1, 2, 3, 4, dtype=torch.int32)
        module = torch.nn.Module()
        with pytest.raises(ga.Unsupported, match="dtype"):
            transformers.AttentionInterface()["gpu_actors"](module, query, query, query, None)


# Models that compute attention themselves

OF_THEIR_OWN: dict[str, dict[str, Any]] = {
    "falcon": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4},
    "bloom": {"hidden_size": 32, "n_layer": 2, "n_head": 4},
    "mpt": {"d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 64},
    "xglm": {"d_model": 32, "num_layers": 2, "attention_heads": 4, "ffn_dim": 32, "max_position_embeddings": 64},
}
TOKENS = {"vocab_size": 50, "bos_token_id": 1, "eos_token_id": 2}


def own_config(family: str) -> Any:
    return transformers.AutoConfig.for_model(family, **TOKENS, **OF_THEIR_OWN[family])


@pytest.mark.parametrize("family", OF_THEIR_OWN)
def test_a_model_that_cannot_switch_is_refused_and_stays_on_eager(ctx: ga.GpuContext, family: str) -> None:
    model = model_of(own_config(family))
    with pytest.raises(ga.Unsupported, match="code of its own") as caught:
        bridge.register(ctx, model=model)
    assert caught.value.field == "model"
    assert caught.value.value == type(model).__name__
    assert model.config._attn_implementation == "eager"


@pytest.mark.parametrize("family", ["bloom", "mpt", "xglm"])
def test_a_model_that_takes_only_the_mask_is_refused(ctx: ga.GpuContext, family: str) -> None:
    """Such a model reads a missing mask as one that hides nothing, so that each token would see later ones."""
    config = own_config(family)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="gpu_actors").eval()
    with pytest.raises(ga.Unsupported, match="code of its own") as caught:
        model(torch.arange(8)[None])
    assert caught.value.field == "attn_implementation"


def test_a_model_is_switched_as_it_is_registered(ctx: ga.GpuContext) -> None:
    model = model_of(MODELS["llama"]())
    assert bridge.register(ctx, model=model) == "gpu_actors"
    assert model.config._attn_implementation == "gpu_actors"
    before = ctx.stats()["flash_attn"].completed
    model(torch.arange(8)[None])
    assert ctx.stats()["flash_attn"].completed == before + 2
    with pytest.raises(ga.InvalidRequest, match="PreTrainedModel"):
        bridge.register(ctx, model=torch.nn.Linear(2, 2))


def test_the_documented_families_are_those_that_cannot_switch() -> None:
    page = (Path(ga.__file__).parents[1] / "docs/transformers.md").read_text()
    version = re.search(r"causal language models of\s+Transformers\s+(\S+)\s+these\s+are", page)
    assert version is not None
    mapping = transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    classes = {family: name if isinstance(name, str) else name[0] for family, name in mapping.items()}
    stuck = {
        family for family, name in classes.items() if not getattr(transformers, name)._can_set_attn_implementation()
    }
    named = set(re.findall("`([a-z0-9_-]+)`", page[version.end() :].split("\n\n")[0]))
    assert named & set(classes) <= stuck
    assert transformers.__version__ != version[1] or named == stuck
