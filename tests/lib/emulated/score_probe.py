"""Runs a modification's generated CUDA on the CPU by itself, without attention around it."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
from inside.attention import SCORE_HEADER
from inside.devices import Buffer
from inside.emulation import EmulatedBuffer, build_module
from inside.graph import Modification
from inside.kernels import Values, example_problem, score_packer

SOURCE = """
#include "common/score_mod.cuh"

struct Probe {
  const REAL* scores;
  const REAL* dscores;
  REAL* values;
  REAL* gradients;
  int32_t heads;
  int32_t rows;
  int32_t keys;
};

extern "C" __global__ void probe(const __grid_constant__ WithScoreMod<Probe> params) {
  const int sequence = int(blockIdx.x) / params.heads, head = int(blockIdx.x) % params.heads;
  const ScoreMod mod = bind_score_mod(params.score_params(), sequence, head);
  for (int n = threadIdx.x; n < params.rows * params.keys; n += blockDim.x) {
    const int row = n / params.keys, key = n % params.keys;
    const int64_t at = int64_t(blockIdx.x) * params.rows * params.keys + n;
    params.values[at] = mod(params.scores[at], row, key);
    params.gradients[at] = mod.gradient(params.scores[at], params.dscores[at], row, key);
  }
}
"""


def run_probe(modification: Modification, inputs: dict[int, Any], scores: Any, dscores: Any) -> tuple[Any, Any]:
    """(value, gradient) of every element of scores (batch, heads, rows, keys). inputs: of the graph, by uid."""
    mod = modification.mod
    batch, heads, rows, keys = scores.shape
    module = build_module(SOURCE, {"REAL": mod.real}, {SCORE_HEADER: mod.header}, entries=("probe",))
    dtype = np.dtype(np.float64 if mod.real == "double" else np.float32)
    operands = {"scores": scores.astype(dtype), "dscores": dscores.astype(dtype)}
    operands |= {name: np.full(scores.shape, np.nan, dtype) for name in ("values", "gradients")}
    operands |= {mod.tensor_name(n): inputs[uid] for n, uid in enumerate(modification.tensors)}
    memory = {name: EmulatedBuffer.of(array, name) for name, array in operands.items()}
    buffers = {}
    for name, array in operands.items():
        packed = np.ascontiguousarray(array)
        strides = tuple(stride // packed.itemsize for stride in packed.strides)
        buffers[name] = Buffer(memory[name].address, packed.shape, strides, packed.dtype.name)
    addresses = [memory[name].address for name in ("scores", "dscores", "values", "gradients")]
    parameters = struct.pack("<4Q3i4x", *addresses, heads, rows, keys)
    numbers = [value if uid is None else inputs[uid] for uid, value in modification.scalars]
    problem = example_problem(
        "float64",
        8,
        batch=batch,
        seqlen_q=rows,
        seqlen_k=keys,
        total_q=batch * rows,
        total_k=batch * keys,
        heads_q=heads,
        heads_kv=heads,
        softmax_scale=1.0,
        score_mod=mod,
    )
    score = score_packer(problem)
    parameters += b"" if score is None else score(buffers, Values(score_scalars=numbers))
    module.launch("probe", (batch * heads, 1, 1), (32, 1, 1), 0, parameters, list(memory.values()))
    return tuple(memory[name].view(dtype, scores.shape).copy() for name in ("values", "gradients"))
