"""GpuContext: a program's handle of a running context. Also the contexts that are open in this process."""

from __future__ import annotations

import atexit
import contextlib
import functools
import itertools
import logging
import math
import os
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from types import MappingProxyType
from typing import Any, Unpack, cast

import anyio
import numpy as np

from gpu_actors.actors.context import ContextActor, Run
from gpu_actors.actors.cudnn_like import CudnnLikeActor, CudnnLikeHandle
from gpu_actors.actors.flash_attn import FlashAttnActor, FlashAttnHandle
from gpu_actors.actors.kernels import CompilesKernels, KernelActor
from gpu_actors.actors.kv_cache import KvCacheActor
from gpu_actors.actors.nvrtc import NvrtcActor, NvrtcHandle
from gpu_actors.actors.probing import probe
from gpu_actors.catching import undo_on_error
from gpu_actors.devices.interface import Device, DeviceInfo
from gpu_actors.errors import ActorStopped, DeadlineExceeded, InvalidRequest
from gpu_actors.fields import real
from gpu_actors.handles.health import Health, examine
from gpu_actors.handles.kv_cache import KvCache
from gpu_actors.kernels.variants import Prepare
from gpu_actors.kv.requests import KvCacheKeywords, KvCacheSpec
from gpu_actors.options import ContextOptions
from gpu_actors.process import Local
from gpu_actors.runtime.actor import ServiceActor
from gpu_actors.runtime.call import Call
from gpu_actors.runtime.children import Children
from gpu_actors.runtime.handle import ActorHandle, CallOptions
from gpu_actors.runtime.mailbox import ActorStats, Mailbox
from gpu_actors.runtime.opening import run_in_thread
from gpu_actors.runtime.pykka_base import ActorDeadError
from gpu_actors.runtime.reply import Reply, need_asyncio
from gpu_actors.runtime.watch import Watch

__all__ = ["BUILT_IN", "GpuContext", "open_contexts", "registered", "start_context"]

logger: logging.Logger = logging.getLogger("gpu_actors")

_KV_CACHE = CallOptions(KvCacheSpec, KvCacheKeywords)

# Seconds of real time that closing waits for children to stop, and again after it gave up on them.
_CLOSE_SECONDS = 5.0

_NOT_DRAINED = "leaving the context: not drained within %s s, so what is unanswered gets ActorStopped"

BUILT_IN: tuple[type[ServiceActor], ...] = (NvrtcActor, FlashAttnActor, CudnnLikeActor, KvCacheActor, KernelActor)
"""The actors that every context has, in the order in which they start."""


