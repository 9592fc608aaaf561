"""open_context and GpuContext: the way in.

async with gpu_actors.open_context("auto") as ctx:
    result = await ctx.flash_attn.forward(q, k, v, causal=True)
"""

from __future__ import annotations

import atexit
import itertools
import logging
import math
import os
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from types import MappingProxyType, TracebackType
from typing import Any, Literal, TypeVar, cast

import anyio
import anyio.to_thread

from gpu_actors.actors.base import ServiceActor
from gpu_actors.actors.call import Call
from gpu_actors.actors.context import ContextActor, GiveUp, Stop
from gpu_actors.actors.cudnn_like import CudnnLikeActor, CudnnLikeHandle
from gpu_actors.actors.flash_attn import FlashAttnActor, FlashAttnHandle
from gpu_actors.actors.handle import ActorHandle
from gpu_actors.actors.kv_cache import KvCacheActor
from gpu_actors.actors.mailbox import ActorStats, Mailbox
from gpu_actors.actors.nvrtc import NvrtcActor, NvrtcHandle, Prepare
from gpu_actors.actors.services import Services
from gpu_actors.devices.interface import Device, DeviceInfo
from gpu_actors.devices.select import check_device, open_device
from gpu_actors.errors import ActorStopped, DeadlineExceeded, GpuActorsError, InvalidRequest
from gpu_actors.kv_cache import OpensKvCaches
from gpu_actors.options import ContextOptions
from gpu_actors.reply import Reply, refuse_on_loop
from gpu_actors.validation.fields import real

__all__ = ["GpuContext", "Health", "open_context", "open_contexts"]

logger = logging.getLogger("gpu_actors")

T = TypeVar("T")

# Seconds of real time that closing waits for children to stop, and again for what they leave behind.
_PATIENCE = 5.0

_NOT_DRAINED = "leaving the context: not drained within %s s, so what is unanswered gets ActorStopped"

_CHILDREN: tuple[type[ServiceActor], ...] = (NvrtcActor, FlashAttnActor, CudnnLikeActor, KvCacheActor)


@dataclass(frozen=True, slots=True)
class Health:
    """Whether a context answers, and why not.

    state: "ready", "degraded" (a child is being restarted, or one of your own has stopped or is stuck), "stalled" (the
        oldest launch, or a built-in actor with what it took last, has taken half the hang timeout), "draining",
        "failed" (the device context is lost, or a built-in actor has stopped) or "stopped".
    ready: send requests here. True in the states "ready" and "degraded".
    reason: a sentence where the state is not "ready".
    actors: each child's own state. oldest_launch: seconds that the oldest unfinished launch has taken.
    """

    state: Literal["ready", "degraded", "stalled", "draining", "failed", "stopped"]
    ready: bool
    reason: str
    generation: int
    actors: Mapping[str, str]
    oldest_launch: float | None


