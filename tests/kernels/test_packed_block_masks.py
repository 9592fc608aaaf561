"""Kernels follow the lists of packed sequences: each has its own, and hidden tiles are not loaded."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import pytest
from cases.block_lists import usually
from cases.listed_tiles import listed_tiles
from cases.packed_block_masks import (
    BLOCK,
    KINDS,
    PACKED,
    arrays_of,
    explicit,
    mask_of,
    near,
    poisoned,
)
from support.counting import counting

import gpu_actors as ga


@pytest.fixture(scope="module")
def opened() -> Any:
    """The device of an architecture, on Hopper with so few multiprocessors that each has several tiles."""
    with pytest.MonkeyPatch.context() as patch, contextlib.ExitStack() as stack:
        patch.setattr("gpu_actors.kernels.forward_sm90.MULTIPROCESSORS", 3)
        options = (ga.ContextOptions(arch=arch) for arch in ("sm_80", "sm_90a"))
        yield {each.arch: stack.enter_context(ga.open_context("emulated", each)) for each in options}


def check_forward(ctx: ga.GpuContext, causal: bool, modified: bool, full: bool, kernel: str) -> None:
    arrays = arrays_of()
    mask = mask_of(full=full, mask_mod=near if modified else None)
    options: dict[str, Any] = {**PACKED, "causal": causal, "block_mask": mask, "return_lse": True}
    given = poisoned(arrays)
    assert ctx.flash_attn.inspect_key(ga.FlashForward(**given, **options)).kernel == kernel
    found = ctx.flash_attn.forward(**given, **options).result(100.0)
    out, lse = explicit(arrays, causal, modified)
    np.testing.assert_allclose(found.out.astype(np.float64), out, atol=4e-3)
    np.testing.assert_allclose(found.lse, lse, atol=1e-3)


@pytest.mark.parametrize(("causal", "modified", "full"), usually((True, True, True)))
@pytest.mark.parametrize(("arch", "kernel"), [("sm_80", "forward_mma"), ("sm_90a", "forward_sm90")])
def test_packed_sequences_have_lists_of_their_own(
    opened: Any, arch: str, kernel: str, causal: bool, modified: bool, full: bool
) -> None:
    check_forward(opened[arch], causal, modified, full, kernel)


def assert_gradients(found: Any, wanted: Any) -> None:
    for name in ("dq", "dk", "dv"):
        mine, expected = (getattr(gradients, name).astype(np.float64) for gradients in (found, wanted))
        np.testing.assert_allclose(mine, expected, atol=8e-3, rtol=8e-3, err_msg=name)


def check_backward(ctx: ga.GpuContext, causal: bool, modified: bool, full: bool) -> None:
    arrays = arrays_of()
    out, lse = explicit(arrays, causal, modified)
    dout = np.random.default_rng(1).standard_normal(out.shape).astype(np.float16)
    given: dict[str, Any] = {**arrays, "out": out.astype(np.float16), "dout": dout, "lse": lse.astype(np.float32)}
    mask = mask_of(full=full, mask_mod=near if modified else None)
    options: dict[str, Any] = {**PACKED, "causal": causal, "block_mask": mask}
    with ga.open_context("mock") as mock:
        wanted = mock.flash_attn.backward(**given, **options).result(100.0)
    for name in ("q", "dout"):  # the first rows of a head, which see no key
        given[name] = given[name].copy()
        given[name][:BLOCK, 1] = np.nan
    assert ctx.flash_attn.inspect_key(ga.FlashBackward(**given, **options)).kernel == "backward_mma"
    found = ctx.flash_attn.backward(**poisoned(given), **options).result(100.0)
    assert_gradients(found, wanted)


@pytest.mark.parametrize(("causal", "modified", "full"), usually((True, True, True)))
def test_gradients_of_packed_sequences(opened: Any, causal: bool, modified: bool, full: bool) -> None:
    check_backward(opened["sm_80"], causal, modified, full)


@pytest.mark.sweep
def test_blocks_of_packed_sequences_take_turns() -> None:
    """Gradients have the same bits in every order of blocks."""
    arrays = arrays_of()
    out, lse = explicit(arrays, True, True)
    dout = np.random.default_rng(1).standard_normal(out.shape).astype(np.float16)
    given: dict[str, Any] = {**arrays, "out": out.astype(np.float16), "dout": dout, "lse": lse.astype(np.float32)}
    options: dict[str, Any] = {**PACKED, "causal": True, "block_mask": mask_of(), "deterministic": True}
    with ga.open_context("mock") as mock:
        wanted = mock.flash_attn.backward(**given, **options).result(100.0)
    answers = []
    for launch in (
        ga.EmulationOptions(delivery="late", schedule="greedy", seed=0),
        ga.EmulationOptions(delivery="random", schedule="random", seed=5, contraction=False),
    ):
        with ga.open_context("emulated", ga.ContextOptions(arch="sm_80", emulation=launch)) as ctx:
            answers.append(ctx.flash_attn.backward(**given, **options).result(100.0))
    assert_gradients(answers[0], wanted)
    for name in ("dq", "dk", "dv"):
        np.testing.assert_array_equal(getattr(answers[1], name), getattr(answers[0], name))


@pytest.mark.sweep
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    ("delivery", "schedule", "fused"),
    [("eager", "lane", True), ("random", "random", False), ("late", "round_robin", True)],
)
@pytest.mark.parametrize(("arch", "kernel"), [("sm_80", "forward_mma"), ("sm_90a", "forward_sm90")])
def test_packed_sequences_in_every_delivery(
    arch: str, kernel: str, delivery: Any, schedule: Any, fused: bool, causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpu_actors.kernels.forward_sm90.MULTIPROCESSORS", 3)
    emulation = ga.EmulationOptions(delivery=delivery, schedule=schedule, seed=7, contraction=fused)
    with ga.open_context("emulated", ga.ContextOptions(arch=arch, emulation=emulation)) as ctx:
        check_forward(ctx, causal, True, True, kernel)
        if arch == "sm_80":
            check_backward(ctx, causal, True, True)


COUNTED: tuple[tuple[str, str, str, int, int], ...] = (
    ("sm_80", "", "copy_rows<THREADS>(k_tile(n),", 0, 1),
    ("sm_90a", "forward_sm90/producer.cuh", "ptx::mbarrier_arrive_expect_tx(full, Tile::BYTES);", 0, 2),
    ("sm_80", "", "multiply_rows<QTile, KTile, 2>(s, q,", 0, 1),
    ("sm_90a", "forward_sm90/consumer.cuh", "const uint64_t q = QBoxes::rows(shared.q(number)), k = ", 128, 1),
    ("backward", "backward/ring.cuh", "copy_rows<THREADS>(q_tile(now),", 0, 1),
    ("backward", "", "multiply_queries(p, ring.k_tile(), q_tile, warp);  // line 10", 0, 1),
)


@pytest.mark.parametrize(
    ("arch", "file", "place", "thread", "times"),
    [case if n < 1 else pytest.param(*case, marks=pytest.mark.sweep) for n, case in enumerate(COUNTED)],
)
def test_hidden_tiles_are_neither_loaded_nor_multiplied(
    monkeypatch: pytest.MonkeyPatch, arch: str, file: str, place: str, thread: int, times: int
) -> None:
    """Only tiles of listed blocks count, without those behind the last row or key of each sequence."""
    count = counting(monkeypatch, file, place, thread)
    arrays = arrays_of()
    options: dict[str, Any] = {**PACKED, "block_mask": mask_of(mask_mod=None)}
    with ga.open_context("emulated", ga.ContextOptions(arch="sm_80" if arch == "backward" else arch)) as ctx:
        if arch == "backward":
            out, lse = explicit(arrays, False, False)
            given = {**arrays, "out": out.astype(np.float16), "lse": lse.astype(np.float32)}
            request: Any = ga.FlashBackward(**given, dout=given["out"], **options)
        else:
            request = ga.FlashForward(**arrays, **options)
        key = ctx.flash_attn.inspect_key(request)
        ctx.flash_attn.submit(request).result(100.0)
    assert count.value == times * listed_tiles(key) > 0


@pytest.mark.parametrize(
    "kernel", ["forward_mma", "forward_sm90", pytest.param("backward_mma", marks=pytest.mark.sweep)]
)
def test_what_no_list_can_name_is_hidden(kernel: str, opened: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lists end at the stated longest sequence. Rows and keys that lengths on a device have behind that are hidden."""
    ctx = opened["sm_90a" if kernel == "forward_sm90" else "sm_80"]
    monkeypatch.setattr("gpu_actors.planning.forward.check_cu_seqlens", lambda *_: None)
    arrays = arrays_of()
    said = {"max_seqlen_q": 2 * BLOCK, "max_seqlen_k": 4 * BLOCK}
    kinds = KINDS.copy()
    kinds[:, :, 2:] = kinds[:, :, :, 4:] = 0
    mask = mask_of(kinds[:, :, :2, :4])
    out, lse = explicit(arrays, False, True, kinds)
    if kernel != "backward_mma":
        found = ctx.flash_attn.forward(**arrays, **PACKED, **said, block_mask=mask, return_lse=True).result(100.0)
        np.testing.assert_allclose(found.out.astype(np.float64), out, atol=4e-3)
        np.testing.assert_allclose(found.lse, lse, atol=1e-3)
        return
    given = {"out": out.astype(np.float16), "lse": lse.astype(np.float32), "dout": out.astype(np.float16)}
    gradients = ctx.flash_attn.backward(**arrays, **given, **PACKED, **said, block_mask=mask).result(100.0)
    with ga.open_context("mock") as mock:
        wanted = mock.flash_attn.backward(**arrays, **given, **PACKED, block_mask=mask_of(kinds)).result(100.0)
    assert_gradients(gradients, wanted)


