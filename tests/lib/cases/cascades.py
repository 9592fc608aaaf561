"""Batches over a KvCache whose sequences share pages, and the expected result of each row."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np
from support.kv_cache import contents, wait

import gpu_actors as ga
from gpu_actors.reference import attention_forward
from gpu_actors.testing import forward_bounds

__all__ = ["CASES", "Batch", "Case", "Seen", "run"]

KV_HEADS = 2
FP8 = "float8_e4m3fn"
DESCALES = {"k_descale": np.array([0.05, 0.02], np.float32), "v_descale": np.array([0.03, 0.1], np.float32)}


@dataclass(frozen=True)
class Case:
    """groups: for each group of forks, the rows of its prefix and the rows that each member then appends.

    rows: q's rows of each sequence, or one number a sequence, which packs them. new: the request brings k and v of
    these rows; else q stands for the last rows of the cache. options: of the request; callables make an array from
    (rng, sequences, heads, rows).
    """

    groups: tuple[tuple[int, tuple[int, ...]], ...] = ((83, (0, 0, 3, 9)), (20, (0,)), (41, (0, 7)))
    rows: int | tuple[int, ...] = 1
    new: bool = True
    ratio: int = 4
    page: int = 8
    dim: int = 64
    dim_v: int | None = None
    dtype: str = "float16"
    kv_dtype: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def rows_dtype(self) -> Any:
        return np.dtype(getattr(ml_dtypes, self.dtype, self.dtype))

    @property
    def spec(self) -> dict[str, Any]:
        kv_dtype = self.kv_dtype or self.dtype
        descales = DESCALES if kv_dtype.startswith("float8") else {}
        heads = {"kv_heads": KV_HEADS, "head_dim": self.dim, "head_dim_v": self.dim_v}
        return {"num_blocks": 1600 // self.page, "page_size": self.page, "dtype": kv_dtype, **heads, **descales}


def sinks(rng: Any, _: int, heads: int, __: int) -> Any:
    """Sinks in float16, q's dtype; the parts of a cascade are float32."""
    return (rng.standard_normal(heads) + 2).astype(np.float16)


def tree(rng: Any, sequences: int, _: int, rows: int) -> Any:
    return np.tril(rng.random((sequences, rows, rows)) < 0.5) | np.eye(rows, dtype=bool)


SIXTEEN = ((64, (0,) * 16),)
CASES = {
    "decode": Case(),
    "sinks, softcap and rows": Case(rows=3, options={"softcap": 5.0, "sinks": sinks}),
    "packed rows": Case(rows=(1, 4, 2, 1, 3, 1, 2), options={"softcap": 3.0}),
    "two of one head": Case(groups=((16, (0, 0)),), ratio=1),
    "sixteen of eight heads": Case(groups=SIXTEEN, ratio=8, page=16),
    "sixteen of 128 rows": Case(groups=SIXTEEN, ratio=8, page=16, rows=16),
    "a tree": Case(rows=5, options={"tree_mask": tree}),
    "all keys": Case(rows=4, options={"causal": False}),
    "first keys without a window": Case(options={"sink_tokens": 4}),
    "rotated": Case(rows=2, options={"rope": ga.Rope(dim=32)}),
    "bfloat16, 128 columns": Case(dtype="bfloat16", dim=128, page=16, rows=2),
    "other values": Case(dim=64, dim_v=32),
    "fp8": Case(dtype="bfloat16", kv_dtype=FP8, rows=2, options={"softcap": 8.0}),
    "fp8, 16 rows a page": Case(kv_dtype="float8_e5m2", page=16),
    "pages of one": Case(page=1, groups=((13, (0, 2)), (5, (0, 0, 1)))),
    "odd pages": Case(page=3),
    "rows in shared pages": Case(groups=((85, (0,) * 3), (24, (0, 0))), rows=7, new=False),
}


@dataclass(frozen=True)
class Seen:
    """The results of a run. wanted: (out, lse, bound of out's error) of each sequence's rows. events: of launches that
    are cascades. reasons: why other launches over shared pages are not."""

    results: list[Any]
    wanted: list[tuple[Any, Any, Any]]
    events: list[dict[str, Any]]
    reasons: list[str]
    kernels: list[str]


