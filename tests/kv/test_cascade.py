"""Sequences of a KvCache that share pages read them once, with the same answers."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from cases.cascades import CASES, FP8, KV_HEADS, Batch, Case, run
from emulated.memory import host_view
from support.kv_cache import contents, outcome, wait
from support.service import eventually

import gpu_actors as ga
from gpu_actors.reference import attention_forward
from gpu_actors.testing import FaultPlan, forward_bounds

EMULATED = {"sm_80": ("sinks, softcap and rows", "rows in shared pages"), "sm_90a": ("decode",)}
SWEPT = [
    pytest.param(arch, name, marks=() if name in EMULATED[arch] else pytest.mark.sweep)
    for arch in EMULATED
    for name in CASES
]


def near(found: Any, wanted: Any) -> None:
    """Compare (out, lse) of each sequence with the right (out, lse), within the bound of its output's error."""
    for index, ((out, lse), (right, right_lse, bound)) in enumerate(zip(found, wanted, strict=True)):
        error = np.abs(out.astype(np.float64) - right)
        assert (error <= bound).all(), (index, error.max())
        np.testing.assert_allclose(lse, right_lse, atol=1e-3)


@pytest.mark.parametrize("name", CASES)
def test_the_oracle_answers_a_cascade_right(name: str) -> None:
    seen = run(CASES[name], "mock", steps=1)
    assert len(seen.events) == 1
    if seen.wanted:
        near(seen.results, seen.wanted)
        return
    without = run(CASES[name], "mock", cascade=False, steps=1)
    assert without.events == []
    for (out, lse), (expected, wanted_lse) in zip(seen.results, without.results, strict=True):
        # Both are rounded once, from numbers that differ in their last bits of float64.
        np.testing.assert_allclose(out.astype(np.float64), expected.astype(np.float64), rtol=8e-3, atol=1e-6)
        np.testing.assert_allclose(lse, wanted_lse, rtol=1e-6)


@pytest.mark.parametrize(("arch", "name"), SWEPT)
def test_kernels_answer_a_cascade_right_and_choose_as_mock_does(arch: str, name: str) -> None:
    seen, mock = run(CASES[name], "emulated", arch=arch), run(CASES[name], "mock", arch=arch)
    assert seen.events == mock.events
    assert all("merge" in kernels for kernels in seen.kernels[-2:])
    if seen.wanted:
        near(seen.results, seen.wanted)
        return
    for (out, lse), (expected, wanted_lse) in zip(seen.results, mock.results, strict=True):
        np.testing.assert_allclose(out.astype(np.float64), expected.astype(np.float64), atol=4e-3)
        np.testing.assert_allclose(lse, wanted_lse, atol=2e-3)


@pytest.mark.sweep
@pytest.mark.parametrize("arch", EMULATED)
@pytest.mark.parametrize("delivery", ["late", "eager", "random"])
@pytest.mark.parametrize("contraction", [True, False])
def test_cascades_are_right_however_data_arrives(arch: str, delivery: Any, contraction: bool) -> None:
    emulation = ga.EmulationOptions(delivery=delivery, schedule="random", seed=3, contraction=contraction)
    seen = run(CASES["sinks, softcap and rows"], "emulated", arch=arch, emulation=emulation)
    near(seen.results, seen.wanted)


def test_a_shared_page_is_read_once() -> None:
    """Four sequences share ten pages and two share five: prefixes of 83 and 41 rows have ten and five whole pages."""
    case = CASES["decode"]
    (event,) = run(case, "mock", steps=1).events
    page = 8 * KV_HEADS * 2 * case.dim * 2  # bytes of K and V
    assert (event["saved_bytes"], event["prefix_keys"]) == ((10 * 3 + 5) * page, 8 * 15)
    assert (event["groups"], event["sequences"]) == (2, 6)


