"""The state of one process: its incarnation, folders, event loop and signals, and objects that cannot leave it."""

from __future__ import annotations

import asyncio
import atexit
import functools
import os
import shutil
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from gpu_actors.errors import NotCopyable, WouldBlock

__all__ = ["SERVICE_SIGNALS", "Local", "handling", "incarnation", "process_folder", "refuse_on_loop"]

SERVICE_SIGNALS = (
    signal.SIGHUP,
    signal.SIGINT,
    signal.SIGQUIT,
    signal.SIGTERM,
    signal.SIGUSR1,
    signal.SIGUSR2,
)
"""Signals that end a process by default. A terminal, supervisor or batch system may send them to a whole service."""

_incarnation = os.urandom(8)


def incarnation() -> bytes:
    """8 random bytes that differ in every process, also in a forked child.

    Numbers of caches, sequences and generations begin at 1 in every process, so a record of such a number also has the
    incarnation.
    """
    return _incarnation


def _renew() -> None:
    global _incarnation
    _incarnation = os.urandom(8)


os.register_at_fork(after_in_child=_renew)


@functools.cache
def process_folder(purpose: str) -> Path:
    """A folder that only this user can enter. It is removed when the process that made it ends."""
    folder = Path(tempfile.mkdtemp(prefix=f"gpu-actors-{purpose}-"))
    owner = os.getpid()

    def remove() -> None:
        if os.getpid() == owner:  # a forked child must not remove its parent's folder
            shutil.rmtree(folder, ignore_errors=True)

    atexit.register(remove)
    return folder


def refuse_on_loop(call: str, instead: str) -> None:
    """Raise `WouldBlock` on the thread of a running event loop. call: the refused call. instead: its replacement."""
    if asyncio._get_running_loop() is not None:
        raise WouldBlock(f"{call} would block the running event loop; use {instead}")


@contextmanager
def handling(number: int, handler: Callable[[int, FrameType | None], object]) -> Iterator[None]:
    """Handle a signal within the block, on the main thread and unless the signal is ignored or has its default.

    Leaving the block restores the earlier handler, unless another one has been set meanwhile.
    """
    previous = signal.getsignal(number)
    if not callable(previous) or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(number, handler)
    try:
        yield
    finally:
        if signal.getsignal(number) is handler:
            signal.signal(number, previous)


class Local:
    """Base of objects that own threads, memory or a device of this process; copies and pickles raise `NotCopyable`."""

    __slots__ = ()

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise NotCopyable(
            f"a {type(self).__name__} belongs to the process that made it and cannot be pickled or copied; "
            "share the object itself between threads and loops, and send requests and results between processes"
        )

    def __copy__(self) -> NoReturn:
        self.__reduce_ex__(0)

    def __deepcopy__(self, memo: Any) -> NoReturn:
        self.__reduce_ex__(0)
