"""KvStep: one pass of a model over the layers of a KvCache, launched by the caller's own thread."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, Self, Unpack

import anyio
import numpy as np

from gpu_actors.attention.requests import Array
from gpu_actors.catching import undo_on_error
from gpu_actors.errors import GpuActorsError, InvalidRequest, WouldBlock
from gpu_actors.fields import describe
from gpu_actors.kv.requests import AttendCache, EndStep, KvSequence, StepKeywords
from gpu_actors.process import Local
from gpu_actors.runtime.call import Call
from gpu_actors.runtime.handle import CallOptions
from gpu_actors.runtime.reply import Reply

if TYPE_CHECKING:
    from gpu_actors.actors.kv_step import StepCapture
    from gpu_actors.kv.requests import BeginStep
    from gpu_actors.runtime.handle import ActorHandle

__all__ = ["BegunStep", "KvCapture", "KvStep"]

_OPTIONS = CallOptions(AttendCache, StepKeywords)


class BegunStep(Protocol):
    """A step that has begun: an `OpenStep` of this process, or an object that stands for one in another process."""

    lengths: list[int]
    capture: StepCapture | None

    @property
    def cache_number(self) -> int: ...

    @property
    def open(self) -> bool: ...

    @property
    def replaying(self) -> bool: ...

    def capturing(self) -> int | None: ...

    def attend(self, layer: int, arrays: Mapping[str, Any], stream: Any) -> Any: ...

    def replay(self, run: Callable[[], object], layers: Collection[int] | None, stream: Any) -> None: ...


class _Cache(Protocol):
    """The `KvCache` of a step."""

    _handle: ActorHandle
    _count_of_step: Callable[[Reply[Any]], None] | None

    def _begin_step(
        self, message: BeginStep, deadline: float | None, timeout: float | None, priority: int
    ) -> Reply[KvStep]: ...


class KvStep(Local):
    """One pass of a model over the layers of a cache. `KvCache.step` begins it.

    `attend` to each layer, then `commit` or `abort`. Until then requests on the step's sequences wait, and later
    requests on the cache wait after them, so do not await any within the step. ``async with await cache.step(...)``
    commits at the end of its block, and aborts if the block raises or is cancelled. A step that the program holds no
    reference to is aborted.
    """

    def __init__(self, cache: _Cache, step: BegunStep) -> None:
        self._cache = cache
        self._step = step
        self._priority = 0  # the priority of the least urgent commit

    def __repr__(self) -> str:
        return f"<KvStep over {len(self._step.lengths)} sequences>"

    @property
    def lengths(self) -> list[int]:
        """The number of rows of each sequence, the step's rows included."""
        return list(self._step.lengths)

    def attend(
        self,
        layer: int,
        q: Array,
        k: Array | None = None,
        v: Array | None = None,
        *,
        c_kv: Array | None = None,
        k_pe: Array | None = None,
        out: Array | None = None,
        stream: Any = None,
    ) -> Any:
        """Append k and v to a layer, and attend to it. Launches on the calling thread, and returns the output at once.

        The shapes and dtypes of the arrays are those of `BeginStep`. The output is (batch, rows, heads_q, head_dim_v),
        or (total, heads_q, head_dim_v) for packed rows; if the step, or this layer, has ``return_lse=True``, it is an
        `AttentionOutput` with the LSE. c_kv, k_pe: take the place of k and v for a latent cache.
        stream: a CUDA stream as an int, or torch's or CuPy's object: the layer runs on it, in order. Default: the
            stream that q belongs to: its library's current stream. The output is complete in the order of the stream;
            the call waits for arrays on the host, so they are complete when it returns. All layers of a step run in
            the order of the calls. A context in another process takes no stream.
        A layer may be attended again, with the same rows. Raises `InvalidRequest` for arrays that the step was not
        begun for: the step then goes on. Raises `StaleBuffer` once the step has ended. Raises `DeadlineExceeded`,
        `LaunchError`, `ContextLost` and other errors of a launch: the step is then aborted. A context in another
        process raises `WouldBlock` in a callback of a reply, because that runs on the thread that receives answers.
        """
        arrays = {"q": q}
        if k is not None:
            arrays["k"] = k
        if v is not None:
            arrays["v"] = v
        if c_kv is not None:
            arrays["c_kv"] = c_kv
        if k_pe is not None:
            arrays["k_pe"] = k_pe
        if out is not None:
            arrays["out"] = out
        return self._step.attend(layer, arrays, stream)

    @property
    def captured(self) -> KvCapture | None:
        """The layers of this step that a CUDA graph has, for later steps. None while no layer was captured."""
        capture = self._step.capture
        return None if capture is None else KvCapture(self._cache, capture)

    def replay(self, run: Callable[[], object], *, layers: Collection[int] | None = None, stream: Any = None) -> None:
        """Call ``run`` to launch the graph of captured layers, after the tables and lengths of this step are in place.

        run: for example ``graph.replay`` of torch, or ``lambda: graph.launch(stream)`` of CuPy. It must not use the
            step, whose end waits for it: `attend`, `replay`, `commit` and `abort` raise `InvalidRequest` there.
        stream: the stream that ``run`` launches on, as in `attend`.
        layers: the layers of this graph, if they were captured into several graphs. None: all captured layers.
        These layers count as attended to. Raises `InvalidRequest` for layers that were not captured, and while the
        stream is being captured. Raises a `GpuActorsError` for an error of ``run``: the step is then aborted. Otherwise
        it raises as `attend`.
        """
        self._step.replay(run, layers, stream)

    def commit(
        self, *, deadline: float | None = None, timeout: float | None = None, priority: int = 0
    ) -> Reply[list[int]]:
        """Keep the rows. The reply returns the lengths of the sequences once the device has finished all layers.

        The reply raises `InvalidRequest` if a layer has no new rows, and while the stream of the layers is being
        captured: the step then goes on. If a launch of the step fails, the reply raises its error, and every sequence
        is as before the step.
        """
        if type(priority) is int:  # the reply raises for other types
            self._priority = min(self._priority, priority)
        return self._end(True, deadline=deadline, timeout=timeout, priority=priority)

    def abort(self) -> Reply[None]:
        """Leave every sequence as it was before the step. It takes effect whether or not the reply is awaited.

        While the stream of the layers is being captured, the reply waits for the end of the capture. The end of the
        step's block does not wait for it.
        """
        return self._end(False)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None:
            await self._leave()
            return
        try:
            await self.commit()
        except BaseException:
            await self._leave()
            raise

    def __enter__(self) -> Self:
        if asyncio._get_running_loop() is not None:
            raise WouldBlock("the end of this block would block the running event loop: use async with")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None:
            self._leave_at_once()
            return
        with undo_on_error(self._leave_at_once):
            self.commit().result()

    def __del__(self) -> None:
        if hasattr(self, "_step") and self._step.open:
            self._end(False, priority=self._priority)  # after a commit that still waits in the mailbox

    # An error here means that the context, and so the cache, is closed or lost. The program may end a capture of the
    # step's stream after the block, so the end of the block does not wait for that.

    async def _leave(self) -> None:
        with anyio.CancelScope(shield=True), contextlib.suppress(GpuActorsError):
            captured, aborted = self._step.capturing() is not None, self.abort()
            if not captured:
                await aborted

    def _leave_at_once(self) -> None:
        with contextlib.suppress(GpuActorsError):
            captured, aborted = self._step.capturing() is not None, self.abort()
            if not captured:
                aborted.result()

    def _end(self, commit: bool, **limits: Any) -> Reply[Any]:
        message, handle = EndStep(self._step.cache_number, self._step, commit), self._cache._handle
        if self._step.replaying:
            reason = "must not be ended by what replays it, for the end waits for that: raise an error to abort it"
            call: Call[Any] = Call(message, handle._cell.mailbox)
            handle._cell.mailbox.refuse(call, InvalidRequest("step", repr(self), reason))
            return Reply(call)
        reply: Reply[Any] = handle.submit(message, **limits)
        # A callback keeps the call alive if its reply is dropped.
        reply._call.when_done(_ended)
        if self._cache._count_of_step is not None:
            self._cache._count_of_step(reply)
        return reply


