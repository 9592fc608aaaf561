"""A KvCache on a GPU: rows arrive rotated, quantised and on their pages, and forks copy before they write.

GPU_ACTORS_TEST_DEVICE=emulated runs the same on the CPU.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from support.generation import drift, generate_all, prompts, tiny

import gpu_actors as ga
from gpu_actors.generation import Settings

pytestmark = pytest.mark.gpu

FP8 = "float8_e4m3fn"
# Device and oracle may round a rotated element differently, which moves scores by as much.
CLOSE = {"float16": 4e-3, "bfloat16": 3e-2}


@dataclass(frozen=True)
class Setup:
    dtype: str = "float16"
    cache_dtype: str | None = None
    head_dim: int = 64
    page_size: int = 16
    rope: ga.Rope | None = None
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def rows_dtype(self) -> Any:
        return np.dtype(getattr(ml_dtypes, self.dtype, self.dtype))

    def open(self, ctx: ga.GpuContext) -> ga.KvCache:
        return ctx.kv_cache(
            num_blocks=64,
            page_size=self.page_size,
            kv_heads=2,
            head_dim=self.head_dim,
            dtype=self.cache_dtype or self.dtype,
            **self.options,
        )


DESCALES = {"k_descale": np.float32([0.02, 0.05]), "v_descale": np.float32([0.03, 0.01])}
SETUPS = {
    "copy": Setup(),
    "bfloat16, small pages": Setup("bfloat16", page_size=8, head_dim=128),
    "halves": Setup(rope=ga.Rope(dim=64, base=500000.0)),
    "interleaved, a part of the columns": Setup("bfloat16", rope=ga.Rope(dim=40, interleaved=True), head_dim=80),
    "fp8": Setup(cache_dtype=FP8, options=DESCALES),
    "halves to fp8": Setup("bfloat16", cache_dtype=FP8, rope=ga.Rope(dim=64), options=DESCALES),
}


@pytest.fixture(scope="module")
def oracle() -> Iterator[ga.GpuContext]:
    with ga.open_context("mock") as ctx:
        yield ctx


def steps(setup: Setup, ctx: ga.GpuContext) -> list[Any]:
    """The outputs of a few steps: prefills that cross pages, a batch that decodes, a fork that both sides write to."""
    rng = np.random.default_rng(0)

    def rows(*shape: int) -> Any:
        return rng.standard_normal((*shape, setup.head_dim)).astype(np.float32).astype(setup.rows_dtype)

    outputs = []

    def attend(seqs: list[Any], counts: list[int], **how: Any) -> None:
        total = sum(counts)
        ends = np.cumsum([0, *counts], dtype=np.int32)
        q, k, v = rows(total, 8), rows(total, 2), rows(total, 2)
        result = cache.attend(q, seqs, k=k, v=v, cu_seqlens_q=ends, rope=setup.rope, **how).result(120)
        outputs.append(result.out.astype(np.float32))

    with setup.open(ctx) as cache:
        one, two = (cache.create().result(60) for _ in range(2))
        attend([one], [37])
        attend([two, one], [3, 1])
        attend([one, two], [1, 14])
        branch = cache.fork(one).result(60)
        attend([one, branch, two], [2, 5, 1])
        attend([branch, one], [1, 1], causal=False)
    return outputs


@pytest.mark.parametrize("name", SETUPS)
def test_attention_over_appended_rows_is_the_oracles(context: Any, oracle: Any, name: str) -> None:
    setup = SETUPS[name]
    for got, wanted in zip(steps(setup, context), steps(setup, oracle), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=0, atol=CLOSE[setup.dtype])


@pytest.mark.parametrize("name", SETUPS)
def test_a_row_that_sees_itself_alone_gives_back_its_value(context: Any, oracle: Any, name: str) -> None:
    """With a window of (0, 0) the output is v's row, with the bits that the cache stores."""
    setup, found = SETUPS[name], []
    for ctx in (context, oracle):
        rng = np.random.default_rng(1)
        q, k, v = (rng.standard_normal((41, heads, setup.head_dim)).astype(setup.rows_dtype) for heads in (2, 2, 2))
        with setup.open(ctx) as cache:
            seq = cache.create().result(60)
            cache.append(seq, k[:20], v[:20], rope=setup.rope).result(60)
            cache.append(seq, k[20:], v[20:], rope=setup.rope).result(60)
            out = cache.attend(q[None], [seq], window_size=(0, 0)).result(120).out[0]
        found.append(out)
        if setup.cache_dtype is None:
            np.testing.assert_array_equal(out, v)
    assert found[0].tobytes() == found[1].tobytes()


def cascaded(setup: Setup, ctx: ga.GpuContext, place: Any = lambda array: array) -> list[Any]:
    """Outputs and LSE of steps of a batch in which two groups share pages. place: moves an operand."""
    rng = np.random.default_rng(2)

    def rows(*shape: int) -> Any:
        return rng.standard_normal((*shape, setup.head_dim)).astype(np.float32).astype(setup.rows_dtype)

    found = []
    with setup.open(ctx) as cache:
        seqs: list[Any] = []
        for length, members in ((70, 3), (21, 1), (35, 2)):
            first = cache.create().result(60)
            cache.append(first, rows(length, 2), rows(length, 2), rope=setup.rope).result(60)
            seqs += [first, *(cache.fork(first).result(60) for _ in range(members - 1))]
        for count in (1, 3, 1, 1):
            q, k, v = (place(rows(6, count, heads)) for heads in (8, 2, 2))
            result = cache.attend(q, seqs, k=k, v=v, rope=setup.rope, return_lse=True).result(120)
            found += [np.asarray(getattr(side, "get", lambda side=side: side)(), np.float32) for side in result]
    return found


@pytest.mark.parametrize("where", ["host", "device"])
@pytest.mark.parametrize("name", SETUPS)
def test_pages_that_sequences_share_are_read_once_with_the_oracles_answers(
    context: Any, device: str, oracle: Any, name: str, where: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG", "gpu_actors.trace")
    setup = dataclasses.replace(SETUPS[name], options={**SETUPS[name].options, "cascade": True})
    if where == "device":
        cupy = pytest.importorskip("cupy")
        if device != "cuda" or setup.dtype != "float16":
            pytest.skip("arrays of CuPy lie on a GPU, and it has no bfloat16")
        got = cascaded(setup, context, cupy.asarray)
    else:
        got = cascaded(setup, context)
    told = [record.fields for record in caplog.records if record.event == "launch.cascade"]  # type: ignore[attr-defined]
    assert [one["taken"] for one in told] == [True] * 4
    for one, wanted in zip(got, cascaded(setup, oracle), strict=True):
        np.testing.assert_allclose(one, wanted, rtol=0, atol=CLOSE[setup.dtype])


async def test_generated_texts_have_the_plain_models_logits(device: str) -> None:
    model = tiny()
    async with ga.open_context(device) as ctx:
        begun, tokens, _ = await generate_all(
            ctx, model, prompts(4, 30), Settings(blocks=64, rows=24, dtype="float16"), 3
        )
    for generation, found in zip(begun, tokens, strict=True):
        assert drift(model, generation, found, np.float16) < 5e-3
