"""Partial attention: a softmax over some of a row's keys, and the exact merge of such partials over disjoint keys.

docs/partial.md has the formulas (FlashAttention-2, section 3.1.1, between blocks of keys), and which options each
partial takes. Gradients of attention need no gradient of the merge: each block's backward takes the *merged* out and
lse.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias, TypeVar

import numpy as np

from gpu_actors.arrays.adopt import Adopted, CallerNotes, dtype_of, name_of, restore
from gpu_actors.arrays.request_arrays import take_in
from gpu_actors.attention.requests import Array, AttentionOutput
from gpu_actors.fields import describe, expect, one_of
from gpu_actors.values import brief

__all__ = [
    "MergeBackward",
    "MergeGradients",
    "MergePartials",
    "Partial",
    "adopt_partials",
    "empty",
    "merge",
    "merge_gradients",
    "merged_dtypes",
    "merged_lse_dtype",
    "oracle_merge",
    "oracle_merge_gradients",
]

_Host: TypeAlias = "np.ndarray[Any, Any]"

_OUT_DTYPES = ("float16", "bfloat16", "float32", "float64")
_LSE_DTYPES = ("float32", "float64")


class Partial(NamedTuple):
    """The attention of rows over some of their keys.

    out: (..., rows, heads, head_dim_v), normalised over these keys. lse: (..., heads, rows), the natural logarithm of
    the sum of exp(score) over these keys, -inf for a row that saw none. These are the layouts of forward's answers:
    (batch, seqlen, heads, head_dim_v) and (batch, heads, seqlen), for varlen (total, heads, head_dim_v) and
    (heads, total).
    """

    out: Any
    lse: Any

    def __repr__(self) -> str:
        return brief(self)


class MergeGradients(NamedTuple):
    """partials: (dout, dlse) of each partial, in the shapes and dtypes of its out and lse. dsinks: (heads,) or None."""

    partials: tuple[Partial, ...]
    dsinks: Any = None

    def __repr__(self) -> str:
        return brief(self)


@dataclass(slots=True, eq=False)
class MergePartials:
    """Merge partials on the device. They may lie there already.

    partials: a list of any length, of at least one `Partial` or `AttentionOutput`, all of one shape, (batch, rows,
        heads, head_dim_v) or (rows, heads, head_dim_v), with outs of one dtype and lse of one dtype; any strides, but
        contiguous columns.
    sinks: (heads,), float32 or of the outs' dtype: the learned sink logits of the whole problem, in the last merge
        alone.
    out_dtype: of the merged out; None: that of the outs. Partials of float64 are not rounded to 16 bits.

    The answer is an `AttentionOutput`, whose lse is float64 if the partials' lse or the merged out is, else float32.
    Sums are float32, or float64 if an operand is, in the order of the list, and out is rounded once.
    """

    __repr__ = brief

    partials: Sequence[Any]
    sinks: Array | None = None
    out_dtype: str | None = None


@dataclass(slots=True, eq=False)
class MergeBackward:
    """The gradients of a merge with respect to every out, every lse and the sinks, computed on the device.

    partials, sinks: those of the `MergePartials`. dout: the gradient of the merged out, in its shape and dtype. dlse:
        that of the merged lse, in its shape and dtype; None: zero.

    The answer is a `MergeGradients`, dsinks in float32. Sums are float32, or float64 if an operand is, in the order of
    the list, and each gradient is rounded once. A row with lse = -inf in a partial is not read there: its gradients
    are 0. Partials of 16 bits with a dout of float64 raise `Unsupported`.
    """

    __repr__ = brief

    partials: Sequence[Any]
    dout: Array
    dlse: Array | None = None
    sinks: Array | None = None


def empty(shape: tuple[int, ...], *, dtype: str = "float32") -> Partial:
    """The partial of no keys. Merging it with others changes nothing.

    shape: of out, (..., rows, heads, head_dim_v). dtype: of out; lse is float64 if out is float64, else float32.
    Raises `InvalidRequest` for a shape of fewer than three axes or with a negative extent, or another dtype.
    """
    one_of("dtype", dtype, _OUT_DTYPES)
    sound = isinstance(shape, tuple | list) and len(shape) >= 3
    sound = sound and all(isinstance(extent, int | np.integer) and extent >= 0 for extent in shape)
    expect(sound, "shape", shape, "must be (..., rows, heads, head_dim_v), ints >= 0")
    *batch, rows, heads, _ = shape
    lse = np.full((*batch, heads, rows), -np.inf, _lse_dtype(dtype))
    return Partial(np.zeros(shape, dtype_of(dtype)), lse)


def merge(
    partials: Sequence[Partial | AttentionOutput], *, sinks: Array | None = None, out_dtype: str | None = None
) -> Partial:
    """Attention over the union of the partials' keys, on the host.

    partials: at least one, of one shape, each with its lse; outs of float16, bfloat16, float32 or float64, lse of
        float32 or float64. They lie on the host, in arrays of any library with DLPack.
    sinks: (heads,), the learned sink logits of the whole problem, in the last merge alone.
    out_dtype: of the merged out; None: that of the outs, which must then agree.

    Returns arrays of the first out's library. lse is float64 if one of the lse or the merged out is, else float32. out
    is rounded once: this adds an error of at most half a unit in the last place of out_dtype to that of the partials'
    own roundings. NaN in a row that a partial saw stays NaN.
    Raises `InvalidRequest` that names the field, as "partials[1].lse", for shapes or dtypes that do not agree, and for
    arrays on a GPU.
    """
    terms = _read(partials)
    sink = _read_sinks(sinks, terms[0])
    dtype = _out_dtype(out_dtype, terms)
    merged = _weigh(terms, sink)
    wide = dtype == "float64" or any(name_of(term.lse.dtype) == "float64" for term in terms)
    out = _restored(merged.out, dtype, terms[0])
    return Partial(out, _restored(np.swapaxes(merged.lse, -1, -2), "float64" if wide else "float32", terms[0]))


def merge_gradients(
    partials: Sequence[Partial | AttentionOutput],
    dout: Array,
    dlse: Array | None = None,
    *,
    sinks: Array | None = None,
) -> MergeGradients:
    """The gradient of `merge` with respect to every out, every lse and the sinks.

    partials, sinks: as for `merge`. dout: the gradient of the merged out, in its shape. dlse: that of the merged lse;
    None: zero. With a_i = w_i / Z it is dout_i = a_i dout and dlse_i = a_i (dout . (out_i - out) + dlse); a sink counts
    as a partial whose out is 0. If a row saw none of a partial's keys, both are 0.
    Raises `InvalidRequest` as `merge` does, and names "dout" and "dlse", too.
    """
    terms = _read(partials)
    sink = _read_sinks(sinks, terms[0])
    into_out = _read_like(dout, "dout", terms[0].out.shape, _OUT_DTYPES)
    into_lse = None if dlse is None else _read_like(dlse, "dlse", terms[0].lse.shape, _LSE_DTYPES)
    found = _differentiate(terms, into_out, into_lse, sink)
    gradients = [
        Partial(
            _restored(gradient.out, name_of(term.out.dtype), term),
            _restored(gradient.lse, name_of(term.lse.dtype), term),
        )
        for term, gradient in zip(terms, found.partials, strict=True)
    ]
    dsinks = None if sink is None else _restored(found.dsinks, "float32", terms[0])
    return MergeGradients(tuple(gradients), dsinks)


class _Term(NamedTuple):
    """One partial on the host. template: the caller's own out."""

    out: _Host
    lse: _Host
    template: Adopted

    def logits(self) -> _Host:
        """Return lse in float64, with axes in the order of out: (..., rows, heads)."""
        return np.swapaxes(self.lse, -1, -2).astype(np.float64)


