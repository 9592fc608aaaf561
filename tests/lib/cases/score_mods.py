"""Ten score modifications from public use: each as a graph, and as a NumPy formula that shares no code with graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

import gpu_actors as ga

BATCH, HEADS, HEADS_KV, ROWS, KEYS, DIM = 2, 4, 2, 40, 56, 32
SCALE = 0.25
WIDTH = 8  # of an image; rows and keys are its pixels
Q, K, V, OUT, STATS, DOUT, FIRST = 1, 2, 3, 4, 5, 6, 20

Array = Any


class Modification(NamedTuple):
    """build: (graph, scaled scores, tensor) to scores; tensor(n) declares extra array n.

    formula: (scaled scores, extras) to scores, in float64, -inf where hidden. extras: draws the extra arrays.
    """

    build: Callable[[ga.OperationGraph, ga.GraphTensor, Callable[[int], ga.GraphTensor]], ga.GraphTensor]
    formula: Callable[[Array, list[Array]], Array]
    extras: Callable[[np.random.Generator], list[Array]]
    keys: int = KEYS


def no_extras(rng: np.random.Generator) -> list[Array]:
    return []


def places(scores: Array) -> tuple[Array, Array]:
    """Indices of rows and keys, broadcast against scores."""
    return np.arange(scores.shape[2])[:, None], np.arange(scores.shape[3])[None, :]


# ALiBi (Press et al., arXiv 2108.12409)


def alibi_graph(g, s, tensor):
    return s - tensor(0) * abs(g.index(s, 2) - g.index(s, 3))


def alibi_formula(s, extras):
    i, j = places(s)
    return s - extras[0].astype(np.float64) * np.abs(i - j)


def slopes(rng):
    return [(2.0 ** -np.arange(1, HEADS + 1)).astype(np.float32).reshape(1, HEADS, 1, 1)]


# Soft capping (Gemma 2, arXiv 2408.00118, section 2)


def softcap_graph(g, s, tensor):
    return g.tanh(s / 2.0) * 2.0


def softcap_formula(s, extras):
    return 2.0 * np.tanh(s / 2.0)


# Relative position bias (Raffel et al., arXiv 1910.10683, section 2.1), bucketed as T5's


def t5_graph(g, s, tensor):
    return s + tensor(0)


def t5_formula(s, extras):
    return s + extras[0].astype(np.float64)


def t5_bias(rng):
    table = rng.standard_normal((HEADS, 16))
    relative = np.arange(KEYS)[None, :] - np.arange(ROWS)[:, None]
    distance = np.abs(relative)
    log = 4 + (np.log(np.maximum(distance, 1) / 4) / np.log(64 / 4) * 4).astype(int)
    bucket = np.where(distance < 4, distance, np.minimum(log, 7)) + 8 * (relative > 0)
    return [np.ascontiguousarray(table[:, bucket][None], np.float32)]


# Packed documents: a row sees the keys of its own document


def document_graph(g, s, tensor):
    return g.select(g.eq(tensor(0), tensor(1)), s, -np.inf)


def document_formula(s, extras):
    return np.where(extras[0] == extras[1], s, -np.inf)


def documents(rng):
    ids = [np.sort(rng.integers(0, 3, (BATCH, length))).astype(np.int32) for length in (ROWS, KEYS)]
    return [ids[0].reshape(BATCH, 1, ROWS, 1), ids[1].reshape(BATCH, 1, 1, KEYS)]


# Prefix LM (Raffel et al., section 3.2.1): all rows see the prefix, whose length each sequence has


def prefix_graph(g, s, tensor):
    i, j = g.index(s, 2), g.index(s, 3)
    return g.select((j <= i) | (j < tensor(0)), s, -np.inf)


def prefix_formula(s, extras):
    i, j = places(s)
    return np.where((j <= i) | (j < extras[0]), s, -np.inf)


def prefixes(rng):
    return [np.array([7, 19], np.int32).reshape(BATCH, 1, 1, 1)]


# Gating of scores by a tanh


def gating_graph(g, s, tensor):
    return s * (1.0 + g.tanh(tensor(0) + s))


def gating_formula(s, extras):
    return s * (1.0 + np.tanh(extras[0].astype(np.float64) + s))


def gates(rng):
    return [rng.standard_normal((1, HEADS, ROWS, 1)).astype(np.float32)]


# Decay with the distance (Sun et al., arXiv 2307.08621, section 2), with a rate for each head


def decay_graph(g, s, tensor):
    return s * g.exp(-tensor(0) * abs(g.index(s, 2) - g.index(s, 3)))


def decay_formula(s, extras):
    i, j = places(s)
    return s * np.exp(-extras[0].astype(np.float64) * np.abs(i - j))


def rates(rng):
    return [np.linspace(0.01, 0.3, HEADS, dtype=np.float32).reshape(1, HEADS, 1, 1)]


# A checkerboard (strided sparsity, Child et al., arXiv 1904.10509)


def checkerboard_graph(g, s, tensor):
    return g.select(g.eq((g.index(s, 2) + g.index(s, 3)) % 2, 0), s, -np.inf)


def checkerboard_formula(s, extras):
    i, j = places(s)
    return np.where((i + j) % 2 == 0, s, -np.inf)


# Local and global attention (Beltagy et al., arXiv 2004.05150, section 3)


def local_global_graph(g, s, tensor):
    i, j = g.index(s, 2), g.index(s, 3)
    return g.select((abs(i - j) <= 6) | (j < 3) | (i < 3), s, -np.inf)


def local_global_formula(s, extras):
    i, j = places(s)
    return np.where((np.abs(i - j) <= 6) | (j < 3) | (i < 3), s, -np.inf)


# Neighbourhood attention in two dimensions (Hassani et al., arXiv 2204.07143), rows of an image one after another


def natten_graph(g, s, tensor):
    i, j = g.index(s, 2), g.index(s, 3)
    near = (abs(i // WIDTH - j // WIDTH) <= 1) & (abs(i % WIDTH - j % WIDTH) <= 2)
    return g.select(near, s, -np.inf)


def natten_formula(s, extras):
    (y, x), (v, u) = (divmod(index, WIDTH) for index in places(s))
    return np.where((np.abs(y - v) <= 1) & (np.abs(x - u) <= 2), s, -np.inf)


MODIFICATIONS = {
    "alibi": Modification(alibi_graph, alibi_formula, slopes),
    "soft cap": Modification(softcap_graph, softcap_formula, no_extras),
    "t5 relative bias": Modification(t5_graph, t5_formula, t5_bias),
    "document mask": Modification(document_graph, document_formula, documents),
    "prefix lm": Modification(prefix_graph, prefix_formula, prefixes),
    "tanh gating": Modification(gating_graph, gating_formula, gates),
    "distance decay": Modification(decay_graph, decay_formula, rates),
    "checkerboard": Modification(checkerboard_graph, checkerboard_formula, no_extras),
    "local and global": Modification(local_global_graph, local_global_formula, no_extras),
    "natten 2d": Modification(natten_graph, natten_formula, no_extras, keys=ROWS),
}


class Case(NamedTuple):
    """A modification's operands. arrays: by uid, q, k, v and the extras."""

    modification: Modification
    arrays: dict[int, Array]
    dtype: str


