"""ServiceActor: a Pykka actor that answers calls from a mailbox that outlives it.

The mailbox, the stream and the completion thread belong to its `ActorCell`, which the ContextActor keeps; the
actor itself is one incarnation that may raise, die and be replaced. Subclass it to add an actor of your own and name
the class in ``ContextOptions(actors=...)``.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

from gpu_actors.devices.interface import Launch
from gpu_actors.errors import GpuActorsError, InvalidRequest, RequestError
from gpu_actors.options import ActorType
from gpu_actors.runtime.call import DONE, Call
from gpu_actors.runtime.cell import ActorCell
from gpu_actors.runtime.completion import Failed, Finish, as_answer
from gpu_actors.runtime.handle import ActorHandle
from gpu_actors.runtime.pykka_base import MailboxActor, raise_exception
from gpu_actors.runtime.waking import Outbox
from gpu_actors.values import show

__all__ = ["ServiceActor", "reading"]

logger: logging.Logger = logging.getLogger("gpu_actors")


class ServiceActor(MailboxActor, ActorType):
    """Base of every child of a ContextActor.

    label: the actor's name, unique in a context.
    handle_type: the type of the handle that ``ctx.actor(TheClass)`` returns.
    takes: the message types that the actor accepts, which `refusal` lists. Such messages must be submitted: Pykka's
        ``ask`` and ``tell`` raise `InvalidRequest` for them, in the caller.
    vital: whether the context needs the actor. If a vital actor fails more often than the restart policy allows, the
        context fails. If another actor does, that actor alone stops, and health reports it. All built-in actors except
        KernelActor are vital.

    A `GpuActorsError` raised by `handle` answers that call. Any other exception is a defect: it answers the call with
    `ActorFailed`, and the supervisor replaces the actor. The calls queued after it are not lost.
    """

    handle_type: ClassVar[type[ActorHandle]] = ActorHandle
    takes: ClassVar[tuple[type, ...]] = ()

    def __init__(self, cell: ActorCell) -> None:
        self.cell = cell
        self.outbox: Outbox = Outbox()
        super().__init__(cell.mailbox)

    # For subclasses

    @classmethod
    def make_shared(cls, cell: ActorCell) -> Any:
        """Make the object that all incarnations share as ``self.cell.shared``. Has a ``close()`` if it needs one."""
        return None

    def open(self) -> None:
        """Prepare on the actor's own thread. The actor is ready once this returns."""

    def handle(self, call: Call[Any]) -> None:
        """Answer a call, launch it, or keep it to be answered later. Must not block.

        An actor that does not override this method refuses every call.
        """
        raise self.refusal(call.message)

    @classmethod
    def refusal(cls, message: object) -> InvalidRequest:
        """The error for a message whose type is not in ``takes``."""
        reason = f"{cls.__name__} takes {', '.join(kind.__name__ for kind in cls.takes)}"
        if not cls.takes:
            reason = f"{cls.__name__} takes no requests: it has no handle() of its own"
        return InvalidRequest("message", type(message).__name__, reason)

    @classmethod
    def brief(cls, message: object) -> bool:
        """Whether `handle` is so brief for a message that the sender's own thread may run it (see `Mailbox.put`)."""
        return False

    def flush(self) -> None:
        """Launch the calls that `handle` has gathered. Called after every batch of calls, before the next is taken."""

    def on_message(self, message: Any) -> Any:
        """Handle a message that was sent with ``actor_ref.tell`` or ``.ask`` rather than submitted as a call."""

    def launch(self, calls: Sequence[Call[Any]], launch: Launch, finish: Finish, failed: Failed | None = None) -> None:
        """Enqueue a launch that answers ``calls``.

        Each call must have been claimed with ``claim``. The caller leaves out calls that are answered already
        (cancelled, expired).
        failed: called once if the launch fails after it was enqueued.
        Raises what ``Stream.launch`` raises. If ``failed`` is None, the calls have then been answered. Otherwise the
        caller answers them, or launches them again.
        """
        cell = self.cell
        try:
            event = (cell.stream or cell.open_stream()).launch(launch)
        except BaseException as error:
            cell.progress.launch_ended(error)
            if failed is None:
                self.answer_failure(calls, error)
            raise
        for call in calls:
            if call.traced:
                nothing = "none" if cell.environment.device.info.runs_kernels else "oracle"
                ran = " + ".join(step.kernel.entry for step in launch.steps) or nothing
                fields = {"actor": cell.name, "request": call.number, "key": launch.key, "kernel": ran}
                cell.environment.trace.emit("request.launched", **fields)
        cell.completion.watch(event, calls, finish, self.outbox, failed)

    def answer_failure(self, calls: Iterable[Call[Any]], error: BaseException) -> None:
        """Answer calls with the error that was raised while the actor worked on them."""
        if isinstance(error, GpuActorsError):
            error.__traceback__ = None
        else:
            traceback.clear_frames(error.__traceback__)
        on_lost, name = self.cell.environment.context_lost, self.cell.name
        failure = as_answer(error, on_lost, name, "failed while it handled the request")
        for call in calls:
            answer = failure.named_for(call.message) if isinstance(failure, RequestError) else failure
            call.fail(answer, self.outbox)

    # Pykka's side

    def on_start(self) -> None:
        # Pykka only logs an exception from on_start, so this method reports readiness and failure itself.
        try:
            self.cell.environment.device.bind_thread()
            self.open()
        except BaseException as error:
            self.cell.report_failure(self.actor_urn, error)
            raise_exception(self.cell.name, error)
        self.cell.report_ready(self.actor_urn)

    def on_failure(self, exception_type: Any, exception_value: Any, exception_traceback: Any) -> None:
        self.cell.report_failure(self.actor_urn, exception_value)

    def on_stop(self) -> None:
        self.cell.report_stopped(self.actor_urn)

    def _check_sent(self, message: Any) -> None:
        if isinstance(message, self.takes):
            name = type(self).__name__
            reason = f"is a request, which ask() and tell() do not answer: use ctx.actor({name}).submit(message)"
            raise InvalidRequest("message", type(message).__name__, reason)

    def _receive(self, message: Any) -> Any:
        try:
            return self.on_message(message)
        except BaseException as error:
            raise_exception(self.cell.name, error)
        finally:
            self.outbox.flush()

    def _work(self, calls: list[Call[Any]]) -> None:
        cell = self.cell
        mailbox, outbox = cell.mailbox, self.outbox
        call: Any = None
        cell.busy_since = cell.environment.clock.now()
        try:
            for index, call in enumerate(calls):
                if mailbox.saturated or self._controls:
                    mailbox.requeue(calls[index:])
                    break
                if call.state is DONE:
                    continue
                try:
                    self.handle(call)
                except GpuActorsError as error:
                    self.answer_failure((call,), error)
                except BaseException as error:
                    self.answer_failure((call,), error)
                    mailbox.requeue(calls[index + 1 :])
                    raise_exception(cell.name, error)
            try:
                self.flush()
            except BaseException as error:
                raise_exception(cell.name, error)
        finally:
            cell.busy_since = None
            outbox.flush()
            # Pykka's loop keeps its last message while it waits for the next one, and the error of a crash keeps its
            # frames. Neither may keep requests and their arrays alive.
            calls.clear()
            del call


class reading:  # lower case: callers use it like a function
    """Refuse a request if reading it raises, rather than fail the actor.

    Raises `InvalidRequest` in place of the exception. A `GpuActorsError` passes unchanged. The request's arrays and
    options run code of their own, which may raise any exception. One program's bad argument must not end the actor
    that other programs use too.
    """

    __slots__ = ("_request",)

    def __init__(self, request: object) -> None:
        self._request = request

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if not isinstance(error, Exception) or isinstance(error, GpuActorsError):
            return
        name = type(self._request).__name__
        logger.warning("a %s could not be read", name, exc_info=error)
        # The traceback holds the actor's frames, the frames hold the call, and the call holds this error: a cycle.
        error.__traceback__ = None
        raise InvalidRequest("message", name, f"could not be read, it raised {show(error)}") from error
