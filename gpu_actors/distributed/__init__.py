"""Several contexts as one service.

async with open_pool("mock", workers=4) as pool:
    reply = await pool.ask(lambda ctx: ctx.flash_attn.forward(q, k, v))
    async with pool.kv_cache(num_blocks=256, page_size=16, kv_heads=8, head_dim=64) as cache:
        seq = await cache.create(tokens)
"""

from __future__ import annotations

from gpu_actors.distributed.budget import RetryBudget
from gpu_actors.distributed.context_parallel import context_split, context_split_backward, zigzag
from gpu_actors.distributed.key_split import KeySplit
from gpu_actors.distributed.member import Member, WorkerStats
from gpu_actors.distributed.migration import copy_sequence, exported_pages, move_sequence
from gpu_actors.distributed.pool import ContextPool, open_pool
from gpu_actors.distributed.pooled_cache import PooledKvCache, PooledSequence
from gpu_actors.distributed.routing import Directory, Homes, Ring, less_loaded_of_two
from gpu_actors.distributed.sharded_cache import ShardedKvCache, ShardedSequence
from gpu_actors.distributed.sharded_step import ShardedStep
from gpu_actors.distributed.tensor_parallel import head_split, head_split_backward
from gpu_actors.distributed.worker_pool import PoolOptions, PoolStats
from gpu_actors.kv.prefix import prompt_digests as prefix_digests

__all__ = [
    "ContextPool",
    "Directory",
    "Homes",
    "KeySplit",
    "Member",
    "PoolOptions",
    "PoolStats",
    "PooledKvCache",
    "PooledSequence",
    "RetryBudget",
    "Ring",
    "ShardedKvCache",
    "ShardedSequence",
    "ShardedStep",
    "WorkerStats",
    "context_split",
    "context_split_backward",
    "copy_sequence",
    "exported_pages",
    "head_split",
    "head_split_backward",
    "less_loaded_of_two",
    "move_sequence",
    "open_pool",
    "prefix_digests",
    "zigzag",
]
