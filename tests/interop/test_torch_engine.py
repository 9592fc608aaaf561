"""The torch engine: Transformers' continuous batching with a context's attention generates as its eager models do."""

from __future__ import annotations

import gc
import json
import math
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from support.service import comes_true

import gpu_actors as ga
from gpu_actors.generation import Sampling

torch = pytest.importorskip("torch", reason="the engine runs models of torch")
transformers = pytest.importorskip("transformers", reason="it runs them by Transformers")
torch_engine: Any = pytest.importorskip("gpu_actors.generation.torch_engine")
models: Any = pytest.importorskip("support.torch_models")

pytestmark = pytest.mark.timeout(300)

RNG = np.random.default_rng(0)
SHARED = RNG.integers(0, 256, 40).tolist()
PROMPTS = [
    [5, 6, 7],
    [11],
    [*SHARED, 3],
    [*SHARED, 8, 8],
    RNG.integers(0, 256, 100).tolist(),
    RNG.integers(0, 256, 17).tolist(),
]
FAST = ga.ContextOptions(mock=ga.MockOptions(dtype="float32"))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = models.save(tmp_path_factory.mktemp("llama"), models.FAMILIES["llama"])
    return folder


@asynccontextmanager
async def opened(folder: Path, device: str = "mock", **sizes: Any) -> AsyncIterator[Any]:
    """An engine with few rows and pages, so that prompts are cut, and prefill and decoding share steps."""
    options = FAST if device == "mock" else None
    async with ga.open_context(device, options=options) as ctx:
        loaded = torch_engine.load_torch_model(folder, ctx)
        sizes = {"texts": 8, "rows": 24, "cache_mib": 1, **sizes}
        async with torch_engine.TorchEngine.open(ctx, loaded, **sizes) as engine:
            yield engine


def idle(engine: Any) -> bool:
    """Whether no text is left and every page is free."""
    blocks, free, shared = engine.pages()
    return (engine.running, engine.waiting, free, shared) == (0, 0, blocks, 0)


@pytest.mark.parametrize("family", models.FAMILIES)
async def test_greedy_tokens_are_those_of_eager_attention(tmp_path: Path, family: str) -> None:
    folder = models.save(tmp_path, models.FAMILIES[family])
    wanted = models.eager(folder, PROMPTS, 24)
    async with opened(folder) as engine:
        generations = [engine.submit(prompt, max_new_tokens=24) for prompt in PROMPTS]
        assert [await generation.tokens() for generation in generations] == wanted
        assert engine.stats.most_texts == len(PROMPTS)
        ends = ["stop" if tokens[-1] == 257 else "length" for tokens in wanted]
        assert [generation.reason for generation in generations] == ends
        # Each again, alone, with the cached pages of its prefix.
        for prompt, tokens in zip(PROMPTS, wanted, strict=True):
            assert await engine.submit(prompt, max_new_tokens=24).tokens() == tokens
        await comes_true(lambda: idle(engine))


async def test_the_kernels_on_the_emulated_device_generate_the_same(llama: Path) -> None:
    wanted = models.eager(llama, PROMPTS[:2], 3)
    async with opened(llama, "emulated") as engine:
        generations = [engine.submit(prompt, max_new_tokens=3) for prompt in PROMPTS[:2]]
        assert [await generation.tokens() for generation in generations] == wanted


async def test_weights_of_bfloat16_generate_what_eager_attention_does(llama: Path) -> None:
    """Its rounding differs from that of eager attention, so the first tokens are compared."""
    async with ga.open_context("mock") as ctx:
        loaded = torch_engine.load_torch_model(llama, ctx, dtype="bfloat16")
        assert (loaded.stored, loaded.dtype, loaded.model.dtype) == ("float32", "bfloat16", torch.bfloat16)
        own = transformers.AutoModelForCausalLM.from_pretrained(
            llama, attn_implementation="eager", dtype=torch.bfloat16
        )
        async with torch_engine.TorchEngine.open(ctx, loaded, texts=4, rows=24, cache_mib=1) as engine:
            for prompt in PROMPTS:
                scored = Sampling(top_logprobs=5)
                generation = engine.submit(prompt, max_new_tokens=1, sampling=scored)
                (token,) = await generation.tokens()
                with torch.no_grad():
                    logits = own(torch.tensor([prompt])).logits[0, -1].float()
                assert float(logits.max() - logits[token]) < 0.05
                wanted = float(logits.log_softmax(0)[token])
                assert generation.scores[0].chosen == pytest.approx(wanted, abs=0.05)


async def test_a_prompt_that_begins_as_another_is_not_computed_again(llama: Path) -> None:
    async with opened(llama) as engine:
        first = engine.submit(PROMPTS[2], max_new_tokens=4)
        await first.tokens()
        before = engine.stats.rows
        again = engine.submit(PROMPTS[3], max_new_tokens=4)
        await again.tokens()
        assert (first.cached, again.cached, engine.stats.cached) == (0, 32, 32)  # whole pages
        assert engine.stats.rows - before == len(PROMPTS[3]) - 32 + 3