class Batch:
    """The sequences of a case in a cache, and rows to attend with."""

    def __init__(self, case: Case, cache: ga.KvCache, seed: int = 0) -> None:
        self.case, self.cache, self.rng = case, cache, np.random.default_rng(seed)
        self.seqs: list[ga.KvSequence] = []
        for prefix, members in case.groups:
            first = wait(cache.create())
            self.append(first, prefix)
            forks = [first, *(wait(cache.fork(first)) for _ in members[1:])]
            for seq, more in zip(forks, members, strict=True):
                self.append(seq, more)
            self.seqs += forks

    def values(self, *shape: int) -> Any:
        return self.rng.standard_normal(shape).astype(np.float32).astype(self.case.rows_dtype)

    def new(self, *shape: int) -> tuple[Any, Any]:
        case = self.case
        return self.values(*shape, KV_HEADS, case.dim), self.values(*shape, KV_HEADS, case.dim_v or case.dim)

    def append(self, seq: ga.KvSequence, rows: int) -> None:
        if rows:
            wait(self.cache.append(seq, *self.new(rows)))

    def request(self) -> dict[str, Any]:
        """Arguments of ``attend`` for rows of all sequences, without ``seqs``."""
        case, count = self.case, len(self.seqs)
        packed = not isinstance(case.rows, int)
        shape = (sum(case.rows),) if isinstance(case.rows, tuple) else (count, case.rows)
        heads = KV_HEADS * case.ratio
        asked = {"q": self.values(*shape, heads, case.dim), "return_lse": True}
        if case.new:
            asked["k"], asked["v"] = self.new(*shape)
        if packed:
            asked["cu_seqlens_q"] = np.cumsum([0, *self.counts], dtype=np.int32)
        for name, option in case.options.items():
            asked[name] = option(self.rng, count, heads, shape[-1]) if callable(option) else option
        return asked

    @property
    def counts(self) -> list[int]:
        rows = self.case.rows
        return [rows] * len(self.seqs) if isinstance(rows, int) else list(rows)

    def wanted(self, asked: Mapping[str, Any]) -> list[tuple[Any, Any, Any]]:
        """(out, lse, bound) of the rows of each sequence, from what the cache holds after the request."""
        case, found = self.case, []
        q = asked["q"].reshape(-1, *asked["q"].shape[-2:])
        options = {name: asked[name] for name in ("softcap", "sinks", "causal") if name in asked}
        options = {"causal": True, **options}
        for index, (seq, rows, end) in enumerate(
            zip(self.seqs, self.counts, np.cumsum(self.counts).tolist(), strict=True)
        ):
            k, v = (side.astype(np.float64) for side in contents(self.cache, seq))
            if case.kv_dtype is not None:
                k, v = k * DESCALES["k_descale"][:, None], v * DESCALES["v_descale"][:, None]
            own = dict(options)
            if "tree_mask" in asked:
                seen = np.ones((rows, len(k)), bool)
                seen[:, len(k) - rows :] = asked["tree_mask"][index]
                own |= {"causal": False, "bias": seen[None, None]}
            one = q[None, end - rows : end]
            right = attention_forward(one.astype(np.float64), k[None], v[None], with_magnitude=True, **own)
            rounded = (side[None].astype(case.rows_dtype) for side in (k, v))
            bound = forward_bounds(one, *rounded, reference=right, **own)
            found.append((right.out[0], right.lse[0], bound.out[0]))
        return found

    def shares(self, result: Any) -> list[tuple[Any, Any]]:
        """(out, lse) of each sequence."""
        if result.out.ndim == 4:
            return list(zip(result.out, result.lse, strict=True))
        ends = np.cumsum(self.counts)[:-1]
        return list(zip(np.split(result.out, ends), np.split(result.lse, ends, axis=1), strict=True))


def run(case: Case, device: str, cascade: Any = True, steps: int = 2, **options: Any) -> Seen:
    """Make ``steps`` requests for all sequences of a case."""
    events: list[Any] = []
    how = ga.ContextOptions(on_event=events.append, **options)
    results: list[Any] = []
    wanted: list[Any] = []
    with ga.open_context(device, how) as ctx, ctx.kv_cache(**case.spec, cascade=cascade) as cache:
        batch = Batch(case, cache)
        for _ in range(steps):
            asked = batch.request()
            result = wait(cache.attend(seqs=batch.seqs, **asked))
            results += batch.shares(result)
            if "rope" not in asked:
                wanted += batch.wanted(asked)
        assert ctx.stats()["kv_cache"].failed == 0
    told = [dict(event.fields) for event in events if event.name == "launch.cascade"]
    chosen, reasons = [one for one in told if one["taken"]], [one["reason"] for one in told if not one["taken"]]
    return Seen(results, wanted, chosen, reasons, [e.fields["kernel"] for e in events if e.name == "request.launched"])
