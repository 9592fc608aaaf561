"""The messages that attention actors take, and their results.

Messages carry arrays and options exactly as the caller gave them. The actor checks them, so the reply reports errors.
Messages are plain records: do not change one after submitting it, nor its arrays before it is answered.

An option is a field of a message. A TypedDict beside it repeats the option for type checkers and editors, which cannot
read the arguments of a call from a dataclass; `gpu_actors.runtime.handle.takes_options` joins the two.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import sys
import typing
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from types import SimpleNamespace
from typing import Annotated, Any, ClassVar, NamedTuple, TypeAlias, TypedDict

from gpu_actors.attention.block_mask import BlockMask
from gpu_actors.values import brief

__all__ = [
    "Array",
    "AttentionGradients",
    "AttentionOutput",
    "BackwardKeywords",
    "BatchedDecode",
    "CacheKeywords",
    "CacheOptions",
    "DecodeKeywords",
    "FlashBackward",
    "FlashForward",
    "ForwardKeywords",
    "LatentKeywords",
    "OutputKeywords",
    "PagedForward",
    "PagedKeywords",
    "RequestKeywords",
    "array_fields",
    "scalars_of",
]

_ARRAY = "an array"
Array: TypeAlias = Annotated[Any, _ARRAY]
"""NumPy, CuPy, torch, JAX, or anything with DLPack. Fields of messages that hold arrays are annotated with it."""


@dataclass(slots=True, kw_only=True, eq=False)
class RequestOptions:
    """The options that every attention request takes. `FlashForward` and `PagedForward` explain them."""

    window_size: tuple[int, int] = (-1, -1)
    attention_chunk: int = 0
    sink_tokens: int = 0
    softmax_scale: float | None = None
    softcap: float = 0.0
    alibi_slopes: Array | None = None
    sinks: Array | None = None
    bias: Array | None = None
    q_positions: Array | None = None
    k_positions: Array | None = None
    return_lse: bool = False
    out: Array | None = None
    out_dtype: str | None = None


class RequestKeywords(TypedDict, total=False):
    """`RequestOptions` without the options of the output, as keyword arguments of a call."""

    window_size: tuple[int, int]
    attention_chunk: int
    sink_tokens: int
    softmax_scale: float | None
    softcap: float
    alibi_slopes: Array | None
    sinks: Array | None
    bias: Array | None
    q_positions: Array | None
    k_positions: Array | None


class OutputKeywords(RequestKeywords, total=False):
    """`RequestOptions` as keyword arguments of a call."""

    return_lse: bool
    out: Array | None
    out_dtype: str | None


@dataclass(slots=True, eq=False)
class FlashForward(RequestOptions):
    """Attention forward, dense or varlen.

    q: (batch, seqlen_q, heads_q, head_dim), or (total_q, heads_q, head_dim) with ``cu_seqlens_q``.
    k: (batch, seqlen_k, heads_kv, head_dim), or (total_k, heads_kv, head_dim) with ``cu_seqlens_k``.
    v: as k, but may have another head_dim.
    All three have one dtype: float16, bfloat16, float32, float64, float8_e4m3fn or float8_e5m2. The output has q's
    dtype, or bfloat16 for fp8. There may be no sequences, rows or keys. A row without keys has output 0, and its LSE is
    -inf, or its sink.

    In dense batches q, or k and v, may have a batch of 1 that all sequences share without a copy. Its gradient also has
    a batch of 1: the sum over the sequences in fp32 (fp64 for float64 inputs), in their order, rounded once. Until then
    the device keeps each sequence's part unrounded. Gradients of padded sequences need full batches.

    causal: keys after the row's own are hidden; ``alignment`` "bottom_right" puts the last row on the last key,
        "top_left" the first row on the first key.
    window_size: (left, right), inclusive, in keys from the row's own; -1 is unbounded.
    softmax_scale: default 1/sqrt(head_dim). softcap: c > 0 turns scores s into c*tanh(s/c).
    alibi_slopes: fp32 (heads_q,) or (batch, heads_q); adds -slope*|i + seqlen_k - seqlen_q - j|.
    alibi_signed: adds -slope*(i + seqlen_k - seqlen_q - j) instead, which is positive for keys after the row's own.
        Causal rows see none of those, so their result does not change.
    sinks: fp32 or q's dtype, (heads_q,): a logit per head that joins the softmax's denominator and has no value.
    sink_tokens: the first n keys stay visible outside of every window; causal still hides them.
    bias: (batch or 1, heads_q or 1, seqlen_q or 1, seqlen_k). With q's dtype or fp32 it is added to the
        scaled scores. A bool bias is a mask: keys count where it is True. It has no gradient, and keys and values must
        be finite. With ``cu_seqlens`` the last two axes have at least the longest sequence's rows and keys: element
        (r, j) belongs to row r and key j of the sequence, and elements after its end are not read.
    dropout_p, dropout_seed: Philox4x32-10 dropout of the probabilities, the same for the same seed on every device.
    cu_seqlens_q, cu_seqlens_k: int32 (batch + 1,), rising from 0 to the total. They are checked on the host. On a
        device they are trusted: wrong values make kernels read outside of the arrays.
    max_seqlen_q, max_seqlen_k: the longest sequence; found from cu_seqlens on the host if not given. With cu_seqlens on
        a device they are trusted, too.
    q_descale, k_descale, v_descale: fp32 (batch, heads_kv), multiply fp8 inputs.
    compute: for fp32 inputs, the dtype of the products: "f32" (default), "tf32", "f16" or "bf16".
    return_lse: also return the natural-log LSE, (batch, heads_q, seqlen_q) or (heads_q, total_q).
    lse_dtype: the dtype of the LSE: "float32", or "float64" for float64 inputs, whose partials then merge in float64.
    out: the array to write the output to; shaped like q with v's head_dim.
    out_dtype: "float32" returns the output unrounded, for partials that are merged later; sinks must then be fp32.
        None: q's dtype, or bfloat16 for fp8. Backward takes out and dout in q's dtype.
    q_positions, k_positions: int32 (batch,) or (batch, 2): the positions of each sequence's rows, or keys, in a larger
        problem that this request is a part of: row i stands at first + i, or at first + i * step. If only one of the
        two is given, the other's positions are 0, 1, .. Causal, windows, sink tokens, ALiBi and dropout count
        positions, and a row's own key is the key at its position. 0 <= first, 1 <= step, and all positions are below
        2^30.
    dropout_first_head, dropout_heads: the number of the first head and the number of heads, for dropout. None: q's own.
    attention_chunk: n > 0 cuts the keys into chunks of n, from the first key or position 0 on: a row sees only the
        chunk of its own key, as far as its window reaches. sink_tokens stay visible.
    seqused_q, seqused_k: int32 (batch,), on the host: the number of rows, or keys, of each sequence of a dense batch
        that count. The others are padding, and may have any contents. Causal and windows use the lengths that count.
        Outputs and gradients of padding are 0. The output of a row without keys is 0 too, and its LSE is -inf, or its
        sink. Sequences must follow each other without gaps, and a bias that they do not share lies on the host. Dropout
        numbers sequence b as 3b, as in the packed batch that is computed. Gradients of sinks read dout, out and lse of
        padding rows on a device, so these must be finite.
    block_mask: a `BlockMask`. Blocks that it does not list are hidden, besides keys that causal and windows hide, and
        kernels neither load nor multiply them. Not with softcap, bias, positions or seqused.
    pack_gqa: whether a request of fewer than 64 rows packs the rows of the query heads that share a KV head into one
        tile, and splits the keys. None: by FlashAttention's rule; `FlashAttnHandle.explain` shows the decision. True:
        wherever a kernel can. False: never, so that a sequence has the same bits alone and in any batch.
    """

    __repr__ = brief
    argument_names: ClassVar[Mapping[str, str]] = {"dtype": "q", "kv_dtype": "k"}

    q: Array
    k: Array
    v: Array
    _: KW_ONLY
    causal: bool = False
    alignment: str = "bottom_right"
    alibi_signed: bool = False
    dropout_p: float = 0.0
    dropout_seed: int = 0
    dropout_first_head: int = 0
    dropout_heads: int | None = None
    cu_seqlens_q: Array | None = None
    cu_seqlens_k: Array | None = None
    max_seqlen_q: int | None = None
    max_seqlen_k: int | None = None
    seqused_q: Array | None = None
    seqused_k: Array | None = None
    q_descale: Array | None = None
    k_descale: Array | None = None
    v_descale: Array | None = None
    block_mask: BlockMask | None = None
    compute: str | None = None
    lse_dtype: str = "float32"
    pack_gqa: bool | None = None


class _DenseKeywords(RequestKeywords, total=False):
    causal: bool
    alignment: str
    alibi_signed: bool
    dropout_p: float
    dropout_seed: int
    dropout_first_head: int
    dropout_heads: int | None
    cu_seqlens_q: Array | None
    cu_seqlens_k: Array | None
    max_seqlen_q: int | None
    max_seqlen_k: int | None
    seqused_q: Array | None
    seqused_k: Array | None
    block_mask: BlockMask | None
    compute: str | None


class ForwardKeywords(_DenseKeywords, OutputKeywords, total=False):
    """The options of `FlashForward` as keyword arguments of a call."""

    q_descale: Array | None
    k_descale: Array | None
    v_descale: Array | None
    lse_dtype: str
    pack_gqa: bool | None


class BackwardKeywords(_DenseKeywords, total=False):
    """The options of `FlashBackward` as keyword arguments of a call."""

    deterministic: bool


@dataclass(slots=True, kw_only=True, eq=False, repr=False)
class FlashBackward(FlashForward):
    """Attention backward: the gradients of `FlashForward` at the same options.

    dout: in the shape and dtype of the output. lse: as `FlashForward` returns it: fp32, or float64 for float64 inputs.
    ``out`` is the forward's output, an input here. Leave lse_dtype, since lse has its own dtype, and pack_gqa, since
    gradients pack no rows.
    deterministic: whether gradients are bitwise the same every time.
    """

    dout: Array = None
    lse: Array = None
    deterministic: bool = False


@dataclass(slots=True, kw_only=True, eq=False)
class CacheOptions(RequestOptions):
    """The options of attention that every request over a cache takes. See `PagedForward`."""

    num_splits: int = 0


class CacheKeywords(OutputKeywords, total=False):
    """`CacheOptions` as keyword arguments of a call."""

    num_splits: int


@dataclass(slots=True, kw_only=True, eq=False)
class PagedForward(CacheOptions):
    """Attention of new rows to keys and values that are kept in pages, or in one dense cache.

    q: (batch, rows, heads_q, head_dim), or (total_q, heads_q, head_dim) with ``cu_seqlens_q``: the last rows of each
        sequence, whose keys and values are in the cache already.
    k_cache, v_cache: with ``block_table`` pages (num_blocks, page_size, heads_kv, head_dim), page_size at least
        1; without it a dense cache (batch, capacity, heads_kv, head_dim). q's dtype, fp8 too, or fp8 under a 16-bit q.
    latent_dim: replaces v_cache: values are the first latent_dim columns of k_cache, which is read once for both, as in
        multi-head latent attention with absorbed projections (DeepSeek-V2, arXiv 2405.04434). There k_cache holds
        latents and rotated keys side by side, 512 + 64 columns; head_dim may be up to 576. softmax_scale must be given:
        it follows from the heads before absorption, 1 / sqrt(128 + 64) there. k_descale holds for the whole cache.
    block_table: int32 (batch, max_blocks), the pages of each sequence in order; entries past a sequence's last page
        are never read.
    cache_seqlens: int32 (batch,), the number of keys of each sequence, new ones included. A sequence may have none. An
        int is the length of all sequences.
    cache_batch_idx: int32 (batch,), for a dense cache of any number of sequences: the cache's sequence for each one of
        q. Several may use the same.
    cache_leftpad: int32 (batch,): the number of rows before each sequence's first key in the cache. They are not read.
        cache_seqlens includes them; everything else counts keys from the first key on.
    cu_seqlens_q, max_seqlen_q: as in `FlashForward`.
    causal: keys after the row's own are hidden; the last row lies on the last key.
    tree_mask: replaces causal by the new keys that each new row sees: row i sees every earlier key, and new key j if
        bit j of its number is set (uint64 or int64, shaped like q without heads and head_dim), or if [..., i, j] is
        True (bool (batch, rows, rows), on the host). At most 64 rows per sequence.
    q_descale, k_descale, v_descale: fp32 (batch, heads_kv), multiply fp8 operands.
    num_splits: the number of ranges that the keys of a sequence are cut into; 0: the planner decides. With the same
        number a sequence's result is bitwise the same alone and in any batch.
    chunk_index, num_chunks: which chunk of a prefill this is. They are checked but not used, because ``cache_seqlens``
        implies them.
    q_positions, k_positions: int32 (batch,) or (batch, 2): the positions of each sequence's new rows, or of its keys
        from the first one on, in a larger problem: first + i * step. Causal, windows, sink tokens, chunks and ALiBi
        then count positions. Without q_positions the rows stand at the positions of the sequence's last keys. Without
        k_positions the keys stand at 0, 1, .. Bounds are those of `FlashForward`. A tree mask still counts keys by
        their place in the cache.
    bias: (batch or 1, heads_q or 1, rows or 1, keys), as in `FlashForward`, also bool: element (r, j) belongs to new
        row r and key j of the sequence. It has at least the rows and keys of the longest sequence, or, if lengths lie
        on the device, all keys that a sequence can have. Elements after a sequence's end are not read.
    block_mask: a `BlockMask`, as in `FlashForward`: rows are counted from the first new row, keys from the first key in
        the cache, and C is the number of blocks of the longest possible sequence. On Hopper, for 64 or more new rows.
    window_size, softmax_scale, softcap, alibi_slopes, sinks, sink_tokens, return_lse, out, attention_chunk,
        out_dtype: as in `FlashForward`.
    """

    __repr__ = brief
    argument_names: ClassVar[Mapping[str, str]] = {"dtype": "q", "kv_dtype": "k_cache"}

    q: Array
    k_cache: Array
    v_cache: Array | None = None
    latent_dim: int = 0
    block_table: Array | None = None
    cache_seqlens: Array
    cu_seqlens_q: Array | None = None
    max_seqlen_q: int | None = None
    causal: bool = True
    tree_mask: Array | None = None
    q_descale: Array | None = None
    k_descale: Array | None = None
    v_descale: Array | None = None
    chunk_index: int = 0
    num_chunks: int = 1
    cache_batch_idx: Array | None = None
    cache_leftpad: Array | None = None
    block_mask: BlockMask | None = None


class PagedKeywords(CacheKeywords, total=False):
    """The options of `PagedForward` as keyword arguments of a call."""

    latent_dim: int
    block_table: Array | None
    cu_seqlens_q: Array | None
    max_seqlen_q: int | None
    causal: bool
    tree_mask: Array | None
    q_descale: Array | None
    k_descale: Array | None
    v_descale: Array | None
    chunk_index: int
    num_chunks: int
    cache_batch_idx: Array | None
    cache_leftpad: Array | None
    block_mask: BlockMask | None


class LatentKeywords(TypedDict, total=False):
    """The options of `PagedForward` that a latent cache takes, as keyword arguments of a call."""

    block_table: Array | None
    cu_seqlens_q: Array | None
    max_seqlen_q: int | None
    causal: bool
    tree_mask: Array | None
    k_descale: Array | None
    num_splits: int
    return_lse: bool
    out: Array | None


@dataclass(slots=True, kw_only=True, eq=False)
class BatchedDecode(CacheOptions):
    """Attention of one new row per sequence to one cache array per sequence.

    q: (batch, heads_q, head_dim), as is the output. The LSE is (batch, heads_q).
    k_caches, v_caches: a list with an array (heads_kv, max_seq, head_dim) for each sequence, with its own max_seq and
        strides, or one array (batch, heads_kv, max_seq, head_dim). The row's own key and value are in them already.
    seq_lens: int32 or uint32 (batch,), the number of keys of each sequence, the new key included. A sequence may have
        none. An int is the length of all sequences.
    bias: (batch or 1, heads_q or 1, keys), as in `PagedForward` for one row.
    Other options as in `PagedForward`.
    """

    __repr__ = brief
    argument_names: ClassVar[Mapping[str, str]] = {"dtype": "q", "kv_dtype": "k_caches"}

    q: Array
    k_caches: Sequence[Array] | Array
    v_caches: Sequence[Array] | Array
    seq_lens: Array
    q_descale: Array | None = None
    k_descale: Array | None = None
    v_descale: Array | None = None


class DecodeKeywords(CacheKeywords, total=False):
    """The options of `BatchedDecode` as keyword arguments of a call."""

    q_descale: Array | None
    k_descale: Array | None
    v_descale: Array | None


@functools.cache
def array_fields(request_type: type) -> Mapping[str, bool]:
    """The fields of a message type that hold an array or None, and whether each may hold a list of arrays.

    Required fields come first, so that an error in q is reported before an error in a bias.
    """
    fields = sorted(dataclasses.fields(request_type), key=lambda field: field.default is not dataclasses.MISSING)
    hints = {field.name: _hint(request_type, field) for field in fields}
    return {name: _holds_several(hint) for name, hint in hints.items() if _holds_array(hint)}


def _hint(request_type: type, field: dataclasses.Field[Any]) -> Any:
    """The type of a field. None if it cannot be found, for example if a program imports it for type checkers only."""
    annotated = SimpleNamespace(__annotations__={field.name: field.type})
    for base in request_type.__mro__:
        with contextlib.suppress(Exception):  # evaluating an annotation may raise anything
            return typing.get_type_hints(annotated, vars(sys.modules[base.__module__]), include_extras=True)[field.name]
    return None


def _holds_array(hint: Any) -> bool:
    """Whether a type is `Array`, a type of another library that can be shared by DLPack, or a union or list of such."""
    if _ARRAY in getattr(hint, "__metadata__", ()) or hasattr(typing.get_origin(hint) or hint, "__dlpack__"):
        return True
    return any(map(_holds_array, typing.get_args(hint)))


def _holds_several(hint: Any) -> bool:
    return any(typing.get_origin(kind) is Sequence for kind in (hint, *typing.get_args(hint)))


def scalars_of(request_type: type) -> tuple[str, ...]:
    """The names of a request's fields that are not arrays, in order."""
    arrays = array_fields(request_type)
    return tuple(field.name for field in dataclasses.fields(request_type) if field.name not in arrays)


class AttentionOutput(NamedTuple):
    """out: an array of q's library, on q's device, in q's layout. lse: fp32 or fp64, or None without return_lse."""

    out: Any
    lse: Any = None

    def __repr__(self) -> str:
        return brief(self)


class AttentionGradients(NamedTuple):
    """Gradients shaped like their inputs. dbias and dsinks are None if there was no such input."""

    dq: Any
    dk: Any
    dv: Any
    dbias: Any = None
    dsinks: Any = None

    def __repr__(self) -> str:
        return brief(self)
