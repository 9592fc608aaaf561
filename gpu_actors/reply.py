"""Reply: the answer to a request, awaitable from any asyncio loop and readable from any thread."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Generator
from typing import Generic, TypeVar

from gpu_actors.actors.call import DONE, Call
from gpu_actors.actors.waiter import Waiter
from gpu_actors.errors import WouldBlock
from gpu_actors.validation.fields import real

__all__ = ["Reply", "refuse_on_loop"]

T = TypeVar("T")

_AT_ONCE = 16


class _Turns(threading.local):
    """at_once: replies in a row that this thread's tasks found answered, so that none of them suspended."""

    at_once = 0


_turns = _Turns()


class Reply(Generic[T]):
    """What every request returns at once.

    ``await reply`` gives the result or raises the request's error (see `gpu_actors.errors`). It may be awaited more
    than once, from several tasks, loops and threads. A waiter that is cancelled cancels the request if nobody else
    waits for it and it has not been launched. A task that finds one reply after the other answered lets its loop's
    other tasks run after every 16th.
    """

    __slots__ = ("_call",)

    def __init__(self, call: Call[T]) -> None:
        self._call = call

    def __await__(self) -> Generator[Waiter | None, None, T]:
        call = self._call
        if call.state is DONE:
            _turns.at_once += 1
            if _turns.at_once >= _AT_ONCE:
                _turns.at_once = 0
                yield None
        else:
            waiter = Waiter(asyncio.get_running_loop())
            if call.add_waiter(waiter):
                try:
                    yield waiter
                except BaseException:
                    call.abandon(waiter)
                    raise
        try:
            return call.answer()
        finally:
            del call, self  # see Call.answer

    def result(self, timeout: float | None = None) -> T:
        """Block this thread for the result, at most ``timeout`` seconds.

        Raises the request's error, ``TimeoutError`` when ``timeout`` passes first (the request goes on),
        `WouldBlock` when called on the thread of a running event loop before the reply is done, and `InvalidRequest`
        for a ``timeout`` that is no time.
        """
        call = self._call
        if not call.done:
            if asyncio._get_running_loop() is not None:
                raise WouldBlock("result() would block the running event loop; await the reply instead")
            if not call.wait(_limit(timeout)):
                raise TimeoutError(f"no answer within {timeout} s; the request goes on")
        try:
            return call.answer()
        finally:
            del call, self  # see Call.answer

    def done(self) -> bool:
        """True once there is an answer, a result or an error."""
        return self._call.done

    def cancel(self) -> bool:
        """Cancel the request if it has not been launched. True if it now answers `RequestCancelled`."""
        return self._call.cancel()

    def __repr__(self) -> str:
        call = self._call
        return f"<Reply #{call.number} {call.state.name.lower()} of {type(call.message).__name__}>"


def refuse_on_loop(call: str, instead: str) -> None:
    """Raise `WouldBlock` on the thread of a running event loop. call, instead: what was done there, and what to do."""
    if asyncio._get_running_loop() is not None:
        raise WouldBlock(f"{call} would block the running event loop; use {instead}")


def _limit(timeout: float | None) -> float | None:
    """``timeout`` as a thread can be asked to wait for it."""
    if timeout is None or timeout == math.inf:
        return None
    return min(real("timeout", timeout, "a number of seconds, or None"), threading.TIMEOUT_MAX)
