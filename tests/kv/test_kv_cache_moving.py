"""Sequences that move between caches: they keep their bits, arrive wholly or not at all, and leak nothing."""

from __future__ import annotations

import dataclasses
import gc
import pickle
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from support.service import eventually

import gpu_actors as ga
from gpu_actors import SequencePages
from gpu_actors.testing import FaultPlan

SPEC: dict[str, Any] = {"num_blocks": 16, "page_size": 8, "kv_heads": 2, "head_dim": 16, "head_dim_v": 12}
DESCALES = {"k_descale": np.array([0.5, 2.0], np.float32), "v_descale": np.array([1.5, 0.25], np.float32)}
KINDS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "float8_e4m3fn": {"dtype": "float8_e4m3fn", **DESCALES},
    "float8_e5m2": {"dtype": "float8_e5m2"},
}


def rows(count: int, seed: int = 0, dtype: Any = ml_dtypes.bfloat16) -> tuple[Any, Any]:
    rng = np.random.default_rng((seed, count))
    k, v = rng.standard_normal((count, 2, 16)), rng.standard_normal((count, 2, 12))
    return k.astype(dtype), v.astype(dtype)


def query(dtype: Any = ml_dtypes.bfloat16) -> Any:
    return np.random.default_rng(9).standard_normal((1, 1, 4, 16)).astype(dtype)


@pytest.fixture(scope="module")
def contexts() -> Iterator[tuple[ga.GpuContext, ga.GpuContext]]:
    with ga.open_context("mock") as one, ga.open_context("mock") as other:
        yield one, other


def unused(cache: ga.KvCache) -> tuple[int, int]:
    stats = cache.stats()
    return stats.sequences, stats.free_blocks


