"""Probes answer however busy the loop is, and never report it as better than it is."""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
import struct
import threading
import time
from typing import Any

import pytest
from support.service import REPOSITORY, ask, comes_true, eventually, run_python

import gpu_actors as ga
from gpu_actors.serving import EXIT_CODE, Admission, Probes
from gpu_actors.testing import FaultPlan, MockClock

pytestmark = pytest.mark.usefixtures("all_threads_end")


def get(probes: Probes, path: str, method: str = "GET") -> tuple[int, str]:
    """Ask over the socket, which blocks this thread and its loop."""
    connection = http.client.HTTPConnection("127.0.0.1", probes.port, timeout=60)
    try:
        connection.request(method, path)
        reply = connection.getresponse()
        return reply.status, reply.read().decode()
    finally:
        connection.close()


def content(answer: tuple[int, Any]) -> tuple[int, Any]:
    return answer[0], json.loads(answer[1])


async def test_probes_are_answered_while_the_loop_is_blocked() -> None:
    async with Probes(port=0) as probes, ga.open_context("mock") as ctx:
        probes.watch(ctx)
        assert content(get(probes, "/livez")) == (200, {"alive": True, "reason": ""})
        status, ready = content(get(probes, "/readyz?verbose"))
        assert (status, ready["ready"], ready["device"], ready["generation"]) == (200, True, "mock", 1)
        status, text = get(probes, "/metrics")
        assert status == 200
        assert 'gpu_actors_ready{device="mock"} 1.0' in text
        assert get(probes, "/other")[0] == 404
        assert get(probes, "/livez", "HEAD") == (200, "")


async def test_a_client_that_sends_nothing_keeps_no_other_waiting() -> None:
    async with Probes(port=0) as probes:
        assert probes.port is not None
        with socket.create_connection(("127.0.0.1", probes.port)):
            assert get(probes, "/livez")[0] == 200


async def test_a_loop_that_does_not_turn_is_not_alive_until_it_turns_again() -> None:
    async with Probes(stall_seconds=1.0) as probes, ga.open_context("mock") as ctx:
        probes.watch(ctx)
        eventually(lambda: probes.livez().status == 503)  # this blocks the loop
        assert "the event loop has not turned for" in json.loads(probes.livez().body)["reason"]
        assert probes.readyz().status == 503
        await asyncio.to_thread(eventually, lambda: probes.livez().status == 200)
        await asyncio.to_thread(eventually, lambda: probes.readyz().status == 200)


async def test_readiness_starts_with_the_context_and_ends_before_it() -> None:
    async with Probes() as probes:
        assert json.loads(probes.readyz().body)["state"] == "starting"
        assert probes.metrics().status == 503
        async with ga.open_context("mock") as ctx:
            probes.watch(ctx)
            assert probes.readyz().status == 200
            probes.leave()
            status, body, _ = probes.readyz()
            assert (status, json.loads(body)["state"]) == (503, "draining")
        assert probes.readyz().status == 503
        assert probes.livez().status == 200


async def test_a_lost_context_is_neither_alive_nor_ready() -> None:
    options = ga.ContextOptions(fault_plan=FaultPlan().lose_context(launch=1))
    async with Probes() as probes, ga.open_context("mock", options) as ctx:
        probes.watch(ctx)
        with pytest.raises(ga.ContextLost):
            await ask(ctx)
        live, ready = probes.livez(), probes.readyz()
        assert (live.status, ready.status) == (503, 503)
        assert "lost" in json.loads(live.body)["reason"]
        probes.leave()
        shown = json.loads(probes.readyz().body)
        assert (shown["state"], shown["generation"]) == ("failed", 2)
        assert b'gpu_actors_state{device="mock",state="failed"} 1.0' in probes.metrics().body


