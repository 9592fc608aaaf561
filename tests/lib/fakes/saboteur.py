"""An actor for the process of an isolated context, which brings that process to harm where a test says so."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gpu_actors import Call, LaunchError, ServiceActor

WAYS: dict[str, Callable[[], object]] = {
    "SIGKILL": lambda: _send(signal.SIGKILL),
    "os._exit": lambda: os._exit(7),
    "SIGSTOP": lambda: _send(signal.SIGSTOP),
}


def _send(number: int) -> None:
    os.kill(os.getpid(), number)
    time.sleep(0.2)  # the thread that sends may run on for a moment


class Saboteur(ServiceActor):
    """Takes ("echo", value), ("raise", error), ("sleep", seconds), ("until", path), ("now", way),
    ("trap", step, way) and ("start and end",), which answers the status of a program that it has ended.

    For ("until", path) it makes a file "begun" beside the path and waits until the path exists.
    After ("note receivers",), ("received here",) tells whether its own thread received it.
    """

    label = "saboteur"

    def open(self) -> None:
        flag = os.environ.get("TEST_DIE_IN_OPEN")
        if flag and Path(flag).exists():
            way = Path(flag).read_text()
            Path(flag).unlink()
            WAYS[way]()

    def handle(self, call: Call[Any]) -> None:
        kind, *given = call.message
        if kind == "now":
            WAYS[given[0]]()
        elif kind == "trap":
            _trap(given[0], WAYS[given[1]])
        elif kind == "sleep":
            time.sleep(given[0])
        elif kind == "until":
            gate = Path(given[0])
            gate.with_name("begun").touch()
            while not gate.exists():
                time.sleep(0.001)
        elif kind == "raise":
            raise given[0]
        elif kind == "start and end":
            with subprocess.Popen(["sleep", "60"]) as process:
                process.terminate()
            given = [process.returncode]
        elif kind == "note receivers":
            self._receivers: list[int] = []
            _before_asked(lambda *_: self._receivers.append(threading.get_ident()))
        elif kind == "received here":
            given = [self._receivers[-1] == threading.get_ident()]
        call.resolve(given[0] if given else None, self.outbox)


class Unsendable:
    """Cannot be pickled."""

    def __reduce__(self) -> Any:
        raise TypeError("stays here")


class Failing(ServiceActor):
    """Fails every launch that it is asked for."""

    label = "failing"

    def handle(self, call: Call[Any]) -> None:
        call.fail(LaunchError("as asked"), self.outbox) if call.message else call.resolve(Unsendable(), self.outbox)


def _trap(step: str, harm: Callable[[], object]) -> None:
    """Do harm as soon as the process comes to that step for the next request of flash_attn."""
    from inside.isolation import PipeChannel, Worker

    if step == "read":
        _before(PipeChannel, "_record", lambda *_: harm())
    elif step == "asked":
        _before_asked(lambda *_: harm())
    elif step == "answered":
        _before(Worker, "_on_call_done", lambda self, number, cell, call: cell.name == "flash_attn" and harm())
    elif step == "packed":

        def post(channel: PipeChannel, sequence: int, parcel: Any) -> None:
            if parcel.about:
                harm()

        _before(PipeChannel, "post", post)
    elif step == "half sent":
        send = PipeChannel._send

        def half(channel: PipeChannel, frame: Any) -> int:
            sent = send(channel, frame[: len(frame) // 2])
            harm()
            return sent

        PipeChannel._send = half  # type: ignore[method-assign]
    elif step == "sent":
        _after(PipeChannel, "post", harm)
    elif step == "closing":
        _before(Worker, "close", lambda *_: harm())
    else:
        raise AssertionError(step)


def _before_asked(first: Callable[..., object]) -> None:
    from inside.isolation import Worker

    _before(Worker, "_on_request", first)


def _before(owner: type, name: str, first: Callable[..., object]) -> None:
    given = getattr(owner, name)

    def trapped(*arguments: Any) -> Any:
        first(*arguments)
        return given(*arguments)

    setattr(owner, name, trapped)


def _after(owner: type, name: str, then: Callable[[], object]) -> None:
    given = getattr(owner, name)
    posted: list[int] = []

    def trapped(self: Any, sequence: int, parcel: Any) -> Any:
        answer = given(self, sequence, parcel)
        posted.append(parcel.about)
        if parcel.about and len(posted) > 1:  # the first one is the answer to the request for this trap
            then()
        return answer

    setattr(owner, name, trapped)
