"""/tokenize, /detokenize, /health and /version in the shapes of vLLM: evaluation harnesses ask for them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import anyio.to_thread
from starlette.requests import Request
from starlette.responses import Response

from gpu_actors import asgi
from gpu_actors._version import __version__
from gpu_actors.openai_api.completions import check_tokens, tokenized
from gpu_actors.openai_api.models import Generator
from gpu_actors.openai_api.reading import asked_of
from gpu_actors.openai_api.requests import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from gpu_actors.serving.guard import KEY, Exchange

if TYPE_CHECKING:
    from gpu_actors.openai_api.state import State

__all__ = ["detokenize", "health", "tokenize", "version"]


async def tokenize(request: Request) -> Response:
    state: State = request.app.state.openai_api
    asked = await asked_of(request, TokenizeRequest)
    generator = state.models.generator_of(asked.model)
    limiter = state.readers_of(len(await request.body()))
    tokens = await anyio.to_thread.run_sync(_tokens, generator, asked, limiter=limiter)
    longest = generator.engine.longest
    return _json({"count": len(tokens), "max_model_len": longest, "tokens": tokens, "token_strs": None})


def _tokens(generator: Generator, asked: TokenizeRequest) -> list[int]:
    if asked.messages is not None:
        return tokenized(generator, ChatRequest.model_construct(messages=asked.messages))
    assert asked.prompt is not None
    if not asked.add_special_tokens:
        return generator.tokenizer.encode(asked.prompt)
    return tokenized(generator, CompletionRequest.model_construct(prompt=asked.prompt))


async def detokenize(request: Request) -> Response:
    state: State = request.app.state.openai_api
    asked = await asked_of(request, DetokenizeRequest)
    generator = state.models.generator_of(asked.model)
    check_tokens("tokens", asked.tokens, generator)
    return _json({"prompt": await anyio.to_thread.run_sync(_text, generator, asked.tokens, limiter=state.readers)})


def _text(generator: Generator, tokens: list[int]) -> str:
    stream = generator.tokenizer.stream(begins=True)
    return "".join(map(stream.feed, tokens)) + stream.end()


async def health(request: Request) -> Response:
    """The status of /readyz, without a body."""
    exchange: Exchange = request.scope[KEY]
    exchange.quiet = True
    return Response(status_code=asgi.service(request).probes.readyz().status, headers={"Cache-Control": "no-store"})


async def version(_: Request) -> Response:
    return _json({"version": __version__})


def _json(content: dict[str, Any]) -> Response:
    return Response(json.dumps(content), media_type="application/json")
