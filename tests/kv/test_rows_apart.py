"""Steps of a KvCache whose rows of q differ from the new rows, or are rotated by positions of their own."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from emulated.contraction import arithmetic
from inside.kernels import AppendProblem
from inside.planning import NewRows
from inside.reference import apply_rope, rope_angles
from support.kv_cache import wait

import gpu_actors as ga
from gpu_actors.testing import check_output

HEADS, DIM = 2, 64
HALVES = ga.Rope(dim=32)


@dataclass
class Step:
    """before: rows of each sequence. new: appended rows. q: rows that attend. packed: with cu_seqlens, not dense.
    place: the position at which all rows of q are rotated; None: their own. options: of the attention."""

    before: tuple[int, ...] = (13, 0, 3)
    new: tuple[int, ...] = (2, 2, 2)
    q: tuple[int, ...] = (5, 5, 5)
    rope: ga.Rope | None = HALVES
    packed: bool = False
    packed_new: bool = False
    place: int | None = None
    tables: bool = False
    options: dict[str, Any] = field(default_factory=lambda: {"causal": True})


STEPS = {
    "more rows than are new": Step(),
    "fewer rows than are new": Step(new=(7, 7, 7), q=(1, 1, 1)),
    "packed, each with ends": Step(new=(1, 0, 9), q=(3, 2, 1), packed=True, packed_new=True),
    "packed rows and as many new ones of each": Step(q=(3, 0, 4), packed=True),
    "ends of the new rows alone": Step(new=(1, 4, 0), packed_new=True),
    "nothing new": Step(before=(13, 6, 5), new=(0, 0, 0), q=(2, 2, 2)),
    "all rows at one place": Step(q=(2, 2, 2), place=40, options={"causal": False}),
    "no rotation": Step(rope=None),
    "no rotation, packed": Step(new=(1, 0, 9), q=(3, 2, 1), rope=None, packed=True, packed_new=True),
    "interleaved": Step(rope=ga.Rope(dim=64, interleaved=True), options={"causal": True, "window_size": (6, 0)}),
    "tables": Step(before=(13, 4, 3), rope=ga.Rope(dim=32, table_rows=64), tables=True),
}


def check_step(ctx: ga.GpuContext, step: Step, dtype: str = "float32", page_size: int = 5) -> None:
    """Run a step, and compare each sequence with the oracle over rows that NumPy rotates."""
    rng = np.random.default_rng(0)

    def rows(count: int, heads: int) -> Any:
        return rng.standard_normal((count, heads, DIM)).astype(dtype)

    def turned(array: Any, positions: Any) -> Any:
        if step.rope is None:
            return array
        radians = rope_angles(np.asarray(positions), np.array(step.rope.frequencies))
        cos, sin = np.cos(radians), np.sin(radians)
        return apply_rope(array, cos, sin, interleaved=step.rope.interleaved).astype(dtype)

    def arranged(parts: list[Any], packed: bool) -> Any:
        return np.concatenate(parts) if packed else np.stack(parts)

    def ends(counts: tuple[int, ...]) -> Any:
        return np.cumsum([0, *counts]).astype(np.int32)

    arguments: dict[str, Any] = {"rope": step.rope}
    if step.tables:
        assert step.rope is not None
        radians = rope_angles(np.arange(64), np.array(step.rope.frequencies))
        arguments |= {"rope_cos": np.cos(radians).astype(np.float32), "rope_sin": np.sin(radians).astype(np.float32)}
    k, v = ([rows(n, HEADS) for n in step.before] for _ in "kv")
    k_new, v_new = ([rows(n, HEADS) for n in step.new] for _ in "kv")
    q = [rows(n, 2 * HEADS) for n in step.q]
    with ctx.kv_cache(num_blocks=64, page_size=page_size, kv_heads=HEADS, head_dim=DIM, dtype=dtype) as cache:
        seqs = [wait(cache.create()) for _ in step.before]
        wait(cache.append(seqs, np.concatenate(k), np.concatenate(v), cu_seqlens=ends(step.before), **arguments))
        lengths = [old + new for old, new in zip(step.before, step.new, strict=True)]
        own = [np.arange(length - n, length) for length, n in zip(lengths, step.q, strict=True)]
        if step.place is not None:
            own = [np.full(n, step.place) for n in step.q]
            arguments["positions_q"] = np.concatenate(own).astype(np.int32)
        if step.packed:
            arguments["cu_seqlens_q"] = ends(step.q)
        if step.packed_new:
            arguments["cu_seqlens_k_new"] = ends(step.new)
        arguments |= {"k": arranged(k_new, step.packed_new), "v": arranged(v_new, step.packed_new)}
        result = wait(cache.attend(arranged(q, step.packed), seqs, return_lse=True, **arguments, **step.options))
        assert [cache.length(seq) for seq in seqs] == lengths
    starts = ends(step.q)
    for index, length in enumerate(lengths):
        if not step.q[index]:
            continue
        keys = turned(np.concatenate([k[index], k_new[index]]), np.arange(length))
        values = np.concatenate([v[index], v_new[index]])
        part = slice(starts[index], starts[index + 1])
        out, lse = (result.out[part], result.lse[:, part]) if step.packed else (result.out[index], result.lse[index])
        query = turned(q[index], own[index])
        check_output(out[None], lse[None], query[None], keys[None], values[None], repro=str(step), **step.options)


@pytest.mark.parametrize("name", STEPS)
def test_each_sequence_is_as_the_oracle_has_it(mock: ga.GpuContext, name: str) -> None:
    check_step(mock, STEPS[name])


@pytest.mark.parametrize(
    "name", ["more rows than are new", *(pytest.param(name, marks=pytest.mark.sweep) for name in list(STEPS)[1:])]
)
def test_kernels_rotate_rows_apart(name: str) -> None:
    emulation = ga.EmulationOptions(arithmetic=arithmetic())
    with ga.open_context("emulated", ga.ContextOptions(emulation=emulation)) as ctx:
        check_step(ctx, STEPS[name], "float16", 8)


def test_requests_that_rotate_apart_share_a_launch() -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((6, 1, 3, HEADS, DIM)).astype(np.float32)
    places = [np.array([index, 2 * index], np.int32) for index in range(6)]
    answers = []
    for options in (ga.ContextOptions(coalesce_delay_us=200_000), ga.ContextOptions()):
        with (
            ga.open_context("mock", options) as ctx,
            ctx.kv_cache(num_blocks=64, page_size=5, kv_heads=HEADS, head_dim=DIM, dtype="float32") as cache,
        ):
            asked = [
                (one[:, :2], [wait(cache.create())], {"k": one, "v": one, "rope": HALVES, "positions_q": place})
                for one, place in zip(x, places, strict=True)
            ]
            if answers:
                answers.append([wait(cache.attend(q, seqs, **arguments)).out for q, seqs, arguments in asked])
            else:
                replies = [cache.attend(q, seqs, **arguments) for q, seqs, arguments in asked]
                answers.append([wait(reply).out for reply in replies])
                assert ctx.stats()["kv_cache"].launched < 6
    np.testing.assert_array_equal(*answers)


@pytest.mark.parametrize("positions", [None, np.zeros(5, np.int32)], ids=["own", "given"])
def test_the_rotation_of_q_is_an_append_of_nothing(positions: Any) -> None:
    pool = AppendProblem(
        layout="paged", batch=1, total=1, heads_kv=HEADS, head_dim=DIM, head_dim_v=DIM, dtype="float16",
        cache_dtype="float16", page_size=5, num_blocks=9, max_blocks=1,
    )  # fmt: skip
    k = np.zeros((3, HEADS, DIM), np.float16)
    rows = NewRows(k, k, np.array([1, 2], np.int32), 0, HALVES, np.zeros(3, np.int32))
    (together,) = rows.problems(pool, 4)
    assert (together.total, together.heads_kv, together.heads_q, together.positions) == (3, HEADS, 4, True)
    rows.turned, rows.turned_positions = np.array([4, 1], np.int32), positions
    new, turned = rows.problems(pool, 4)
    assert (new.total, new.heads_kv, new.heads_q) == (3, HEADS, 0)
    assert (turned.total, turned.heads_kv, turned.heads_q) == (5, 0, 4)
    assert turned.positions is (positions is not None)


PLACES, TWO = np.array([3], np.int32), np.zeros(2, np.int32)
TABLE = np.ones((8, 4), np.float32)
X, FIVE = np.zeros((1, 3, HEADS, DIM), np.float32), np.zeros((1, 5, HEADS, DIM), np.float32)
IN_TABLES = {"q": FIVE, "rope": ga.Rope(dim=8, table_rows=8), "rope_cos": TABLE, "rope_sin": TABLE}
WRONG: list[tuple[dict[str, Any], str, str]] = [
    ({"positions_q": PLACES}, "positions_q", r"shape \(2,\)"),
    ({"positions_q": np.zeros(2, np.int64)}, "positions_q", "int32"),
    ({"positions_q": TWO, "rope": None}, "positions_q", "goes with a rope only"),
    ({"positions_q": TWO, "k": None, "v": None, "rope": None}, "positions_q", "with k and v"),
    ({"cu_seqlens_k_new": np.array([0, 3, 4], np.int32)}, "cu_seqlens_k_new", r"shape \(2,\)"),
    ({"cu_seqlens_k_new": np.array([0, 3], np.int32)}, "k", r"shape \(3, 2, 64\)"),
    ({"q_positions": PLACES}, "positions", "q has other rows"),
    ({"k": np.zeros((2, 3, 2, 64), np.float32)}, "k", "rows of 1 sequences"),
    ({"rope": ga.Rope(dim=8, table_rows=2)}, "rope_cos", "the rope takes tables"),
    (IN_TABLES, "positions_q", "more rows than there are keys"),
    ({**IN_TABLES, "positions_q": np.array([0, 1, 2, 3, 8], np.int32)}, "positions_q", "0 to 7"),
]


def test_what_cannot_be_is_refused(mock: ga.GpuContext) -> None:
    with mock.kv_cache(num_blocks=4, page_size=5, kv_heads=HEADS, head_dim=DIM, dtype="float32") as cache:
        seq = wait(cache.create())
        for changes, field, reason in WRONG:
            arguments = {"q": X[:, :2], "k": X, "v": X, "rope": HALVES, **changes}
            with pytest.raises(ga.RequestError, match=reason) as refused:
                wait(cache.attend(seqs=[seq], **arguments))
            assert refused.value.field == field, changes
        assert cache.length(seq) == 0
