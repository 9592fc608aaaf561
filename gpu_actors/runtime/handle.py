"""ActorHandle: the stable reference to an actor, whichever incarnation serves it now."""

from __future__ import annotations

import dataclasses
import inspect
import signal
import sys
import threading

# signal.getsignal looks the handler up in an enum. For a function, the enum's error needs its repr and several us.
from _signal import getsignal  # type: ignore[import-not-found]
from asyncio import _get_running_loop
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

from gpu_actors.arrays.adopt import with_grad_mode
from gpu_actors.errors import GpuActorsError, InvalidRequest
from gpu_actors.process import Local
from gpu_actors.runtime.call import Call
from gpu_actors.runtime.cell import ActorCell, Terminated
from gpu_actors.runtime.mailbox import ActorStats
from gpu_actors.runtime.reply import Reply

__all__ = ["ActorHandle", "CallOptions"]

_ALARM = getattr(signal, "SIGALRM", None)
_ROOM = 300
"""Stack frames that an actor's work may need, including those of an array's own library."""

_Method = TypeVar("_Method", bound=Callable[..., Any])


class CallOptions:
    """Decorates a method that makes a message of its ``**options``. The method passes them to `check`.

    message: the message's type. An option has the default of the type's field of that name, if there is one.
    keywords: the TypedDict of the options. The method's signature then shows each option.
    """

    def __init__(self, message: type, keywords: type) -> None:
        defaults = {
            field.name: inspect.Parameter.empty if field.default is dataclasses.MISSING else field.default
            for field in dataclasses.fields(message)
        }
        self._options = [
            inspect.Parameter(
                name, inspect.Parameter.KEYWORD_ONLY, default=defaults[name], annotation=kind.__forward_arg__
            )
            for name, kind in keywords.__annotations__.items()
        ]
        self._known = frozenset(option.name for option in self._options)
        self._optional: list[inspect.Parameter] = []
        self._method = ""

    def __call__(self, method: _Method) -> _Method:
        # No wrapper: a call through one costs as much as making the message.
        signature = inspect.signature(method)
        *others, _ = signature.parameters.values()
        self._optional = [each for each in others if each.kind is each.KEYWORD_ONLY and each.default is not each.empty]
        self._method = method.__qualname__
        required = [each for each in others if each not in self._optional]
        parameters = [*required, *self._options, *self._optional]
        method.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        return method

    def check(self, given: Mapping[str, Any]) -> None:
        """Raise TypeError for an option that the method does not have. The error names the nearest one."""
        if self._known.issuperset(given):
            return
        import difflib  # only a mistake needs it

        name = next(name for name in given if name not in self._known)
        nearest = difflib.get_close_matches(name, [each.name for each in (*self._options, *self._optional)], 1)
        hint = f"; the nearest option is {nearest[0]!r}" if nearest else ""
        raise TypeError(f"{self._method}() got an unexpected keyword argument {name!r}{hint}")


def _may_work_directly() -> bool:
    """Whether the calling thread may do an actor's work. It must run a loop and have room on its stack.

    On the main thread a signal's handler may raise between any two instructions, so no such handler may be set.
    `asyncio.run` and servers replace the default handler of Ctrl-C by one that does not raise. A handler of SIGALRM
    is expected to raise.
    """
    if _get_running_loop() is None:
        return False
    try:
        sys._getframe(sys.getrecursionlimit() - _ROOM)
        return False
    except ValueError:  # the stack has fewer frames
        pass
    return threading.get_ident() != threading.main_thread().ident or not (
        getsignal(signal.SIGINT) is signal.default_int_handler or (_ALARM is not None and callable(getsignal(_ALARM)))
    )


class RecordingStats(NamedTuple):
    """Counts of the recorded launches that were made, replayed and dropped. All are 0."""

    recorded: int
    replayed: int
    dropped: int


class ActorHandle(Local):
    """Submits messages to an actor. It stays valid when the actor restarts. Safe to use from any thread and loop."""

    __slots__ = ("_cell",)

    def __init__(self, cell: ActorCell) -> None:
        self._cell = cell

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self.label}, {self.state}>"

    @property
    def label(self) -> str:
        """The actor's name in its context."""
        return self._cell.name

    @property
    def max_in_flight(self) -> int:
        """How many launches the actor may have unfinished at once."""
        return self._cell.mailbox.max_in_flight

    @property
    def state(self) -> str:
        """ "starting", "running", "restarting", "stopped" or "failed"."""
        return self._cell.state

    @property
    def restarts(self) -> int:
        """How often the supervisor has replaced the actor."""
        return self._cell.restarts

    def stats(self) -> ActorStats:
        """The actor's counts since the context opened."""
        return self._cell.mailbox.stats()

    def recording_stats(self) -> RecordingStats:
        """Deprecated: no launch is recorded, so all counts are 0 (see `ContextOptions.record_launches`)."""
        return RecordingStats(0, 0, 0)

    def submit(
        self,
        message: Any,
        *,
        deadline: float | None = None,
        timeout: float | None = None,
        priority: int = 0,
    ) -> Reply[Any]:
        """Send a message and return at once. The reply reports all errors.

        deadline: ``time.monotonic()`` seconds by which the reply must be answered, else `DeadlineExceeded`.
        timeout: the same in seconds from now. Give one of them at most.
        priority: higher goes first, equals in order. Each step lets a request overtake as many older requests as the
            mailbox holds.
        """
        return Reply(self.send(message, deadline, timeout, priority))

    def send(
        self, message: Any, deadline: float | None, timeout: float | None, priority: int, prepared: Any = None
    ) -> Call[Any]:
        """`submit` for handles and actors. Returns the call itself. prepared: see `Call`."""
        cell = self._cell
        environment = cell.environment
        mailbox = cell.mailbox
        call: Call[Any] = Call(message, mailbox, priority)
        call.prepared = prepared
        if environment.trace.active():
            environment.trace_accepted(cell.name, call)
        try:
            if environment.notes_caller:
                call.caller_notes = environment.note_caller()
            if "torch" in sys.modules:  # only torch has a grad mode
                call.caller_notes = with_grad_mode(call.caller_notes)
            if type(priority) is not int:
                raise InvalidRequest("priority", priority, "must be an int")
            # A type with ``no_deadline`` gets no default: requests with deadlines of their own wait for its answer.
            default = environment.default_timeout is not None and not getattr(type(message), "no_deadline", False)
            if deadline is not None or timeout is not None or default:
                call.deadline = environment.absolute_deadline(deadline, timeout)
                call.timer = environment.timers.at(call.deadline, call.expire)
        except GpuActorsError as error:
            mailbox.refuse(call, error.with_traceback(None))
            return call
        direct = _may_work_directly() and cell.takes_directly(message, prepared)
        mailbox.put(call, direct)
        return call

    def watch(self, callback: Callable[[Terminated], None]) -> None:
        """Call ``callback`` once when the actor has stopped or failed for good, or at once if it has already.

        Restarts do not count. The callback runs on the supervisor's thread and must be short.
        """
        self._cell.watch(callback)
