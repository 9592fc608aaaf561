"""The object that a task suspends on: the task resumes directly, and otherwise as with any future."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import weakref
from collections import deque
from collections.abc import Callable, Generator
from typing import Any

import pytest
import uvloop

from gpu_actors.runtime.waking import Outbox, Waiter, _wake

LOOPS = {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}
TASKS = {"C": asyncio.Task, "Python": asyncio.tasks._PyTask}  # type: ignore[attr-defined]


class Waiting:
    """Awaits its own waiter. ended: what ended the finished waits, in order."""

    def __init__(self, name: str, ended: list[str]) -> None:
        self.waiter = Waiter(asyncio.get_running_loop())
        self._name = name
        self._ended = ended

    def __await__(self) -> Generator[Waiter, None, str]:
        try:
            yield self.waiter
        except asyncio.CancelledError as error:
            self._ended.append(f"{self._name} cancelled {error}".strip())
            raise
        self._ended.append(self._name)
        return self._name


async def wait_for(waiting: Waiting) -> str:
    return await waiting


def soon(*functions: Callable[[], Any]) -> None:
    """Have the loop call the functions, as an actor would ask it to: no task runs meanwhile."""
    for function in functions:
        asyncio.get_running_loop().call_soon(function)


@pytest.fixture(params=TASKS)
def start(request: pytest.FixtureRequest) -> Any:
    """Starts a task of either implementation, on the running loop."""
    task = TASKS[request.param]
    return lambda waiting: task(wait_for(waiting), loop=asyncio.get_running_loop())


async def test_asyncio_takes_a_waiter_for_a_future() -> None:
    assert asyncio.isfuture(Waiter(asyncio.get_running_loop()))


async def test_a_woken_task_goes_on_at_once(start: Any) -> None:
    ended: list[str] = []
    waiting = Waiting("a", ended)
    task = start(waiting)
    await asyncio.sleep(0)
    soon(waiting.waiter.wake, lambda: ended.append("what came next"), waiting.waiter.wake)
    assert await task == "a"
    assert ended == ["a", "what came next"]
    assert not waiting.waiter.cancel(), "it is over"


async def test_it_goes_on_in_its_own_context(start: Any) -> None:
    variable = contextvars.ContextVar("variable", default="the default")
    seen: list[str] = []

    class Looking(Waiting):
        def __await__(self) -> Generator[Waiter, None, str]:
            variable.set("its own")
            yield self.waiter
            seen.append(variable.get())
            return ""

    waiting = Looking("a", [])
    task = start(waiting)
    await asyncio.sleep(0)
    soon(waiting.waiter.wake)
    await task
    assert (seen, variable.get()) == (["its own"], "the default")


async def test_cancelling_ends_the_wait_with_its_message(start: Any) -> None:
    ended: list[str] = []
    waiting = Waiting("a", ended)
    task = start(waiting)
    await asyncio.sleep(0)
    task.cancel("enough")
    soon(waiting.waiter.wake)  # too late
    assert not ended, "cancelling takes effect when the loop goes on"
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended == ["a cancelled enough"]


async def test_a_task_that_is_cancelled_before_its_first_step_never_waits(start: Any) -> None:
    ended: list[str] = []
    task = start(Waiting("a", ended))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not ended


async def test_a_task_that_cancels_itself_before_it_waits_is_cancelled_there(start: Any) -> None:
    ended: list[str] = []
    task: asyncio.Task[str]

    class Cancelling(Waiting):
        def __await__(self) -> Generator[Waiter, None, str]:
            task.cancel()  # from Python 3.14 on, asyncio.current_task() knows no tasks that are written in Python
            return super().__await__()

    task = start(Cancelling("a", ended))
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended == ["a cancelled"]


@pytest.mark.parametrize("loop", LOOPS)
def test_a_task_that_ends_the_loop_does_not_keep_the_others_waiting(loop: str) -> None:
    ended: list[str] = []

    class Ending(Waiting):
        def __await__(self) -> Generator[Waiter, None, str]:
            yield self.waiter
            raise KeyboardInterrupt

    async def main(outbox: Outbox) -> list[asyncio.Task[str]]:
        waiting = [Waiting("a", ended), Ending("b", ended), Waiting("c", ended), Waiting("d", ended)]
        tasks = [asyncio.ensure_future(wait_for(one)) for one in waiting]
        await asyncio.sleep(0)
        outbox.add([one.waiter for one in waiting])
        return tasks

    running, outbox = LOOPS[loop](), Outbox()
    try:
        tasks = running.run_until_complete(main(outbox))
        outbox.flush()
        with pytest.raises(KeyboardInterrupt):
            running.run_until_complete(tasks[2])
        for _ in range(3):  # a few turns of the loop
            running.call_soon(running.stop)
            running.run_forever()
        with pytest.raises(KeyboardInterrupt):
            tasks[1].result()
    finally:
        running.close()
    assert ended == ["a", "c", "d"]


def test_the_others_of_a_batch_get_their_turn_before_one_that_runs_the_loop_from_within() -> None:
    """Some notebooks allow a task to run the loop."""
    woken: list[str] = []
    scheduled: list[Callable[[], None]] = []

    class FakeLoop:
        def call_soon(self, function: Callable[..., None], *arguments: Any) -> None:
            scheduled.append(lambda: function(*arguments))

    class FakeWaiter:
        loop = FakeLoop()

        def __init__(self, name: str, nested: bool = False) -> None:
            self.name = name
            self.nested = nested
            self.over = False

        def wake(self) -> None:
            if self.over:  # a Waiter resumes its task only once
                return
            self.over = True
            while self.nested and scheduled:
                scheduled.pop()()
            woken.append(self.name)

    waiters: Any = deque((FakeWaiter("a", nested=True), FakeWaiter("b"), FakeWaiter("c")))
    _wake(waiters)
    assert woken == ["b", "c", "a"]


@pytest.mark.parametrize("loop", LOOPS)
def test_a_lone_task_goes_on_in_the_turn_of_the_loop_that_it_is_woken_in(loop: str) -> None:
    """A plain future needs one more turn."""

    async def turns() -> int:
        """Turns of the loop between the wake-up and the task."""
        running = asyncio.get_running_loop()
        ended: list[str] = []
        waiting = Waiting("a", ended)
        task = asyncio.ensure_future(wait_for(waiting))
        await asyncio.sleep(0)
        outbox = Outbox()
        outbox.add([waiting.waiter])
        outbox.flush()
        count = 0
        while not ended:
            later = running.create_future()
            running.call_soon(later.set_result, None)
            count += 1
            await later
        await task
        return count

    with asyncio.Runner(loop_factory=LOOPS[loop]) as runner:
        assert runner.run(turns()) == 1


def test_a_cancelled_wait_makes_no_reference_cycle() -> None:
    """The task's objects are freed at once, without the garbage collector."""

    class Held:
        pass

    async def main() -> None:
        held: list[weakref.ref[Held]] = []

        async def wait() -> None:
            something = Held()
            held.append(weakref.ref(something))
            await wait_for(Waiting("a", []))

        # Tasks written in Python have their own cycle from 3.12 on.
        task = asyncio.ensure_future(wait())
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()
        del task
        await asyncio.sleep(0)
        assert held[0]() is None

    gc.collect()
    gc.disable()
    try:
        asyncio.run(main())
    finally:
        gc.enable()
