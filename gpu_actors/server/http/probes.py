"""Probes: /livez, /readyz and /metrics on a thread and a port of their own, apart from a busy event loop.

    async with Probes(port=8001) as probes:
        async with ga.open_context("cuda") as context:
            probes.watch(context)  # not ready before
            ...

If the event loop answered, an orchestrator would restart a process that is only busy. A thread alone would not notice a
loop that is stuck, so the loop records a beat ten times a second.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import TCPServer
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import anyio
import anyio.to_thread

from gpu_actors.catching import log_errors
from gpu_actors.errors import GpuActorsError, InvalidRequest
from gpu_actors.extras import install_hint
from gpu_actors.fields import duration, integer
from gpu_actors.server.http.readiness import contexts_by_name, readiness_of, readiness_of_workers

if TYPE_CHECKING:
    from prometheus_client.registry import Collector, CollectorRegistry

    from gpu_actors.handles.gpu_context import GpuContext
    from gpu_actors.server.http.admission import Admission
    from gpu_actors.server.http.traffic import Traffic

__all__ = ["EXIT_CODE", "Answer", "Probes"]

logger: logging.Logger = logging.getLogger("gpu_actors")

EXIT_CODE = 70
"""The exit code of a process that ends because it is not alive: EX_SOFTWARE of sysexits.h."""

_BEAT = 0.1
_GRACE = 2.0
_LONGEST_PROOF = 200.0


class Answer(NamedTuple):
    """The answer to a probe: an HTTP status, the body and its type."""

    status: int
    body: bytes
    content_type: str = "application/json"


class Probes:
    """Answers probes about one context, or several workers, from a thread of its own, while it is entered.

    /livez: 503 if the context has failed or the event loop has not turned for ``stall_seconds``. The process should be
        restarted.
    /readyz: 503 then, and also before `watch`, after `leave`, while ``ctx.health()`` is not ready, and if no launch has
        succeeded for ``proof_seconds``. Clients should send no requests. The answer has the device, the counts of
        kernels and the reason.
    /metrics: Prometheus' text format; 501 without the ``metrics`` extra.

    host, port: where to listen. Port 0 takes a free port. None listens nowhere, for a server that calls ``livez``,
        ``readyz`` and ``metrics`` itself. The attribute ``port`` is the port in use.
    leaving: whether `leave` was called.
    ports: how many ports, from ``port`` up, to try until one is free, so that several workers get a port each.
    stall_seconds: set it above the longest time for which one task may keep the loop busy.
    proof_seconds: how old the last success of a launch may be. A context without requests makes a small launch after
        half of that time. None: a third of ``hang_timeout``, 10 s on CUDA, at most 200 s.
    exit_when_dead: end the process with `EXIT_CODE` once /livez has been 503 for 2 s. The last answers go out in that
        time. The process ends without cleaning up, because a wait for a lost device may never end.

    Raises `InvalidRequest` for a port beyond 65535 or no ports, and on entering if no port can be listened on.
    """

    def __init__(
        self,
        *,
        host: str = "127.0.0.1",
        port: int | None = None,
        ports: int = 1,
        stall_seconds: float = 30.0,
        proof_seconds: float | None = None,
        exit_when_dead: bool = False,
    ) -> None:
        self.host = host
        self.port = None if port is None else integer("port", port, 0, 65535)
        self.ports: int = integer("ports", ports, 1)
        self.stall_seconds: float = duration("stall_seconds", stall_seconds, above_0=True)
        self.proof_seconds = proof_seconds
        if proof_seconds is not None:
            self.proof_seconds = duration("proof_seconds", proof_seconds, above_0=True)
        self.exit_when_dead = exit_when_dead
        self._contexts: Mapping[str, GpuContext] = {}
        self._registry: CollectorRegistry | None = None
        self._collectors: list[Collector] = []
        self._reasons: list[Callable[[], str]] = []
        self._leave_callbacks: list[Callable[[], object]] = []
        self.leaving: bool = False
        self._last_beat = time.monotonic()
        self._beating: asyncio.Task[None] | None = None
        self._listener: _Listener | None = None
        self._thread: threading.Thread | None = None
        self._ended = threading.Event()

    async def __aenter__(self) -> Self:
        if self._thread is not None and self._thread.is_alive():
            raise GpuActorsError("these probes are entered already; make some for each application")
        self._contexts, self._registry = {}, None
        self._collectors, self._reasons, self._leave_callbacks = [], [], []
        self.leaving = False
        self._ended.clear()
        if self.port is not None:
            self._listener = _listen(self, self.host, self.port, self.ports)
            self.port = self._listener.server_port
        self._beating = asyncio.create_task(self._beat())
        self._thread = threading.Thread(target=self._run, name="gpu-actors-probes", daemon=True)
        self._thread.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(self._close)
        assert self._beating is not None
        self._beating.cancel()

    def watch(
        self,
        context: GpuContext | Mapping[str, GpuContext],
        admission: Admission | None = None,
        traffic: Traffic | None = None,
    ) -> None:
        """Answer about this context from now on, and show the admission and the traffic in /metrics.

        context: one context, or several workers by name. Workers are alive while one of them has not failed, and ready
        while one of them is. /readyz says "degraded" unless all of them are in the state "ready", and lists the state
        of each. Their samples in /metrics have the label ``worker``.
        """
        workers = contexts_by_name(context)
        try:
            from prometheus_client import CollectorRegistry

            from gpu_actors.server.http.collector import AdmissionCollector, TrafficCollector
            from gpu_actors.server.metrics import ContextCollector, WorkersCollector
        except ImportError:
            self._registry = None
        else:
            self._registry = CollectorRegistry()
            self._registry.register(ContextCollector(workers[""]) if "" in workers else WorkersCollector(workers))
            if admission is not None:
                self._registry.register(AdmissionCollector(admission))
            if traffic is not None:
                self._registry.register(TrafficCollector(traffic))
            for collector in self._collectors:
                self._registry.register(collector)
        self._contexts = workers

    def collect(self, collector: Collector) -> None:
        """Show the metrics of this ``prometheus_client`` collector in /metrics, from the next `watch` on."""
        self._collectors.append(collector)

    def dead_if(self, reason: Callable[[], str]) -> None:
        """Answer /livez and /readyz with 503 while ``reason()``, called on any thread, returns a text.

        Use it for parts that the process needs beside its context and its loop. It holds until the probes are left.
        """
        self._reasons.append(reason)

    def leave(self) -> None:
        """Report "not ready" from now on, because the process is about to end."""
        self.leaving = True
        for callback in self._leave_callbacks:
            callback()

    def when_leaving(self, tell: Callable[[], object]) -> None:
        """Call ``tell()`` on `leave`, possibly in a signal handler. It holds until the probes are left."""
        self._leave_callbacks.append(tell)

    # The answers

    def livez(self) -> Answer:
        reason = self._dead()
        return _answer(not reason, {"alive": not reason, "reason": reason})

    def readyz(self) -> Answer:
        content = self.readiness()
        return _answer(content["ready"], content)

    def readiness(self) -> dict[str, Any]:
        """The content of /readyz."""
        contexts, dead = self._contexts, self._dead()
        if not contexts:
            return {"ready": False, "state": "starting", "reason": "the context is not open yet"}
        healths = {name: context.health() for name, context in contexts.items()}
        overdue = {name: one._watch.overdue(self._proof_limit(one)) for name, one in contexts.items()}
        workers = {name: readiness_of(health, overdue[name]) for name, health in healths.items()}
        several = "" not in contexts
        front = next((name for name, one in workers.items() if one.ready), next(iter(contexts)))
        ready, state, reason = readiness_of_workers(workers) if several else workers[front]
        if self.leaving and state != "failed":
            ready, state, reason = False, "draining", "the server is leaving"
        elif dead:
            ready, reason = False, dead
            if state in ("ready", "degraded"):
                state = "stalled" if self._stalled() else "failed"
        health = healths[front]
        compiling = [context.stats()["nvrtc"] for context in contexts.values()]
        kernels = {
            "arch": health.device.arch,
            "run": health.device.runs_kernels,
            "compiled": sum(one.completed for one in compiling),
            "failed": sum(one.failed for one in compiling),
            "waiting": sum(one.submitted - one.completed - one.failed - one.cancelled for one in compiling),
        }
        content = {
            "ready": ready,
            "state": state,
            "reason": reason,
            "device": health.device.kind,
            "name": health.device.name,
            "generation": health.generation,
            "kernels": kernels,
            "last_success_seconds": round(contexts[front]._watch.age, 3),
        }
        if several:
            content["workers"] = {
                name: one._asdict() | {"generation": healths[name].generation} for name, one in workers.items()
            }
        return content

    def metrics(self) -> Answer:
        registry = self._registry
        if not self._contexts:
            return _answer(False, {"error": {"message": "the context is not open yet"}})
        if registry is None:
            return Answer(501, json.dumps({"error": {"message": install_hint("metrics")}}).encode())
        from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

        return Answer(200, generate_latest(registry), CONTENT_TYPE_LATEST)

    def _dead(self) -> str:
        """Why the process should be replaced, or an empty string."""
        if stalled := self._stalled():
            return f"the event loop has not turned for {stalled:.0f} s"
        workers = {name: readiness_of(context.health()) for name, context in self._contexts.items()}
        if workers and all(one.state == "failed" for one in workers.values()):
            return workers[""].reason if "" in workers else readiness_of_workers(workers).reason
        return next((text for reason in self._reasons if (text := reason())), "")

    def _stalled(self) -> float:
        """Seconds for which the event loop has not turned, or 0 up to ``stall_seconds``."""
        stalled = time.monotonic() - self._last_beat
        return stalled if stalled > self.stall_seconds else 0.0

    # Running

    async def _beat(self) -> None:
        while True:
            self._last_beat = time.monotonic()
            await asyncio.sleep(_BEAT)

    def _run(self) -> None:
        listening = None
        if self._listener is not None:
            listening = threading.Thread(target=self._listener.serve_forever, name="gpu-actors-probes-listener")
            listening.start()
        dead_since: float | None = None
        while not self._ended.wait(_BEAT):
            self._check_successes()
            reason = self._dead()
            if not reason:
                dead_since = None
                continue
            now = time.monotonic()
            dead_since = now if dead_since is None else dead_since
            if self.exit_when_dead and now - dead_since >= _GRACE:
                logger.critical("the process ends with code %d: %s", EXIT_CODE, reason)
                logging.shutdown()
                os._exit(EXIT_CODE)
        if listening is not None:
            assert self._listener is not None
            self._listener.shutdown()
            listening.join()

    def _proof_limit(self, context: GpuContext) -> float:
        """How old the last success of the context's launches may be, in seconds."""
        return self.proof_seconds or min(context._children.hang_timeout / 3, _LONGEST_PROOF)

    def _check_successes(self) -> None:
        for context in self._contexts.values():
            # An error must not end this thread, which also ends a dead process. /readyz then says that the last success
            # is old.
            with log_errors("the last success of the device could not be checked"):
                health = context.health()
                # While requests are launched or fail, those launches and the context's own probes are enough.
                if health.ready and health.oldest_launch is None:
                    context._watch.check(self._proof_limit(context))

    def _close(self) -> None:
        self._ended.set()
        if self._thread is not None:
            self._thread.join()
        if self._listener is not None:
            self._listener.server_close()


