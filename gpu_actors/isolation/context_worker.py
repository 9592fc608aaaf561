"""ContextWorker: the far end of a channel, with a context behind it."""

from __future__ import annotations

from typing import Any

from gpu_actors.catching import hand_error_to
from gpu_actors.isolation.channel import Channel, Link
from gpu_actors.isolation.launcher import WorkerSpec
from gpu_actors.isolation.pipe import Unreadable
from gpu_actors.isolation.records import OpenFailed
from gpu_actors.isolation.serialization import sendable_error
from gpu_actors.isolation.worker import Worker

__all__ = ["ContextWorker"]


class ContextWorker:
    """Owns a context on its own device and answers the requests of a channel: the other end of a `RemoteContext`.

    Its host calls `received` with each record of the channel, on one thread or several, until ``ended`` is true, and
    then `close`.

    channel: carries the responses.
    """

    def __init__(self, channel: Channel) -> None:
        self.ended: bool = False
        self._link = Link(channel, self._handle, self._end)
        self._worker = Worker(self._link.send, self._end)

    def open(self, order: WorkerSpec) -> None:
        """Open the context, and send that it is open, or why not; then `ended` is true. Blocks."""
        with hand_error_to(self.refuse):
            self._worker.open(*order)

    def refuse(self, error: BaseException) -> None:
        """Send that the context does not open, and why; then `ended` is true."""
        self._link.send(OpenFailed(sendable_error(error)))
        self.ended = True

    def received(self, sequence: int, record: Any) -> None:
        """The channel has brought a record, in any order and any number of times."""
        self._link.received(sequence, record)
        self._link.check()

    def close(self) -> None:
        """Close the context, where `Stop` has not. Blocks briefly."""
        self._worker.close()

    def _handle(self, record: Any) -> None:
        if isinstance(record, Unreadable):
            self._worker.unreadable(record.about, record.error)
        else:
            self._worker.received(record)

    def _end(self, _: str = "") -> None:
        self.ended = True
