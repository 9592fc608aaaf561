"""Channel and Link: deliver records to the other side, each once and in order."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

__all__ = ["Channel", "Link"]

# How many records after a missing one are kept.
_MOST_EARLY = 65536


class Channel(Protocol):
    """Sends records, and passes received ones to the callback of its constructor. Safe to use from any thread."""

    def pack(self, record: Any, about: int = 0) -> Any:
        """Return a record as it travels. about: the number of the request that it makes or answers, else 0.

        Raises `InvalidRequest` for a record that cannot cross.
        """
        ...

    def post(self, sequence: int, parcel: Any) -> None:
        """Send a packed record. Never blocks, and does nothing once the channel has ended."""
        ...

    def forget(self, about: int) -> None:
        """Forget a request that is answered here, so that a later response does not write into its arrays."""
        ...

    @property
    def waiting(self) -> int:
        """Parcels that the channel has not sent yet."""
        ...


class Link:
    """Numbers the records that it sends, and delivers received ones in the order in which they were sent, each once.

    The channels of this package keep order, but others may not. A missing record must be noticed, as its request would
    never be answered: `check` reports a gap that lasts.

    receive: called with one record after the other.
    broken: called with a sentence, if a record is missing or a send was interrupted.
    patience: seconds for which a record may be missing.
    """

    def __init__(
        self,
        channel: Channel,
        receive: Callable[[Any], None],
        broken: Callable[[str], None],
        patience: float = 5.0,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._channel = channel
        self._receive = receive
        self._broken = broken
        self._patience = patience
        self._now = now
        self._sending = threading.Lock()
        self._receiving = threading.RLock()
        self._sent = 0
        self._next = 1
        self._early: dict[int, Any] = {}
        self._gap_since = 0.0
        self.last_received: float = now()

    def send(self, record: Any, about: int = 0) -> None:
        """Send a record. Raises what `Channel.pack` raises, and then nothing is sent."""
        parcel = self._channel.pack(record, about)
        with self._sending:
            self._sent += 1
            try:
                self._channel.post(self._sent, parcel)
            except BaseException:  # Ctrl-C: what was sent is unknown
                self._broken("it was interrupted as it sent a record")
                raise

    def received(self, sequence: int, record: Any) -> None:
        with self._receiving:
            self.last_received = self._now()
            if sequence < self._next or sequence in self._early:
                return
            if sequence > self._next:
                if not self._early:
                    self._gap_since = self.last_received
                self._early[sequence] = record
                if len(self._early) > _MOST_EARLY:
                    self._report()
                return
            self._next += 1
            self._receive(record)
            while self._next in self._early:
                record = self._early.pop(self._next)
                self._next += 1
                self._gap_since = self.last_received
                self._receive(record)

    def check(self) -> None:
        """Report a record that has been missing for too long. Must be called now and then."""
        with self._receiving:
            if self._early and self._now() - self._gap_since > self._patience:
                self._report()

    def _report(self) -> None:
        self._early.clear()
        self._broken(f"record {self._next} of the channel is missing")
