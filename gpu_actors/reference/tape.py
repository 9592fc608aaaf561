"""Tape: the values that an evaluation has computed, and functions that evaluation and differentiation share."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from gpu_actors.attention.key_mask import KeyMask
from gpu_actors.attention.mha import Mask
from gpu_actors.attention.philox import dropout_keep
from gpu_actors.graph.ops import Node
from gpu_actors.reference.arguments import Array

if TYPE_CHECKING:
    from gpu_actors.graph.graph import OperationGraph

__all__ = ["Array", "Tape", "erf", "keep_factors", "listed_of", "seen_product", "visible_of"]


@dataclass(slots=True)
class Tape:
    """The value of every computed tensor, by uid, and the settings of the computation.

    step: applied to every float result: the identity, or a rounding for the results that tolerances are measured by.
    masked: the keys that rows see, (rows, keys), by the uid of the scores that a mask wrote.
    seen: the same by the uid of weights that a softmax made of such scores; hidden weights are 0.
    """

    graph: OperationGraph
    dtype: npt.DTypeLike
    step: Callable[[Array], Array]
    values: dict[int, Array] = field(default_factory=dict)
    masked: dict[int, Array] = field(default_factory=dict)
    seen: dict[int, Array] = field(default_factory=dict)


_erf = np.frompyfunc(math.erf, 1, 1)


def erf(x: Array) -> Array:
    result: Array = np.asarray(_erf(x)).astype(x.dtype)
    return result


def visible_of(node: Node, shape: tuple[int, ...]) -> Array:
    """(rows, keys): whether a mask node lets a row see a key."""
    mask = Mask(node["kind"], node["width"])
    rows, keys = shape[-2:]
    seen = KeyMask(causal=mask.is_causal, alignment=node["alignment"], window_size=mask.window)
    visible = seen.visible_keys(np.arange(rows), rows, keys)
    assert visible is not None  # graphs have no mask that hides nothing
    return visible


def listed_of(node: Node, shape: tuple[int, ...], lists: Sequence[Array]) -> Array:
    """(batch, heads, rows, keys): which scores a block mask keeps. lists: its node's counts and indices."""
    rows, keys = node["block_size"]
    blocks = tuple(-(-extent // step) for extent, step in zip(shape[2:], (rows, keys), strict=True))
    listed = np.zeros((*shape[:2], *blocks), bool)
    ways = 2 if len(lists) == (8 if node["transposed"] else 4) else 1
    for counts, indices in zip(lists[: 2 * ways : 2], lists[1 : 2 * ways : 2], strict=True):
        counts = np.broadcast_to(counts, (*shape[:2], blocks[0]))
        indices = np.broadcast_to(indices, (*shape[:2], *blocks))
        for place in np.ndindex(counts.shape):
            listed[place][indices[place][: counts[place]]] = True
    return listed.repeat(rows, axis=2).repeat(keys, axis=3)[:, :, : shape[2], : shape[3]]


def seen_product(a: Array, b: Array, visible: Array | None) -> Array:
    """a @ b. A NaN or infinity of b's row k reaches only the rows i of a with visible[i, k].

    visible: (rows of a, rows of b), or None if every row sees every row. a is 0 for hidden pairs.
    """
    good = np.isfinite(b)
    if visible is None or good.all():
        result: Array = a @ b
        return result
    # Values that are hidden from a row must not enter its sums: 0 * NaN is NaN.
    total: Array = a @ np.where(good, b, 0)
    for key in np.flatnonzero(~good.all(axis=tuple(n for n in range(b.ndim) if n != b.ndim - 2))):
        special = np.where(good[..., key, :], 0, b[..., key, :])[..., None, :]
        reached = (visible[:, key, None]) & ~good[..., key, :][..., None, :]
        total += np.where(reached, a[..., key, None] * special, 0)
    return total


def keep_factors(tape: Tape, node: Node) -> Array:
    """A dropout's factors of its weights: 0 or 1 / (1 - p)."""
    probability = node["probability"]
    batch, heads, rows, keys = tape.values[node.inputs[0]].shape
    seed = int(tape.values[node.inputs[1]]) if len(node.inputs) == 2 else node.seed
    sequence_heads = np.arange(batch * heads).reshape(batch, heads)
    kept = dropout_keep(probability, seed, sequence_heads, np.arange(rows), keys)
    factors: Array = kept / np.asarray(1.0 - probability, tape.dtype)
    return factors
