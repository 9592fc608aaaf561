"""RayActor: the workplace whose generations are Ray actors, and `start_worker`."""

from __future__ import annotations

import contextlib
import os
import queue
import time
from collections.abc import Callable, Mapping
from typing import Any

import ray

from gpu_actors.distributed.remote.context import open_remote
from gpu_actors.errors import DeadlineExceeded, GpuActorsError, InvalidRequest
from gpu_actors.fields import expect, real
from gpu_actors.interop.ray.channel import Parcel, RayChannel, first_line
from gpu_actors.interop.ray.ray_worker import Place, RayWorker
from gpu_actors.isolation.launcher import Launcher, Received, WorkerSpec
from gpu_actors.isolation.spawning import Process
from gpu_actors.options import ContextOptions

__all__ = ["RayActor", "StartTimeout", "resources_for", "start_worker"]

# Calls of `fetch` in flight: while one returns, the other waits for records.
_FETCHES = 2

# Seconds to wait until Ray reports the end of an actor, and then until its process has ended.
_DYING = 10.0
_OBEYING = 1.0

# The context gives up a worker that sends nothing for this many seconds while it opens.
_LONGEST_START = 300.0


class StartTimeout(DeadlineExceeded):
    """Ray has not started a worker in time.

    asked: resources of each worker. count: how many workers. timeout: seconds.
    total, free: all resources of the cluster, and the free ones, by Ray's names.
    """

    def __init__(
        self,
        asked: Mapping[str, float],
        count: int,
        timeout: float,
        total: Mapping[str, float],
        free: Mapping[str, float],
    ) -> None:
        names = sorted({*asked, "CPU", "GPU"})
        workers = "1 Ray worker with" if count == 1 else f"{count} Ray workers with, each,"
        super().__init__(
            f"{workers} {_shown(asked, sorted(asked))} did not start within {timeout:g} s: "
            f"the cluster has {_shown(total, names)}, of which {_shown(free, names)} free"
        )
        self.asked = dict(asked)
        self.count = count
        self.timeout = timeout
        self.total = dict(total)
        self.free = dict(free)


def start_timeout(asked: Mapping[str, float], count: int, timeout: float) -> StartTimeout:
    return StartTimeout(asked, count, timeout, ray.cluster_resources(), ray.available_resources())


def _shown(resources: Mapping[str, float], names: list[str]) -> str:
    return ", ".join(f"{name} {resources.get(name, 0):g}" for name in names) or "no resources"


def resources_for(device: str, num_gpus: float | None, num_cpus: float) -> dict[str, float]:
    """The resources of a worker, by Ray's names. num_gpus: None is 1 for a device that is a GPU, and 0 for others."""
    if num_gpus is None:
        num_gpus = 0 if device in ("mock", "emulated") else 1
    asked = {"CPU": real("num_cpus", num_cpus), "GPU": real("num_gpus", num_gpus)}
    for name, amount in asked.items():
        expect(amount >= 0, f"num_{name.lower()}s", amount, "must be a number >= 0")
    return {name: amount for name, amount in asked.items() if amount}


def check_connected() -> None:
    """Raise `GpuActorsError` if Ray is not initialised, because a call would start a new cluster."""
    if not ray.is_initialized():
        raise GpuActorsError("Ray is not initialised in this process: call ray.init() first")


class RayActor(Launcher):
    """A `gpu_actors.remote.Workplace`: each generation of a worker is a Ray actor. The context restarts them, as its
    `RestartPolicy` allows. Ray does not.

    asked: "CPU" and "GPU" that Ray reserves for each. start_timeout: seconds until `StartTimeout`, at most 300.
    actor_options: further options of Ray's ``.options(...)`` for an actor, such as ``scheduling_strategy``, or a
    function that returns them. The function is called at each start.
    """

    noun: str = "Ray actor"
    patience: float = 60.0  # small records overtake large ones, which may come from another machine

    def __init__(
        self,
        asked: Mapping[str, float],
        start_timeout: float = 60.0,
        actor_options: Mapping[str, Any] | Callable[[], Mapping[str, Any]] | None = None,
    ) -> None:
        self.asked = dict(asked)
        self.start_timeout = real("start_timeout", start_timeout)
        expect(0 < self.start_timeout <= _LONGEST_START, "start_timeout", start_timeout, "must be in (0, 300] s")
        self._options = actor_options if callable(actor_options) else lambda: actor_options or {}

    def start(self, order: WorkerSpec, received: Received) -> _Connection:
        check_connected()
        return _Connection(self, order, received, dict(self._options()))


