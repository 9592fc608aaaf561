"""/v1/completions and /v1/chat/completions."""

from __future__ import annotations

import math
import time
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import anyio
import anyio.to_thread
from starlette.requests import Request
from starlette.responses import Response

from gpu_actors.errors import DeadlineExceeded, InvalidRequest, Overloaded, Unsupported
from gpu_actors.generation.sampling import Sampling, TokenScores
from gpu_actors.generation.tokenizer import Tokenizer
from gpu_actors.server.http.guard import KEY, Exchange
from gpu_actors.server.openai.detokenizer import Echo, Said, ScoredToken, Telling, token_text
from gpu_actors.server.openai.models import Generator
from gpu_actors.server.openai.parsing import body_of, read
from gpu_actors.server.openai.requests import ChatRequest, CompletionRequest, GenerationRequest
from gpu_actors.server.openai.responses import (
    ChatChoice,
    ChatChunk,
    ChatCompletion,
    ChatLogprobs,
    ChatMessage,
    ChatToken,
    ChunkChoice,
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    Delta,
    TopToken,
)
from gpu_actors.server.openai.stream import EventStream, Writer
from gpu_actors.tracing import host_span

if TYPE_CHECKING:
    from gpu_actors.server.openai.state import State

__all__ = ["chat_completions", "check_tokens", "completions", "expect_to_fit", "tokenized"]

_NO_USAGE = {"usage"}

_SMALL = 1 << 12
"""Bytes of a body that is read on the loop: in less time than a thread takes to begin where the loop is busy."""

_LET_IN = 1.0
"""Seconds for the engine to let in a text for which there is room, once the server leaves."""

Asked = TypeVar("Asked", bound=GenerationRequest)


@dataclass(frozen=True, slots=True)
class _Work:
    """A request that has been read. prompt: its tokens. new: how many may follow. heading: what every body of its
    answer says first. said: the prompt that a completion echoes, where it is a text.
    """

    state: State
    generator: Generator
    asked: GenerationRequest
    exchange: Exchange
    sampling: Sampling
    prompt: list[int]
    new: int
    heading: dict[str, Any]
    said: Said | None = None

    @asynccontextmanager
    async def told(self) -> AsyncIterator[Telling]:
        """Generate the text as long as this is entered. A place is held for as long.

        Raises what the admission raises.
        """
        exchange, engine, admission = self.exchange, self.generator.engine, self.state.admission
        # This keeps to the deadline itself. One that waits to be refused gets its 429, not a 504 in between.
        exchange.stretch(math.inf)
        patience = time.monotonic() + admission.queue_seconds
        rows = len(self.prompt) * engine.meter.row_share
        async with AsyncExitStack() as stack:
            with self.state.farewell.waiting():
                place = await stack.enter_async_context(
                    admission.place(exchange.deadline, cost=rows + self.new, client=exchange.client)
                )
            await stack.enter_async_context(self._in_time())
            generation = engine.submit(
                self.prompt,
                max_new_tokens=self.new,
                sampling=self.sampling,
                asked=exchange.started,
                deadline=exchange.deadline,
            )
            generation.on_token = lambda: place.did(1.0 if len(generation.made) > 1 else rows + 1.0)
            config = self.generator.config
            telling = Telling(generation, self.generator.tokenizer, self.asked.stop, config.stop_tokens)
            try:
                # A place among the texts is not yet room in the cache.
                with (
                    self.state.farewell.waiting(_LET_IN),
                    anyio.move_on_after(max(0.0, patience - time.monotonic())),
                ):
                    await generation.let_in()
                if generation.begun is None and not generation.reason:
                    said = f"no room in the KV cache came to this request within {admission.queue_seconds} s"
                    raise Overloaded(said, admission.retry_after)
                yield telling
            finally:
                generation.cancel()
                usage = telling.usage
                exchange.notes |= {
                    "model": self.generator.name,
                    "prompt_tokens": usage.prompt_tokens,
                    "cached_tokens": usage.prompt_tokens_details.cached_tokens,
                    "completion_tokens": usage.completion_tokens,
                    "finish": telling.finish or "none",
                }
                for name, at in (("queue_ms", generation.begun), ("first_token_ms", generation.first)):
                    if at is not None:
                        exchange.notes[name] = round((at - exchange.started) * 1e3, 1)
        if not self.asked.stream:
            exchange.stretch(0.0)  # for the time in which the client reads the answer

    @asynccontextmanager
    async def _in_time(self) -> AsyncIterator[None]:
        """Raise `DeadlineExceeded` at the deadline."""
        deadline = self.exchange.deadline
        left = float("inf") if deadline is None else deadline - time.monotonic()
        with anyio.move_on_after(left) as scope:
            yield
        if scope.cancelled_caught:
            raise DeadlineExceeded("the deadline passed before the end of the text")


