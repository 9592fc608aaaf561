"""ServiceActor: a Pykka actor that answers calls from a mailbox that outlives it.

The mailbox, the stream and the completion thread belong to the actor's `Post`, which the ContextActor keeps; the
actor itself is one incarnation that may raise, die and be replaced. Subclass it to add an actor of your own and name
the class in ``ContextOptions(actors=...)``.
"""

from __future__ import annotations

import traceback
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, cast

import pykka

from gpu_actors.actors.call import DONE, Call
from gpu_actors.actors.completion import Failed, Finish
from gpu_actors.actors.handle import ActorHandle
from gpu_actors.actors.outbox import Outbox
from gpu_actors.devices.interface import Launch
from gpu_actors.errors import ActorFailed, ContextLost, GpuActorsError, InvalidRequest

if TYPE_CHECKING:
    from pykka._actor import ActorInbox
    from pykka._future import Future

    from gpu_actors.actors.mailbox import Mailbox
    from gpu_actors.actors.post import Post

__all__ = ["ServiceActor"]


class ServiceActor(pykka.ThreadingActor):
    """Base of every child of a ContextActor.

    label: the actor's name, unique in a context. handle_type: what ``ctx.actor(TheClass)`` gives out.

    A `GpuActorsError` raised by `handle` answers that call. Any other exception is a defect: it answers the call with
    `ActorFailed`, and the supervisor replaces the actor; calls behind it are not lost.
    """

    use_daemon_thread: ClassVar[bool] = True
    label: ClassVar[str] = ""
    handle_type: ClassVar[type[ActorHandle]] = ActorHandle

    def __init__(self, post: Post) -> None:
        self.post = post
        self.outbox = Outbox()
        super().__init__()

    # For subclasses

    @classmethod
    def keep(cls, post: Post) -> Any:
        """Make what every incarnation shares, found as ``self.post.kept``. Has a ``close()`` if it needs one."""
        return None

    def open(self) -> None:
        """Prepare on the actor's own thread. The actor is ready once this returns."""

    def handle(self, call: Call[Any]) -> None:
        """Answer a call, launch it, or keep it to be answered later. Must not block.

        An actor that has no such method of its own refuses every call.
        """
        reason = f"{type(self).__name__} takes no requests: it has no handle() of its own"
        raise InvalidRequest("message", type(call.message).__name__, reason)

    def flush(self) -> None:
        """Launch what `handle` has gathered. Called after every batch of calls, before the actor looks for more."""

    def on_message(self, message: Any) -> Any:
        """Handle a message that was sent with ``actor_ref.tell`` or ``.ask`` rather than submitted as a call."""

    def launch(self, calls: Sequence[Call[Any]], launch: Launch, finish: Finish, failed: Failed | None = None) -> None:
        """Enqueue a launch that answers ``calls``; those answered already (cancelled, expired) are the caller's care.

        Each call must have been claimed with ``begin_launch``. failed: called once if the launch fails, now or later.
        Raises what ``Stream.launch`` raises, which then has answered the calls.
        """
        post = self.post
        try:
            event = post.stream.launch(launch)
        except BaseException as error:
            self.answer_failure(calls, failed(error) if failed is not None else (), error)
            raise
        for call in calls:
            if call.traced:
                post.services.trace.emit("request.launched", actor=post.name, request=call.number, key=launch.key)
        post.completion.watch(event, calls, finish, self.outbox, failed)

    def answer_failure(self, calls: Sequence[Call[Any]], again: Collection[Call[Any]], error: BaseException) -> None:
        """Answer claimed calls whose launch could not be made, but for those that are to be launched again."""
        for call in again:
            self.post.completion.relaunch(call)
        # All others: the actor's loop knows only the call that it gave out last.
        self._refuse([call for call in calls if call not in again], error)

    # Pykka's side

    def _create_actor_inbox(self) -> ActorInbox:  # type: ignore[override]
        self._controls: deque[_Envelope] = deque()
        return cast("ActorInbox", _Inbox(self.post.mailbox, self._controls, self._work))

    def on_start(self) -> None:
        # Pykka tells nobody when on_start raises, so readiness and failure are reported from here.
        try:
            self.post.services.device.bind_thread()
            self.open()
        except BaseException as error:
            self.post.report_failure(self, error)
            raise_exception(self.post.name, error)
        self.post.report_ready(self)

    def on_failure(self, exception_type: Any, exception_value: Any, exception_traceback: Any) -> None:
        self.post.report_failure(self, exception_value)

    def on_stop(self) -> None:
        self.post.report_stopped(self)

    def on_receive(self, message: Any) -> Any:
        if type(message) is _Crash:
            raise message.error
        try:
            return self.on_message(message)
        except BaseException as error:
            raise_exception(self.post.name, error)
        finally:
            self.outbox.flush()

    def _work(self, calls: list[Call[Any]]) -> None:
        post = self.post
        mailbox, outbox = post.mailbox, self.outbox
        post.busy_since = post.services.clock.now()
        try:
            for index, call in enumerate(calls):
                if mailbox.saturated or self._controls:
                    mailbox.give_back(calls[index:])
                    break
                if call.state is DONE:
                    continue
                try:
                    self.handle(call)
                except GpuActorsError as error:
                    self._refuse((call,), error)
                except BaseException as error:
                    self._refuse((call,), error)
                    mailbox.give_back(calls[index + 1 :])
                    raise_exception(post.name, error)
            try:
                self.flush()
            except BaseException as error:
                raise_exception(post.name, error)
        finally:
            post.busy_since = None
            outbox.flush()
            # Pykka's loop keeps its last message while it waits for the next, and the error of a crash its frames:
            # neither must keep requests, with their arrays, alive.
            calls.clear()
            del call

    def _refuse(self, calls: Iterable[Call[Any]], error: BaseException) -> None:
        """Answer calls with what was raised while they were worked on."""
        failure: GpuActorsError
        if isinstance(error, ContextLost):
            failure = self.post.report_lost(error.with_traceback(None))
        elif isinstance(error, GpuActorsError):
            failure = error.with_traceback(None)
        else:
            traceback.clear_frames(error.__traceback__)
            failure = ActorFailed(f"{self.post.name} failed while it handled the request: {error!r}")
            failure.__cause__ = error
        for call in calls:
            call.fail(failure, self.outbox)


