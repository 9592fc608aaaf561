"""Generations: one process after the other for one context, each watched by the context's thread.

    start ──> opened ──> serve ──> lost ──> wait for its end ──> backoff ──> start ...
      │                    │                                       │
      └── refused          └── closing: stop, end                  └── the restart policy's allowance is used up: failed

A generation is lost when its process ends, stops answering for ``hang_timeout``, loses its device context, or when a
record of its channel is missing.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from gpu_actors.errors import ActorStopped, ContextLost, GpuActorsError
from gpu_actors.health import Health
from gpu_actors.isolation.arena import Arena, Host
from gpu_actors.isolation.cells import RemoteChildren
from gpu_actors.isolation.channel import Link
from gpu_actors.isolation.pipe import PipeChannel, Unreadable
from gpu_actors.isolation.records import Answer, Opened, Ping, Refused, Report, Stop
from gpu_actors.isolation.relay import Relay
from gpu_actors.isolation.spawning import Process, spawn
from gpu_actors.options import ContextOptions
from gpu_actors.runtime.waking import Outbox

__all__ = ["Generations"]

# Seconds between two pings, at most.
_PING = 1.0

# Seconds until a process that was killed must have ended; longer, and its shared memory is not used again.
_DYING = 10.0

# Seconds for a context to open in its process: a driver may take its time, and a kernel be compiled.
_OPENING = 300.0


class Generations:
    """The processes of one context, and the thread that talks to them.

    make_children: makes the context's environment of the first `Opened`. options: as its process takes them.
    """

    def __init__(
        self,
        device: str,
        options: ContextOptions,
        sent: ContextOptions,
        make_children: Callable[[Opened, Relay], RemoteChildren],
    ) -> None:
        self._device = device
        self._options = options
        self._sent = sent
        self._make_children = make_children
        self.opened: Future[tuple[RemoteChildren, str | None]] = Future()
        self.relay: Relay = Relay(options.mailbox_capacity, self._wake)
        self.arena: Arena = Arena()
        self.state: str = "starting"
        self.reason: str = ""
        self.health: Health | None = None
        self.process: Process | None = None
        self.children: RemoteChildren | None = None
        self._asked = self._looked = 0.0
        self._channel: PipeChannel | None = None
        self._link: Link | None = None
        self._outbox = Outbox()
        self._lost: str | None = None
        self._closing: list[threading.Event] = []
        self._killing = False
        self._failures: deque[float] = deque()
        self._pause = threading.Event()
        self._thread = threading.Thread(target=self._run, name="gpu-actors-isolation", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, done: threading.Event) -> None:
        """End the process, its context closed before; ``done`` is set when it is gone."""
        self._closing.append(done)
        if self._ended():
            done.set()
        self._pause.set()
        self._wake()

    def kill(self) -> None:
        """Wait no longer for a process that is to end."""
        self._killing = True
        process = self.process
        if process is not None:
            process.kill()
        self._wake()

    def empty(self, shape: int | tuple[int, ...], dtype: Any) -> Host:
        """An array that the context's processes share."""
        return self.arena.empty(shape, dtype)

    def after_fork(self) -> None:
        """In a forked child of the program: no descriptor may keep anything open there."""
        self.state = "stopped"
        self.relay.after_fork()
        channel, process = self._channel, self.process
        descriptors = [*(channel.descriptors() if channel is not None else ()), self.arena.fd]
        if process is not None:
            descriptors.append(process.pidfd)
        for descriptor in descriptors:
            with contextlib.suppress(OSError):
                os.close(descriptor)

    # The thread

    def _run(self) -> None:
        try:
            while not self._closing:
                served = self._generation()
                if self._closing or self._ended():
                    break
                self._wait_for_restart(served)
        except BaseException as error:
            self._fail(f"the thread of the context ended: {error!r}")
            raise
        finally:
            if self.state != "failed":
                self.state = "stopped"
            self.relay.give_up(lambda: ActorStopped("the context is closed"))
            if not self.opened.done():
                self.opened.set_exception(ActorStopped("the context was stopped while it opened"))
            self.arena.close()
            if self.children is not None:
                self.children.timers.close()
            for done in self._closing:
                done.set()

    def _generation(self) -> bool:
        """One process, from its start to its end. Whether it was ready at any time."""
        self.state, self._lost, self.health = "starting", None, None
        answers = Arena()
        ours, theirs = socket.socketpair()
        channel = PipeChannel(ours, True, self.arena, answers, self._received)
        ready = False
        try:
            try:
                generation = 1 if self.children is None else self.children.generation
                order = (self._device, self._sent, generation)
                self.process = process = spawn((theirs.fileno(), self.arena.fd, answers.fd), order)
            finally:
                theirs.close()
                answers.close()
            self._channel = channel
            self._link = Link(channel, self._handle, self._broken)
            self._asked = self._looked = time.monotonic()
            ended = channel.serve(self._tick, process.pidfd)
            ready = self.state == "ready"
            if not self._closing:
                self._mourn(ended)
        except GpuActorsError as error:
            self._refuse(error)
        finally:
            self._bury(channel)
            answers.unmap()
        return ready

    def _tick(self) -> float:
        """Look after the process. Gives the seconds until the next look, or a negative number to leave it."""
        self._outbox.flush()
        if self._lost is not None or self._killing:
            return -1.0
        assert self._link is not None
        now = time.monotonic()
        opening = self.state == "starting"
        limit = _OPENING if opening else self._limit()
        looked, self._looked = self._looked, now
        # This program may have been stopped itself: then it has to read what came meanwhile before it may judge.
        if now - looked < limit and now - self._link.heard > limit:
            self._lost = f"its process has not answered for {limit:g} s"
            return -1.0
        if self._closing:
            if self.state != "stopping":
                self._begin_stop()
            return _PING
        self._link.check()
        self.relay.pump()
        period = min(_PING, limit / 4)
        if not opening and now - self._asked >= period:
            self._asked = now
            self._link.send(Ping())
        return period

    def silence(self) -> float:
        """Seconds since the process last said anything."""
        link = self._link
        return 0.0 if link is None else time.monotonic() - link.heard

    def _limit(self) -> float:
        assert self.children is not None
        return self.children.hang_timeout

    # What comes

    def _received(self, sequence: int, record: Any) -> None:
        assert self._link is not None
        self._link.received(sequence, record)

    def _handle(self, record: Any) -> None:
        match record:
            case Answer():
                if record.health is not None:
                    self._judge(record.health)
                if isinstance(record.error, ContextLost) and self._lost is not None:
                    return  # which `_mourn` answers with what was lost
                self.relay.answered(record, self._outbox)
            case Report():
                self._judge(record.health)
                if self.children is not None:
                    self.children.seen(record)
            case Opened():
                self._open(record)
            case Refused(error):
                raise (
                    error
                    if isinstance(error, GpuActorsError)
                    else GpuActorsError(f"the context could not open: {error!r}")
                )
            case Unreadable(about, error):
                self.relay.unreadable(about, error, self._outbox)

    def _open(self, opened: Opened) -> None:
        first = self.children is None
        if self.children is None:
            self.children = self._make_children(opened, self.relay)
        self.state = "ready"
        assert self._link is not None
        assert self._channel is not None
        self.relay.attach(self._link, self._channel, self.children.generation)
        self._link.send(Ping())
        if first:
            self.opened.set_result((self.children, opened.obstacle))

    def _judge(self, health: Health) -> None:
        self.health = health
        if self.children is not None and health.generation > self.children.generation:
            self._lost = health.reason

    def _broken(self, reason: str) -> None:
        self._lost = reason
        self._wake()

    # Ends

    def _begin_stop(self) -> None:
        self.state = "stopping"
        self.relay.give_up(lambda: ActorStopped("the context is closed"))
        if self._link is not None:
            self._link.send(Stop())

    def _mourn(self, ended: int | None) -> None:
        """The generation is lost: tell everyone at once."""
        process = self.process
        assert process is not None
        cause = self._lost if self._lost is not None else f"its process, {process.pid}, ended"
        if self.children is None:
            raise GpuActorsError(f"the context could not open: {cause}")
        if self.state != "ready":
            self.reason = cause
            return  # it never had a request
        self.state, self.reason = "restarting", cause
        self.relay.detach(self.children.next_generation(cause))
        self._outbox.flush()

    def _bury(self, channel: PipeChannel) -> None:
        """See the process end, and take back what it had."""
        process, self.process = self.process, None
        gone = process is None
        if process is not None:
            if not self._closing or self._killing or self._lost is not None:
                process.kill()
            gone = process.wait(_DYING)
            if not gone:
                process.kill()
                gone = process.wait(_DYING)
            os.close(process.pidfd)
        self._channel = self._link = None
        channel.close()
        if gone:
            channel.reclaim()
        else:
            self.arena.close()
            self.arena = Arena()

    def _refuse(self, error: GpuActorsError) -> None:
        """A process did not open the context."""
        self.reason = str(error)
        if not self.opened.done():
            self.state = "failed"
            self.opened.set_exception(error)

    def _wait_for_restart(self, served: bool) -> None:
        assert self.children is not None
        policy = self._options.restart
        now = time.monotonic()
        failures = self._failures
        while failures and now - failures[0] > policy.window:
            failures.popleft()
        if len(failures) >= policy.max_restarts:
            self._fail(f"{self.reason}; {len(failures)} processes in {policy.window:g} s are what its policy allows")
            return
        self.state = "restarting"
        self._pause.wait(policy.delay(len(failures)))
        failures.append(now)

    def _fail(self, reason: str) -> None:
        """No process will follow."""
        self.state, self.reason = "failed", reason
        children = self.children
        if children is None:
            return
        generation = children.generation

        def lost() -> ContextLost:
            return ContextLost(f"the context is lost, and no process follows: {reason}", generation)

        children.lost = lost()
        for cell in children.cells.values():
            cell.mailbox.close(lost)
        self.relay.give_up(lost)
        for cell in children.cells.values():
            cell.terminate(lost())

    def _ended(self) -> bool:
        return self.state in ("failed", "stopped")

    def _wake(self) -> None:
        channel = self._channel
        if channel is not None:
            channel.wake()
