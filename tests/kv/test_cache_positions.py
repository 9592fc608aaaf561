"""Rows and keys of caches with positions in a larger problem: shared launches, rotations, and refusals."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from inside.planning import merge as merge_requests
from inside.planning import merge_key
from inside.reference import apply_rope, rope_angles

import gpu_actors as ga
from gpu_actors.reference import attention_forward

KEYS, ROWS, HEADS, KV_HEADS, DIM, PAGE = 30, 3, 4, 2, 8, 8
LENGTHS = (30, 17)
SLOPES = np.array([0.3, 0.1, 0.6, 0.2], np.float32)


def places(*steps: tuple[int, int]) -> np.ndarray:
    return np.array(steps, np.int32)


def operands(seed: int = 0) -> tuple[np.ndarray, list[np.ndarray], list[np.ndarray]]:
    """q (batch, rows, heads, dim), and each sequence's keys and values, (length, heads_kv, dim)."""
    rng = np.random.default_rng(seed)
    q = rng.standard_normal((len(LENGTHS), ROWS, HEADS, DIM))
    k, v = ([rng.standard_normal((length, KV_HEADS, DIM)) for length in LENGTHS] for _ in range(2))
    return q, k, v


def pages(sequences: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """A pool with a sequence's keys in its pages and NaN in unused rows, and the table."""
    width = max(1, max(-(-len(keys) // PAGE) for keys in sequences))
    pool = np.full((width * len(sequences), PAGE, *sequences[0].shape[1:]), np.nan)
    table = np.arange(len(pool), dtype=np.int32).reshape(len(sequences), width)
    for keys, own in zip(sequences, table, strict=True):
        flat = np.full((width * PAGE, *keys.shape[1:]), np.nan)
        flat[: len(keys)] = keys
        pool[own] = flat.reshape(width, PAGE, *keys.shape[1:])
    return pool, table


def ask(
    mock: ga.GpuContext, layout: str, q: Any, k: list[np.ndarray], v: list[np.ndarray], **options: Any
) -> ga.AttentionOutput:
    """The answer of a request over a cache of this layout."""
    lengths = np.array([len(keys) for keys in k], np.int32)
    options = {**options, "return_lse": True, "cache_seqlens": lengths}
    if layout == "paged":
        (k_pool, table), (v_pool, _) = pages(k), pages(v)
        return mock.flash_attn.paged_forward(q, k_pool, v_pool, block_table=table, **options).result(60)
    caches = [np.full((len(k), max(1, int(lengths.max())), KV_HEADS, DIM), np.nan) for _ in range(2)]
    for cache, sequences in zip(caches, (k, v), strict=True):
        for index, keys in enumerate(sequences):
            cache[index, : len(keys)] = keys
    return mock.flash_attn.paged_forward(q, *caches, **options).result(60)


def whole(q: Any, k: list[np.ndarray], v: list[np.ndarray], index: int, **options: Any) -> Any:
    options = {"causal": True, **options}
    return attention_forward(q[index : index + 1], k[index][None], v[index][None], **options)


def test_requests_that_share_a_launch_keep_their_positions() -> None:
    """Also if the batch is padded to a power of two, whose added sequences have steps that may be divided by."""
    q, k, v = operands()
    (k_pool, table), (v_pool, _) = pages(k), pages(v)
    at = [places((40 + 3 * index, 1 + index)) for index in range(3)]
    requests = [
        ga.PagedForward(
            q=q[:1],
            k_cache=k_pool,
            v_cache=v_pool,
            block_table=table[:1],
            cache_seqlens=np.array(LENGTHS[:1], np.int32),
            q_positions=steps,
            k_positions=steps + 1,
        )
        for steps in at
    ]
    merged = merge_requests(requests)
    np.testing.assert_array_equal(merged.q_positions, np.concatenate(at))
    np.testing.assert_array_equal(merged.k_positions, np.concatenate(at) + 1)
    with ga.open_context("mock") as mock:
        decoding = mock._children.cells["flash_attn"].shared.decoding
        keys = [merge_key(decoding.plan(request), request) for request in requests]
        assert keys[0] is not None
        assert keys == keys[:1] * 3
        replies = [
            mock.flash_attn.paged_forward(
                q[:1],
                k_pool,
                v_pool,
                block_table=table[:1],
                cache_seqlens=np.array(LENGTHS[:1], np.int32),
                q_positions=steps,
                alibi_slopes=SLOPES,
            )
            for steps in at
        ]
        for steps, reply in zip(at, replies, strict=True):
            expected = whole(q, k, v, 0, q_positions=steps, alibi_slopes=SLOPES)
            np.testing.assert_allclose(reply.result(60).out[0], expected.out[0], atol=1e-12)


def test_each_sequence_is_rotated_from_its_own_position() -> None:
    """Keys that were rotated before are needed: new rows alone would not show the position that rotation starts at."""
    q, k, v = narrow_operands()
    rope, at = ga.Rope(dim=DIM), places((50, 3), (7, 1))
    before = (at[:, :1] + at[:, 1:] * np.arange(ROWS)).astype(np.int32)
    after = at + places((3 * ROWS, 0), (ROWS, 0))
    old, new = (
        [np.stack([keys[part] for keys in arrays]) for arrays in (k, v)]
        for part in (slice(0, ROWS), slice(ROWS, 2 * ROWS))
    )
    with (
        ga.open_context("mock") as mock,
        mock.kv_cache(num_blocks=4, page_size=PAGE, kv_heads=KV_HEADS, head_dim=DIM, dtype="float32") as cache,
    ):
        seqs = [cache.create().result(60) for _ in LENGTHS]
        cache.append(seqs, *old, rope=rope, positions=before.ravel()).result(60)
        with pytest.raises(ga.InvalidRequest) as caught:
            cache.attend(q, seqs, k=new[0], v=new[1], rope=rope, k_positions=at).result(60)
        assert caught.value.field == "q_positions"
        assert [cache.length(seq) for seq in seqs] == [ROWS] * 2
        answer = cache.attend(q, seqs, k=new[0], v=new[1], rope=rope, q_positions=after, k_positions=at).result(60)
    for index, (first, step) in enumerate(at.tolist()):
        angles = rope_angles(first + step * np.arange(2 * ROWS), np.array(rope.frequencies))
        keys = apply_rope(k[index][: 2 * ROWS], np.cos(angles), np.sin(angles))
        rows = apply_rope(q[index], np.cos(angles[ROWS:]), np.sin(angles[ROWS:]))
        expected = whole(rows[None], [keys], [v[index][: 2 * ROWS]], 0)
        np.testing.assert_allclose(answer.out[index], expected.out[0], atol=1e-5)


def narrow_operands() -> tuple[np.ndarray, list[np.ndarray], list[np.ndarray]]:
    """The same operands in float32, the widest dtype of a cache's new rows."""
    q, k, v = operands()
    return q.astype(np.float32), *([keys.astype(np.float32) for keys in arrays] for arrays in (k, v))  # type: ignore[return-value]


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "shape": ({"q_positions": np.zeros(3, np.int32)}, "q_positions"),
    "dtype": ({"k_positions": np.zeros(2, np.int64)}, "k_positions"),
    "before 0": ({"q_positions": places((0, 1), (-1, 1))}, "q_positions"),
    "no step": ({"k_positions": places((0, 1), (0, 0))}, "k_positions"),
    "too far": ({"k_positions": places(((1 << 30) - 29, 1), (0, 1))}, "k_positions"),
    "rows too far": ({"q_positions": places((0, 1), ((1 << 30) - 2, 1))}, "q_positions"),
    "too far by steps": ({"q_positions": places((0, 1 << 29), (0, 1))}, "q_positions"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_refusal_names_the_argument(mock: ga.GpuContext, name: str) -> None:
    options, field = BAD[name]
    for layout in ("paged", "cache"):
        with pytest.raises(ga.InvalidRequest) as caught:
            ask(mock, layout, *operands(), **options)
        assert caught.value.field == field


def test_rows_far_before_the_first_key_are_refused(mock: ga.GpuContext) -> None:
    q, k, v = operands()
    k, v = ([keys[:1] for keys in arrays] for arrays in (k, v))
    with pytest.raises(ga.InvalidRequest) as caught:
        ask(mock, "paged", q, k, v, k_positions=places((0, 1 << 29), (0, 1)))
    assert (caught.value.field, caught.value.value) == ("k_positions", -(1 << 30))


def test_the_last_positions_that_may_be_are_taken(mock: ga.GpuContext) -> None:
    q, k, v = operands()
    first = (1 << 30) - KEYS
    at = {"k_positions": places((first, 1), (first, 1)), "q_positions": places((first + KEYS - ROWS, 1), (0, 1))}
    answer = ask(mock, "paged", q, k, v, **at)
    np.testing.assert_allclose(answer.out[0], whole(q, k, v, 0).out[0], atol=1e-12)


def test_positions_choose_a_variant_of_their_own(mock: ga.GpuContext) -> None:
    q, k, v = operands()
    q, k, v = q.astype(np.float16)[..., [0] * 64], *([keys[..., [0] * 64] for keys in arrays] for arrays in (k, v))
    (k_pool, table), (v_pool, _) = (map(np.asarray, pages(arrays)) for arrays in (k, v))
    request = ga.PagedForward(
        q=q, k_cache=k_pool.astype(np.float16), v_cache=v_pool.astype(np.float16), block_table=table,
        cache_seqlens=np.array(LENGTHS, np.int32),
    )  # fmt: skip
    assert not mock.flash_attn.inspect_key(request).positions
    request.k_positions = np.zeros(2, np.int32)
    key = mock.flash_attn.inspect_key(request)
    assert (key.kernel, key.positions) == ("decode_mma", True)
