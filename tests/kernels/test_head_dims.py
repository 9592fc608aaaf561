"""Head dims from 8 and up to 512 in every family on the CPU, against the float64 oracle."""

from __future__ import annotations

from typing import Any

import pytest
from cases.cached_batches import random_batch
from emulated import backward as emulated_backward
from emulated.decode import DecodeCase, check
from emulated.gradients import case_of as gradient_case_of
from emulated.sweeps import Sweep, launch_of
from inside.testing import poison_unseen_backward
from support.gate import code_faults, code_of, register_limit

import gpu_actors as ga
from gpu_actors import DispatchKey
from gpu_actors.kernels.decode.variant import decode_tile
from gpu_actors.kernels.dispatch import dispatch_key
from gpu_actors.kernels.support import example_problem
from gpu_actors.kernels.tiles import tile_of
from gpu_actors.kernels.variants import kernel_source

SMALL = (
    ("mma", Sweep("bfloat16", 8, None, "causal", arch="sm_80")),
    ("mma", Sweep("float16", 24, 8, "window sinks bias", arch="sm_86", varlen=True)),
    ("mma", Sweep("float32", 16, 24, "causal dropout", compute="tf32", arch="sm_80")),
    ("sm90", Sweep("bfloat16", 8, 24, "causal")),
)
WIDE = (
    ("simple", Sweep("bfloat16", 512, None, "causal", arch="sm_80")),
    ("simple", Sweep("float32", 264, 512, "window sinks bias", arch="sm_86", varlen=True)),
    ("simple", Sweep("float64", 512, 300, "causal softcap", arch="sm_80")),
)
SHAPES = ((1, 1), (33, 95), (70, 31))


def label(value: Any) -> str:
    return str(value)


@pytest.mark.sweep
@pytest.mark.usefixtures("fused_or_not")
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("kind", "sweep"), [*SMALL, *WIDE], ids=label)
def test_gradients_agree_with_the_oracle(kind: str, sweep: Sweep) -> None:
    for index, seqlens in enumerate(SHAPES):
        heads = ((6, 2), (3, 1), (2, 2))[index % 3]
        case = poison_unseen_backward(gradient_case_of(sweep, 6000 + index, seqlens, batch=1 + index % 3, heads=heads))
        given: dict[str, Any] = {"compute": sweep.compute, "arch": sweep.arch, "kernel": f"backward_{kind}"}
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


# (architecture, q's dtype, the cache's, head_dim, head_dim_v, rows, heads, layout, options)
CACHED: tuple[tuple[str, str, str, int, int, int, tuple[int, int], str, dict[str, Any]], ...] = (
    ("sm_80", "bfloat16", "bfloat16", 8, 8, 1, (4, 2), "paged", {"causal": True}),
    ("sm_80", "float16", "float16", 24, 8, 3, (6, 2), "cache", {"window_size": (9, -1), "sink_tokens": 2}),
    ("sm_80", "bfloat16", "float8_e4m3fn", 16, 16, 5, (8, 1), "pointers", {"softcap": 5.0}),
    ("sm_86", "bfloat16", "bfloat16", 512, 512, 1, (4, 2), "paged", {"causal": True}),
    ("sm_80", "float16", "float16", 512, 264, 6, (6, 1), "cache", {"window_size": (20, -1), "sink_tokens": 2}),
    ("sm_80", "bfloat16", "float8_e4m3fn", 272, 48, 2, (4, 2), "paged", {"softcap": 5.0}),
    ("sm_80", "bfloat16", "float8_e5m2", 512, 512, 3, (16, 1), "pointers", {"causal": True}),
    ("sm_90a", "bfloat16", "bfloat16", 8, 24, 5, (8, 1), "paged", {"causal": True}),
    ("sm_90a", "float16", "float8_e4m3fn", 16, 16, 20, (1, 1), "cache", {"causal": True}),
)


@pytest.mark.sweep
@pytest.mark.usefixtures("fused_or_not")
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("cached", CACHED, ids=label)
def test_decode_agrees_with_the_oracle(cached: tuple[Any, ...]) -> None:
    arch, dtype, kv_dtype, dim, dim_v, rows, heads, layout, options = cached
    for index, lengths in enumerate(([1, 40, 0], [203], [64, 17, 300])):
        given = {"dim": dim, "dim_v": dim_v, "dtype": dtype, "kv_dtype": kv_dtype}
        batch = random_batch(index, lengths, rows=rows, heads=heads, **given)
        case = DecodeCase(batch, layout, (16, 8 if arch == "sm_90a" else 5, 64)[index], options=options)
        delivery, schedule = launch_of(index).values()
        kernel = "decode_sm90" if arch == "sm_90a" else "decode_mma"
        check(case, arch=arch, kernel=kernel, seed=index, delivery=delivery, schedule=schedule)


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
