"""Random pointwise graphs over scores, whose values stay moderate, for tests of evaluation and of derivatives."""

from __future__ import annotations

import random
from typing import Any

import numpy as np

import gpu_actors as ga

DIMS = (2, 2, 6, 5)
SCORE, FIRST_TENSOR, FIRST_SCALAR, RESULT = 1, 10, 30, 2
BROADCASTS = ((1, 2, 1, 1), (2, 1, 6, 1), (1, 1, 1, 5), (1, 2, 6, 5), (2, 2, 6, 5), (2, 1, 1, 5))


class RandomGraph:
    """A graph from tensor SCORE to tensor RESULT, in float64. values: of its other inputs, by uid.

    graph, score: an existing graph, and its scores to modify; `result` is then virtual.
    """

    def __init__(
        self,
        seed: int,
        size: int = 14,
        graph: ga.OperationGraph | None = None,
        score: ga.GraphTensor | None = None,
    ) -> None:
        self.graph = ga.OperationGraph() if graph is None else graph
        self.values: dict[int, Any] = {}
        self._rng = random.Random(seed)
        self._numbers = np.random.default_rng(seed)
        if score is None:
            score = self.graph.tensor(uid=SCORE, dims=DIMS, dtype="float64")
        self._before = set(self.graph.tensors)
        self._floats = [score * 1.0]
        self._ints = [self.graph.index(score, axis) for axis in range(4)]
        for n in range(3):
            self._add_input(n)
        for _ in range(size):
            self._add_node()
        # The last nodes need not depend on the score or be read, so a sum takes in all that is unread.
        unread = [t for t in self._floats if t.virtual and not self._is_read(t)]
        total = score * 0.5
        for tensor in unread:
            total = total + self.graph.tanh(tensor)
        self.result = total if graph is not None else self.graph.output(total, uid=RESULT)
        self._prune()

    def _prune(self) -> None:
        """Drop tensors and nodes that are not read, until all are."""
        graph = self.graph
        while True:
            read = {uid for node in graph.nodes for uid in node.inputs} | {self.result.uid} | self._before
            useless = [uid for uid in graph.tensors if uid not in read]
            if not useless:
                graph._changed()
                return
            for uid in useless:
                del graph.tensors[uid]
                self.values.pop(uid, None)
            graph.nodes = [node for node in graph.nodes if not set(node.outputs) & set(useless)]

    def _is_read(self, tensor: ga.GraphTensor) -> bool:
        return any(tensor.uid in node.inputs for node in self.graph.nodes)

    def _add_input(self, n: int) -> None:
        kind = self._rng.choice(("tensor", "ints", "scalar", "passed"))
        dims = self._rng.choice(BROADCASTS)
        if kind == "tensor":
            self.values[FIRST_TENSOR + n] = self._numbers.standard_normal(dims)
            self._floats.append(self.graph.tensor(uid=FIRST_TENSOR + n, dims=dims, dtype="float64"))
        elif kind == "ints":
            # Their range is unknown, so only comparisons take them.
            self.values[FIRST_TENSOR + n] = self._numbers.integers(0, 4, dims).astype(np.int32)
            ids = self.graph.tensor(uid=FIRST_TENSOR + n, dims=dims, dtype="int32")
            self._floats.append(self.graph.select(ids > self._rng.randrange(4), self._float(), self._float()))
        else:
            passed = kind == "passed"
            value = self._rng.uniform(-2, 2)
            scalar = self.graph.scalar(uid=FIRST_SCALAR + n, dtype="float64", value=None if passed else value)
            if passed:
                self.values[FIRST_SCALAR + n] = value
            self._floats.append(scalar + self._float())

    def _float(self) -> ga.GraphTensor:
        return self._rng.choice(self._floats)

    def _add_node(self) -> None:
        g, a, b = self.graph, self._float(), self._float()
        i, j = self._rng.choice(self._ints), self._rng.choice(self._ints)
        floats = {
            "add": lambda: a + b,
            "sub": lambda: a - b,
            "mul": lambda: g.tanh(a) * b,
            "div": lambda: a / (1.5 + abs(b)),
            "mod": lambda: a % self._rng.uniform(0.5, 2),
            "floor": lambda: g.floor(a) * 0.1 + b,
            "max": lambda: g.max(a, b),
            "min": lambda: g.min(a, b),
            "neg": lambda: -a,
            "abs": lambda: abs(a),
            "exp": lambda: g.exp(-abs(a)),
            "log": lambda: g.log(1.5 + abs(a)),
            "sqrt": lambda: g.sqrt(0.5 + a * a),
            "sin": lambda: g.sin(a) * b,
            "cos": lambda: g.cos(a * 3.0),
            "tan": lambda: g.tan(g.tanh(a)),
            "sigmoid": lambda: g.sigmoid(a),
            "gelu": lambda: g.gelu(a),
            "select": lambda: g.select((a > b) | ~(i <= j), a, b),
            "select by index": lambda: g.select(g.ne(i, j) & (i >= 1), a, b),
            "distance": lambda: a - 0.1 * abs(i - j),
            "as float": lambda: a + 0.01 * i,
        }
        ints = {"block": lambda: i // 2, "remainder": lambda: (i + j) % 3, "product": lambda: g.max(i * j, 2)}
        if self._rng.random() < 0.15:
            self._ints.append(ints[self._rng.choice(list(ints))]())
        else:
            self._floats.append(floats[self._rng.choice(list(floats))]())
