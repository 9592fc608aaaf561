"""The messages that a KvCacheActor takes, and what describes a cache and a sequence in it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, TypedDict

from gpu_actors.attention.block_mask import BlockMask
from gpu_actors.attention.requests import Array, CacheKeywords, CacheOptions, RequestKeywords
from gpu_actors.kernels.append import Rope
from gpu_actors.process import incarnation
from gpu_actors.values import brief

__all__ = [
    "AppendKeywords",
    "AppendRows",
    "AttendCache",
    "AttendKeywords",
    "AttendLayer",
    "BeginStep",
    "CacheMessage",
    "CloseCache",
    "CreateSequence",
    "EndStep",
    "ExportSequence",
    "ForkSequence",
    "FreeSequence",
    "ImportSequence",
    "KvCacheKeywords",
    "KvCacheSpec",
    "KvLayer",
    "KvSequence",
    "OpenCache",
    "StepKeywords",
    "TruncateSequence",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class KvLayer:
    """One layer of a cache whose layers differ.

    Layers that are equal form a group, which has pools of ``num_blocks`` pages for all of its layers.

    window: the most keys to the left of its own that a row sees. The sequence then gives back the pages that hold none
        of its last window + 1 + slack rows, once these are written. None: a row may see all earlier keys.
    slack: with a window, rows that `KvCache.truncate` may take back after they were committed, such as drafts.
    Each other field is as in `KvCacheSpec`, and None means the cache's own value.
    """

    kv_heads: int | None = None
    head_dim: int | None = None
    head_dim_v: int | None = None
    latent_dim: int | None = None
    dtype: Any = None
    k_descale: Array | None = None
    v_descale: Array | None = None
    num_blocks: int | None = None
    window: int | None = None
    slack: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class KvCacheSpec:
    """A paged pool: K (num_blocks, page_size, kv_heads, head_dim) and V with head_dim_v of its own.

    page_size: keys per page, at least 1. dtype: float16, bfloat16, float32, float64, float8_e4m3fn or
        float8_e5m2. Rows of float64 are not rotated.
    k_descale, v_descale: fp32 (kv_heads,), positive: the factors of an fp8 pool's elements.
    latent_dim: in place of V and head_dim_v: the first latent_dim columns of keys are the values, as in `PagedForward`.
        The rows of a DeepSeek-V3 layer have kv_heads=1, head_dim=512 + 64 and latent_dim=512. k_descale then applies to
        whole rows, and there is no v_descale.
    cascade: whether a launch reads a page only once that neighbours in its batch share. "auto": if at least 8 of them
        share at least 256 keys, which is vLLM's rule. True: wherever it is exact. False: nowhere.
    layers: how many layers of a model have a pool of this layout. A sequence has the same rows and pages in all layers.
        Several layers have pools K (layers, num_blocks, ...) and V likewise. If layers differ, a list of `KvLayer` in
        the model's order: a sequence then has the same rows in all layers, and pages in each group of equal layers.
        kv_heads and head_dim may be left out if each entry of the list has its own.
    """

    num_blocks: int
    page_size: int
    kv_heads: int | None = None
    head_dim: int | None = None
    head_dim_v: int | None = None
    dtype: Any = "bfloat16"
    k_descale: Array | None = None
    v_descale: Array | None = None
    latent_dim: int = 0
    cascade: bool | Literal["auto"] = "auto"
    layers: int | Sequence[KvLayer] = 1


class _PoolKeywords(TypedDict):
    num_blocks: int
    page_size: int


class KvCacheKeywords(_PoolKeywords, total=False):
    """`KvCacheSpec` as keyword arguments of a call."""

    kv_heads: int | None
    head_dim: int | None
    head_dim_v: int | None
    dtype: Any
    k_descale: Array | None
    v_descale: Array | None
    latent_dim: int
    cascade: bool | Literal["auto"]
    layers: int | Sequence[KvLayer]


@dataclass(frozen=True, slots=True)
class KvSequence:
    """A sequence in a KvCache, as `KvCache.create` returns it. The object itself holds no memory.

    cached: how many rows it began with, from a prompt with the same beginning or from the sequence that was forked.
    generation: of its context. incarnation: of its process (see `gpu_actors.process`); requests with a sequence of
    another process, or from before a fork of the process, raise `StaleBuffer`.
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
    """Free the pool. A full mailbox takes this message too, and no default deadline applies to it."""

    frees_memory: ClassVar[bool] = True
    no_deadline: ClassVar[bool] = True

    cache: int


@dataclass(slots=True, eq=False)
class CreateSequence:
    """Begin a sequence. tokens: ids of its whole prompt; the cache may have the prompt's first pages already."""

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
    """Forget a sequence. A full mailbox takes this message too, and no default deadline applies to it."""

    frees_memory: ClassVar[bool] = True
    no_deadline: ClassVar[bool] = True

    cache: int
    seq: Any


