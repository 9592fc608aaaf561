"""open_context: opens a context.

async with gpu_actors.open_context("auto") as ctx:
    result = await ctx.flash_attn.forward(q, k, v, causal=True)
"""

from __future__ import annotations

from collections.abc import Generator
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

import anyio

from gpu_actors.catching import shielded
from gpu_actors.devices.interface import Device
from gpu_actors.devices.select import check_device, choose_device, open_device, warn_of_mock
from gpu_actors.errors import GpuActorsError, InvalidRequest
from gpu_actors.fields import one_of
from gpu_actors.options import ContextOptions
from gpu_actors.process import Local, refuse_on_loop
from gpu_actors.runtime.opening import Opening, run_in_thread
from gpu_actors.runtime.reply import need_asyncio

if TYPE_CHECKING:
    from gpu_actors.handles.gpu_context import GpuContext

__all__ = ["open_context"]


class open_context(Local):
    """Open a context: ``async with open_context(...) as ctx``, or ``with`` in a program without a loop.

    In a notebook: ``ctx = await open_context(...)``, and ``await ctx.aclose()`` at the end.

    device: "auto" (CUDA where it is usable, else mock, which warns), "cuda", "cuda:1", "emulated" or "mock".
    options: see `ContextOptions`.
    isolation: "process" runs the device and its actors in a child process, so that a lost device context, a crash or a
        hang ends only that process: requests in flight raise `ContextLost`, and a new process answers later ones. None:
        this process runs them. See docs/isolation.md.

    Leaving waits until every request is answered, at most ``drain_timeout`` seconds, then stops; requests that are
    still unanswered raise `ActorStopped`. Entering raises `InvalidRequest` for a device that does not exist,
    `GpuActorsError` for a device that cannot be used, and `AsyncioNeeded` on a loop of another library, such as trio.
    "auto" without a usable GPU issues and logs a `MockDeviceWarning`: what is missing, and how to install it.
    """

    def __init__(
        self,
        device: str = "auto",
        options: ContextOptions | None = None,
        *,
        isolation: Literal["process"] | None = None,
    ) -> None:
        if options is not None and not isinstance(options, ContextOptions):
            raise InvalidRequest("options", options, "must be ContextOptions, or None for the defaults")
        if isolation is not None:
            one_of("isolation", isolation, ("process",), 'must be "process", or None')
        self._isolated = isolation is not None
        self._device = self._spec = check_device(device)
        self._options = options if options is not None else ContextOptions()
        self._obstacle: str | None = None
        self._context: GpuContext | None = None

    async def __aenter__(self) -> GpuContext:
        need_asyncio("open_context()")
        self._check_free()
        self._context = context = await self._start(4)
        return context

    def __await__(self) -> Generator[Any, None, GpuContext]:
        need_asyncio("open_context()")
        return self._start(3).__await__()

    async def _start(self, stacklevel: int) -> GpuContext:
        """Open a context in a thread. stacklevel: the stacklevel of the program's own frame, for a warning."""
        warn_of_mock(None if self._isolated else await run_in_thread(self._choose), stacklevel)
        opening = Opening(self._open)
        with anyio.CancelScope(shield=True):
            try:
                context = await run_in_thread(opening.run)
                warn_of_mock(self._obstacle, stacklevel)
            except BaseException:
                # A context that opens after its opener was cancelled would never be closed. Any await could be
                # cancelled again, so nothing is awaited before the opening is abandoned.
                opened = opening.abandon()
                if opened is not None:
                    await shielded(run_in_thread(opened.close))
                raise
        return context

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._take().aclose()

    def __enter__(self) -> GpuContext:
        refuse_on_loop("with open_context()", "async with")
        self._check_free()
        warn_of_mock(None if self._isolated else self._choose(), 3)
        context = self._open()
        try:
            warn_of_mock(self._obstacle, 3)
        except BaseException:
            context.close()
            raise
        self._context = context
        return context

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._take()._leave()

    def make_device(self) -> Device:
        """Make the device that the context will own. Called on the ContextActor's thread. Tools may override it."""
        return open_device(self._spec, self._options)

    def _choose(self) -> str | None:
        """Decide what "auto" means now. Returns why it is not CUDA, or None."""
        self._spec, obstacle = choose_device(self._device)
        return obstacle

    def _open(self) -> GpuContext:
        try:
            # Imported here, so that `import gpu_actors` stays quick.
            if not self._isolated:
                from gpu_actors.handles.gpu_context import start_context

                return start_context(self.make_device, self._options)
            from gpu_actors.isolation.context import open_isolated

            # The child process decides what "auto" means: deciding here would start CUDA in this process.
            context, self._obstacle = open_isolated(self._device, self._options)
        except GpuActorsError:
            raise
        except RuntimeError as error:  # no thread can be started, for lack of memory or at the interpreter's exit
            raise GpuActorsError(f"the context could not open: {error}") from error
        return context

    def _check_free(self) -> None:
        if self._context is not None:
            raise GpuActorsError("this open_context() has been entered already; make one for each context")

    def _take(self) -> GpuContext:
        context, self._context = self._context, None
        if context is None:
            raise GpuActorsError("this open_context() is not entered, or has been left already")
        return context