class _Merged(NamedTuple):
    """out and lse in float64, lse as (..., rows, heads); top and total give each term's share of the softmax."""

    out: _Host
    lse: _Host
    top: _Host
    total: _Host

    def share(self, logits: _Host) -> _Host:
        """Return w_i / Z of a term; 0 in rows that saw no keys."""
        with np.errstate(invalid="ignore"):
            share: _Host = np.exp(logits - self.top) / np.where(self.total == 0, 1, self.total)
        return share


def _weigh(terms: Sequence[_Term], sink: _Host | None) -> _Merged:
    """Merge the terms in float64, in their order."""
    shape = terms[0].out.shape
    top = np.full(shape[:-1], -np.inf) if sink is None else np.broadcast_to(sink, shape[:-1])
    for term in terms:
        top = np.maximum(top, term.logits())
    top = np.where(np.isneginf(top), 0, top)
    total, out = np.zeros(shape[:-1]), np.zeros(shape)
    with np.errstate(invalid="ignore", over="ignore"):
        for term in terms:
            weight = np.exp(term.logits() - top)
            total += weight
            own = term.out.astype(np.float64)
            # A NaN or an infinity counts fully, however small its weight is.
            own = np.where(np.isfinite(own), weight[..., None] * own, own)
            out += np.where(np.isneginf(term.logits())[..., None], 0, own)
        if sink is not None:
            total += np.exp(sink - top)
    bare = total == 0
    out /= np.where(bare, 1, total)[..., None]
    lse = np.where(bare, -np.inf, top + np.log(np.where(bare, 1, total)))
    return _Merged(out, lse, top, total)