class GpuContext(OpensKvCaches):
    """A running context. Safe to share between event loops and threads. Made by `open_context`.

    flash_attn, cudnn, nvrtc: the handles of the FlashAttnActor, the CudnnLikeActor and the NvrtcActor.
    number: this process's contexts are numbered from 1, for callers that can hold a number and no object.
    """

    def __init__(self, services: Services, root: Any) -> None:
        self.number = next(_NUMBERS)
        self.flash_attn = cast("FlashAttnHandle", services.handle(FlashAttnActor))
        self.cudnn = cast("CudnnLikeHandle", services.handle(CudnnLikeActor))
        self.nvrtc = cast("NvrtcHandle", services.handle(NvrtcActor))
        super().__init__(services)
        self._root = root
        self._stopped = False
        self._close_lock = threading.RLock()
        self._closing = False
        self._closed: threading.Event | None = None

    def actor(self, actor_type: type[ServiceActor]) -> ActorHandle:
        """The handle of a child by its type, as one named in ``ContextOptions(actors=...)``.

        Raises KeyError for a type that is no child of this context.
        """
        return self._services.handle(actor_type)

    @property
    def info(self) -> DeviceInfo:
        """The device: kind, name, arch, memory."""
        return self._services.device.info

    @property
    def generation(self) -> int:
        """1 for a new context; one more after the device context was lost."""
        return self._services.generation

    def health(self) -> Health:
        """The state of the context now. Takes no lock that a launch could hold, and never blocks."""
        services = self._services
        oldest = services.oldest_launch()
        age = None if oldest is None else services.clock.now() - oldest
        actors = {name: post.state for name, post in services.posts.items()}
        # Everything below judges this one look at the actors, for they change meanwhile.
        state, reason = self._state(age, actors)
        return Health(state, state in ("ready", "degraded"), reason, services.generation, actors, age)

    def stats(self) -> dict[str, ActorStats]:
        """Each actor's counts, by its label."""
        return {name: post.mailbox.stats() for name, post in self._services.posts.items()}

    def drain(self, timeout: float | None = None) -> Reply[None]:
        """Refuse new requests (`ActorStopped`) and wait until every request made so far is answered.

        timeout: seconds (None: no limit) after which the reply raises `DeadlineExceeded`. Draining is not undone.
        """
        services = self._services
        drained: Call[None] = Call("drain", Mailbox("drain", 1, 1))
        if timeout is not None and timeout != math.inf:
            try:
                timeout = real("timeout", timeout, "a finite number of seconds, or None")
            except InvalidRequest as error:
                drained.fail(error)
                return Reply(drained)
        services.draining = True
        posts = list(services.posts.values())
        if services.lost is None and services.failure is None and not self._stopped:
            for post in posts:
                # A request that waits for a kernel still needs the NvrtcActor.
                admit = Prepare if post.actor_type is NvrtcActor else None
                post.mailbox.close(lambda: ActorStopped("the context is draining"), admit)
        if timeout is not None:
            late = DeadlineExceeded(f"not drained within {timeout} s")

            def give_up() -> None:
                drained.fail(late)

            drained.timer = services.timers.after(timeout, give_up)
        waiting = [post.mailbox for post in posts]

        def next_idle() -> None:
            if waiting:
                waiting.pop().when_idle(next_idle)
            else:
                drained.resolve(None)

        next_idle()
        return Reply(drained)

    def close(self) -> None:
        """Answer what is unanswered with `ActorStopped`, stop every actor and release the device. Blocks briefly.

        May be called again, from a signal handler while it runs, too: that call leaves the waiting to the first one.
        """
        with self._close_lock:
            if self._closing or (self._closed is not None and self._closed.is_set()):
                return
            self._closing = True
            try:
                self._close()
            finally:  # done or interrupted
                self._closing = False
                _OPEN.pop(self.number, None)

    def after_fork(self) -> None:
        """In a child process: whoever asks or waits there must not wait for threads that stayed behind."""
        self._close_lock = threading.RLock()
        self._closing = self._stopped = True
        services = self._services
        services.failure = stayed_behind = ActorStopped("the context belongs to the process that opened it")
        services.trace.after_fork()
        services.timers.after_fork()
        for post in services.posts.values():
            post.after_fork(lambda: ActorStopped(str(stayed_behind)))

    def _close(self) -> None:
        if self._closed is None:
            self._closed = threading.Event()
            self._stopped = True
            self._root.put(Stop(self._closed))
        if self._closed.wait(_PATIENCE):
            return
        self._root.put(GiveUp())
        if not self._closed.wait(_PATIENCE):
            logger.error("the context did not close within %s s", 2 * _PATIENCE)
            self._closed.set()  # for those who ask again

    def _state(self, age: float | None, actors: Mapping[str, str]) -> tuple[Any, str]:
        services = self._services
        if services.lost is not None:
            return "failed", f"the device context is lost: {services.lost}"
        if services.failure is not None:
            return "failed", str(services.failure)
        if self._stopped:
            return "stopped", "the context is closed"
        if services.draining:
            return "draining", "the context is draining"
        gone = [f"{actor.label} has stopped" for actor in _CHILDREN if actors[actor.label] in ("stopped", "failed")]
        if gone:
            return "failed", ", ".join(gone)
        if age is not None and age > services.hang_timeout / 2:
            return "stalled", f"a launch has not finished for {age:.1f} s"
        stuck = services.stuck()
        if any(actor.label in stuck for actor in _CHILDREN):
            return "stalled", f"{', '.join(stuck)} cannot get on with its requests"
        waiting = [f"{name} is {state}" for name, state in actors.items() if state != "running"]
        waiting += [f"{name} cannot get on with its requests" for name in stuck]
        if waiting:
            return "degraded", ", ".join(waiting)
        return "ready", ""