async def completions(request: Request) -> Response:
    asked, work = await _read(request, CompletionRequest, "cmpl", _top_of_completion)

    def event(text: str, telling: Telling, echo: Echo | None = None) -> Completion:
        begin, scored = (echo.text, echo.scored) if echo is not None else ("", [])
        logprobs = None
        if asked.logprobs is not None:
            logprobs = _plain_logprobs([*scored, *telling.take_scored()], work)
        choice = CompletionChoice(text=begin + text, logprobs=logprobs, finish_reason=telling.finish)
        return Completion(**work.heading, choices=[choice])

    async def events(writer: Writer) -> None:
        exclude = None if asked.include_usage else _NO_USAGE
        async with work.told() as telling:
            begun = not asked.echo
            while telling.finish is None:
                text = await telling.more()
                if text or telling.finish or not begun:
                    await writer.write(event(text, telling, None if begun else telling.echo(work.said)), exclude)
                    begun = True
            if asked.include_usage:
                await writer.write(Completion(**work.heading, choices=[], usage=telling.usage))

    if asked.stream:
        return EventStream(events)
    async with work.told() as telling:
        text = await _all(telling)
        answer = event(text, telling, telling.echo(work.said) if asked.echo else None)
        answer.usage = telling.usage
    return _json(answer.model_dump_json())


async def chat_completions(request: Request) -> Response:
    asked, work = await _read(request, ChatRequest, "chatcmpl", _top_of_chat)

    def logprobs(telling: Telling) -> ChatLogprobs | None:
        return _chat_logprobs(telling.take_scored(), work) if asked.logprobs else None

    def chunk(choices: list[ChunkChoice]) -> ChatChunk:
        return ChatChunk(**work.heading, choices=choices)

    async def events(writer: Writer) -> None:
        exclude = None if asked.include_usage else _NO_USAGE
        async with work.told() as telling:
            begun = False
            while telling.finish is None:
                text = await telling.more()
                if not begun:
                    begun = True
                    await writer.write(chunk([ChunkChoice(delta=Delta(role="assistant", content=""))]), exclude)
                if text:
                    await writer.write(
                        chunk([ChunkChoice(delta=Delta(content=text), logprobs=logprobs(telling))]), exclude
                    )
            # What a held character or an end of text leaves.
            last = ChunkChoice(delta=Delta(), logprobs=logprobs(telling), finish_reason=telling.finish)
            await writer.write(chunk([last]), exclude)
            if asked.include_usage:
                counted = chunk([])
                counted.usage = telling.usage
                await writer.write(counted)

    if asked.stream:
        return EventStream(events)
    async with work.told() as telling:
        text = await _all(telling)
        assert telling.finish is not None
        choice = ChatChoice(message=ChatMessage(content=text), logprobs=logprobs(telling), finish_reason=telling.finish)
        answer = ChatCompletion(**work.heading, choices=[choice], usage=telling.usage)
    return _json(answer.model_dump_json())


async def _read(
    request: Request, kind: type[Asked], prefix: str, top: Callable[[Asked], int | None]
) -> tuple[Asked, _Work]:
    """What is asked. prefix: of the answer's id. top: how many likeliest tokens are asked for at each place."""
    state: State = request.app.state.openai_api
    exchange: Exchange = request.scope[KEY]
    body = await body_of(request)

    def understood() -> tuple[Asked, _Work]:
        asked = read(kind, body)
        return asked, _work(state, exchange, asked, prefix, top(asked))

    with state.farewell.waiting():
        exchange.stretch(math.inf)  # while it waits to be refused
        async with state.admission.reading(exchange.deadline, client=exchange.client):
            exchange.stretch(0.0)
            if len(body) <= _SMALL:
                return understood()
            return await anyio.to_thread.run_sync(understood, limiter=state.readers_of(len(body)))
    raise AssertionError("a wait that was ended raises")


def _top_of_completion(asked: CompletionRequest) -> int | None:
    return 0 if asked.max_tokens == 0 and asked.logprobs is None else asked.logprobs


def _top_of_chat(asked: ChatRequest) -> int | None:
    if asked.top_logprobs is not None and not asked.logprobs:
        raise InvalidRequest("top_logprobs", asked.top_logprobs, "must be left out unless logprobs is true")
    return (asked.top_logprobs or 0) if asked.logprobs else None


def _work(state: State, exchange: Exchange, asked: GenerationRequest, prefix: str, top: int | None) -> _Work:
    if asked.stream_options is not None and not asked.stream:
        raise InvalidRequest("stream_options", "", "must be left out unless stream is true")
    sampling = Sampling(
        temperature=1.0 if asked.temperature is None else asked.temperature,
        top_p=1.0 if asked.top_p is None else asked.top_p,
        seed=asked.seed,
        top_logprobs=top,
        score_prompt=isinstance(asked, CompletionRequest) and bool(asked.echo) and top is not None,
    )
    generator = state.models.generator_of(asked.model)
    heading = {"id": f"{prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": asked.model}
    prompt = tokenized(generator, asked)
    new = _new_tokens(asked, len(prompt), generator.engine.longest, state.settings.default_max_tokens)
    said = None
    if isinstance(asked, CompletionRequest) and asked.echo and isinstance(asked.prompt, str):
        said = Said(asked.prompt, generator.tokenizer.offsets(asked.prompt))
    return _Work(state, generator, asked, exchange, sampling, prompt, new, heading, said)


