"""``gpu-actors chat``: a conversation with a model on the terminal."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gpu_actors.cli.output import (
    CacheDtypeOption,
    DeviceOption,
    DtypeOption,
    chosen_device,
    error_sentence,
    write_error,
    write_note,
)
from gpu_actors.errors import GpuActorsError, InvalidRequest, RequestError

if TYPE_CHECKING:
    from gpu_actors.generation import Engine, Generation, LoadedModel, Sampling, Settings
    from gpu_actors.handles.gpu_context import GpuContext

__all__ = ["chat"]

INTERRUPTED = 130
PROMPT = "> "


def chat(
    question: Annotated[str | None, typer.Argument(help="Without one: a conversation, or standard input.")] = None,
    model: Annotated[
        str | None, typer.Option(help="smollm2, tiny, FILE.gguf or DIR. Default: smollm2 where it is installed.")
    ] = None,
    device: DeviceOption = "auto",
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens of an answer at most.")] = 512,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token every time.")] = 0.0,
    seed: Annotated[int | None, typer.Option(help="The same seed gives the same answer.")] = None,
    dtype: DtypeOption = None,
    cache_dtype: CacheDtypeOption = None,
    cache_mib: Annotated[int, typer.Option(min=1, help="Memory of the KV cache.")] = 256,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="The answer alone.")] = False,
) -> None:
    """Ask a language model, whose attention runs through the service.

    The answer appears as it is generated. A line on standard error follows it: tokens, tokens a second, attention
    requests, launches and device. Without QUESTION, a terminal gets a conversation that remembers what was said: Ctrl-C
    stops an answer, Ctrl-D leaves. Otherwise standard input is the question.
    """
    asked = question
    if question is None and not (sys.stdin is not None and sys.stdin.isatty()):
        asked = _read()
    if asked is not None and not asked.strip():
        raise InvalidRequest("QUESTION", asked, "must hold some text")

    from anyio.from_thread import start_blocking_portal

    from gpu_actors.embedding.blas import blas_threads, limit_blas_threads
    from gpu_actors.generation import RANDOM, Sampling, Settings, load_model, with_blocks

    sampling = Sampling(temperature=temperature, seed=seed)
    threads = blas_threads()
    # BLAS threads that wait by spinning would take the CPUs from the context's; the model has its own.
    limit_blas_threads(1)
    loaded = load_model(model, threads=threads)
    if loaded.template is None:
        raise InvalidRequest("--model", loaded.name, "has no chat template, so it knows no conversations")
    settings = with_blocks(Settings(dtype=dtype, cache_dtype=cache_dtype), loaded.model, cache_mib, texts=1)
    note = RANDOM if loaded.model.weights.stored == "random" and not quiet else ""
    with (
        start_blocking_portal() as portal,
        portal.wrap_async_context_manager(_open(device, loaded, settings, quiet)) as (loop, context, engine),
    ):
        talk = _Talk(loaded, context, engine, loop, portal.call, max_tokens, sampling, quiet, note)
        # Raised in here, an error would leave the engine in a group of errors.
        outcome = _converse(talk) if asked is None else talk.answered(asked.strip("\n"))
    if isinstance(outcome, Exception):
        raise outcome
    if not outcome:
        raise typer.Exit(INTERRUPTED)


@dataclass(slots=True)
class _Talk:
    """loop: the engine's. call: runs a coroutine function on it. note: on the model, before its first answer.
    messages: of the conversation so far.
    """

    loaded: LoadedModel
    context: GpuContext
    engine: Engine
    loop: asyncio.AbstractEventLoop
    call: Callable[..., Any]
    max_tokens: int
    sampling: Sampling
    quiet: bool
    note: str
    messages: list[dict[str, str]] = field(default_factory=list)

    def introduce(self) -> None:
        """Write the note, once."""
        if self.note:
            write_note(self.note)
            self.note = ""

    def answered(self, question: str) -> bool | Exception:
        """`ask`, and the error in place of one that is raised."""
        try:
            return self.ask(question)
        except (GpuActorsError, OSError) as error:  # the reader of the output may leave
            return error

    def ask(self, question: str) -> bool:
        """Write the answer as it comes; False if it was interrupted. What was said is remembered."""
        _expect_text(question)
        messages = [*self.messages, {"role": "user", "content": question}]
        assert self.loaded.template is not None
        # The template itself writes what begins a text.
        prompt = self.loaded.tokenizer.encode(self.loaded.template.render(messages))
        room = self.engine.longest - len(prompt)
        if room < 1:
            longest = self.engine.longest
            raise InvalidRequest("QUESTION", f"{len(prompt)} tokens", f"must leave room: a conversation has {longest}")
        self.introduce()
        before, began = self._counts(), time.perf_counter()
        generation = self.call(self._submit, prompt, min(self.max_tokens, room))
        answer, finished = self._write(generation)
        seconds = time.perf_counter() - began
        self.messages = [*messages, {"role": "assistant", "content": answer}]
        if not self.quiet:
            tokens, requests, launches = (now - then for now, then in zip(self._counts(), before, strict=True))
            write_note(
                f"{tokens} tokens, {tokens / seconds:.1f} tokens/s, {requests} attention requests, "
                f"{launches} launches, {self.context.info.name}"
            )
        return finished

    async def _submit(self, prompt: list[int], tokens: int) -> Generation:
        return self.engine.submit(prompt, max_new_tokens=tokens, sampling=self.sampling)

    def _write(self, generation: Generation) -> tuple[str, bool]:
        stream = self.loaded.tokenizer.stream()
        answer = ""

        async def next_token() -> int | None:
            return await anext(tokens, None)

        def put(text: str) -> None:
            nonlocal answer
            answer += text
            # No text of a model moves the cursor or names the window.
            sys.stdout.write(
                "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text)
            )
            sys.stdout.flush()

        tokens = aiter(generation)
        hidden = {*self.loaded.model.config.stop_tokens, *self.loaded.tokenizer.special}
        with _interruptible(generation.cancel, self.loop) as interrupted:
            while (token := self.call(next_token)) is not None:
                if token not in hidden and not interrupted.is_set():
                    put(stream.feed(token))
        put(stream.end())
        sys.stdout.write("\n")
        sys.stdout.flush()
        return answer, not interrupted.is_set()

    def _counts(self) -> tuple[int, int, int]:
        stats = self.engine.stats
        launches = self.context.stats()["kv_cache"].launched
        return stats.tokens, stats.steps * self.loaded.model.config.layers, launches


@contextlib.contextmanager
def _interruptible(cancel: Callable[[], object], loop: asyncio.AbstractEventLoop) -> Iterator[threading.Event]:
    """Call ``cancel`` on the loop at the first Ctrl-C, which sets the event; the second one acts as it did before.

    A handler of its own, for Python drops a KeyboardInterrupt that it raises while it finalises an object.
    """
    interrupted, before = threading.Event(), signal.getsignal(signal.SIGINT)
    if before is not signal.default_int_handler or threading.current_thread() is not threading.main_thread():
        yield interrupted
        return

    def interrupt(*_: object) -> None:
        signal.signal(signal.SIGINT, before)
        interrupted.set()
        loop.call_soon_threadsafe(cancel)

    signal.signal(signal.SIGINT, interrupt)
    try:
        yield interrupted
    finally:
        signal.signal(signal.SIGINT, before)


def _converse(talk: _Talk) -> bool | Exception:
    """Ask what is typed until Ctrl-D, or until an error that the next question would meet too."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 - input() then edits its line and remembers those before

    talk.introduce()
    while True:
        try:
            question = input(PROMPT)
        except EOFError:
            sys.stdout.write("\n")
            return True
        except KeyboardInterrupt:
            sys.stdout.write("\n")
            continue
        if not question.strip():
            continue
        outcome = talk.answered(question)
        if isinstance(outcome, RequestError):
            write_error(error_sentence(outcome))
        elif isinstance(outcome, Exception):
            return outcome


def _expect_text(question: str) -> None:
    """Refuse what stands for bytes that are no UTF-8, which an argument and a terminal may have."""
    try:
        question.encode()
    except UnicodeEncodeError:
        raise InvalidRequest("QUESTION", question, "must be UTF-8 text") from None


def _read() -> str:
    """Standard input, an empty text where it is closed."""
    try:
        return "" if sys.stdin is None else sys.stdin.read()
    except UnicodeDecodeError as error:
        raise InvalidRequest("standard input", None, f"standard input must be UTF-8 text: {error}") from None


@contextlib.asynccontextmanager
async def _open(
    device: str, loaded: LoadedModel, settings: Settings, quiet: bool
) -> AsyncIterator[tuple[asyncio.AbstractEventLoop, GpuContext, Engine]]:
    from gpu_actors.context import open_context
    from gpu_actors.generation import Engine

    async with (
        open_context(chosen_device(device, quiet)) as context,
        Engine.open(context, loaded.model, settings) as engine,
    ):
        yield asyncio.get_running_loop(), context, engine