UNCHOSEN: dict[str, tuple[Case, str]] = {
    "a window": (Case(options={"window_size": (12, 0)}), "does not see all keys"),
    "sink tokens": (Case(options={"window_size": (12, 0), "sink_tokens": 4}), "does not see all keys"),
    "chunks": (Case(options={"attention_chunk": 32}), "does not see all keys"),
    "alibi": (Case(options={"alibi_slopes": np.full(8, 0.1, np.float32)}), "where rows and keys stand"),
    "a bias": (Case(options={"bias": np.zeros((1, 1, 1, 128), np.float16)}), "a bias has rows and keys"),
    "pinned splits": (Case(options={"num_splits": 2}), "the same bits"),
    "positions": (Case(options={"q_positions": np.arange(7, dtype=np.int32) + 100}), "where rows and keys stand"),
    "nothing shared": (Case(groups=((20, (0,)), (30, (0,)))), ""),
    "no whole page": (Case(groups=((6, (0, 0)),)), "no neighbours begin with a whole page in common"),
    "no tensor cores": (Case(dtype="float32"), "decode_simple is none of decode_mma, decode_sm90"),
    "no rows": (Case(rows=(0,) * 7, new=False), "there are no rows"),
    "factors of q": (
        Case(dtype=FP8, kv_dtype=FP8, options={"q_descale": np.ones((7, 2), np.float32)}),
        "each sequence's queries have a factor of their own",
    ),
}


@pytest.mark.parametrize("name", UNCHOSEN)
def test_what_no_cascade_is_exact_for_is_launched_without(name: str) -> None:
    case, reason = UNCHOSEN[name]
    seen = run(case, "mock", steps=1)
    assert seen.events == []
    assert [reason in told for told in seen.reasons] == [True] * bool(reason)
    if case.options.keys() & {"window_size", "bias"}:
        without = run(case, "mock", cascade=False, steps=1)
        assert without.reasons == []
        np.testing.assert_equal(seen.results, without.results)


def test_fp8_queries_without_factors_are_a_cascade() -> None:
    assert len(run(Case(dtype=FP8, kv_dtype=FP8), "mock", steps=1).events) == 1


LONG = 256 + 3  # rows, of which 256 are whole pages


@pytest.mark.parametrize(
    ("groups", "ratio", "reason"),
    [
        (((LONG, (0,) * 8),), 4, ""),
        (((20, (0, 0)), (LONG, (0,) * 8), (20, (0, 0))), 4, ""),
        (((LONG, (0,) * 7),), 4, "no prefix of 256 keys has 8 neighbours that share it"),
        (((LONG - 8, (0,) * 8),), 4, "no prefix of 256 keys has 8 neighbours that share it"),
        (((LONG, (0,) * 4), (LONG, (0,) * 4)), 4, "no prefix of 256 keys has 8 neighbours that share it"),
        (((LONG, (0,) * 8),), 127, "the rows of a group take as many tiles together as alone"),
    ],
    ids=["eight of 256 keys", "beside smaller groups", "seven", "248 keys", "two groups of four", "as many tiles"],
)
def test_vllms_rule_decides_where_nothing_else_is_said(groups: Any, ratio: int, reason: str) -> None:
    case = Case(groups=groups, ratio=ratio)
    seen = run(case, "mock", cascade="auto", steps=1)
    if reason:
        assert (seen.events, seen.reasons) == ([], [reason])
        (event,) = run(case, "mock", steps=1).events
        assert (event["taken"], event["reason"]) == (True, "cascade=True")
    else:
        assert [event["reason"] for event in seen.events] == ["8 sequences share a prefix of at least 256 keys"]
        assert seen.events == run(case, "mock", steps=1).events


def test_rows_that_fill_a_tile_are_no_cascade_by_themselves() -> None:
    case = Case(groups=((LONG, (0,) * 8),), ratio=8, rows=16)
    seen = run(case, "mock", cascade="auto", steps=1)
    assert seen.events == [], "each has a tile of its own"
    assert ["fill a tile" in reason for reason in seen.reasons] == [True]


def test_sixteen_sequences_of_a_long_prompt_are_worth_it() -> None:
    case = Case(groups=((1300, (0,) * 16),), ratio=8, page=64, dim=128, dtype="bfloat16")
    spec = {**case.spec, "kv_heads": 8, "num_blocks": 64}
    events: list[Any] = []
    rng = np.random.default_rng(0)
    options = ga.ContextOptions(on_event=events.append)

    def rows(*shape: int) -> Any:
        return rng.standard_normal((*shape, 128), np.float32).astype(case.rows_dtype)

    with ga.open_context("mock", options) as ctx, ctx.kv_cache(**spec) as cache:
        first = wait(cache.create())
        wait(cache.append(first, rows(1300, 8), rows(1300, 8)))
        seqs = [first, *(wait(cache.fork(first)) for _ in range(15))]
        wait(cache.attend(rows(16, 1, 8), seqs, k=rows(16, 1, 8), v=rows(16, 1, 8)))
    (event,) = [event for event in events if event.name == "launch.cascade"]
    assert event.fields["saved_bytes"] == 15 * 1280 * 8 * 2 * 128 * 2


