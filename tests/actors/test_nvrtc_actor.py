"""Requests to the NvrtcActor: if it refuses one, the reply raises the refusal, and the actor goes on."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from inside.kernels import Prepare, check_key, variants

import gpu_actors as ga
from gpu_actors import DispatchKey
from gpu_actors.actors.nvrtc import Warm

FASTEST, *_ = variants.standard_variants("sm_90a")
SIMPLE = dataclasses.replace(FASTEST, kernel="forward_simple", persistent=False)
TEXT = 'extern "C" __global__ void k(int* p) { *p = 1; }'


@pytest.fixture(scope="module")
def ctx(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ga.GpuContext]:
    options = ga.ContextOptions(cache_dir=tmp_path_factory.mktemp("c"), drain_timeout=2.0)
    with ga.open_context("mock", options) as ctx:
        yield ctx


def broken_keys() -> Iterator[DispatchKey]:
    yield FASTEST
    raise ZeroDivisionError("the keys ran out")


def changed(**fields: Any) -> DispatchKey:
    return dataclasses.replace(SIMPLE, **fields)


BAD_KEYS: list[tuple[str, DispatchKey]] = [
    (field, changed(**{field: value}))
    for field, values in {
        "kernel": (None, "reference", "forward", ["forward_simple"], np.ones(2)),
        "arch": (None, "", "sm_90", "sm_75", 90, ["sm_80"]),
        "direction": (None, "sideways", "backward", ["forward"]),
        "layout": (None, "sparse", "paged", ["dense"]),
        "dtype": (None, "int8", np.float16, ["float16"], np.ones(2)),
        "kv_dtype": (None, "int8", "float16"),
        "out_dtype": (None, "int8", "float64"),
        "compute": (None, "x", "tf32", ["bf16"]),
        "head_dim": (None, "64", 0, -1, 513, 64.0, True, np.ones(1)),
        "head_dim_v": (None, "64", 0, 1 << 40),
        "mask": (None, "x", ["full"]),
        "alignment": (None, "left"),
        "gqa_ratio": (None, 0, "2"),
        "softcap": (None, 1.0, "yes"),
        "alibi": (None, "heads"),
        "sinks": (None, 1),
        "sink_tokens": (None, 1),
        "bias": ("x", False, 0, "float64"),
        "dropout": (None, 0.1),
        "descales": (None, 1),
        "lse": (None, 1),
        "page_size": (None, -1, "16"),
        "num_splits": (None, 0, 2),
        "persistent": (None, 1, True),
    }.items()
    for value in values
]


@pytest.mark.parametrize(("field", "key"), BAD_KEYS, ids=[field for field, _ in BAD_KEYS])
def test_a_key_of_no_kernel_is_refused_by_its_field(ctx: ga.GpuContext, field: str, key: DispatchKey) -> None:
    with pytest.raises(ga.RequestError) as caught:
        ctx.nvrtc.warm([FASTEST, key]).result(10.0)
    assert caught.value.field == field
    assert ctx.nvrtc.restarts == 0


def test_a_tensor_core_kernel_names_what_it_does_not_take(ctx: ga.GpuContext) -> None:
    for field, value in (("head_dim", 36), ("head_dim_v", 20)):
        with pytest.raises(ga.Unsupported) as caught:
            ctx.nvrtc.warm([dataclasses.replace(FASTEST, **{field: value})]).result(10.0)
        assert (caught.value.field, caught.value.value) == (field, value)


@pytest.mark.parametrize("arch", ["sm_80", "sm_89", "sm_90a", "sm_100a"])
def test_every_standard_key_passes(arch: str) -> None:
    for key in variants.standard_variants(arch):
        check_key(key)


@pytest.mark.parametrize("keys", [5, None, [None], ["a"], "ab", FASTEST, broken_keys(), [FASTEST, 3], np.ones(2)])
def test_what_is_no_list_of_keys_is_refused_by_the_reply(ctx: ga.GpuContext, keys: Any) -> None:
    for reply in (ctx.nvrtc.warm(keys), ctx.nvrtc.submit(Warm(keys))):
        with pytest.raises(ga.InvalidRequest) as caught:
            reply.result(10.0)
        assert caught.value.field == "keys"
    assert ctx.nvrtc.restarts == 0


@pytest.mark.parametrize("variant", [None, "forward_mma", 3, FASTEST])
def test_what_is_no_variant_cannot_be_prepared(ctx: ga.GpuContext, variant: Any) -> None:
    with pytest.raises(ga.InvalidRequest) as caught:
        ctx.nvrtc.submit(Prepare(variant)).result(10.0)
    assert caught.value.field == "variant"


def test_a_progress_that_cannot_be_called_is_refused(ctx: ga.GpuContext) -> None:
    with pytest.raises(ga.InvalidRequest) as caught:
        ctx.nvrtc.warm([FASTEST], progress=3).result(10.0)  # type: ignore[arg-type]
    assert caught.value.field == "progress"


@pytest.mark.parametrize("arch", ["", "bogus", 90, ["sm_80"], b"sm_80", np.ones(2)])
@pytest.mark.parametrize("own", [None, "sm_80"])
def test_an_arch_that_is_none_is_refused_by_the_reply(ctx: ga.GpuContext, arch: Any, own: str | None) -> None:
    source = ga.KernelSource("k.cu", TEXT, ("k",), arch=own)
    with pytest.raises(ga.InvalidRequest) as caught:
        ctx.nvrtc.compile(source, arch=arch).result(10.0)
    assert caught.value.field == "arch"
    assert ctx.nvrtc.restarts == 0


def test_requests_state_how_long_they_may_wait(ctx: ga.GpuContext) -> None:
    source = ga.KernelSource("k.cu", TEXT, ("k",))
    for reply in (ctx.nvrtc.compile(source, timeout=-1.0), ctx.nvrtc.warm([FASTEST], timeout=-1.0)):
        with pytest.raises(ga.DeadlineExceeded):
            reply.result(10.0)
    with pytest.raises(ga.InvalidRequest) as caught:
        ctx.nvrtc.warm([], priority="high").result(10.0)  # type: ignore[arg-type]
    assert caught.value.field == "priority"


def test_a_warmed_key_comes_back_with_its_cubin(ctx: ga.GpuContext, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    (warmed,) = ctx.nvrtc.warm(
        (key for key in [SIMPLE]), lambda done, total, key: seen.append((done, total)), timeout=60.0
    ).result(60.0)
    assert (warmed.key, warmed.cubin.arch, seen) == (SIMPLE, "sm_90a", [(1, 1)])
    assert ctx.nvrtc.warm([]).result(10.0) == []
