"""Small KV caches on the mock device, and rows to put in them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import numpy as np
from emulated.memory import host_view
from support.service import eventually

import gpu_actors as ga
from gpu_actors.reference import attention_forward
from gpu_actors.testing import FaultPlan, MockClock

PAGE, HEADS, DIM = 8, 2, 16
LATER = 1.0


def spec(**changes: Any) -> dict[str, Any]:
    return {"num_blocks": 8, "page_size": PAGE, "kv_heads": HEADS, "head_dim": DIM, "dtype": "float32", **changes}


@contextmanager
def opened(
    options: ga.ContextOptions | None = None, isolation: Literal["process"] | None = None, **changes: Any
) -> Iterator[tuple[ga.GpuContext, ga.KvCache]]:
    """A context on mock with a cache, by default of 8 pages of 8 rows."""
    with ga.open_context("mock", options, isolation=isolation) as ctx, ctx.kv_cache(**spec(**changes)) as cache:
        yield ctx, cache


class Rows:
    """Random rows from a seed."""

    def __init__(self, seed: int = 0) -> None:
        self.rng = np.random.default_rng(seed)

    def new(self, *shape: int) -> tuple[np.ndarray, np.ndarray]:
        k, v = self.rng.standard_normal((2, *shape, HEADS, DIM)).astype(np.float32)
        return k, v

    def q(self, *shape: int, heads: int = 4) -> np.ndarray:
        return self.rng.standard_normal((*shape, heads, DIM)).astype(np.float32)


def wait(*replies: ga.Reply[Any]) -> Any:
    results = [reply.result(60.0) for reply in replies]
    return results[0] if len(results) == 1 else results


def outcome(reply: ga.Reply[Any]) -> Any:
    try:
        return reply.result(10.0)
    except ga.GpuActorsError as error:
        return error


def attention(q: np.ndarray, k: np.ndarray, v: np.ndarray, **options: Any) -> np.ndarray:
    """Causal attention of q (rows, heads, dim) to k and v (keys, kv_heads, dim)."""
    return attention_forward(q[None], k[None], v[None], **{"causal": True, **options}).out[0]


def contents(cache: ga.KvCache, seq: ga.KvSequence) -> tuple[np.ndarray, np.ndarray]:
    """The rows of a sequence, read from the pool directly."""
    state = cache._find()
    table, group = state.table(seq), state.groups[0]
    pools = (host_view(group.k_pool), host_view(group.v_pool))
    k, v = (pool[table.groups[0].pages].reshape(-1, *pool.shape[2:])[: table.length] for pool in pools)
    return k, v


def holds(cache: ga.KvCache, seq: ga.KvSequence, k: np.ndarray, v: np.ndarray) -> bool:
    rows = contents(cache, seq)
    return np.array_equal(rows[0], k) and np.array_equal(rows[1], v)


def in_flight(ctx: ga.GpuContext, launches: int) -> None:
    """Wait until so many launches are in flight."""
    eventually(lambda: ctx.stats()["kv_cache"].in_flight == launches)


def slow(plan: FaultPlan, *launches: int, **options: Any) -> tuple[MockClock, ga.ContextOptions]:
    """A clock, and options that use it and delay the end of these launches by a second."""
    clock = MockClock()
    for launch in launches:
        plan = plan.delay(LATER, launch)
    return clock, ga.ContextOptions(fault_plan=plan, clock=clock, **options)


def gathered(ctx: ga.GpuContext, requests: int) -> None:
    """Wait until the actor keeps so many requests for a launch."""
    eventually(lambda: ctx._children.cells["kv_cache"].mailbox._gathered == requests)


def taken(ctx: ga.GpuContext) -> None:
    """Wait until the actor has taken everything from its mailbox."""
    eventually(lambda: ctx.stats()["kv_cache"].queued == 0)