class open_context:
    """Open a context: ``async with open_context(...) as ctx``, or ``with`` in a program without a loop.

    device: "auto" (CUDA where it is usable, else mock; logs which and why), "cuda", "cuda:1", "emulated" or "mock".
    options: see `ContextOptions`.

    Leaving waits until everything is answered, at most ``drain_timeout`` seconds, then stops; what is unanswered then
    gets `ActorStopped`. Entering raises `InvalidRequest` for a device that does not exist, `GpuActorsError` for one
    that cannot be used.
    """

    def __init__(self, device: str = "auto", options: ContextOptions | None = None) -> None:
        if options is not None and not isinstance(options, ContextOptions):
            raise InvalidRequest("options", options, "must be ContextOptions, or None for the defaults")
        self._device = check_device(device)
        self._options = options if options is not None else ContextOptions()
        self._context: GpuContext | None = None

    async def __aenter__(self) -> GpuContext:
        self._check_free()
        opening = _Opening(self._open)
        with anyio.CancelScope(shield=True):
            try:
                context = await _in_thread(opening.run)
            except BaseException:
                # A context that opens after its opener was cancelled would have nobody to close it.
                await _in_thread(opening.abandon)
                raise
        self._context = context
        return context

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        context = self._take()
        seconds = self._options.drain_timeout
        try:
            # Real seconds, not the context's clock: nobody moves a mock clock on from here.
            with anyio.move_on_after(seconds, shield=True) as scope:
                await context.drain()
            if scope.cancelled_caught:
                logger.warning(_NOT_DRAINED, seconds)
        finally:
            # A task that was cancelled while it drained closes all the same.
            with anyio.CancelScope(shield=True):
                await _in_thread(context.close)

    def __enter__(self) -> GpuContext:
        refuse_on_loop("with open_context()", "async with")
        self._check_free()
        self._context = self._open()
        return self._context

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        context = self._take()
        seconds = self._options.drain_timeout
        try:
            context.drain().result(None if seconds == math.inf else seconds)
        except TimeoutError:
            logger.warning(_NOT_DRAINED, seconds)
        finally:
            context.close()

    def make_device(self) -> Device:
        """The device that the context will own. Called on the ContextActor's thread; for tools that wrap it."""
        return open_device(self._device, self._options)

    def _open(self) -> GpuContext:
        opened: Future[Services] = Future()
        options = self._options
        ref = ContextActor.start(
            self.make_device,
            options,
            (*_CHILDREN, *options.actors),
            opened,
        )
        try:
            services = opened.result()
        except BaseException:
            ref.stop(block=False)
            raise
        context = GpuContext(services, _Root(ref))
        # Kept until it is closed, whoever else lets go of it: its requests may still be waited for.
        _OPEN[context.number] = context
        return context

    def _check_free(self) -> None:
        if self._context is not None:
            raise GpuActorsError("this open_context() has been entered already; make one for each context")

    def _take(self) -> GpuContext:
        context, self._context = self._context, None
        if context is None:
            raise GpuActorsError("this open_context() is not entered, or has been left already")
        return context


class _Opening:
    """A context on its way, which may be abandoned before it is there."""

    def __init__(self, open_it: Callable[[], GpuContext]) -> None:
        self._open = open_it
        self._lock = threading.Lock()
        self._abandoned = False
        self._context: GpuContext | None = None

    def run(self) -> GpuContext:
        context = self._open()
        with self._lock:
            self._context = context
            abandoned = self._abandoned
        if abandoned:
            context.close()
        return context

    def abandon(self) -> None:
        """Close the context; if it is not there yet, as soon as it is, on the thread that opens it."""
        with self._lock:
            self._abandoned = True
            context = self._context
        if context is not None:
            context.close()


async def _in_thread(function: Callable[[], T]) -> T:
    # With a limiter of its own: the loop's threads may all be waiting for replies that only closing would answer.
    return await anyio.to_thread.run_sync(function, limiter=anyio.CapacityLimiter(1))


class _Root:
    """Sends to the ContextActor whether or not it still runs."""

    def __init__(self, ref: Any) -> None:
        self._ref = ref

    def put(self, message: Stop | GiveUp) -> None:
        try:
            self._ref.tell(message)
        except Exception:
            # It has stopped already, so there is nothing left to wait for.
            if isinstance(message, Stop):
                message.done.set()


_NUMBERS = itertools.count(1)
_OPEN: dict[int, GpuContext] = {}


def open_contexts() -> Mapping[int, GpuContext]:
    """The contexts that are open in this process, by their number."""
    return MappingProxyType(_OPEN)


def _close_all() -> None:
    """Answer everybody who still waits when the interpreter exits."""
    for context in list(_OPEN.values()):
        context.close()


def _after_fork() -> None:
    contexts = list(_OPEN.values())
    _OPEN.clear()
    for context in contexts:
        context.after_fork()


os.register_at_fork(after_in_child=_after_fork)

# atexit runs only after the interpreter has joined every non-daemon thread, and one of those may be waiting for a
# reply of ours. Where the earlier hook of concurrent.futures is to be had, closing runs before that.
_at_exit: Callable[[Callable[[], None]], Any] = getattr(threading, "_register_atexit", atexit.register)
_at_exit(_close_all)
