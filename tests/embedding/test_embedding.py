"""The sentence encoder: its arithmetic, its use of the service, and ranking."""

from __future__ import annotations

import asyncio
import json
import math
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import numpy as np
import pytest
from inside.kernels import standard_variants
from support.gate import kernel_source
from support.service import eventually

from gpu_actors import ContextOptions, GpuContext, MockOptions, TraceEvent, open_context
from gpu_actors.embedding import (
    Embedder,
    MiniLM,
    Tokenizer,
    find_weights,
    rank,
)
from gpu_actors.embedding import embedder as embedder_module
from gpu_actors.embedding.layers import gelu_inplace
from gpu_actors.embedding.tokens import token_batches
from gpu_actors.errors import DeadlineExceeded, InvalidRequest, LaunchError
from gpu_actors.testing import FaultPlan

DATA = Path(__file__).parents[1] / "data"
TEXTS: list[str] = json.loads((DATA / "minilm_texts.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def model() -> MiniLM:
    return MiniLM.load(find_weights())


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(find_weights())


@pytest.fixture
async def context() -> AsyncIterator[GpuContext]:
    async with open_context("mock", ContextOptions(mock=MockOptions(dtype="float32"))) as opened:
        yield opened


class Recorder:
    """A context that notes its attention requests, with the number of requests under way.

    together: how many must be under way before any of them is made.
    """

    def __init__(self, context: GpuContext, together: int = 1) -> None:
        self.calls: list[dict[str, Any]] = []
        self.under_way = 0
        self.peak = 0
        self.info = context.info
        self._context = context
        self._together = together
        self._met = asyncio.Event()
        self.flash_attn = SimpleNamespace(forward=self._forward)

    async def _forward(self, q: Any, k: Any, v: Any, **options: Any) -> Any:
        self.calls.append({"q": q, "k": k, "v": v, **options})
        self.under_way += 1
        self.peak = max(self.peak, self.under_way)
        try:
            if self.peak >= self._together:
                self._met.set()
            await self._met.wait()
            return await self._context.flash_attn.forward(q, k, v, **options)
        finally:
            self.under_way -= 1


# Arithmetic


async def test_embeddings_are_those_of_sentence_transformers(
    context: GpuContext, model: MiniLM, tokenizer: Tokenizer
) -> None:
    reference = np.load(DATA / "minilm_reference.npz")
    result = await Embedder(context, model, tokenizer).embed(TEXTS)
    assert result.tokens.tolist() == reference["tokens"].tolist()
    assert (result.tokens.min(), result.tokens.max()) == (6, 256)
    cosines = np.einsum("nd,nd->n", result.vectors, reference["embeddings"])
    assert cosines.min() >= 0.9999
    np.testing.assert_allclose(result.vectors, reference["embeddings"], atol=2e-6, rtol=0)


async def test_the_projects_own_kernels_give_the_same_vectors(model: MiniLM, tokenizer: Tokenizer) -> None:
    reference = np.load(DATA / "minilm_reference.npz")["embeddings"]
    async with open_context("emulated") as context:
        result = await Embedder(context, model, tokenizer, dtype="float32").embed(TEXTS[:2])
    np.testing.assert_allclose(result.vectors, reference[:2], atol=2e-6, rtol=0)


async def test_a_device_with_kernels_attends_in_bfloat16(model: MiniLM, tokenizer: Tokenizer) -> None:
    reference = np.load(DATA / "minilm_reference.npz")["embeddings"][:3]
    seen: list[TraceEvent] = []
    async with open_context("emulated", ContextOptions(on_event=seen.append)) as context:
        embedder = Embedder(context, model, tokenizer)
        vectors = (await embedder.embed(TEXTS[:3])).vectors
    assert embedder.dtype == "bfloat16"
    launched = [event.fields for event in seen if event.name == "request.launched"]
    assert {fields["kernel"] for fields in launched} == {"forward_sm90"}
    warmed = {kernel_source(key) for key in standard_variants(context.info.arch)}
    assert {kernel_source(fields["key"]) for fields in launched} <= warmed
    cosines = np.einsum("nd,nd->n", vectors, reference)
    assert cosines.min() >= 0.9999


def test_gelu_is_the_exact_one_to_float32_rounding() -> None:
    x = np.concatenate([np.linspace(-15, 15, 60_001), np.geomspace(1e-30, 1e-2, 500)]).astype(np.float32)
    exact = np.array([0.5 * value * math.erfc(-value / math.sqrt(2)) for value in x.tolist()])
    error = np.abs(gelu_inplace(x.copy()).astype(np.float64) - exact)
    # The positive side ends in one subtraction, which adds its own rounding.
    rounding = np.where(x > 0, 0.5 * np.spacing(exact.astype(np.float32)), 0.0)
    assert np.all(error <= 8e-8 + rounding)
    long = np.full((3, 70_000), 2.0, np.float32)  # more than one block
    assert gelu_inplace(long) is long
    np.testing.assert_allclose(long, 1.9544997, rtol=1e-6)


async def test_vectors_do_not_depend_on_how_texts_are_batched(
    context: GpuContext, model: MiniLM, tokenizer: Tokenizer
) -> None:
    together = await Embedder(context, model, tokenizer, batch_tokens=10_000).embed(TEXTS[:8])
    apart = await Embedder(context, model, tokenizer, batch_tokens=1).embed(TEXTS[:8])
    np.testing.assert_allclose(together.vectors, apart.vectors, atol=1e-6, rtol=0)


# Through the service


async def test_every_layer_is_one_varlen_request_a_batch_and_batches_overlap(
    context: GpuContext, model: MiniLM, tokenizer: Tokenizer
) -> None:
    recorder: Any = Recorder(context, together=2)
    embedder = Embedder(recorder, model, tokenizer, batch_tokens=100, batches_in_flight=3, threads=2)
    seen: list[tuple[int, int]] = []
    result = await embedder.embed(TEXTS[:16], progress=lambda texts, tokens: seen.append((texts, tokens)))
    assert [sum(counts) for counts in zip(*seen, strict=True)] == [16, result.tokens.sum()]
    sizes = [len(batch.ids) for batch in token_batches(tokenizer, TEXTS[:16], 100)]
    assert len(sizes) >= 3
    assert max(sizes) <= 100
    assert sorted(len(call["q"]) for call in recorder.calls) == sorted(6 * sizes)
    for call in recorder.calls:
        lengths = np.diff(call["cu_seqlens_q"])
        assert call["q"].shape == call["k"].shape == call["v"].shape == (lengths.sum(), 12, 32)
        assert call["q"].flags.c_contiguous
        assert call["q"].dtype == np.float32
        assert call["cu_seqlens_q"] is call["cu_seqlens_k"]
        assert call["cu_seqlens_q"].dtype == np.int32
        assert call["max_seqlen_q"] == call["max_seqlen_k"] == lengths.max()
        assert call["softmax_scale"] == pytest.approx(32**-0.5)
    assert 2 <= recorder.peak <= 3
    assert result.vectors.shape == (16, 384)
    nothing = await embedder.embed([])
    assert (nothing.vectors.shape, len(nothing.tokens), len(nothing.truncated)) == ((0, 384), 0, 0)


async def test_matrix_products_stay_off_the_event_loop(
    context: GpuContext, model: MiniLM, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: set[int] = set()
    for name in ("heads", "finish"):
        work = getattr(type(model.layers[0]), name)

        def noted(*arguments: Any, _work: Any = work) -> Any:
            threads.add(threading.get_ident())
            return _work(*arguments)

        monkeypatch.setattr(type(model.layers[0]), name, noted)
    await Embedder(context, model, tokenizer).embed(TEXTS[:2])
    assert threads
    assert threading.get_ident() not in threads


async def test_a_failed_launch_surfaces_as_its_own_error_and_ends_the_rest(model: MiniLM, tokenizer: Tokenizer) -> None:
    plan = FaultPlan().fail(launch=4, error=LaunchError("seeded"))
    options = ContextOptions(mock=MockOptions(dtype="float32"), fault_plan=plan)
    async with open_context("mock", options) as context:
        recorder: Any = Recorder(context)
        with pytest.raises(LaunchError, match="seeded"):
            await Embedder(recorder, model, tokenizer, batch_tokens=64).embed(TEXTS[:16])
        assert recorder.under_way == 0
        assert len(recorder.calls) < 12


async def test_the_deadline_reaches_every_attention_request(model: MiniLM, tokenizer: Tokenizer) -> None:
    options = ContextOptions(mock=MockOptions(dtype="float32", latency=0.2))
    async with open_context("mock", options) as context:
        recorder: Any = Recorder(context)
        deadline = options.clock.now() + 0.5
        with pytest.raises(DeadlineExceeded):
            await Embedder(recorder, model, tokenizer).embed(TEXTS[:1], deadline=deadline)
        assert [call["deadline"] for call in recorder.calls] == [deadline] * len(recorder.calls)
        assert len(recorder.calls) < 6


async def test_a_call_that_is_cancelled_while_its_tokenize_next_is_made_ends_as_cancelled(
    context: GpuContext, model: MiniLM, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first batch is cancelled while a thread makes the second one. The thread cannot be interrupted."""
    made, go_on = threading.Event(), threading.Event()
    batches: list[object] = []
    work = embedder_module._tokenize_next

    def slow(rest: Any) -> Any:
        batches.append(rest)
        if len(batches) == 2:
            made.set()
            assert go_on.wait(60)
        return work(rest)

    monkeypatch.setattr(embedder_module, "_tokenize_next", slow)
    recorder: Any = Recorder(context, together=2)  # so that one batch alone waits until it is cancelled
    scope = anyio.CancelScope()

    async def cancel() -> None:
        await asyncio.to_thread(made.wait, 60)
        await asyncio.to_thread(eventually, lambda: recorder.under_way == 1)
        scope.cancel()
        await asyncio.to_thread(eventually, lambda: recorder.under_way == 0)
        go_on.set()

    cancelling = asyncio.ensure_future(cancel())
    went_on = False
    with scope:
        await Embedder(recorder, model, tokenizer).embed(TEXTS[:1])
        went_on = True
    await cancelling
    assert scope.cancelled_caught
    assert not went_on


async def test_a_result_that_is_not_finite_is_refused(model: MiniLM, tokenizer: Tokenizer) -> None:
    async def forward(q: Any, k: Any, v: Any, **_: Any) -> Any:
        return SimpleNamespace(out=np.full_like(q, np.nan))

    broken: Any = SimpleNamespace(info=SimpleNamespace(runs_kernels=False), flash_attn=SimpleNamespace(forward=forward))
    with pytest.raises(LaunchError, match="not finite"):
        await Embedder(broken, model, tokenizer).embed(TEXTS[:1])


async def test_a_lone_surrogate_is_refused_by_the_number_of_its_text(
    context: GpuContext, model: MiniLM, tokenizer: Tokenizer
) -> None:
    texts = ["a"] * 300 + ["b \ud800"]
    with pytest.raises(InvalidRequest, match="lone surrogate") as caught:
        await Embedder(context, model, tokenizer).embed(texts)
    assert caught.value.field == "texts[300]"


def test_sizes_and_dtypes_that_are_none_are_refused_by_name(model: MiniLM, tokenizer: Tokenizer) -> None:
    nowhere: Any = SimpleNamespace(info=SimpleNamespace(runs_kernels=False))
    assert Embedder(nowhere, model, tokenizer).dtype == "float32", "the oracle's"
    for name in ("batch_tokens", "batches_in_flight", "threads"):
        with pytest.raises(InvalidRequest, match="must be an int >= 1") as caught:
            Embedder(nowhere, model, tokenizer, **{name: 0})
        assert caught.value.field == name
    for dtype in ("float64", "", "bf16"):
        with pytest.raises(InvalidRequest, match="must be bfloat16 or float32"):
            Embedder(nowhere, model, tokenizer, dtype=dtype)


# Ranking


def test_rank_gives_the_best_first_and_keeps_ties_in_order() -> None:
    query = np.array([1, 0], np.float32)
    passages = np.array([[0, 1], [1, 0], [-1, 0], [1, 0]], np.float32)
    hits = rank(query, passages, 3)
    assert [(hit.index, hit.score) for hit in hits] == [(1, 1.0), (3, 1.0), (0, 0.0)]
    assert len(rank(query, passages, 9)) == 4
    with pytest.raises(InvalidRequest, match="top"):
        rank(query, passages, 0)
