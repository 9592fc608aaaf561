"""/tokenize, /detokenize, /health and /version as vLLM has them, for evaluation harnesses."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from gpu_actors._version import __version__
from gpu_actors.fields import expect
from gpu_actors.server import asgi
from gpu_actors.server.http.guard import quieten
from gpu_actors.server.openai.completions import check_tokens, expect_to_fit, tokenized
from gpu_actors.server.openai.models import Generator
from gpu_actors.server.openai.parsing import parse_body, read_request
from gpu_actors.server.openai.requests import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerationRequest,
    TokenizeRequest,
)

if TYPE_CHECKING:
    from gpu_actors.server.openai.state import State

__all__ = ["detokenize", "health", "tokenize", "version"]

Params = TypeVar("Params", TokenizeRequest, DetokenizeRequest)


async def tokenize(request: Request) -> Response:
    return await _respond(request, TokenizeRequest, _tokens)


def _tokens(generator: Generator, params: TokenizeRequest) -> dict[str, Any]:
    generation_request: GenerationRequest = CompletionRequest.model_construct(prompt=params.prompt)
    if params.messages is not None:
        generation_request = ChatRequest.model_construct(messages=params.messages)
    if params.add_special_tokens or params.prompt is None:
        tokens = tokenized(generator, generation_request)
    else:
        expect_to_fit(generator, generation_request)
        tokens = generator.tokenizer.encode(params.prompt)
    longest = generator.engine.longest
    return {"count": len(tokens), "max_model_len": longest, "tokens": tokens, "token_strs": None}


async def detokenize(request: Request) -> Response:
    return await _respond(request, DetokenizeRequest, _text)


def _text(generator: Generator, params: DetokenizeRequest) -> dict[str, Any]:
    size, longest = len(params.tokens), generator.engine.longest
    expect(size <= longest, "tokens", f"{size} tokens", f"must be at most {longest}, as many as a text may have")
    check_tokens("tokens", params.tokens, generator)
    stream = generator.tokenizer.stream(begins=True)
    return {"prompt": "".join(map(stream.feed, params.tokens)) + stream.end()}


async def _respond(
    request: Request, kind: type[Params], answer: Callable[[Generator, Params], dict[str, Any]]
) -> Response:
    state: State = request.app.state.openai_api

    def serialize(body: bytes) -> str:
        params = parse_body(kind, body)
        return json.dumps(answer(state.models.generator_of(params.model), params))

    content = await read_request(request, state.admission, serialize)
    return Response(content, media_type="application/json")


async def health(request: Request) -> Response:
    """The status of /readyz, without a body."""
    quieten(request.scope)
    return Response(status_code=asgi.service(request).probes.readyz().status, headers={"Cache-Control": "no-store"})


async def version(_: Request) -> Response:
    return JSONResponse({"version": __version__})
