"""Attention problems as lists of sequences, for requests of any layout. For tests."""

from __future__ import annotations

import dataclasses
import itertools
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from cases.cached_batches import random_tree, tree_bits
from cases.finite_masks import hide_keys
from inside.testing import cast

from gpu_actors.reference import attention_forward

__all__ = ["ENDS", "FP8", "Array", "Problem", "Spec", "contiguous", "has_sequences", "interleaved", "problem_of"]

Array: TypeAlias = npt.NDArray[Any]

FP8 = ("float8_e4m3fn", "float8_e5m2")
ENDS = ("cu_seqlens_q", "cu_seqlens_k")
# Options that always have an axis of sequences. alibi_slopes have one if they have two axes.
_OF_SEQUENCES = ("q_positions", "k_positions", "q_descale", "k_descale", "v_descale")


@dataclass(frozen=True, kw_only=True)
class Spec:
    """What a problem and its request are made from, in plain values: its repr is the row of a table.

    door: of `doors.DOORS`. rows, keys: of each sequence. shared: those of "q", "k" and "v" that all sequences share.
    options: of the attention; for an array, how `problem_of` makes it.
    how: of the request, and of its arrays.
    """

    door: str = "dense"
    dtype: str = "float32"
    rows: tuple[int, ...] = (3, 3)
    keys: tuple[int, ...] = (5, 5)
    heads: tuple[int, int] = (2, 1)
    dims: tuple[int, int] = (8, 8)
    shared: str = ""
    seed: int = 0
    options: dict[str, Any] = field(default_factory=dict)
    how: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Problem:
    """q, k, v: (rows, heads, dim) of each sequence. options: the oracle's, for all sequences.

    tree: which rows of each sequence see which, bool (rows, rows), or None.
    """

    q: list[Array]
    k: list[Array]
    v: list[Array]
    options: dict[str, Any]
    tree: list[Array] | None = None

    @property
    def lengths(self) -> list[tuple[int, int]]:
        return [(len(q), len(k)) for q, k in zip(self.q, self.k, strict=True)]

    @property
    def heads(self) -> tuple[int, int]:
        return self.q[0].shape[1], self.k[0].shape[1]

    @property
    def ends(self) -> dict[str, Array]:
        """cu_seqlens_q and cu_seqlens_k."""
        return {
            f"cu_seqlens_{side}": np.cumsum([0, *map(len, arrays)]).astype(np.int32)
            for side, arrays in (("q", self.q), ("k", self.k))
        }

    @property
    def packed(self) -> tuple[Array, Array, Array]:
        return np.concatenate(self.q), np.concatenate(self.k), np.concatenate(self.v)

    @property
    def oracle_options(self) -> dict[str, Any]:
        """The oracle's options for `packed`."""
        trees = self.tree and {"tree_mask": np.concatenate([tree_bits(tree) for tree in self.tree])}
        return {**self.options, **self.ends, **(trees or {})}

    @property
    def results(self) -> tuple[Array, Array]:
        """The oracle's out and LSE, as a forward request of q's dtype gives them."""
        found = attention_forward(*self.packed, **self.oracle_options)
        dtype = self.q[0].dtype
        with np.errstate(over="ignore"):
            return found.out.astype(dtype), found.lse.astype(np.float32 if dtype.itemsize < 8 else np.float64)

    def changed(self, **changes: Any) -> Problem:
        """The problem with changed options."""
        return dataclasses.replace(self, options={**self.options, **changes})

    def without(self, *names: str) -> Problem:
        return dataclasses.replace(self, options={k: v for k, v in self.options.items() if k not in names})

    def taken(self, order: list[int]) -> Problem:
        """The problem of these sequences, in this order."""
        options = dict(self.options)
        for name, value in self.options.items():
            if has_sequences(name, value):
                options[name] = value[order]
        q, k, v = ([arrays[index] for index in order] for arrays in (self.q, self.k, self.v))
        return Problem(q, k, v, options, self.tree and [self.tree[index] for index in order])

    def alone(self, index: int) -> Problem:
        """One of its sequences, whose bias is cut to its rows and keys."""
        one = self.taken([index])
        bias = one.options.get("bias")
        if bias is None:
            return one
        ((rows, keys),) = one.lengths
        return one.changed(bias=bias[:, :, : rows if bias.shape[2] > 1 else 1, :keys])