def tokenized(generator: Generator, asked: GenerationRequest) -> list[int]:
    """The tokens of a request's prompt, after `expect_to_fit`. For a thread."""
    expect_to_fit(generator, asked)
    with host_span("tokenise", model=generator.name):
        return _prompt(generator, asked)


def expect_to_fit(generator: Generator, asked: GenerationRequest) -> None:
    """Refuse a prompt that is too long whatever its tokens are, before the time is spent that counting them takes."""
    longest = generator.engine.longest
    field, what, most = "prompt", "characters", longest * generator.tokenizer.longest_token
    if isinstance(asked, ChatRequest):
        field, size = "messages", sum(len(message.content) for message in asked.messages)
    else:
        assert isinstance(asked, CompletionRequest)
        size = len(asked.prompt)
        if not isinstance(asked.prompt, str):
            what, most = "tokens", longest
    if size > most:
        reason = f"must leave room for an answer: a text may have {longest} tokens, which are at most {most} {what}"
        raise InvalidRequest(field, f"{size} {what}", reason)


def _prompt(generator: Generator, asked: GenerationRequest) -> list[int]:
    """The tokens of the prompt, with those that the tokenizer puts around every text."""
    tokenizer = generator.tokenizer
    if isinstance(asked, ChatRequest):
        if generator.template is None:
            raise Unsupported("model", generator.name, "has no chat template; give a prompt, as to /v1/completions")
        said = [
            message.model_dump(include={"role", "content", "name"}, exclude_none=True) for message in asked.messages
        ]
        # The template itself writes what begins a text.
        return tokenizer.encode(generator.template.render(said))
    assert isinstance(asked, CompletionRequest)
    if not isinstance(asked.prompt, str):
        check_tokens("prompt", asked.prompt, generator)
        return asked.prompt
    return tokenizer.prompt(asked.prompt)


def check_tokens(field: str, tokens: Sequence[int], generator: Generator) -> None:
    """Raise `InvalidRequest` for the first that the model's vocabulary lacks."""
    vocab = generator.config.vocab
    for index, token in enumerate(tokens):
        if not 0 <= token < vocab:
            raise InvalidRequest(f"{field}[{index}]", token, f"must be a token id from 0 to {vocab - 1}")


def _new_tokens(asked: GenerationRequest, prompt: int, longest: int, default: int) -> int:
    field, limit = "max_tokens", asked.max_tokens
    what = "prompt"
    if isinstance(asked, ChatRequest):
        what = "messages"
        if asked.max_completion_tokens is not None:
            field, limit = "max_completion_tokens", asked.max_completion_tokens
    room = longest - prompt
    if room < (0 if limit == 0 else 1):
        reason = f"must leave room for an answer: a text may have {longest} tokens"
        raise InvalidRequest(what, f"{prompt} tokens", reason)
    if limit is not None and limit > room:
        reason = f"must be from 1 to {room}: {prompt} of {longest} tokens are the prompt's"
        raise InvalidRequest(field, limit, reason)
    return min(room, default) if limit is None else limit


async def _all(telling: Telling) -> str:
    pieces = []
    while telling.finish is None:
        pieces.append(await telling.more())
    return "".join(pieces)


def _json(body: str) -> Response:
    return Response(body, media_type="application/json")


def _plain_logprobs(scored: Sequence[ScoredToken], work: _Work) -> CompletionLogprobs:
    tokenizer = work.generator.tokenizer
    return CompletionLogprobs(
        tokens=[token_text(tokenizer, one.token) for one in scored],
        token_logprobs=[None if one.scores is None else one.scores.chosen for one in scored],
        top_logprobs=[None if one.scores is None else _by_text(one.scores, tokenizer) for one in scored],
        text_offset=[one.offset for one in scored],
    )


def _by_text(scores: TokenScores, tokenizer: Tokenizer) -> dict[str, float]:
    found: dict[str, float] = {}
    for token, score in scores.top:
        # Parts of characters all look alike: the likeliest of them counts.
        found.setdefault(token_text(tokenizer, token), score)
    return found


def _chat_logprobs(scored: Sequence[ScoredToken], work: _Work) -> ChatLogprobs:
    def shown(token: int, score: float) -> TopToken:
        tokenizer = work.generator.tokenizer
        return TopToken(token=token_text(tokenizer, token), logprob=score, bytes=list(tokenizer.bytes_of(token)))

    content = []
    for one in scored:
        assert one.scores is not None
        chosen = shown(one.token, one.scores.chosen)
        content.append(ChatToken(**chosen.model_dump(), top_logprobs=[shown(*top) for top in one.scores.top]))
    return ChatLogprobs(content=content)
