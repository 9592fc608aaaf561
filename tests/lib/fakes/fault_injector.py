"""An actor for the process of an isolated context, which injects faults into that process."""

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

FAULTS: dict[str, Callable[[], object]] = {
    "SIGKILL": lambda: _send(signal.SIGKILL),
    "os._exit": lambda: os._exit(7),
    "SIGSTOP": lambda: _send(signal.SIGSTOP),
}


def _send(number: int) -> None:
    os.kill(os.getpid(), number)
    time.sleep(0.2)  # the sending thread may continue for a moment


class FaultInjector(ServiceActor):
    """Takes ("echo", value), ("raise", error), ("sleep", seconds), ("until", path), ("now", way),
    ("trap", step, way) and ("start and end",), which answers the exit status of a process that it terminates.

    For ("until", path) it creates a file "begun" beside the path and waits until the path exists.
    After ("note receivers",), ("received here",) answers whether its own thread received it.
    """

    label = "fault_injector"

    def open(self) -> None:
        flag = os.environ.get("TEST_DIE_IN_OPEN")
        if flag and Path(flag).exists():
            way = Path(flag).read_text()
            Path(flag).unlink()
            FAULTS[way]()

    def handle(self, call: Call[Any]) -> None:
        kind, *arguments = call.message
        if kind == "now":
            FAULTS[arguments[0]]()
        elif kind == "trap":
            _inject_at(arguments[0], FAULTS[arguments[1]])
        elif kind == "sleep":
            time.sleep(arguments[0])
        elif kind == "until":
            gate = Path(arguments[0])
            gate.with_name("begun").touch()
            while not gate.exists():
                time.sleep(0.001)
        elif kind == "raise":
            raise arguments[0]
        elif kind == "start and end":
            with subprocess.Popen(["sleep", "60"]) as process:
                process.terminate()
            arguments = [process.returncode]
        elif kind == "note receivers":
            self._receivers: list[int] = []
            _before_request(lambda *_: self._receivers.append(threading.get_ident()))
        elif kind == "received here":
            arguments = [self._receivers[-1] == threading.get_ident()]
        call.resolve(arguments[0] if arguments else None, self.outbox)


class Unpicklable:
    """Cannot be pickled."""

    def __reduce__(self) -> Any:
        raise TypeError("stays here")


class FailingActor(ServiceActor):
    """Fails every request with a message, and answers others with an `Unpicklable`."""

    label = "failing"

    def handle(self, call: Call[Any]) -> None:
        call.fail(LaunchError("as asked"), self.outbox) if call.message else call.resolve(Unpicklable(), self.outbox)


def _inject_at(step: str, fault: Callable[[], object]) -> None:
    """Inject the fault when the process next reaches that step of a request, of a layer or of its end."""
    from inside.isolation import PipeChannel

    from gpu_actors.remote import ContextWorker

    if step == "read":
        _before(PipeChannel, "_record", lambda *_: fault())
    elif step == "asked":
        _before_request(lambda *_: fault())
    elif step == "answered":
        _before(ContextWorker, "_on_call_done", lambda self, number, cell, call: cell.name == "flash_attn" and fault())
    elif step == "layer asked":
        _before(ContextWorker, "_attend", lambda *_: fault())
    elif step == "layer done":
        _before(
            ContextWorker,
            "_respond",
            lambda *_: threading.current_thread().name.startswith("gpu-actors-layers") and fault(),
        )
    elif step == "packed":

        def post(channel: PipeChannel, sequence: int, parcel: Any) -> None:
            if parcel.about:
                fault()

        _before(PipeChannel, "post", post)
    elif step == "half sent":
        send = PipeChannel._send

        def half(channel: PipeChannel, frame: Any) -> int:
            count = send(channel, frame[: len(frame) // 2])
            fault()
            return count

        PipeChannel._send = half  # type: ignore[method-assign]
    elif step == "sent":
        _after(PipeChannel, "post", fault)
    elif step == "closing":
        _before(ContextWorker, "close", lambda *_: fault())
    else:
        raise AssertionError(step)


def _before_request(first: Callable[..., object]) -> None:
    from gpu_actors.remote import ContextWorker

    _before(ContextWorker, "_on_request", first)


def _before(owner: type, name: str, first: Callable[..., object]) -> None:
    original = getattr(owner, name)

    def trapped(*arguments: Any) -> Any:
        first(*arguments)
        return original(*arguments)

    setattr(owner, name, trapped)


def _after(owner: type, name: str, then: Callable[[], object]) -> None:
    original = getattr(owner, name)
    posted: list[int] = []

    def trapped(self: Any, sequence: int, parcel: Any) -> Any:
        answer = original(self, sequence, parcel)
        posted.append(parcel.about)
        if parcel.about and len(posted) > 1:  # the first answers the request for this trap
            then()
        return answer

    setattr(owner, name, trapped)
