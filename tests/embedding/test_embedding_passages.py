"""Texts become tokens and passages: no text is lost, and every passage fits the model."""

from __future__ import annotations

import functools
import json
import os
import sys
from pathlib import Path
from random import Random
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu_actors.embedding import (
    Passage,
    Tokenizer,
    find_weights,
    read_passages,
    split_passages,
)
from gpu_actors.embedding.tokens import token_batches
from gpu_actors.errors import InvalidRequest

DATA = Path(__file__).parents[1] / "data"
TEXTS: list[str] = json.loads((DATA / "minilm_texts.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(find_weights())


def test_texts_are_not_padded_and_cut_and_flagged_over_256_tokens(tokenizer: Tokenizer) -> None:
    result = tokenizer.encode(["word", "word " * 200, "word " * 254, "word " * 255])
    assert [(len(row.ids), row.truncated) for row in result] == [(3, False), (202, False), (256, False), (256, True)]


def test_a_text_is_cut_to_its_character_bound_before_it_is_tokenized(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = Tokenizer(find_weights(), max_text_chars=1000)
    seen: list[str] = []
    work = tokenizer._cutting

    class Noting:
        def encode_batch(self, texts: list[str]) -> object:
            seen.extend(texts)
            return work.encode_batch(texts)

    monkeypatch.setattr(tokenizer, "_cutting", Noting())
    long, word, blank, fits = tokenizer.encode(["pack " * 200_000, "x" * 5000, "a" + " " * 5000, "fits"])
    assert [len(text) for text in seen] == [1000, 1000, 1000, 4]
    assert [row.truncated for row in (long, word, blank, fits)] == [True, True, False, False]
    assert len(long.ids) == 2 + 1000 // len("pack ")


def test_a_cut_text_ends_with_a_whole_word(tokenizer: Tokenizer) -> None:
    cut = Tokenizer(find_weights(), max_text_chars=20).encode(["sharpen the plane ironmonger"])[0]
    assert cut.truncated
    assert cut.ids.tolist() == tokenizer.encode(["sharpen the plane"])[0].ids.tolist()


def test_bounds_below_one_are_refused_by_name() -> None:
    for name in ("max_tokens", "max_text_chars"):
        with pytest.raises(InvalidRequest, match="must be an int >= 1") as caught:
            Tokenizer(find_weights(), **{name: 0})
        assert caught.value.field == name


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
BREAKS = ["\n", "\n\n", "\r\n\r\n", " \t ", "\n- ", "\n# ", "\n\n## The end\n\n", "\n```\n", "\n### "]


@functools.cache
def small_tokenizer() -> Tokenizer:
    return Tokenizer(find_weights(), max_tokens=40)


def check_passages(text: str) -> None:
    tokenizer = small_tokenizer()
    result = list(split_passages(text, tokenizer))
    pieces = [text[piece.start : piece.stop] for piece in result]
    assert "".join(ink(piece) for piece in pieces) == ink(text)
    assert all(piece == piece.strip() and piece for piece in pieces)
    embedded = [Passage("", 1, text, piece.heading).embedded for text, piece in zip(pieces, result, strict=True)]
    assert not any(row.truncated for row in tokenizer.encode(embedded))


@settings(max_examples=60, deadline=None)
@given(parts=st.lists(st.sampled_from(WORDS + BREAKS), min_size=1, max_size=60))
def test_passages_fit_the_model_and_lose_nothing(parts: list[str]) -> None:
    check_passages(" ".join(parts))


@pytest.mark.parametrize(("space", "words_a_break"), [(" ", 5), ("", 40), (".", 10_000)])
def test_long_texts_are_cut_to_fit_and_lose_nothing(words_a_break: int, space: str) -> None:
    random = Random(words_a_break)
    parts = [random.choice(BREAKS if random.random() < 1 / words_a_break else WORDS) for _ in range(400)]
    check_passages(space.join(parts))


def test_words_are_cut_only_where_they_alone_are_too_long(tokenizer: Tokenizer) -> None:
    for word in ("pneumonoultramicroscopic", "y" * 130):
        text = f"{word} " * 200
        pieces = [text[start:stop] for start, stop, _ in split_passages(text, tokenizer)]
        assert len(pieces) > 3
        assert set(" ".join(pieces).split()) == {word}
    blob = "x" * 9000
    assert "".join(blob[start:stop] for start, stop, _ in split_passages(blob, tokenizer)) == blob


def test_long_paragraphs_are_cut_at_sentence_ends(tokenizer: Tokenizer) -> None:
    text = " ".join(f"Sentence number {number} says nothing of note." for number in range(120))
    pieces = [text[start:stop] for start, stop, _ in split_passages(text, tokenizer)]
    assert len(pieces) > 3
    assert all(piece.startswith("Sentence") and piece.endswith(".") for piece in pieces)


BODY = "The valve closes when the float has risen, and it opens again an hour after the tank has been drained."


def passages_in(folder: Path, tokenizer: Tokenizer, text: str) -> list[Passage]:
    file = folder / "notes.md"
    file.write_text(text, encoding="utf-8")
    return read_passages(str(file), tokenizer)


def test_a_passage_holds_the_paragraphs_below_a_heading(tokenizer: Tokenizer, tmp_path: Path) -> None:
    first, second = passages_in(tmp_path, tokenizer, f"\n# Valves\n\n{BODY}\n\n{BODY} Again.\n\n## Floats ##\n{BODY}\n")
    assert (first.line, first.text, first.heading) == (2, f"# Valves\n\n{BODY}\n\n{BODY} Again.", "")
    assert (second.line, second.text, second.heading) == (8, f"## Floats ##\n{BODY}", "")


def test_a_long_section_repeats_its_heading_in_every_passage(tokenizer: Tokenizer, tmp_path: Path) -> None:
    paragraphs = [f"{number}. {BODY}" for number in range(30)]
    text = "# Valves\n\n" + "\n\n".join(paragraphs) + "\n"
    first, *others = passages_in(tmp_path, tokenizer, text)
    assert len(others) > 1
    assert first.embedded == first.text
    assert first.text.startswith("# Valves\n\n0.")
    for passage in others:
        assert passage.heading == "Valves"
        assert passage.embedded == f"Valves\n\n{passage.text}"
        assert text.splitlines()[passage.line - 1] == passage.text.splitlines()[0]
    assert "\n\n".join(passage.text for passage in (first, *others)) == text.strip()


def test_a_heading_is_not_repeated_where_it_is_long(tokenizer: Tokenizer, tmp_path: Path) -> None:
    text = f"# {'valve ' * 20}\n\n" + f"{BODY}\n\n" * 30
    passages = passages_in(tmp_path, tokenizer, text)
    assert len(passages) > 1
    assert {passage.heading for passage in passages} == {""}


def test_a_heading_stays_with_the_long_paragraph_below_it(tokenizer: Tokenizer, tmp_path: Path) -> None:
    first, *others = passages_in(tmp_path, tokenizer, "# Valves\n\n" + f"{BODY} " * 30)
    assert first.text.startswith(f"# Valves\n\n{BODY}")
    assert {passage.heading for passage in others} == {"Valves"}


def test_a_comment_in_a_block_of_code_is_no_heading(tokenizer: Tokenizer, tmp_path: Path) -> None:
    text = f"# Valves\n\n```sh\n# ~~~ not a heading\nopen\n```\n\n{BODY}"
    (passage,) = passages_in(tmp_path, tokenizer, text)
    assert passage.text == text


def test_without_headings_a_passage_is_a_paragraph(tokenizer: Tokenizer, tmp_path: Path) -> None:
    passages = passages_in(tmp_path, tokenizer, f"{BODY}\n\nShort.\n\n{BODY}\n")
    assert [passage.text for passage in passages] == [BODY, f"Short.\n\n{BODY}"]


def test_files_without_utf8_text_are_refused(tokenizer: Tokenizer, tmp_path: Path) -> None:
    file = tmp_path / "file"
    for content, reason in {
        b"": "is empty",
        b" \n\t": "is empty",
        b"\x7fELF\x00\x01": "is a binary file",
        "Bäume".encode("latin-1"): "is not UTF-8 text (byte 1)",
        "text".encode("utf-16"): "is a binary file",
    }.items():
        file.write_bytes(content)
        with pytest.raises(InvalidRequest) as caught:
            read_passages(str(file), tokenizer)
        assert caught.value.reason.startswith(reason)
        assert caught.value.value == str(file)
    os.mkfifo(tmp_path / "pipe")
    for path, reason in (
        (tmp_path / "none", "does not exist"),
        (tmp_path, "is a folder"),
        ("/dev/zero", "is a device or a pipe"),
        (tmp_path / "pipe", "is a device or a pipe"),
    ):
        with pytest.raises(InvalidRequest, match=reason):
            read_passages(str(path), tokenizer)


def test_a_file_over_the_bound_is_refused_once_the_bound_is_read(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "sparse.txt"
    with file.open("wb") as opened:
        opened.truncate(1 << 30)
    with pytest.raises(InvalidRequest, match="is larger than 64 MiB; split it"):
        read_passages(str(file), tokenizer)
    asked: list[int] = []

    def endless(size: int) -> bytes:
        asked.append(size)
        return bytes(size)

    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=SimpleNamespace(read=endless)))
    with pytest.raises(InvalidRequest, match="is larger than 64 MiB; split it"):
        read_passages("-", tokenizer)
    assert asked == [(64 << 20) + 1]
