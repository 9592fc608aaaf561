"""Gradients of a q, k or v that every sequence of a batch shares: sums over the batch, rounded once."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from cases.poison import poison_unseen_backward
from emulated import backward as emulated_backward
from emulated.contraction import arithmetic, fused_products, like_hardware
from inside.reference import COMPUTE, UNIT_ROUNDOFF, compare, rounder
from support.gate import code_faults, code_of, kernel_source, register_limit

import gpu_actors as ga
from gpu_actors.kernels.dispatch import FAMILIES, dispatch_key, program_of
from gpu_actors.kernels.key_checks import check_key
from gpu_actors.kernels.shared_gradients import SUM
from gpu_actors.kernels.support import example_problem
from gpu_actors.reference import attention_backward, attention_forward
from gpu_actors.testing import gradient_bounds, random_backward

BATCH, ROWS, KEYS, HEADS, HEADS_KV, DIM, DIM_V = 3, 70, 150, 4, 2, 32, 40
SUMMED = ("q", "k", "v", "kv", "qv", "qk")
LAUNCHES = (("late", "greedy", 0), ("eager", "lane", 1), ("random", "random", 2))
Operands = dict[str, Any]


def kind_of(dtype: str) -> Any:
    return np.dtype(getattr(ml_dtypes, dtype, dtype))


def operands(summed: str, dtype: str = "float16", **options: Any) -> Operands:
    """q, k, v and dout, where shared operands have one sequence; out and lse are forward's."""
    rng = np.random.default_rng(3)
    shapes = {
        "q": (ROWS, HEADS, DIM),
        "k": (KEYS, HEADS_KV, DIM),
        "v": (KEYS, HEADS_KV, DIM_V),
        "dout": (ROWS, HEADS, DIM_V),
    }
    given = {
        name: rng.standard_normal((1 if name in summed else BATCH, *shape)).astype(kind_of(dtype))
        for name, shape in shapes.items()
    }
    whole = {name: given[name] for name in "qkv"} | repeated({name: given[name] for name in "qkv"})
    found = attention_forward(**whole, **options)
    return given | {"out": found.out.astype(kind_of(dtype)), "lse": found.lse.astype(np.float32)}


def repeated(given: Mapping[str, Any]) -> Operands:
    """The same with a copy of a shared operand for each sequence."""
    return {
        name: np.repeat(array, BATCH, axis=0) if len(array) == 1 and name in "qkv" else array
        for name, array in given.items()
    }


def expected(given: Operands, summed: str, **options: Any) -> Operands:
    """The gradients in float64, from the oracle's for a batch without sharing."""
    found = attention_backward(**repeated(given), **options)
    wanted: Operands = {f"d{name}": np.asarray(getattr(found, f"d{name}"), np.float64) for name in "qkv"}
    for name in summed:
        wanted[f"d{name}"] = wanted[f"d{name}"].sum(axis=0, keepdims=True)
    return wanted


def check(found: Any, given: Operands, summed: str, compute: str | None = None, **options: Any) -> float:
    """Check within the sum of the tolerance rule's bounds of each sequence's part, and the roundings of their sum."""
    whole = repeated({name: given[name] for name in ("q", "k", "v", "dout")})
    if compute is not None:
        step = rounder(COMPUTE[compute])
        whole = {name: step(array) for name, array in whole.items()}
    options |= {"out": given["out"], "lse": given["lse"]}
    exact = attention_backward(**whole, **options)
    bounds = gradient_bounds(**whole, reference=exact, compute=compute, **options)
    worst = 0.0
    for name in ("dq", "dk", "dv", "dbias", "dsinks"):
        got, wanted, bound = (getattr(each, name) for each in (found, exact, bounds))
        assert (got is None) == (wanted is None), name
        if got is None:
            continue
        own = given[name[1:]] if name[1:] in given else options[name[1:]]
        assert (got.shape, got.dtype) == (own.shape, own.dtype)
        if name[1:] in summed:
            adding = "float64" if got.dtype == np.float64 else "float32"
            size = BATCH * UNIT_ROUNDOFF[adding] * np.abs(wanted).sum(axis=0, keepdims=True)
            wanted = wanted.sum(axis=0, keepdims=True)
            bound = np.broadcast_to(bound, whole[name[1:]].shape).sum(axis=0, keepdims=True) + size
        rounding = UNIT_ROUNDOFF[got.dtype.name] * np.abs(wanted) + (2.0**-24 if got.dtype == np.float16 else 0.0)
        worst = max(worst, compare(name, np.asarray(got), wanted, bound + rounding, f"{summed} {sorted(options)}"))
    return worst