class GpuContext(Local, CompilesKernels):
    """A running context. Safe to share between event loops and threads. Made by `open_context`.

    flash_attn, cudnn, nvrtc: the handles of the FlashAttnActor, the CudnnLikeActor and the NvrtcActor.
    number: the number of the context in this process, from 1, for callers that can keep a number but no object.
    """

    def __init__(self, children: Children, root: Any) -> None:
        self.number: int = next(_NUMBERS)
        self.flash_attn: FlashAttnHandle = cast("FlashAttnHandle", children.handle(FlashAttnActor))
        self.cudnn: CudnnLikeHandle = cast("CudnnLikeHandle", children.handle(CudnnLikeActor))
        self.nvrtc: NvrtcHandle = cast("NvrtcHandle", children.handle(NvrtcActor))
        self._children = children
        self._root = root
        self._watch = Watch(children, self._probe)
        children.on_failing = self._watch.probe_while_failing
        self._stopped = False
        self._close_lock = threading.RLock()
        self._closing = False
        self._closed: threading.Event | None = None

    def __repr__(self) -> str:
        return f"<{type(self).__name__} #{self.number} on {self.info.name}, {self.health().state}>"

    def actor(self, actor_type: type[ServiceActor]) -> ActorHandle:
        """The handle of a child by its type, such as one given in ``ContextOptions(actors=...)``.

        Raises KeyError if this context has no child of the type.
        """
        handle: ActorHandle = self._children.handle(actor_type)
        return handle

    @property
    def info(self) -> DeviceInfo:
        """The device: kind, name, arch, memory."""
        return self._children.device.info

    @property
    def generation(self) -> int:
        """1 for a new context; one more each time the device context was lost."""
        return self._children.generation

    def health(self) -> Health:
        """The state of the context now. Takes no lock that a launch could hold, and never blocks."""
        return examine(self._children, self._stopped)

    def stats(self) -> dict[str, ActorStats]:
        """Each actor's counts, by the actor's label."""
        return {name: cell.mailbox.stats() for name, cell in self._children.cells.items()}

    def empty(self, shape: int | tuple[int, ...], dtype: Any = np.float32) -> np.ndarray[Any, Any]:
        """An uninitialised NumPy array for the operands and the ``out`` of requests.

        With ``isolation="process"`` the array lies in memory that the context's process shares, so requests read and
        write it without a copy. It outlives that process, and is freed like any array. Otherwise it is ``np.empty``.
        dtype: a dtype of NumPy or ml_dtypes, but not object.
        """
        return np.empty(shape, dtype)

    @_KV_CACHE
    def kv_cache(self, **options: Unpack[KvCacheKeywords]) -> KvCache:
        """A paged KV cache on this context's device. The arguments are those of `KvCacheSpec`.

        Entering it (``async with``, or ``with`` in a program without a loop) makes the pool, and raises
        `InvalidRequest`, `Unsupported` or `OutOfDeviceMemory`. Leaving it frees the pool.
        """
        _KV_CACHE.check(options)
        return KvCache(self._children, self._children.handle(KvCacheActor), KvCacheSpec(**options))

    def probe(self, timeout: float | None = None) -> Reply[None]:
        """Prove that the device makes progress: launch attention of one row by one key, ahead of waiting requests.

        The reply returns None once the launch has succeeded, else raises the error of the launch. On a mock device that
        does not compute, the probe succeeds. An offline context whose caches lack the kernel fills and copies device
        memory instead. ``stats()`` counts the launch. Its success does not reset the count of consecutive failures
        (``degraded_after``), but makes a context that was not ready because of them ready until one more request fails.

        timeout: seconds (None: ``default_timeout``) after which the reply raises `DeadlineExceeded`.
        """
        return Reply(self._probe(timeout))

    def _probe(self, timeout: float | None) -> Call[None]:
        return probe(self._children, timeout)

    def drain(self, timeout: float | None = None) -> Reply[None]:
        """Refuse new requests (`ActorStopped`) and wait until every request made so far is answered.

        It also waits for launches whose requests have passed their deadlines: they may still write to ``out``.

        timeout: seconds (None: no limit) after which the reply raises `DeadlineExceeded`. Draining continues.
        """
        if timeout is not None and timeout != math.inf:
            try:
                timeout = real("timeout", timeout, "a finite number of seconds, or None")
            except InvalidRequest as error:
                refused = self._drained_by(None)
                refused.fail(error)
                return Reply(refused)
        return self._drain(timeout, launches=True)

    def _drain(self, timeout: float | None, launches: bool) -> Reply[None]:
        children = self._children
        children.draining = True
        cells = list(children.cells.values())
        if children.lost is None and children.failure is None and not self._stopped:
            for cell in cells:
                # A request that waits for a kernel still needs the NvrtcActor.
                admit = Prepare if cell.actor_type is NvrtcActor else None
                cell.mailbox.close(lambda: ActorStopped("the context is draining"), admit)
        drained = self._drained_by(timeout)
        waiting = [cell.mailbox for cell in reversed(cells)]

        def wait_for(index: int) -> None:
            if index < len(waiting):
                waiting[index].when_idle(functools.partial(wait_for, index + 1), launches)
            else:
                drained.resolve(None)

        wait_for(0)
        return Reply(drained)

    def _drained_by(self, timeout: float | None) -> Call[None]:
        call: Call[None] = Call("drain", Mailbox("drain", 1, 1))
        self._limit(call, timeout, f"not drained within {timeout} s")
        return call

    def _limit(self, call: Call[Any], timeout: float | None, late: str) -> None:
        """Fail a call with `DeadlineExceeded` if it is not answered within ``timeout`` seconds. late: the message."""
        if timeout is not None and timeout != math.inf:

            def give_up() -> None:
                call.fail(DeadlineExceeded(late))

            call.timer = self._children.timers.after(timeout, give_up)

    async def aclose(self) -> None:
        """Wait until every request made so far is answered, at most ``drain_timeout`` seconds, then `close`.

        It does not wait for a launch whose requests have passed their deadlines.
        May be called again. Use it for a context from ``await open_context()``, as in a notebook.
        """
        need_asyncio("aclose()")
        seconds = self._children.options.drain_timeout
        try:
            # Real seconds, not the context's clock: nothing moves a mock clock here.
            with anyio.move_on_after(seconds, shield=True) as scope:
                await self._drain(None, launches=False)
            if scope.cancelled_caught:
                logger.warning(_NOT_DRAINED, seconds)
        finally:
            # A task that is cancelled while it drains still closes the context.
            with anyio.CancelScope(shield=True):
                await run_in_thread(self.close)

    def _leave(self) -> None:
        """`aclose` for a program without a loop."""
        seconds = self._children.options.drain_timeout
        try:
            self._drain(None, launches=False).result(None if seconds == math.inf else seconds)
        except TimeoutError:
            logger.warning(_NOT_DRAINED, seconds)
        finally:
            self.close()

    def close(self) -> None:
        """Answer every open request with `ActorStopped`, stop every actor and release the device. Blocks briefly.

        May be called again, also from a signal handler that interrupts it: only the first call waits.
        """
        with self._close_lock:
            if self._closing or (self._closed is not None and self._closed.is_set()):
                return
            self._closing = True
            try:
                self._close()
            finally:  # an interrupt may end it too
                self._closing = False
                _OPEN.pop(self.number, None)

    def after_fork(self) -> None:
        """Called in a forked child: end all waiting there, because the context's threads exist only in the parent."""
        self._close_lock = threading.RLock()
        self._closing = self._stopped = True
        children = self._children
        children.failure = stayed_behind = ActorStopped("the context belongs to the process that opened it")
        children.trace.after_fork()
        children.timers.after_fork()
        for cell in children.cells.values():
            cell.after_fork(lambda: ActorStopped(str(stayed_behind)))

    def _close(self) -> None:
        if self._closed is None:
            self._closed = threading.Event()
            self._stopped = True
            self._root.stop(self._closed)
        if self._closed.wait(_CLOSE_SECONDS):
            return
        self._root.kill()
        if not self._closed.wait(_CLOSE_SECONDS):
            logger.error("the context did not close within %s s", 2 * _CLOSE_SECONDS)
            self._closed.set()  # later calls must not wait again


