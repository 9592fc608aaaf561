"""From a `FlashForward` or `FlashBackward` message to its `AttentionProblem`."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any, NamedTuple

import numpy as np

from gpu_actors.attention.key_mask import MASK_OPTIONS
from gpu_actors.attention.philox import dropout_threshold
from gpu_actors.attention.problem import AttentionProblem, Layout
from gpu_actors.attention.requests import BatchedDecode, FlashBackward, FlashForward, PagedForward
from gpu_actors.errors import InvalidRequest, Unsupported
from gpu_actors.fields import (
    FP8,
    describe,
    dtype_name,
    dtype_of,
    expect,
    flag,
    heads_ratio,
    integer,
    one_of,
    optional_array,
    output_dtype,
    real,
    shape_of,
)
from gpu_actors.values import show

__all__ = [
    "SEEDS",
    "Sizes",
    "backward_problem",
    "bias_fields",
    "check_beside_blocks",
    "check_cu_seqlens",
    "check_descales",
    "check_out",
    "check_positions",
    "check_seed",
    "check_steps",
    "compute_of",
    "forward_problem",
    "lengths_of",
    "longest",
    "position_words",
    "score_options",
    "sequences",
    "steps_of",
]


class Sizes(NamedTuple):
    """The sizes of a problem, named as in `AttentionProblem`."""

    layout: Layout
    batch: int
    seqlen_q: int
    seqlen_k: int
    total_q: int
    total_k: int
    heads_q: int
    heads_kv: int
    head_dim: int
    head_dim_v: int
    page_size: int = 0
    varlen_q: bool = False
    latent: bool = False


def forward_problem(request: FlashForward) -> AttentionProblem:
    """The problem that a request states with its shapes, dtypes and options.

    `check_cu_seqlens` checks the sequence bounds of each request, and `check_seed` its seed.
    """
    check_beside_blocks(request)
    if request.pack_gqa is not None:
        flag("pack_gqa", request.pack_gqa)
    varlen = request.cu_seqlens_q is not None or request.cu_seqlens_k is not None
    shape = _varlen_shape(request) if varlen else _dense_shape(request)
    heads_ratio(shape.heads_q, shape.heads_kv, "k", request.k)
    dtype = _common_dtype(request)
    out_dtype = output_dtype(dtype, request.out_dtype)
    check_out(request, shape.head_dim_v, out_dtype)
    return AttentionProblem(
        **shape._asdict(),
        dtype=dtype,
        kv_dtype=dtype,
        out_dtype=out_dtype,
        compute=compute_of(dtype, request.compute),
        **score_options(request, shape.batch, shape.heads_q, shape.head_dim, out_dtype),
        **bias_fields(request.bias, shape, dtype),
        lse_dtype=_lse_dtype(request),
        alibi_signed=_alibi_signed(request),
        dropout_p=_dropout(request),
        descales=check_descales(request, {"q": dtype, "k": dtype, "v": dtype}, (shape.batch, shape.heads_kv)),
        **_places(request, shape),
    )


def backward_problem(request: FlashBackward) -> AttentionProblem:
    dtype = dtype_of("q", request.q)
    if dtype in FP8:
        reason = "fp8 gradients would be lost in rounding; backward takes 16-bit and wider inputs"
        raise Unsupported("q", dtype, reason, "bfloat16")
    expect(request.out_dtype is None, "out_dtype", request.out_dtype, "must be None: backward takes out in q's dtype")
    one_of("lse_dtype", request.lse_dtype, ("float32",), "must be left: lse has its own dtype here")
    expect(request.pack_gqa is None, "pack_gqa", request.pack_gqa, "must be left: gradients pack no rows")
    problem = forward_problem(request)
    shape = tuple(int(extent) for extent in request.q.shape[:-1])
    output = ((*shape, problem.head_dim_v),)
    for field, array in (("out", request.out), ("dout", request.dout)):
        expect(array is not None, field, None, "is needed by backward")
        optional_array(field, array, output, (problem.out_dtype,))
    expect(request.lse is not None, "lse", None, "is needed by backward: ask forward for return_lse=True")
    lse_shape = tuple(int(extent) for extent in getattr(request.lse, "shape", ()))
    given, needed = 4 * math.prod(lse_shape), 4 * math.prod(problem.lse_shape)
    expect(given >= needed, "lse", describe(request.lse), f"holds {given} bytes where {needed} are needed")
    wide = ("float64",) if dtype == "float64" else ()
    optional_array("lse", request.lse, (problem.lse_shape,), ("float32", *wide))
    expect(not problem.return_lse, "return_lse", request.return_lse, "must be False: backward gives gradients alone")
    deterministic = flag("deterministic", request.deterministic)
    lse_dtype = dtype_of("lse", request.lse)
    return dataclasses.replace(problem, direction="backward", deterministic=deterministic, lse_dtype=lse_dtype)


# Options that no kernel has beside a block mask: their value if they are left out, and the reason.
_BESIDE_BLOCKS: dict[str, tuple[Any, str]] = {
    "softcap": (0.0, "a cap would make hidden scores finite"),
    "bias": (None, "a block mask hides by lists, and a bias by its values: say both in mask_mod"),
    "q_positions": (None, "lists count rows and keys from the first one of a sequence"),
    "k_positions": (None, "lists count rows and keys from the first one of a sequence"),
}


def check_beside_blocks(request: FlashForward | PagedForward) -> None:
    """Refuse options that no kernel has beside a block mask."""
    for name, (absent, reason) in _BESIDE_BLOCKS.items() if request.block_mask is not None else ():
        value = getattr(request, name)
        if value is not absent and (absent is None or value != absent):
            raise Unsupported(name, show(value), reason, absent)


def score_options(
    request: FlashForward | PagedForward | BatchedDecode, batch: int, heads_q: int, head_dim: int, out_dtype: str
) -> dict[str, Any]:
    """The fields of a problem that decide which scores count and how large they grow.

    The options of the mask are passed on unchecked: `AttentionProblem` checks them.
    """
    softcap, scale = real("softcap", request.softcap), request.softmax_scale
    expect(softcap >= 0, "softcap", softcap, "must be >= 0; 0 leaves the scores as they are")
    shapes = ((heads_q,), (batch, heads_q))
    slopes = optional_array("alibi_slopes", request.alibi_slopes, shapes, ("float32",))
    sinks = optional_array("sinks", request.sinks, ((heads_q,),), ("float32", out_dtype))
    return {
        **{name: getattr(request, name) for name in MASK_OPTIONS if hasattr(request, name)},
        "softmax_scale": 1.0 / math.sqrt(head_dim) if scale is None else real("softmax_scale", scale),
        "softcap": softcap,
        "alibi": None if slopes is None else "heads" if len(slopes) == 1 else "batch",
        "sinks": sinks is not None,
        "return_lse": flag("return_lse", request.return_lse),
    }


def check_descales(
    request: FlashForward | PagedForward | BatchedDecode, dtypes: dict[str, str], shape: tuple[int, int]
) -> bool:
    """Check the descales. Returns whether any is given. dtypes: of the operands, by name. shape: (batch, heads_kv)."""
    given = False
    for side, dtype in dtypes.items():
        field = f"{side}_descale"
        array = getattr(request, field)
        if array is None:
            continue
        expect(dtype in FP8, field, describe(array), f"goes with fp8 inputs only, and {side} is {dtype}")
        if len(getattr(array, "shape", ())) > len(shape):
            reason = "a sequence has one factor a KV head, and none of a row or a block of rows: (batch, heads_kv)"
            raise Unsupported(field, describe(array), reason, f"float32[{shape[0]}, {shape[1]}]")
        optional_array(field, array, (shape,), ("float32",))
        given = True
    return given


def longest(field: str, cu_seqlens: Any) -> int:
    """The length of the longest sequence of cu_seqlens on the host.

    Raises `InvalidRequest` for cu_seqlens on a device, because reading them would wait.
    """
    if not isinstance(cu_seqlens, np.ndarray):
        name = field.replace("cu_seqlens", "max_seqlen")
        raise InvalidRequest(name, None, f"must be given where {field} is not a NumPy array")
    sequences(field, cu_seqlens)
    return int(np.diff(cu_seqlens.astype(np.int64)).max(initial=0))


def sequences(field: str, cu_seqlens: Any) -> int:
    """How many sequences cu_seqlens bounds, on the host or on a device."""
    shape = tuple(getattr(cu_seqlens, "shape", ()))
    sound = len(shape) == 1 and 0 <= shape[0] - 1 <= _MOST_SEQUENCES and dtype_name(cu_seqlens) == "int32"
    expect(sound, field, None if cu_seqlens is None else describe(cu_seqlens), _CU_SEQLENS)
    return int(shape[0]) - 1


def check_total(side: str, total: int, batch: int, longest: int, given: int | None) -> None:
    """Check that ``batch`` sequences of ``longest`` rows hold all rows. given: max_seqlen as the caller gave it."""
    if given is None:
        expect(
            total <= batch * longest,
            f"cu_seqlens_{side}",
            batch * longest,
            f"must end with the number of rows, {total}",
        )
    reason = (
        f"must be at least the longest sequence: {batch} of so many rows hold {batch * longest}, and {side} has {total}"
    )
    expect(total <= batch * longest, f"max_seqlen_{side}", given, reason)


def check_cu_seqlens(field: str, cu_seqlens: Any, total: int, max_seqlen: int) -> None:
    """Check sequence bounds on the host against the number of rows. Bounds on a device are not checked."""
    if not isinstance(cu_seqlens, np.ndarray):
        return
    first, last = int(cu_seqlens[0]), int(cu_seqlens[-1])
    expect(first == 0, field, first, "must begin with 0")
    # Computed in 64 bits: differences of 32-bit bounds can wrap around and look like lengths.
    lengths = np.diff(cu_seqlens.astype(np.int64))
    least, most = int(lengths.min(initial=0)), int(lengths.max(initial=0))
    expect(least >= 0, field, least, "must not fall: a sequence cannot have a negative length")
    expect(last == total, field, last, f"must end with the number of rows, {total}")
    maximum = field.replace("cu_seqlens", "max_seqlen")
    expect(most <= max_seqlen, maximum, max_seqlen, f"must be at least the longest sequence, {most}")


def check_positions(problem: AttentionProblem, request: FlashForward) -> None:
    """Check positions on the host. Positions on a device are not checked."""
    for side, longest_length in (("q", problem.seqlen_q), ("k", problem.seqlen_k)):
        lengths = lengths_of(getattr(request, f"cu_seqlens_{side}"), longest_length)
        check_steps(f"{side}_positions", getattr(request, f"{side}_positions"), lengths)


def lengths_of(ends: Any, length: int) -> Any:
    """The lengths of the sequences of cu_seqlens: 1 if they lie on a device, ``length`` if they are None."""
    if ends is None:
        return length
    return np.diff(ends.astype(np.int64)) if isinstance(ends, np.ndarray) else 1


def check_steps(field: str, array: Any, lengths: Any) -> None:
    """Check positions on the host. lengths: how many rows or keys each sequence has."""
    if not isinstance(array, np.ndarray) or not array.size:
        return
    first, step = steps_of(array)
    expect(int(first.min()) >= 0, field, int(first.min()), "must begin at 0 or later")
    expect(int(step.min()) >= 1, field, int(step.min()), "must have steps of at least 1")
    last = int((first + np.maximum(lengths - 1, 0) * step).max())
    expect(last < _POSITIONS, field, last, f"must end below {_POSITIONS}")


def steps_of(positions: Any) -> tuple[Any, Any]:
    """The first position and the step of each sequence, int64 (batch,). The positions lie on the host."""
    given = positions.astype(np.int64)
    return (given, np.ones_like(given)) if given.ndim == 1 else (given[:, 0], given[:, 1])


def check_seed(seed: object) -> None:
    """Check a dropout seed, which may change from request to request of one problem."""
    integer("dropout_seed", seed, 0, SEEDS - 1)


SEEDS = 1 << 64  # Philox has a key of 64 bits
_MOST_SEQUENCES = 1 << 24  # bounds are checked one by one, and a broadcast array may have any number of them
_CU_SEQLENS = (
    f"must be an int32 array (batch + 1,) with batch <= {_MOST_SEQUENCES}, rising from 0 to the number of rows"
)
_POSITIONS = 1 << 30
_MOST_HEADS = 1 << 24
_DENSE = "batch, seqlen, heads, head_dim"
_VARLEN = "total, heads, head_dim"


def _dense_shape(request: FlashForward) -> Sizes:
    batch, seqlen_q, heads_q, head_dim = shape_of("q", request.q, _DENSE)
    batch_k, seqlen_k, heads_kv, head_dim_k = shape_of("k", request.k, _DENSE)
    batch_v, seqlen_v, heads_v, head_dim_v = shape_of("v", request.v, _DENSE)
    for name in ("max_seqlen_q", "max_seqlen_k"):
        expect(getattr(request, name) is None, name, getattr(request, name), "goes with cu_seqlens only")
    expect(batch_k == batch, "k", describe(request.k), f"must have q's batch, {batch}")
    expect(batch_v == batch, "v", describe(request.v), f"must have q's batch, {batch}")
    expect(seqlen_v == seqlen_k, "v", describe(request.v), f"must have k's seqlen, {seqlen_k}")
    _check_heads_and_dims(request, (heads_q, heads_kv, heads_v), (head_dim, head_dim_k, head_dim_v))
    totals = (batch * seqlen_q, batch * seqlen_k)
    return Sizes("dense", batch, seqlen_q, seqlen_k, *totals, heads_q, heads_kv, head_dim, head_dim_v)


def _varlen_shape(request: FlashForward) -> Sizes:
    total_q, heads_q, head_dim = shape_of("q", request.q, _VARLEN)
    total_k, heads_kv, head_dim_k = shape_of("k", request.k, _VARLEN)
    total_v, heads_v, head_dim_v = shape_of("v", request.v, _VARLEN)
    expect(total_v == total_k, "v", describe(request.v), f"must have k's rows, {total_k}")
    _check_heads_and_dims(request, (heads_q, heads_kv, heads_v), (head_dim, head_dim_k, head_dim_v))
    batch = sequences("cu_seqlens_q", request.cu_seqlens_q)
    batch_k = sequences("cu_seqlens_k", request.cu_seqlens_k)
    expect(batch_k == batch, "cu_seqlens_k", batch_k, f"must bound as many sequences as cu_seqlens_q, {batch}")
    seqlen_q = _max_seqlen("max_seqlen_q", request.max_seqlen_q, request.cu_seqlens_q)
    seqlen_k = _max_seqlen("max_seqlen_k", request.max_seqlen_k, request.cu_seqlens_k)
    check_total("q", total_q, batch, seqlen_q, request.max_seqlen_q)
    check_total("k", total_k, batch, seqlen_k, request.max_seqlen_k)
    # No sequence is longer than all of them together, and the grid follows from the longest.
    seqlen_q, seqlen_k = min(seqlen_q, total_q), min(seqlen_k, total_k)
    bias = tuple(getattr(request.bias, "shape", ()))
    if len(bias) == 4:
        # A bias has rows and keys for the longest sequence, or more: the problem is as large as its matrix.
        seqlen_q, seqlen_k = max(seqlen_q, int(bias[2])), max(seqlen_k, int(bias[3]))
    return Sizes("varlen", batch, seqlen_q, seqlen_k, total_q, total_k, heads_q, heads_kv, head_dim, head_dim_v)


def _check_heads_and_dims(request: FlashForward, heads: tuple[int, int, int], dims: tuple[int, int, int]) -> None:
    heads_q, heads_kv, heads_v = heads
    head_dim, head_dim_k, head_dim_v = dims
    expect(heads_q >= 1, "q", describe(request.q), "must have at least one head")
    expect(heads_v == heads_kv, "v", describe(request.v), f"must have k's heads, {heads_kv}")
    expect(head_dim >= 1, "head_dim", head_dim, "must be >= 1")
    expect(head_dim_k == head_dim, "k", describe(request.k), f"must have q's head_dim, {head_dim}")
    expect(head_dim_v >= 1, "v", describe(request.v), "must have head_dim >= 1")


def _max_seqlen(field: str, given: int | None, cu_seqlens: Any) -> int:
    value = longest(field.replace("max_seqlen", "cu_seqlens"), cu_seqlens) if given is None else given
    return integer(field, value, 0)


def _common_dtype(request: FlashForward) -> str:
    dtype = dtype_of("q", request.q)
    for field in ("k", "v"):
        other = dtype_of(field, getattr(request, field))
        expect(other == dtype, field, other, f"must have q's dtype, {dtype}")
    return dtype


def check_out(request: FlashForward | PagedForward | BatchedDecode, head_dim_v: int, out_dtype: str) -> None:
    """Check that ``out`` is shaped like q with v's head_dim."""
    optional_array("out", request.out, ((*map(int, request.q.shape[:-1]), head_dim_v),), (out_dtype,))