class _Connection:
    """The connection to one actor. The results of all calls to it arrive in one inbox."""

    def __init__(self, workplace: RayActor, order: WorkerSpec, received: Received, options: dict[str, Any]) -> None:
        self.pid: int | None = None
        self.name: str = "its Ray actor"
        self._workplace = workplace
        self._received = received
        self._inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._place: Place | None = None
        self._process: Process | None = None  # known for an actor on this machine alone
        self._start_by = time.monotonic() + workplace.start_timeout
        asked = workplace.asked
        amounts = {"num_cpus": asked.get("CPU", 0), "num_gpus": asked.get("GPU", 0)}
        given = {**amounts, "max_restarts": 0, "max_task_retries": 0, **options}
        try:
            made = ray.remote(RayWorker).options(**given)
        except (TypeError, ValueError) as error:
            raise InvalidRequest("actor_options", options, str(error)) from error
        self._actor: Any = made.remote(tuple(order))
        self.channel: RayChannel = RayChannel(self._actor, self._inbox.put)
        self._hear(self._actor.place.remote())
        self._fetching = 0
        for _ in range(_FETCHES):
            self._fetch()

    def serve(self, tick: Callable[[], float]) -> None:
        ended = False
        while not ended or self._fetching:
            seconds = tick()
            if seconds < 0:
                return
            if self._place is None:
                if time.monotonic() > self._start_by:
                    raise start_timeout(self._workplace.asked, 1, self._workplace.start_timeout)
                seconds = min(seconds, max(0.0, self._start_by - time.monotonic()) + 0.001)
            try:
                arrived = self._inbox.get(timeout=seconds)
            except queue.Empty:
                continue
            if arrived is _WAKE:
                continue
            if isinstance(arrived, BaseException):
                self._lost(arrived)
                return
            if isinstance(arrived, Place):
                self._started(arrived)
                continue
            self._fetching -= 1
            if arrived is None:
                ended = True  # the other call may still bring the last records: Ray does not order the two
                continue
            if not ray.is_initialized():
                self.name = "its Ray actor (Ray was shut down)"
                return
            if not ended:
                self._fetch()
            for parcel in arrived:
                whole = Parcel(*parcel)
                self._received(whole.sequence, self.channel.unpack(whole))

    def wake(self) -> None:
        self._inbox.put(_WAKE)

    def kill(self) -> None:
        self.channel.close()
        if ray.is_initialized():
            with contextlib.suppress(Exception):
                ray.kill(self._actor, no_restart=True)
        self._inbox.put(_WAKE)

    def bury(self, kill: bool) -> None:
        if ray.is_initialized():
            self._hear(self._actor.stay.remote())
            self.kill()
            self._wait_for_end(_DYING)
        self.channel.close()
        if self._process is not None:
            if not self._process.wait(_OBEYING):  # a stopped process does not react to Ray
                self._process.kill()
            os.close(self._process.pidfd)
            self._process = None

    def _wait_for_end(self, seconds: float) -> None:
        """Wait until a call fails. All calls of a dead actor fail."""
        end = time.monotonic() + seconds
        with contextlib.suppress(queue.Empty):
            while not isinstance(self._inbox.get(timeout=max(0.0, end - time.monotonic())), BaseException):
                pass

    def after_fork(self) -> None:
        if self._process is not None:
            with contextlib.suppress(OSError):
                os.close(self._process.pidfd)

    def _fetch(self) -> None:
        self._fetching += 1
        self._hear(self._actor.fetch.remote())

    def _hear(self, call: Any) -> None:
        call.future().add_done_callback(self._told)

    def _told(self, call: Any) -> None:
        error = call.exception()
        self._inbox.put(call.result() if error is None else error)

    def _started(self, place: Place) -> None:
        self._place = place
        here = place.node == ray.get_runtime_context().get_node_id()
        if here:
            with contextlib.suppress(OSError):
                self._process = Process(place.pid, os.pidfd_open(place.pid))
                self.pid = place.pid
        self.name = f"its Ray actor, process {place.pid} on {place.host},"

    def _lost(self, error: BaseException) -> None:
        if self._place is None:
            raise GpuActorsError(f"the Ray actor did not start: {first_line(error)}") from error
        self.name = f"{self.name.rstrip(',')} ({first_line(error)})"


_WAKE = object()


def start_worker(
    device: str = "auto",
    options: ContextOptions | None = None,
    *,
    num_gpus: float | None = None,
    num_cpus: float = 1,
    start_timeout: float = 60.0,
    name: str | None = None,
    actor_options: Mapping[str, Any] | None = None,
) -> open_remote:
    """Open a context in a Ray actor: ``async with start_worker("cuda:0") as ctx``, or any other way of `open_remote`.

    Entering returns a `RemoteContext`. If its actor ends, it starts another one, as the options' ``restart`` allows.
    device, options, name: as for `open_remote`. Ray chooses the GPU, so "cuda:0" is the first GPU that the worker sees.
    num_gpus, num_cpus: what Ray reserves. None: one GPU, or no GPU for "mock" and "emulated".
    start_timeout: seconds, at most 300.
    actor_options: further options of Ray's ``.options(...)``, such as ``resources``, ``runtime_env`` or
    ``scheduling_strategy``.

    Entering raises what `open_remote` raises; `StartTimeout`, with the requested resources and those of the cluster;
    and `GpuActorsError` if Ray is not initialised.
    """
    workplace = RayActor(resources_for(device, num_gpus, num_cpus), start_timeout, actor_options)
    return open_remote(device, options, workplace=workplace, name=name)