@dataclass(slots=True, eq=False)
class ExportSequence:
    """Read the pages of a sequence, and keep them with a lease. Answered with `SequencePages`."""

    cache: int
    seq: Any


@dataclass(slots=True, eq=False)
class ImportSequence:
    """Begin a sequence with exported ``pages``, `SequencePages`. Answered with its `KvSequence`."""

    cache: int
    pages: Any


@dataclass(slots=True, kw_only=True, eq=False)
class AppendRows:
    """Write new rows after those of one or several sequences.

    seqs: a `KvSequence` with k (rows, kv_heads, head_dim) and v (rows, kv_heads, head_dim_v), or a list of sequences,
        each once, with (batch, rows, ...), or (total, ...) and ``cu_seqlens``.
    c_kv, k_pe: in place of k and v for a latent cache: the latents (rows, kv_heads, latent_dim) and the rotated keys
        (rows, kv_heads, head_dim - latent_dim), or with k's first axes for a list of sequences. A rope rotates k_pe.
        In a cache of several layers each of the four begins with an axis of the layers, or is a list of one array per
        layer. In such a list, None stands for a layer that has the other two arrays.
    tokens: ids, one per row, shaped like k's first axes. A row's token and all tokens before it must determine its keys
        and values. A sequence created for a prompt with the same beginning shares whole pages of such rows.
    rope: rotates K by each row's place in its sequence, or by ``positions``, int32, one per row. rope_cos, rope_sin:
        fp32 (table_rows, rope.dim / 2), for a rope that takes tables; a position beyond them is refused.
    expect_length: rows that the sequence must have before this request, or a list of them for a list. Otherwise nothing
        is written, and the reply raises `InvalidRequest`. So a request that is repeated because its answer got lost
        takes effect once.
    The reply returns the new length of the sequence, or a list of lengths.
    """

    __repr__ = brief
    argument_names: ClassVar[Mapping[str, str]] = {"cache_dtype": "cache"}

    cache: int
    seqs: Any
    k: Array | Sequence[Array | None] | None = None
    v: Array | Sequence[Array | None] | None = None
    cu_seqlens: Array | None = None
    tokens: Any = None
    rope: Rope | None = None
    positions: Array | None = None
    rope_cos: Array | None = None
    rope_sin: Array | None = None
    expect_length: int | Sequence[int] | None = None
    c_kv: Array | Sequence[Array | None] | None = None
    k_pe: Array | Sequence[Array | None] | None = None


class AppendKeywords(TypedDict, total=False):
    """The options of `AppendRows` as keyword arguments of a call."""

    c_kv: Array | Sequence[Array | None] | None
    k_pe: Array | Sequence[Array | None] | None
    cu_seqlens: Array | None
    tokens: Any
    rope: Rope | None
    positions: Array | None
    rope_cos: Array | None
    rope_sin: Array | None
    expect_length: int | Sequence[int] | None


