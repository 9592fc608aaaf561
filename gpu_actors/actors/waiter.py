"""Waiter: what a task suspends on while its request is under way, and that lets it go on without a detour.

A task that awaits an asyncio future goes to the end of its loop's queue once that is set, and a task that waits alone
then costs the loop another turn, with another look at its selector. This one is future-like in asyncio's sense
(`asyncio.isfuture`): a task adds its next step to it as to any future, and `wake` takes that step then and there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextvars import Context
from typing import Any

__all__ = ["Waiter"]

Step = Callable[["Waiter"], object]


class Waiter:
    """Awaited by one task, once: ``yield waiter``. All but ``loop`` is for the loop's own thread."""

    __slots__ = ("_asyncio_future_blocking", "_context", "_error", "_over", "_step", "loop")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        # By this a task tells that it is given something to wait for.
        self._asyncio_future_blocking = True
        self.loop = loop
        self._over = False
        self._error: asyncio.CancelledError | None = None
        self._step: Step | None = None
        self._context: Context | None = None

    def wake(self) -> None:
        """Let the task go on. Raises what a task may end its loop with."""
        step = self._end()
        if step is not None and self._context is not None:
            self._context.run(step, self)

    # What a task asks of a future

    def get_loop(self) -> asyncio.AbstractEventLoop:
        return self.loop

    def add_done_callback(self, step: Step, *, context: Context) -> None:
        """Take the step that follows. The task adds it before the loop goes on to anything else."""
        self._step, self._context = step, context

    def cancel(self, msg: Any | None = None) -> bool:
        """Have the wait raise ``CancelledError``. False if it is over."""
        if self._over:
            return False
        self._error = asyncio.CancelledError() if msg is None else asyncio.CancelledError(msg)
        step = self._end()
        if step is not None:
            self.loop.call_soon(step, self, context=self._context)
        return True

    def result(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            try:
                raise error
            finally:
                del error  # its traceback holds this frame: see Call.answer

    def _end(self) -> Step | None:
        # Let go of: the task that it belongs to may end with an error whose traceback leads back here.
        step, self._step = self._step, None
        self._over = True
        return step
