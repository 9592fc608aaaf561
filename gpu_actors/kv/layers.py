"""The layers of a cache: a kernel handles one layer, and a launch that moves whole rows runs its steps for each layer.

Layers that differ have operands of their own. Their launch is joined from one launch for each layer or group.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from gpu_actors.arrays.adopt import dtype_of
from gpu_actors.devices.interface import Buffer, Launch, Outputs, OutputSpec, Params, Step, StepPack
from gpu_actors.kernels.append import AppendProblem

__all__ = ["before_pages", "by_page", "each_layer", "join_launches", "pages_shape"]

_Oracle: TypeAlias = Callable[[Mapping[str, Any]], Outputs]

_LAYERED = tuple(f"{side}{of}" for side in "kv" for of in ("", "_cache", "_pages"))


def each_layer(steps: Iterable[Step], layers: int) -> tuple[Step, ...]:
    """The steps, run for each of the layers. Operands that differ between layers begin with an axis of the layers."""
    if layers == 1:
        return tuple(steps)
    pairs = itertools.product(steps, range(layers))
    return tuple([step._replace(pack=functools.partial(_pack_layer, step.pack, layer)) for step, layer in pairs])


def join_launches(parts: Iterable[tuple[Launch, Mapping[str, str]]]) -> Launch:
    """Join launches into one that runs them in order. Each part maps its operands' names to those in the whole.

    Operands of several parts may share a name if they are the same array. No part has scratch memory.
    """
    inputs: dict[str, Any] = {}
    outputs: dict[str, OutputSpec] = {}
    steps: list[Step] = []
    updates: list[str] = []
    oracles: list[tuple[_Oracle, Mapping[str, str]]] = []
    for part, names in parts:
        inputs |= {names[name]: array for name, array in part.inputs.items()}
        outputs |= {names[name]: spec for name, spec in part.outputs.items()}
        steps += [step._replace(pack=functools.partial(_pack_named, step.pack, names)) for step in part.steps]
        updates += [names[name] for name in part.updates]
        oracles.append((part.oracle, names))
    return Launch(
        None, inputs, outputs, functools.partial(_joined_oracle, oracles), tuple(steps), updates=tuple(updates)
    )


def pages_shape(pool: AppendProblem, count: int, dim: int, layers: int) -> tuple[int, ...]:
    """The shape of ``count`` pages with rows of ``dim`` columns, in all layers."""
    of_layer = count, pool.page_size, pool.heads_kv, dim
    return of_layer if layers == 1 else (layers, *of_layer)


def by_page(array: Any, layers: int) -> Any:
    """An array of pages, with the axis of pages first."""
    return array if layers == 1 else np.moveaxis(array, 1, 0)


def before_pages(layers: int) -> tuple[slice, ...]:
    """The part of an index into an array of pages that comes before the page."""
    return () if layers == 1 else (slice(None),)


def _pack_named(pack: StepPack, names: Mapping[str, str], buffers: Mapping[str, Buffer]) -> Params:
    return pack({name: buffers[known] for name, known in names.items()})


def _joined_oracle(parts: Sequence[tuple[_Oracle, Mapping[str, str]]], inputs: Mapping[str, Any]) -> Outputs:
    outputs: dict[str, Any] = {}
    for oracle, names in parts:
        results = oracle({name: inputs[known] for name, known in names.items() if known in inputs})
        outputs |= {names[name]: array for name, array in results.items()}
    return outputs


def _pack_layer(pack: StepPack, layer: int, buffers: Mapping[str, Buffer]) -> Params:
    return pack({**buffers, **{name: _of_layer(buffers[name], layer) for name in _LAYERED if name in buffers}})


def _of_layer(buffer: Buffer, layer: int) -> Buffer:
    address = buffer.address + layer * buffer.strides[0] * dtype_of(buffer.dtype).itemsize
    return buffer._replace(address=address, shape=buffer.shape[1:], strides=buffer.strides[1:])
