"""RayWorker: the Ray actor that hosts a `ContextWorker`."""

from __future__ import annotations

import asyncio
import os
import queue
import socket
import threading
from collections import deque
from typing import Any, NamedTuple

import ray

from gpu_actors.interop.ray.channel import Parcel, Parcels, fill
from gpu_actors.isolation.context_worker import ContextWorker
from gpu_actors.isolation.launcher import WorkerSpec

__all__ = ["Place", "RayWorker"]


class Place(NamedTuple):
    """Where a worker runs. gpus: the ids of the GPUs that Ray gave it."""

    pid: int
    host: str
    node: str
    gpus: tuple[str, ...]


class RayWorker:
    """An async actor. The program sends records with `post`, and waits for records in two calls of `fetch` at a time.

    The context opens on a thread of its own, which then takes one record after the other. The actor therefore answers
    Ray while a request keeps that thread busy.
    """

    def __init__(self, order: tuple[Any, ...]) -> None:
        self._arrived: queue.SimpleQueue[Parcel] = queue.SimpleQueue()
        self._answers = _Answers()
        self._order = WorkerSpec(*order)
        threading.Thread(target=self._work, name="gpu-actors-worker", daemon=True).start()

    async def place(self) -> Place:
        context = ray.get_runtime_context()
        gpus = context.get_accelerator_ids().get("GPU", ())
        return Place(os.getpid(), socket.gethostname(), context.get_node_id(), tuple(map(str, gpus)))

    async def post(self, batch: list[tuple[Any, ...]]) -> None:
        for parcel in batch:
            self._arrived.put(Parcel(*parcel))

    async def fetch(self) -> list[tuple[Any, ...]] | None:
        """Return records for the program as soon as there are some, or None once the worker has ended."""
        return await self._answers.take()

    async def stay(self) -> None:
        """Never return. The call fails when the actor ends."""
        await asyncio.Event().wait()

    def _work(self) -> None:
        worker = ContextWorker(self._answers)
        try:
            worker.open(self._order)
            while not worker.ended:
                parcel = self._arrived.get()
                worker.received(parcel.sequence, self._answers.unpack(parcel))
        finally:
            worker.close()
            self._answers.end()


class _Answers(Parcels):
    def __init__(self) -> None:
        super().__init__(asks=False)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._out: deque[Parcel] = deque()
        self._waiters: deque[asyncio.Future[None]] = deque()
        self._ended = False

    def post(self, sequence: int, parcel: Parcel) -> None:
        self._out.append(parcel._replace(sequence=sequence))
        self._tell()

    @property
    def waiting(self) -> int:
        return len(self._out)

    def end(self) -> None:
        self._ended = True
        self._tell()

    async def take(self) -> list[tuple[Any, ...]] | None:
        loop = self._loop = asyncio.get_running_loop()
        while not self._out and not self._ended:  # `post` appends before it looks for the loop
            waiter: asyncio.Future[None] = loop.create_future()
            self._waiters.append(waiter)
            try:
                await waiter
            finally:
                if waiter in self._waiters:
                    self._waiters.remove(waiter)
        batch = fill(self._out)
        if self._out or self._ended:
            self._wake()
        return [tuple(parcel) for parcel in batch] if batch else None

    def _tell(self) -> None:
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._wake)

    def _wake(self) -> None:
        while self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.done():
                waiter.set_result(None)
                return
