"""CacheAffineRouter: a request router of Ray Serve that sends a prompt to the replica with the pages of its beginning.

Serve calls the router, and counts and limits requests. `gpu_actors.distributed.Homes` chooses the first replica, as in
a pool.
"""

from __future__ import annotations

import random
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from gpu_actors.distributed.routing import Homes, less_loaded_of_two

__all__ = ["CacheAffineRouter"]


class CacheAffineRouter(RequestRouter):  # type: ignore[misc]
    """For ``serve.deployment(request_router_config=RequestRouterConfig(request_router_class=CacheAffineRouter))``.

    A request with the keyword ``digests``, such as `gpu_actors.distributed.prefix_digests` of its prompt, goes to the
    replica that had the longest beginning of the prompt, unless that replica has too many requests. A new prefix goes
    to its place on a ring of hashes. Other requests go to the less loaded of two replicas. The router's memory is a
    hint: a wrong entry costs a prefill.

    Its ``request_router_kwargs``: slots, how many requests a replica should have at most; bound, the highest load of a
    replica relative to the mean of all. It does not apply below half of the slots.
    """

    def initialize_state(self, slots: int = 16, bound: float = 1.25) -> None:
        self._dice = random.Random()
        self._homes = Homes(self._dice, bound, slots)
        self._named: dict[str, ReplicaID] = {}

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        named = {replica.replica_id.unique_id: replica.replica_id for replica in replicas}
        for name in self._named.keys() - named.keys():
            self._homes.ring.remove(name)
            self._homes.forget(name)
        for name in named.keys() - self._named.keys():
            self._homes.ring.add(name)
        self._named = named
        super().update_replicas(replicas)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """The replica to try first, then the others. Called by Serve."""
        found = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        if not found:
            return []
        lengths = self.replica_queue_len_cache
        loads = {name: float(lengths.get(replica.replica_id) or 0) for name, replica in found.items()}
        digests = _digests(pending_request)
        chosen = self._homes.choose(digests, loads) if digests else less_loaded_of_two(loads, self._dice)
        first = found.pop(chosen)
        return [[first], list(found.values())] if found else [[first]]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        """Note which replica has the request: maybe not the one that was chosen first. Called by Serve."""
        digests = _digests(pending_request)
        if digests:
            self._homes.directory.note(digests, replica_id.unique_id)


def _digests(request: PendingRequest | None) -> list[bytes]:
    return [] if request is None else list(request.kwargs.get("digests", ()))
