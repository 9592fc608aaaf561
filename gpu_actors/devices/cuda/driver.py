"""Driver: the driver's calls, as all parts of a `CudaDevice` make them, and whether the device is lost or closed."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from gpu_actors.devices.cuda.api import CudaApi
from gpu_actors.devices.cuda.errors import CudaFailure, explain
from gpu_actors.errors import ActorStopped, ContextLost, GpuActorsError

__all__ = ["Driver"]

logger: logging.Logger = logging.getLogger("gpu_actors")

P = ParamSpec("P")
R = TypeVar("R")


class Driver:
    """The calls of one device, and what their failures mean.

    lost: why the device answers no more, or None. closed: `CudaDevice.close` was called. abandoned: it was closed while
    it worked, so nothing of it is released.
    """

    def __init__(self, api: CudaApi, index: int) -> None:
        self.api = api
        self.index = index
        self.lost: str | None = None
        self.closed = False
        self.abandoned = False
        self._threads = threading.local()

    @property
    def may_release(self) -> bool:
        """False where freeing something could block, or hand memory that is in use to another launch."""
        return not (self.abandoned or self.lost)

    def enter(self) -> None:
        """Begin a call on this thread. Raises ContextLost and ActorStopped."""
        if self.lost is not None:
            raise ContextLost(self.lost)
        if self.closed:
            raise ActorStopped(f"cuda:{self.index} is closed")
        if not getattr(self._threads, "bound", False):
            self.call(self.api.bind)
            self._threads.bound = True

    def call(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Call, and turn a CudaFailure into the error that requests are answered with."""
        try:
            return function(*args, **kwargs)
        except CudaFailure as failure:
            raise self.failed(failure) from failure

    def failed(self, failure: CudaFailure) -> GpuActorsError:
        """What to raise for a failure. A sticky one is the end of the device."""
        error = explain(failure)
        if isinstance(error, ContextLost):
            self.lose(str(error))
        return error

    def lose(self, why: str) -> None:
        if self.lost is None:
            logger.error("cuda:%d: %s", self.index, why)
            self.lost = why

    def destroy_event(self, event: int) -> None:
        if self.may_release:
            self.call(self.api.destroy_event, event)
