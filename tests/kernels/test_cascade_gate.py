"""What ptxas makes of the kernels of cascades: no spills, and none of the notes that a gate looks for."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from gpu_actors.bench.plan import problem_of
from gpu_actors.compiling.compiler import Compiler
from gpu_actors.kernels.dispatch import dispatch_key, program_of
from gpu_actors.kernels.variants import kernel_source
from gpu_actors.planning.cascade import prefix_problem, tail_problem

FP8 = "float8_e4m3fn"


@pytest.mark.sweep
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("cache", [("bfloat16", 128), (FP8, 128), ("bfloat16", 256), ("bfloat16", 64)], ids=str)
@pytest.mark.parametrize("softcap", [0.0, 20.0])
def test_no_kernel_of_a_cascade_spills(arch: str, cache: tuple[str, int], softcap: float) -> None:
    kv_dtype, dim = cache
    sizes = {"head_dim": dim, "head_dim_v": dim, "kv_dtype": kv_dtype, "descales": kv_dtype == FP8}
    problem = dataclasses.replace(problem_of(np.full(4, 100, np.int32)), causal=True, softcap=softcap, **sizes)
    for part in (prefix_problem(problem, 1, 128, 128, problem.seqlen_k), tail_problem(problem, problem.seqlen_k)):
        for key in program_of(part, dispatch_key(part, arch)).keys:
            cubin = Compiler().compile(kernel_source(key), arch)
            ((_, spilled, stack, _),) = cubin.resources.values()
            assert (spilled, stack) == (0, 0), key
            assert "C75" not in cubin.log, key
