"""From a `FlashBackward` message to its `AttentionProblem`."""

from __future__ import annotations

import dataclasses
import math

from gpu_actors.attention.problem import AttentionProblem
from gpu_actors.attention.requests import FlashBackward
from gpu_actors.errors import Unsupported
from gpu_actors.fields import FP8, describe, dtype_of, expect, flag, one_of, optional_array
from gpu_actors.validation.forward import forward_problem

__all__ = ["backward_problem"]


def backward_problem(request: FlashBackward) -> AttentionProblem:
    dtype = dtype_of("q", request.q)
    if dtype in FP8:
        reason = "fp8 gradients would be lost in rounding; backward takes 16-bit and wider inputs"
        raise Unsupported("q", dtype, reason, "bfloat16")
    expect(request.out_dtype is None, "out_dtype", request.out_dtype, "must be None: backward takes out in q's dtype")
    one_of("lse_dtype", request.lse_dtype, ("float32",), "must be left: lse has its own dtype here")
    expect(request.pack_gqa is None, "pack_gqa", request.pack_gqa, "must be left: gradients pack no rows")
    problem = forward_problem(request)
    shape = tuple(int(extent) for extent in request.q.shape[:-1])
    output = ((*shape, problem.head_dim_v),)
    for field, array in (("out", request.out), ("dout", request.dout)):
        expect(array is not None, field, None, "is needed by backward")
        optional_array(field, array, output, (problem.out_dtype,))
    expect(request.lse is not None, "lse", None, "is needed by backward: ask forward for return_lse=True")
    lse_shape = tuple(int(extent) for extent in getattr(request.lse, "shape", ()))
    given, needed = 4 * math.prod(lse_shape), 4 * math.prod(problem.lse_shape)
    expect(given >= needed, "lse", describe(request.lse), f"holds {given} bytes where {needed} are needed")
    wide = ("float64",) if dtype == "float64" else ()
    optional_array("lse", request.lse, (problem.lse_shape,), ("float32", *wide))
    expect(not problem.return_lse, "return_lse", request.return_lse, "must be False: backward gives gradients alone")
    deterministic = flag("deterministic", request.deterministic)
    lse_dtype = dtype_of("lse", request.lse)
    return dataclasses.replace(problem, direction="backward", deterministic=deterministic, lse_dtype=lse_dtype)