def test_dropout_keeps_its_seed(opened: Any) -> None:
    arrays = arrays_of()
    options: dict[str, Any] = {**PACKED, "block_mask": mask_of(), "dropout_p": 0.5}
    with ga.open_context("mock") as mock:
        first, other = (
            mock.flash_attn.forward(**arrays, **options, dropout_seed=seed).result(100.0) for seed in (7, 8)
        )
    found = opened["sm_80"].flash_attn.forward(**arrays, **options, dropout_seed=7).result(100.0)
    np.testing.assert_allclose(found.out.astype(np.float64), first.out.astype(np.float64), atol=8e-3)
    assert abs(first.out.astype(np.float64) - other.out).max() > 0.1


@pytest.mark.parametrize(
    "summed", ["kv", *(pytest.param(names, marks=pytest.mark.sweep) for names in ("k", "q", "qv"))]
)
def test_gradients_of_operands_that_a_batch_shares(opened: Any, summed: str) -> None:
    rng = np.random.default_rng(2)
    shapes = {"q": (2, 130, 4, 32), "k": (2, 260, 2, 32), "v": (2, 260, 2, 32)}
    given = {
        name: rng.standard_normal((1 if name in summed else 2, *shape[1:])).astype(np.float16)
        for name, shape in shapes.items()
    }
    options: dict[str, Any] = {"block_mask": mask_of(KINDS[:2, :, :2, :3]), "causal": True}
    dout = rng.standard_normal(shapes["q"]).astype(np.float16)
    with ga.open_context("mock") as mock:
        forward = mock.flash_attn.forward(**given, **options, return_lse=True).result(100.0)
        given |= {"dout": dout, "out": forward.out, "lse": forward.lse}
        wanted = mock.flash_attn.backward(**given, **options).result(100.0)
    found = opened["sm_80"].flash_attn.backward(**given, **options).result(100.0)
    assert_gradients(found, wanted)
