"""Runs a function at each point of another one at which the interpreter may run a finalizer or a signal handler.

The garbage collector, and on the main thread a signal handler, run between two instructions: after a call, at the start
of a function or of an iteration, and after an object is created. They may change state in the middle of an operation.
"""

from __future__ import annotations

import dis
import functools
import gc
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import Any, NamedTuple

__all__ = ["Case", "each_point"]

_BEFORE = ("CALL", "RESUME", "JUMP_BACKWARD", "BUILD_")


class Case(NamedTuple):
    """``interrupt`` is called once in the middle of ``act``; then ``check`` asserts what must hold."""

    act: Callable[[], Any]
    interrupt: Callable[[], Any]
    check: Callable[[], Any]


def each_point(files: tuple[str, ...], make: Callable[[], Case]) -> int:
    """Make a case and run it, once for each point at which it can be interrupted in files with these names.

    Returns the number of points.
    """
    point = 0
    while True:
        case = make()
        interrupter = _Interrupter(files, point, case.interrupt)
        # A collection would run finalizers of other tests' garbage in these files.
        gc.disable()
        try:
            with interrupter.watching():
                case.act()
        finally:
            gc.enable()
        if not interrupter.interrupted:
            return point
        try:
            case.check()
        except BaseException as error:
            error.add_note(f"interrupted at {interrupter.interrupted}")
            raise
        point += 1


@functools.cache
def _points(code: CodeType) -> frozenset[int]:
    """The offsets of the instructions before which other code may run."""
    points = set()
    previous = ""
    for instruction in dis.get_instructions(code):
        if any(name in previous for name in _BEFORE) and previous != "PRECALL":
            points.add(instruction.offset)
        previous = instruction.opname
    return frozenset(points)


class _Interrupter:
    def __init__(self, files: tuple[str, ...], point: int, interrupt: Callable[[], Any]) -> None:
        self._files = files
        self._points_left = point
        self._interrupt = interrupt
        self._thread = threading.get_ident()
        self.interrupted = ""

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Interrupt this thread."""
        if sys.version_info < (3, 12):
            sys.settrace(self._call)
            try:
                yield
            finally:
                sys.settrace(None)
            return
        events = sys.monitoring
        events.use_tool_id(events.DEBUGGER_ID, "interrupting")
        events.register_callback(events.DEBUGGER_ID, events.events.INSTRUCTION, self._reach)
        events.set_events(events.DEBUGGER_ID, events.events.INSTRUCTION)
        try:
            yield
        finally:
            events.set_events(events.DEBUGGER_ID, 0)
            events.free_tool_id(events.DEBUGGER_ID)

    def _call(self, frame: FrameType, event: str, argument: Any) -> Any:
        if self.interrupted or not frame.f_code.co_filename.endswith(self._files):
            return None
        frame.f_trace_opcodes = True
        frame.f_trace_lines = False
        return self._step

    def _step(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "opcode":
            self._reach(frame.f_code, frame.f_lasti)
        return self._step

    def _reach(self, code: CodeType, offset: int) -> None:
        if self.interrupted or not code.co_filename.endswith(self._files) or offset not in _points(code):
            return
        if threading.get_ident() != self._thread:
            return
        if self._points_left:
            self._points_left -= 1
            return
        lines = [line for start, stop, line in code.co_lines() if start <= offset < stop]
        self.interrupted = f"{code.co_qualname}, line {lines[0]}"
        self._interrupt()
