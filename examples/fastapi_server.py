"""A server on FastAPI: a torch model that takes one step of a KvCache for a token of each running text.

    pip install -e ".[asgi]" fastapi uvicorn torch
    uvicorn --app-dir examples fastapi_server:app
    curl -N localhost:8000/generate -H 'Content-Type: application/json' -d '{"tokens": [3, 14, 15], "count": 8}'

The model's weights are random, so its tokens mean nothing. A text joins the batch with its whole prompt. It leaves, and
its pages are freed, after its last token or when its client hangs up.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Annotated, Any

import torch
from fastapi import FastAPI, Request
from fastapi.responses import StreamingResponse
from pydantic import BaseModel, Field
from torch import nn

import gpu_actors as ga
from gpu_actors import asgi

DEVICE = os.environ.get("GPU_ACTORS_DEVICE", "mock")
LAYERS, HEADS, HEAD_DIM, VOCABULARY, LONGEST = 2, 2, 16, 64, 128
WIDTH = HEADS * HEAD_DIM


class Model(nn.Module):  # type: ignore[misc]
    """Attention and an MLP in each layer, over the sum of a token's and a position's embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LONGEST, WIDTH)
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)
        shapes = ((WIDTH, 3 * WIDTH), (WIDTH, WIDTH), (WIDTH, 4 * WIDTH), (4 * WIDTH, WIDTH))
        self.layers = nn.ModuleList(nn.ModuleList(nn.Linear(*shape) for shape in shapes) for _ in range(LAYERS))

    @torch.inference_mode()  # type: ignore[untyped-decorator]
    def next_tokens(self, new: list[list[int]], first: list[int], attend: Callable[..., torch.Tensor]) -> list[int]:
        """The most likely next token of each text, from its new tokens, which begin at position ``first``."""
        device = self.head.weight.device
        places = [place for begin, part in zip(first, new, strict=True) for place in range(begin, begin + len(part))]
        x = self.tokens(torch.tensor([token for part in new for token in part], device=device))
        x = x + self.places(torch.tensor(places, device=device))
        for number, (qkv, out, up, down) in enumerate(self.layers):
            q, k, v = qkv(self.norm(x)).reshape(-1, 3, HEADS, HEAD_DIM).transpose(0, 1).contiguous()
            x = x + out(attend(number, q, k, v).reshape(-1, WIDTH))
            x = x + down(up(self.norm(x)).relu())
        last = torch.tensor([len(part) for part in new], device=device).cumsum(0) - 1
        return [int(token) for token in self.head(self.norm(x[last])).argmax(-1)]


@dataclass(eq=False)
class Text:
    seq: ga.KvSequence
    tokens: list[int]  # the prompt and what follows it
    end: int  # the length at which the text ends
    events: asyncio.Queue[str | None] = field(default_factory=asyncio.Queue)


class Batch:
    def __init__(self, model: Model, cache: ga.KvCache) -> None:
        self.model, self.cache, self.texts, self.joined = model, cache, list[Text](), asyncio.Event()

    async def run(self) -> None:
        """Give each running text one token after another."""
        while await self.joined.wait():
            texts, seqs = self.texts.copy(), [text.seq for text in self.texts]
            first = [self.cache.length(seq) for seq in seqs]
            new = [text.tokens[begin:] for text, begin in zip(texts, first, strict=True)]
            try:
                async with await self.cache.step(seqs, heads_q=HEADS, rows=[len(part) for part in new]) as step:
                    # In a thread, so that the loop goes on answering clients.
                    chosen = await asyncio.to_thread(self.model.next_tokens, new, first, step.attend)
            except ga.GpuActorsError as error:
                for text in texts:
                    text.events.put_nowait(f"event: error\ndata: {type(error).__name__}\n\n")
                    self.leave(text)
                continue
            for text, token in zip(texts, chosen, strict=True):
                text.tokens.append(token)
                text.events.put_nowait(f"data: {token}\n\n")
                if len(text.tokens) == text.end:
                    self.leave(text)

    def leave(self, text: Text) -> None:
        if text in self.texts:
            self.texts.remove(text)
            self.cache.free(text.seq)  # takes effect after a running step of it
            text.events.put_nowait(None)
        if not self.texts:
            self.joined.clear()

    async def stream(self, prompt: list[int], count: int) -> AsyncIterator[str]:
        text = Text(await self.cache.create(), prompt, len(prompt) + count)
        self.texts.append(text)
        self.joined.set()
        try:
            while (event := await text.events.get()) is not None:
                yield event
        finally:
            self.leave(text)  # the client may have left


@asynccontextmanager
async def prepare(context: ga.GpuContext) -> AsyncIterator[dict[str, Any]]:
    model = Model().to("cuda" if DEVICE.startswith("cuda") else "cpu")
    sizes: dict[str, Any] = {"num_blocks": 64, "page_size": 16, "kv_heads": HEADS, "head_dim": HEAD_DIM}
    async with context.kv_cache(**sizes, dtype="float32", layers=LAYERS) as cache, asyncio.TaskGroup() as tasks:
        batch = Batch(model, cache)
        running = tasks.create_task(batch.run())
        yield {"batch": batch}
        running.cancel()


app = FastAPI(lifespan=asgi.lifespan(DEVICE, prepare=prepare), routes=asgi.routes())


class Prompt(BaseModel):
    tokens: list[Annotated[int, Field(ge=0, lt=VOCABULARY)]] = Field(min_length=1, max_length=LONGEST // 2)
    count: int = Field(default=16, ge=1, le=LONGEST // 2)


@app.post("/generate")
async def generate(prompt: Prompt, request: Request) -> StreamingResponse:
    return StreamingResponse(request.state.batch.stream(prompt.tokens, prompt.count), media_type="text/event-stream")
