"""The process of a context: a worker at the end of a channel."""

from __future__ import annotations

import functools
import io
import os
import socket
import threading
from typing import Any

from gpu_actors.catching import hand_error_to
from gpu_actors.isolation.arena import Arena
from gpu_actors.isolation.context_worker import ContextWorker
from gpu_actors.isolation.imports import Unpickler, enter_child
from gpu_actors.isolation.launcher import WorkerSpec
from gpu_actors.isolation.pipe import PipeChannel
from gpu_actors.isolation.records import Request
from gpu_actors.kv.requests import AttendLayer
from gpu_actors.runtime.mailbox import Mailbox
from gpu_actors.runtime.waking import WakePipe

__all__ = ["ReadingPipe", "main"]

_IDLE = 3600.0


def main(descriptors: list[int], spec: bytes) -> None:
    """Serve one context until the program stops it or ends.

    descriptors: of the socket, the requests' arena and the answers' arena. spec: a `WorkerSpec` as a tuple, pickled.
    """
    enter_child()
    requests, answers = Arena(descriptors[1]), Arena(descriptors[2])
    requests.close()
    answers.close()

    def received(sequence: int, record: Any) -> None:
        worker.received(sequence, record)

    channel = PipeChannel(socket.socket(fileno=descriptors[0]), False, answers, requests, received, _is_handed_on)
    # Static, because from Python 3.14 on a partial in a class is bound like a method.
    Mailbox.make_pipe = staticmethod(functools.partial(ReadingPipe, channel))
    worker = ContextWorker(channel)
    with hand_error_to(worker.refuse):  # such as an error while the actor's module is imported
        worker.open(WorkerSpec(*Unpickler(io.BytesIO(spec)).load()))
    channel.serve(lambda: -1.0 if worker.ended else _IDLE)
    # A thread that hangs must not keep the process alive. The driver frees the device memory.
    os._exit(0)


class ReadingPipe(WakePipe):
    """An actor's pipe. The actor that had the last request reads the channel while it sleeps in its pipe.

    So the next request wakes only the thread that answers it. That thread also delivers the records of other actors.
    """

    __slots__ = ("_due", "_substitute")

    def __init__(self, channel: PipeChannel) -> None:
        super().__init__()
        self._substitute = channel.substitute(self._reader)
        self._due = False  # whether it was woken since it last slept

    def wait(self) -> None:
        due, self._due = self._due, False
        if not due or not self._substitute.read():
            super().wait()

    def wake(self) -> None:
        self._due = True
        # A record that the actor's own thread receives need not wake it: it looks for work next.
        if self._substitute.receives != threading.get_ident():
            super().wake()


def _is_handed_on(record: Any) -> bool:
    """Whether another thread does the work of a record: an actor's thread, or one for layers of steps."""
    # A request to the context itself may wait for an actor, and `Stop` does, so an actor's thread must not do them.
    return type(record) is Request and (bool(record.actor) or type(record.message) is AttendLayer)
