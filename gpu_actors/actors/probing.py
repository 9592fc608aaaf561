"""Probing: the context makes a launch itself, to find out whether launches succeed."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np

from gpu_actors.actors.flash_attn import FlashAttnActor
from gpu_actors.attention.requests import FlashForward
from gpu_actors.errors import CompileError, GpuActorsError, LaunchError, MockModeError
from gpu_actors.runtime.call import Call
from gpu_actors.runtime.children import Children
from gpu_actors.runtime.mailbox import Mailbox

__all__ = ["probe"]

_URGENT = 1 << 62


def probe(children: Children, timeout: float | None) -> Call[None]:
    """Launch attention of one row by one key ahead of waiting requests. The call resolves to None on success.

    Any thread may call it. See `GpuContext.probe`.
    """
    answer: Call[None] = Call("probe", Mailbox("probe", 1, 1))
    before = [(progress, progress.counts) for progress in children.vital_progress()]

    def judge(launched: Call[Any]) -> None:
        error = launched.error
        if isinstance(error, CompileError) and children.options.offline:
            # The probe's kernel is in no cache and may not be compiled, and that is not the device's fault. A device
            # that hangs blocks `ask_device` for as long as `hang_timeout`, so it runs on its own thread.
            threading.Thread(target=ask_device, name="gpu-actors-probe", daemon=True).start()
        elif error is None or isinstance(error, MockModeError):
            succeed()
        else:
            answer.fail(error)

    def ask_device() -> None:
        try:
            children.device.bind_thread()
            children.device.probe()
        except BaseException as error:
            answer.fail(error if isinstance(error, GpuActorsError) else LaunchError(f"the device: {error!r}"))
        else:
            succeed()

    def succeed() -> None:
        for progress, counts in before:
            progress.put_on_trial(*counts)
        answer.resolve(None)

    row = np.zeros((1, 1, 1, 64), np.float16)
    children.handle(FlashAttnActor).send(FlashForward(row, row, row), None, timeout, _URGENT).when_done(judge)
    return answer
