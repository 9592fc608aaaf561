"""Catching: helpers that handle every error, one for each purpose.

``except Exception`` does not catch three errors that may arrive anywhere: KeyboardInterrupt, which Ctrl-C raises on the
main thread, asyncio's CancelledError, which an await raises, and SystemExit. An open resource would then leak, and a
caller would wait for its answer for ever. So these helpers catch BaseException.

    with undo_on_error(os.close, fd): ...            calls the function, and raises the error again
    async with undo_on_error(self.aclose): ...       the same with a coroutine, which no later cancellation interrupts
    with hand_error_to(future.set_exception): ...    passes the error to the function, and goes on after the block
    with log_errors("closing %s raised", name): ...  logs the error, and goes on after the block

Code that every request runs has a plain ``try`` instead, because entering a context manager takes longer than its few
lines. So has code whose reaction depends on the error.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

__all__ = ["hand_error_to", "log_errors", "shielded", "undo_on_error"]

logger: logging.Logger = logging.getLogger("gpu_actors")


class undo_on_error:
    """Call a function if the block raises anything, and raise the error again.

    With ``async with`` the function returns a coroutine, which runs to its end even if the task is cancelled again.
    """

    def __init__(self, undo: Callable[..., Any], *arguments: Any) -> None:
        self._undo = undo
        self._arguments = arguments

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is not None:
            self._undo(*self._arguments)

    async def __aenter__(self) -> None:
        pass

    async def __aexit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is not None:
            await shielded(self._undo(*self._arguments))


class hand_error_to:
    """Pass any error of the block to a function, and go on after the block."""

    def __init__(self, receive: Callable[[BaseException], Any]) -> None:
        self._receive = receive

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> bool:
        if error is not None:
            self._receive(error)
        return error is not None


def log_errors(message: str, *values: object) -> hand_error_to:
    """Log any error of the block, with a message and its values as in logging, and go on after the block."""
    return hand_error_to(lambda error: logger.error(message, *values, exc_info=error))


async def shielded(work: Coroutine[Any, Any, object]) -> None:
    """Run ``work`` to its end, even if the task that waits for it is cancelled."""
    await asyncio.shield(asyncio.create_task(work))
