"""Every entry that takes arrays, with a valid request for each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
from cases import graphs as graph_shapes

import gpu_actors as ga
from gpu_actors import AppendRows, AttendCache, ExecuteGraph, MhaBackward, MhaForward

__all__ = ["ENTRIES", "PAGES", "Entry", "graph_reply", "kv_reply"]

PAGES: dict[str, Any] = {"num_blocks": 8, "page_size": 8, "kv_heads": 2, "head_dim": 16, "dtype": "float32"}
LATENT_PAGES = {**PAGES, "kv_heads": 1, "head_dim": 24, "latent_dim": 16}
MHA = ga.AttentionParams(batch=2, seq_q=3, seq_kv=5, heads_q=4, heads_kv=2, head_dim=16)
ROPE = ga.Rope(dim=16, table_rows=32)
LATENT_ROPE = ga.Rope(dim=8, table_rows=32)

Ask = Callable[[ga.GpuContext, Mapping[str, Any]], ga.Reply[Any]]


class Entry(NamedTuple):
    """message: the actor's message type. arrays: the request's NumPy arrays by name. ask: requests with such arrays."""

    message: type
    arrays: Mapping[str, Any]
    ask: Ask


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def kv_reply(ctx: ga.GpuContext, arrays: Mapping[str, Any], ask: str, **options: Any) -> ga.Reply[Any]:
    """The reply of a cache's ``append`` or ``attend`` for two sequences. options: by default a rope."""
    with ctx.kv_cache(**(LATENT_PAGES if "c_kv" in arrays else PAGES)) as cache:
        seqs = [cache.create().result(), cache.create().result()]
        rest = dict(arrays)
        first = (rest.pop("q"), seqs) if ask == "attend" else (seqs,)
        reply = getattr(cache, ask)(*first, **rest, **(options or {"rope": ROPE}))
        reply._call.wait(60)
        return reply


def graph_reply(ctx: ga.GpuContext, arrays: Mapping[str, Any]) -> ga.Reply[Any]:
    return ctx.cudnn.execute(graph_shapes.attention(), {int(uid): array for uid, array in arrays.items()})


DENSE = {"q": normal(2, 3, 4, 16), "k": normal(2, 5, 2, 16, seed=1), "v": normal(2, 5, 2, 16, seed=2)}
PACKED = {"q": normal(6, 4, 16), "k": normal(8, 2, 16, seed=1), "v": normal(8, 2, 16, seed=2)}
OPTIONAL = {"alibi_slopes": np.abs(normal(4)), "sinks": normal(4, seed=3)}
PLACES = {"q_positions": ints(3, 1), "k_positions": ints(0, 2)}
USED = {"seqused_q": ints(3, 1), "seqused_k": ints(2, 5)}
BIAS = normal(2, 4, 3, 5, seed=4)
POOL = {"k_cache": normal(8, 8, 2, 16, seed=1), "v_cache": normal(8, 8, 2, 16, seed=2)}
TABLE = {"block_table": ints(3, 1, 4, 2).reshape(2, 2), "cache_seqlens": ints(9, 12)}
CACHES = {f"{side}_caches": normal(2, 2, 12, 16, seed=seed) for seed, side in enumerate("kv")}
HEADS_FIRST = {name: np.ascontiguousarray(array.transpose(0, 2, 1, 3)) for name, array in DENSE.items()}
GRADIENTS = {"o": normal(2, 4, 3, 16, seed=5), "do": normal(2, 4, 3, 16, seed=6), "stats": normal(2, 4, 3, 1, seed=7)}
ROWS = {"k": normal(6, 2, 16, seed=1), "v": normal(6, 2, 16, seed=2)}
LATENTS = {"c_kv": normal(6, 1, 16, seed=1), "k_pe": normal(6, 1, 8, seed=2), "cu_seqlens": ints(0, 3, 6)}
ROTATION = {
    "positions": ints(0, 1, 2, 5, 6, 7),
    "rope_cos": normal(32, 8, seed=8),
    "rope_sin": normal(32, 8, seed=9),
}

LATENT_ROTATION = {**ROTATION, "rope_cos": normal(32, 4, seed=8), "rope_sin": normal(32, 4, seed=9)}

