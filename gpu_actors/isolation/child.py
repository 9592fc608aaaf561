"""The process of a context: a worker at the end of a channel."""

from __future__ import annotations

import os
import pickle
import socket
from typing import Any

from gpu_actors.isolation.arena import Arena
from gpu_actors.isolation.channel import Link
from gpu_actors.isolation.pipe import PipeChannel, Unreadable
from gpu_actors.isolation.records import Refused
from gpu_actors.isolation.worker import Worker

__all__ = ["main"]

_IDLE = 3600.0


def main(descriptors: list[int], order: bytes) -> None:
    """Serve one context until the program stops it, or is gone.

    descriptors: the socket, the arena of requests and that of answers. order: pickled (device, options, generation).
    """
    requests, answers = Arena(descriptors[1]), Arena(descriptors[2])
    requests.close()
    answers.close()
    ended = False

    def end() -> None:
        nonlocal ended
        ended = True

    def received(sequence: int, record: Any) -> None:
        link.received(sequence, record)

    def handle(record: Any) -> None:
        if isinstance(record, Unreadable):
            worker.unreadable(record.about, record.error)
        else:
            worker.received(record)

    def tick() -> float:
        link.check()
        return -1.0 if ended else _IDLE

    channel = PipeChannel(socket.socket(fileno=descriptors[0]), False, answers, requests, received)
    link = Link(channel, handle, lambda _: end())
    worker = Worker(link.send, end)
    try:
        worker.open(*pickle.loads(order))
    except BaseException as error:
        link.send(Refused(error))
        ended = True
    channel.serve(tick)
    # Nothing that still hangs here may keep the process: the driver takes back what it had.
    os._exit(0)