@pytest.mark.parametrize(
    ("kind", "length", "page_size"),
    [("float32", 0, 8), ("bfloat16", 5, 1), ("float8_e4m3fn", 8, 8), ("float8_e5m2", 29, 3), ("bfloat16", 29, 8)],
)
def test_a_sequence_has_the_same_bits_elsewhere(
    contexts: tuple[ga.GpuContext, ga.GpuContext], kind: str, length: int, page_size: int
) -> None:
    spec = {**SPEC, **KINDS[kind], "page_size": page_size, "num_blocks": 64}
    dtype = np.float32 if kind == "float32" else ml_dtypes.bfloat16
    with contexts[0].kv_cache(**spec) as source, contexts[1].kv_cache(**spec) as target:
        other = target.create().result(30.0)
        target.append(other, *rows(11, 4, dtype)).result(30.0)  # so that its pages have other ids
        seq = source.create().result(30.0)
        for count in (64 * page_size, length):  # the first append writes every row of the pool
            source.truncate(seq, 0).result(30.0)
            source.append(seq, *rows(count, 1, dtype)).result(30.0)
        pages = source.export_pages(seq).result(30.0)
        assert (pages.length, len(pages.pages), pages.dtype) == (length, -(-length // page_size), kind)
        last = length % page_size or page_size
        assert not any(side.view(np.uint8)[-1:, last:].any() for side in (pages.k, pages.v)), "rows of another leave"
        # The lease keeps the exported rows, whatever happens to the sequence.
        source.append(seq, *rows(3, 2, dtype)).result(30.0)
        moved = target.import_pages(pickle.loads(pickle.dumps(pages))).result(30.0)
        assert target.length(moved) == length
        result = target.export_pages(moved).result(30.0)
        assert result.checks == pages.checks
        for name in ("k", "v"):
            np.testing.assert_array_equal(getattr(result, name).view(np.uint8), getattr(pages, name).view(np.uint8))
        new = [one[None] for one in rows(1, 3, dtype)]
        source.truncate(seq, length).result(30.0)
        q = query(dtype)
        here = source.attend(q, [seq], k=new[0], v=new[1]).result(30.0)
        there = target.attend(q, [moved], k=new[0], v=new[1], expect_length=[length]).result(30.0)
        np.testing.assert_array_equal(here.out, there.out)
        source.release(pages).result(30.0)
        target.release(result).result(30.0)
        source.free(seq).result(30.0)
        for one in (moved, other):
            target.free(one).result(30.0)
        assert unused(source) == unused(target) == (0, 64)


def test_prefixes_move_along_and_are_shared(contexts: tuple[ga.GpuContext, ga.GpuContext]) -> None:
    spec = {**SPEC, "dtype": "float32"}
    prompt = list(range(100, 121))
    with contexts[0].kv_cache(**spec) as source, contexts[1].kv_cache(**spec) as target:
        seq = source.create(prompt).result(30.0)
        source.append(seq, *rows(21, 1, np.float32), tokens=prompt).result(30.0)
        pages = source.export_pages(seq).result(30.0)
        first = target.import_pages(pages).result(30.0)
        assert first.cached == 0
        assert target.create(prompt).result(30.0).cached == 16
        second = target.import_pages(pages).result(30.0)
        assert second.cached == 16
        assert target.stats().shared_blocks == 2
        # The tokens of a partly filled page move too.
        target.append(first, *rows(3, 2, np.float32), tokens=[1, 2, 3]).result(30.0)
        assert target.create([*prompt, 1, 2, 3, 4]).result(30.0).cached == 24
        assert target.length(second) == 21
        whole = source.export_pages(source.create(prompt).result(30.0)).result(30.0)
        assert target.import_pages(whole).result(30.0).cached == 16  # without a launch


def _changed(pages: SequencePages, **changes: Any) -> SequencePages:
    return dataclasses.replace(pages, **changes)


def test_what_does_not_fit_is_refused_and_leaves_no_trace(contexts: tuple[ga.GpuContext, ga.GpuContext]) -> None:
    spec = {**SPEC, **KINDS["float8_e4m3fn"]}
    with contexts[0].kv_cache(**spec) as source, contexts[1].kv_cache(**spec) as target:
        seq = source.create().result(30.0)
        source.append(seq, *rows(20, 1)).result(30.0)
        pages = source.export_pages(seq).result(30.0)
        broken_k = pages.k.copy()
        broken_k.view(np.uint8)[1, 3, 0, 5] ^= 1
        broken_v = pages.v.copy()
        broken_v.view(np.uint8)[2, 1, 1, 3] ^= 1
        for field, wrong_pages in (
            ("checks[1]", _changed(pages, k=broken_k)),
            ("checks[2]", _changed(pages, v=broken_v)),
            ("checks[0]", _changed(pages, checks=(bytes(16), *pages.checks[1:]))),
            ("checks", _changed(pages, checks=pages.checks[1:])),
            ("page_size", _changed(pages, page_size=16)),
            ("kv_heads", _changed(pages, kv_heads=1)),
            ("head_dim", _changed(pages, head_dim=8)),
            ("head_dim_v", _changed(pages, head_dim_v=16)),
            ("dtype", _changed(pages, dtype="float8_e5m2")),
            ("k_descale", _changed(pages, k_descale=None)),
            ("v_descale", _changed(pages, v_descale=DESCALES["k_descale"])),
            ("length", _changed(pages, length=-1)),
            ("length", _changed(pages, length=True)),
            ("k", _changed(pages, length=30)),
            ("v", _changed(pages, v=pages.v[:2])),
            ("k", _changed(pages, k=pages.k.view(np.uint8))),
            ("digests", _changed(pages, digests=(b"1", b"2", b"3"))),
            ("digests", _changed(pages, tail=tuple(range(9)))),
            ("pages", 3),
        ):
            with pytest.raises(ga.InvalidRequest) as refused:
                target.import_pages(wrong_pages).result(30.0)  # type: ignore[arg-type]
            assert refused.value.field == field
            assert unused(target) == (0, 16)
        with pytest.raises(ga.InvalidRequest, match="sequence of this cache"):
            target.export_pages(seq).result(30.0)
        assert target.import_pages(pages).result(30.0)
        assert unused(source) == (2, 13)  # the sequence and its lease share the pages


def test_no_room_is_refused_and_leaves_no_trace(contexts: tuple[ga.GpuContext, ga.GpuContext]) -> None:
    spec = {**SPEC, "dtype": "float32"}
    prompt = range(40)
    with contexts[0].kv_cache(**spec) as source, contexts[1].kv_cache(**{**spec, "num_blocks": 4}) as target:
        seq = source.create().result(30.0)
        source.append(seq, *rows(40, 1, np.float32), tokens=prompt).result(30.0)
        pages = source.export_pages(seq).result(30.0)
        with pytest.raises(ga.CacheFull):
            target.import_pages(pages).result(30.0)
        assert unused(target) == (0, 4)
        source.truncate(seq, 32).result(30.0)
        fits = source.export_pages(seq).result(30.0)
        moved = target.import_pages(fits).result(30.0)
        with pytest.raises(ga.CacheFull):
            target.import_pages(pages).result(30.0)
        assert target.stats().shared_blocks == 0
        target.free(moved).result(30.0)
        assert unused(target) == (0, 4)


def test_pages_that_no_task_takes_are_given_back(contexts: tuple[ga.GpuContext, ga.GpuContext]) -> None:
    spec = {**SPEC, "dtype": "float32"}
    with contexts[0].kv_cache(**spec) as source:
        seq = source.create().result(30.0)
        source.append(seq, *rows(20, 1, np.float32)).result(30.0)
        pages = source.export_pages(seq).result(30.0)
        replies: list[Any] = [source.export_pages(seq), source.import_pages(pages)]
        for reply in replies:
            eventually(reply.done)
        del replies, reply
        gc.collect()
        source.release(pages).result(30.0)
        eventually(lambda: unused(source) == (1, 13))


@pytest.mark.parametrize("step", ["export", "import"])
def test_a_launch_that_fails_leaves_no_trace(step: str) -> None:
    spec = {**SPEC, "dtype": "float32"}
    plan = FaultPlan().fail({"export": 2, "import": 3}[step])
    with ga.open_context("mock", ga.ContextOptions(fault_plan=plan)) as ctx, ctx.kv_cache(**spec) as cache:
        seq = cache.create().result(30.0)
        cache.append(seq, *rows(20, 1, np.float32), tokens=range(20)).result(30.0)
        if step == "export":
            with pytest.raises(ga.LaunchError):
                cache.export_pages(seq).result(30.0)
            eventually(lambda: unused(cache) == (1, 13))
        pages = cache.export_pages(seq).result(30.0)
        if step == "import":
            cache.truncate(seq, 0).result(30.0)
            lone = dataclasses.replace(pages, digests=(), tail=())
            with pytest.raises(ga.LaunchError):
                cache.import_pages(lone).result(30.0)
            eventually(lambda: unused(cache) == (2, 13))  # a reply fails a moment before its pages are freed
        moved = cache.import_pages(pages).result(30.0)
        for one in (seq, pages.lease, moved):
            cache.free(one).result(30.0)
        assert unused(cache) == (0, 16)


def test_a_deadline_during_the_launch_leaves_no_trace() -> None:
    spec = {**SPEC, "dtype": "float32"}
    options = ga.ContextOptions(mock=ga.MockOptions(latency=0.3))
    with ga.open_context("mock", options) as ctx, ctx.kv_cache(**spec) as cache:
        seq = cache.create().result(30.0)
        cache.append(seq, *rows(20, 1, np.float32), tokens=range(20)).result(30.0)
        pages = cache.export_pages(seq).result(30.0)
        lone = dataclasses.replace(pages, digests=(bytes(32), bytes(32)))
        for reply in (cache.export_pages(seq, timeout=0.05), cache.import_pages(lone, timeout=0.05)):
            with pytest.raises(ga.DeadlineExceeded):
                reply.result(30.0)
        # These wait for the launches above, which leave nothing behind.
        again = cache.import_pages(lone).result(30.0)
        assert again.cached == 0
        assert unused(cache) == (3, 10)
