"""The variants of the decode kernels that tests compile, and random problems for each."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from cases.cached_batches import Batch, random_tree, tree_bits
from emulated.decode import DecodeCase
from inside.testing import cast

__all__ = ["SIMPLE_VARIANTS", "SM90_VARIANTS", "VARIANTS", "Variant", "draw"]

PAGE_SIZES = (2, 3, 5, 8, 16, 24, 64, 128, 256)
KINDS = ("gaussian", "rising", "peaked")
# (query heads a KV head, new rows) for which decode_mma takes tiles of so many packed rows.
PACKED = {
    16: ((1, 1), (4, 1), (16, 1), (8, 2), (1, 16), (3, 5), (5, 3)),
    32: ((4, 8), (16, 2), (1, 32), (3, 7), (1, 17)),
    64: ((8, 8), (1, 64), (16, 4), (6, 11), (2, 64)),
}
# The same for decode_sm90, from 16 packed rows on.
SM90_PACKED = {
    64: ((8, 2), (4, 8), (8, 8), (6, 3), (1, 64), (16, 4), (20, 1)),
    128: ((8, 16), (16, 8), (6, 11), (2, 64), (5, 40), (1, 100)),
}
# The same for decode_simple: up to 8 packed rows, and more.
SIMPLE_PACKED = {
    8: ((1, 1), (4, 1), (8, 1), (2, 3), (1, 8)),
    32: ((4, 8), (16, 2), (1, 32), (3, 7), (6, 11)),
}


class Variant(NamedTuple):
    """A compiled variant. packed: rows of a tile. varlen: rows differ between sequences. options: of every problem."""

    arch: str
    layout: str
    dtype: str
    kv_dtype: str
    dim: int
    dim_v: int
    packed: int
    varlen: bool
    options: tuple[str, ...] = ()

    def __str__(self) -> str:
        dims = f"{self.dim}" if self.dim == self.dim_v else f"{self.dim}/{self.dim_v}"
        rows = f"{self.packed}{'v' if self.varlen else ''}"
        return "-".join([self.arch, self.layout, self.dtype, self.kv_dtype, dims, rows, *self.options])


F16, BF16, E4M3, E5M2 = "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"
F32, F64 = "float32", "float64"
# Every layout, dtype, tile of rows and option; `draw` varies the sizes. single: pages of one key.
VARIANTS = (
    Variant("sm_80", "paged", F16, F16, 64, 64, 16, False, ("causal",)),
    Variant("sm_90a", "paged", BF16, BF16, 128, 128, 64, False, ("causal", "window", "sink_tokens")),
    Variant("sm_86", "paged", BF16, BF16, 256, 256, 16, True, ("causal", "sinks", "single")),
    Variant("sm_80", "paged", F16, E4M3, 80, 80, 16, False, ("causal", "descales")),
    Variant("sm_90a", "paged", BF16, E5M2, 64, 128, 64, True, ("causal", "descales", "softcap", "leftpad")),
    Variant("sm_89", "cache", BF16, E4M3, 128, 128, 32, False, ("tree",)),
    Variant("sm_80", "cache", F16, E5M2, 256, 256, 16, False, ("leftpad", "places")),
    Variant("sm_80", "cache", F16, F16, 80, 80, 32, True, ("window", "sink_tokens", "alibi")),
    Variant("sm_86", "cache", BF16, BF16, 40, 72, 64, False, ("tree", "softcap", "sinks")),
    Variant("sm_80", "pointers", F16, F16, 128, 128, 16, False, ("sinks", "alibi")),
    Variant("sm_86", "pointers", BF16, E4M3, 96, 96, 16, False, ("window", "sink_tokens", "descales", "own")),
    Variant("sm_80", "paged", E4M3, E4M3, 80, 80, 16, True, ("causal", "descales")),
    Variant("sm_90a", "cache", E5M2, E5M2, 64, 128, 32, False, ("tree", "descales", "softcap")),
    Variant("sm_86", "pointers", E4M3, E4M3, 288, 512, 16, False, ("descales", "sinks")),
)


# Of decode_sm90: every layout of TMA boxes, both tiles of rows, every option.
SM90_VARIANTS = (
    Variant("sm_90a", "paged", BF16, BF16, 128, 128, 64, False, ("causal",)),
    Variant("sm_90a", "paged", F16, F16, 64, 64, 128, True, ("causal", "window", "sink_tokens", "sinks")),
    Variant("sm_90a", "cache", BF16, BF16, 40, 72, 64, True, ("tree", "softcap")),
    Variant("sm_90a", "paged", BF16, BF16, 128, 64, 128, False, ()),
    Variant("sm_90a", "cache", F16, F16, 96, 128, 128, False, ("window", "alibi")),
    Variant("sm_90a", "paged", F16, F16, 80, 80, 64, False, ("causal", "chunk", "sink_tokens")),
    Variant("sm_90a", "paged", BF16, BF16, 64, 96, 64, False, ("causal", "softcap", "alibi", "sinks")),
    Variant("sm_90a", "paged", F16, F16, 32, 32, 128, False, ("window", "sink_tokens")),
    Variant("sm_90a", "paged", BF16, E4M3, 128, 128, 64, False, ("causal", "descales")),
    Variant("sm_90a", "paged", F16, E4M3, 64, 96, 128, True, ("causal", "window", "sink_tokens", "descales", "sinks")),
    Variant("sm_90a", "cache", BF16, E5M2, 80, 128, 128, False, ("descales", "softcap")),
    Variant("sm_90a", "paged", F16, E5M2, 64, 64, 64, False, ("tree",)),
    Variant("sm_90a", "paged", E4M3, E4M3, 128, 64, 64, True, ("causal", "descales")),
    Variant("sm_90a", "cache", E5M2, E5M2, 80, 96, 128, False, ("descales", "window")),
)

# Of decode_simple: every dtype, layout and tile, head dims that are not whole chunks, every option.
SIMPLE_VARIANTS = (
    Variant("sm_80", "paged", F32, F32, 64, 64, 8, False, ("causal",)),
    Variant("sm_86", "paged", F64, F64, 20, 36, 8, False, ("causal", "sinks", "single")),
    Variant("sm_80", "cache", F32, F32, 5, 3, 32, True, ("window", "sink_tokens", "alibi", "leftpad", "places")),
    Variant("sm_90a", "paged", F16, F16, 20, 20, 32, False, ("tree", "sinks")),
    Variant("sm_90a", "paged", F32, F32, 128, 128, 32, True, ("causal", "window", "sink_tokens", "leftpad")),
    Variant("sm_80", "cache", F64, F64, 512, 512, 8, False, ("tree", "softcap")),
    Variant("sm_86", "pointers", F32, F32, 40, 40, 8, False, ("sinks", "alibi", "own")),
    Variant("sm_80", "pointers", F64, F64, 7, 9, 8, False, ("softcap", "own")),
    Variant("sm_80", "paged", BF16, E4M3, 36, 36, 8, False, ("causal", "descales")),
    Variant("sm_90a", "cache", E4M3, E4M3, 24, 64, 32, True, ("causal", "descales")),
    Variant("sm_90a", "paged", E5M2, E5M2, 33, 33, 8, False, ("causal", "sinks")),
    Variant("sm_86", "cache", F32, F32, 256, 256, 32, False, ("causal", "chunk", "softcap")),
    Variant("sm_120a", "paged", F64, F64, 256, 256, 32, True, ("causal", "window", "alibi")),
    Variant("sm_86", "paged", F32, F32, 512, 300, 32, False, ("causal", "single")),
    Variant("sm_80", "cache", BF16, BF16, 1, 1, 32, False, ("causal", "alibi")),
)


def draw(variant: Variant, seed: int, longest: int = 2000) -> DecodeCase:
    """A random problem of the variant; the same for the same seed. longest: keys of a sequence."""
    hopper = variant in SM90_VARIANTS
    rng = np.random.default_rng([seed, (*VARIANTS, *SM90_VARIANTS, *SIMPLE_VARIANTS).index(variant)])
    packed = SM90_PACKED if hopper else SIMPLE_PACKED if variant in SIMPLE_VARIANTS else PACKED
    choices = [pair for pair in packed[variant.packed] if variant.layout != "pointers" or pair[1] == 1]
    ratio, rows = choices[rng.integers(len(choices))]
    heads_kv, count = int(rng.integers(1, 4)), int(rng.integers(1, 7))
    lengths = [_length(rng, rows, longest) for _ in range(count)]
    shapes = [(length, heads_kv, dim) for length in lengths for dim in (variant.dim, variant.dim_v)]
    arrays = [rng.standard_normal(shape) for shape in shapes]
    q, k, v = rng.standard_normal((count, rows, ratio * heads_kv, variant.dim)), arrays[::2], arrays[1::2]
    kind = KINDS[rng.integers(len(KINDS))]
    q, k = _steered(kind, rng, q, k)
    batch = Batch(
        cast(q, variant.dtype), [cast(x, variant.kv_dtype) for x in k], [cast(x, variant.kv_dtype) for x in v]
    )
    case = DecodeCase(
        batch,
        variant.layout,
        1 if "single" in variant.options else int(rng.choice(PAGE_SIZES[3:] if hopper else PAGE_SIZES)),
        [int(n) for n in rng.integers(0, rows + 1, count - 1)] + [rows] if variant.varlen else None,
        np.stack([tree_bits(random_tree(rng, rows)) for _ in lengths]) if "tree" in variant.options else None,
        _options(rng, variant, count, ratio * heads_kv, heads_kv),
    )
    if case.rows is not None:
        rng.shuffle(case.rows)
    if "leftpad" in variant.options:
        case.leftpad = [int(padding) for padding in rng.integers(0, 100, count) * rng.integers(0, 2, count)]
    if "places" in variant.options:
        case.places = rng.permutation(count + 3)[:count].tolist()
    case.own = "own" in variant.options
    if hopper and (ratio < 16 or variant.packed > 64):
        case.options["num_splits"] = 0  # with pinned splits, the heads alone choose the kernel and tile
    return case


def _length(rng: np.random.Generator, rows: int, longest: int) -> int:
    """A number of keys, half of the time an edge: none, at most as many as rows, whole tiles."""
    kinds = (0, rows, int(rng.integers(1, rows + 1)), 64 * int(rng.integers(1, 1 + longest // 64)))
    choice = int(rng.integers(8))
    return kinds[choice] if choice < len(kinds) else int(rng.integers(rows, longest + 1))


def _steered(kind: str, rng: np.random.Generator, q: Any, k: list[Any]) -> tuple[Any, list[Any]]:
    """q and k whose scores rise with the key by about 24 in all, so that every tile has a new maximum, or have a
    standard deviation of 10."""
    if kind == "peaked":
        return q * 10.0, k
    if kind == "gaussian":
        return q, k
    ratio, dim = q.shape[2] // k[0].shape[1], q.shape[3]
    signs, amount = rng.choice([-1.0, 1.0], (k[0].shape[1], dim)), 24.0**0.5
    ramps = [np.arange(1, len(keys) + 1)[:, None, None] / max(1, len(keys)) for keys in k]
    return q + np.repeat(signs, ratio, axis=0) * amount / dim**0.5, [ramp * signs * amount for ramp in ramps]


def _options(rng: np.random.Generator, variant: Variant, count: int, heads: int, heads_kv: int) -> dict[str, Any]:
    drawn: dict[str, dict[str, Any]] = {
        "causal": {"causal": True},
        "window": {"window_size": (int(rng.integers(0, 500)), -1 if rng.integers(2) else int(rng.integers(0, 40)))},
        "sink_tokens": {"sink_tokens": int(rng.integers(1, 130))},
        "softcap": {"softcap": float(rng.uniform(1.0, 30.0))},
        "alibi": {"alibi_slopes": rng.uniform(0.01, 0.5, (count, heads)).astype(np.float32)},
        "sinks": {"sinks": rng.standard_normal(heads).astype(np.float32) * 3},
        "descales": {
            name: rng.uniform(0.25, 2.0, (count, heads_kv)).astype(np.float32)
            for name in (*(("q_descale",) if variant.dtype in (E4M3, E5M2) else ()), "k_descale", "v_descale")
        },
    }
    if "chunk" in variant.options:
        drawn["chunk"] = {"attention_chunk": int(rng.integers(1, 300))}
    options = {name: value for option in variant.options for name, value in drawn.get(option, {}).items()}
    return options | {"num_splits": int(rng.choice((0, 0, 1, 3, 7)))}
