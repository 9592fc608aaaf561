"""PagedAttention: attention over the pages of Transformers' continuous batching, in place.

    new keys ──Transformers' own write──> its pages <──block table, lengths── a prepared request, on torch's stream

The layers of a group (full attention, or sliding windows) have their keys in the same places. For each forward pass
Transformers passes the place of each key that a group reads. The first layer of the group makes block tables of these
places, and its other layers use them too.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from gpu_actors.actors.prepared import PreparedAttention
from gpu_actors.attention.requests import FlashForward, PagedForward
from gpu_actors.handles.gpu_context import GpuContext
from gpu_actors.interop.torch_attention import rows_of
from gpu_actors.kernels.forward_sm90 import TMA_ALIGNMENT

__all__ = ["PagedAttention"]

_MOST_PLANS = 64


@dataclasses.dataclass(eq=False)
class _Step:
    """What the layers of a group share in one forward pass.

    read_index: Transformers' list of the pass. It is kept, so that another list cannot have its identity.
    page_size: keys of a page of the block table, 0 if the keys do not come from pages.
    arrays: cu_seqlens and tables, by the names of the request's fields.
    """

    read_index: Sequence[torch.Tensor]
    page_size: int
    longest_q: int
    longest_k: int
    arrays: dict[str, torch.Tensor]


@dataclasses.dataclass(eq=False)
class _Plan:
    """A prepared request, the arrays that it reads in each run, and the step whose contents they hold."""

    prepared: PreparedAttention
    arrays: dict[str, torch.Tensor]
    step: _Step


class PagedAttention:
    """The attention of a context over one paged cache. One thread at a time may use it.

    Keys come from one of three places:

    - The new rows alone, where no sequence has older keys.
    - The pages. A sliding window is a ring of keys, whose first one may lie anywhere in a page. Its block table
      therefore has each key as a page of one.
    - A copy that Transformers makes, for layers with a sliding window, if a sequence that is longer than the window has
      several new rows. Its new keys then overwrite older ones that the first of these rows see.
    """

    def __init__(self, context: GpuContext) -> None:
        self.context = context
        self._steps: dict[int, _Step] = {}
        self._plans: dict[Any, _Plan] = {}
        # A CUDA graph reads the memory of the plans that it was captured with, so they are kept.
        self._captured: set[_Plan] = set()

    def attend(
        self,
        allocator: Any,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sinks: torch.Tensor | None,
        options: dict[str, Any],
        given: dict[str, Any],
    ) -> torch.Tensor:
        """Write a layer's new keys and values, and attend to all of them: (rows, heads, dim) like q.

        allocator: Transformers' `CacheAllocator` of the layer's group. q, k, v: the new rows (rows, heads, dim).
        sinks: (heads,). options: of the requests. given: what Transformers passes to attention, by its names:
        ``read_index`` and ``write_index`` have a tensor for each group, ``cu_seq_lens_k`` and ``max_length_k`` an entry
        for each type of layer. Raises what `FlashAttnHandle.prepare` and `PreparedAttention.run` raise.
        """
        read_index, write = given["read_index"], given["write_index"][allocator.index]
        read = read_index[allocator.index]
        step = self._steps.get(allocator.index)
        # A CUDA graph is captured from a second pass over the same lists, and each replay must make its own tables.
        if step is None or step.read_index is not read_index or layer == allocator.layer_indices[0]:
            step = self._steps[allocator.index] = _step(allocator, given)
        if step.page_size:
            # With nothing to read, Transformers writes and copies nothing.
            allocator.update(k, v, layer, read[:0], write)
            k, v = _pages(allocator, layer, step.page_size)
        else:
            k, v = (rows_of(x) for x in allocator.update(k, v, layer, read, write))
        q = rows_of(q)
        out = q.new_empty((*q.shape[:2], v.shape[-1]))
        with torch.cuda.device(q.device) if q.is_cuda else contextlib.nullcontext():
            stream = torch.cuda.current_stream() if q.is_cuda else None
            plan = self._plan(allocator.index, step, q, k, v, sinks, options)
            plan.prepared.run(q, k, v, out=out, stream=stream)
            if q.is_cuda and torch.cuda.is_current_stream_capturing():
                self._captured.add(plan)
        return out

    def _plan(
        self,
        group: int,
        step: _Step,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sinks: torch.Tensor | None,
        options: dict[str, Any],
    ) -> _Plan:
        layouts = tuple((x.shape, x.stride(), x.dtype, x.data_ptr() % TMA_ALIGNMENT) for x in (q, k, v))
        shapes = tuple(array.shape for array in step.arrays.values())
        lengths = step.longest_q, step.longest_k if not step.page_size else None
        key = (self.context.generation, group, layouts, shapes, lengths, sinks is None, tuple(options.items()))
        plan = self._plans.pop(key, None)
        changed = {} if plan is not None and plan.step is step else dict(step.arrays)
        if sinks is not None:
            changed["sinks"] = sinks.detach().float()
        if plan is None or (changed and not _read_each_run(q)):
            arrays = {name: array.clone() for name, array in {**step.arrays, **changed}.items()}
            plan = _Plan(self._prepare(step, q, k, v, {**arrays, **options}), arrays, step)
        else:
            for name, array in changed.items():
                plan.arrays[name].copy_(array)
        plan.step = step
        self._plans[key] = plan
        while len(self._plans) > _MOST_PLANS:
            del self._plans[next(iter(self._plans))]
        return plan

    def _prepare(
        self, step: _Step, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, fields: dict[str, Any]
    ) -> PreparedAttention:
        request: FlashForward | PagedForward
        if step.page_size:
            request = PagedForward(q=q, k_cache=k, v_cache=v, max_seqlen_q=step.longest_q, **fields)
        else:
            request = FlashForward(q, k, v, max_seqlen_q=step.longest_q, max_seqlen_k=step.longest_k, **fields)
        return self.context.flash_attn.prepare(request).result()


def _step(allocator: Any, given: dict[str, Any]) -> _Step:
    """What the layers of an allocator's group share in the pass with these arguments. The step owns its tensors."""
    read_index, write = given["read_index"], given["write_index"][allocator.index]
    read, ends_k = read_index[allocator.index], given["cu_seq_lens_k"][allocator.layer_type]
    longest_k = given["max_length_k"][allocator.layer_type]
    arrays = {"cu_seqlens_q": given["cu_seq_lens_q"].to(torch.int32, copy=True)}
    page_size = _page_size(allocator, read, longest_k)
    if page_size:
        if allocator.layer_type == "sliding_attention":
            # The places of the new keys are in the other index.
            read = read.masked_scatter(read == allocator.sentinel_index, write)
        arrays["block_table"] = _block_table(read, ends_k, longest_k, page_size)
        arrays["cache_seqlens"] = ends_k.diff().to(torch.int32)
    else:
        arrays["cu_seqlens_k"] = ends_k.to(torch.int32, copy=True)
    return _Step(read_index, page_size, given["max_length_q"], longest_k, arrays)