def answered(ctx: ga.GpuContext, given: Operands, **options: Any) -> Any:
    return ctx.flash_attn.backward(**given, **options).result(200)


def opened(arch: str) -> Any:
    emulation = ga.EmulationOptions(arithmetic=arithmetic())
    return ga.open_context("emulated", ga.ContextOptions(arch=arch, emulation=emulation))


def test_the_mock_device_adds_them_up() -> None:
    with ga.open_context("mock") as ctx:
        for summed in SUMMED:
            given = operands(summed, causal=True)
            wanted = expected(given, summed, causal=True)
            for _ in range(2):  # the second finds the plan of the first
                found = answered(ctx, given, causal=True)
                for name, sums in wanted.items():
                    np.testing.assert_array_equal(getattr(found, name), sums.astype(np.float16), err_msg=name)


def test_a_batch_that_repeats_an_array_has_a_gradient_for_each() -> None:
    """The array comes from NumPy's broadcast_to, whose strides are those of a shared operand."""
    given = operands("k")
    given["k"] = np.broadcast_to(given["k"], (BATCH, *given["k"].shape[1:]))
    with ga.open_context("mock") as ctx:
        found = answered(ctx, given)
        shared = answered(ctx, {**given, "k": given["k"][:1]})
    assert (found.dk.shape[0], shared.dk.shape[0]) == (BATCH, 1)


KERNELS = (
    ("backward_mma", "sm_80", "float16", "kv", {}),  # the variant of most tests here
    ("backward_simple", "sm_80", "float64", "qv", {"window_size": (40, 3)}),
)
MORE = (
    ("backward_mma", "sm_80", "float16", "kv", {"causal": True}),
    ("backward_mma", "sm_90a", "bfloat16", "q", {}),
    ("backward_mma", "sm_80", "bfloat16", "qk", {"softcap": 5.0}),
    ("backward_mma", "sm_80", "float32", "v", {"compute": "tf32", "causal": True}),
    ("backward_simple", "sm_80", "float32", "kv", {}),
    ("backward_simple", "sm_90a", "float32", "q", {"causal": True}),
    ("backward_mma", "sm_90a", "float16", "k", {"deterministic": True}),
)


@pytest.mark.parametrize(
    ("kernel", "arch", "dtype", "summed", "options"),
    [*KERNELS, *(pytest.param(*case, marks=pytest.mark.sweep) for case in MORE)],
)
def test_kernels_add_them_up(kernel: str, arch: str, dtype: str, summed: str, options: Mapping[str, Any]) -> None:
    math = {name: value for name, value in options.items() if name not in ("compute", "deterministic")}
    given = operands(summed, dtype, **math)
    with opened(arch) as ctx:
        request = ga.FlashBackward(**given, **options)
        assert ctx.flash_attn.inspect_key(request).kernel == kernel
        found = answered(ctx, given, **options)
    check(found, given, summed, options.get("compute"), **math)


