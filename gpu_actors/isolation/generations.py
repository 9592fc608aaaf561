"""Generations: starts one worker after the other for a context, and watches each on the context's thread.

    start ──> opened ──> serve ──> lost ──> wait for its end ──> backoff ──> start ...
      │                    │                                       │
      └── refused          └── closing: stop, end                  └── the restart policy's allowance is used up: failed

A `Launcher` starts the workers, so this module does not depend on what a worker runs in. docs/isolation.md says when a
generation is lost, and which starts are tried again.
"""

from __future__ import annotations

import errno
import functools
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from gpu_actors.errors import ActorStopped, ContextLost, GpuActorsError, caused
from gpu_actors.handles.health import Health
from gpu_actors.isolation.arena import Host
from gpu_actors.isolation.cells import RemoteChildren
from gpu_actors.isolation.channel import Link
from gpu_actors.isolation.launcher import Connection, Launcher, WorkerSpec
from gpu_actors.isolation.pipe import Unreadable
from gpu_actors.isolation.records import Opened, OpenFailed, Ping, Response, Status, Stop
from gpu_actors.isolation.rpc_client import RpcClient
from gpu_actors.options import ContextOptions
from gpu_actors.runtime.waking import Outbox

__all__ = ["Generations"]

# The most seconds between two pings.
_PING = 1.0

# Seconds that a context may take to open in its process. A driver may be slow. These devices have no driver.
_OPENING = {"mock": 60.0, "emulated": 60.0}
_LONGEST_OPENING = 300.0

# Seconds without a record after which a worker counts as hung by default. It answers pings on a thread that does
# nothing else, so a long launch does not keep it from answering.
_SILENCE = 30.0

# Seconds for which an opening context keeps trying to start its first worker, and the least pause between two attempts.
_FIRST_ATTEMPTS = 1.0
_PAUSE = 0.02

# Errors of the system that may pass in a moment.
_TRANSIENT = frozenset((errno.EAGAIN, errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.ENOSPC))


