"""Requests that differ in any field share neither a plan nor a launch."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from inside.arrays import DeviceArray

import gpu_actors as ga
from gpu_actors.planning.append_rows import NewRows
from gpu_actors.planning.backward import backward_signature
from gpu_actors.planning.cached import signature
from gpu_actors.planning.forward import forward_signature, is_plain
from gpu_actors.planning.merging import merge_key


def wider(array: np.ndarray) -> np.ndarray:
    """The same values with larger strides."""
    far = np.empty((*array.shape[:-1], 2 * array.shape[-1]), array.dtype)[..., ::2]
    far[...] = array
    return far


def longer(array: np.ndarray, axis: int = 0) -> np.ndarray:
    return np.concatenate([array, array], axis)


Q = np.zeros((2, 4, 4, 16), np.float16)
K = np.zeros((2, 6, 2, 16), np.float16)
ENDS = np.array([0, 3, 4], np.int32)
SLOPES = np.ones(4, np.float32)
DESCALES = np.ones((2, 2), np.float32)
LSE = np.zeros((2, 4, 4), np.float32)
PLACES = np.zeros(2, np.int32)

BLOCKS = (np.zeros((1, 1, 1), np.int32), np.zeros((1, 1, 1, 1), np.int32))
MASKS = (
    ga.BlockMask(*BLOCKS),
    ga.BlockMask(*(longer(blocks, 1) for blocks in BLOCKS)),
    ga.BlockMask(*BLOCKS, *BLOCKS),
    ga.BlockMask(*BLOCKS, block_size=(256, 128)),
    ga.BlockMask(*BLOCKS, mask_mod=lambda b, h, q, kv: q > kv),
    ga.BlockMask(*BLOCKS, mask_mod=lambda b, h, q, kv: q < kv),
)

ARRAYS = {
    "alibi_slopes": (SLOPES, np.ones((2, 4), np.float32)),
    "sinks": (SLOPES, SLOPES.astype(np.float16)),
    "q_descale": (DESCALES, wider(DESCALES)),
    "k_descale": (DESCALES, wider(DESCALES)),
    "v_descale": (DESCALES, wider(DESCALES)),
}
SCALARS = {
    "window_size": ((2, -1), (-1, 2), (3, -1), (2.0, -1), (True, -1)),
    "softmax_scale": (0.5, 1, 1.0, True),
    "softcap": (2.0, 2, 3.0, True, 1),
    "sink_tokens": (1, True, 2, 1.0),
    "attention_chunk": (1, True, 2, 1.0),
    "out_dtype": ("float32", "float64"),
    "return_lse": (True, 1, 1.0),
}

# Every value that a field may take instead of the base's; each must differ from all others.
FORWARD: Mapping[str, tuple[Any, ...]] = {
    **ARRAYS,
    **SCALARS,
    "q": (longer(Q), wider(Q), Q.astype(np.float32)),
    "k": (longer(K, 1), wider(K), K.astype(np.float32)),
    "v": (longer(K, 1), wider(K), K.astype(np.float32)),
    "causal": (True, 1, 1.0),
    "alignment": ("top_left",),
    "bias": (np.zeros((2, 4, 4, 6), np.float16), np.zeros((1, 4, 4, 6), np.float16)),
    "dropout_p": (0.5, 1, 1.0, True),
    "cu_seqlens_q": (ENDS, np.array([0, 2, 4], np.int32)),  # the second one's longest sequence differs
    "cu_seqlens_k": (ENDS, np.array([0, 2, 4], np.int32)),
    "max_seqlen_q": (4, 5, 4.0),
    "max_seqlen_k": (4, 5, 4.0),
    "compute": ("f32", "tf32"),
    "out": (np.empty_like(Q), wider(Q)),
    "q_positions": (PLACES, longer(PLACES[:, None], 1), longer(PLACES)),
    "k_positions": (PLACES, longer(PLACES[:, None], 1), longer(PLACES)),
    "dropout_first_head": (1, True, 1.0),
    "dropout_heads": (8, 8.0, True, 9),
    "alibi_signed": (True, 1, 1.0),
    "lse_dtype": ("float64", "float16"),
    "seqused_q": (PLACES, longer(PLACES)),
    "seqused_k": (PLACES, longer(PLACES)),
    "block_mask": MASKS,
    "pack_gqa": (True, False, 1, 0),
}
BACKWARD = {
    **FORWARD,
    "out": (longer(Q), wider(Q)),
    "dout": (longer(Q), wider(Q), Q.astype(np.float32)),
    "lse": (longer(LSE), wider(LSE), LSE.astype(np.float64)),
    "deterministic": (True, 1, 1.0),
}
POOL = np.zeros((5, 8, 2, 16), np.float16)
TABLE = np.zeros((2, 3), np.int32)
LENGTHS = np.array([5, 7], np.int32)
PAGED = {
    **ARRAYS,
    **SCALARS,
    "q": FORWARD["q"],
    "k_cache": (longer(POOL), wider(POOL), POOL.astype(np.float32)),
    "v_cache": (longer(POOL), wider(POOL), POOL.astype(np.float32)),
    "block_table": (longer(TABLE, 1), wider(TABLE), None),
    "cache_seqlens": (longer(LENGTHS), LENGTHS.astype(np.int64)),
    "cu_seqlens_q": (ENDS, wider(ENDS)),
    "max_seqlen_q": (4, 5, 4.0),
    "causal": (False, 0, 0.0),
    "tree_mask": (np.zeros((2, 4), np.uint64), np.zeros((2, 4, 4), np.bool_)),
    "num_splits": (1, True, 2, 1.0),
    "chunk_index": (1, True),
    "num_chunks": (2, True, 1.0),
    "out": FORWARD["out"],
    "q_positions": FORWARD["q_positions"],
    "k_positions": FORWARD["k_positions"],
    "latent_dim": (8, 8.0, True, 16),
    "cache_batch_idx": (PLACES, longer(PLACES)),
    "cache_leftpad": (PLACES, longer(PLACES)),
    "block_mask": MASKS,
    "bias": FORWARD["bias"],
}
CACHES = [np.zeros((2, 9, 16), np.float16) for _ in range(2)]
DECODE = {
    **ARRAYS,
    **SCALARS,
    "q": (longer(Q[:, 0]), wider(Q[:, 0]), Q[:, 0].astype(np.float32)),
    "k_caches": ([CACHES[0], wider(CACHES[1])], [longer(cache, 1) for cache in CACHES], np.stack(CACHES)),
    "v_caches": ([CACHES[0], wider(CACHES[1])], [longer(cache, 1) for cache in CACHES], np.stack(CACHES)),
    "seq_lens": (longer(LENGTHS), LENGTHS.astype(np.uint32)),
    "num_splits": PAGED["num_splits"],
    "out": (np.empty_like(Q[:, 0]), wider(Q[:, 0])),
    "q_positions": FORWARD["q_positions"],
    "k_positions": FORWARD["k_positions"],
    "bias": (np.zeros((2, 4, 7), np.float16), np.zeros((1, 4, 7), np.float16), np.zeros((2, 4, 9), np.float16)),
}
# Values that are passed to each launch, on which no plan depends.
DATA = {ga.FlashForward: {"dropout_seed"}, ga.FlashBackward: {"dropout_seed"}}

BASES: list[tuple[Any, Mapping[str, tuple[Any, ...]]]] = [
    (ga.FlashForward(Q, K, K), FORWARD),
    (ga.FlashBackward(q=Q, k=K, v=K, out=Q, dout=Q, lse=LSE), BACKWARD),
    (ga.PagedForward(q=Q, k_cache=POOL, v_cache=POOL, block_table=TABLE, cache_seqlens=LENGTHS), PAGED),
    (ga.BatchedDecode(q=Q[:, 0], k_caches=CACHES, v_caches=CACHES, seq_lens=LENGTHS), DECODE),
]


def signature_of(request: Any) -> Any:
    if isinstance(request, ga.FlashBackward):
        return backward_signature(request, is_plain(request))
    if isinstance(request, ga.FlashForward):
        return forward_signature(request, is_plain(request))
    return signature(request)


def alike(one: Any, other: Any) -> bool:
    return hash(one) == hash(other) and one == other


@pytest.mark.parametrize(("base", "changes"), BASES, ids=[type(base).__name__ for base, _ in BASES])
def test_a_plan_is_found_for_what_is_the_same_in_every_field_only(base: Any, changes: Mapping[str, Any]) -> None:
    fields = {field.name for field in dataclasses.fields(base)}
    assert fields == changes.keys() | DATA.get(type(base), set()), "each field is changed here, or is data"
    assert alike(signature_of(base), signature_of(dataclasses.replace(base)))
    for name, values in changes.items():
        found = [(getattr(base, name), signature_of(base))]
        for value in values:
            if name.startswith("max_seqlen"):
                changed = dataclasses.replace(base, **{name: value, f"cu_seqlens_{name[-1]}": ENDS})
            else:
                changed = dataclasses.replace(base, **{name: value})
            if name == "cu_seqlens_q" and isinstance(base, ga.PagedForward):
                changed = dataclasses.replace(changed, q=Q[0], max_seqlen_q=4)
            key = signature_of(changed)
            for before, other in found:
                assert not alike(key, other), (name, before, value)
            found.append((value, key))


def on_device(array: np.ndarray, address: int) -> DeviceArray:
    return DeviceArray(address, array.shape, array.strides, array.dtype, 0)


def test_where_each_operand_lies_is_part_of_a_signature() -> None:
    """The choice of kernels depends on the addresses of operands on a device."""
    near, far = on_device(K, 1 << 20), on_device(K, (1 << 20) + 2)
    keys = [
        signature_of(ga.FlashForward(Q, k, v))
        for k, v in ((K, K), (near, near), (far, near), (near, far), (near, K), (K, near))
    ]
    assert len(set(keys)) == len(keys)
    base = BASES[2][0]
    near, far = on_device(POOL, 1 << 20), on_device(POOL, (1 << 20) + 2)
    keys = [
        signature_of(dataclasses.replace(base, k_cache=k, v_cache=v))
        for k, v in ((POOL, POOL), (near, near), (far, near), (near, far), (near, POOL), (POOL, near))
    ]
    assert len(set(keys)) == len(keys)


# Launches that several requests share

MERGED: dict[str, tuple[Any, ...]] = {
    "q": (np.zeros((1, 3, 4, 16), np.float16), np.zeros((1, 2, 8, 16), np.float16)),
    "k_cache": (POOL.copy(),),
    "v_cache": (POOL.copy(),),
    "causal": (False,),
    "window_size": ((2, -1), (3, -1), (-1, 2)),
    "softmax_scale": (0.5, 0.75),
    "softcap": (2.0, 3.0),
    "alibi_slopes": (SLOPES, SLOPES.copy(), SLOPES[None]),
    "sinks": (SLOPES, SLOPES.copy()),
    "sink_tokens": (1, 2),
    "attention_chunk": (1, 2),
    "out_dtype": ("float32",),
    "tree_mask": (np.ones((1, 2), np.uint64),),
    "num_splits": (1, 2),
    "return_lse": (True,),
    "q_positions": (PLACES[:1], np.ones((1, 2), np.int32)),
    "k_positions": (PLACES[:1], np.ones((1, 2), np.int32)),
    "cache_leftpad": (PLACES[:1],),
}
# Values of each sequence or row, which are concatenated whatever they are.
SIDE_BY_SIDE = {"block_table", "cache_seqlens", "cu_seqlens_q", "max_seqlen_q", "chunk_index", "num_chunks"}
ROWS = np.zeros((2, 2, 16), np.float16)
COUNTS = np.array([2], np.int32)
TABLES = np.ones((9, 4), np.float32)
NEW_ROWS: dict[str, tuple[Any, ...]] = {
    "k": (ROWS.astype(np.float32),),
    "rows": (0, 1),
    "rope": (ga.Rope(dim=8), ga.Rope(dim=8, base=5.0), ga.Rope(dim=8, inv_freq=(1.0, 2.0, 3.0, 4.0)),
             ga.Rope(dim=8, interleaved=True), ga.Rope(dim=8, table_rows=9)),
    "positions": (np.zeros(2, np.int32),),
    "turned": (COUNTS,),
    "turned_rows": (3,),
    "turned_positions": (np.zeros(2, np.int32),),
    "rope_cos": (TABLES, TABLES.copy()),
    "rope_sin": (TABLES, TABLES.copy()),
}  # fmt: skip


def test_a_launch_is_shared_by_what_is_the_same_in_every_field_only() -> None:
    names = {field.name for field in dataclasses.fields(ga.PagedForward)}
    descales = {"q_descale", "k_descale", "v_descale"}
    assert names == MERGED.keys() | SIDE_BY_SIDE | descales | {
        "latent_dim",
        "out",
        "cache_batch_idx",
        "bias",
        "block_mask",
    }  # requests with the last four have their own launch
    base = ga.PagedForward(q=Q[:1, :2], k_cache=POOL, v_cache=POOL, block_table=TABLE[:1], cache_seqlens=LENGTHS[:1])
    narrow = POOL.astype(ml_dtypes.float8_e4m3fn)
    fp8 = dataclasses.replace(base, k_cache=narrow, v_cache=narrow)
    one = DESCALES[:1]
    requests = [base, *(dataclasses.replace(base, **{name: value}) for name in MERGED for value in MERGED[name])]
    requests += [fp8, dataclasses.replace(fp8, k_descale=one), dataclasses.replace(fp8, v_descale=one)]
    requests += [dataclasses.replace(fp8, k_descale=one, v_descale=one)]
    latent = dataclasses.replace(base, v_cache=None, softmax_scale=0.5)
    requests += [dataclasses.replace(latent, latent_dim=dim) for dim in (8, 16)]
    requests += [dataclasses.replace(base, q=Q[0, :2], cu_seqlens_q=np.array([0, 2], np.int32))]
    with ga.open_context("mock") as ctx:
        decoding = ctx._children.cells["flash_attn"].shared.decoding
        keys = [merge_key(decoding.plan(request), request) for request in requests]
        again = [merge_key(decoding.plan(request), dataclasses.replace(request)) for request in requests]
        written = dataclasses.replace(base, out=np.empty_like(base.q))
        assert merge_key(decoding.plan(written), written) is None
    assert keys == again
    assert len(set(keys)) == len(keys)


def test_rows_are_appended_together_where_they_are_rotated_alike_only() -> None:
    names = {field.name for field in dataclasses.fields(NewRows)}
    assert names == NEW_ROWS.keys() | {"v", "counts", "tokens", "layers"}, "v has k's dtype"
    base = NewRows(ROWS, ROWS, COUNTS, 2)
    found = [base, *(dataclasses.replace(base, **{name: value}) for name in NEW_ROWS for value in NEW_ROWS[name])]
    keys = [rows.merge_key for rows in found]
    assert len(set(keys)) == len(keys)
    assert keys == [dataclasses.replace(rows).merge_key for rows in found]
    assert dataclasses.replace(base, k=ROWS[None], v=ROWS[None], layers=2).merge_key is None
