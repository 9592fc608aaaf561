"""Behaviour of Pykka that is relied on but not documented, checked with the installed release."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from typing import Any

import pykka
import pytest
from pykka._actor import ActorInbox
from support.modules import ROOT
from support.service import Gate, eventually

from gpu_actors.runtime import pykka_base
from gpu_actors.runtime.call import Call
from gpu_actors.runtime.mailbox import Mailbox

pytestmark = pytest.mark.usefixtures("all_threads_end")


class Recorder(pykka_base.MailboxActor):
    """Runs the messages of its calls, and notes Pykka's callbacks."""

    def __init__(self, mailbox: Mailbox, opening: Any = lambda: None) -> None:
        self.heard: list[str] = []
        self.opening = opening
        super().__init__(mailbox)

    def on_start(self) -> None:
        self.heard.append("start")
        self.opening()

    def on_stop(self) -> None:
        self.heard.append("stop")

    def on_failure(self, exception_type: Any, exception_value: Any, traceback: Any) -> None:
        self.heard.append(f"failure: {exception_value}")

    def _receive(self, message: Any) -> Any:
        return message()

    def _work(self, calls: list[Call[Any]]) -> None:
        for call in calls:
            call.resolve(call.message())


@pytest.fixture
def mailbox() -> Iterator[Mailbox]:
    """A mailbox whose actor is stopped after the test if it is still alive."""
    yield Mailbox("recorder", 16, 1)
    pykka.ActorRegistry.stop_all()


def started(mailbox: Mailbox, *arguments: Any) -> tuple[Recorder, pykka.ActorRef[Any]]:
    actor = Recorder(mailbox, *arguments)
    pykka.ActorRegistry.register(actor.actor_ref)
    actor._start_actor_loop()
    return actor, actor.actor_ref


def submit(mailbox: Mailbox, message: Any) -> Call[Any]:
    call: Call[Any] = Call(message, mailbox)
    mailbox.put(call)
    return call


def broken() -> None:
    raise ZeroDivisionError("broken")


def test_one_module_alone_imports_pykka() -> None:
    imported = re.compile(r"^\s*(import|from) pykka\b", re.MULTILINE)
    files = (ROOT / "gpu_actors").rglob("*.py")
    assert [path.name for path in files if imported.search(path.read_text(encoding="utf-8"))] == ["pykka_base.py"]


def test_pykka_asks_an_inbox_for_three_things() -> None:
    assert {name for name in vars(ActorInbox) if not name.startswith("_")} == {"put", "get", "empty"}
    assert all(callable(getattr(pykka_base._Inbox, name)) for name in ("put", "get", "empty"))


def test_an_actor_and_its_reference_write_to_the_inbox_that_the_actor_makes(mailbox: Mailbox) -> None:
    actor = Recorder(mailbox)
    assert type(actor.actor_inbox) is pykka_base._Inbox
    assert actor.actor_ref.actor_inbox is actor.actor_inbox


def test_messages_are_handled_and_calls_are_worked_on_between_them(mailbox: Mailbox) -> None:
    actor, reference = started(mailbox)
    assert reference.ask(lambda: "asked", timeout=30.0) == "asked"
    call = submit(mailbox, lambda: "called")
    assert call.wait(30.0)
    assert call.answer() == "called"
    told = threading.Event()
    actor.post_message(told.set)
    assert told.wait(30.0)
    assert reference.stop(timeout=30.0)
    assert actor.heard == ["start", "stop"]


def test_a_message_that_waits_goes_before_calls(mailbox: Mailbox) -> None:
    order: list[str] = []
    gate = Gate()
    _, reference = started(mailbox)
    submit(mailbox, gate)
    assert gate.entered.wait(30.0)
    call = submit(mailbox, lambda: order.append("call"))
    reference.tell(lambda: order.append("message"))
    gate.open()
    assert call.wait(30.0)
    assert order == ["message", "call"]


def test_what_a_batch_of_calls_raises_ends_the_actor_and_leaves_the_other_calls(mailbox: Mailbox) -> None:
    actor, reference = started(mailbox)
    submit(mailbox, broken)
    eventually(lambda: not reference.is_alive() and len(actor.heard) == 2)
    assert actor.heard == ["start", "failure: broken"]
    left = submit(mailbox, lambda: "later")
    assert not left.wait(0.0)
    second, _ = started(mailbox)
    assert left.wait(30.0)
    assert second.heard == ["start"]


def test_an_actor_that_ends_tells_those_that_asked_it(mailbox: Mailbox) -> None:
    gate = Gate()

    def crash() -> None:
        gate()
        broken()

    _, reference = started(mailbox)
    reference.tell(crash)
    assert gate.entered.wait(30.0)
    asked = reference.ask(lambda: "too late", block=False)
    gate.open()
    with pytest.raises(pykka.ActorDeadError):
        asked.get(timeout=30.0)


def test_an_actor_that_cannot_start_is_told_of_no_failure(mailbox: Mailbox) -> None:
    """ServiceActor.on_start therefore reports its own failure."""
    actor, reference = started(mailbox, broken)
    eventually(lambda: not reference.is_alive())
    assert actor.heard == ["start"]


def test_what_is_no_exception_stops_every_actor_unless_a_stand_in_is_raised(mailbox: Mailbox) -> None:
    other, _ = started(Mailbox("other", 16, 1))
    with pytest.raises(RuntimeError, match="worker raised SystemExit"):
        pykka_base.raise_exception("worker", SystemExit(1))
    with pytest.raises(ZeroDivisionError):
        pykka_base.raise_exception("worker", ZeroDivisionError())
    _, reference = started(mailbox)

    def leave() -> None:
        raise SystemExit(1)

    reference.tell(leave)
    eventually(lambda: other.heard == ["start", "stop"])


def test_an_actor_that_has_stopped_drops_what_is_posted_to_it(mailbox: Mailbox) -> None:
    actor, reference = started(mailbox)
    reference.stop(timeout=30.0)
    actor.post_message(broken)
    with pytest.raises(pykka.ActorDeadError):
        reference.tell(broken)
    assert actor.heard == ["start", "stop"]
