"""Remote contexts over each kind of channel."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from gpu_actors.remote import ChildProcess, Faults, Faulty, InProcess, RemoteContext, Workplace, open_remote

WORKPLACES: dict[str, Callable[[], Workplace]] = {
    "direct": InProcess,
    "process": ChildProcess,
    "faulty": lambda: Faulty(Faults(seed=3)),
}


@pytest.fixture(params=WORKPLACES)
def workplace(request: pytest.FixtureRequest) -> Workplace:
    """A new workplace of each kind."""
    return WORKPLACES[request.param]()


@pytest.fixture(scope="module", params=WORKPLACES)
def remote(request: pytest.FixtureRequest) -> Iterator[RemoteContext]:
    """A context over each kind of channel. For tests that do not damage it."""
    with open_remote("mock", workplace=WORKPLACES[request.param](), name="here") as ctx:
        yield ctx
