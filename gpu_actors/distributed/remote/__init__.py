"""A context in a worker: in this process, a child process or anywhere that a channel reaches.

async with open_remote("mock") as ctx:  # in a child process
    reply = await ctx.flash_attn.forward(q, k, v)
    result = await ctx.run(step, cache, seq)  # step(context, cache, seq), beside the cache

`gpu_actors.isolation` has the parts that all workers share: records, their order, unanswered requests, and the worker.
"""

from __future__ import annotations

from gpu_actors.distributed.remote.context import RemoteContext, open_remote
from gpu_actors.distributed.remote.direct import InProcess
from gpu_actors.distributed.remote.faulty import Faults, Faulty
from gpu_actors.errors import WorkerLost
from gpu_actors.isolation.channel import Channel
from gpu_actors.isolation.context_worker import ContextWorker
from gpu_actors.isolation.launcher import Connection
from gpu_actors.isolation.launcher import Launcher as Workplace
from gpu_actors.isolation.launcher import WorkerSpec as Order
from gpu_actors.isolation.processes import ChildProcess

__all__ = [
    "Channel",
    "ChildProcess",
    "Connection",
    "ContextWorker",
    "Faults",
    "Faulty",
    "InProcess",
    "Order",
    "RemoteContext",
    "WorkerLost",
    "Workplace",
    "open_remote",
]
