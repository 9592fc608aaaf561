"""ShardedStep: one pass of a model over the layers of a `ShardedKvCache`.

Its layers read the keys that the workers have. Its new rows stay here until the commit appends those of all layers at
once. So a step that ends early has nothing to undo.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import weakref
from collections.abc import AsyncIterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Protocol, Self

import numpy as np

from gpu_actors.actors.kv_step import LATE
from gpu_actors.attention.requests import Array, AttentionOutput
from gpu_actors.errors import DeadlineExceeded, GpuActorsError, RequestError, StaleBuffer
from gpu_actors.fields import describe, expect, integer
from gpu_actors.partial import Partial
from gpu_actors.process import Local

__all__ = ["ShardedStep"]


class _Sequence(Protocol):
    """The part of `ShardedSequence` that a step uses."""

    length: int
    _lock: asyncio.Lock


class _Cache(Protocol):
    """The part of `ShardedKvCache` that a step uses."""

    def _check_sequence(self, seq: Any) -> None: ...

    def _checked(self, q: Array, k: Array | None, v: Array | None, **options: Any) -> Any: ...

    async def _attend(self, seq: Any, layer: int, attention: Any) -> tuple[Partial, tuple[Any, Any] | None]: ...

    async def _append(self, seq: Any, new: Sequence[tuple[Any, Any]]) -> int: ...


class ShardedStep(Local):
    """One pass of a model over the layers of a sequence, begun by `ShardedKvCache.step`.

    Await `attend` for each layer, then `commit` or `abort`. Until then other requests on the sequence wait, so await
    none of them within the step. ``async with await cache.step(...)`` commits at the end of its block, and aborts if
    the block raises or is cancelled. A step to which no reference is left is aborted.

    length: the rows of the sequence, including those that the step appends.
    """

    def __init__(
        self,
        cache: _Cache,
        seq: _Sequence,
        rows: int,
        append: bool,
        heads: Sequence[int],
        options: Sequence[Mapping[str, Any]],
        deadline: float | None,
    ) -> None:
        self.length: int = seq.length + (rows if append else 0)
        self._cache = cache
        self._seq = seq
        self._rows = rows
        self._append = append
        self._heads = heads
        self._options = options
        self._new: dict[int, tuple[Any, Any]] = {}
        self._over: GpuActorsError | None = None
        self._turn = asyncio.Lock()
        self._loop = asyncio.get_running_loop()
        self._deadline = deadline
        self._timer: asyncio.TimerHandle | None = None
        if deadline is not None:
            self._timer = self._loop.call_at(deadline, functools.partial(_deadline_passed, weakref.ref(self)))
        self._holds_sequence = True

    def __repr__(self) -> str:
        return f"<ShardedStep over {self._rows} rows>"

    async def attend(self, layer: int, q: Array, k: Array | None = None, v: Array | None = None) -> Any:
        """Attend with q to a layer of the sequence and to the step's own rows, k and v.

        q: (rows, heads_q, head_dim), k: (rows, kv_heads, head_dim), v: (rows, kv_heads, head_dim_v), on the host, with
            the dtypes of `ShardedKvCache.attend`. k and v are None in a step that appends no rows.
        The output is (rows, heads_q, head_dim_v). If the step, or this layer, has ``return_lse=True``, it is an
        `AttentionOutput` with the LSE. A layer may be attended to again: the commit takes its last rows.
        Raises `InvalidRequest` and `Unsupported` for arguments that the layer does not take, and then the step goes on;
        `StaleBuffer` once the step has ended; `DeadlineExceeded`, `WorkerLost` and other errors of a worker, and then
        the step is aborted.
        """
        async with self._in_turn():
            number = integer("layer", layer, 0, len(self._heads) - 1)
            options = dict(self._options[number])
            return_lse = options.pop("return_lse", False)
            for name, rows in (("k", k), ("v", v)):
                reason = f"must be {'given' if self._append else 'None'} in each layer of this step"
                expect((rows is not None) == self._append, name, None if rows is None else describe(rows), reason)
            attention = self._cache._checked(q, k, v, **options)
            heads = self._heads[number]
            reason = f"must have the step's {self._rows} rows and {heads} heads"
            expect(attention.q.shape[:2] == (self._rows, heads), "q", describe(attention.q), reason)
            try:
                async with asyncio.timeout_at(self._deadline):
                    answer, new = await self._cache._attend(self._seq, number, attention)
            except TimeoutError as error:
                raise error if isinstance(error, DeadlineExceeded) else DeadlineExceeded(LATE) from None
            if new is not None:
                self._new[number] = np.array(new[0]), np.array(new[1])  # the caller may reuse its arrays
        return AttentionOutput(answer.out, answer.lse) if return_lse else answer.out

    async def commit(self) -> int:
        """Keep the rows, and return the new length.

        Raises `InvalidRequest` if a layer has no new rows, and then the step goes on. If a worker refuses its rows, as
        with `CacheFull`, no worker keeps any. If a worker is lost, the sequence is lost. A write that has begun is
        completed even if the task is cancelled or the deadline passes.
        """
        async with self._in_turn():
            missing = [layer for layer in range(len(self._heads)) if layer not in self._new]
            reason = "have no new rows: they must be attended to before the commit"
            expect(not self._append or not missing, "layers", missing, reason)
            self._over = StaleBuffer("the step has ended")
            if self._append:
                await self._cache._append(self._seq, list(map(self._new.__getitem__, range(len(self._heads)))))
        return self.length

    async def abort(self) -> None:
        """Leave the sequence as it was before the step. Waits for an `attend` under way."""
        self._end(StaleBuffer("the step has ended"))
        async with self._turn:
            return

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if error is None:
                await self.commit()
        finally:
            self._end(StaleBuffer("the step has ended"))

    def __del__(self) -> None:
        if getattr(self, "_holds_sequence", False):
            with contextlib.suppress(RuntimeError):  # the loop may be closed
                self._loop.call_soon_threadsafe(self._seq._lock.release)

    @contextlib.asynccontextmanager
    async def _in_turn(self) -> AsyncIterator[None]:
        """Let one layer, or the end, run at a time. An error that is no refusal ends the step."""
        async with self._turn:
            try:
                if self._deadline is not None and self._loop.time() >= self._deadline:
                    self._end(DeadlineExceeded(LATE))
                if self._over is not None:
                    raise self._over
                self._cache._check_sequence(self._seq)
                yield
            except RequestError:
                raise
            except GpuActorsError as error:
                self._end(error)
                raise
            finally:
                if self._over is not None:
                    self._release_sequence()

    def _end(self, reason: GpuActorsError) -> None:
        """Let no layer follow. Requests on the sequence go on once no layer is in flight."""
        self._over = self._over or reason
        if not self._turn.locked():
            self._release_sequence()

    def _release_sequence(self) -> None:
        if self._holds_sequence:
            self._holds_sequence = False
            self._seq._lock.release()
            self._new.clear()
            if self._timer is not None:
                self._timer.cancel()


def _deadline_passed(step: weakref.ref[ShardedStep]) -> None:
    alive = step()
    if alive is not None:
        alive._end(DeadlineExceeded(LATE))
