"""Driver: the driver's calls for all parts of a `CudaDevice`, and whether the device is lost or closed."""

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
    """The calls of one device, and the meaning of their failures.

    name: the device's name in messages.
    lost: why the device is lost, or None.
    closed: `CudaDevice.close` was called.
    abandoned: the device was closed while it was working or lost, so nothing of it is released.
    """

    def __init__(self, api: CudaApi, index: int) -> None:
        self.api = api
        self.index = index
        self.name: str = f"cuda:{index}" if api.emulation is None else "the emulated device"
        self.lost: str | None = None
        self.closed = False
        self.abandoned = False
        self._threads = threading.local()

    @property
    def may_release(self) -> bool:
        """Whether memory may be freed. False if that could block, or give memory in use to another launch."""
        return not (self.abandoned or self.lost)

    def enter(self) -> None:
        """Prepare this thread for calls. Raises ContextLost if the device is lost, ActorStopped if it is closed."""
        if self.lost is not None:
            raise ContextLost(self.lost)
        if self.closed:
            raise ActorStopped(f"{self.name} is closed")
        if not getattr(self._threads, "bound", False):
            self.call(self.api.bind)
            self._threads.bound = True

    def call(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Call ``function``. Raises the error for requests in place of a CudaFailure."""
        try:
            return function(*args, **kwargs)
        except CudaFailure as failure:
            raise self.failed(failure) from failure

    def failed(self, failure: CudaFailure) -> GpuActorsError:
        """Return the error to raise for a failure. A sticky failure makes the device lost."""
        error = explain(failure)
        if isinstance(error, ContextLost):
            self.lose(str(error))
        return error

    def lose(self, why: str) -> None:
        if self.lost is None:
            logger.error("%s: %s", self.name, why)
            self.lost = why

    def destroy_event(self, event: int) -> None:
        if self.may_release:
            self.call(self.api.destroy_event, event)
