"""Host spans: work of a thread outside of the actors, such as tokenizing, as a trace file shows it.

with host_span("matmul", rows=256):
    y = x @ weights

While no trace file is open, a span costs one test of a tuple. A span belongs to its thread and to no context.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

__all__ = ["HostSpan", "Sink", "active", "add_sink", "guarded", "hand_out", "host_span", "remove_sink"]


logger: logging.Logger = logging.getLogger("gpu_actors.trace")


class HostSpan(NamedTuple):
    """A span that has ended.

    begin, end: ``time.monotonic_ns``.
    thread: the thread's number. 0 for work without a thread of its own, such as a client's request.
    thread_name: the thread's name when the span ended, or the kind of work without a thread.
    """

    name: str
    begin: int
    end: int
    thread: int
    thread_name: str
    fields: dict[str, Any]


Sink = Callable[[HostSpan], None]

_sinks: tuple[Sink, ...] = ()
_NOTHING: AbstractContextManager[None] = nullcontext()


def host_span(name: str, **fields: Any) -> AbstractContextManager[None]:
    """A context manager that makes a span of the calling thread, with these fields.

    Open `ChromeTrace` and `StreamedTrace` files record it. Without an open file it does nothing.
    """
    return _measured(name, fields) if _sinks else _NOTHING


def active() -> bool:
    """Whether a trace file is open."""
    return bool(_sinks)


def hand_out(span: HostSpan) -> None:
    for sink in _sinks:
        with guarded(span.name):
            sink(span)


@contextmanager
def guarded(name: str) -> Iterator[None]:
    """Log errors of a file, a sampler or a span processor, so that the measured work goes on."""
    try:
        yield
    except Exception:
        logger.exception("the span %s could not be recorded", name)


def add_sink(sink: Sink) -> None:
    """Pass each span that ends from now on to this function, on the span's thread."""
    global _sinks
    _sinks = (*_sinks, sink)


def remove_sink(sink: Sink) -> None:
    """Remove a sink that `add_sink` added. Does nothing if it is not there."""
    global _sinks
    _sinks = tuple(other for other in _sinks if other != sink)


@contextmanager
def _measured(name: str, fields: dict[str, Any]) -> Iterator[None]:
    begin = time.monotonic_ns()
    try:
        yield
    except BaseException as error:
        fields["error"] = type(error).__name__
        raise
    finally:
        end, thread = time.monotonic_ns(), threading.current_thread()
        hand_out(HostSpan(name, begin, end, thread.native_id or 0, thread.name, fields))


def _after_fork() -> None:
    # The files belong to the parent, and so do the threads that write them.
    global _sinks
    _sinks = ()


os.register_at_fork(after_in_child=_after_fork)
