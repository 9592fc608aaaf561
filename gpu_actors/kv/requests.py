"""The messages that a KvCacheActor takes, and what describes a cache and a sequence in it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from gpu_actors.process import incarnation
from gpu_actors.requests import Array, CacheOptions
from gpu_actors.values import brief

if TYPE_CHECKING:
    from gpu_actors.kernels.append.variant import Rope

__all__ = [
    "AppendRows",
    "AttendCache",
    "CacheMessage",
    "CloseCache",
    "CreateSequence",
    "ForkSequence",
    "FreeSequence",
    "KvCacheSpec",
    "KvSequence",
    "OpenCache",
    "TruncateSequence",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class KvCacheSpec:
    """A paged pool: K (num_blocks, page_size, kv_heads, head_dim) and V with head_dim_v of its own.

    page_size: keys a page, a multiple of 8. dtype: float16, bfloat16, float32, float64, float8_e4m3fn or float8_e5m2.
    k_descale, v_descale: fp32 (kv_heads,), positive: what an fp8 pool's elements are multiplied with.
    """

    num_blocks: int
    page_size: int
    kv_heads: int
    head_dim: int
    head_dim_v: int | None = None
    dtype: Any = "bfloat16"
    k_descale: Array | None = None
    v_descale: Array | None = None


@dataclass(frozen=True, slots=True)
class KvSequence:
    """A sequence in a KvCache, as `KvCache.create` gives it. It holds no memory by itself.

    cached: rows that it began with: of a prompt with the same beginning, or of the sequence that it was forked from.
    generation: of the context that it belongs to. incarnation: of the process (see `gpu_actors.process`); pickled and
    used in another one, or after a fork, the sequence is answered `StaleBuffer`.
    """

    cache: int
    number: int
    generation: int
    cached: int = 0
    incarnation: bytes = field(default_factory=incarnation, repr=False)


@dataclass(slots=True, eq=False)
class OpenCache:
    """Make a pool. Answered with the number of the cache."""

    spec: KvCacheSpec


@dataclass(slots=True, eq=False)
class CloseCache:
    """Give the pool back. Taken in by a full mailbox too, and never given up for taking long."""

    frees_memory: ClassVar[bool] = True
    no_deadline: ClassVar[bool] = True

    cache: int


@dataclass(slots=True, eq=False)
class CreateSequence:
    """Begin a sequence. tokens: ids of its whole prompt, whose first pages may be there already."""

    cache: int
    tokens: Sequence[int] | Any = None


@dataclass(slots=True, eq=False)
class ForkSequence:
    """Begin a sequence with the rows of another."""

    cache: int
    seq: Any


@dataclass(slots=True, eq=False)
class TruncateSequence:
    """Keep the first ``length`` rows."""

    cache: int
    seq: Any
    length: int


@dataclass(slots=True, eq=False)
class FreeSequence:
    """Forget a sequence. Taken in by a full mailbox too, and under no time limit that it does not name."""

    frees_memory: ClassVar[bool] = True
    no_deadline: ClassVar[bool] = True

    cache: int
    seq: Any


@dataclass(slots=True, kw_only=True, eq=False)
class AppendRows:
    """Write new rows behind those of one or several sequences.

    seqs: a `KvSequence` with k (rows, kv_heads, head_dim) and v (rows, kv_heads, head_dim_v), or a list of them, each
        once, with (batch, rows, ...), or (total, ...) and ``cu_seqlens``.
    tokens: ids, one a row and shaped like k's first axes, that the rows' keys and values follow from, together with all
        before them. Whole pages of such rows are shared with sequences that are created for a prompt that begins alike.
    rope: rotates K by each row's place in its sequence, or by ``positions``, int32, one a row. rope_cos, rope_sin: fp32
        (table_rows, rope.dim / 2), where the rope takes tables: a place beyond them is refused.
    The reply gives the length of the sequence then, or a list of them.
    """

    __repr__ = brief
    argument_names: ClassVar[Mapping[str, str]] = {"cache_dtype": "cache"}

    cache: int
    seqs: Any
    k: Array
    v: Array
    cu_seqlens: Array | None = None
    tokens: Any = None
    rope: Rope | None = None
    positions: Array | None = None
    rope_cos: Array | None = None
    rope_sin: Array | None = None


@dataclass(slots=True, kw_only=True, eq=False)
class AttendCache(CacheOptions):
    """Attention of the last rows of each sequence to its keys and values, after appending them where k and v are given.

    seqs: a list of `KvSequence`, or one, which is a batch of one.
    q: (batch, rows, heads_q, head_dim), or (total_q, heads_q, head_dim) with ``cu_seqlens_q``.
    k, v: the same rows' keys and values, (batch, rows, kv_heads, dim) or (total_q, kv_heads, dim); None where they are
        in the cache already.
    rope: goes with k and v, and rotates q too; tokens, positions, rope_cos and rope_sin as for `AppendRows`.
    Other options as in `PagedForward`.
    """

    __repr__ = brief
    argument_names: ClassVar[Mapping[str, str]] = {
        "dtype": "q",
        "kv_dtype": "cache",
        "k_cache": "cache",
        "cache_dtype": "cache",
    }

    cache: int
    seqs: Any
    q: Array
    k: Array | None = None
    v: Array | None = None
    cu_seqlens_q: Array | None = None
    max_seqlen_q: int | None = None
    causal: bool = True
    tree_mask: Array | None = None
    tokens: Any = None
    rope: Rope | None = None
    positions: Array | None = None
    rope_cos: Array | None = None
    rope_sin: Array | None = None


CacheMessage = CloseCache | CreateSequence | ForkSequence | TruncateSequence | FreeSequence | AppendRows | AttendCache
