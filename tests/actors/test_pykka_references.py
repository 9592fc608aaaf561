"""Pykka's references to the actors of a context: requests must be submitted, and are refused if they are sent."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pykka
import pytest

import gpu_actors as ga


class Note:
    """A message of `Keeper`."""


class Keeper(ga.ServiceActor):
    """Answers notes that are submitted, and any other message that is sent to it."""

    label = "keeper"
    takes = (Note,)

    def handle(self, call: Any) -> None:
        call.resolve("handled", self.outbox)

    def on_message(self, message: Any) -> Any:
        return f"received {message}"


def reference(actor: type[Any]) -> pykka.ActorRef[Any]:
    (found,) = pykka.ActorRegistry.get_by_class(actor)
    return found


def forward() -> ga.FlashForward:
    q = np.ones((1, 4, 2, 16), np.float16)
    return ga.FlashForward(q, q, q)


SENDERS: dict[str, Callable[[Any, Any], Any]] = {
    "ask": lambda to, message: to.ask(message, timeout=30.0),
    "ask without waiting": lambda to, message: to.ask(message, block=False),
    "tell": lambda to, message: to.tell(message),
}


@pytest.mark.parametrize("sender", SENDERS)
def test_a_request_that_is_sent_and_not_submitted_is_refused_at_once(sender: str) -> None:
    send = SENDERS[sender]
    with ga.open_context("mock", ga.ContextOptions(actors=(Keeper,))) as ctx:
        for actor, message in ((ga.FlashAttnActor, forward()), (Keeper, Note())):
            name = type(message).__name__
            with pytest.raises(ga.InvalidRequest) as refusal:
                send(reference(actor), message)
            assert (refusal.value.field, refusal.value.value) == ("message", name)
            assert f"ctx.actor({actor.__name__}).submit(message)" in str(refusal.value)
        assert ctx.health().ready
        assert ctx.actor(ga.FlashAttnActor).restarts == 0
        assert ctx.actor(ga.FlashAttnActor).submit(forward()).result(60).out.shape == (1, 4, 2, 16)
        assert ctx.actor(Keeper).submit(Note()).result(60) == "handled"


def test_other_messages_reach_the_actor() -> None:
    with ga.open_context("mock", ga.ContextOptions(actors=(Keeper,))):
        assert reference(Keeper).ask("a word", timeout=30.0) == "received a word"