async def test_more_texts_than_the_cache_has_pages_for_all_end(llama: Path) -> None:
    """Transformers takes pages from one text for another, and computes the first again later."""
    prompts = [RNG.integers(0, 256, 20).tolist() for _ in range(8)]
    wanted = models.eager(llama, prompts, 60)
    async with opened(llama) as engine:
        engine._cache.pool.free_sectors[12:] = []  # each text needs 5
        generations = [engine.submit(prompt, max_new_tokens=60) for prompt in prompts]
        assert [await generation.tokens() for generation in generations] == wanted
        assert engine.stats.rows > 8 * (20 + 59), "no text was computed again"


# Sampling


async def test_a_seed_gives_the_same_text_whatever_runs_beside_it(llama: Path) -> None:
    warm = Sampling(temperature=1.3, top_p=0.95, seed=11)
    async with opened(llama) as engine:
        alone = await engine.submit(PROMPTS[0], max_new_tokens=20, sampling=warm).tokens()
        others = [engine.submit(prompt, max_new_tokens=20, sampling=Sampling(temperature=1.0)) for prompt in PROMPTS]
        beside = await engine.submit(PROMPTS[0], max_new_tokens=20, sampling=warm).tokens()
        for other in others:
            await other.tokens()
        free = Sampling(temperature=1.3, top_p=0.95, seed=None)
        texts = [await engine.submit(PROMPTS[0], max_new_tokens=20, sampling=free).tokens() for _ in range(3)]
    assert alone == beside
    assert len({tuple(text) for text in (alone, *texts)}) == 4


def test_tokens_are_drawn_by_their_weights_alone() -> None:
    weights = torch.tensor([0.5, 0.25, 0.15, 0.1])
    draws = 20_000

    def frequencies(**options: Any) -> list[float]:
        sampling = Sampling(**options)
        request = torch_engine._Request(None, None, sampling, None)
        torch.manual_seed(1)
        tokens = torch_engine._draw(weights.log().expand(draws, 4), [request] * draws)
        return (tokens.bincount(minlength=4) / draws).tolist()  # type: ignore[no-any-return]

    assert frequencies(temperature=1.0) == pytest.approx([0.5, 0.25, 0.15, 0.1], abs=0.015)
    squared = weights.square() / weights.square().sum()
    assert frequencies(temperature=0.5) == pytest.approx(squared.tolist(), abs=0.015)
    # The tokens before the third have less than 0.8 together, those before the fourth more.
    assert frequencies(temperature=1.0, top_p=0.8) == pytest.approx([0.5 / 0.9, 0.25 / 0.9, 0.15 / 0.9, 0], abs=0.015)
    assert frequencies(temperature=1.0, top_p=1e-9) == [1, 0, 0, 0]
    assert frequencies(temperature=1e-300) == [1, 0, 0, 0]


async def test_scores_are_those_of_the_model(llama: Path) -> None:
    own = transformers.AutoModelForCausalLM.from_pretrained(llama, attn_implementation="eager", dtype=torch.float32)
    async with opened(llama) as engine:
        scored = Sampling(temperature=0.8, seed=3, top_logprobs=3)
        generation = engine.submit(PROMPTS[4], max_new_tokens=5, sampling=scored)
        tokens = await generation.tokens()
        chosen = Sampling(top_logprobs=0)
        plain = engine.submit([1, 2], max_new_tokens=2, sampling=chosen)
        await plain.tokens()
    with torch.no_grad():
        logits = own(torch.tensor([[*PROMPTS[4], *tokens]])).logits[0].double().log_softmax(1)
    for at, (token, scores) in enumerate(zip(tokens, generation.scores, strict=True), len(PROMPTS[4]) - 1):
        assert scores.chosen == pytest.approx(float(logits[at, token]), abs=1e-5)
        assert [each for each, _ in scores.top] == logits[at].topk(3).indices.tolist()
    assert [scores.top for scores in plain.scores] == [(), ()]


async def test_what_the_engine_lacks_names_the_one_that_has_it(llama: Path) -> None:
    async with opened(llama) as engine:
        with pytest.raises(ga.Unsupported, match="the numpy engine does") as caught:
            engine.submit([1, 2], max_new_tokens=1, sampling=Sampling(top_logprobs=1, score_prompt=True))
        assert caught.value.field == "echo"
        for prompt, count, said in (
            ([], 1, "token ids"),
            ([300], 1, "token ids"),
            ([1] * 200, 57, "more than 256 tokens"),
            ([1], 0, "max_new_tokens"),
        ):
            with pytest.raises(ga.InvalidRequest, match=said):
                engine.submit(prompt, max_new_tokens=count)
        assert idle(engine)


