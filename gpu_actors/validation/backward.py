"""From a `FlashBackward` message to its `AttentionProblem`."""

from __future__ import annotations

import dataclasses

from gpu_actors.attention.problem import AttentionProblem
from gpu_actors.attention.requests import FlashBackward
from gpu_actors.errors import Unsupported
from gpu_actors.fields import FP8, describe, dtype_of, expect, flag, one_of, optional_array
from gpu_actors.validation.forward import forward_problem

__all__ = ["backward_problem"]


def backward_problem(request: FlashBackward) -> AttentionProblem:
    """The problem that a request poses. Raises as `forward_problem`, and `Unsupported` for fp8."""
    dtype = dtype_of("q", request.q)
    if dtype in FP8:
        reason = "fp8 gradients would be lost in rounding; backward takes 16-bit and wider inputs"
        raise Unsupported("q", dtype, reason, "bfloat16")
    expect(request.out_dtype is None, "out_dtype", request.out_dtype, "must be None: backward takes out in q's dtype")
    one_of("lse_dtype", request.lse_dtype, ("float32",), "must be left: lse has its own dtype here")
    problem = forward_problem(request)
    shape = tuple(int(extent) for extent in request.q.shape[:-1])
    output = ((*shape, problem.head_dim_v),)
    for field, array in (("out", request.out), ("dout", request.dout)):
        expect(array is not None, field, None, "is needed by backward")
        optional_array(field, array, output, (problem.out_dtype,))
    expect(request.lse is not None, "lse", None, "is needed by backward: ask forward for return_lse=True")
    varlen = problem.layout == "varlen"
    rows = problem.total_q if varlen else problem.seqlen_q
    lse = (problem.heads_q, rows) if varlen else (problem.batch, problem.heads_q, rows)
    lse_shape = tuple(int(extent) for extent in getattr(request.lse, "shape", ()))
    given, needed = 4 * _count(lse_shape), 4 * _count(lse)
    expect(given >= needed, "lse", describe(request.lse), f"holds {given} bytes where {needed} are needed")
    wide = ("float64",) if dtype == "float64" else ()
    optional_array("lse", request.lse, (lse,), ("float32", *wide))
    expect(not problem.return_lse, "return_lse", request.return_lse, "must be False: backward gives gradients alone")
    deterministic = flag("deterministic", request.deterministic)
    lse_dtype = dtype_of("lse", request.lse)
    return dataclasses.replace(problem, direction="backward", deterministic=deterministic, lse_dtype=lse_dtype)


def _count(shape: tuple[int, ...]) -> int:
    product = 1
    for extent in shape:
        product *= extent
    return product
