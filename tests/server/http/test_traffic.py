"""Answers by route: the counts of requests, and their metrics in /metrics."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from support.served import Served, until_closed
from support.service import eventually

import gpu_actors as ga
from gpu_actors import asgi
from gpu_actors.server.http.traffic import OTHER, route_of
from gpu_actors.serving import Guard, Traffic


async def plain(request: Request) -> Response:
    return PlainTextResponse("answer")


async def raises(request: Request) -> Response:
    errors = {"refused": ga.Overloaded("full", 1.0), "failed": ga.ContextLost("gone"), "bug": KeyError("a secret")}
    raise errors[request.path_params["kind"]]


async def sleeps(request: Request) -> Response:
    await asyncio.sleep(60)
    return PlainTextResponse("late")


async def stream(request: Request) -> Response:
    async def pieces() -> Any:
        yield b"first"
        if error := request.query_params.get("raises"):
            raise {"lost": ga.ContextLost, "late": ga.DeadlineExceeded}[error]("in the middle")
        await asyncio.sleep(60)

    return StreamingResponse(pieces())


@pytest.fixture
def served() -> Iterator[Served]:
    routes = [
        *asgi.routes(),
        Route("/plain", plain),
        Route("/raises/{kind}", raises),
        Route("/sleeps", sleeps),
        Route("/stream", stream),
        Mount("/inner", routes=[Route("/plain/{name:path}", plain)]),
        Mount("/of/{tenant}", routes=[Route("/plain", plain)]),
    ]
    app = Starlette(lifespan=asgi.lifespan("mock"), routes=routes)
    app.add_middleware(asgi.Guard)
    with Served(app) as found:
        yield found


def traffic_of(served: Served) -> Traffic:
    app: Any = served.server.config.app
    traffic: Traffic = app.state.gpu_actors.traffic
    return traffic


def counted(served: Served, route: str) -> tuple[dict[int, int], dict[str, int]]:
    """The counts of a route's statuses, and of its outcomes so far."""
    found = traffic_of(served).routes().get(route)
    if found is None:
        return {}, {}
    return found.statuses, {outcome: count for outcome, count in found.outcomes.items() if count}


def test_each_answer_counts_once_by_route_status_and_outcome(served: Served) -> None:
    for path in ("/plain", "/plain", "/raises/refused", "/raises/failed", "/raises/bug", "/none", "/inner/plain/a/b"):
        served.ask(path)
    served.ask("/plain", "DELETE")
    served.ask("/plain", headers={"X-Deadline-Ms": "soon"})
    for tenant in ("one", "two", "three"):
        assert served.ask(f"/of/{tenant}/plain").status == 200
    eventually(lambda: sum(sum(one.statuses.values()) for one in traffic_of(served).routes().values()) == 12)
    assert counted(served, "/inner/plain/{name:path}") == ({200: 1}, {"answered": 1})
    assert counted(served, "/plain") == ({200: 2, 405: 1}, {"answered": 2, "invalid": 1})
    assert counted(served, "/raises/{kind}") == ({429: 1, 503: 1, 500: 1}, {"refused": 1, "failed": 2})
    # The guard refuses the malformed deadline before the application looks for a route.
    assert counted(served, OTHER) == ({404: 1, 400: 1}, {"invalid": 2})
    assert counted(served, "/of/{tenant}/plain")[0] == {200: 3}, "a tenant is no route"
    for path in ("/livez", "/readyz", "/metrics", "/", "/status.json", "/status/page.css"):
        assert served.ask(path).status == 200
    assert not {"/livez", "/readyz", "/metrics", "/", "/status.json"} & traffic_of(served).routes().keys()
    text = served.ask("/metrics").body.decode()
    assert re.search(r'^gpu_actors_http_answers_total\{route="/plain",status="200"\} 2', text, re.M)
    assert re.search(r'^gpu_actors_http_outcomes_total\{outcome="deadline",route="/plain"\} 0', text, re.M)
    assert re.search(r'^gpu_actors_http_seconds_count\{route="/plain"\} 3', text, re.M)


@pytest.mark.parametrize(("path", "status"), [("/sleeps", 504), ("/stream", 200)])
def test_an_answer_that_its_deadline_cuts_is_a_miss(served: Served, path: str, status: int) -> None:
    with served.raw(f"GET {path} HTTP/1.1", "Host: x", "X-Deadline-Ms: 100", "Connection: close") as client:
        until_closed(client)
    eventually(lambda: counted(served, path) == ({status: 1}, {"deadline": 1}))


def test_a_client_that_hangs_up_is_gone(served: Served) -> None:
    for path in ("/sleeps", "/stream"):
        with served.raw(f"GET {path} HTTP/1.1", "Host: x") as client:
            if path == "/stream":
                while b"first" not in client.recv(1 << 16):
                    pass
        eventually(lambda path=path: counted(served, path)[1] == {"gone": 1})
    assert counted(served, "/sleeps")[0] == {499: 1}


@pytest.mark.parametrize(("error", "outcome"), [("lost", "failed"), ("late", "deadline")])
def test_an_answer_that_breaks_off_counts_by_its_error(served: Served, error: str, outcome: str) -> None:
    with served.raw(f"GET /stream?raises={error} HTTP/1.1", "Host: x", "Connection: close") as client:
        until_closed(client)
    eventually(lambda: counted(served, "/stream")[1] == {outcome: 1})


def test_requests_without_a_lifespan_count_where_the_guard_is_told() -> None:
    traffic = Traffic()
    app = Starlette(routes=[Route("/plain", plain)])
    with Served(Guard(app, traffic=traffic), lifespan="off") as served:
        assert served.ask("/plain").status == 200
        eventually(lambda: "/plain" in traffic.routes())
    assert traffic.routes()["/plain"].statuses == {200: 1}


def test_routes_are_bounded() -> None:
    traffic = Traffic()
    for number in range(200):
        traffic.count(f"/{number}", 200, "answered", 0.01)
    found = traffic.routes()
    assert len(found) <= 65
    assert found[OTHER].statuses[200] + len(found) - 1 == 200


def test_a_starlette_that_names_no_route_is_asked_for_the_endpoint() -> None:
    app = Starlette(routes=[Mount("/inner", routes=[Route("/plain/{name}", plain)]), Route("/stream", stream)])
    scope = {"endpoint": plain, "router": app.router, "root_path": "/proxy/inner", "app_root_path": "/proxy"}
    assert route_of(scope) == "/inner/plain/{name}"
    assert route_of({"endpoint": stream, "router": app.router, "root_path": "/proxy"}) == "/stream"
    assert route_of({"type": "http"}) == OTHER
