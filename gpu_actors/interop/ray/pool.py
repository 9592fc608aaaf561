"""ray_pool: a ContextPool whose workers are Ray actors in one placement group."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Unpack

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from gpu_actors.catching import shielded, undo_on_error
from gpu_actors.distributed.pool import ContextPool, open_pool
from gpu_actors.distributed.worker_pool import PoolOptions
from gpu_actors.fields import expect, integer, real
from gpu_actors.interop.ray.ray_actor import RayActor, check_connected, resources_for, start_timeout
from gpu_actors.options import ContextOptions

__all__ = ["ray_pool"]

# Seconds between checks for cancellation while a pool waits for the cluster.
_LOOK = 0.5


class ray_pool(open_pool):
    """Open a pool of workers in Ray actors: ``async with ray_pool(2, num_gpus=1) as pool`` opens a `ContextPool`.

    num_workers: how many, each in a bundle of one placement group. device: of each worker.
    num_gpus, num_cpus: what Ray reserves for each worker. None: one GPU, or no GPU for "mock" and "emulated".
    strategy: of the placement group: "PACK", "SPREAD", "STRICT_PACK" or "STRICT_SPREAD".
    start_timeout: seconds for the group to be placed, and then for each worker to start; at most 300.
    actor_options: further options of Ray's ``.options(...)`` for the actors.
    others: those of `open_pool`.

    If a worker ends, another actor replaces it in its bundle. Leaving closes the workers and removes the group.
    Entering raises what `open_pool` raises; `StartTimeout`, with the requested resources and those of the cluster; and
    `GpuActorsError` if Ray is not initialised. After an error neither workers nor the group remain.
    """

    def __init__(
        self,
        num_workers: int,
        *,
        device: str = "auto",
        num_gpus: float | None = None,
        num_cpus: float = 1,
        strategy: str = "PACK",
        start_timeout: float = 60.0,
        options: ContextOptions | None = None,
        actor_options: Mapping[str, Any] | None = None,
        **others: Unpack[PoolOptions],
    ) -> None:
        self._count = integer("num_workers", num_workers, 1)
        self._strategy = strategy
        self._asked = resources_for(device, num_gpus, num_cpus)
        expect(bool(self._asked), "num_cpus", num_cpus, "must not be 0 without a GPU: the group would be empty")
        self._timeout = real("start_timeout", start_timeout)
        self._more = dict(actor_options or {})
        self._group: PlacementGroup | None = None
        bundles = itertools.count()

        def workplace() -> RayActor:
            bundle = next(bundles)
            return RayActor(self._asked, start_timeout, lambda: self._placed(bundle))

        super().__init__(device, workers=self._count, options=options, workplace=workplace, **others)

    async def __aenter__(self) -> ContextPool:
        check_connected()
        self._group = placement_group([self._asked] * self._count, strategy=self._strategy)
        async with undo_on_error(self._remove):
            await self._wait_for_group(self._group)
            return await super().__aenter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            await super().__aexit__(kind, error, traceback)
        finally:
            await shielded(self._remove())

    async def _wait_for_group(self, group: PlacementGroup) -> None:
        end = time.monotonic() + self._timeout
        while True:
            left = end - time.monotonic()
            if await asyncio.to_thread(group.wait, min(_LOOK, max(0.0, left))):
                return
            if left <= 0:
                raise start_timeout(self._asked, self._count, self._timeout)

    async def _remove(self) -> None:
        group, self._group = self._group, None
        if group is not None and ray.is_initialized():
            await asyncio.to_thread(remove_placement_group, group)

    def _placed(self, bundle: int) -> dict[str, Any]:
        assert self._group is not None
        where = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=bundle)
        return {"scheduling_strategy": where, **self._more}