def compute_of(dtype: str, value: object = None) -> str:
    """The precision of the products. fp32 inputs may choose it, and other inputs compute in their own."""
    own = {"float16": "f16", "bfloat16": "bf16", "float32": "f32", "float64": "f64"}.get(dtype, "fp8")
    if value is None:
        return own
    choices = ("f32", "tf32", "f16", "bf16") if dtype == "float32" else (own,)
    one_of("compute", value, choices, f"{dtype} inputs can be computed in {' or '.join(choices)}")
    return str(value)


def _lse_dtype(request: FlashForward) -> str:
    dtype = request.lse_dtype
    one_of("lse_dtype", dtype, ("float32", "float64"), 'must be "float32", or "float64" for float64 inputs')
    expect(dtype == "float32" or request.return_lse is True, "lse_dtype", dtype, "goes with return_lse=True")
    return dtype


def _alibi_signed(request: FlashForward) -> bool:
    """Whether the sign of a distance counts. It does not if causal gives all distances the same sign."""
    signed = flag("alibi_signed", request.alibi_signed)
    return signed and request.alibi_slopes is not None and not flag("causal", request.causal)


def bias_fields(bias: Any, shape: Sizes, dtype: str, keys: int | None = None, one_row: bool = False) -> dict[str, Any]:
    """The fields of a problem for its bias. keys: how many the bias must have; None: seqlen_k.

    one_row: whether the bias has no axis of rows.
    """
    if bias is None:
        return {}
    rows = () if one_row else ((shape.seqlen_q, 1),)
    axes = ((shape.batch, 1), (shape.heads_q, 1), *rows, (shape.seqlen_k if keys is None else keys,))
    shapes = tuple(dict.fromkeys(itertools.product(*axes)))
    given = optional_array("bias", bias, shapes, (dtype, "float32", "bool"))
    assert given is not None
    kind = str(bias.dtype).removeprefix("torch.")
    broadcast = kind, given[0] == 1 and shape.batch > 1, given[1] == 1 and shape.heads_q > 1
    return {"bias": broadcast, "bias_row": not one_row and given[2] == 1 and shape.seqlen_q > 1}