def _differentiate(
    terms: Sequence[_Term], into_out: _Host, into_lse: _Host | None, sink: _Host | None
) -> MergeGradients:
    """The gradients in float64. into_out, into_lse: those of the merged out and lse, in float64."""
    # The gradients of infinite outs are NaN. NumPy must not warn of this, because a GPU does not.
    with np.errstate(invalid="ignore", over="ignore"):
        return _gradients(_weigh(terms, sink), terms, into_out, into_lse, sink)


def _gradients(
    merged: _Merged, terms: Sequence[_Term], into_out: _Host, into_lse: _Host | None, sink: _Host | None
) -> MergeGradients:
    # The loss of every score per unit of weight: dout . out, minus the gradient of the lse.
    taken = np.sum(into_out * merged.out, axis=-1)
    if into_lse is not None:
        taken = taken - np.swapaxes(into_lse, -1, -2)
    gradients = []
    for term in terms:
        share = merged.share(term.logits())
        seen = share != 0
        own = np.sum(np.where(seen[..., None], into_out * term.out.astype(np.float64), 0), axis=-1)
        into_logits = np.where(seen, share * (own - taken), 0)
        gradient = np.where(seen[..., None], share[..., None] * into_out, 0)
        gradients.append(Partial(gradient, np.swapaxes(into_logits, -1, -2)))
    if sink is None:
        return MergeGradients(tuple(gradients))
    share = merged.share(sink)
    into_sinks = np.where(share != 0, -share * taken, 0)
    return MergeGradients(tuple(gradients), into_sinks.reshape(-1, sink.size).sum(axis=0))


_Message = TypeVar("_Message", bound=MergePartials | MergeBackward)


def adopt_partials(message: _Message, device: str, notes: CallerNotes | None = None) -> tuple[_Message, Adopted]:
    """Return the message with arrays that this package can read, and its first out as adopted.

    device, notes: as for `gpu_actors.arrays.request_arrays.adopt_request`. Raises `InvalidRequest` as `merge` does.
    """
    terms = _read(message.partials, device, notes)
    first = terms[0]
    out = first.out
    expect(out.ndim <= 4, "partials[0].out", describe(out), "must have the axes (batch,) rows, heads, head_dim_v")
    expect(out.shape[-1] >= 1, "partials[0].out", describe(out), "must have head_dim_v >= 1")
    for index, term in enumerate(terms):
        for name in ("out", "lse"):
            array, dtype = getattr(term, name), name_of(getattr(first, name).dtype)
            reason = f"must have the dtype of partials[0].{name}, {dtype}"
            expect(name_of(array.dtype) == dtype, f"partials[{index}].{name}", describe(array), reason)
    sinks: Any = None
    if message.sinks is not None:
        own = name_of(out.dtype)
        dtypes = tuple(dict.fromkeys(("float32", own)))
        sinks = _adopted(message.sinks, "sinks", dtypes, device, notes).array
        expect(sinks.shape == out.shape[-2:-1], "sinks", describe(sinks), f"must have the shape {out.shape[-2:-1]}")
    adopted = [Partial(term.out, term.lse) for term in terms]
    changes: dict[str, Any] = {"partials": adopted, "sinks": sinks}
    if isinstance(message, MergeBackward):
        changes["dout"] = _adopted_like(message.dout, "dout", out.shape, _OUT_DTYPES, device, notes)
        if message.dlse is not None:
            dtypes = (merged_lse_dtype(adopted[0], name_of(changes["dout"].dtype)),)
            changes["dlse"] = _adopted_like(message.dlse, "dlse", first.lse.shape, dtypes, device, notes)
    return dataclasses.replace(message, **changes), first.template


def merged_dtypes(message: MergePartials) -> tuple[str, str]:
    """The dtypes of the merged out and lse of an adopted message. Raises `InvalidRequest`."""
    first = message.partials[0]
    own = name_of(first.out.dtype)
    if message.out_dtype is not None:
        one_of("out_dtype", message.out_dtype, _OUT_DTYPES, f"must be None or one of {', '.join(_OUT_DTYPES)}")
    dtype = message.out_dtype or own
    return dtype, merged_lse_dtype(first, dtype)


def merged_lse_dtype(first: Partial, out_dtype: str) -> str:
    """The dtype of the merged lse. first: of the adopted partials, which all have its dtypes."""
    return "float64" if "float64" in (out_dtype, name_of(first.lse.dtype)) else "float32"


