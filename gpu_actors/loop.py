"""Whether this thread runs an event loop, which must not be blocked."""

from __future__ import annotations

import asyncio

from gpu_actors.errors import WouldBlock

__all__ = ["refuse_on_loop"]


def refuse_on_loop(call: str, instead: str) -> None:
    """Raise `WouldBlock` on the thread of a running event loop. call, instead: what was done there, and what to do."""
    if asyncio._get_running_loop() is not None:
        raise WouldBlock(f"{call} would block the running event loop; use {instead}")
