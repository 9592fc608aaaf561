"""ContextActor: owns the device, the posts of its children and their supervision.

    open ──> starting ──> ready <──> degraded (a child restarts)
                            │
              failed <──────┴──> draining ──> stopped

Everything that changes the state of a child happens on this actor's thread, in the order in which the reports come.
What cannot wait for a thread, answering calls after a context loss, is done by `Services` where it is seen.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, ClassVar

import pykka

from gpu_actors.actors.base import ServiceActor
from gpu_actors.actors.post import ChildFailed, ChildReady, ChildStopped, Post
from gpu_actors.actors.services import Services
from gpu_actors.actors.supervision import Supervisor
from gpu_actors.devices.interface import Device
from gpu_actors.errors import ActorFailed, ActorStopped, ContextLost, GpuActorsError
from gpu_actors.options import ContextOptions
from gpu_actors.timers import Timers
from gpu_actors.tracing import Trace
from gpu_actors.tracing.events import Listener
from gpu_actors.tracing.otel import otel_listener

__all__ = ["ContextActor", "GiveUp", "Stop"]

logger = logging.getLogger("gpu_actors")

# Seconds that closing waits for the completion threads of launches that will not end, all together.
_PATIENCE = 2.0

# Seconds after which a launch that seems to hang is looked at again.
_GRACE = 0.5


@dataclass(frozen=True, slots=True)
class Stop:
    """Stop every child and release the device; ``done`` is set when that is over."""

    done: threading.Event


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Stop waiting for children that do not stop, and leave their threads behind."""


@dataclass(frozen=True, slots=True)
class _Run:
    """Run a function on the ContextActor's thread."""

    function: Callable[[], None]