ENTRIES: dict[str, Entry] = {
    "forward": Entry(ga.FlashForward, DENSE, lambda ctx, x: ctx.flash_attn.forward(**x, return_lse=True)),
    "forward with options": Entry(
        ga.FlashForward,
        {**DENSE, **OPTIONAL, **PLACES, "bias": BIAS},
        lambda ctx, x: ctx.flash_attn.forward(**x, causal=True),
    ),
    "varlen": Entry(
        ga.FlashForward,
        {**PACKED, "cu_seqlens_q": ints(0, 2, 6), "cu_seqlens_k": ints(0, 3, 8)},
        lambda ctx, x: ctx.flash_attn.forward(**x, max_seqlen_q=4, max_seqlen_k=5),
    ),
    "padded": Entry(ga.FlashForward, {**DENSE, **USED}, lambda ctx, x: ctx.flash_attn.forward(**x)),
    "backward of padded": Entry(
        ga.FlashBackward,
        {
            **DENSE,
            **USED,
            "out": normal(2, 3, 4, 16, seed=5),
            "dout": normal(2, 3, 4, 16, seed=6),
            "lse": normal(2, 4, 3, seed=7),
        },
        lambda ctx, x: ctx.flash_attn.backward(**x),
    ),
    "backward": Entry(
        ga.FlashBackward,
        {
            **DENSE,
            **OPTIONAL,
            **PLACES,
            "bias": BIAS,
            "out": normal(2, 3, 4, 16, seed=5),
            "dout": normal(2, 3, 4, 16, seed=6),
            "lse": normal(2, 4, 3, seed=7),
        },
        lambda ctx, x: ctx.flash_attn.backward(**x),
    ),
    "paged": Entry(
        ga.PagedForward,
        {
            "q": normal(2, 2, 4, 16),
            **POOL,
            **TABLE,
            **OPTIONAL,
            **PLACES,
            "tree_mask": np.array([[[1, 0], [1, 1]]] * 2, bool),
            "bias": normal(2, 4, 2, 12, seed=4),
        },
        lambda ctx, x: ctx.flash_attn.paged_forward(**x),
    ),
    "dense cache": Entry(
        ga.PagedForward,
        {
            "q": normal(3, 4, 16),
            "k_cache": normal(2, 8, 2, 16, seed=1),
            "v_cache": normal(2, 8, 2, 16, seed=2),
            "cache_seqlens": ints(4, 6),
            "cache_batch_idx": ints(1, 0),
            "cache_leftpad": ints(2, 1),
            "cu_seqlens_q": ints(0, 1, 3),
        },
        lambda ctx, x: ctx.flash_attn.paged_forward(**x, max_seqlen_q=2),
    ),
    "decode": Entry(
        ga.BatchedDecode,
        {
            "q": normal(2, 4, 16),
            **CACHES,
            "seq_lens": ints(5, 12),
            **OPTIONAL,
            **PLACES,
            "bias": BIAS[:, :, 0].repeat(3, -1),
        },
        lambda ctx, x: ctx.flash_attn.decode(**x),
    ),
    "decode of lists": Entry(
        ga.BatchedDecode,
        {
            "q": normal(2, 4, 16),
            **{name: list(arrays) for name, arrays in CACHES.items()},
            "seq_lens": ints(5, 12),
        },
        lambda ctx, x: ctx.flash_attn.decode(**x),
    ),
    "append": Entry(
        AppendRows,
        {**ROWS, "cu_seqlens": ints(0, 3, 6), **ROTATION},
        lambda ctx, x: kv_reply(ctx, x, "append"),
    ),
    "attend": Entry(
        AttendCache,
        {"q": normal(6, 4, 16), **ROWS, "cu_seqlens_q": ints(0, 3, 6), **ROTATION, **OPTIONAL, **PLACES, "bias": BIAS},
        lambda ctx, x: kv_reply(ctx, x, "attend"),
    ),
    "attend of fewer rows": Entry(
        AttendCache,
        {
            "q": normal(4, 4, 16),
            **ROWS,
            "cu_seqlens_q": ints(0, 1, 4),
            "cu_seqlens_k_new": ints(0, 3, 6),
            "positions_q": ints(2, 5, 6, 7),
            **ROTATION,
        },
        lambda ctx, x: kv_reply(ctx, x, "attend"),
    ),
    "append of latents": Entry(
        AppendRows, {**LATENTS, **LATENT_ROTATION}, lambda ctx, x: kv_reply(ctx, x, "append", rope=LATENT_ROPE)
    ),
    "attend to latents": Entry(
        AttendCache,
        {"q": normal(6, 4, 24), "cu_seqlens_q": ints(0, 3, 6), **{name: LATENTS[name] for name in ("c_kv", "k_pe")}},
        lambda ctx, x: kv_reply(ctx, x, "attend", softmax_scale=0.2),
    ),
    "mha_forward": Entry(MhaForward, HEADS_FIRST, lambda ctx, x: ctx.cudnn.mha_forward(MHA, **x, return_stats=True)),
    "mha_forward with bias": Entry(
        MhaForward, {**HEADS_FIRST, "bias": BIAS}, lambda ctx, x: ctx.cudnn.mha_forward(MHA, **x)
    ),
    "mha_backward": Entry(MhaBackward, {**HEADS_FIRST, **GRADIENTS}, lambda ctx, x: ctx.cudnn.mha_backward(MHA, **x)),
    "mha_backward with bias": Entry(
        MhaBackward, {**HEADS_FIRST, **GRADIENTS, "bias": BIAS}, lambda ctx, x: ctx.cudnn.mha_backward(MHA, **x)
    ),
    "execute": Entry(ExecuteGraph, {str(uid): array for uid, array in graph_shapes.arrays_of().items()}, graph_reply),
}