@dataclass(slots=True, kw_only=True, eq=False)
class AttendCache(CacheOptions):
    """Attention of the last rows of each sequence to its keys and values. Appends k and v first, if they are given.

    seqs: a list of `KvSequence`, or a single one, which is a batch of one.
    q: (batch, rows, heads_q, head_dim), or (total_q, heads_q, head_dim) with ``cu_seqlens_q``.
    k, v: new rows' keys and values, (batch, new_rows, kv_heads, dim), or (total, kv_heads, dim) with q's
        ``cu_seqlens_q`` or with ends of their own, ``cu_seqlens_k_new``; None if they are in the cache already. q may
        have more or fewer rows of a sequence than are new: its rows are the sequence's last ones after the append.
    c_kv, k_pe: in place of k and v for a latent cache, as for `AppendRows`. q has the latent_dim columns of absorbed
        queries beside their rotated columns. softmax_scale must be given; rope must not.
    rope: goes with k and v, and rotates q too; tokens, positions, rope_cos and rope_sin as for `AppendRows`. If
        q_positions are given without ``positions``, rows are rotated by q_positions, which must then lie on the host.
    positions_q: int32 (total_q,), the positions that q's rows are rotated by. None: the new rows' positions if q has
        the same rows, else q_positions, else the places of the rows at the end of their sequence.
    layer: in a cache of several layers, the one whose keys and values are attended to. A step or `AppendRows` appends
        its rows, so k and v are not given here.
    expect_length: as for `AppendRows`, a list of lengths, or one for one sequence.
    q_descale: fp32 (batch, kv_heads), for an fp8 q. Such a q has the dtype of its fp8 cache and is not rotated.
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
    expect_length: int | Sequence[int] | None = None
    cu_seqlens_k_new: Array | None = None
    positions_q: Array | None = None
    q_descale: Array | None = None
    c_kv: Array | None = None
    k_pe: Array | None = None
    block_mask: BlockMask | None = None
    layer: int = 0


@dataclass(slots=True, kw_only=True, eq=False)
class BeginStep:
    """Begin one pass of a model over all layers of a cache. `KvCache.step` sends it, and returns the `KvStep`.

    seqs: a list of `KvSequence`, each once. rows: how many rows q has of each sequence, one number for all or a list.
        They are the last rows of their sequences.
    heads_q: of q, (batch, rows, heads_q, head_dim), or (total, heads_q, head_dim) if ``rows`` is a list. A list of
        heads_q has the number of each layer.
    append: whether every layer gets keys and values of these rows and appends them before it attends. k and v are
        (batch, rows, kv_heads, dim), or (total, kv_heads, dim).
    dtype: of q, k and v, by name. None: the cache's own, which must not be fp8 then.
    like: arrays by the names q, k, v (c_kv and k_pe of a latent cache) and out, with the kind, strides and alignment of
        each layer's arrays. Default: contiguous, on a GPU if the context has one, at multiples of 16 bytes. If layers
        differ, {layer: {name: array}} gives each its own.
    options: those of `AttendCache` for all layers. layer_options: for single layers, in place of these.
    on_host: whether arrays lie on the host by default on a GPU too, as for a context in another process.
    max_length: the most rows of a sequence, with those of the step. The step is planned for this length, so that steps
        over longer sequences may replay what this one captures. Default: what the block table has room for.
    captured: the capture that this step replays, passed by `KvCapture.step`.
    """

    __repr__ = brief
    argument_names: ClassVar[Mapping[str, str]] = {
        "batch": "seqs",
        "seqlen_k": "seqs",
        "seqlen_q": "rows",
        "kv_dtype": "cache",
        "k_cache": "cache",
        "cache_dtype": "cache",
    }

    cache: int
    seqs: Any
    heads_q: int | Sequence[int]
    rows: int | Sequence[int] = 1
    append: bool = True
    dtype: Any = None
    like: Mapping[str, Any] | Mapping[int, Mapping[str, Any]] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    layer_options: Mapping[int, Mapping[str, Any]] | None = None
    on_host: bool = False
    max_length: int | None = None
    captured: Any = None


@dataclass(slots=True, eq=False)
class EndStep:
    """End a step. A full mailbox takes this message too, and no default deadline applies to it.

    step: an `OpenStep`, or its stand-in in another process. commit: whether its rows stay. If not, every sequence is as
        before the step.
    """

    frees_memory: ClassVar[bool] = True
    no_deadline: ClassVar[bool] = True

    cache: int
    step: Any
    commit: bool


@dataclass(slots=True, kw_only=True, eq=False)
class AttendLayer:
    """Attend to one layer of a step in another process: the arguments of `KvStep.attend`. Answered with its output.

    A full mailbox takes this message too, because it does not wait there.
    """

    __repr__ = brief
    frees_memory: ClassVar[bool] = True

    step: Any
    layer: Any
    q: Array
    k: Array | None = None
    v: Array | None = None
    c_kv: Array | None = None
    k_pe: Array | None = None
    out: Array | None = None


class AttendKeywords(CacheKeywords, total=False):
    """The options of `AttendCache` as keyword arguments of a call."""

    k: Array | None
    v: Array | None
    c_kv: Array | None
    k_pe: Array | None
    cu_seqlens_q: Array | None
    max_seqlen_q: int | None
    cu_seqlens_k_new: Array | None
    causal: bool
    tree_mask: Array | None
    block_mask: BlockMask | None
    q_descale: Array | None
    tokens: Any
    rope: Rope | None
    positions: Array | None
    positions_q: Array | None
    rope_cos: Array | None
    rope_sin: Array | None
    expect_length: int | Sequence[int] | None
    layer: int


class StepKeywords(RequestKeywords, total=False):
    """The options of `AttendCache` that a step takes, as keyword arguments of a call."""

    causal: bool
    num_splits: int
    return_lse: bool
    out_dtype: str | None
    tokens: Any
    rope: Rope | None
    positions: Array | None
    rope_cos: Array | None
    rope_sin: Array | None
    expect_length: Sequence[int] | None


CacheMessage = (
    BeginStep
    | CloseCache
    | CreateSequence
    | ForkSequence
    | TruncateSequence
    | FreeSequence
    | EndStep
    | ExportSequence
    | ImportSequence
    | AppendRows
    | AttendCache
)