def has_sequences(name: str, value: Any) -> bool:
    if name in _OF_SEQUENCES:
        return True
    return (name == "alibi_slopes" and value.ndim == 2) or (name == "bias" and len(value) > 1)


def problem_of(spec: Spec, *, finite: bool = False) -> Problem:
    """A problem of random numbers from the seed of a spec. finite: a bias hides no key by -inf.

    In the options of a spec, ``alibi_slopes`` is "heads" or "batch", ``q_positions`` and ``k_positions`` are a number
    of words, ``bias`` is (dtype or "", of each sequence?, head?, row?, hides keys?), and True stands for any other
    array. "spare" of ``how`` is how many more rows and keys a bias has.
    """
    rng = np.random.default_rng([spec.seed, 7])
    (heads, heads_kv), (dim, dim_v), batch = spec.heads, spec.dims, len(spec.rows)

    def sequences(name: str, lengths: tuple[int, ...], *shape: int) -> list[Array]:
        if name in spec.shared:
            return [cast(rng.standard_normal((lengths[0], *shape)), spec.dtype)] * batch
        return [cast(rng.standard_normal((length, *shape)), spec.dtype) for length in lengths]

    q = sequences("q", spec.rows, heads, dim)
    k, v = sequences("k", spec.keys, heads_kv, dim), sequences("v", spec.keys, heads_kv, dim_v)
    stored = spec.how.get("kv_dtype")
    if stored:
        k, v = ([cast(array.astype(np.float32), stored) for array in arrays] for arrays in (k, v))
    if spec.how.get("latent"):
        v = [array[..., :dim_v] for array in k]
    spare = spec.how.get("spare", (0, 0))
    longest = max(spec.rows) + spare[0], max(spec.keys) + spare[1]
    makers = {
        "alibi_slopes": lambda kind: rng.uniform(0.01, 0.5, (batch, heads) if kind == "batch" else heads).astype("f4"),
        "sinks": lambda _: rng.standard_normal(heads).astype(np.float32),
        "bias": lambda form: _bias(rng, form, (batch, heads, *longest), spec, finite),
        **{name: lambda _: rng.uniform(0.5, 1.5, (batch, heads_kv)).astype(np.float32) for name in _OF_SEQUENCES[2:]},
        **{name: lambda words: _places(rng, words, batch) for name in _OF_SEQUENCES[:2]},
    }
    tree = [random_tree(rng, rows) for rows in spec.rows] if "tree_mask" in spec.options else None
    options = {n: makers[n](value) if n in makers else value for n, value in spec.options.items() if n != "tree_mask"}
    return Problem(q, k, v, options, tree)


def _bias(rng: np.random.Generator, form: Any, shape: tuple[int, ...], spec: Spec, finite: bool) -> Array:
    dtype, *own, hides = form
    axes = [extent if each else 1 for extent, each in zip(shape, own, strict=False)]
    numbers = rng.standard_normal((*axes, shape[3])).astype(np.float32)
    if dtype == "bool":
        return numbers > -0.8
    narrow = cast(numbers, dtype or spec.dtype)
    return hide_keys(narrow, spec.seed, finite=finite) if hides and numbers.size else narrow


def _places(rng: np.random.Generator, words: int, batch: int) -> Array:
    """The first position of each sequence, and if there are two words its step."""
    first, step = rng.integers(0, 12, batch), rng.integers(1, 4, batch)
    return (first if words == 1 else np.stack([first, step], axis=1)).astype(np.int32)


def interleaved(count: int, parts: int) -> list[range]:
    """Indices dealt out in turn."""
    return [range(part, count, parts) for part in range(parts)]


def contiguous(count: int, parts: int) -> list[range]:
    """Indices cut into runs, of which some may be empty."""
    edges = [count * part // parts for part in range(parts + 1)]
    return [range(first, stop) for first, stop in itertools.pairwise(edges)]