@pytest.mark.parametrize(
    ("device", "arch", "dims", "dtype"),
    [
        ("mock", "sm_90a", (48, 16), "bfloat16"),
        ("mock", "sm_80", (512, 64), "float8_e4m3fn"),
        pytest.param("emulated", "sm_80", (48, 16), "bfloat16", marks=pytest.mark.sweep),
        pytest.param("emulated", "sm_80", (512, 64), "bfloat16", marks=pytest.mark.sweep),
        pytest.param("emulated", "sm_90a", (512, 64), "float8_e4m3fn", marks=pytest.mark.sweep),
    ],
)
def test_latents_that_sequences_share_are_read_once(device: str, arch: str, dims: Any, dtype: str) -> None:
    """A page of a latent cache has no separate values, and the saved bytes do not count any."""
    (latent, rotary), page, scale, rng = dims, 8, 0.1, np.random.default_rng(0)
    events: list[Any] = []
    descales = {"k_descale": np.array([0.05], np.float32)} if dtype.startswith("float8") else {}

    def rows(*shape: int) -> Any:
        return rng.standard_normal(shape).astype(np.float32).astype(ml_dtypes.bfloat16)

    def new(*shape: int) -> Any:
        return {"c_kv": rows(*shape, 1, latent), "k_pe": rows(*shape, 1, rotary)}

    spec = {"num_blocks": 40, "page_size": page, "kv_heads": 1, "head_dim": latent + rotary, "latent_dim": latent}
    with (
        ga.open_context(device, ga.ContextOptions(arch=arch, on_event=events.append)) as ctx,
        ctx.kv_cache(**spec, dtype=dtype, **descales, cascade=True) as cache,
    ):
        first = wait(cache.create())
        wait(cache.append(first, **new(61)))
        seqs = [first, *(wait(cache.fork(first)) for _ in range(3))]
        q, q_pe = rows(4, 1, 6, latent), rows(4, 1, 6, rotary)
        how = {"softmax_scale": scale, "return_lse": True}
        result = wait(cache.attend(q, seqs, q_pe=q_pe, **new(4, 1), **how))
        opened = cache._find()
        for index, seq in enumerate(seqs):
            k = (
                host_view(opened.groups[0].k_pool)[opened.table(seq).groups[0].pages]
                .reshape(1, -1, 1, latent + rotary)[:, :62]
                .astype(np.float64)
            )
            k *= descales.get("k_descale", 1.0)
            whole = np.concatenate([q[index : index + 1], q_pe[index : index + 1]], axis=-1)
            options = {"softmax_scale": scale, "with_magnitude": True}
            right = attention_forward(whole.astype(np.float64), k, k[..., :latent], **options)
            rounded = k.astype(ml_dtypes.bfloat16)
            bound = forward_bounds(whole, rounded, rounded[..., :latent], reference=right, softmax_scale=scale)
            assert (np.abs(result.out[index].astype(np.float64) - right.out[0]) <= bound.out[0]).all()
            np.testing.assert_allclose(result.lse[index], right.lse[0], atol=1e-3)
    (event,) = [event.fields for event in events if event.name == "launch.cascade"]
    assert event["prefix_keys"] == 56
    assert event["saved_bytes"] == 3 * 56 * (latent + rotary) * (1 if descales else 2)


@pytest.mark.parametrize("value", ["always", 1, None, 0])
def test_another_choice_is_refused(value: Any) -> None:
    with (
        ga.open_context("mock") as ctx,
        pytest.raises(ga.InvalidRequest, match='"auto", True or False') as refusal,
        ctx.kv_cache(**CASES["decode"].spec, cascade=value),
    ):
        raise AssertionError
    assert refusal.value.field == "cascade"


