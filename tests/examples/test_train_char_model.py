"""examples/train_char_model.py: its gradients against differences and plain NumPy, that it learns, and its command."""

from __future__ import annotations

import asyncio
import dataclasses
import importlib
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import gpu_actors as ga

EXAMPLES = Path(__file__).parents[2] / "examples"
sys.path.append(str(EXAMPLES))
char_model: Any = importlib.import_module("char_model")
example: Any = importlib.import_module("train_char_model")

TINY = char_model.Settings(
    layers=2, width=12, heads=4, heads_kv=2, head_dim=6, context=9, batch=3, steps=3, learning_rate=1e-2, warmup=2
)


@pytest.fixture
def tiny() -> SimpleNamespace:
    """A model in float64, and one batch."""
    corpus = example.Corpus("the quick brown fox jumps over the lazy dog. " * 20)
    model = char_model.Model.initialised(TINY, len(corpus.alphabet))
    model.weights = {name: weight.astype(np.float64) * 3 for name, weight in model.weights.items()}
    tokens = corpus.batch(np.random.default_rng(0), TINY.batch, TINY.context)
    return SimpleNamespace(corpus=corpus, model=model, tokens=tokens)


def test_the_services_gradients_agree_with_differences(tiny: SimpleNamespace) -> None:
    """The gradients that the example computes by hand agree, too."""

    async def checked() -> None:
        async with ga.open_context("mock") as ctx:
            attention = example.ServiceAttention(ctx, TINY.heads)
            _, gradients = await tiny.model.loss(tiny.tokens, attention)
            assert ctx.stats()["flash_attn"].completed == 2 * TINY.layers, "forward and backward of every layer"
            assert gradients.keys() == tiny.model.weights.keys()
            rng = np.random.default_rng(1)
            for name, weight in tiny.model.weights.items():
                direction, losses = rng.standard_normal(weight.shape), []
                for step in (1e-7, -1e-7):  # a larger step would leave the linear range of the small embeddings
                    weight += step * direction
                    losses.append((await tiny.model.loss(tiny.tokens, attention))[0])
                    weight -= step * direction
                slope = (losses[0] - losses[1]) / 2e-7
                # Backward gets the lse of forward in float32.
                scale = float(np.abs(gradients[name] * direction).sum())
                assert slope == pytest.approx((gradients[name] * direction).sum(), rel=0, abs=1e-5 * scale + 2e-8), name

    asyncio.run(checked())


@pytest.mark.sweep
@pytest.mark.timeout(300)
def test_the_emulated_kernels_teach_what_the_oracle_teaches() -> None:
    """A few steps in bfloat16: forward and backward kernels, on the CPU."""
    corpus = example.Corpus("the quick brown fox jumps over the lazy dog. " * 20)
    settings = dataclasses.replace(TINY, width=32, head_dim=32, context=40, steps=6)

    async def losses(device: str) -> list[float]:
        model = char_model.Model.initialised(settings, len(corpus.alphabet))
        async with ga.open_context(device) as ctx:
            attention = example.ServiceAttention(ctx, settings.heads, example.DTYPES["bfloat16"])
            return [loss async for loss in example.train(model, corpus, attention)]

    emulated, mock = (asyncio.run(losses(device)) for device in ("emulated", "mock"))
    assert emulated[-1] < emulated[0]
    np.testing.assert_allclose(emulated, mock, rtol=1e-3)


def test_the_loss_falls_and_a_trained_model_continues_a_text() -> None:
    """The text is simple, because the example's own takes a minute."""
    corpus = example.Corpus("abcdefgh" * 200)
    settings = dataclasses.replace(TINY, width=32, head_dim=8, context=16, batch=8, steps=100)
    model = char_model.Model.initialised(settings, len(corpus.alphabet))

    async def trained() -> tuple[list[float], str]:
        async with ga.open_context("mock") as ctx:
            attention = example.ServiceAttention(ctx, settings.heads)
            losses = [loss async for loss in example.train(model, corpus, attention)]
            drawn = example.continue_text(model, corpus, ctx, attention, "abc", 40)
            return losses, "".join([character async for character in drawn])

    history, drawn = asyncio.run(trained())
    assert history[0] == pytest.approx(np.log(8), rel=0.05), "knows nothing at first"
    assert np.mean(history[-5:]) < 0.6 * history[0]
    expected = ("defghabc" * 5)[:40]
    assert sum(a == b for a, b in zip(drawn, expected, strict=True)) >= 36


def test_reading_from_the_cache_gives_the_logits_of_reading_everything(tiny: SimpleNamespace) -> None:
    """A prompt of 20 characters, then one character at a time, over pages of 16 and two layers."""
    tokens = tiny.corpus.tokens[:40]

    async def logits() -> tuple[np.ndarray, np.ndarray]:
        async with ga.open_context("mock") as ctx:
            attention = example.ServiceAttention(ctx, TINY.heads, np.float32)
            x = tiny.model.weights["embedding"][tokens][None]
            for layer in range(TINY.layers):
                _, q, k, v = tiny.model.project(layer, x)
                out, _ = await attention.forward(q, k, v)
                *_, x = tiny.model.finish(layer, x, out)
            async with example.Memory.open(ctx, TINY, attention, len(tokens)) as memory:
                parts = [tokens[:20], *tokens[20:, None]]
                cached = [await example.read(tiny.model, memory, attention, part) for part in parts]
        return np.concatenate(cached), tiny.model.logits(x[0])

    cached, whole = asyncio.run(logits())
    np.testing.assert_allclose(cached, whole, rtol=1e-5, atol=1e-6)


def test_the_repositorys_text_is_most_of_a_megabyte_of_ascii() -> None:
    corpus = example.Corpus.of_repository()
    assert len(corpus.tokens) > 300_000
    assert 60 < len(corpus.alphabet) <= 98
    assert corpus.decode(corpus.encode("async def é")) == "async def "


@pytest.mark.timeout(180)
def test_the_command_trains_and_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    curve = tmp_path / "loss.png"
    quick = ("--device", "mock", "--steps", "2", "--batch", "2", "--sample", "5", "--curve", str(curve))
    assert example.main([*quick, "--prompt", "def "]) == 0
    out = capsys.readouterr().out
    assert "weights" in out
    assert "attention on mock" in out
    assert " -> " in out
    assert out.splitlines()[-1].startswith("def ")
    assert curve.exists() == ("\nloss curve:" in out)
    assert example.main(["--device", "mock", "--prompt", "é", "--steps", "1"]) == 1
    assert capsys.readouterr().err.startswith("InvalidRequest: prompt='é': has no character")
    with pytest.raises(SystemExit):
        example.main(["--steps", "0"])
    assert "at least 1" in capsys.readouterr().err


def test_the_loss_curve_is_a_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "loss.png"
    assert example.save_curve([3.0, 2.5, 2.0], path)
    assert path.read_bytes().startswith(b"\x89PNG")
