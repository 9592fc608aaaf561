"""Probing: launches of the context's own, while an actor that it cannot do without fails.

A context that is not ready is sent no requests, so it has to find out itself whether launches succeed again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from gpu_actors.actors.flash_attn import FlashAttnActor
from gpu_actors.errors import CompileError, MockModeError
from gpu_actors.requests import FlashForward
from gpu_actors.runtime.call import Call
from gpu_actors.runtime.progress import Progress

if TYPE_CHECKING:
    from gpu_actors.runtime.children import Children

__all__ = ["Probing"]

_URGENT = 1 << 62


class Probing:
    """Launches attention of one row by one key at FlashAttnActor, again and again until no vital actor fails.

    A probe that succeeds puts each failing actor on trial: it counts as failing again after one more failure.

    run: runs a function on the ContextActor's thread. after: does once so many seconds have passed on its clock.
    All but `begin` runs on that thread.
    """

    def __init__(
        self,
        children: Children,
        run: Callable[[Callable[[], None]], None],
        after: Callable[[float, Callable[[], None]], None],
    ) -> None:
        self._children = children
        self._run = run
        self._after = after
        self._interval = children.options.probe_interval
        self._waiting = False

    def begin(self) -> None:
        """Probe from now on. For any thread; does nothing while probes are under way."""
        if not self._waiting:
            self._waiting = True
            self._after(self._interval, self._probe)

    def _probe(self) -> None:
        children = self._children
        failing = children.failing()
        if not failing or not children.open:
            self._waiting = False
            return
        before = {progress: progress.completed for progress in failing}
        row = np.zeros((1, 1, 1, 64), np.float16)
        probe = children.handle(FlashAttnActor).send(FlashForward(row, row, row), None, None, _URGENT)
        probe.when_done(lambda call: self._run(lambda: self._judge(call, before)))

    def _judge(self, probe: Call[Any], before: Mapping[Progress, int]) -> None:
        if self._succeeded(probe.error):
            for progress, completed in before.items():
                progress.put_on_trial(completed)
        self._waiting = False
        if self._children.failing():
            self.begin()

    def _succeeded(self, error: BaseException | None) -> bool:
        if isinstance(error, CompileError) and self._children.options.offline:
            # No cache has to hold the probe's kernel, and without one it says nothing about the device.
            try:
                self._children.device.probe()
            except Exception:
                return False
            return True
        return error is None or isinstance(error, MockModeError)