class ContextActor(pykka.ThreadingActor):
    """Opens the device on its own thread, starts the children and looks after them.

    opened: gets the `Services` once every child is ready, or the error that kept one from it.
    """

    use_daemon_thread: ClassVar[bool] = True

    def __init__(
        self,
        open_device: Callable[[], Device],
        options: ContextOptions,
        actor_types: Sequence[type[ServiceActor]],
        opened: Future[Services],
    ) -> None:
        super().__init__()
        self._open_device = open_device
        self._options = options
        self._actor_types = actor_types
        self._opened = opened
        self._services: Services | None = None
        self._supervisor: Supervisor | None = None
        self._stop_asked: Stop | None = None
        self._released = False

    def on_start(self) -> None:
        try:
            self._start_children()
        except BaseException as error:
            self._abandon(error)

    def on_receive(self, message: Any) -> None:
        try:
            self._handle(message)
        except BaseException as error:
            # A supervisor that dies leaves its children's callers without answers: close instead.
            logger.exception("the ContextActor failed")
            self._fail(ActorFailed(f"the ContextActor failed: {error!r}"))
            self._check_stopped()

    def on_stop(self) -> None:
        # Pykka stops every actor there is when asked to, or when one of them raises SystemExit.
        if not self._released:
            self._fail(ActorFailed("the ContextActor was stopped from outside"))
            self._release()
            if not self._opened.done():
                self._opened.set_exception(ActorStopped("the context was stopped while it opened"))

    def _handle(self, message: Any) -> None:
        supervisor = self._supervisor
        assert supervisor is not None
        match message:
            case ChildReady(post, urn):
                supervisor.ready(post, urn)
                self._check_opened()
            case ChildFailed(post, urn, error):
                if self._opened.done():
                    supervisor.failed(post, urn, error)
                    self._check_stopped()
                else:
                    self._abandon(error)
            case ChildStopped(post, urn):
                supervisor.stopped(post, urn)
                self._check_stopped()
            case _Run(function):
                function()
            case Stop():
                self._begin_stop(message)
            case GiveUp():
                self._give_up()

    # Opening

    def _start_children(self) -> None:
        options = self._options
        device = self._open_device()
        spans = otel_listener()
        listeners: tuple[Listener, ...] = tuple(
            listener for listener in (options.on_event, spans) if listener is not None
        )
        services = self._services = Services(
            device=device,
            options=options,
            trace=Trace(listeners),
            timers=Timers(options.clock),
            supervise=self._post_message,
            carry_context=spans is not None,
        )
        device.bind_thread()
        device.probe()
        for actor_type in self._actor_types:
            post = Post(actor_type, services)
            if post.name in services.posts:
                raise GpuActorsError(f"two actors of one context have the label {post.name!r}")
            services.posts[post.name] = post
        self._supervisor = Supervisor(
            services.posts.values(),
            options.restart,
            options.clock,
            services.trace,
            self._after,
            self._escalate,
        )
        self._supervisor.start()
        self._watch_for_hangs()

    def _check_opened(self) -> None:
        services = self._services
        assert services is not None
        if not self._opened.done() and all(post.state == "running" for post in services.posts.values()):
            self._opened.set_result(services)

    def _abandon(self, error: BaseException) -> None:
        """Opening failed: release what was opened and report why."""
        self._release()
        if not self._opened.done():
            if not isinstance(error, GpuActorsError):
                failure = ActorFailed(f"the context could not open: {error!r}")
                failure.__cause__ = error
                error = failure
            self._opened.set_exception(error)
        self.stop()

    # Failing

    def _escalate(self, post: Post, error: BaseException) -> None:
        failure = ActorFailed(f"{post.name} failed more often than its restart policy allows, last with {error!r}")
        failure.__cause__ = error
        self._fail(failure)

    def _fail(self, error: ActorFailed) -> None:
        """The context cannot go on: every actor is stopped and every call answered. Health tells why."""
        services = self._services
        if services is None:
            return
        services.failure = error
        if self._supervisor is not None:
            # A restart that is due already must not bring an actor back.
            self._supervisor.stopping = True

        def reason() -> ActorStopped:
            stopped = ActorStopped(f"the context has failed: {error}")
            stopped.__cause__ = error
            return stopped

        self._close_posts(reason, failed=True)
        for post in services.posts.values():
            post.stop()
            post.terminate(error)

    def _watch_for_hangs(self) -> None:
        """Look again and again at the oldest launch; one that does not end in time has taken the context with it."""
        services = self._services
        assert services is not None
        limit = services.hang_timeout

        def look(suspect: float | None = None) -> None:
            oldest = services.oldest_launch()
            if oldest is None or services.clock.now() - oldest <= limit:
                services.timers.after(limit / 4, look)
            elif oldest != suspect:
                # Where this process has stood still, what ended meanwhile is settled only now.
                services.timers.after(min(limit / 4, _GRACE), lambda: look(oldest))
            else:
                services.context_lost(ContextLost(f"a launch has not finished within {limit} s"))

        services.timers.after(limit / 4, look)

    # Stopping

    def _begin_stop(self, message: Stop) -> None:
        services, supervisor = self._services, self._supervisor
        assert services is not None
        assert supervisor is not None
        self._stop_asked = message
        supervisor.stopping = True
        self._close_posts(lambda: ActorStopped("the context is closed"))
        for post in services.posts.values():
            post.stop()
            if post.ref is None:
                post.terminate(None)
        self._check_stopped()

    def _check_stopped(self) -> None:
        services = self._services
        if self._stop_asked is None or services is None:
            return
        if all(post.ref is None for post in services.posts.values()):
            self._finish_stop()

    def _give_up(self) -> None:
        assert self._services is not None
        if self._stop_asked is not None:
            stuck = [post.name for post in self._services.posts.values() if post.ref is not None]
            logger.error("actors that did not stop are left behind: %s", stuck)
            self._finish_stop()

    def _finish_stop(self) -> None:
        stop, self._stop_asked = self._stop_asked, None
        self._release()
        self.stop()
        if stop is not None:
            stop.done.set()

    def _release(self) -> None:
        self._released = True
        services = self._services
        if services is None:
            return
        if self._supervisor is not None:
            self._supervisor.stopping = True
        self._close_posts(lambda: ActorStopped("the context is closed"))
        for post in services.posts.values():
            post.stop()
            close = getattr(post.kept, "close", None)
            if close is not None:
                _close(f"what {post.name} kept", close)
        _close("the device", services.device.close)
        end = time.monotonic() + _PATIENCE
        for post in services.posts.values():
            if not post.completion.close(max(0.0, end - time.monotonic())):
                logger.error("a launch of %s never ended; its completion thread is left behind", post.name)
            post.mailbox.write_off()
            if post.ref is None:
                post.mailbox.abandon()
        services.timers.close()

    def _close_posts(self, reason: Callable[[], GpuActorsError], failed: bool = False) -> None:
        services = self._services
        assert services is not None
        posts = list(services.posts.values())
        # Why the context went down says more than that it was closed afterwards.
        if services.lost is None and (services.failure is None or failed):
            for post in posts:
                post.mailbox.close(reason)
        for post in posts:
            post.mailbox.fail_all(reason)

    # Time

    def _after(self, seconds: float, function: Callable[[], None]) -> None:
        assert self._services is not None
        self._services.timers.after(seconds, lambda: self._post_message(_Run(function)))

    def _post_message(self, message: Any) -> None:
        # Not actor_ref.tell: that asks a registry lock first, and raises once this actor has stopped.
        self.actor_inbox.put(_Message(message))  # type: ignore[arg-type]


def _close(what: str, close: Callable[[], object]) -> None:
    """Close one thing; whatever it raises, the others have to be closed too, and whoever waits for that told."""
    try:
        close()
    except BaseException:
        logger.exception("closing %s raised", what)


class _Message:
    __slots__ = ("message", "reply_to")

    def __init__(self, message: Any) -> None:
        self.message = message
        self.reply_to = None