def test_prompts_that_begin_with_the_same_tokens_are_a_cascade() -> None:
    case, events = CASES["decode"], []
    with (
        ga.open_context("mock", ga.ContextOptions(on_event=events.append)) as ctx,
        ctx.kv_cache(**case.spec, cascade=True) as cache,
    ):
        batch = Batch(case, cache)
        tokens = list(range(50))
        batch.seqs = []
        for _ in range(3):
            seq = wait(cache.create(tokens))
            k, v = batch.new(50 - seq.cached)
            wait(cache.append(seq, k, v, tokens=tokens[seq.cached :]))
            batch.seqs.append(seq)
        case = batch.case = Case(rows=1, groups=((50, (0,) * 3),))
        request = batch.request()
        result = wait(cache.attend(seqs=batch.seqs, **request))
        near(batch.shares(result), batch.wanted(request))
    (event,) = [event.fields for event in events if event.name == "launch.cascade"]
    assert (event["sequences"], event["prefix_keys"]) == (3, 48)


# Requests of one sequence each that share a launch


def apart(batch: Batch, cache: ga.KvCache, order: list[int], **lengths: list[int]) -> dict[int, Any]:
    """Make a request for each sequence, in this order; return the replies. lengths: what some requests expect."""
    asked = batch.request()
    replies = {}
    for index in order:
        own = {name: array[index : index + 1] for name, array in asked.items() if name in ("q", "k", "v")}
        expected = {"expect_length": lengths[f"of_{index}"]} if f"of_{index}" in lengths else {}
        replies[index] = cache.attend(seqs=[batch.seqs[index]], return_lse=True, **own, **expected)
    return {"asked": asked, **replies}


def test_requests_that_share_a_launch_become_neighbours_and_get_their_own_answers() -> None:
    case = Case(groups=((83, (0, 0, 3, 9)), (41, (0, 7))))
    events: list[Any] = []
    options = ga.ContextOptions(arch="sm_80", on_event=events.append, coalesce_delay_us=2e5)
    with ga.open_context("mock", options) as ctx, ctx.kv_cache(**case.spec, cascade=True) as cache:
        batch = Batch(case, cache)
        replies = apart(batch, cache, [3, 4, 0, 5, 2, 1])
        results = [wait(replies[index]) for index in range(6)]
        near([(one.out[0], one.lse[0]) for one in results], batch.wanted(replies["asked"]))
    (event,) = [dict(event.fields) for event in events if event.name == "launch.cascade"]
    assert (event["groups"], event["sequences"]) == (2, 6)


def test_a_member_that_is_cancelled_or_refused_leaves_the_others_their_cascade() -> None:
    case = Case(groups=((83, (0,) * 5),))
    events: list[Any] = []
    options = ga.ContextOptions(on_event=events.append, coalesce_delay_us=2e5)
    with ga.open_context("mock", options) as ctx, ctx.kv_cache(**case.spec, cascade=True) as cache:
        batch = Batch(case, cache)
        replies = apart(batch, cache, list(range(5)), of_3=[84])
        assert replies[1].cancel()
        result = [outcome(replies[index]) for index in range(5)]
        assert [type(one).__name__ for one in result] == [
            "AttentionOutput", "RequestCancelled", "AttentionOutput", "InvalidRequest", "AttentionOutput",
        ]  # fmt: skip
        assert [cache.length(seq) for seq in batch.seqs] == [84, 83, 84, 83, 84]
        expected = batch.wanted(replies["asked"])
        near([(result[n].out[0], result[n].lse[0]) for n in (0, 2, 4)], [expected[n] for n in (0, 2, 4)])
    (event,) = [dict(event.fields) for event in events if event.name == "launch.cascade"]
    assert event["sequences"] == 3


def test_a_cascade_that_fails_leaves_no_trace_and_the_next_one_is_right() -> None:
    case = CASES["decode"]
    appends = 3 + 3  # launches before the first attention: three prefixes, and further rows of three members
    options = ga.ContextOptions(fault_plan=FaultPlan().fail(appends + 1))
    with ga.open_context("mock", options) as ctx, ctx.kv_cache(**case.spec, cascade=True) as cache:
        batch = Batch(case, cache)
        assert ctx.stats()["kv_cache"].launched == appends
        before = cache.stats(), [contents(cache, seq) for seq in batch.seqs]
        request = batch.request()
        assert isinstance(outcome(cache.attend(seqs=batch.seqs, **request)), ga.LaunchError)
        eventually(lambda: cache.stats() == before[0])
        for (k, v), seq in zip(before[1], batch.seqs, strict=True):
            np.testing.assert_array_equal(contents(cache, seq)[0], k)
            np.testing.assert_array_equal(contents(cache, seq)[1], v)
        result = wait(cache.attend(seqs=batch.seqs, **request))
        near(batch.shares(result), batch.wanted(request))