def _ended(_: Any) -> None:
    return


class KvCapture(Local):
    """The layers of a step that a CUDA graph has, with the tables and memory that the graph reads: `KvStep.captured`.

    Keep it as long as the graph. Its steps begin one after the other: each waits until the previous one has ended.
    """

    def __init__(self, cache: _Cache, capture: StepCapture) -> None:
        self._cache = cache
        self._capture = capture

    def __repr__(self) -> str:
        return f"<KvCapture of layers {sorted(self._capture.numbers)}>"

    @_OPTIONS
    def step(
        self,
        seqs: Sequence[KvSequence],
        *,
        deadline: float | None = None,
        timeout: float | None = None,
        priority: int = 0,
        **options: Unpack[StepKeywords],
    ) -> Reply[KvStep]:
        """Begin a step whose layers are replayed (see `KvStep.replay`), over the same or as many other sequences.

        Rows, options and layouts are those of the captured step. options: ``tokens`` and ``expect_length`` of this
        step, and NumPy arrays that replace those of the captured step, such as ``positions``, in the same shapes. Other
        options are in the graph. Raises as `KvCache.step`. Raises `InvalidRequest` also for a sequence that is longer
        than the step was planned for, and for an option that is in the graph.
        """
        _OPTIONS.check(options)
        message = self._capture.message
        value: Any
        for name, value in options.items():
            former: Any = message.options.get(name)
            if name in ("tokens", "expect_length"):
                continue
            alike = type(value) is type(former) is np.ndarray
            if not (alike and (value.shape, value.dtype) == (former.shape, former.dtype)):
                reason = "is in the graph: only NumPy arrays of the captured step may be given anew, shaped like them"
                raise InvalidRequest(name, describe(value), reason)
        message = dataclasses.replace(
            message, seqs=seqs, captured=self._capture, options={**message.options, **options}
        )
        reply = self._cache._begin_step(message, deadline, timeout, priority)
        if self._cache._count_of_step is not None:
            self._cache._count_of_step(reply)
        return reply
