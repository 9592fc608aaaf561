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
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from gpu_actors.errors import DeadlineExceeded, InvalidRequest, Overloaded, Unsupported
from gpu_actors.generation.sampling import Sampling, TokenScores
from gpu_actors.generation.tokenizer import Tokenizer
from gpu_actors.server.http.guard import KEY, Exchange
from gpu_actors.server.openai.detokenizer import Detokenizer, Echo, PromptText, ScoredToken, token_text
from gpu_actors.server.openai.models import Generator
from gpu_actors.server.openai.parsing import parse_body, read_request
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
    Finish,
    TopToken,
)
from gpu_actors.server.openai.stream import EventStream, Writer
from gpu_actors.tracing import host_span

if TYPE_CHECKING:
    from gpu_actors.server.openai.state import State

__all__ = ["chat_completions", "check_tokens", "completions", "expect_to_fit", "tokenized"]

_START_SECONDS = 1.0
"""Seconds that the engine has to start a text for which there is room, once the server shuts down."""

Params = TypeVar("Params", bound=GenerationRequest)


@dataclass(frozen=True, slots=True)
class _PreparedRequest:
    """A request that has been read.

    prompt: the tokens of the prompt.
    max_new_tokens: how many tokens may follow.
    heading: the fields with which each body of its answer begins.
    prompt_text: the prompt as a text, if it is one and the answer echoes it.
    """

    state: State
    generator: Generator
    params: GenerationRequest
    exchange: Exchange
    sampling: Sampling
    prompt: list[int]
    max_new_tokens: int
    heading: dict[str, Any]
    prompt_text: PromptText | None = None

    @asynccontextmanager
    async def generate(self) -> AsyncIterator[Detokenizer]:
        """Hold a place, and generate the text, while this is entered.

        Raises the errors of the admission.
        """
        exchange, engine, admission = self.exchange, self.generator.engine, self.state.admission
        # This method keeps to the deadline itself. A request that waits for its refusal gets a 429, not a 504.
        exchange.stretch(math.inf)
        patience = time.monotonic() + admission.queue_seconds
        rows = len(self.prompt) * engine.meter.row_share
        async with AsyncExitStack() as stack:
            with self.state.farewell.waiting():
                place = await stack.enter_async_context(
                    admission.place(exchange.deadline, cost=rows + self.max_new_tokens, client=exchange.client)
                )
            await stack.enter_async_context(self._in_time())
            generation = engine.submit(
                self.prompt,
                max_new_tokens=self.max_new_tokens,
                sampling=self.sampling,
                asked=exchange.started,
                deadline=exchange.deadline,
            )
            generation.on_token = lambda: place.did(1.0 if len(generation.made) > 1 else rows + 1.0)
            generator = self.generator
            output = Detokenizer(generation, generator.tokenizer, self.params.stop, generator.stop_tokens)
            try:
                # A request with a place may still wait for room in the cache.
                with (
                    self.state.farewell.waiting(_START_SECONDS),
                    anyio.move_on_after(max(0.0, patience - time.monotonic())),
                ):
                    await generation.let_in()
                if generation.begun is None and not generation.reason:
                    reason = f"no room in the KV cache came to this request within {admission.queue_seconds} s"
                    raise Overloaded(reason, admission.retry_after)
                yield output
            finally:
                generation.cancel()
                usage = output.usage
                exchange.notes |= {
                    "model": self.generator.name,
                    "prompt_tokens": usage.prompt_tokens,
                    "cached_tokens": usage.prompt_tokens_details.cached_tokens,
                    "completion_tokens": usage.completion_tokens,
                    "finish": output.finish or "none",
                }
                for name, at in (("queue_ms", generation.begun), ("first_token_ms", generation.first)):
                    if at is not None:
                        exchange.notes[name] = round((at - exchange.started) * 1e3, 1)
        if not self.params.stream:
            exchange.stretch(0.0)  # the deadline holds again while the client reads the answer

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
    params, prepared = await _read(request, CompletionRequest, "cmpl", _top_of_completion)

    def event(text: str, output: Detokenizer, echo: Echo | None = None) -> Completion:
        begin, scored = (echo.text, echo.scored) if echo is not None else ("", [])
        logprobs = None
        if params.logprobs is not None:
            logprobs = _plain_logprobs([*scored, *output.take_scored()], prepared)
        choice = CompletionChoice(text=begin + text, logprobs=logprobs, finish_reason=output.finish)
        return Completion(**prepared.heading, choices=[choice])

    async def events(output: Detokenizer) -> AsyncIterator[Completion]:
        started = not params.echo
        while output.finish is None:
            text = await output.next_text()
            if text or output.finish or not started:
                yield event(text, output, None if started else output.echo(prepared.prompt_text))
                started = True
        if params.include_usage:
            yield Completion(**prepared.heading, choices=[], usage=output.usage)

    def whole(text: str, output: Detokenizer) -> Completion:
        answer = event(text, output, output.echo(prepared.prompt_text) if params.echo else None)
        answer.usage = output.usage
        return answer

    return await _respond(prepared, events, whole)