def _read_each_run(q: torch.Tensor) -> bool:
    """Whether each run reads a request's arrays anew. Arrays on the host are read when the request is prepared."""
    return bool(q.is_cuda)


def _page_size(allocator: Any, read: torch.Tensor, longest_k: int) -> int:
    """The keys of a page, if a group's keys can be read from pages, else 0."""
    if read.numel() == 0:
        return 0
    if allocator.layer_type == "sliding_attention":
        # If a sequence's keys fit into its ring, all that its rows see are there after the write.
        return 1 if longest_k <= allocator.sliding_window else 0
    return int(allocator.tokens_per_page) if allocator.supports_block_table else 0


def _block_table(read: torch.Tensor, ends_k: torch.Tensor, longest_k: int, page_size: int) -> torch.Tensor:
    """The pages of each sequence, int32 (sequences, columns). read: the places of the keys, sequence after sequence.

    The number of columns is a power of two, so that few plans serve all steps.
    """
    columns = 1 << (-(-longest_k // page_size) - 1).bit_length()
    firsts = ends_k[:-1, None] + torch.arange(0, columns * page_size, page_size, device=read.device)
    return (read[firsts.minimum(ends_k[1:, None] - 1).clamp(min=0)] // page_size).to(torch.int32)


def _pages(allocator: Any, layer: int, page_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A layer's keys and values (pages, page_size, heads, dim), without a copy. Layers lie side by side in memory."""
    keys, values = allocator._kv_token_views[layer]
    count = min(len(keys), len(values)) // page_size
    k, v = (x[: count * page_size].view(count, page_size, *x.shape[1:]) for x in (keys, values))
    return k, v