def raise_exception(name: str, error: BaseException) -> NoReturn:
    """Raise ``error``, or a stand-in where it is no Exception: Pykka answers those by stopping every actor there is."""
    if isinstance(error, Exception):
        raise error
    raise RuntimeError(f"{name} raised {error!r}") from error


class _Crash:
    """Takes what ended a batch of calls to where Pykka reports failures."""

    __slots__ = ("error",)

    def __init__(self, error: BaseException) -> None:
        self.error = error


class _Envelope:
    """What Pykka's loop expects an inbox to give it."""

    __slots__ = ("message", "reply_to")

    def __init__(self, message: Any, reply_to: Future[Any] | None = None) -> None:
        self.message = message
        self.reply_to = reply_to


class _Inbox:
    """One incarnation's view of its post's mailbox: gives out Pykka's own messages, and works through calls meanwhile.

    Only Pykka's messages count as content, so that a dying incarnation drains those and leaves the calls.
    """

    def __init__(self, mailbox: Mailbox, controls: deque[_Envelope], work: Callable[[list[Call[Any]]], None]) -> None:
        self._mailbox = mailbox
        self._controls = controls
        self._work = work

    def put(self, envelope: _Envelope) -> None:
        self._controls.append(envelope)
        self._mailbox.nudge()

    def get(self) -> _Envelope:
        # Calls are worked on in here, without an envelope and Pykka's dispatch around each batch, which a lone request
        # would pay for in full.
        controls = self._controls
        # Pykka does not look for errors in here: one that escaped would end the thread and tell nobody.
        try:
            while not controls:
                calls = self._mailbox.take(controls)
                if calls:
                    self._work(calls)
        except BaseException as error:
            return _Envelope(_Crash(error))
        return controls.popleft()

    def empty(self) -> bool:
        return not self._controls