async def chat_completions(request: Request) -> Response:
    params, prepared = await _read(request, ChatRequest, "chatcmpl", _top_of_chat)

    def logprobs(output: Detokenizer) -> ChatLogprobs | None:
        return _chat_logprobs(output.take_scored(), prepared) if params.logprobs else None

    def chunk(delta: Delta, logprobs: ChatLogprobs | None = None, finish: Finish | None = None) -> ChatChunk:
        choice = ChunkChoice(delta=delta, logprobs=logprobs, finish_reason=finish)
        return ChatChunk(**prepared.heading, choices=[choice])

    async def events(output: Detokenizer) -> AsyncIterator[ChatChunk]:
        started = False
        while output.finish is None:
            text = await output.next_text()
            if not started:
                started = True
                yield chunk(Delta(role="assistant", content=""))
            if text:
                yield chunk(Delta(content=text), logprobs(output))
        # The last tokens may have no text, as parts of a held character or an end of text.
        yield chunk(Delta(), logprobs(output), output.finish)
        if params.include_usage:
            yield ChatChunk(**prepared.heading, choices=[], usage=output.usage)

    def whole(text: str, output: Detokenizer) -> ChatCompletion:
        assert output.finish is not None
        choice = ChatChoice(message=ChatMessage(content=text), logprobs=logprobs(output), finish_reason=output.finish)
        return ChatCompletion(**prepared.heading, choices=[choice], usage=output.usage)

    return await _respond(prepared, events, whole)


async def _respond(
    prepared: _PreparedRequest,
    events: Callable[[Detokenizer], AsyncIterator[BaseModel]],
    whole: Callable[[str, Detokenizer], BaseModel],
) -> Response:
    """The answer in one body, or as a stream of events if the request asks for one."""
    params = prepared.params

    async def write(writer: Writer) -> None:
        exclude = None if params.include_usage else {"usage"}
        async with prepared.generate() as output:
            async for event in events(output):
                await writer.write(event, exclude)

    if params.stream:
        return EventStream(write)
    async with prepared.generate() as output:
        pieces = []
        while output.finish is None:
            pieces.append(await output.next_text())
        answer = whole("".join(pieces), output)
    return Response(answer.model_dump_json(), media_type="application/json")


async def _read(
    request: Request, kind: type[Params], prefix: str, top: Callable[[Params], int | None]
) -> tuple[Params, _PreparedRequest]:
    """The parameters and the prepared request of a body.

    prefix: the beginning of the answer's id.
    top: returns how many of the likeliest tokens the answer names at each position.
    """
    state: State = request.app.state.openai_api
    exchange: Exchange = request.scope[KEY]

    def read(body: bytes) -> tuple[Params, _PreparedRequest]:
        params = parse_body(kind, body)
        return params, _prepare(state, exchange, params, prefix, top(params))

    return await read_request(request, state.admission, read)


def _top_of_completion(params: CompletionRequest) -> int | None:
    return 0 if params.max_tokens == 0 and params.logprobs is None else params.logprobs


def _top_of_chat(params: ChatRequest) -> int | None:
    if params.top_logprobs is not None and not params.logprobs:
        raise InvalidRequest("top_logprobs", params.top_logprobs, "must be left out unless logprobs is true")
    return (params.top_logprobs or 0) if params.logprobs else None


def _prepare(
    state: State, exchange: Exchange, params: GenerationRequest, prefix: str, top: int | None
) -> _PreparedRequest:
    if params.stream_options is not None and not params.stream:
        raise InvalidRequest("stream_options", "", "must be left out unless stream is true")
    sampling = Sampling(
        temperature=1.0 if params.temperature is None else params.temperature,
        top_p=1.0 if params.top_p is None else params.top_p,
        seed=params.seed,
        top_logprobs=top,
        score_prompt=isinstance(params, CompletionRequest) and bool(params.echo) and top is not None,
    )
    generator = state.models.generator_of(params.model)
    heading = {"id": f"{prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": params.model}
    prompt = tokenized(generator, params)
    max_new_tokens = _max_new_tokens(params, len(prompt), generator.engine.longest, state.settings.default_max_tokens)
    prompt_text = None
    if isinstance(params, CompletionRequest) and params.echo and isinstance(params.prompt, str):
        prompt_text = PromptText(params.prompt, generator.tokenizer.offsets(params.prompt))
    return _PreparedRequest(state, generator, params, exchange, sampling, prompt, max_new_tokens, heading, prompt_text)


