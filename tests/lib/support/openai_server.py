"""OpenAI's API served from a thread, and parsing of its answers. For tests."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from inside.server import Protocol, State
from support.served import Answered, Served
from support.service import eventually

import gpu_actors as ga
from gpu_actors.openai_api import ServeSettings, create_app
from gpu_actors.serving import Traffic

MOCK = ga.ContextOptions(mock=ga.MockOptions(dtype="float32"))
HELLO = {"model": "tiny", "prompt": "hello", "max_tokens": 8, "temperature": 0}
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 8, "temperature": 0}
STREAM = {"stream": True, "stream_options": {"include_usage": True}}


class Serving(Served):
    """While entered, an application of these settings answers, by default with the tiny model alone on mock."""

    def __init__(self, **settings: Any) -> None:
        # No text is refused for the time that this machine would need.
        patient = {"leave_seconds": 0.0, "default_timeout": 3600.0}
        settings = {"device": "mock", "models": ("tiny",), "options": MOCK, **patient, **settings}
        app = create_app(ServeSettings(**settings))
        self.state: State = app.state.openai_api
        super().__init__(app, http=Protocol)

    @property
    def engine(self) -> Any:
        assert self.state.models.generator is not None
        return self.state.models.generator.engine

    @property
    def traffic(self) -> Traffic:
        app: Any = self.server.config.app
        traffic: Traffic = app.state.gpu_actors.traffic
        return traffic

    def post(self, path: str, content: Any, **headers: str) -> Answered:
        body = content if isinstance(content, bytes) else json.dumps(content)
        named = {"Content-Type": "application/json"} | {name.replace("_", "-"): text for name, text in headers.items()}
        return self.ask(path, "POST", body=body, headers=named)

    def complete(self, **changes: Any) -> Any:
        """The answer of /v1/completions to HELLO with these changes."""
        answered = self.post("/v1/completions", {**HELLO, **changes})
        assert answered.status == 200, answered.body
        return answered.json

    def chat(self, **changes: Any) -> Any:
        answered = self.post("/v1/chat/completions", {**CHAT, **changes})
        assert answered.status == 200, answered.body
        return answered.json

    def stream(self, path: str, content: Any, **headers: str) -> list[Any]:
        """The events of a stream. Asserts its status, type and end."""
        answered = self.post(path, {**content, **STREAM}, **headers)
        assert answered.status == 200, answered.body
        assert answered.headers["content-type"] == "text/event-stream; charset=utf-8"
        return events_of(answered.body)

    def until_idle(self) -> None:
        """Wait until no text runs or waits, every page of the cache is free, and no request is admitted or waits."""

        def idle() -> bool:
            blocks, free, shared = self.engine.pages()
            places = self.state.admission.stats()
            texts = self.engine.running + self.engine.waiting
            return (texts, places.running, places.waiting, free, shared) == (0, 0, 0, blocks, 0)

        eventually(idle)


def events_of(body: bytes) -> list[Any]:
    """The contents of server-sent events. Asserts that each is complete, and that the last one alone is [DONE]."""
    assert body.endswith(b"\n\n"), body[-100:]
    pieces = body.decode().split("\n\n")[:-1]
    assert all(piece.startswith("data: ") and "\n" not in piece for piece in pieces), pieces
    assert [piece == "data: [DONE]" for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    return [json.loads(piece.removeprefix("data: ")) for piece in pieces[:-1]]


def text_of(events: Iterable[Any]) -> str:
    """The text of a stream of completions."""
    return "".join(choice["text"] for event in events for choice in event["choices"])


def chat_text_of(events: Iterable[Any]) -> str:
    return "".join(choice["delta"].get("content", "") for event in events for choice in event["choices"])


def body_of(raw: bytes) -> tuple[int, bytes]:
    """The status and the body of a complete answer. Asserts that a chunked body has its last chunk."""
    head, _, rest = raw.partition(b"\r\n\r\n")
    status = int(head.split()[1])
    if b"transfer-encoding: chunked" not in head.lower():
        return status, rest
    body = b""
    while True:
        size, _, rest = rest.partition(b"\r\n")
        length = int(size, 16)
        body += rest[:length]
        assert rest[length : length + 2] == b"\r\n"
        rest = rest[length + 2 :]
        if length == 0:
            assert rest == b""
            return status, body
