"""Reply: the answer to a request, awaitable from any asyncio loop and readable from any thread."""

from __future__ import annotations

import asyncio
import logging
import math
import threading
from collections.abc import Callable, Generator
from contextvars import Context, copy_context
from dataclasses import dataclass
from typing import Any, Generic, Self, TypeVar

from gpu_actors.errors import AsyncioNeeded, RequestCancelled, WouldBlock
from gpu_actors.fields import real
from gpu_actors.process import Local
from gpu_actors.runtime.call import DONE, Call
from gpu_actors.runtime.waking import Waiter

__all__ = ["Reply", "need_asyncio"]

logger: logging.Logger = logging.getLogger("gpu_actors")

T = TypeVar("T")

_AT_ONCE = 16


class _Turns(threading.local):
    """at_once: how many replies in a row were already done when this thread's tasks awaited them: no task suspended."""

    at_once = 0


_turns = _Turns()


class Reply(Local, Generic[T]):
    """The reply that every request returns at once.

    ``await reply`` returns the result or raises the request's error (see `gpu_actors.errors`). It may be awaited more
    than once, from several tasks, loops and threads. A waiter that is cancelled cancels the request if no other
    waiter is left and the request has not been launched. A task that awaits many replies that are done lets its loop's
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
            try:
                waiter = Waiter(asyncio.get_running_loop())
            except RuntimeError:
                raise _asyncio_needed("awaiting a reply") from None
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
        """Block this thread until the result is there, at most ``timeout`` seconds, and return it.

        Raises the request's error, ``TimeoutError`` when ``timeout`` passes first (the request goes on),
        `WouldBlock` when called on the thread of a running event loop before the reply is done, and `InvalidRequest`
        for a ``timeout`` that is not a number of seconds.
        """
        call = self._call
        if not call.done:
            if asyncio._get_running_loop() is not None:
                raise WouldBlock("result() would block the running event loop; await the reply instead")
            limit = None
            if timeout is not None and timeout != math.inf:
                limit = min(real("timeout", timeout, "a number of seconds, or None"), threading.TIMEOUT_MAX)
            if not call.wait(limit):
                raise TimeoutError(f"no answer within {timeout} s; the request goes on")
        try:
            return call.answer()
        finally:
            del call, self  # see Call.answer

    def done(self) -> bool:
        """Whether the request has been answered, with a result or an error."""
        return self._call.done

    def cancel(self) -> bool:
        """Cancel the request if it has not been launched. True if it is answered with `RequestCancelled` now."""
        return self._call.cancel()

    def cancelled(self) -> bool:
        """Whether the request was answered with `RequestCancelled`."""
        return isinstance(self._call.error, RequestCancelled)

    def exception(self) -> BaseException | None:
        """The error of a reply that is done, None for a result. Raises `WouldBlock` before it is done."""
        if not self._call.done:
            raise WouldBlock("the reply is not done; await it, or ask done() first")
        return self._call.error

    # For asyncio

    async def wait(self) -> T:
        """``await reply`` as a coroutine, for functions that need a coroutine: ``create_task(reply.wait())``."""
        return await self

    def add_done_callback(self, function: Callable[[Self], object], *, context: Context | None = None) -> None:
        """Call ``function(reply)`` once when the reply is done, or soon if it is done already.

        If it is added on the thread of a running event loop, it is called there, in ``context``, as asyncio calls the
        callback of a future. Otherwise it is called on the thread that answers the request, or on this one if the
        reply is done. It must then be short, and its exceptions are logged.
        """
        context = copy_context() if context is None else context
        self._call.when_done(DoneCallback(self, function, asyncio._get_running_loop(), context))

    def remove_done_callback(self, function: Callable[[Self], object]) -> int:
        """Remove a callback that has not been called. Returns the number of callbacks removed."""
        return self._call.forget_callbacks(lambda added: isinstance(added, DoneCallback) and added.function == function)

    def __repr__(self) -> str:
        call = self._call
        # asyncio shows this text if it gets a reply in place of a coroutine.
        hint = "" if call.done else ": await it, or make a task with create_task(reply.wait())"
        return f"<Reply #{call.number} {call.state.name.lower()} of {type(call.message).__name__}{hint}>"


@dataclass(slots=True, eq=False)
class DoneCallback:
    """A callback of `Reply.add_done_callback`. Calling it twice calls the function once."""

    reply: Reply[Any]
    function: Callable[[Any], object]
    loop: asyncio.AbstractEventLoop | None
    context: Context
    _began: bool = False

    def __call__(self, call: Call[Any]) -> None:
        if self.loop is None:
            try:
                self.context.run(self._run)
            except Exception:
                logger.exception("a callback of a reply raised")
            return
        try:
            self.loop.call_soon_threadsafe(self._run, context=self.context)
        except RuntimeError:
            return  # the loop was closed meanwhile

    def _run(self) -> None:
        if not self._began:
            self._began = True
            self.function(self.reply)


def need_asyncio(call: str) -> None:
    """Raise `AsyncioNeeded` if no asyncio event loop runs. call: the name of the call that needs one."""
    if asyncio._get_running_loop() is None:
        raise _asyncio_needed(call)


def _asyncio_needed(call: str) -> AsyncioNeeded:
    reason = "needs a running asyncio event loop (asyncio, uvloop, or anyio on asyncio); trio's cannot wait for it"
    return AsyncioNeeded(f"{call} {reason}. A plain thread can use `with` and reply.result()")
