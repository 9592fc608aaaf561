"""Workers in Ray actors, and contexts in Ray Serve's replicas. Ray places, starts and watches the processes.

async with ray_pool(2, num_gpus=1) as pool:  # a ContextPool
    reply = await pool.ask(lambda ctx: ctx.flash_attn.forward(q, k, v))

Needs ray (the extra "ray"). Import `router` separately, because it needs Serve (the extra "ray-serve").
"""

from __future__ import annotations

from gpu_actors.interop.ray.pool import ray_pool
from gpu_actors.interop.ray.ray_actor import RayActor, StartTimeout, start_worker
from gpu_actors.interop.ray.serve import ContextDeployment, Outcome, as_value, ask

__all__ = [
    "ContextDeployment",
    "Outcome",
    "RayActor",
    "StartTimeout",
    "as_value",
    "ask",
    "ray_pool",
    "start_worker",
]