def _dropout(request: FlashForward) -> float:
    probability = real("dropout_p", request.dropout_p)
    expect(0 <= probability < 1, "dropout_p", probability, "must be in [0, 1)")
    dropout_threshold(probability)
    return probability


def position_words(request: Any, batch: int) -> dict[str, Any]:
    """The fields of a problem for the q_positions and k_positions of a request."""
    words = {}
    for field in ("q_positions", "k_positions"):
        given = optional_array(field, getattr(request, field), ((batch,), (batch, 2)), ("int32",))
        words[field] = 0 if given is None else len(given)
    return words


def _places(request: FlashForward, shape: Sizes) -> dict[str, Any]:
    """The fields of a problem that say where its rows, keys and heads stand in a larger problem."""
    places: dict[str, Any] = position_words(request, shape.batch)
    positioned = places["q_positions"] or places["k_positions"]
    if positioned and isinstance(request.alignment, str) and request.alignment == "top_left":
        reason = "must be left out: positions say which key is a row's own"
        raise InvalidRequest("alignment", request.alignment, reason)
    first = integer("dropout_first_head", request.dropout_first_head, 0, _MOST_HEADS)
    heads = 0
    if request.dropout_heads is not None:
        heads = integer("dropout_heads", request.dropout_heads, 1, _MOST_HEADS)
    expect(
        first + shape.heads_q <= (heads or shape.heads_q),
        "dropout_first_head",
        first,
        f"must leave room for q's {shape.heads_q} heads among the {heads or shape.heads_q} that dropout counts",
    )
    if request.dropout_p and heads not in (0, shape.heads_q):
        places |= {"dropout_first_head": first, "dropout_heads": heads}
    return places
