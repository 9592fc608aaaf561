"""StreamedTrace: a trace file that is written while the program runs.

The format is the Trace Event Format's JSON array form, one record per line. Its closing bracket is optional, so the
file of a killed process opens in Perfetto unchanged.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from io import FileIO
from pathlib import Path
from typing import Any, Self

import anyio.to_thread

from gpu_actors.catching import undo_on_error
from gpu_actors.errors import GpuActorsError
from gpu_actors.fields import integer
from gpu_actors.tracing.recorder import ACTORS, Record, Recorder, row_names

__all__ = ["StreamedTrace"]

logger: logging.Logger = logging.getLogger("gpu_actors")

_PERIOD = 0.2
_WAITING = 20_000
_MAX_BYTES = 1 << 30


class StreamedTrace(Recorder):
    """A listener for ``ContextOptions.on_event`` that writes each event to a file, at most 0.2 s later.

    Each actor has a row with its requests, launches and compilations, and each thread has a row with its host spans
    (see `gpu_actors.tracing.host_span`). A separate thread writes, so no request waits for the disk.

    path: the file, replaced on entering. Enter the trace around the context, with ``async with``, or ``with`` in a
        program without a loop.
    max_bytes: the greatest size of the file. Later records are dropped.
    max_waiting: how many records may wait to be written, about 1 KB each. A span that begins while this many wait is
        dropped.
    dropped: how many spans and instants are not in the file. The last line of a closed file has the number.

    Raises `InvalidRequest` for a bound that is not an int >= 1, and OSError on entering if the file cannot be
    written. If the disk fails later, the trace ends with a line in the log.
    """

    def __init__(
        self, path: str | os.PathLike[str], *, max_bytes: int = _MAX_BYTES, max_waiting: int = _WAITING
    ) -> None:
        super().__init__()
        self.path: Path = Path(path).absolute()
        self.dropped: int = 0
        self._max_bytes = integer("max_bytes", max_bytes, 1)
        self._max_waiting = integer("max_waiting", max_waiting, 1)
        self._waiting: list[Record] = []
        self._written = 0
        self._file: FileIO | None = None
        self._ending = threading.Event()
        self._thread: threading.Thread | None = None
        self._process = 0

    async def __aenter__(self) -> Self:
        await anyio.to_thread.run_sync(self._start)  # it opens the file
        return self

    # Records, under the lock

    def _span_began(self, begin: Record) -> bool:
        return self._put(begin)

    def _span_ended(self, begin: Record, stop: float, args: dict[str, str]) -> None:
        # Not bounded: there are no more ends than spans that have begun.
        self._waiting.append({**begin, "ph": "e", "ts": stop, "args": args})

    def _span_replaced(self, former: Record, stop: float) -> None:
        self._span_ended(former, max(stop, former["ts"]), former["args"])

    def _instant(self, record: Record) -> None:
        self._put(record)

    def _row_began(self, group: int, row: int, name: str) -> None:
        self._waiting += row_names(group, row, name)

    def _put(self, record: Record) -> bool:
        room = self._thread is not None and len(self._waiting) < self._max_waiting and self._written < self._max_bytes
        if room:
            self._waiting.append(record)
        else:
            self.dropped += 1
        return room

    # The file

    def _start(self) -> None:
        if self._thread is not None:
            raise GpuActorsError("this trace is entered already; make one for each file")
        self._ending.clear()
        self._written = 0
        self._process = os.getpid()
        self._file = self.path.open("wb", buffering=0)
        with undo_on_error(self._file.close):
            _put_all(self._file, "[\n")
        self._thread = threading.Thread(target=self._run, name="gpu-actors-trace", daemon=True)
        self._thread.start()
        super()._start()

    def _finish(self) -> None:
        super()._finish()
        thread = self._thread
        if thread is None or self._process != os.getpid():
            return
        self._ending.set()
        thread.join()
        self._thread = None

    def _run(self) -> None:
        assert self._file is not None
        with self._file as file:
            try:
                while not self._ending.wait(_PERIOD):
                    self._write(file)
                self._write(file)
                last: dict[str, Any] = {"name": "end of the trace", "ph": "i", "s": "g", "pid": ACTORS, "tid": 0}
                last |= {"ts": time.monotonic_ns() / 1000, "args": {"dropped": str(self.dropped)}}
                _put_all(file, f"{json.dumps(last)}\n]\n")
            except OSError as error:
                logger.error("the trace %s ends here: %s", self.path, error)
                self._written = self._max_bytes
                self._ending.wait()

    def _write(self, file: FileIO) -> None:
        with self._lock:
            waiting, self._waiting = self._waiting, []
        if waiting:
            text = "".join(f"{json.dumps(record)},\n" for record in waiting)
            _put_all(file, text)
            self._written += len(text)


def _put_all(file: FileIO, text: str) -> None:
    """Write without a buffer, in one call if the system accepts all of it, so that a kill cuts few lines."""
    rest = memoryview(text.encode())
    while rest:
        rest = rest[file.write(rest) :]
