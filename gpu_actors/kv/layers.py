"""The layers of a cache: kernels know one layer, and launches that move whole rows run them for each."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from gpu_actors.arrays.adopt import dtype_of
from gpu_actors.devices.interface import Buffer, Params, Step, StepPack
from gpu_actors.kernels.append import AppendProblem

__all__ = ["before_pages", "by_page", "each_layer", "pages_shape"]

_LAYERED = tuple(f"{side}{of}" for side in "kv" for of in ("", "_cache", "_pages"))


def each_layer(steps: Iterable[Step], layers: int) -> tuple[Step, ...]:
    """The steps, run for each of the layers. Operands that layers have of their own have an axis of them first."""
    if layers == 1:
        return tuple(steps)
    pairs = itertools.product(steps, range(layers))
    return tuple([step._replace(pack=functools.partial(_pack_layer, step.pack, layer)) for step, layer in pairs])


def pages_shape(pool: AppendProblem, count: int, dim: int, layers: int) -> tuple[int, ...]:
    """The shape of so many pages with rows of ``dim`` columns, in all layers."""
    of_layer = count, pool.page_size, pool.heads_kv, dim
    return of_layer if layers == 1 else (layers, *of_layer)


def by_page(array: Any, layers: int) -> Any:
    """An array of pages with their axis first."""
    return array if layers == 1 else np.moveaxis(array, 1, 0)


def before_pages(layers: int) -> tuple[slice, ...]:
    """What stands before a page in the index of an array of pages."""
    return () if layers == 1 else (slice(None),)


def _pack_layer(pack: StepPack, layer: int, buffers: Mapping[str, Buffer]) -> Params:
    return pack({**buffers, **{name: _of_layer(buffers[name], layer) for name in _LAYERED if name in buffers}})


def _of_layer(buffer: Buffer, layer: int) -> Buffer:
    address = buffer.address + layer * buffer.strides[0] * dtype_of(buffer.dtype).itemsize
    return buffer._replace(address=address, shape=buffer.shape[1:], strides=buffer.strides[1:])