def start_context(open_device: Callable[[], Device], options: ContextOptions) -> GpuContext:
    """Start a ContextActor in this process, and wait until its children are ready. Raises the error of opening.

    open_device: called on the ContextActor's thread.
    """
    opened: Future[Children] = Future()
    ref = ContextActor.start(open_device, options, (*BUILT_IN, *options.actors), opened)
    with undo_on_error(lambda: ref.stop(block=False)):
        children = opened.result()
    return registered(GpuContext(children, _Root(ref)))


def registered(context: GpuContext) -> GpuContext:
    """Keep the context until it is closed, even without another reference: a caller may wait for its requests."""
    _OPEN[context.number] = context
    return context


class _Root:
    """Closes a ContextActor. The actor may have stopped already."""

    def __init__(self, ref: Any) -> None:
        self._ref = ref

    def stop(self, done: threading.Event) -> None:
        """Tell the actor to close, and to set ``done`` afterwards."""
        try:
            self._ref.tell(Run(lambda actor: actor.begin_stop(done)))
        except ActorDeadError:  # the actor has stopped already
            done.set()

    def kill(self) -> None:
        """Tell the actor to leave children behind that do not stop."""
        with contextlib.suppress(ActorDeadError):  # the actor has stopped already
            self._ref.tell(Run(ContextActor.give_up))


_NUMBERS = itertools.count(1)
_OPEN: dict[int, GpuContext] = {}


def open_contexts() -> Mapping[int, GpuContext]:
    """The contexts that are open in this process, by their number."""
    return MappingProxyType(_OPEN)


def _close_all() -> None:
    """Close every context when the interpreter exits, so that no request waits for ever."""
    for context in list(_OPEN.values()):
        context.close()


def _after_fork() -> None:
    contexts = list(_OPEN.values())
    _OPEN.clear()
    for context in contexts:
        context.after_fork()


os.register_at_fork(after_in_child=_after_fork)

# atexit runs only after the interpreter has joined every non-daemon thread, and such a thread may wait for a reply of a
# context. The hook that concurrent.futures uses, where it exists, runs before those threads are joined.
_at_exit: Callable[[Callable[[], None]], Any] = getattr(threading, "_register_atexit", atexit.register)
_at_exit(_close_all)
