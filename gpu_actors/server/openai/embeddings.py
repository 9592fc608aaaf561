"""/v1/embeddings and /v1/models."""

from __future__ import annotations

import base64
from contextlib import AsyncExitStack
from functools import partial
from typing import TYPE_CHECKING

import anyio.to_thread
import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from gpu_actors.embedding.embedder import Embedded, Embedder
from gpu_actors.errors import InvalidRequest, Unsupported
from gpu_actors.server.http.guard import KEY, Exchange
from gpu_actors.server.http.problems import NotFound
from gpu_actors.server.openai.parsing import parse_body, read_request
from gpu_actors.server.openai.requests import EmbeddingRequest
from gpu_actors.server.openai.responses import Embedding, EmbeddingList, EmbeddingUsage, ModelList

if TYPE_CHECKING:
    from gpu_actors.server.openai.state import State

__all__ = ["embeddings", "list_models", "one_model"]


async def embeddings(request: Request) -> Response:
    state: State = request.app.state.openai_api
    exchange: Exchange = request.scope[KEY]
    params = await read_request(request, state.embedding, partial(parse_body, EmbeddingRequest))
    embedder = state.models.encoder_of(params.model).embedder
    columns = embedder.model.head.columns
    if params.dimensions not in (None, columns):
        raise Unsupported("dimensions", params.dimensions, f"must be {columns}, or be left out", columns)
    most = state.settings.max_inputs
    if len(params.input) > most:
        raise InvalidRequest("input", f"{len(params.input)} texts", f"must have at most {most} texts")
    cost = float(len(params.input))
    async with AsyncExitStack() as stack:
        with state.farewell.waiting():
            await stack.enter_async_context(state.embedding.place(exchange.deadline, cost=cost, client=exchange.client))
        if not params.truncate:
            limiter = state.readers_of(sum(map(len, params.input)))
            await anyio.to_thread.run_sync(_check_lengths, embedder, params.input, limiter=limiter)
        result = await embedder.embed(params.input, deadline=exchange.deadline)
        # Ten thousand numbers take ten milliseconds or more to serialize, too long for the loop.
        content = await anyio.to_thread.run_sync(_serialize, result, params)
    exchange.notes |= {"model": params.model, "texts": len(params.input), "prompt_tokens": int(result.tokens.sum())}
    return Response(content, media_type="application/json")


def _check_lengths(embedder: Embedder, texts: list[str]) -> None:
    for index, row in enumerate(embedder.tokenizer.encode(texts)):
        if row.truncated:
            reason = f"must have at most {embedder.tokenizer.max_tokens} tokens, unless truncate is true"
            raise InvalidRequest(f"input[{index}]", f"{len(texts[index])} characters", reason)


def _serialize(result: Embedded, params: EmbeddingRequest) -> bytes:
    tokens = int(result.tokens.sum())
    rows = [_vector(row, params.encoding_format == "base64") for row in result.vectors]
    data = [Embedding(index=index, embedding=row) for index, row in enumerate(rows)]
    usage = EmbeddingUsage(prompt_tokens=tokens, total_tokens=tokens)
    return EmbeddingList(data=data, model=params.model, usage=usage).model_dump_json().encode()


def _vector(row: np.ndarray[tuple[int, ...], np.dtype[np.float32]], packed: bool) -> list[float] | str:
    if packed:
        return base64.b64encode(row.astype("<f4").tobytes()).decode()
    numbers: list[float] = row.tolist()
    return numbers


async def list_models(request: Request) -> Response:
    state: State = request.app.state.openai_api
    return Response(ModelList(data=state.models.cards()).model_dump_json(), media_type="application/json")


async def one_model(request: Request) -> Response:
    state: State = request.app.state.openai_api
    name = request.path_params["name"]
    card = next((card for card in state.models.cards() if card.id == name), None)
    if card is None:
        raise NotFound("model", name, "must be one that GET /v1/models lists")
    return Response(card.model_dump_json(), media_type="application/json")
