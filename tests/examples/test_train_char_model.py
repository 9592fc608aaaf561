"""examples/train_char_model.py: its gradients against differences and plain NumPy, that it learns, and its command."""

from __future__ import annotations

import asyncio
import dataclasses
import importlib
import subprocess
import sys
from pathlib import Path
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


class PlainAttention:
    """Causal grouped-query attention with ALiBi, with its gradients, as a few lines of einsum."""

    def __init__(self, slopes: np.ndarray) -> None:
        self.slopes = slopes

    async def forward(self, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        weights, _, wide_v = self._weights(q, k, v)
        return np.einsum("bhij,bjhd->bihd", weights, wide_v), weights

    async def backward(self, dout: np.ndarray, q: Any, k: Any, v: Any, out: Any, weights: Any) -> Any:
        _, wide_k, wide_v = self._weights(q, k, v)
        dweights = np.einsum("bihd,bjhd->bhij", dout, wide_v)
        dscores = weights * (dweights - (weights * dweights).sum(-1, keepdims=True)) / np.sqrt(q.shape[-1])
        dk = np.einsum("bhij,bihd->bjhd", dscores, q)
        dv = np.einsum("bhij,bihd->bjhd", weights, dout)
        grouped = [x.reshape(*k.shape[:3], -1, k.shape[3]).sum(axis=3) for x in (dk, dv)]
        return char_model.AttentionGradient(np.einsum("bhij,bjhd->bihd", dscores, wide_k), *grouped)

    def _weights(self, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        wide_k, wide_v = (np.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
        ahead = np.arange(q.shape[1])[None, :] - np.arange(q.shape[1])[:, None]
        scores = np.einsum("bihd,bjhd->bhij", q, wide_k) / np.sqrt(q.shape[-1])
        scores = np.where(ahead > 0, -np.inf, scores - self.slopes[:, None, None] * np.abs(ahead))
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        return weights / weights.sum(-1, keepdims=True), wide_k, wide_v


@dataclasses.dataclass
class Case:
    corpus: Any
    model: Any
    tokens: np.ndarray


@pytest.fixture
def tiny() -> Case:
    """A model in float64, and one batch."""
    corpus = example.Corpus("the quick brown fox jumps over the lazy dog. " * 20)
    model = char_model.Model.initialised(TINY, len(corpus.alphabet))
    model.weights = {name: weight.astype(np.float64) * 3 for name, weight in model.weights.items()}
    return Case(corpus, model, corpus.batch(np.random.default_rng(0), TINY.batch, TINY.context))


def slopes() -> np.ndarray:
    return 2.0 ** (1.0 - np.arange(TINY.heads))


def test_plain_gradients_agree_with_differences(tiny: Case) -> None:
    """The yardstick of the next test, and the gradients that the example writes out by hand."""
    attention = PlainAttention(slopes())
    _, gradients = asyncio.run(tiny.model.loss(tiny.tokens, attention))
    assert gradients.keys() == tiny.model.weights.keys()
    rng = np.random.default_rng(1)
    for name, weight in tiny.model.weights.items():
        direction = rng.standard_normal(weight.shape)
        losses = []
        for step in (1e-7, -1e-7):  # embeddings as small as these bend the loss
            weight += step * direction
            losses.append(asyncio.run(tiny.model.loss(tiny.tokens, attention))[0])
            weight -= step * direction
        slope = (losses[0] - losses[1]) / 2e-7
        assert slope == pytest.approx((gradients[name] * direction).sum(), rel=1e-6, abs=2e-8), name


def test_the_services_gradients_are_those_of_plain_numpy(tiny: Case) -> None:
    async def through_the_service() -> tuple[float, dict[str, np.ndarray]]:
        async with ga.open_context("mock") as ctx:
            answer = await tiny.model.loss(tiny.tokens, example.ServiceAttention(ctx, TINY.heads))
            assert ctx.stats()["flash_attn"].completed == 2 * TINY.layers, "forward and backward of every layer"
            return answer

    loss, gradients = asyncio.run(through_the_service())
    plain_loss, plain = asyncio.run(tiny.model.loss(tiny.tokens, PlainAttention(slopes())))
    assert loss == pytest.approx(plain_loss, rel=1e-12)
    for name, expected in plain.items():
        # Between forward and backward, the LSE is float32.
        np.testing.assert_allclose(gradients[name], expected, rtol=0, atol=1e-5 * np.abs(expected).max(), err_msg=name)


def test_the_loss_falls_below_sixty_percent_in_a_few_steps() -> None:
    """On a text this simple; the example's own takes a minute."""
    corpus = example.Corpus("abcdefgh" * 200)
    settings = dataclasses.replace(TINY, width=32, head_dim=8, context=16, batch=8, steps=60)
    model = char_model.Model.initialised(settings, len(corpus.alphabet))

    async def losses() -> list[float]:
        async with ga.open_context("mock") as ctx:
            attention = example.ServiceAttention(ctx, settings.heads)
            return [loss async for loss in example.train(model, corpus, attention)]

    history = asyncio.run(losses())
    assert history[0] == pytest.approx(np.log(8), rel=0.05), "knows nothing at first"
    assert np.mean(history[-5:]) < 0.6 * history[0]


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


def test_a_trained_model_continues_a_text() -> None:
    corpus = example.Corpus("abcdefgh" * 200)
    settings = dataclasses.replace(TINY, width=32, head_dim=8, context=16, batch=8, steps=150)
    model = char_model.Model.initialised(settings, len(corpus.alphabet))

    async def text() -> str:
        async with ga.open_context("mock") as ctx:
            attention = example.ServiceAttention(ctx, settings.heads)
            async for _ in example.train(model, corpus, attention):
                pass
            drawn = example.continue_text(model, corpus, ctx, attention, "abc", 40)
            return "".join([character async for character in drawn])

    drawn = asyncio.run(text())
    expected = ("defghabc" * 5)[:40]
    assert sum(a == b for a, b in zip(drawn, expected, strict=True)) >= 36


def test_reading_from_the_cache_gives_the_logits_of_reading_everything(tiny: Case) -> None:
    """A prompt of 20 characters, then one after the other: over pages of 16, two layers."""
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


def run_example(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "error", str(EXAMPLES / "train_char_model.py"), "--device", "mock", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=200, check=False, cwd=EXAMPLES.parent)


def test_the_command_trains_and_writes(tmp_path: Path) -> None:
    curve = tmp_path / "loss.png"
    done = run_example("--steps", "2", "--batch", "2", "--sample", "5", "--curve", str(curve), "--prompt", "def ")
    assert done.returncode == 0, done.stderr
    assert "weights" in done.stdout
    assert "attention on mock" in done.stdout
    assert " -> " in done.stdout
    assert done.stdout.splitlines()[-1].startswith("def ")
    assert curve.exists() == ("\nloss curve:" in done.stdout)


def test_the_loss_curve_is_a_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "loss.png"
    assert example.save_curve([3.0, 2.5, 2.0], path)
    assert path.read_bytes().startswith(b"\x89PNG")


def test_bad_arguments_are_refused_in_a_sentence() -> None:
    assert "at least 1" in run_example("--steps", "0").stderr
    done = run_example("--prompt", "é", "--steps", "1")
    assert done.returncode == 1
    assert done.stderr.startswith("InvalidRequest: prompt='é': has no character")