def test_results_go_into_the_callers_array_and_without_lse() -> None:
    case = CASES["decode"]
    with (
        ga.open_context("emulated", ga.ContextOptions(arch="sm_80")) as ctx,
        ctx.kv_cache(**case.spec, cascade=True) as cache,
    ):
        batch = Batch(case, cache)
        request = batch.request() | {"return_lse": False}
        out = np.full(request["q"].shape, np.nan, np.float16)
        result = wait(cache.attend(seqs=batch.seqs, out=out, **request))
        assert result.lse is None
        for actual, (expected, _, bound) in zip(out, batch.wanted(request), strict=True):
            assert (np.abs(actual.astype(np.float64) - expected) <= bound).all()


# Random programs


def program(seed: int, device: str, cascade: bool) -> tuple[list[Any], int]:
    """The results of random appends, forks, truncations and requests, and how many launches were cascades."""
    rng, events, results = np.random.default_rng(seed), [], []
    page, ratio, packed = (int(rng.choice(some)) for some in ((1, 3, 4, 8), (1, 4), (0, 1)))
    spec = {"num_blocks": 500, "page_size": page, "kv_heads": KV_HEADS, "head_dim": 32, "dtype": "float16"}

    def rows(*shape: int) -> Any:
        return rng.standard_normal((*shape, 32)).astype(np.float16)

    options = ga.ContextOptions(arch="sm_80", on_event=events.append)
    with ga.open_context(device, options) as ctx, ctx.kv_cache(**spec, cascade=cascade) as cache:
        seqs = [wait(cache.create())]
        wait(cache.append(seqs[0], rows(30, KV_HEADS), rows(30, KV_HEADS)))
        for _ in range(14):
            one, what = int(rng.integers(len(seqs))), int(rng.integers(8))
            if what < 3 and len(seqs) < 8:
                seqs.insert(int(rng.integers(len(seqs) + 1)), wait(cache.fork(seqs[one])))
            elif what == 3:
                wait(cache.truncate(seqs[one], int(rng.integers(cache.length(seqs[one]) + 1))))
            elif what == 4:
                count = int(rng.integers(1, 12))
                wait(cache.append(seqs[one], rows(count, KV_HEADS), rows(count, KV_HEADS)))
            else:
                chosen = np.sort(rng.choice(len(seqs), int(rng.integers(1, len(seqs) + 1)), replace=False)).tolist()
                counts = rng.integers(0, 4, len(chosen)) if packed else np.full(len(chosen), int(rng.integers(1, 4)))
                shape = (int(counts.sum()),) if packed else (len(chosen), int(counts[0]))
                asked: dict[str, Any] = {"softcap": float(rng.choice([0.0, 4.0])), "causal": bool(rng.integers(3))}
                if packed:
                    asked["cu_seqlens_q"] = np.cumsum([0, *counts], dtype=np.int32)
                if rng.integers(2):
                    asked |= {"k": rows(*shape, KV_HEADS), "v": rows(*shape, KV_HEADS)}
                if rng.integers(2):
                    asked["sinks"] = rng.standard_normal(KV_HEADS * ratio).astype(np.float32)
                q = rows(*shape, KV_HEADS * ratio)
                if q.size:
                    results.append(wait(cache.attend(q, [seqs[i] for i in chosen], return_lse=True, **asked)))
    return results, sum(event.name == "launch.cascade" and event.fields["taken"] for event in events)


@pytest.mark.parametrize(
    ("device", "seeds"),
    [
        ("mock", range(4)),
        pytest.param("mock", range(4, 200), marks=pytest.mark.sweep),
        pytest.param("emulated", range(24), marks=pytest.mark.sweep),
    ],
)
def test_random_programs_have_the_same_answers_with_and_without(device: str, seeds: range) -> None:
    taken = 0
    for seed in seeds:
        (results, cascades), (expected, none) = (program(seed, device, cascade) for cascade in (True, False))
        taken += cascades
        assert none == 0
        for one, other in zip(results, expected, strict=True):
            # Both are rounded to float16, on the emulated device from sums in float32.
            np.testing.assert_allclose(one.out.astype(np.float64), other.out.astype(np.float64), rtol=2e-3, atol=2e-3)
            np.testing.assert_allclose(one.lse, other.lse, rtol=1e-5, atol=1e-3)
    assert taken > len(seeds) / 2