def case_of(name: str, dtype: str = "float16", seed: int = 0, std: float = 1.0, dim: int = DIM) -> Case:
    from emulated.forward import ml_dtype

    modification = MODIFICATIONS[name]
    rng = np.random.default_rng(seed)
    shapes = {Q: (BATCH, HEADS, ROWS, dim), K: (BATCH, HEADS_KV, modification.keys, dim)}
    shapes[V] = shapes[K]
    arrays = {uid: (std * rng.standard_normal(shape)).astype(ml_dtype(dtype)) for uid, shape in shapes.items()}
    arrays |= {FIRST + n: extra for n, extra in enumerate(modification.extras(rng))}
    return Case(modification, arrays, dtype)


def scores_of(graph: ga.OperationGraph, case: Case) -> tuple[ga.GraphTensor, dict[int, ga.GraphTensor]]:
    """The modified scores in a graph, and its tensors by uid."""
    tensors: dict[int, ga.GraphTensor] = {}

    def tensor(uid: int) -> ga.GraphTensor:
        array = case.arrays[uid]
        return tensors.setdefault(uid, graph.tensor(uid=uid, dims=array.shape, dtype=array.dtype.name))

    q, k = tensor(Q), tensor(K)
    scaled = graph.matmul(q, graph.transpose(k)) * SCALE
    return case.modification.build(graph, scaled, lambda n: tensor(FIRST + n)), tensors | {V: tensor(V)}


def forward_graph(case: Case, mask: ga.Mask | None = None) -> ga.OperationGraph:
    graph = ga.OperationGraph()
    scores, tensors = scores_of(graph, case)
    scores = graph.mask(scores, mask or ga.Mask.none(), "bottom_right")
    weights, stats = graph.softmax_with_stats(scores)
    graph.output(graph.matmul(weights, tensors[V]), uid=OUT, dtype=case.dtype)
    graph.output(stats, uid=STATS, dtype="float32")
    return graph


class Expected(NamedTuple):
    """out, stats (.., 1), and sum P |V|, in float64."""

    out: Array
    stats: Array
    magnitude: Array


def expected(case: Case) -> Expected:
    """Attention with the modification's formula, in a few lines."""
    q, k, v = (case.arrays[uid].astype(np.float64) for uid in (Q, K, V))
    k, v = (np.repeat(array, HEADS // HEADS_KV, axis=1) for array in (k, v))
    extras = [case.arrays[uid] for uid in sorted(case.arrays) if uid >= FIRST]
    scores = case.modification.formula(SCALE * q @ k.swapaxes(-1, -2), extras)
    top = np.maximum(scores.max(axis=-1, keepdims=True), -1e300)
    weights = np.exp(scores - top)
    total = weights.sum(axis=-1, keepdims=True)
    with np.errstate(divide="ignore"):
        stats = top + np.log(total)
    divisor = np.where(total == 0, 1, total)
    stats = np.where(total == 0, -np.inf, stats)
    return Expected(weights @ v / divisor, stats, weights @ np.abs(v) / divisor)