async def test_metrics_show_what_an_admission_does() -> None:
    async with Probes() as probes, ga.open_context("mock") as ctx:
        admission = Admission(1, waiting=0)
        probes.watch(ctx, admission)
        async with admission.place():
            with pytest.raises(ga.Overloaded):
                await admission.place().__aenter__()
            shown = probes.metrics().body.decode()
    for line in ("running 1.0", "waiting 0.0", "service_seconds 1.0", 'requests_total{outcome="admitted"} 1.0'):
        assert f"gpu_actors_admission_{line}" in shown
    assert 'gpu_actors_admission_requests_total{outcome="refused"} 1.0' in shown


async def test_each_worker_takes_a_port_of_its_own() -> None:
    async with Probes(port=0) as first:
        assert first.port is not None
        async with Probes(port=first.port, ports=100) as second:
            assert second.port is not None
            assert first.port < second.port < first.port + 100
            assert get(second, "/livez")[0] == 200
        with pytest.raises(ga.InvalidRequest, match="cannot be listened on") as caught:
            await Probes(port=first.port).__aenter__()
        assert caught.value.field == "port"


def test_settings_that_are_none_are_refused_by_name() -> None:
    """With NaN a stalled loop would count as alive forever."""
    seconds = [0, -1.0, float("nan"), float("inf"), "30"]
    values: dict[str, list[Any]] = {
        "port": [65536, -1, "8001"],
        "ports": [0, None],
        "stall_seconds": seconds,
        "proof_seconds": seconds,
    }
    for field, wrong in values.items():
        for value in wrong:
            with pytest.raises(ga.InvalidRequest) as caught:
                Probes(**{"port": 8001, field: value})
            assert caught.value.field == field


async def test_a_client_that_resets_its_connection_writes_nothing_to_stderr(capfd: pytest.CaptureFixture[str]) -> None:
    async with Probes(port=0) as probes:
        assert probes.port is not None
        for _ in range(3):
            with socket.create_connection(("127.0.0.1", probes.port)) as client:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                client.sendall(b"GET /livez HTTP/1.1\r\n\r\n")
        assert get(probes, "/livez")[0] == 200
        # It is accepted after those; each has its own thread.
        await comes_true(lambda: not any("process_request" in thread.name for thread in threading.enumerate()))
    assert capfd.readouterr().err == ""


# Progress of the device


def finished(ctx: ga.GpuContext) -> int:
    stats = ctx.stats()["flash_attn"]
    return stats.launched - stats.in_flight


@pytest.mark.parametrize("isolation", [None, "process"])
async def test_an_idle_context_proves_its_device_by_launches_of_its_own(isolation: Any) -> None:
    async with Probes(proof_seconds=0.4) as probes, ga.open_context("mock", isolation=isolation) as ctx:
        probes.watch(ctx)
        found: list[tuple[int, Any]] = []

        def proven() -> bool:
            """Whether the device is ready; on a slow machine a proof may be too old for a moment."""
            found.append(content(probes.readyz()[:2]))
            return finished(ctx) >= 3 and found[-1][0] == 200

        await asyncio.to_thread(eventually, proven)
        status, shown = found[-1]
        assert (status, shown["ready"], shown["reason"]) == (200, True, "")
        assert shown["name"] == "mock sm_90a"
        assert shown["kernels"] == {"arch": "sm_90a", "run": False, "compiled": 0, "failed": 0, "waiting": 0}


@pytest.mark.parametrize("isolation", [None, "process"])
async def test_a_context_that_answers_requests_launches_nothing_of_its_own(isolation: Any) -> None:
    async with Probes(proof_seconds=60.0) as probes, ga.open_context("mock", isolation=isolation) as ctx:
        probes.watch(ctx)
        watched = time.monotonic()
        await asyncio.sleep(0.3)
        await ask(ctx)

        def younger_than_the_context() -> bool:
            age = json.loads(probes.readyz().body)["last_success_seconds"]
            return bool(age < time.monotonic() - watched - 0.2)

        await asyncio.to_thread(eventually, younger_than_the_context)
        assert finished(ctx) == 1


