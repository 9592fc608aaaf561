"""AttentionProblem: the single description of an attention request.

It holds shapes, dtypes and options but no data. Validation produces it. The dispatch table, the compile-time macros,
the launch geometry, plan signatures, test names and the one-line repro are all derived from it, so the same code
answers two requests with equal problems in the same way.
"""

from __future__ import annotations

import dataclasses
import hashlib
from dataclasses import dataclass
from typing import Literal, TypeAlias

from gpu_actors.attention.key_mask import Alignment, KeyMask, MaskKind
from gpu_actors.attention.score_mod import ScoreMod

__all__ = ["FLAGS", "AttentionProblem", "DispatchKey"]

Direction: TypeAlias = Literal["forward", "backward"]
Layout: TypeAlias = Literal["dense", "varlen", "paged", "pointers", "cache"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionProblem(KeyMask):
    """Everything that decides how an attention request is computed, and no data.

    Lengths are rows; ``seqlen_q`` and ``seqlen_k`` are the (largest) lengths of one sequence and ``total_q`` and
    ``total_k`` the rows of all sequences together. dtypes are NumPy names (``bfloat16``, ``float8_e4m3fn`` and
    ``float8_e5m2`` as ml_dtypes spells them). The mask's options are those of `KeyMask`.

    bias: None, or (dtype, broadcast over batch, broadcast over heads); a bool bias hides keys. bias_row: whether the
    bias has one row for all rows. bias_keys: over caches, the keys of the bias; 0: as many as a sequence can have.
    alibi: None, "heads" for slopes (heads_q,) or "batch" for (batch, heads_q). alibi_signed: distances have a sign.
    deterministic: whether gradients are bitwise the same every time.
    invariant: whether a row has the same bits beside any other rows and sequences.
    score_mod: an operation graph's change of the scaled scores before softcap, ALiBi and bias, or None.

    The layouts "paged", "pointers" and "cache" keep K and V apart from the rows that attend: in pages of ``page_size``
    keys, in one array (heads_kv, seqlen_k, dim) for each sequence, and in one array (batch, seqlen_k, heads_kv, dim).
    For these seqlen_k is the most keys that a sequence can have, total_k the keys of the whole cache, and the data have
    each sequence's length.
    varlen_q: whether the rows of the sequences are packed, as in "varlen". tree_mask: see `PagedForward`; causal is
    False with it. num_splits: the ranges that the keys of a sequence are cut into; 0: the planner decides.
    cache_batch_idx, cache_leftpad: see `PagedForward`; for a "cache" with an index, total_k implies the number of its
    sequences. own_layouts: whether each array of "pointers" has its own capacity and strides.

    latent: whether values are the first head_dim_v columns of keys, in one cache.

    lse_dtype: the dtype of the LSE that forward returns, or backward reads. score_max, score_sum_exp: whether a row's
    largest score, and the sum of exp(score - largest) over its keys, are outputs.

    summed: the operands of "q", "k" and "v" that all sequences share, such as "kv": backward returns the sum of their
    gradients.

    q_positions, k_positions: how many numbers of each sequence say where its rows, or keys, stand: 0, 1 for the first
    position, 2 for that and the step. dropout_first_head, dropout_heads: the number of the first head and the number of
    heads that dropout counts; 0 heads: the heads of q.
    """

    direction: Direction = "forward"
    layout: Layout = "dense"
    batch: int
    seqlen_q: int
    seqlen_k: int
    total_q: int
    total_k: int
    heads_q: int
    heads_kv: int
    head_dim: int
    head_dim_v: int
    dtype: str
    kv_dtype: str
    out_dtype: str
    compute: str
    softmax_scale: float
    softcap: float = 0.0
    alibi: Literal["heads", "batch"] | None = None
    sinks: bool = False
    bias: tuple[str, bool, bool] | None = None
    dropout_p: float = 0.0
    descales: bool = False
    return_lse: bool = False
    page_size: int = 0
    deterministic: bool = False
    invariant: bool = False
    score_mod: ScoreMod | None = None
    varlen_q: bool = False
    tree_mask: bool = False
    num_splits: int = 0
    q_positions: Literal[0, 1, 2] = 0
    k_positions: Literal[0, 1, 2] = 0
    dropout_first_head: int = 0
    dropout_heads: int = 0
    bias_row: bool = False
    bias_keys: int = 0
    alibi_signed: bool = False
    cache_batch_idx: bool = False
    cache_leftpad: bool = False
    own_layouts: bool = False
    latent: bool = False
    score_max: bool = False
    score_sum_exp: bool = False
    lse_dtype: str = "float32"
    summed: str = ""

    @property
    def wide_lse(self) -> bool:
        """Whether the LSE that forward returns, or backward reads, has more than 32 bits."""
        return self.lse_dtype == "float64"

    @property
    def row_stats(self) -> bool:
        """Whether a row's largest score, or the sum of exponentials relative to it, is an output."""
        return self.score_max or self.score_sum_exp

    @property
    def positions(self) -> bool:
        """Whether rows, keys or heads have positions in a larger problem."""
        return bool(self.q_positions or self.k_positions or self.dropout_first_head or self.dropout_heads)

    @property
    def sliding_window(self) -> bool:
        """Whether a row sees only the keys of a window."""
        return self.mask in ("window", "causal_window")

    @property
    def gqa_ratio(self) -> int:
        """The number of query heads per KV head."""
        return self.heads_q // self.heads_kv

    @property
    def decoding(self) -> bool:
        """Whether K and V come from a cache of any layout, which has its own lengths."""
        return self.layout in ("paged", "pointers", "cache")

    @property
    def lse_shape(self) -> tuple[int, ...]:
        """The shape of the LSE, whether or not it is an output."""
        packed = self.layout == "varlen" or self.varlen_q
        return (self.heads_q, self.total_q) if packed else (self.batch, self.heads_q, self.seqlen_q)

    @property
    def vacuous(self) -> bool:
        """Whether every element of the answer is 0 for any data, so that no kernel is needed.

        Without rows there is no output, and the gradients of keys are 0. Without keys outputs and gradients are 0, but
        the LSE and the largest score are not.
        """
        if self.total_q == 0:
            return True
        return (
            self.total_k == 0
            and not self.decoding
            and (self.direction == "backward" or not (self.return_lse or self.row_stats))
        )

    @property
    def dbias(self) -> bool:
        """Whether the bias has a gradient."""
        return self.bias is not None and self.bias[0] != "bool"

    @property
    def bias_shape(self) -> tuple[int, ...]:
        """The shape of the bias, if there is one."""
        _, one_batch, one_head = self.bias or ("", True, True)
        rows = 1 if self.bias_row else self.seqlen_q
        keys = self.bias_keys or self.seqlen_k
        return 1 if one_batch else self.batch, 1 if one_head else self.heads_q, rows, keys

    @property
    def capped(self) -> bool:
        """Whether scores are bounded by a softcap."""
        return self.softcap > 0.0

    @property
    def flops(self) -> int:
        """FLOPs of the matrix products (two, five backward): twice their multiply-adds, or half of that if causal."""
        pairs = self.total_q * self.seqlen_k
        backward = self.direction == "backward"
        dims = 3 * self.head_dim + 2 * self.head_dim_v if backward else self.head_dim + self.head_dim_v
        work = 2 * pairs * self.heads_q * dims
        return work // 2 if self.causal else work

    def repro(self) -> str:
        """One line of Python that rebuilds this problem, for failure messages."""
        given = (
            f"{field.name}={getattr(self, field.name)!r}"
            for field in dataclasses.fields(self)
            if getattr(self, field.name) != field.default
        )
        return f"AttentionProblem({', '.join(given)})"


@dataclass(frozen=True, slots=True, kw_only=True)
class DispatchKey:
    """Names the kernel of a problem and its options: equal keys run the same cubin.

    It has no batch, lengths or head counts: one cubin serves all of them.

    row_tile: for kernels over caches, the rows of a block, packed over the query heads of a KV head; else 0.
    """

    kernel: str
    arch: str
    direction: Direction
    layout: Layout
    dtype: str
    kv_dtype: str
    out_dtype: str
    compute: str
    head_dim: int
    head_dim_v: int
    mask: MaskKind
    alignment: Alignment
    gqa_ratio: int
    softcap: bool
    alibi: bool
    sinks: bool
    sink_tokens: bool
    bias: str | None
    dropout: bool
    descales: bool
    lse: bool
    page_size: int
    varlen_q: bool
    tree_mask: bool
    num_splits: int
    persistent: bool
    deterministic: bool = False
    score_mod: ScoreMod | None = None
    row_tile: int = 0
    positions: bool = False
    attention_chunk: bool = False
    alibi_signed: bool = False
    cache_batch_idx: bool = False
    cache_leftpad: bool = False
    own_layouts: bool = False
    latent: bool = False
    row_stats: bool = False
    wide_lse: bool = False
    summed: str = ""

    def __str__(self) -> str:
        return ",".join(f"{field.name}={getattr(self, field.name)}" for field in dataclasses.fields(self))

    @property
    def digest(self) -> str:
        """The hexadecimal SHA-256 of the string form: the same in every process, Python version and machine."""
        return hashlib.sha256(str(self).encode()).hexdigest()

    @property
    def causal(self) -> bool:
        """Whether a row sees no key after its own."""
        return self.mask in ("causal", "causal_window")

    @property
    def sliding_window(self) -> bool:
        """Whether a row sees only the keys of a window."""
        return self.mask in ("window", "causal_window")

    @property
    def scale_only(self) -> bool:
        """Whether a score is its product times the scale, with nothing else applied."""
        return self.plain and not (self.softcap or self.alibi)

    @property
    def plain(self) -> bool:
        """Whether weights need neither a bias nor dropout nor a score modification."""
        return self.bare and not self.score_mod

    @property
    def bare(self) -> bool:
        """Whether weights need neither a bias nor dropout."""
        return not (self.bias or self.dropout)

    @property
    def varlen(self) -> bool:
        """Whether sequences are packed, with cu_seqlens."""
        return self.layout == "varlen"

    @property
    def decoding(self) -> bool:
        """Whether K and V come from a cache of any layout, which has its own lengths."""
        return self.layout in ("paged", "pointers", "cache")

    @property
    def paged(self) -> bool:
        """Whether keys lie in pages of a pool."""
        return self.layout == "paged"


FLAGS: tuple[str, ...] = tuple(field.name for field in dataclasses.fields(DispatchKey) if field.type == "bool")
"""Options of which a key only says whether they are used. If a problem has one too, its name there is the same."""