def oracle_merge(partials: Sequence[Partial], sinks: _Host | None) -> Partial:
    """`merge` of arrays on the host, in float64: the reference for kernels."""
    terms = [_Term(partial.out, partial.lse, Adopted(partial.out, "numpy", "cpu", None)) for partial in partials]
    merged = _weigh(terms, None if sinks is None else sinks.astype(np.float64))
    return Partial(merged.out, np.swapaxes(merged.lse, -1, -2))


def oracle_merge_gradients(
    partials: Sequence[Partial], dout: _Host, dlse: _Host | None, sinks: _Host | None
) -> MergeGradients:
    """`merge_gradients` of arrays on the host, in float64: the reference for kernels."""
    terms = [_Term(partial.out, partial.lse, Adopted(partial.out, "numpy", "cpu", None)) for partial in partials]
    wide = [None if array is None else array.astype(np.float64) for array in (dlse, sinks)]
    return _differentiate(terms, dout.astype(np.float64), *wide)


def _read(
    partials: Sequence[Partial | AttentionOutput], device: str = "cpu", notes: CallerNotes | None = None
) -> list[_Term]:
    reason = "must be a list of at least one Partial or AttentionOutput"
    several = isinstance(partials, list | tuple) and not isinstance(partials, Partial | AttentionOutput)
    expect(several and len(partials) > 0, "partials", partials, reason)
    terms: list[_Term] = []
    for index, partial in enumerate(partials):
        field = f"partials[{index}]"
        expect(
            isinstance(partial, Partial | AttentionOutput), field, partial, "must be a Partial or an AttentionOutput"
        )
        expect(partial.lse is not None, f"{field}.lse", None, "must be given: ask for it with return_lse=True")
        out = _adopted(partial.out, f"{field}.out", _OUT_DTYPES, device, notes)
        lse = _adopted(partial.lse, f"{field}.lse", _LSE_DTYPES, device, notes).array
        shape = out.array.shape
        expect(len(shape) >= 3, f"{field}.out", describe(out.array), "must be (..., rows, heads, head_dim_v)")
        if terms:
            first = terms[0].out.shape
            expect(shape == first, f"{field}.out", describe(out.array), f"must have the first out's shape {first}")
        wanted = (*shape[:-3], shape[-2], shape[-3])
        expect(lse.shape == wanted, f"{field}.lse", describe(lse), f"must be (..., heads, rows), here {wanted}")
        terms.append(_Term(out.array, lse, out))  # type: ignore[arg-type]
    return terms


def _read_sinks(sinks: Array | None, term: _Term) -> _Host | None:
    return None if sinks is None else _read_like(sinks, "sinks", (term.out.shape[-2],), _OUT_DTYPES)


def _read_like(array: Array, field: str, shape: tuple[int, ...], dtypes: tuple[str, ...]) -> _Host:
    """Read an array of the caller's in float64, after a check of its shape and dtype."""
    return _adopted_like(array, field, shape, dtypes).astype(np.float64)  # type: ignore[no-any-return]


def _adopted_like(
    array: Array,
    field: str,
    shape: tuple[int, ...],
    dtypes: tuple[str, ...],
    device: str = "cpu",
    notes: CallerNotes | None = None,
) -> Any:
    adopted = _adopted(array, field, dtypes, device, notes).array
    expect(adopted.shape == shape, field, describe(adopted), f"must have the shape {shape}")
    return adopted


def _adopted(
    array: Any, field: str, dtypes: tuple[str, ...], device: str = "cpu", notes: CallerNotes | None = None
) -> Adopted:
    adopted = take_in(array, field, device, notes)
    reason = f"must have one of the dtypes {', '.join(dtypes)}"
    expect(name_of(adopted.array.dtype) in dtypes, field, describe(adopted.array), reason)
    return adopted


def _out_dtype(asked: str | None, terms: Sequence[_Term]) -> str:
    if asked is not None:
        one_of("out_dtype", asked, _OUT_DTYPES, f"must be None or one of {', '.join(_OUT_DTYPES)}")
        return asked
    dtypes = list(dict.fromkeys(name_of(term.out.dtype) for term in terms))
    reason = f"must be given where the outs' dtypes differ ({', '.join(dtypes)})"
    expect(len(dtypes) == 1, "out_dtype", None, reason)
    return dtypes[0]


def _lse_dtype(out_dtype: str) -> str:
    return "float64" if out_dtype == "float64" else "float32"


def _restored(result: _Host, dtype: str, term: _Term) -> Any:
    with np.errstate(over="ignore", invalid="ignore"):
        return restore(np.ascontiguousarray(result.astype(dtype_of(dtype))), term.template)
