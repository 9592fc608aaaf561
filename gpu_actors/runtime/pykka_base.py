"""What is used of Pykka: an actor's thread, its loop and its reference. The only module that imports Pykka.

Pykka's loop asks an inbox for the next envelope and hands its message to ``on_receive``. It documents neither the inbox
nor the envelope, so both are kept here, with all else that is relied on and not promised:

    ThreadActor    a daemon thread with Pykka's own inbox, which is also written to without a look at Pykka's registry
    MailboxActor   the same over an inbox that works through the calls of a mailbox between Pykka's messages

tests/runtime/test_pykka_base.py holds it against the release that is installed.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NoReturn

import pykka
from pykka import ActorDeadError, ActorRef

from gpu_actors.runtime.call import Call
from gpu_actors.runtime.mailbox import Mailbox

__all__ = ["ActorDeadError", "ActorRef", "MailboxActor", "ThreadActor", "raise_exception"]


class ThreadActor(pykka.ThreadingActor):
    """An actor on a daemon thread: the program may end while it sleeps."""

    use_daemon_thread: ClassVar[bool] = True

    def _start_actor_loop(self) -> None:
        try:
            super()._start_actor_loop()
        except BaseException:  # no thread can be had: Pykka's registry would keep the actor, and all that it holds
            pykka.ActorRegistry.unregister(self.actor_ref)
            raise

    def post_message(self, message: Any) -> None:
        """Put a message in the inbox. For any thread; a message to an actor that has stopped is dropped."""
        # Not actor_ref.tell: that asks a registry lock first, and raises once this actor has stopped.
        self.actor_inbox.put(_Envelope(message))  # type: ignore[arg-type]


class MailboxActor(ThreadActor):
    """An actor that works through the calls of a mailbox, on Pykka's thread and outside of Pykka's dispatch.

    Its attributes have underscores, for the names without belong to the actors that users write.
    """

    def __init__(self, mailbox: Mailbox) -> None:
        self._mailbox = mailbox  # before Pykka asks for the inbox
        self._controls: deque[_Envelope] = deque()  # Pykka's messages that wait, which go before calls
        super().__init__()

    @abstractmethod
    def _work(self, calls: list[Call[Any]]) -> None:
        """Work through a batch of calls. What it raises ends the actor, as `pykka.Actor.on_failure` is told."""

    @abstractmethod
    def _receive(self, message: Any) -> Any:
        """Handle a message that was sent by ``actor_ref``, and give the answer."""

    def on_receive(self, message: Any) -> Any:
        if type(message) is _Crash:
            raise message.error
        return self._receive(message)

    def _create_actor_inbox(self) -> Any:  # type: ignore[override]  # Pykka calls its static method on self
        return _Inbox(self._mailbox, self._controls, self._work)


def raise_exception(name: str, error: BaseException) -> NoReturn:
    """Raise ``error``, or a stand-in where it is no Exception: Pykka answers those by stopping every actor there is."""
    if isinstance(error, Exception):
        raise error
    raise RuntimeError(f"{name} raised {error!r}") from error


@dataclass(slots=True, eq=False)
class _Crash:
    """Takes what ended a batch of calls to where Pykka reports failures."""

    error: BaseException


@dataclass(slots=True, eq=False)
class _Envelope:
    """What Pykka's loop expects an inbox to give it."""

    message: Any
    reply_to: pykka.Future[Any] | None = None


@dataclass(slots=True, eq=False)
class _Inbox:
    """One incarnation's view of its cell's mailbox: gives out Pykka's own messages, and works through calls meanwhile.

    Only Pykka's messages count as content, so that a dying incarnation drains those and leaves the calls.
    """

    mailbox: Mailbox
    controls: deque[_Envelope]
    work: Callable[[list[Call[Any]]], None]

    def put(self, envelope: _Envelope) -> None:
        self.controls.append(envelope)
        self.mailbox.nudge()

    def get(self) -> _Envelope:
        # Calls are worked on in here, without an envelope and Pykka's dispatch around each batch, which a lone request
        # would pay for in full.
        controls = self.controls
        # Pykka does not look for errors in here: one that escaped would end the thread without a word.
        try:
            while not controls:
                calls = self.mailbox.take(controls)
                if calls is not None:
                    self.work(calls)
        except BaseException as error:
            return _Envelope(_Crash(error))
        return controls.popleft()

    def empty(self) -> bool:
        return not self.controls
