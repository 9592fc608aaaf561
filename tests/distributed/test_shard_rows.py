"""fp8 caches, rotated rows and tree masks over several workers: attention equals that over one cache."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from test_sharded_cache import rows

import gpu_actors as ga
from gpu_actors import Rope
from gpu_actors.distributed import ContextPool, KeySplit, ShardedKvCache
from gpu_actors.remote import InProcess, RemoteContext, open_remote

SPEC: dict[str, Any] = {"num_blocks": 32, "page_size": 8, "kv_heads": 2, "head_dim": 16, "dtype": "float32"}
DESCALES = {"k_descale": np.array([0.02, 0.7], np.float32), "v_descale": np.array([0.3, 0.011], np.float32)}
SLOPES = np.array([0.5, 0.25, 0.3, 0.0625], np.float32)
_ANGLES = np.random.default_rng(5).uniform(-3, 3, (64, 4)).astype(np.float32)
TABLES = {"rope_cos": np.cos(_ANGLES), "rope_sin": np.sin(_ANGLES)}


@pytest.fixture(scope="module")
def workers() -> Iterator[dict[str, RemoteContext]]:
    with contextlib.ExitStack() as stack:
        names = ("one", "two", "three")
        yield {name: stack.enter_context(open_remote("mock", workplace=InProcess(), name=name)) for name in names}


@pytest.fixture
def pool(workers: dict[str, RemoteContext]) -> ContextPool:
    return ContextPool(workers, seed=0)


def tree(count: int, seed: int = 0) -> Any:
    """bool (count, count): each row sees itself, and some of those before it."""
    seen = np.tril(np.random.default_rng((seed, count)).random((count, count)) < 0.5)
    return seen | np.eye(count, dtype=np.bool_)


def bits(seen: Any) -> Any:
    return np.array([sum(1 << int(key) for key in np.flatnonzero(row)) for row in seen], np.uint64)


def near(found: Any, wanted: Any, scale: float = 1.0) -> None:
    """Equal, but for the order of sums and for one rounding of each worker's part."""
    far = {"float32": 2e-6, "float16": 2.0**-10, "bfloat16": 2.0**-7}[wanted.out.dtype.name] * scale
    assert found.out.dtype == wanted.out.dtype
    out, whole = found.out.astype(np.float64), wanted.out[0].astype(np.float64)
    np.testing.assert_allclose(out, whole, rtol=far, atol=far)
    np.testing.assert_allclose(found.lse, wanted.lse[0], rtol=4e-6, atol=4e-6)


CASES: dict[str, dict[str, Any]] = {
    "rope": {"rope": Rope(dim=16)},
    "rope of some columns, in pairs": {"rope": Rope(dim=6, interleaved=True, base=100.0), "window_size": (9, 0)},
    "tables": {"rope": Rope(dim=8, table_rows=64), **TABLES, "sink_tokens": 3, "window_size": (6, -1)},
    "tree": {"tree": True},
    "tree and window": {"tree": True, "window_size": (11, 2), "sink_tokens": 4},
    "tree and slopes": {"tree": True, "alibi_slopes": SLOPES},
    "tree and sinks": {"tree": True, "sinks": rows(1, 4, seed=7)[0, :, 0].copy(), "softcap": 3.0},
    "rope and tree": {"rope": Rope(dim=16), "tree": True},
}
FP8: dict[str, dict[str, Any]] = {
    "plain": {},
    "rope": {"rope": Rope(dim=16)},
    "window": {"window_size": (9, 0), "sink_tokens": 2, "softcap": 4.0},
    "slopes": {"alibi_slopes": SLOPES, "interleave": 1},
    "tree and rope": {"tree": True, "rope": Rope(dim=8, interleaved=True)},
    "chunks": {"attention_chunk": 12},
}


