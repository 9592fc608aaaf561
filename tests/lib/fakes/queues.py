"""FakeQueues: the streams of a fake device, and when what was enqueued on them happens.

Nothing happens until somebody waits for it (``order="late"``), or at a random moment (``order="random"``), or when the
test says ``step()``.
"""

from __future__ import annotations

import itertools
import random
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

from inside.cuda import CudaFailure

__all__ = ["LEGACY", "FakeQueues", "FakeStream", "Operation", "Order"]

Operation = Callable[[], bool]
"""Does its work and gives True, or gives False if it has to wait for another stream."""

Order = Literal["late", "random", "manual"]

LEGACY = 1
INVALID_HANDLE = 400


@dataclass(eq=False)
class FakeStream:
    blocking: bool = False
    hung: bool = False
    queue: deque[Operation] = field(default_factory=deque)
    captured: list[Operation] | None = None


class FakeQueues:
    """Streams, the calls that are made, and the failures that a test asks for.

    calls: the name of every call made, in order.
    """

    def __init__(self, order: Order, seed: int) -> None:
        self.calls: list[str] = []
        self._order = order
        self._random = random.Random(seed)
        self._handles = itertools.count(1000)
        self._streams: dict[int, FakeStream] = {LEGACY: FakeStream(blocking=True)}
        self._bound = threading.local()
        self._lost: int | None = None
        self._failures: dict[str, deque[int]] = {}
        self._execution_failures: deque[int] = deque()
        self._changed = threading.Condition(threading.RLock())

    # Steering

    def fail(self, call: str, *statuses: int) -> None:
        """Have the next calls of that name return these statuses; 0 lets one pass."""
        self._failures.setdefault(call, deque()).extend(statuses)

    def fail_kernel(self, *statuses: int) -> None:
        """Have the next kernels fail with these while they run; 0 lets one pass."""
        self._execution_failures.extend(statuses)

    def hang(self, stream: int) -> None:
        with self._changed:
            self._streams[stream].hung = True

    def resume(self, stream: int) -> None:
        with self._changed:
            self._streams[stream].hung = False
            self._changed.notify_all()

    def step(self, stream: int | None = None) -> bool:
        """Do one operation, of that stream or of any. False if none can be done."""
        with self._changed:
            streams = [self._streams[stream]] if stream is not None else list(self._streams.values())
            self._random.shuffle(streams)
            return any(self._advance(one) for one in streams)

    def run_all(self) -> None:
        while self.step():
            pass

    def enqueue(self, stream: int, work: Callable[[], None]) -> None:
        """Foreign work, such as a producer's kernel."""

        def operation() -> bool:
            work()
            return True

        target = self._streams[stream]
        (target.queue if target.captured is None else target.captured).append(operation)

    # Inside

    @contextmanager
    def _call(self, name: str, bound: bool = True) -> Iterator[None]:
        with self._changed:
            self.calls.append(name)
            assert not bound or getattr(self._bound, "yes", False), f"{name} on a thread that is not bound"
            if self._lost is not None:
                raise CudaFailure(self._lost, name)
            statuses = self._failures.get(name)
            status = statuses.popleft() if statuses else 0
            if status:
                raise self._lose(CudaFailure(status, name, "injected"))
            if self._order == "random":
                for _ in range(self._random.randrange(4)):
                    self.step()
                if self._lost is not None:
                    raise CudaFailure(self._lost, name)
            yield
            self._changed.notify_all()

    def _lose(self, failure: CudaFailure) -> CudaFailure:
        if failure.sticky:
            self._lost = failure.status
            self._changed.notify_all()
        return failure

    def _advance(self, stream: FakeStream) -> bool:
        if stream.hung or not stream.queue or self._lost is not None:
            return False
        try:
            if not stream.queue[0]():
                return False
        except CudaFailure as failure:
            self._lose(failure)
            return True
        stream.queue.popleft()
        self._changed.notify_all()
        return True

    def _add(self, table: dict[int, Any], value: Any) -> int:
        with self._changed:
            handle = next(self._handles)
            table[handle] = value
            return handle

    def _find(self, table: dict[int, Any], handle: int) -> Any:
        if handle not in table:
            raise CudaFailure(INVALID_HANDLE, "handle", f"there is no {handle}")
        return table[handle]