def _answer(good: bool, content: dict[str, Any]) -> Answer:
    return Answer(200 if good else 503, json.dumps(content).encode())


class _Listener(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    allow_reuse_port = False

    def __init__(self, address: tuple[str, int], probes: Probes) -> None:
        self.probes = probes
        super().__init__(address, _Handler)

    def handle_error(self, request: Any, client_address: Any) -> None:
        # An orchestrator has hung up. A traceback on stderr each time would hide important lines.
        logger.debug("a probe of %s failed", client_address, exc_info=True)

    def server_bind(self) -> None:
        # HTTPServer's own method looks up this machine's name. That may take long, and the name is not used.
        TCPServer.server_bind(self)
        self.server_name, self.server_port = "", self.socket.getsockname()[1]


class _Handler(BaseHTTPRequestHandler):
    timeout = 5.0  # seconds of one read
    patience = 5.0

    def handle(self) -> None:
        ending = threading.Timer(self.patience, self._end)  # or a head that arrives slowly would hold the thread
        ending.daemon = True
        ending.start()
        try:
            super().handle()
        finally:
            ending.cancel()

    def _end(self) -> None:
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)

    def do_GET(self) -> None:
        server = self.server
        assert isinstance(server, _Listener)
        probes = server.probes
        paths = {"/livez": probes.livez, "/readyz": probes.readyz, "/metrics": probes.metrics}
        endpoint = paths.get(self.path.partition("?")[0])
        answer = endpoint() if endpoint is not None else Answer(404, b'{"error": {"message": "no such probe"}}')
        self.send_response(answer.status)
        self.send_header("Content-Type", answer.content_type)
        self.send_header("Content-Length", str(len(answer.body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(answer.body)

    do_HEAD = do_GET  # some load balancers probe without the body

    def log_message(self, format: str, *args: Any) -> None:
        logger.debug("probe: %s", format % args)


def _listen(probes: Probes, host: str, port: int, ports: int) -> _Listener:
    numbers = range(port, min(port + ports, 65536)) if port else (0,)
    for number in numbers:
        try:
            return _Listener((host, number), probes)
        except OSError as error:
            failure = error
    raise InvalidRequest("port", port, f"cannot be listened on, nor can the next {ports - 1}: {failure.strerror}")
