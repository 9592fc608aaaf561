"""Checks the two lists of a block mask against each other: deterministic gradients order their additions by both."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from gpu_actors.errors import InvalidRequest
from gpu_actors.fields import describe
from gpu_actors.graph.ops import Node

__all__ = ["agree", "check_lists", "listing_counts"]


def check_lists(nodes: Sequence[Node], arrays: Mapping[int, Any]) -> None:
    """Refuse lists of keys and of rows that differ, if a launch waits by both. Does not read lists on a device."""
    if not any(("deterministic", True) in node.attributes for node in nodes):
        return
    for node in nodes:
        if node.op != "block_mask" or not node["transposed"]:
            continue
        uids = node.inputs[1:]
        half = len(uids) // 2
        lists = [arrays.get(uid) for uid in uids]
        if not all(isinstance(array, np.ndarray) for array in lists):
            continue
        if not agree(lists[:half], lists[half:]):
            reason = f"must name the blocks of tensor {uids[1]} the other way round, each once"
            value = describe(lists[half + 1])
            raise InvalidRequest(f"tensor {uids[half + 1]}", value, f"{reason}: deterministic gradients wait by both")


def agree(of_keys: Sequence[Any], of_rows: Sequence[Any]) -> bool:
    """Whether both kinds of lists on the host have the same blocks, each once. Each is counts and indices in turn."""
    keys, rows = listing_counts(of_keys), listing_counts(of_rows)
    return keys is not None and rows is not None and bool((keys == rows.swapaxes(-1, -2)).all() and (keys < 2).all())


def listing_counts(lists: Sequence[Any]) -> Any:
    """How often each block is listed, (1 or batch, 1 or heads, blocks, blocks). None if an index is out of range."""
    total: Any = 0
    for counts, indices in zip(lists[::2], lists[1::2], strict=True):
        length = indices.shape[-1]
        counted = np.arange(length) < counts[..., None]
        counted, indices = np.broadcast_arrays(counted, indices)
        if (counted & ((indices < 0) | (indices >= length))).any() or (counts > length).any():
            return None
        listings = np.zeros((*indices.shape[:-1], length + 1), np.int32)
        np.add.at(listings, (*np.indices(indices.shape, sparse=True)[:-1], np.where(counted, indices, length)), 1)
        total = total + listings[..., :-1]
    return total
