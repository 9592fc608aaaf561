"""A context in an application: its probes while it starts, works, hangs and leaves, and its handlers' arguments."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import time
from collections.abc import Iterator
from typing import Annotated, Any

import numpy as np
import pytest
from fastapi import Depends, FastAPI
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Mount, Route
from support.served import Served, until_closed
from support.service import ask, eventually, no_threads_left

import gpu_actors as ga
from gpu_actors import asgi
from gpu_actors.serving import Admission, Bodies, Probes, leave_slowly
from gpu_actors.testing import FaultPlan


async def attend(request: Request) -> Response:
    result = await ask(asgi.context(request), deadline=asgi.deadline(request))
    return JSONResponse({"shape": list(result.out.shape)})


def application(options: ga.ContextOptions | None = None, **settings: Any) -> Starlette:
    lifespan = asgi.lifespan("mock", options, **settings)
    app = Starlette(lifespan=lifespan, routes=[*asgi.routes(), Route("/attend", attend)])
    app.add_middleware(asgi.Guard)
    return app


@pytest.fixture(autouse=True)
def _every_thread_ends() -> Iterator[None]:
    with no_threads_left():
        yield


def test_an_application_answers_requests_and_probes() -> None:
    with Served(application()) as served:
        assert served.ask("/attend").json == {"shape": [1, 1, 1, 8]}
        assert served.ask("/livez").json == {"alive": True, "reason": ""}
        ready = served.ask("/readyz")
        assert (ready.status, ready.headers["cache-control"]) == (200, "no-store")
        shown = ready.json
        assert (shown["ready"], shown["state"], shown["device"], shown["generation"]) == (True, "ready", "mock", 1)
        assert shown["kernels"]["arch"] == "sm_90a"
        assert 'gpu_actors_launches_total{actor="flash_attn"} 2.0' in served.ask("/metrics").body.decode()
        for path in ("/livez", "/readyz", "/metrics"):
            head = served.ask(path, "HEAD")
            assert (head.status, head.body, int(head.headers["content-length"]) > 0) == (200, b"", True)
            assert served.ask(path, "POST").status == 405
            with served.raw(f"GET {path} HTTP/1.0") as client:
                assert until_closed(client).split()[1] == b"200"


# Startup and shutdown


def test_a_startup_that_fails_closes_what_it_had_opened() -> None:
    async def prepare(context: ga.GpuContext) -> None:
        raise OSError("no weights")

    for app in (application(prepare=prepare, probes=Probes(port=0)), application(leave_seconds=0.0, prepare=prepare)):
        with pytest.raises(AssertionError, match="startup failed"), Served(app):
            pass
        assert not hasattr(app.state, "gpu_actors")


async def test_a_device_that_does_not_work_ends_the_startup() -> None:
    options = ga.ContextOptions(fault_plan=FaultPlan().fail(launch=1, error=ga.LaunchError))
    with pytest.raises(ga.LaunchError, match="a fault plan"):
        async with asgi.lifespan("mock", options)(None):
            raise AssertionError
    with pytest.raises(ga.InvalidRequest, match="device"):
        async with asgi.lifespan("abacus")(None):
            raise AssertionError


async def test_what_was_prepared_is_in_the_state_of_each_request() -> None:
    async def prepare(context: ga.GpuContext) -> dict[str, Any]:
        await ask(context)
        return {"model": "a model"}

    probes = Probes()
    async with asgi.lifespan("mock", prepare=prepare, probes=probes)(None) as state:
        found = state["gpu_actors"]
        assert state == {"model": "a model", "gpu_actors": found}
        assert found.context.stats()["flash_attn"].launched == 1, "which has proved the device"
        assert found.probes.readyz().status == 200
        with pytest.raises(ga.GpuActorsError, match="entered already"):  # as another application would
            await probes.__aenter__()
    assert found.context.health().state == "stopped"


def test_an_application_may_start_again_and_has_a_context_of_its_own() -> None:
    app = application(ga.ContextOptions(arch="sm_80"), probes=Probes(port=0))
    for _ in range(2):
        with Served(app) as one:
            with Served(application(ga.ContextOptions(arch="sm_100a"))) as two:
                shown = [served.ask("/readyz").json["kernels"]["arch"] for served in (one, two)]
                assert shown == ["sm_80", "sm_100a"]
            assert one.ask("/attend").status == 200


def test_a_server_without_lifespan_says_so() -> None:
    with Served(application(), lifespan="off") as served:
        assert served.ask("/livez").status == 200
        for path in ("/readyz", "/metrics"):
            reply = served.ask(path)
            assert reply.status == 503
            assert "lifespan" in reply.json["reason"]
        reply = served.ask("/attend")
        assert (reply.status, reply.error, reply.headers["retry-after"]) == (503, "ActorStopped", "5")


@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf"), "2"])
def test_a_leave_that_takes_no_time_there_is_is_refused(value: Any) -> None:
    with pytest.raises(ga.InvalidRequest, match="leave_seconds"):
        asgi.lifespan("mock", leave_seconds=value)


# Several applications


def test_an_application_under_a_prefix_lives_in_the_lifespan_of_the_outer_one() -> None:
    inner = Starlette(routes=[Route("/attend", attend), *asgi.routes()])
    routes = [Mount("/ops", routes=asgi.routes()), Mount("/v1", app=inner)]
    outer = Starlette(lifespan=asgi.lifespan("mock"), routes=routes)
    outer.add_middleware(asgi.Guard)
    with Served(outer) as served:
        assert served.ask("/v1/attend").status == 200
        for path in ("/ops/readyz", "/v1/readyz", "/ops/livez", "/v1/metrics"):
            assert served.ask(path).status == 200
        assert served.ask("/readyz").status == 404


def test_an_admission_is_shown_and_found() -> None:
    async def placed(request: Request) -> Response:
        admission = asgi.service(request).admission
        assert admission is not None
        async with admission.place(asgi.deadline(request)):
            return Response("placed")

    lifespan = asgi.lifespan("mock", admission=Admission(1))
    with Served(Starlette(lifespan=lifespan, routes=[Route("/", placed), *asgi.routes()])) as served:
        assert served.ask("/").body == b"placed"
        assert 'admission_requests_total{outcome="admitted"} 1.0' in served.ask("/metrics").body.decode()


def test_an_application_without_the_guard_answers_errors_by_its_own_handler() -> None:
    async def refused(request: Request, error: Exception) -> Response:
        return asgi.error_response(error, instance=request.url.path)

    async def fails(request: Request) -> Response:
        assert (asgi.deadline(request), asgi.request_id(request)) == (None, "")
        raise ga.CacheFull("no page left")

    app = Starlette(routes=[Route("/", fails)], exception_handlers={ga.GpuActorsError: refused})
    with Served(app) as served:
        reply = served.ask("/")
        assert (reply.status, reply.error, reply.json["instance"]) == (503, "CacheFull", "/")
        assert reply.headers["retry-after"] == "1"


# SIGTERM


@contextlib.contextmanager
def told_of_sigterm() -> Iterator[list[float]]:
    """The times at which the earlier handler is called."""
    told: list[float] = []
    former = signal.signal(signal.SIGTERM, lambda *_: told.append(time.monotonic()))
    handler = signal.getsignal(signal.SIGTERM)
    try:
        yield told
        assert signal.getsignal(signal.SIGTERM) is handler
    finally:
        signal.signal(signal.SIGTERM, former)


async def test_all_applications_say_that_they_leave_before_the_server_is_told() -> None:
    with told_of_sigterm() as told:
        handler = signal.getsignal(signal.SIGTERM)
        async with Probes() as first, Probes() as second:
            with leave_slowly(first, 0.7), leave_slowly(second, 0.0):
                start = time.monotonic()
                os.kill(os.getpid(), signal.SIGTERM)
                assert (first.leaving, second.leaving, told) == (True, True, [])
                await asyncio.to_thread(eventually, lambda: told)
                assert told[0] - start >= 0.69, "by the longest of them"
                assert len(told) == 1
            with leave_slowly(first, 600.0):
                os.kill(os.getpid(), signal.SIGTERM)
                os.kill(os.getpid(), signal.SIGTERM)
                assert len(told) == 2, "a second signal is not held up"
                assert signal.getsignal(signal.SIGTERM) is handler


async def test_who_leaves_first_takes_no_handler_from_the_others() -> None:
    with told_of_sigterm() as told:
        async with Probes() as first, Probes() as second:
            outer, inner = contextlib.ExitStack(), contextlib.ExitStack()
            outer.enter_context(leave_slowly(first, 600.0))
            inner.enter_context(leave_slowly(second, 0.0))
            outer.close()
            os.kill(os.getpid(), signal.SIGTERM)
            assert (first.leaving, second.leaving) == (False, True)
            await asyncio.to_thread(eventually, lambda: told)
            inner.close()


async def test_who_leaves_last_brings_no_handler_back_of_one_that_has_left() -> None:
    """The loop of the context that has left may be closed, and a signal would raise in it."""
    with told_of_sigterm():
        async with Probes() as probes:
            left = [contextlib.ExitStack() for _ in range(3)]
            for stack in left:
                stack.enter_context(leave_slowly(probes, 0.0))
            for stack in left:
                stack.close()


# FastAPI


Context = Annotated[ga.GpuContext, Depends(asgi.context)]
JSON = {"Content-Type": "application/json"}


def fast_application() -> FastAPI:
    app = FastAPI(lifespan=asgi.lifespan("mock"), routes=asgi.routes())
    app.add_middleware(asgi.Guard, bodies=Bodies(max_bytes=1000))

    @app.post("/attend")
    async def attend(values: list[float], context: Context) -> dict[str, Any]:
        row = np.array(values, np.float32).reshape(1, 1, 1, -1)
        result = await context.flash_attn.forward(row, row, row)
        return {"out": result.out.ravel().tolist()}

    return app


def test_fastapi_works_by_the_same_functions() -> None:
    with Served(fast_application()) as served:
        reply = served.ask("/attend", "POST", body=json.dumps([1.0] * 8), headers=JSON)
        assert (reply.status, reply.json) == (200, {"out": [1.0] * 8})
        assert served.ask("/readyz").status == 200
        assert "/readyz" not in served.ask("/openapi.json").json["paths"]
        late = served.ask("/attend", "POST", body="[1.0]", headers={"X-Deadline-Ms": "soon"})
        assert (late.status, late.error) == (400, "InvalidRequest")
        large = served.ask("/attend", "POST", body=json.dumps([1.0] * 500))
        assert (large.status, large.error) == (413, "BodyTooLarge")
        pieces = (b"[1.0" + b", 1.0" * 100 for _ in range(5))
        chunked = JSON | {"Transfer-Encoding": "chunked"}
        large = served.ask("/attend", "POST", body=pieces, encode_chunked=True, headers=chunked)
        assert (large.status, large.error) == (413, "BodyTooLarge"), "FastAPI would have said 400"
        wrong = served.ask("/attend", "POST", body="[1.0, true, 2]" * 2, headers=JSON)
        assert wrong.status == 422, "what FastAPI finds at fault it answers itself"


def test_fastapi_hands_our_errors_on() -> None:
    app = fast_application()

    @app.get("/fails")
    async def fails(context: Context) -> None:
        await context.flash_attn.forward(1, 2, 3)

    with Served(app) as served:
        reply = served.ask("/fails")
        assert (reply.status, reply.error) == (400, "InvalidRequest")
        assert (reply.json["field"], reply.json["value"]) == ("q", "int")