def tokenized(generator: Generator, params: GenerationRequest) -> list[int]:
    """The tokens of a request's prompt, after `expect_to_fit`. Call it on a thread for a long prompt."""
    expect_to_fit(generator, params)
    with host_span("tokenise", model=generator.name):
        return _prompt(generator, params)


def expect_to_fit(generator: Generator, params: GenerationRequest) -> None:
    """Refuse a prompt whose length alone shows that it is too long, before time is spent on tokenizing it."""
    longest = generator.engine.longest
    field, what, most = "prompt", "characters", longest * generator.tokenizer.longest_token
    if isinstance(params, ChatRequest):
        field, size = "messages", sum(len(message.content) for message in params.messages)
    else:
        assert isinstance(params, CompletionRequest)
        size = len(params.prompt)
        if not isinstance(params.prompt, str):
            what, most = "tokens", longest
    if size > most:
        reason = f"must leave room for an answer: a text may have {longest} tokens, which are at most {most} {what}"
        raise InvalidRequest(field, f"{size} {what}", reason)


def _prompt(generator: Generator, params: GenerationRequest) -> list[int]:
    """The tokens of the prompt, with the tokens that the tokenizer puts around every text."""
    tokenizer = generator.tokenizer
    if isinstance(params, ChatRequest):
        if generator.template is None:
            raise Unsupported("model", generator.name, "has no chat template; give a prompt, as to /v1/completions")
        messages = [
            message.model_dump(include={"role", "content", "name"}, exclude_none=True) for message in params.messages
        ]
        # The template itself writes the tokens that begin a text.
        return tokenizer.encode(generator.template.render(messages))
    assert isinstance(params, CompletionRequest)
    if not isinstance(params.prompt, str):
        check_tokens("prompt", params.prompt, generator)
        return params.prompt
    return tokenizer.prompt(params.prompt)


def check_tokens(field: str, tokens: Sequence[int], generator: Generator) -> None:
    """Raise `InvalidRequest` for the first token that the model's vocabulary lacks."""
    vocab = generator.vocab
    for index, token in enumerate(tokens):
        if not 0 <= token < vocab:
            raise InvalidRequest(f"{field}[{index}]", token, f"must be a token id from 0 to {vocab - 1}")


def _max_new_tokens(params: GenerationRequest, prompt: int, longest: int, default: int) -> int:
    field, limit = "max_tokens", params.max_tokens
    what = "prompt"
    if isinstance(params, ChatRequest):
        what = "messages"
        if params.max_completion_tokens is not None:
            field, limit = "max_completion_tokens", params.max_completion_tokens
    room = longest - prompt
    if room < (0 if limit == 0 else 1):
        reason = f"must leave room for an answer: a text may have {longest} tokens"
        raise InvalidRequest(what, f"{prompt} tokens", reason)
    if limit is not None and limit > room:
        reason = f"must be from 1 to {room}: {prompt} of {longest} tokens are the prompt's"
        raise InvalidRequest(field, limit, reason)
    return min(room, default) if limit is None else limit


def _plain_logprobs(scored: Sequence[ScoredToken], prepared: _PreparedRequest) -> CompletionLogprobs:
    tokenizer = prepared.generator.tokenizer
    return CompletionLogprobs(
        tokens=[token_text(tokenizer, one.token) for one in scored],
        token_logprobs=[None if one.scores is None else one.scores.chosen for one in scored],
        top_logprobs=[None if one.scores is None else _by_text(one.scores, tokenizer) for one in scored],
        text_offset=[one.offset for one in scored],
    )


def _by_text(scores: TokenScores, tokenizer: Tokenizer) -> dict[str, float]:
    scores_by_text: dict[str, float] = {}
    for token, score in scores.top:
        # Different parts of characters have the same text: the likeliest of them counts.
        scores_by_text.setdefault(token_text(tokenizer, token), score)
    return scores_by_text


def _chat_logprobs(scored: Sequence[ScoredToken], prepared: _PreparedRequest) -> ChatLogprobs:
    def top_token(token: int, score: float) -> TopToken:
        tokenizer = prepared.generator.tokenizer
        return TopToken(token=token_text(tokenizer, token), logprob=score, bytes=list(tokenizer.bytes_of(token)))

    content = []
    for one in scored:
        assert one.scores is not None
        chosen = top_token(one.token, one.scores.chosen)
        content.append(ChatToken(**chosen.model_dump(), top_logprobs=[top_token(*top) for top in one.scores.top]))
    return ChatLogprobs(content=content)