async def equal(
    pool: ContextPool, given: dict[str, Any], spec: dict[str, Any], dtype: Any = np.float32, scale: float = 1.0
) -> None:
    """Chunks of new rows, rows that are in the cache, and appended rows, over keys in runs of 1, 5 or a page."""
    given = dict(given)
    striped, treed = "alibi_slopes" in given, given.pop("tree", False)
    interleave = given.pop("interleave", 1 if striped else 5)
    rotation = {name: given.pop(name) for name in ("rope", "rope_cos", "rope_sin") if name in given}
    options = {**given, "return_lse": True}
    async with (
        ga.open_context("mock") as ctx,
        ctx.kv_cache(**spec) as own,
        ShardedKvCache(pool, **spec, interleave=interleave) as cache,
    ):
        seq, mine = await cache.create(), await own.create()
        new = [rows(9, 2, seed, dtype) for seed in (1, 2)]
        assert await cache.append(seq, *new, **rotation) == await own.append(mine, *new, **rotation) == 9
        for step, count in enumerate((4, 1, 6, 20, 1, 3)):
            q, k, v = (rows(count, heads, step + heads, dtype) for heads in (4, 2, 2))
            places = rotation and {"positions": np.arange(count, dtype=np.int32) * 2 + step}
            asked = {**options, **rotation, **(places if step % 2 else {})}
            seen = tree(count, step)
            mask, theirs = {}, {}
            if treed:
                mask, theirs = {"tree_mask": seen if step % 2 else bits(seen)}, {"tree_mask": seen[None]}
            found = await cache.attend(q, seq, k=k, v=v, **asked, **mask)
            near(found, await own.attend(q[None], mine, k=k[None], v=v[None], **asked, **theirs), scale)
        assert seq.length == own.length(mine) == 44
        for count in (1, 5):
            q = rows(count, 4, 98, dtype)
            near(await cache.attend(q, seq, **options), await own.attend(q[None], mine, **options), scale)
        if treed and not given.keys() & {"window_size", "alibi_slopes"}:
            for count in (1, 3, 7, 44, 64):
                q, seen = rows(count, 4, 97, dtype), tree(count, 9)
                found = await cache.attend(q, seq, tree_mask=bits(seen).view(np.int64), **options)
                near(found, await own.attend(q[None], mine, tree_mask=bits(seen)[None], **options), scale)
        await cache.free(seq)


def sampled(names: Any, sample: set[str]) -> list[Any]:
    """All names, of which the default run tries a sample."""
    return [pytest.param(name, marks=() if name in sample else pytest.mark.sweep) for name in names]


@pytest.mark.parametrize("name", sampled(CASES, {"rope", "tables", "tree and window", "tree and slopes"}))
async def test_it_equals_one_cache(pool: ContextPool, name: str) -> None:
    await equal(pool, CASES[name], SPEC)


async def test_it_equals_one_cache_of_halves(pool: ContextPool) -> None:
    await equal(pool, CASES["rope and tree"], {**SPEC, "dtype": "bfloat16"}, ml_dtypes.bfloat16, scale=2.0)


@pytest.mark.parametrize("dtype", sampled(["float8_e4m3fn", "float8_e5m2"], {"float8_e4m3fn"}))
@pytest.mark.parametrize("name", sampled(FP8, {"tree and rope", "slopes"}))
async def test_an_fp8_cache_equals_one_of_its_own(pool: ContextPool, name: str, dtype: str) -> None:
    element = np.float16 if dtype.endswith("fn") else ml_dtypes.bfloat16
    await equal(pool, FP8[name], {**SPEC, "dtype": dtype, **DESCALES}, element, scale=2.0)


