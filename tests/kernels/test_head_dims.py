"""Head dims from 8 to 512: which kernels take them, gradients of wide ones, and what registers hold."""

from __future__ import annotations

from typing import Any

import pytest
from cases.poison import poison_unseen_backward
from emulated import backward as emulated_backward
from emulated.gradients import case_of as gradient_case_of
from emulated.sweeps import Sweep, launch_of
from support.gate import code_faults, code_of, kernel_source, register_limit

import gpu_actors as ga
from gpu_actors import DispatchKey
from gpu_actors.kernels.decode_tiles import decode_tile
from gpu_actors.kernels.dispatch import dispatch_key
from gpu_actors.kernels.support import example_problem
from gpu_actors.kernels.tiles import tile_of

WIDE = (
    Sweep("bfloat16", 512, None, "causal", arch="sm_80"),
    Sweep("float32", 264, 512, "window sinks bias", arch="sm_86", varlen=True),
    Sweep("float64", 512, 300, "causal softcap", arch="sm_80"),
)
SHAPES = ((1, 1), (33, 95), (70, 31))


@pytest.mark.sweep
@pytest.mark.usefixtures("fused_or_not")
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("sweep", WIDE, ids=str)
def test_gradients_of_wide_heads_agree_with_the_oracle(sweep: Sweep) -> None:
    for index, seqlens in enumerate(SHAPES):
        heads = ((6, 2), (3, 1), (2, 2))[index % 3]
        case = poison_unseen_backward(gradient_case_of(sweep, 6000 + index, seqlens, batch=1 + index % 3, heads=heads))
        given: dict[str, Any] = {"compute": sweep.compute, "arch": sweep.arch, "kernel": "backward_simple"}
        emulated_backward.check_case(case, seed=index, limit_seconds=600.0, **given, **launch_of(index))


def test_heads_of_512_columns_have_kernels_both_ways_and_wider_ones_are_refused_by_name() -> None:
    for direction, kernels in (("forward", ("forward_wide", "forward_simple")), ("backward", ("backward_simple",) * 2)):
        for dtype, kernel in zip(("bfloat16", "float32"), kernels, strict=True):
            for arch in ("sm_80", "sm_86", "sm_90a"):
                assert dispatch_key(example_problem(dtype, 512, direction=direction), arch).kernel == kernel
        with pytest.raises(ga.Unsupported, match="from 1 to 512") as refused:
            dispatch_key(example_problem("bfloat16", 576, direction=direction), "sm_80")
        assert (refused.value.field, refused.value.nearest) == ("head_dim", 512)
    wide = example_problem("float64", 512, direction="backward")
    assert dispatch_key(wide, "sm_80").kernel == "backward_simple"
    with pytest.raises(ga.Unsupported, match="shared memory on sm_86") as refused:
        dispatch_key(wide, "sm_86")
    assert (refused.value.field, refused.value.value, refused.value.nearest) == ("head_dim", 512, 256)


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_tensor_cores_take_heads_from_8_columns(direction: Any) -> None:
    for dim in range(8, 257, 8):
        problem = example_problem("bfloat16", dim, direction=direction)
        assert dispatch_key(problem, "sm_80").kernel == f"{direction}_mma"
        assert dispatch_key(problem, "sm_90a").kernel == f"{direction}_sm90"


def keys_of_new_dims() -> list[DispatchKey]:
    problems = [example_problem("bfloat16", dim, direction=way) for way in ("forward", "backward") for dim in (8, 512)]
    problems += [example_problem("float64", 512, direction=way) for way in ("forward", "backward")]
    return [dispatch_key(problem, "sm_80") for problem in problems]


@pytest.mark.sweep
@pytest.mark.parametrize("key", keys_of_new_dims(), ids=lambda key: f"{key.kernel}-{key.dtype}-{key.head_dim}")
def test_registers_hold_what_a_lane_sums(key: DispatchKey) -> None:
    code = code_of(kernel_source(key), key.kernel)
    assert not code_faults(code, register_limit(tile_of(key).warps * 32))


@pytest.mark.sweep
@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_90a"])
@pytest.mark.parametrize("kv_dtype", ["bfloat16", "float8_e4m3fn"])
@pytest.mark.parametrize("latent", [False, True])
@pytest.mark.parametrize("heads", [8, 128])
def test_registers_hold_half_of_a_wide_row(arch: str, kv_dtype: str, latent: bool, heads: int) -> None:
    cache: dict[str, Any] = {"layout": "paged", "kv_dtype": kv_dtype, "page_size": 16, "latent": latent}
    sizes = {"seqlen_q": 1, "total_q": 1, "heads_q": heads, "head_dim_v": 512}
    problem = example_problem("bfloat16", 576 if latent else 512, causal=True, **cache, **sizes)
    key = dispatch_key(problem, arch)
    assert key.kernel == "decode_mma"
    code = code_of(kernel_source(key), key.kernel)
    assert not code_faults(code, register_limit(decode_tile(key).tile.warps * 32))
