"""Bugs to seed into what score modifications are made of; test_score_mod_mutants.py runs them."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["MUTANTS", "ScoreMutant"]


class ScoreMutant(NamedTuple):
    """A bug. old: text of `file` that is replaced by `new`, wherever it occurs. probe: what must show it."""

    name: str
    file: str
    old: str
    new: str
    probe: str = "operations"


def _op(name: str, old: str, new: str, probe: str = "operations") -> ScoreMutant:
    return ScoreMutant(name, "common/score_ops.cuh", old, new, probe)


def _generated(name: str, old: str, new: str) -> ScoreMutant:
    return ScoreMutant(name, "common/score_mod.cuh", old, new)


def _kernel(name: str, old: str, new: str, file: str = "common/score.cuh") -> ScoreMutant:
    return ScoreMutant(name, file, old, new, "kernel")


def _backward(name: str, old: str, new: str) -> ScoreMutant:
    return ScoreMutant(name, "common/score_gradient.cuh", old, new, "backward")


_BOUND = "params.score_params(), sequence, head)"

MUTANTS = (
    # Functions
    _op("floor is truncation", "{ return floor(x); }", "{ return x < 0 ? -floor(-x) : floor(x); }"),
    _op("integers are divided towards 0", " - (a % b != 0 && (a % b < 0) != (b < 0))", ""),
    _op("integers divide down always", "(a % b != 0 && ", "("),
    _op(
        "quotients are not rounded",
        "return quotient - whole > Real(0.5) ? whole + Real(1) : whole;",
        "return a / b;",
    ),
    _op("remainders of floats have the sign of the number", "? rest + b : rest;", "? rest : rest;"),
    _op("remainders of integers have the sign of the number", "a - floor_divide(a, b) * b", "a % b"),
    _op("abs of integers", "return x < 0 ? -x : x;", "return x;"),
    _op("the sigmoid falls", "exp_of(-x));", "exp_of(x));"),
    _op("gelu's scale", "0.70710678118654752440", "0.79788456080286535588"),
    _op("the density is not normalised", "0.39894228040143267794", "0.5"),
    _op("the density's exponent", "Real(-0.5) * x * x", "Real(-1) * x * x"),
    _op("the sign is of the other side", "Real(x > 0) - Real(x < 0)", "Real(x < 0) - Real(x > 0)"),
    _op("max is min", "return a >= b ||", "return a <= b ||"),
    _op("min is max", "return a <= b ||", "return a >= b ||"),
    _op("the sine of doubles is a cosine", "{ return sin(x); }", "{ return cos(x); }"),
    _op("the cosine of doubles is a sine", "{ return cos(x); }", "{ return sin(x); }"),
    _op("the tangent of doubles is a cotangent", "{ return tan(x); }", "{ return 1.0 / tan(x); }"),
    _op("the sine is a cosine", "float x) { return sinpi_of(", "float x) { return cospi_of(", "angles"),
    _op("the cosine is a sine", "float x) { return cospi_of(", "float x) { return sinpi_of(", "angles"),
    _op(
        "the tangent is a cotangent", "sinpi_of(turns) / cospi_of(turns)", "cospi_of(turns) / sinpi_of(turns)", "angles"
    ),
    _op("turns are rounded down", "rintf(x *", "floorf(0.75f + x *", "angles"),
    _op(
        "2 pi has 24 bits",
        "fmaf(turns, 1.7484555e-7f, fmaf(turns, -6.2831855f, x))",
        "fmaf(turns, -6.2831855f, x)",
        "angles",
    ),
    _op("the rest of 2 pi has the other sign", "1.7484555e-7f", "-1.7484555e-7f", "angles"),
    _op("half turns are turns", "0.31830989f", "0.15915494f", "angles"),
    _op("angles are not reduced", "const float turns = rintf(x * 0.15915494f);", "const float turns = 0;", "angles"),
    _op("max prefers numbers", "a >= b || a != a", "a >= b || b != b", "nan"),
    _op("min prefers numbers", "a <= b || a != a", "a <= b || b != b", "nan"),
    # What is generated
    _generated("rows and keys change places", "int row, int key", "int key, int row"),
    _generated("a tensor's row is its key", "row * given->", "key * given->"),
    _generated("a tensor's key is its row", "key * given->", "row * given->"),
    _generated("every head reads the first's tensor", " + head * given.", " + 0 * given."),
    _generated("every sequence reads the first's tensor", " + batch * given.", " + 0 * given."),
    _generated("the head is not bound", "mod.head = head;", "mod.head = 0;"),
    _generated("the sequence is not bound", "mod.batch = batch;", "mod.batch = 0;"),
    _generated("scalars change places", "given->v0", "given->v1"),
    # Where kernels call it
    _kernel("it is not called", "if constexpr (SCORE_MOD) score = mod(", "if constexpr (false) score = mod("),
    _kernel("it is given the unscaled product", "mod(score, row, key)", "mod(dot, row, key)"),
    _kernel("it is given rows for keys", "mod(score, row, key)", "mod(score, key, row)"),
    _kernel("it is bound to the KV head", _BOUND, "params.score_params(), sequence, kv_head)"),
    _kernel("it is bound to the first sequence", _BOUND, "params.score_params(), 0, head)"),
    _backward("its slope is left out", "if constexpr (SCORE_MOD) gradient", "if constexpr (false) gradient"),
    _backward("its slope is taken at the unscaled product", "gradient(scaled, gradient", "gradient(dot, gradient"),
    _backward("its slope is another element's", "gradient, row, key)", "gradient, key, row)"),
    ScoreMutant(
        "rows past the end have scores", "backward/scores.cuh", "? rows.end - first_row", "? 2 * BLOCK_M", "backward"
    ),
    _kernel("scores count as merely scaled", " && !SCORE_MOD", "", "mma/softmax.cuh"),
)