async def test_a_device_that_hangs_while_idle_ends_readiness_and_leaves_the_process_alive() -> None:
    """The context's own launch, the first one, does not end before the clock advances."""
    clock = MockClock()
    plan = FaultPlan().delay(1.0, launch=1)
    options = ga.ContextOptions(fault_plan=plan, clock=clock, hang_timeout=1e6)
    async with Probes(port=0, proof_seconds=0.4) as probes, ga.open_context("mock", options) as ctx:
        probes.watch(ctx)
        await asyncio.to_thread(eventually, lambda: probes.readyz().status == 503)
        shown = json.loads(get(probes, "/readyz")[1])
        assert (shown["state"], shown["device"]) == ("stalled", "mock")
        assert shown["reason"].startswith("no launch has succeeded for")
        assert get(probes, "/livez")[0] == 200
        assert ctx.health().ready, "only the proof is missing"
        await asyncio.sleep(0.5)
        assert ctx.stats()["flash_attn"].launched == 1, "one launch that hangs is enough"
        clock.advance(1.0)
        await asyncio.to_thread(eventually, lambda: probes.readyz().status == 200)


async def test_readiness_says_how_the_contexts_own_launch_failed() -> None:
    clock = MockClock()
    plan = FaultPlan().fail(launch=1, error=ga.LaunchError).hang(launch=2)
    options = ga.ContextOptions(fault_plan=plan, clock=clock, hang_timeout=1e6, drain_timeout=0.1)
    async with Probes(proof_seconds=0.4) as probes, ga.open_context("mock", options) as ctx:
        probes.watch(ctx)

        def told(what: str) -> bool:
            return f"the last attempt failed with {what}" in json.loads(probes.readyz().body)["reason"]

        await asyncio.to_thread(eventually, lambda: told("LaunchError: a fault plan"))
        await asyncio.to_thread(eventually, lambda: ctx.stats()["flash_attn"].in_flight == 1)
        clock.advance(1.0)  # the deadline of its request
        await asyncio.to_thread(eventually, lambda: told("DeadlineExceeded"))
        await asyncio.sleep(0.5)
        stats = ctx.stats()["flash_attn"]
        assert (stats.launched, stats.in_flight) == (2, 1), "no launch follows one that hangs"


async def test_a_launch_may_take_a_third_of_the_hang_timeout() -> None:
    for limit, seconds in ((None, 200.0), (30.0, 10.0), (float("inf"), 200.0)):
        async with ga.open_context("mock", ga.ContextOptions(hang_timeout=limit)) as ctx:
            assert Probes()._proof_limit(ctx) == seconds


# The end of the process


def test_a_process_whose_context_is_lost_ends_with_its_own_exit_code() -> None:
    program = """
        import asyncio, sys
        import gpu_actors as ga
        from gpu_actors.serving import Probes
        from gpu_actors.testing import FaultPlan
        sys.path.insert(0, "tests/lib")
        from support.service import ask

        async def main():
            options = ga.ContextOptions(fault_plan=FaultPlan().lose_context(launch=1))
            async with Probes(exit_when_dead=True) as probes, ga.open_context("mock", options) as ctx:
                probes.watch(ctx)
                ask(ctx)
                await asyncio.sleep(3600)

        asyncio.run(main())
    """
    assert (REPOSITORY / "tests/lib").is_dir()
    done = run_python(program, check=False)
    assert done.returncode == EXIT_CODE == 70
    assert "the process ends with code 70: the device context is lost" in done.stderr


async def test_a_head_that_drips_holds_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpu_actors.server.http.probes._Handler.patience", 0.3)
    async with Probes(port=0) as probes:
        with socket.create_connection(("127.0.0.1", probes.port or 0), timeout=20) as client:
            client.settimeout(0.05)

            def ended() -> bool:
                try:
                    client.sendall(b"a")
                    return client.recv(1000) == b""
                except TimeoutError:
                    return False
                except ConnectionError:
                    return True

            await asyncio.to_thread(eventually, ended, 20.0)