class Generations:
    """The workers of one context, and the thread that talks to them.

    worker_options: the options in the form that a worker takes.
    make_children: makes the context's environment from the first `Opened`.
    """

    def __init__(
        self,
        device: str,
        options: ContextOptions,
        worker_options: ContextOptions,
        make_children: Callable[[Opened, RpcClient], RemoteChildren],
        launcher: Launcher,
    ) -> None:
        self._device = device
        self._options = options
        self._worker_options = worker_options
        self._make_children = make_children
        self.opened: Future[tuple[RemoteChildren, str | None]] = Future()
        self.client: RpcClient = RpcClient(options.mailbox_capacity, self._wake)
        self.launcher: Launcher = launcher
        self.state: str = "starting"
        self.reason: str = ""
        self.health: Health | None = None
        self.connection: Connection | None = None
        self.children: RemoteChildren | None = None
        self._pinged_at = self._ticked_at = 0.0
        self._link: Link | None = None
        self._outbox = Outbox()
        self._lost: str | None = None
        self._closing: list[threading.Event] = []
        self._killing = False
        self._failures: deque[float] = deque()
        self._lacks_resources = False  # whether the system lacked resources for the last start
        self._attempts: list[float] = []  # when each attempt in a row that lacked resources ended
        self._pause = threading.Event()
        self._thread = threading.Thread(target=self._run, name="gpu-actors-isolation", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, done: threading.Event) -> None:
        """Close the context and end its worker. Sets ``done`` when the worker has ended."""
        self._closing.append(done)
        if self._ended():
            done.set()
        elif self.connection is None:
            # Between two workers. A start under way may take long. Its thread then ends the worker that it starts.
            self.client.give_up(_closed)
            done.set()
        self._pause.set()
        self._wake()

    def kill(self) -> None:
        """Kill the worker instead of waiting for its end."""
        self._killing = True
        connection = self.connection
        if connection is not None:
            connection.kill()
        self._wake()

    def empty(self, shape: int | tuple[int, ...], dtype: Any) -> Host:
        return self.launcher.empty(shape, dtype)

    def after_fork(self) -> None:
        self.state = "stopped"
        self.client.after_fork()
        connection = self.connection
        if connection is not None:
            connection.after_fork()
        self.launcher.after_fork()

    # The thread

    def _run(self) -> None:
        try:
            while not self._closing:
                self._generation()
                if self._closing or self._ended():
                    break
                self._wait_for_restart()
        except BaseException as error:
            self._fail(f"the thread of the context ended: {error!r}")
            raise
        finally:
            if self.state != "failed":
                self.state = "stopped"
            self.client.give_up(_closed)
            if not self.opened.done():
                self.opened.set_exception(ActorStopped("the context was stopped while it opened"))
            self.launcher.close()
            if self.children is not None:
                self.children.timers.close()
            for done in self._closing:
                done.set()

    def _generation(self) -> None:
        self.state, self._lost, self.health = "starting", None, None
        self._lacks_resources = False
        try:
            generation = 1 if self.children is None else self.children.generation
            spec = WorkerSpec(self._device, self._worker_options, generation)
            self.connection = connection = self.launcher.start(spec, self._received)
            self._link = Link(connection.channel, self._handle, self._broken, self.launcher.patience)
            self._pinged_at = self._ticked_at = time.monotonic()
            connection.serve(self._tick)
            if not self._closing:
                self._on_worker_lost(connection)
        except Exception as error:
            if self.state == "ready" and self.connection is not None and not self._closing:
                self._lost = f"its thread failed: {error!r}"
                self._on_worker_lost(self.connection)
            else:
                self._on_start_failed(error)
        finally:
            self._reap()

    def _tick(self) -> float:
        """Check and ping the worker. Returns the seconds until the next call, negative to end `Connection.serve`."""
        self._outbox.flush()
        if self._lost is not None or self._killing:
            return -1.0
        assert self._link is not None
        now = time.monotonic()
        opening = self.state == "starting"
        limit = _OPENING.get(self._device, _LONGEST_OPENING) if opening else self.limit()
        ticked_at, self._ticked_at = self._ticked_at, now
        # This program itself may have been stopped. Then it must first read the records that arrived meanwhile.
        if now - ticked_at < limit and now - self._link.last_received > limit:
            self._lost = f"its {self.launcher.noun} has not answered for {limit:g} s"
            return -1.0
        if self._closing:
            if self.state != "stopping":
                self._begin_stop()
            return _PING
        self._link.check()
        self.client.pump()
        period = min(_PING, limit / 4)
        if now - self._pinged_at >= period:  # also while it opens: its answers reveal that `Opened` was lost
            self._pinged_at = now
            self._link.send(Ping())
        return period

    def silence(self) -> float:
        """Seconds since the last record of the worker."""
        link = self._link
        return 0.0 if link is None else time.monotonic() - link.last_received

    def limit(self) -> float:
        """Seconds for which a worker may be silent."""
        hang_timeout = self._options.hang_timeout
        return _SILENCE if hang_timeout is None else hang_timeout

    # Records

    def _received(self, sequence: int, record: Any) -> None:
        assert self._link is not None
        self._link.received(sequence, record)

    def _handle(self, record: Any) -> None:
        match record:
            case Response():
                if record.health is not None:
                    self._on_health(record.health)
                if isinstance(record.error, ContextLost) and self._lost is not None:
                    return  # `_on_worker_lost` answers it
                self.client.on_response(record, self._outbox)
            case Status():
                self._on_health(record.health)
                if self.children is not None:
                    self.children.update(record)
            case Opened():
                self._open(record)
            case OpenFailed(error):
                raise error if isinstance(error, Exception) else _not_open(repr(error))
            case Unreadable(about, error):
                self.client.on_unreadable(about, error, self._outbox)

    def _open(self, opened: Opened) -> None:
        first = self.children is None
        if self.children is None:
            self.children = self._make_children(opened, self.client)
        self.state = "ready"
        self._attempts.clear()
        assert self._link is not None
        assert self.connection is not None
        self.client.attach(self._link, self.connection.channel, self.children.generation)
        self._link.send(Ping())
        if first:
            self.opened.set_result((self.children, opened.obstacle))

    def _on_health(self, health: Health) -> None:
        self.health = health
        if self.children is not None and health.generation > self.children.generation:
            self._lost = health.reason

    def _broken(self, reason: str) -> None:
        self._lost = reason
        self._wake()

    # Ends

    def _begin_stop(self) -> None:
        self.state = "stopping"
        self.client.give_up(_closed)
        if self._link is not None:
            self._link.send(Stop())

    def _on_worker_lost(self, connection: Connection) -> None:
        cause = self._lost if self._lost is not None else f"{connection.name} ended"
        if self.children is None:
            raise _not_open(cause)
        if self.state != "ready":
            self.reason = cause
            return  # the worker never had a request
        self.state, self.reason = "restarting", cause
        # In this order: requests made in the next generation must not be sent to the lost worker.
        calls = self.client.detach()
        self.client.fail_all(calls, self.children.next_generation(cause))
        self._outbox.flush()

    def _reap(self) -> None:
        connection, self.connection = self.connection, None
        self._link = None
        if connection is not None:
            connection.bury(kill=not self._closing or self._killing or self._lost is not None)

    def _on_start_failed(self, error: Exception) -> None:
        known = isinstance(error, GpuActorsError)
        text = str(error) if known else f"{type(error).__name__}: {error}"
        self.reason = text if known else f"its {self.launcher.noun} does not start: {text}"
        self._lacks_resources = not known if self.opened.done() else _is_transient(error)
        if not self.opened.done() and not self._lacks_resources:
            self.state = "failed"
            self.opened.set_exception(error if known else caused(_not_open(self.reason), error))

    def _wait_for_restart(self) -> None:
        policy = self._options.restart
        if self._lacks_resources:
            self._wait_for_the_system()
            return
        self._attempts.clear()
        delay = policy.grant(self._failures, time.monotonic())
        if delay is None:
            allowed = f"{policy.max_restarts} restarts in {policy.window:g} s are what its policy allows"
            self._fail(f"{self.reason}; {allowed}")
            return
        self.state = "restarting"
        self._pause.wait(delay)

    def _wait_for_the_system(self) -> None:
        policy, attempts = self._options.restart, self._attempts
        attempts.append(time.monotonic())
        limit = policy.window if self.opened.done() else _FIRST_ATTEMPTS
        if attempts[-1] - attempts[0] > limit:
            self._fail(f"{self.reason}, {len(attempts)} times in {limit:g} s")
            return
        self.state = "restarting"
        self._pause.wait(max(_PAUSE, policy.delay(len(attempts) - 1)))

    def _fail(self, reason: str) -> None:
        """Fail the context: no worker will follow."""
        self.state, self.reason = "failed", reason
        if not self.opened.done():
            self.opened.set_exception(_not_open(reason))
        children = self.children
        if children is None:
            return
        generation = children.generation

        message = f"the context is lost, and no {self.launcher.noun} follows: {reason}"
        lost = functools.partial(children.make_lost, message, generation)
        children.lost = lost(False)
        for cell in children.cells.values():
            cell.mailbox.close(functools.partial(lost, False))
        self.client.give_up(lost)
        for cell in children.cells.values():
            cell.terminate(lost(False))

    def _ended(self) -> bool:
        return self.state in ("failed", "stopped")

    def _wake(self) -> None:
        connection = self.connection
        if connection is not None:
            connection.wake()


def _is_transient(error: Exception) -> bool:
    if isinstance(error, OSError):
        return error.errno in _TRANSIENT
    return isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and "start new thread" in str(error))


def _not_open(reason: str) -> GpuActorsError:
    return GpuActorsError(f"the context could not open: {reason}")


def _closed(_: bool) -> ActorStopped:
    return ActorStopped("the context is closed")
