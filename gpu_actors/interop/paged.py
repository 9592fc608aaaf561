"""What the backends of other engines share: the context of an engine's process, and blocking attention over its pages.

An engine keeps the pages of its cache and their block tables, and calls attention from a thread of its own. Needs
torch.
"""

from __future__ import annotations

import atexit
import contextlib
import threading
from typing import Any

import torch

from gpu_actors.context import open_context
from gpu_actors.errors import Unsupported
from gpu_actors.handles.gpu_context import GpuContext
from gpu_actors.interop.contexts import check_context
from gpu_actors.process import refuse_on_loop

__all__ = ["context_for", "paged_attention", "use_context", "write_rows"]

_lock = threading.Lock()
_given: GpuContext | None = None
_opened: dict[int, GpuContext] = {}
_closing = contextlib.ExitStack()
atexit.register(_closing.close)


def use_context(context: GpuContext | None) -> None:
    """Set the context that the engines of this process use. None: `context_for` opens one. Raises `InvalidRequest`."""
    global _given
    if context is not None:
        check_context(context)
    _given = context


def context_for(device: torch.device) -> GpuContext:
    """The context for tensors on ``device``: the one given to `use_context`, or one opened on that GPU.

    A context that is opened here stays open until the process ends. Raises `Unsupported` for tensors on the host if
    `use_context` got no context, and what `open_context` raises.
    """
    if _given is not None:
        return _given
    if device.type != "cuda":
        reason = "an engine on the host needs a context that is given to register()"
        raise Unsupported("device", str(device), reason, "cuda")
    index = torch.cuda.current_device() if device.index is None else device.index
    with _lock:
        if index not in _opened:
            _opened[index] = _closing.enter_context(open_context(f"cuda:{index}"))
        return _opened[index]


def paged_attention(
    context: GpuContext,
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    out: torch.Tensor,
    **options: Any,
) -> None:
    """Compute the attention of the last rows of each sequence to its pages, into ``out``.

    q, out: (total_q, heads_q, head_dim) with ``cu_seqlens_q``, or (batch, rows, heads_q, head_dim). k_pages, v_pages:
    (num_blocks, page_size, heads_kv, head_dim). Their last axis is contiguous, and other axes have any strides.
    options: those of `gpu_actors.PagedForward`.

    Blocks the calling thread until ``out`` is complete. Raises the request's error, and `WouldBlock` on the thread of a
    running event loop, before anything is submitted.
    """
    refuse_on_loop("an engine's attention", "another thread for the engine")
    context.flash_attn.paged_forward(q, k_pages, v_pages, out=out, **options).result()


def write_rows(pages: torch.Tensor, slots: torch.Tensor, rows: torch.Tensor) -> None:
    """Write new rows, (n, heads_kv, head_dim), into pages (num_blocks, page_size, heads_kv, head_dim).

    slots: integers (n or fewer,), the place of each row: block * page_size + row in the block. A row without a slot, or
    with a negative one, is not written.
    """
    kept = slots >= 0
    slots, rows = slots[kept], rows[: len(kept)][kept]
    pages[slots // pages.shape[1], slots % pages.shape[1]] = rows
