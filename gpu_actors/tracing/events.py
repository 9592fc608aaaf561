"""Trace events and their listeners. docs/tracing.md lists the events and says where they go.

Without a listener an event costs one test.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

__all__ = ["LEVELS", "Listener", "Trace", "TraceEvent"]

logger: logging.Logger = logging.getLogger("gpu_actors.trace")

LEVELS = {
    "actor.restarted": logging.WARNING,
    "actor.failed": logging.ERROR,
    "cache.corrupt": logging.WARNING,
    "context.lost": logging.ERROR,
    "kernel.quarantined": logging.ERROR,
}
"""The log levels of events whose level is not DEBUG."""


class TraceEvent(NamedTuple):
    """One event. docs/tracing.md has the names and their fields.

    time: ``time.monotonic_ns``.
    thread: the name of the thread on which it happened.
    """

    name: str
    time: int
    thread: str
    fields: Mapping[str, Any]


Listener = Callable[[TraceEvent], None]


class Trace:
    """The trace of one context: passes events to its listeners.

    active: ``trace.active()`` is True if a listener would see a request's events. Check it before building an event.
    """

    def __init__(self, listeners: tuple[Listener, ...] = ()) -> None:
        self._watchers: tuple[Listener, ...] = ()
        self._hand_to(listeners)

    def after_fork(self) -> None:
        """Drop the listeners in a forked child: they may hold a lock of a thread that does not exist there."""
        self._watchers = ()
        self._hand_to(())

    def watch(self, watcher: Listener) -> Callable[[], None]:
        """Pass the watcher each event that does not belong to a request, so that requests cost no more.

        Returns a function that removes the watcher.
        """
        self._watchers = (*self._watchers, watcher)

        def end() -> None:
            self._watchers = tuple(other for other in self._watchers if other is not watcher)

        return end

    def _hand_to(self, listeners: tuple[Listener, ...]) -> None:
        self._listeners = listeners
        # Not a method, so that a request without a trace asks only the logger, whose level may change at any time.
        self.active: Callable[[], bool] = functools.partial(logger.isEnabledFor, logging.DEBUG)
        if listeners:
            self.active = lambda: True

    def emit(self, name: str, **fields: Any) -> None:
        """Pass one event to the log and the listeners. An error of a listener is logged, and the request goes on."""
        level = LEVELS.get(name, logging.DEBUG)
        if logger.isEnabledFor(level):
            attributes = {"event": name, "fields": fields}
            _guarded(name, functools.partial(log_record, logger, level, "%s %s", (name, fields), attributes))
        listeners = self._listeners
        if self._watchers and not name.startswith("request."):
            listeners += self._watchers
        if not listeners:
            return
        event = TraceEvent(name, time.monotonic_ns(), threading.current_thread().name, fields)
        for listener in listeners:
            _guarded(name, functools.partial(listener, event))


def log_record(
    log: logging.Logger, level: int, text: str, values: tuple[object, ...], attributes: Mapping[str, object]
) -> None:
    """Log ``text % values`` in a record that has these attributes.

    ``extra`` would raise KeyError if a record factory of the program has set one of them already.
    """
    path, line, function, _ = log.findCaller(stacklevel=2)
    record = log.makeRecord(log.name, level, path, line, text, values, None, function)
    vars(record).update(attributes)
    log.handle(record)


def _guarded(name: str, hand_out: Callable[[], None]) -> None:
    """Call ``hand_out`` and log its exceptions, since this thread must go on to deliver answers."""
    try:
        hand_out()
    except BaseException as error:
        if not isinstance(error, Exception) and threading.current_thread() is threading.main_thread():
            raise  # a signal for the program that arrived meanwhile
        with contextlib.suppress(Exception):
            logger.exception("a trace listener raised on %s", name)
