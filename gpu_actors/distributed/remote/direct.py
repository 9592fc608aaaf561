"""InProcess: the launcher whose generations are threads of this process."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any

from gpu_actors.isolation.channel import Channel
from gpu_actors.isolation.context_worker import ContextWorker
from gpu_actors.isolation.launcher import Launcher, Received, WorkerSpec

__all__ = ["DirectChannel", "InProcess", "Inbox"]

# Its put is re-entrant, because a finalizer may send at any point of a thread's work.
Inbox = queue.SimpleQueue[Any]

# Seconds that a context may take to close in its thread.
_CLOSING = 10.0
_LONGEST = 3600.0


class DirectChannel:
    """Puts records into the other side's inbox as they are. inbox: the other side's."""

    def __init__(self, inbox: Inbox) -> None:
        self._inbox = inbox
        self.cut: bool = False

    def pack(self, record: Any, about: int = 0) -> Any:
        return record

    def post(self, sequence: int, parcel: Any) -> None:
        if not self.cut:
            self._inbox.put((sequence, parcel))

    def forget(self, about: int) -> None:
        """Does nothing, because nothing is kept for a request here."""

    @property
    def waiting(self) -> int:
        return self._inbox.qsize()


class InProcess(Launcher):
    """Each generation is a context of this process, with a thread that reads records. Nothing is copied or pickled.

    It costs least and isolates least. Use it for tests, and for devices that may share a process. A worker that hangs
    cannot be ended: it is abandoned, and the next generation opens beside it.
    """

    noun: str = "worker"
    patience: float = 5.0

    def start(self, order: WorkerSpec, received: Received) -> ThreadConnection:
        return ThreadConnection(order, received, DirectChannel)


class ThreadConnection:
    """A worker in a thread, and two inboxes. make_channel: makes the channel of an inbox, one for each side."""

    pid: int | None = None

    def __init__(self, order: WorkerSpec, received: Received, make_channel: Callable[[Inbox], Any]) -> None:
        self.name: str = "its worker"
        self._received = received
        self._inbox: Inbox = queue.SimpleQueue()
        self._worker_inbox: Inbox = queue.SimpleQueue()
        self.channel: Channel = make_channel(self._worker_inbox)
        self._worker_channel: Any = make_channel(self._inbox)
        self._killed = False
        self._worker = ContextWorker(self._worker_channel)
        self._thread = threading.Thread(target=self._work, args=(order,), name="gpu-actors-worker", daemon=True)
        self._thread.start()

    def serve(self, tick: Callable[[], float]) -> None:
        while not self._killed:
            seconds = tick()
            if seconds < 0:
                return
            try:
                item = self._inbox.get(timeout=min(seconds, _LONGEST))
            except queue.Empty:
                continue
            if item is _END:
                return
            if item is not None:
                self._received(*item)

    def wake(self) -> None:
        self._inbox.put(None)

    def kill(self) -> None:
        self._killed = True
        self._cut()
        self._inbox.put(None)
        self._worker_inbox.put(_END)

    def bury(self, kill: bool) -> None:
        if kill:
            self.kill()
        self._thread.join(_CLOSING)
        self._cut()

    def after_fork(self) -> None:
        """Does nothing: the threads do not run in the forked child, and nothing else is open."""

    def _cut(self) -> None:
        self.channel.cut = self._worker_channel.cut = True  # type: ignore[attr-defined]

    def _work(self, spec: WorkerSpec) -> None:
        worker = self._worker
        try:
            worker.open(spec)
            while not worker.ended:
                item = self._worker_inbox.get()
                if item is _END:
                    break
                worker.received(*item)
        finally:
            self._inbox.put(_END)
            worker.close()


_END = object()