# Ends


async def test_a_text_that_is_cancelled_gives_back_its_pages(llama: Path) -> None:
    async with opened(llama) as engine:
        running = [engine.submit(prompt, max_new_tokens=100) for prompt in PROMPTS]
        kept = engine.submit([1, 2, 3], max_new_tokens=30)
        for generation in running:
            await generation.more(1)
        for generation in running:
            generation.cancel()
        assert {generation.reason for generation in running} == {"cancelled"}
        assert len(await kept.tokens()) == 30
        await comes_true(lambda: idle(engine))
        before_it_began = engine.submit([4], max_new_tokens=3)
        before_it_began.cancel()
        assert await before_it_began.tokens() == []
        assert engine.stats.ended["cancelled"] == len(PROMPTS) + 1
        await comes_true(lambda: idle(engine))


async def test_a_deadline_that_has_passed_ends_a_text_before_its_first_token(llama: Path) -> None:
    async with opened(llama) as engine:
        late = engine.submit([4], max_new_tokens=3, deadline=time.monotonic() - 1)
        with pytest.raises(ga.DeadlineExceeded):
            await late.tokens()
        assert late.reason == "deadline"
        await comes_true(lambda: idle(engine))


async def test_stop_ends_every_text_and_refuses_others(llama: Path) -> None:
    async with opened(llama) as engine:
        running = [engine.submit(prompt, max_new_tokens=100) for prompt in PROMPTS]
        await running[0].more(1)
        engine.stop("the server is stopping")
        for generation in running:
            with pytest.raises(ga.ActorStopped, match="the server is stopping"):
                await generation.tokens()
        with pytest.raises(ga.ActorStopped, match="the server is stopping"):
            engine.submit([1], max_new_tokens=1)
        await comes_true(lambda: idle(engine))


async def test_leaving_the_engine_ends_its_thread_and_its_texts(llama: Path) -> None:
    async with opened(llama) as engine:
        generation = engine.submit([1], max_new_tokens=200)
        await generation.more(1)
        manager = engine._manager
        assert manager.is_running()
    assert generation.reason == "cancelled"
    assert not manager.is_running()
    assert "gpu_actors" not in manager.model.config._attn_implementation


async def test_engines_of_several_contexts_share_a_process(llama: Path) -> None:
    wanted = models.eager(llama, PROMPTS, 8)
    async with opened(llama) as first:
        async with opened(llama) as second:
            begun = [(first if n % 2 else second).submit(each, max_new_tokens=8) for n, each in enumerate(PROMPTS)]
            assert [await generation.tokens() for generation in begun] == wanted
        assert await first.submit(PROMPTS[0], max_new_tokens=8).tokens() == wanted[0]