@pytest.mark.parametrize("dtype", [ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2])
@pytest.mark.parametrize("interleave", [1, 5])
async def test_fp8_queries_have_factors_of_their_own(pool: ContextPool, interleave: int, dtype: Any) -> None:
    spec = {**SPEC, "dtype": dtype.__name__, **DESCALES}
    factors = np.array([0.25, 3.0], np.float32)
    async with (
        ga.open_context("mock") as ctx,
        ctx.kv_cache(**spec) as own,
        ShardedKvCache(pool, **spec, interleave=interleave) as cache,
    ):
        seq, mine = await cache.create(), await own.create()
        for count, given, new_dtype in (
            (9, factors, dtype), (1, factors, np.float16), (6, None, np.float16), (4, factors, np.float16),
        ):  # fmt: skip
            q, k, v = (rows(count, heads, count + heads, kind) for heads, kind in ((4, dtype), *[(2, new_dtype)] * 2))
            options = {"window_size": (7, 0), "sink_tokens": 3, "return_lse": True}
            found = await cache.attend(q, seq, k=k, v=v, q_descale=given, **options)
            theirs = None if given is None else given[None]
            near(found, await own.attend(q[None], mine, k=k[None], v=v[None], q_descale=theirs, **options), 2.0)
            found = await cache.attend(q[:1], seq, q_descale=given, return_lse=True)
            near(found, await own.attend(q[None, :1], mine, q_descale=theirs, return_lse=True), 2.0)


async def test_rows_lie_in_the_cache_as_one_cache_has_them(pool: ContextPool) -> None:
    """The bits of rotated and quantised rows, rows that are fp8 already included."""
    spec = {**SPEC, "dtype": "float8_e4m3fn", **DESCALES}
    k, v = rows(13, 2, 1, np.float16), rows(13, 2, 2, np.float16)
    fp8 = [rows(5, 2, seed, ml_dtypes.float8_e4m3fn) for seed in (3, 4)]
    async with (
        ga.open_context("mock") as ctx,
        ctx.kv_cache(**spec) as own,
        ShardedKvCache(pool, **spec, interleave=3) as cache,
    ):
        seq, mine = await cache.create(), await own.create()
        await cache.append(seq, k, v, rope=Rope(dim=12))
        await own.append(mine, k, v, rope=Rope(dim=12))
        assert await cache.append(seq, *fp8) == await own.append(mine, *fp8) == 18
        wanted = await own.export_pages(mine)
        for rank, (one, handle) in enumerate(zip(cache._caches, seq._handles, strict=True)):
            found = await one.export_pages(handle)
            mine_here = np.flatnonzero(cache.split.owners(0, 18) == rank)
            for side in ("k", "v"):
                flat = [getattr(pages, side).reshape(-1, 2, 16).view(np.uint8) for pages in (found, wanted)]
                np.testing.assert_array_equal(flat[0][: len(mine_here)], flat[1][mine_here])


def test_a_tree_of_a_workers_own_keys() -> None:
    split = KeySplit(2, 2)
    sees = np.array([[1, 0, 0], [1, 1, 0], [0, 1, 1]], np.bool_)
    # Keys 3, 4 and 5: worker 1 has the first, worker 0 the others. Bits below those are of keys before the tree.
    assert split.tree(1, 3, sees).tolist() == [0b111, 0b111, 0b011]
    assert split.tree(0, 3, sees).tolist() == [0b001, 0b011, 0b111]
    assert KeySplit(1, 8).tree(0, 0, np.tri(64, dtype=np.bool_))[-1] == 2**64 - 1
    assert KeySplit(2, 64).tree(1, 0, np.eye(64, dtype=np.bool_)).tolist() == [2**64 - 1] * 64


def test_double_precision_that_a_merge_would_lose_is_refused(pool: ContextPool) -> None:
    with pytest.raises(ga.Unsupported, match="fp32: use a PooledKvCache") as refused:
        ShardedKvCache(pool, **{**SPEC, "dtype": "float64"})
    assert refused.value.field == "dtype"


