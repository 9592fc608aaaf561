"""The process of a context: a worker at the end of a channel."""

from __future__ import annotations

import os
import pickle
import socket
from typing import Any

from gpu_actors.isolation.arena import Arena
from gpu_actors.isolation.context_worker import ContextWorker
from gpu_actors.isolation.pipe import PipeChannel
from gpu_actors.isolation.workplace import Order

__all__ = ["main"]

_IDLE = 3600.0


def main(descriptors: list[int], order: bytes) -> None:
    """Serve one context until the program stops it, or is gone.

    descriptors: the socket, the arena of requests and that of answers. order: an `Order` as a tuple, pickled.
    """
    requests, answers = Arena(descriptors[1]), Arena(descriptors[2])
    requests.close()
    answers.close()

    def received(sequence: int, record: Any) -> None:
        worker.received(sequence, record)

    channel = PipeChannel(socket.socket(fileno=descriptors[0]), False, answers, requests, received)
    worker = ContextWorker(channel)
    worker.open(Order(*pickle.loads(order)))
    channel.serve(lambda: -1.0 if worker.ended else _IDLE)
    # Nothing that still hangs here may keep the process: the driver takes back what it had.
    os._exit(0)
