"""An actor for the process of a worker, which notes the steps of a move there and injects a fault at one of them.

A step is a function of the protocol and its number of calls since the trap was set, as "CacheTables.free 2". The
protocol is every function of the modules that export and import pages, and the way of a request for the cache into the
worker and of its answer out of it. New functions of these modules become steps without a change here.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections import Counter
from collections.abc import Callable
from types import FunctionType
from typing import Any

from fakes.fault_injector import FAULTS
from inside.actors import kv_moving
from inside.isolation import PipeChannel
from inside.kv import CacheTables, transfer

from gpu_actors import Call, ServiceActor
from gpu_actors.remote import ContextWorker

__all__ = ["MoveSteps"]

# Functions that change nothing are no steps.
_LOOKS = ("stats", "look", "find", "enter", "leave")


class MoveSteps(ServiceActor):
    """Takes ("note",), ("noted",), and ("trap", step, way), where way is one of `FAULTS`."""

    label = "move_steps"

    def handle(self, call: Call[Any]) -> None:
        kind, *arguments = call.message
        if kind == "note":
            _STEPS.begin(None, None)
        elif kind == "trap":
            step, way = arguments
            _STEPS.begin(step, FAULTS[way])
        call.resolve(list(_STEPS.noted), self.outbox)


class _Steps:
    def __init__(self) -> None:
        self.noted: list[str] = []
        self._counts: Counter[str] = Counter()
        self._numbers: set[int] = set()
        self._step: str | None = None
        self._harm: Callable[[], object] | None = None
        self._installed = False

    def begin(self, step: str | None, harm: Callable[[], object] | None) -> None:
        if not self._installed:
            self._install()
            self._installed = True
        self._step, self._harm = step, harm
        self.noted = []
        self._counts.clear()
        self._numbers.clear()

    def reached(self, name: str) -> bool:
        """Note a step. Returns whether the fault is set for it."""
        self._counts[name] += 1
        step = f"{name} {self._counts[name]}"
        self.noted.append(step)
        return step == self._step

    def do_harm(self) -> None:
        assert self._harm is not None
        self._harm()

    def _install(self) -> None:
        for owner in (kv_moving.Moving, CacheTables):
            for name, function in list(vars(owner).items()):
                inner = name.startswith("__" if owner is kv_moving.Moving else "_")
                if inspect.isfunction(function) and name not in _LOOKS and not inner:
                    setattr(owner, name, self._noting(function, f"{owner.__name__}.{name}"))
        for module in (kv_moving, transfer):
            for function in list(vars(module).values()):
                if inspect.isfunction(function) and function.__module__ == module.__name__:
                    _replace(function, self._noting(function, function.__name__))
        asked, done, post = ContextWorker._on_request, ContextWorker._on_call_done, PipeChannel.post

        def noting_asked(worker: ContextWorker, ask: Any) -> None:
            if ask.actor == "kv_cache":
                self._numbers.add(ask.number)
                if self.reached(f"{type(ask.message).__name__} asked"):
                    self.do_harm()
            asked(worker, ask)

        def noting_done(worker: ContextWorker, number: int, cell: Any, call: Call[Any]) -> None:
            if number in self._numbers and self.reached(f"{type(call.message).__name__} done"):
                self.do_harm()
            done(worker, number, cell, call)

        def noting_post(channel: PipeChannel, sequence: int, parcel: Any) -> None:
            if parcel.about not in self._numbers:
                post(channel, sequence, parcel)
                return
            if self.reached("answer packed"):
                self.do_harm()
            if self.reached("answer half sent"):
                send = channel._send

                def half(frame: Any) -> int:
                    count = send(frame[: len(frame) // 2])
                    self.do_harm()
                    return count

                channel._send = half  # type: ignore[method-assign]
            post(channel, sequence, parcel)
            if self.reached("answer sent"):
                self.do_harm()

        ContextWorker._on_request = noting_asked  # type: ignore[method-assign]
        ContextWorker._on_call_done = noting_done  # type: ignore[method-assign]
        PipeChannel.post = noting_post  # type: ignore[method-assign]

    def _noting(self, function: FunctionType, name: str) -> Any:
        @functools.wraps(function)
        def noted(*arguments: Any, **named: Any) -> Any:
            if self.reached(name):
                self.do_harm()
            return function(*arguments, **named)

        return noted


def _replace(function: FunctionType, other: Any) -> None:
    """Replace a function in every module of the package that has it."""
    for name, module in list(sys.modules.items()):
        if name.startswith("gpu_actors"):
            for each, value in list(vars(module).items()):
                if value is function:
                    setattr(module, each, other)


_STEPS = _Steps()