@pytest.mark.parametrize("seed", [3, *(pytest.param(seed, marks=pytest.mark.sweep) for seed in range(4, 40))])
def test_every_option_goes_with_them(seed: int) -> None:
    """The seed draws options. NaN fills keys and values that no row sees, and rows that see no key."""
    dtype = ("float16", "bfloat16", "float32", "float64")[seed // 2 % 4]
    rng, arch = np.random.default_rng((seed, 1)), ("sm_80", "sm_90a")[seed % 2]
    dims, heads = [(32, 40), (64, 64), (40, 24), (128, 64)][rng.integers(4)], [(4, 2), (2, 2), (4, 1)][rng.integers(3)]
    lengths = int(rng.integers(1, 90)), int(rng.integers(1, 140))
    case = random_backward(
        seed, dtype=dtype, varlen=False, batch=BATCH, heads=heads, head_dim=dims[0], head_dim_v=dims[1], seqlens=lengths
    )
    summed = SUMMED[rng.integers(6)]
    given: Operands = {name: getattr(case.forward, name)[: 1 if name in summed else BATCH] for name in "qkv"}
    whole = repeated(given)
    result = attention_forward(**whole, **case.options)
    given |= {"dout": case.dout, "out": result.out.astype(kind_of(dtype)), "lse": result.lse.astype(np.float32)}
    forward = dataclasses.replace(case.forward, **whole)
    hidden = poison_unseen_backward(dataclasses.replace(case, forward=forward, out=given["out"], lse=given["lse"]))
    poisoned = {"dout": hidden.dout, "out": hidden.out, "lse": hidden.lse}
    for name in "qkv":
        array = getattr(hidden.forward, name)
        unread = np.isnan(array).all(axis=0, keepdims=True)
        poisoned[name] = np.where(unread, array[:1], given[name]) if name in summed else array
    with opened(arch) as ctx:
        found = answered(ctx, poisoned, deterministic=seed % 3 == 0, **case.options)
    check(found, given, summed, **case.options)


@pytest.mark.parametrize("fused", [False, pytest.param(True, marks=pytest.mark.sweep)])
@pytest.mark.parametrize(
    ("kernel", "summed"), [("backward_mma", "kv"), pytest.param("backward_simple", "q", marks=pytest.mark.sweep)]
)
def test_they_do_so_in_every_schedule(kernel: str, summed: str, fused: bool) -> None:
    """The gradients are sums of float32 parts within the tolerance in every schedule and delivery."""
    given = operands(summed)
    whole = {name: np.broadcast_to(given[name], (BATCH, *given[name].shape[1:])) for name in "qkv"}
    problem = emulated_backward.backward_problem_of(*(whole[name] for name in "qkv"))
    problem = dataclasses.replace(problem, summed=summed)
    views = {name: emulated_backward.Strided(array, given[name]) for name, array in whole.items() if name in summed}
    sums = {f"d{name}": np.full(given[name].shape, np.nan, given[name].dtype) for name in summed}
    arrays = {**given, **views, **sums}
    with fused_products(fused), like_hardware() if fused else contextlib.nullcontext():
        for delivery, schedule, seed in LAUNCHES:
            launch = {"delivery": delivery, "schedule": schedule, "seed": seed}
            found = emulated_backward.run(problem, arrays, arch="sm_80", kernel=kernel, **launch)
            check(found, given, summed)


def test_a_sum_is_rounded_once() -> None:
    """Parts may cancel to less than a unit of one of them, or exceed float16's range."""
    rng = np.random.default_rng(0)
    rows, keys = 16, 1
    q = rng.standard_normal((2, rows, 1, DIM)).astype(np.float16)
    k, v = (rng.standard_normal((1, keys, 1, dim)).astype(np.float16) for dim in (DIM, DIM_V))
    dout = np.zeros((2, rows, 1, DIM_V), np.float16)
    # dv is the sum of dout over rows, as each row sees the one key alone.
    dout[0, :, 0, 0], dout[1, :, 0, 0] = 60000.0, -60000.0
    dout[0, 0, 0, 1], dout[1, 0, 0, 1] = 2048.0, -2048.0
    dout[0, 1, 0, 1] = 0.5
    dout[:, 0, 0, 2] = 1.0
    dout[:, 1, 0, 2] = 2.0**-11  # half a unit of 1 each, rounded to even
    dout[1, 2, 0, 2] = 2.0**-12
    out = np.repeat(np.repeat(v, rows, axis=1), 2, axis=0)
    lse = np.einsum("bihd,kjhd->bhi", q.astype(float), k.astype(float)).astype(np.float32) * np.float32(DIM**-0.5)
    with opened("sm_80") as ctx:
        found = ctx.flash_attn.backward(dout, q, k, v, out, lse).result(100)
    assert found.dv.shape == (1, 1, 1, DIM_V)
    np.testing.assert_array_equal(found.dv[0, 0, 0, :3].astype(float), [0.0, 0.5, 2.0 + 2.0**-9])


# Requests


def test_hoppers_own_kernel_leaves_them_to_mma() -> None:
    problem = example_problem("bfloat16", 128, direction="backward", batch=2, total_q=2048, total_k=2048, summed="kv")
    key = dispatch_key(problem, "sm_90a")
    assert (key.kernel, key.summed) == ("backward_mma", "kv")
    hopper = next(family for family in FAMILIES if family.name == "backward_sm90")
    assert hopper.refusal(problem, "sm_90a").field == "summed"
    program = program_of(problem, key)
    assert [part.key.kernel for part in program.parts][-2:] == [SUM, SUM]
    assert {"dk_parts", "dv_parts"} < program.scratch.keys()
    assert program.scratch["dk_parts"].dtype == "float32"
    assert len({kernel_source(part.key) for part in program.parts[-2:]}) == 1


def test_keys_of_sums_can_be_compiled_ahead() -> None:
    for dtype in ("bfloat16", "float64"):
        compute = "f64" if dtype == "float64" else "bf16"
        problem = example_problem(dtype, 64, direction="backward", batch=2, summed="q", compute=compute)
        for part in program_of(problem, dispatch_key(problem, "sm_80")).parts:
            assert check_key(part.key) == part.key
    wrong = dataclasses.replace(dispatch_key(problem, "sm_80"), summed="vk")
    with pytest.raises(ga.InvalidRequest) as caught:
        check_key(wrong)
    assert caught.value.field == "summed"
    forward = dispatch_key(example_problem("bfloat16", 64), "sm_80")
    with pytest.raises(ga.Unsupported, match="forward gives no gradients"):
        check_key(dataclasses.replace(forward, summed="k"))


def test_batches_that_are_not_one_are_refused() -> None:
    """Padded sequences need whole batches."""
    given, used = operands(""), np.array([5, 70, 0], np.int32)
    given["k"] = given["k"][:2]
    with ga.open_context("mock") as ctx:
        with pytest.raises(ga.InvalidRequest, match="must have q's batch, 3") as caught:
            answered(ctx, given)
        assert caught.value.field == "k"
        with pytest.raises(ga.Unsupported, match="repeat it for each") as refused:
            answered(ctx, operands("kv"), seqused_q=used)
        assert (refused.value.field, refused.value.nearest) == ("k", "a batch of 3")


def test_plans_of_shared_and_whole_batches_differ() -> None:
    with ga.open_context("mock") as ctx:
        keys = {ctx.flash_attn.inspect_key(ga.FlashBackward(**operands(summed))) for summed in ("k", "kv", "q", "")}
    assert sorted(key.summed for key in keys) == ["", "k", "kv", "q"]


GATED = [
    (arch, dtype, dim, summed)
    for arch in ("sm_80", "sm_90a")
    for dtype in ("float16", "bfloat16")
    for dim in (64, 128, 192, 256)
    for summed in ("q", "kv")
]


@pytest.mark.sweep
@pytest.mark.parametrize("variant", GATED, ids=str)
def test_nothing_is_spilled(variant: tuple[str, str, int, str]) -> None:
    arch, dtype, dim, summed = variant
    problem = example_problem(dtype, dim, direction="backward", causal=True, summed=summed)
    for part in program_of(problem, dispatch_key(problem, arch)).parts:
        limit = register_limit(part.geometry.block[0])
        assert code_faults(code_of(kernel_source(part.key), part.key.kernel), limit) == []
