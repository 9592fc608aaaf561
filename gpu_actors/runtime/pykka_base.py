"""The actors' base over Pykka: an actor's thread, its loop and its reference. Only this module imports Pykka.

Pykka's loop asks an inbox for the next envelope and hands its message to ``on_receive``. It documents neither the inbox
nor the envelope, so both are here, with everything else that this package relies on and Pykka does not promise:

    ThreadActor    a daemon thread with Pykka's own inbox. Messages can be posted to it without Pykka's registry
    MailboxActor   the same with an inbox that works through the calls of a mailbox between Pykka's messages

tests/runtime/test_pykka_base.py checks all this against the installed release.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NoReturn

import pykka
from pykka import ActorDeadError, ActorRef

from gpu_actors.catching import undo_on_error
from gpu_actors.runtime.call import Call
from gpu_actors.runtime.mailbox import Mailbox

__all__ = ["ActorDeadError", "ActorRef", "Interrupted", "MailboxActor", "ThreadActor", "raise_exception"]


class ThreadActor(pykka.ThreadingActor):
    """An actor on a daemon thread: the program may end while it sleeps."""

    use_daemon_thread: ClassVar[bool] = True

    def _start_actor_loop(self) -> None:
        # If no thread can be started, Pykka's registry would keep the actor and its objects alive.
        with undo_on_error(pykka.ActorRegistry.unregister, self.actor_ref):
            super()._start_actor_loop()

    def post_message(self, message: Any) -> None:
        """Put a message in the inbox. Any thread may call it. A message to an actor that has stopped is dropped."""
        # Not actor_ref.tell: it takes the registry's lock first, and raises once this actor has stopped.
        self.actor_inbox.put(_Envelope(message))  # type: ignore[arg-type]


class MailboxActor(ThreadActor):
    """An actor that works through the calls of a mailbox, on Pykka's thread and outside of Pykka's dispatch.

    Its attributes begin with an underscore. Names without one are left to the actors that users write.
    """

    def __init__(self, mailbox: Mailbox) -> None:
        self._mailbox = mailbox  # before Pykka asks for the inbox
        self._controls: deque[_Envelope] = deque()  # Pykka's waiting messages. They go before calls
        super().__init__()

    @abstractmethod
    def _work(self, calls: list[Call[Any]]) -> None:
        """Work through a batch of calls. An exception ends the actor, and is passed to ``on_failure``."""

    @abstractmethod
    def _receive(self, message: Any) -> Any:
        """Handle a message that was sent by ``actor_ref``, and return the answer."""

    def _check_sent(self, message: Any) -> None:
        """Raise for a message that must not be sent by ``actor_ref``. Called on the sender's thread."""

    def on_receive(self, message: Any) -> Any:
        if type(message) is _Crash:
            raise message.error
        return self._receive(message)

    def _create_actor_inbox(self) -> Any:  # type: ignore[override]  # Pykka calls its static method on self
        return _Inbox(self._mailbox, self._controls, self._work, self._check_sent)


def raise_exception(name: str, error: BaseException) -> NoReturn:
    """Raise ``error`` if it is an Exception, else a RuntimeError: for other errors Pykka would stop every actor."""
    if isinstance(error, Exception):
        raise error
    raise RuntimeError(f"{name} raised {error!r}") from error


class Interrupted(RuntimeError):
    """An actor's work was interrupted at an unknown point, so that its state may be inconsistent."""


@dataclass(slots=True, eq=False)
class _Crash:
    """A message that raises the error of a batch of calls in Pykka's loop, which reports it."""

    error: BaseException


@dataclass(slots=True, eq=False)
class _Envelope:
    """A message in the form that Pykka's loop expects from an inbox."""

    message: Any
    reply_to: pykka.Future[Any] | None = None


@dataclass(slots=True, eq=False)
class _Inbox:
    """One incarnation's inbox: returns Pykka's own messages, and works through the mailbox's calls meanwhile.

    Only Pykka's messages count as its content. So an incarnation that ends drains them and leaves the calls.
    """

    mailbox: Mailbox
    controls: deque[_Envelope]
    work: Callable[[list[Call[Any]]], None]
    check: Callable[[Any], None]

    def put(self, envelope: _Envelope) -> None:
        # Checked here, not where the message is received: an error there ends the actor if no sender waits for it.
        self.check(envelope.message)
        self.controls.append(envelope)
        self.mailbox.nudge()

    def get(self) -> _Envelope:
        # Calls are handled here, without an envelope and Pykka's dispatch for each batch. A request that comes alone
        # would bear the whole cost of both.
        controls = self.controls
        # Pykka does not catch errors of an inbox: one that escaped would end the thread silently.
        try:
            while not controls:
                calls = self.mailbox.take(controls, self.work_directly)
                if calls is not None:
                    self.work(calls)
        except BaseException as error:
            return _Envelope(_Crash(error))
        return controls.popleft()

    def work_directly(self, call: Call[Any]) -> None:
        """Work on one call on its sender's thread. An exception ends the actor, as it does on the actor's own thread.

        Ctrl-C, or another error that is no Exception, is also raised to the sender, and ends the actor with
        `Interrupted`.
        """
        try:
            self.work([call])
        except BaseException as error:
            interruption = error.__cause__ or error
            if isinstance(interruption, Exception):
                self.controls.appendleft(_Envelope(_Crash(error)))
                self.mailbox.nudge()
                return
            failure = Interrupted(f"{interruption!r} interrupted the thread that did the work of {self.mailbox.name}")
            self.controls.appendleft(_Envelope(_Crash(failure)))
            self.mailbox.nudge()
            raise interruption from None

    def empty(self) -> bool:
        return not self.controls
