"""Texts become tokens and passages: nothing is lost, and everything fits the model."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu_actors.embedding import (
    Tokenizer,
    find_weights,
    read_passages,
    split_passages,
)
from gpu_actors.embedding.tokens import token_batches
from gpu_actors.errors import InvalidRequest

DATA = Path(__file__).parent / "data"
TEXTS: list[str] = json.loads((DATA / "minilm_texts.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(find_weights())


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
