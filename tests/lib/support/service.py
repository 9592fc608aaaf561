"""Shared by tests of the actors: tiny requests, scripted actors, and waiting for conditions."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from inside.devices import Launch, Outputs

import gpu_actors as ga

REPOSITORY = Path(ga.__file__).parents[1]
KERNELS_CU = REPOSITORY / "kernels_cu"
NO_COMPUTE = ga.MockOptions(compute=False)
AT_ONCE = 30.0
"""Seconds. Work that takes less has not waited for something that takes a minute, even on a slow machine."""


def rows(seqlen: int = 1, *, heads: int = 1, dim: int = 8, batch: int = 1, dtype: Any = np.float32) -> np.ndarray:
    """A small array (batch, seqlen, heads, dim), the same every time."""
    size = batch * seqlen * heads * dim
    return (np.arange(size) % 7 / 7).astype(dtype).reshape(batch, seqlen, heads, dim)


def ask(ctx: ga.GpuContext, **options: Any) -> ga.Reply[ga.AttentionOutput]:
    """The smallest forward request."""
    return ctx.flash_attn.forward(rows(), rows(), rows(), **options)


def eventually(holds: Callable[[], object], timeout: float = 30.0) -> None:
    """Wait until ``holds()`` is true, or fail. The timeout is long: a busy machine may delay a thread for seconds."""
    end = time.monotonic() + timeout
    while not holds():
        assert time.monotonic() < end, f"did not come true within {timeout} s"
        time.sleep(0.001)


def suspend(pid: int) -> None:
    """Send SIGSTOP, and wait until no thread of the process runs, because a running thread may still answer."""

    def stopped(thread: Path) -> bool:
        return (thread / "stat").read_text().rpartition(")")[2].split()[0] == "T"

    os.kill(pid, signal.SIGSTOP)
    eventually(lambda: all(map(stopped, Path(f"/proc/{pid}/task").iterdir())))


def interrupt(pid: int) -> None:
    """Send SIGINT once the process's main thread waits.

    Python runs a handler between two steps of its interpreter, so a signal that arrives after the last step before a
    wait is handled only when the wait ends. A thread that waits for the interpreter's lock wakes every 5 ms, so one
    that does not wake for longer waits for something else.
    """

    def waits() -> tuple[str, str]:
        lines = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/task/{pid}/status").read_text().splitlines())
        return lines["State"].split()[0], lines["voluntary_ctxt_switches"]

    def asleep() -> bool:
        state = waits()
        time.sleep(0.1)
        return state[0] == "S" and waits() == state

    eventually(asleep, 60.0)
    os.kill(pid, signal.SIGINT)


def eventually_freed(*references: Callable[[], object]) -> None:
    """Wait until the objects of these weak references are freed, including cycles that only the collector frees.

    An error's traceback holds the frames that it passed, and so the replies in them. One collection is not enough,
    because an actor's thread may release its request only after it.
    """

    def gone() -> bool:
        gc.collect()
        return all(reference() is None for reference in references)

    eventually(gone)


async def comes_true(holds: Callable[[], object], timeout: float = 30.0) -> None:
    """`eventually` for a coroutine: the event loop keeps running."""
    end = time.monotonic() + timeout
    while not holds():
        assert time.monotonic() < end, f"did not come true within {timeout} s"
        await asyncio.sleep(0.001)


def has_handled(actor: ga.ActorHandle) -> None:
    """Wait until the actor has handled all earlier messages, when it refuses one that it does not know."""
    reply = actor.submit("no message of its own")
    eventually(reply.done)
    assert isinstance(reply._call.error, ga.InvalidRequest), reply


def service_threads() -> set[threading.Thread]:
    """The running threads that a context may have started: all but the main one and the workers of event loops."""
    borrowed = ("MainThread", "AnyIO worker thread", "asyncio_", "pytest_timeout")
    return {thread for thread in threading.enumerate() if not thread.name.startswith(borrowed)}


@contextmanager
def no_threads_left() -> Iterator[None]:
    """Fail if a thread that was started inside still runs 30 s after it."""
    threads = service_threads()
    yield
    end = time.monotonic() + 30.0
    while (started := service_threads() - threads) and time.monotonic() < end:
        time.sleep(0.001)
    assert not started, f"left running: {[thread.name for thread in started]}"


def run_python(program: str, *arguments: str, check: bool = True) -> subprocess.CompletedProcess:
    """Run a program in a new interpreter that can import this package."""
    command = [sys.executable, "-W", "error", "-c", textwrap.dedent(program), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200.0, cwd=REPOSITORY, check=False)
    assert not check or done.returncode == 0, done.stderr
    return done


def runs(pid: int) -> bool:
    """Whether a process runs. A zombie does not."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


class Scripted(ga.ServiceActor):
    """Handles a message by calling it as ``message(actor, call)``."""

    label = "scripted"

    def handle(self, call: ga.Call[Any]) -> None:
        call.message(self, call)


def answer(value: Any) -> Callable[[ga.ServiceActor, ga.Call[Any]], None]:
    return lambda actor, call: call.resolve(value, actor.outbox)


def raises(error: BaseException) -> Callable[[ga.ServiceActor, ga.Call[Any]], None]:
    def handle(actor: ga.ServiceActor, call: ga.Call[Any]) -> None:
        raise error

    return handle


def launch_of(work: Callable[[], Any]) -> Launch:
    """A launch that calls ``work`` on the mock stream's thread."""

    def oracle(inputs: Any) -> Outputs:
        work()
        return {}

    return Launch(key=None, inputs={}, outputs={}, oracle=oracle)


def launches(work: Callable[[], Any], value: Any = None) -> Callable[[ga.ServiceActor, ga.Call[Any]], None]:
    """Launch ``work`` and answer with ``value``."""

    def handle(actor: ga.ServiceActor, call: ga.Call[Any]) -> None:
        if call.claim():
            actor.launch((call,), launch_of(work), lambda outputs: (value,))

    return handle


@dataclass
class Gate:
    """Work that waits until the gate is opened."""

    opened: threading.Event = field(default_factory=threading.Event)
    entered: threading.Event = field(default_factory=threading.Event)

    def __call__(self) -> None:
        self.entered.set()
        assert self.opened.wait(60.0)

    def open(self) -> None:
        self.opened.set()


@contextmanager
def scripted(**options: Any) -> Iterator[tuple[ga.GpuContext, ga.ActorHandle]]:
    """A mock context with a `Scripted` actor and a short drain_timeout."""
    options.setdefault("drain_timeout", 2.0)
    with ga.open_context("mock", ga.ContextOptions(actors=(Scripted,), **options)) as ctx:
        yield ctx, ctx.actor(Scripted)


def occupied(actor: ga.ActorHandle) -> Gate:
    """Keep the actor's stream busy with one launch until the gate is opened."""
    gate = Gate()
    actor.submit(launches(gate))
    assert gate.entered.wait(30.0)
    eventually(lambda: actor.stats().in_flight == 1)
    return gate