async def test_what_is_refused(pool: ContextPool) -> None:
    fp8 = {**SPEC, "dtype": "float8_e5m2"}
    halves = rows(3, 2, dtype=np.float16)
    q, k = rows(3, 4), rows(3)
    rope = Rope(dim=16)
    e5m2, one = rows(3, 4, dtype=ml_dtypes.float8_e5m2), np.ones(2, np.float32)
    async with ShardedKvCache(pool, **SPEC) as cache, ShardedKvCache(pool, **fp8) as small:
        seq, other = await cache.create(), await small.create()
        empty = await cache.create()
        await cache.append(seq, k, k)
        seen = tree(3)
        for field, error, ask in (
            ("tree_mask", ga.Unsupported, cache.attend(q, seq, tree_mask=seen, window_size=(4, 0))),
            ("tree_mask", ga.Unsupported, cache.attend(q, seq, tree_mask=seen, alibi_slopes=SLOPES)),
            ("tree_mask", ga.Unsupported, cache.attend(q, seq, tree_mask=seen, attention_chunk=4)),
            ("tree_mask", ga.Unsupported, cache.attend(rows(65, 4), seq, tree_mask=tree(65))),
            ("tree_mask", ga.InvalidRequest, cache.attend(q, seq, k=k, v=k, tree_mask=seen[None])),
            ("tree_mask", ga.InvalidRequest, cache.attend(q, seq, k=k, v=k, tree_mask=bits(seen)[:2])),
            ("tree_mask", ga.InvalidRequest, cache.attend(q, seq, k=k, v=k, tree_mask=bits(seen).astype(np.int32))),
            ("rope", ga.InvalidRequest, cache.attend(q, seq, rope=rope)),
            ("positions", ga.InvalidRequest, cache.attend(q, seq, positions=np.zeros(3, np.int32))),
            ("positions", ga.InvalidRequest, cache.append(seq, k, k, positions=np.zeros(3, np.int32))),
            ("positions", ga.InvalidRequest, cache.append(seq, k, k, rope=rope, positions=np.zeros(2, np.int32))),
            ("rope", ga.InvalidRequest, cache.append(seq, k, k, rope=3)),  # type: ignore[arg-type]
            ("q_descale", ga.InvalidRequest, cache.attend(q, seq, q_descale=one)),
            ("q_descale", ga.InvalidRequest, cache.attend(q, empty, k=k, v=k, q_descale=one)),
            ("q_descale", ga.InvalidRequest, small.attend(e5m2, other, q_descale=one[None])),
            ("q_descale", ga.InvalidRequest, small.attend(e5m2, other, q_descale=one.astype(np.float16))),
            ("q", ga.InvalidRequest, small.attend(rows(3, 4, dtype=ml_dtypes.float8_e4m3fn), other)),
            ("q", ga.InvalidRequest, small.attend(e5m2, other, k=halves, v=halves, rope=rope)),
            ("q", ga.InvalidRequest, small.attend(e5m2[:, :3], other, k=e5m2[:, :2], v=e5m2[:, :2], q_descale=one)),
            ("q", ga.InvalidRequest, small.attend(e5m2[:, :0], other, q_descale=one)),
            ("rope.dim", ga.InvalidRequest, cache.append(seq, k, k, rope=Rope(dim=18))),
            ("rope_cos", ga.InvalidRequest, cache.append(seq, k, k, rope=Rope(dim=8, table_rows=64))),
            (
                "rope.table_rows",
                ga.InvalidRequest,
                cache.append(
                    seq, k, k, rope=Rope(dim=8, table_rows=4), **{name: one[:4] for name, one in TABLES.items()}
                ),
            ),
            ("k", ga.InvalidRequest, small.append(other, k, k)),
            ("q", ga.InvalidRequest, small.attend(q, other, k=halves, v=halves)),
            (
                "dtype",
                ga.Unsupported,
                small.append(other, *[halves.astype(ml_dtypes.float8_e5m2)] * 2, rope=rope),
            ),
        ):
            with pytest.raises(error) as refused:
                await ask
            assert refused.value.field == field, (field, str(refused.value))
        assert (seq.length, other.length) == (3, 0)
    with pytest.raises(ga.InvalidRequest):
        await ShardedKvCache(pool, **fp8, k_descale=np.zeros(2, np.float32)).__aenter__()
    with pytest.raises(ga.InvalidRequest, match="name of a dtype"):
        ShardedKvCache(pool, **{**SPEC, "dtype": np.float32})
    for dtype in ("int8", "float64"):
        with pytest.raises(ga.Unsupported):
            await ShardedKvCache(pool, **{**SPEC, "dtype": dtype}).__aenter__()