async def test_a_step_that_fails_ends_its_texts_alone(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with opened(llama) as engine:
        forward = engine._loaded.model.forward
        failing = iter([ga.LaunchError("the launch failed"), ValueError("a bug")])

        def fails_once(*operands: Any, **options: Any) -> Any:
            monkeypatch.setattr(engine._loaded.model, "forward", forward)
            raise next(failing)

        for kind, said in ((ga.LaunchError, "the launch failed"), (ga.ActorFailed, "ValueError: a bug")):
            monkeypatch.setattr(engine._loaded.model, "forward", fails_once)
            generation = engine.submit(PROMPTS[2], max_new_tokens=5)
            with pytest.raises(kind, match=said):
                await generation.tokens()
        await comes_true(lambda: idle(engine))
        assert not engine.failure
        assert [await engine.submit(PROMPTS[2], max_new_tokens=5).tokens()] == models.eager(llama, [PROMPTS[2]], 5)


async def test_logits_that_are_not_finite_end_their_text_alone(llama: Path) -> None:
    async with opened(llama) as engine:
        with torch.no_grad():
            engine._loaded.model.model.embed_tokens.weight[77] = math.nan
        sound, broken = engine.submit([1, 2], max_new_tokens=9), engine.submit([77], max_new_tokens=9)
        with pytest.raises(ga.LaunchError, match="not finite"):
            await broken.tokens()
        assert len(await sound.tokens()) >= 1
        assert engine.stats.ended["error"] == 1


async def test_a_thread_that_ends_ends_every_text(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with opened(llama) as engine:

        def fails() -> Any:
            raise RuntimeError("no page can be found")

        generation = engine.submit([1], max_new_tokens=200)
        await generation.more(1)
        monkeypatch.setattr(engine._manager.batch_processor, "prepare_next_batch", fails)
        with pytest.raises(ga.GpuActorsError, match="no page can be found"):
            await generation.tokens()
        await comes_true(lambda: engine.failure)
        assert engine.failure == "the engine has failed: RuntimeError: no page can be found"
        with pytest.raises(ga.ActorStopped, match="no page can be found"):
            engine.submit([1], max_new_tokens=1)


async def test_memory_stays_flat(llama: Path) -> None:
    await hold_memory(llama, 300)


@pytest.mark.sweep
@pytest.mark.timeout(3600)
async def test_memory_stays_flat_over_many_requests(llama: Path) -> None:
    await hold_memory(llama, 10_000)


async def hold_memory(llama: Path, count: int) -> None:
    """Texts that end, are cancelled or fail leave nothing in memory but pages of equal prefixes."""
    resident = psutil.Process().memory_info

    async with opened(llama, texts=64, rows=64) as engine:

        async def some(number: int) -> None:
            prompts = [RNG.integers(0, 256, 24).tolist() for _ in range(number)]
            sampling = Sampling(temperature=1.0, top_logprobs=2)
            texts = [engine.submit(prompt, max_new_tokens=8, sampling=sampling) for prompt in prompts]
            for index, text in enumerate(texts):
                if index % 3:
                    await text.tokens()
                else:
                    text.cancel()
            await comes_true(lambda: idle(engine))

        await some(100)
        gc.collect()
        before = resident().rss
        for _ in range(count // 100):
            await some(100)
        gc.collect()
        assert resident().rss - before < (16 << 20)
        assert not engine._requests
        draw = engine._manager.logit_processor
        assert len(draw._outcomes) < 64


# Folders


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda folder: (folder / "config.json").unlink(), "config.json"),
        (lambda folder: (folder / "config.json").write_text("{"), "config.json"),
        (lambda folder: (folder / "config.json").write_text('{"model_type": "abacus"}'), "abacus"),
        (lambda folder: (folder / "tokenizer.json").unlink(), "tokenizer"),
        (lambda folder: (folder / "model.safetensors").unlink(), "model.safetensors"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"junk" * 9), "can load"),
        (lambda folder: _change(folder, num_hidden_layers=3), "lacks weights.*model.layers.2"),
        (lambda folder: _change(folder, vocab_size=301), "in another shape.*lm_head.weight"),
    ],
)
async def test_a_bad_folder_is_refused_by_what_it_lacks(tmp_path: Path, spoil: Any, said: str) -> None:
    models.save(tmp_path, models.FAMILIES["llama"])
    spoil(tmp_path)
    async with ga.open_context("mock") as ctx:
        with pytest.raises(ga.InvalidRequest, match=said) as caught:
            torch_engine.load_torch_model(tmp_path, ctx)
    assert (caught.value.field, caught.value.value) in {("model", str(tmp_path)), ("model", f"{tmp_path}/config.json")}


def _change(folder: Path, **entries: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | entries))


async def test_generation_config_says_what_ends_a_text_and_is_not_followed_in_silence(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    models.save(tmp_path, models.FAMILIES["qwen2"])
    (wanted,) = models.eager(tmp_path, [PROMPTS[0]], 12)
    last = next(at for at, token in enumerate(wanted) if at > 3 and token not in wanted[:at])
    entries = {"eos_token_id": [257, wanted[last]], "do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95}
    path = tmp_path / "generation_config.json"
    path.write_text(json.dumps(entries))
    async with opened(tmp_path) as engine:
        generation = engine.submit(PROMPTS[0], max_new_tokens=12)
        assert await generation.tokens() == wanted[: last + 1]
        assert generation.reason == "stop"
    assert "generation_config" not in caplog.text, "each request says how it is sampled"
    path.write_text(json.dumps({**entries, "repetition_penalty": 1.3}))
    async with ga.open_context("mock") as ctx:
        torch_engine.load_torch_model(tmp_path, ctx)
    assert "has repetition_penalty, which this engine does not do" in caplog.text


async def test_models_and_dtypes_that_the_engine_does_not_run(tmp_path: Path, llama: Path) -> None:
    async with ga.open_context("mock") as ctx:
        for source in ("smollm2", "tiny", tmp_path / "model.gguf"):
            with pytest.raises(ga.Unsupported, match="the numpy engine has"):
                torch_engine.load_torch_model(source, ctx)
        with pytest.raises(ga.Unsupported, match="the numpy engine has others"):
            torch_engine.load_torch_model(llama, ctx, cache_dtype="float8_e4m3fn")
        with pytest.raises(ga.InvalidRequest, match="float16"):
            torch_engine.load_torch_model(llama, ctx, dtype="int4")
        # Its keys and values have different head dims, which Transformers' paged cache does not support.
        loaded = torch_engine.load_torch_model(models.save(tmp_path, models.MLA), ctx)
        with pytest.raises(ga.Unsupported, match="does not run in Transformers' continuous batching"):
            async with torch_engine.TorchEngine.open(ctx, loaded, texts=8, rows=24, cache_mib=1):
                pass
