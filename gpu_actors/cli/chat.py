"""``gpu-actors chat``: a conversation with a model on the terminal."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated

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
from gpu_actors.process import handling

if TYPE_CHECKING:
    from gpu_actors.generation import Engine, Generation, LoadedModel, Sampling
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

    The answer appears as it is generated. A line on standard error follows it: tokens, tokens per second,
    attention requests, launches and device. Without QUESTION, a terminal gets a conversation, whose answers build on
    each other: Ctrl-C stops an answer, Ctrl-D leaves. Without a terminal, standard input is the question.
    """
    asked = question
    if question is None and not (sys.stdin is not None and sys.stdin.isatty()):
        asked = _read()
    if asked is not None and not asked.strip():
        raise InvalidRequest("QUESTION", asked, "must hold some text")

    from gpu_actors.embedding.blas import blas_threads, limit_blas_threads
    from gpu_actors.generation import RANDOM, Sampling, Settings, load_model, with_blocks

    sampling = Sampling(temperature=temperature, seed=seed)
    threads = blas_threads()
    # BLAS threads spin while they wait, which would take the CPUs from the context. The model has its own threads.
    limit_blas_threads(1)
    loaded = load_model(model, threads=threads)
    if loaded.template is None:
        raise InvalidRequest("--model", loaded.name, "has no chat template, so it knows no conversations")
    settings = with_blocks(Settings(dtype=dtype, cache_dtype=cache_dtype), loaded.model, cache_mib, texts=1)
    note = RANDOM if loaded.model.weights.stored == "random" and not quiet else ""

    async def run() -> bool | Exception:
        from gpu_actors.context import open_context
        from gpu_actors.generation import Engine

        async with (
            open_context(chosen_device(device, quiet)) as context,
            Engine.open(context, loaded.model, settings) as engine,
        ):
            talk = _Talk(loaded, context, engine, max_tokens, sampling, quiet, note)
            # An error that is raised in here would leave the engine inside a group of errors.
            return await (_converse(talk) if asked is None else talk.answered(asked.strip("\n")))

    outcome = asyncio.run(run())
    if isinstance(outcome, Exception):
        raise outcome
    if not outcome:
        raise typer.Exit(INTERRUPTED)


@dataclass(slots=True)
class _Talk:
    """note: about the model, written before its first answer. messages: the conversation so far."""

    loaded: LoadedModel
    context: GpuContext
    engine: Engine
    max_tokens: int
    sampling: Sampling
    quiet: bool
    note: str
    messages: list[dict[str, str]] = field(default_factory=list)

    def introduce(self) -> None:
        if self.note:
            write_note(self.note)
            self.note = ""

    async def answered(self, question: str) -> bool | Exception:
        """Call `ask`, and return an error in place of raising it."""
        try:
            return await self.ask(question)
        except (GpuActorsError, OSError) as error:  # the reader of the output may close it
            return error

    async def ask(self, question: str) -> bool:
        """Write the answer as it comes, and keep it in ``messages``. Returns False if it was interrupted."""
        _expect_text(question)
        messages = [*self.messages, {"role": "user", "content": question}]
        assert self.loaded.template is not None
        # The template itself writes the tokens that begin a text.
        prompt = self.loaded.tokenizer.encode(self.loaded.template.render(messages))
        room = self.engine.longest - len(prompt)
        if room < 1:
            longest = self.engine.longest
            raise InvalidRequest("QUESTION", f"{len(prompt)} tokens", f"must leave room: a conversation has {longest}")
        self.introduce()
        before, began = self._counts(), time.perf_counter()
        generation = self.engine.submit(prompt, max_new_tokens=min(self.max_tokens, room), sampling=self.sampling)
        answer = await self._write(generation)
        seconds = time.perf_counter() - began
        self.messages = [*messages, {"role": "assistant", "content": answer}]
        if not self.quiet:
            tokens, requests, launches = (now - then for now, then in zip(self._counts(), before, strict=True))
            write_note(
                f"{tokens} tokens, {tokens / seconds:.1f} tokens/s, {requests} attention requests, "
                f"{launches} launches, {self.context.info.name}"
            )
        return generation.reason != "cancelled"

    async def _write(self, generation: Generation) -> str:
        """Write the answer, until it ends or is interrupted."""
        stream = self.loaded.tokenizer.stream()
        hidden = {*self.loaded.model.config.stop_tokens, *self.loaded.tokenizer.special}
        loop, before = asyncio.get_running_loop(), signal.getsignal(signal.SIGINT)
        answer = ""

        def put(text: str) -> None:
            nonlocal answer
            answer += text
            # A model's text must not move the cursor or rename the window.
            sys.stdout.write(
                "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text)
            )
            sys.stdout.flush()

        # Python's own handler does not do: a KeyboardInterrupt that it raises while an object is finalised is dropped.
        def interrupt(*_: object) -> None:
            signal.signal(signal.SIGINT, before)  # for the second Ctrl-C
            loop.call_soon_threadsafe(generation.cancel)

        with handling(signal.SIGINT, interrupt):
            async for token in generation:
                if token not in hidden:
                    put(stream.feed(token))
        put(stream.end())
        sys.stdout.write("\n")
        sys.stdout.flush()
        return answer

    def _counts(self) -> tuple[int, int, int]:
        stats = self.engine.stats
        launches = self.context.stats()["kv_cache"].launched
        return stats.tokens, stats.steps * self.loaded.model.config.layers, launches


async def _converse(talk: _Talk) -> bool | Exception:
    """Ask the typed questions until Ctrl-D, or until an error that the next question would meet too."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 - input() then edits its line and remembers those before

    talk.introduce()
    while (question := _type()) is not None:
        if not question.strip():
            continue
        outcome = await talk.answered(question)
        if isinstance(outcome, RequestError):
            write_error(error_sentence(outcome))
        elif isinstance(outcome, Exception):
            return outcome
    return True


def _type() -> str | None:
    """The typed line, an empty text at Ctrl-C, None at Ctrl-D. It blocks the loop, which has nothing else to do."""
    try:
        with handling(signal.SIGINT, signal.default_int_handler):
            return input(PROMPT)
    except EOFError:
        sys.stdout.write("\n")
        return None
    except KeyboardInterrupt:
        sys.stdout.write("\n")
        return ""


def _expect_text(question: str) -> None:
    """Refuse a text with bytes that are not UTF-8. An argument or a terminal may have them."""
    try:
        question.encode()
    except UnicodeEncodeError:
        raise InvalidRequest("QUESTION", question, "must be UTF-8 text") from None


def _read() -> str:
    """The text of standard input, empty if it is closed."""
    try:
        return "" if sys.stdin is None else sys.stdin.read()
    except UnicodeDecodeError as error:
        raise InvalidRequest("standard input", None, f"standard input must be UTF-8 text: {error}") from None
