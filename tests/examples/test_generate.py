"""examples/generate.py as a command: what it prints, and its exit code."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path
from typing import Any

import generate
import pytest
from support.generation import EXAMPLES, write_model, write_tokenizer

from gpu_actors.generation import LlamaConfig

QUICK = ["--model", "tiny", "--device", "mock", "--max-new-tokens", "5", "--gap-ms", "1", "--blocks", "64"]


def events(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[dict[str, Any]]:
    assert generate.main([*QUICK, "--json", *arguments]) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_every_token_is_an_event_then_every_text_then_the_whole(capsys):
    found = events(capsys, "--requests", "3", "--check")
    tokens = {n: [e["token"] for e in found if e["event"] == "token" and e["request"] == n] for n in range(3)}
    ends = {event["request"]: event for event in found if event["event"] == "end"}
    assert {n: end["tokens"] for n, end in ends.items()} == tokens
    for number, end in ends.items():
        pieces = [e["text"] for e in found if e["event"] == "token" and e["request"] == number]
        assert end["text"].removesuffix("\N{REPLACEMENT CHARACTER}") == "".join(pieces).removesuffix(
            "\N{REPLACEMENT CHARACTER}"
        ), "all but a character that was not completed"
        assert end["reason"] in ("length", "stop")
        assert 3 <= len(end["tokens"]) <= 5
        assert end["drift"] < 0.02
        assert 0 < end["first_seconds"] <= end["seconds"]
    summary = found[-1]
    assert summary["event"] == "summary"
    assert summary["tokens"] == sum(map(len, tokens.values()))
    assert summary["launches"] == 2 * summary["steps"]
    assert 0 < summary["largest drift"] < 0.02


def test_the_same_seed_gives_the_same_texts(capsys):
    one, same, other = (
        [e["tokens"] for e in events(capsys, "--seed", seed) if e["event"] == "end"] for seed in ("1", "1", "2")
    )
    assert one == same
    assert one != other


def test_texts_are_shown_one_a_line(capsys):
    assert generate.main([*QUICK, "--prompt", "Hello", "--prompt", "Bye"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3
    assert {line[:7] for line in lines[:2]} == {"  0 Hel", "  1 Bye"}
    assert lines[2].startswith("device mock")


def test_a_model_of_ones_own(capsys, tmp_path: Path):
    config = LlamaConfig.tiny(vocab=300, hidden=32, layers=1, heads=4, kv_heads=4, head_dim=16)
    write_model(tmp_path, config)
    write_tokenizer(tmp_path)
    found = events(capsys, "--model", str(tmp_path), "--prompt", "abc", "--check")
    assert found[-1]["steps"] == len([event for event in found if event["event"] == "token"])
    assert found[-1]["largest drift"] < 0.02


def test_what_cannot_be_done_ends_with_one_sentence_and_1(capsys):
    for arguments, message in (
        (["--model", "/nowhere"], "config.json"),
        (["--blocks", "1"], "pages"),
        (["--device", "tpu"], "device"),
        (["--page-size", "0"], "page_size"),
        (["--max-new-tokens", "0"], "max_new_tokens"),
    ):
        assert generate.main([*QUICK, *arguments]) == 1
        error = capsys.readouterr().err
        assert message in error
        assert len(error.splitlines()) == 1


def test_it_runs_as_a_script(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["generate.py", *QUICK, "--json"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(EXAMPLES / "generate.py"), run_name="__main__")
    assert ended.value.code == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["event"] == "summary"
