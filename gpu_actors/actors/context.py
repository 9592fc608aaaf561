"""ContextActor: owns the device, the cells of its children and their supervision.

    open ──> starting ──> ready <──> degraded (a child restarts, or keeps failing)
                            │
              failed <──────┴──> draining ──> stopped

The state of a child changes on this actor's thread only, in the order of the reports. One thing cannot wait for that
thread: after a context loss, `Children` answers every call on the thread that sees the loss.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from gpu_actors.actors.nvrtc import NvrtcActor
from gpu_actors.catching import hand_error_to, log_errors
from gpu_actors.devices.interface import Device
from gpu_actors.errors import ActorFailed, ActorStopped, ContextLost, GpuActorsError, caused
from gpu_actors.options import ContextOptions
from gpu_actors.planning.kernel_store import KernelStore
from gpu_actors.runtime.actor import ServiceActor
from gpu_actors.runtime.cell import ActorCell
from gpu_actors.runtime.children import Children
from gpu_actors.runtime.environment import ChildEvent
from gpu_actors.runtime.pykka_base import ThreadActor
from gpu_actors.runtime.supervision import Supervisor
from gpu_actors.runtime.timers import Timers
from gpu_actors.tracing import Trace
from gpu_actors.tracing.events import Listener
from gpu_actors.tracing.otel import otel_listener

__all__ = ["ContextActor", "Run"]

logger: logging.Logger = logging.getLogger("gpu_actors")

# Seconds that closing waits, in all, for the completion threads of launches that do not end.
_DRAIN_SECONDS = 2.0

# Seconds that closing waits for launches whose requests have been answered, before it closes the device.
_LAST_MOMENT = 0.25

# Seconds between two looks at a launch that seems to hang.
_GRACE = 0.5


@dataclass(frozen=True, slots=True)
class Run:
    """Run a function of the ContextActor on its thread. It takes no other message."""

    function: Callable[[ContextActor], None]


class ContextActor(ThreadActor):
    """Opens the device on its own thread, starts the children and looks after them.

    opened: gets the `Children` once every child is ready, or the error that kept one from it.
    """

    _supervisor: Supervisor  # set as soon as there are children

    def __init__(
        self,
        open_device: Callable[[], Device],
        options: ContextOptions,
        actor_types: Sequence[type[ServiceActor]],
        opened: Future[Children],
    ) -> None:
        super().__init__()
        self._open_device = open_device
        self._options = options
        self._actor_types = actor_types
        self._opened = opened
        self._children: Children | None = None
        self._stop_asked: threading.Event | None = None
        self._released = False

    @property
    def _cells(self) -> list[ActorCell]:
        """The cells of the children. There are none before the device is open."""
        return [] if self._children is None else list(self._children.cells.values())

    def on_start(self) -> None:
        with hand_error_to(self._abandon):
            self._start_children()

    def on_receive(self, message: Any) -> None:
        with hand_error_to(self._give_up_children):
            if isinstance(message, Run):
                message.function(self)

    def on_stop(self) -> None:
        # Pykka stops all actors of the process when asked to, or when one of them raises SystemExit.
        if not self._released:
            self._fail(ActorFailed("the ContextActor was stopped from outside"))
            self._release()
            if not self._opened.done():
                self._opened.set_exception(ActorStopped("the context was stopped while it opened"))

    def _heed(self, cell: ActorCell, urn: str, what: ChildEvent, error: BaseException | None) -> None:
        supervisor = self._supervisor
        if what == "ready":
            supervisor.ready(cell, urn)
            self._check_opened()
        elif error is not None and not self._opened.done():
            self._abandon(error)
        else:
            if error is None:
                supervisor.stopped(cell, urn)
            else:
                supervisor.failed(cell, urn, error)
            self._check_stopped()

    # Opening

    def _start_children(self) -> None:
        options = self._options
        device = self._open_device()
        spans = otel_listener()
        listeners: tuple[Listener, ...] = tuple(
            listener for listener in (options.on_event, spans) if listener is not None
        )
        children = self._children = Children(
            device=device,
            options=options,
            trace=Trace(listeners),
            timers=Timers(options.clock),
            supervise=lambda *report: self._run(lambda: self._heed(*report)),
            carry_context=spans is not None,
        )
        children.kernels = KernelStore(children)
        self._supervisor = Supervisor(
            children.cells.values(), options.restart, options.clock, children.trace, self._after, self._escalate
        )
        device.bind_thread()
        device.probe()
        for actor_type in self._actor_types:
            cell = ActorCell(actor_type, children)
            if cell.name in children.cells:
                raise GpuActorsError(f"two actors of one context have the label {cell.name!r}")
            children.cells[cell.name] = cell
            if issubclass(actor_type, NvrtcActor):
                children.compiler = cell.handle
        self._supervisor.start()
        self._watch_for_hangs()

    def _check_opened(self) -> None:
        if not self._opened.done() and all(cell.state == "running" for cell in self._cells):
            assert self._children is not None
            self._opened.set_result(self._children)

    def _abandon(self, error: BaseException) -> None:
        """Opening has failed: release what was opened, and report why."""
        self._release()
        if not self._opened.done():
            if not isinstance(error, GpuActorsError):
                error = caused(ActorFailed(f"the context could not open: {error!r}"), error)
            self._opened.set_exception(error)
        self.stop()

    # Failing

    def _escalate(self, cell: ActorCell, error: BaseException) -> None:
        reason = f"{cell.name} failed more often than its restart policy allows, last with {error!r}"
        failure = caused(ActorFailed(reason), error)
        if cell.actor_type.vital:
            self._fail(failure)
        else:
            logger.error("%s; the context goes on without it", failure)
            cell.retire(failure)

    def _give_up_children(self, error: BaseException) -> None:
        """This actor has failed: close. A supervisor that just died would leave its children's callers unanswered."""
        logger.error("the ContextActor failed", exc_info=error)
        self._fail(ActorFailed(f"the ContextActor failed: {error!r}"))
        self._check_stopped()

    def _fail(self, error: ActorFailed) -> None:
        """Fail the context: stop every actor and answer every call. Health gives the reason."""
        children = self._children
        if children is None:
            return
        children.failure = error
        # A restart that is already due must not bring an actor back.
        self._supervisor.stopping = True
        self._close_cells(lambda: caused(ActorStopped(f"the context has failed: {error}"), error), failed=True)
        for cell in self._cells:
            cell.stop()
            cell.terminate(error)

    def _watch_for_hangs(self) -> None:
        """Watch the oldest launch. If it does not end in time, the context is lost."""
        children = self._children
        assert children is not None
        limit = children.hang_timeout

        def look(suspect: float | None = None) -> None:
            oldest = children.oldest_launch()
            if oldest is None or children.clock.now() - oldest <= limit:
                children.timers.after(limit / 4, look)
            elif oldest != suspect:
                # If this process was stopped for a while, launches that ended meanwhile are settled only now.
                children.timers.after(min(limit / 4, _GRACE), lambda: look(oldest))
            else:
                children.context_lost(ContextLost(f"a launch has not finished within {limit} s"))

        children.timers.after(limit / 4, look)

    # Stopping

    def begin_stop(self, done: threading.Event) -> None:
        """Stop every child and release the device. ``done`` is set when that has finished."""
        self._stop_asked = done
        self._supervisor.stopping = True
        self._close_cells(lambda: ActorStopped("the context is closed"))
        for cell in self._cells:
            cell.stop()
            if cell.ref is None:
                cell.terminate(None)
        self._check_stopped()

    def _check_stopped(self) -> None:
        if self._stop_asked is not None and all(cell.ref is None for cell in self._cells):
            self._finish_stop()

    def give_up(self) -> None:
        """Stop waiting for children that do not stop, and leave their threads behind."""
        if self._stop_asked is not None:
            stuck = [cell.name for cell in self._cells if cell.ref is not None]
            logger.error("actors that did not stop are left behind: %s", stuck)
            self._finish_stop()

    def _finish_stop(self) -> None:
        done, self._stop_asked = self._stop_asked, None
        self._release()
        self.stop()
        if done is not None:
            done.set()

    def _release(self) -> None:
        self._released = True
        children = self._children
        if children is None:
            return
        self._supervisor.stopping = True
        self._close_cells(lambda: ActorStopped("the context is closed"))
        # Errors here are logged, because the other cells must be closed too. Pykka would answer a KeyboardInterrupt by
        # stopping the actors of every other context.
        for cell in self._cells:
            cell.stop()
            close = getattr(cell.shared, "close", None)
            if close is not None:
                with log_errors("closing what %s shared raised", cell.name):
                    close()
        # No caller waits for launches in flight, but a device that is closed before they end cannot free its memory.
        self._end_completions(_LAST_MOMENT)
        with log_errors("closing the device raised"):
            children.device.close()
        ended = self._end_completions(_DRAIN_SECONDS)
        for cell in self._cells:
            if cell not in ended:
                logger.error("a launch of %s never ended; its completion thread is left behind", cell.name)
            cell.mailbox.write_off()
            if cell.ref is None:
                cell.mailbox.abandon()
        children.timers.close()

    def _end_completions(self, seconds: float) -> set[ActorCell]:
        """End the completion threads whose launches end within ``seconds``. Returns the cells of the ended threads."""
        end = time.monotonic() + seconds
        return {cell for cell in self._cells if cell.completion.close(max(0.0, end - time.monotonic()))}

    def _close_cells(self, reason: Callable[[], GpuActorsError], failed: bool = False) -> None:
        children = self._children
        assert children is not None
        # The reason for which the context failed says more than that it was closed afterwards.
        if children.lost is None and (children.failure is None or failed):
            for cell in self._cells:
                cell.mailbox.close(reason)
        for cell in self._cells:
            cell.mailbox.fail_all(reason)

    # Time

    def _after(self, seconds: float, function: Callable[[], None]) -> None:
        assert self._children is not None
        self._children.timers.after(seconds, lambda: self._run(function))

    def _run(self, function: Callable[[], None]) -> None:
        self.post_message(Run(lambda _: function()))
