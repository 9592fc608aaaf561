"""Attention problems with data, drawn from a seed, for tests of kernels, devices and the oracle.

The one-line ``repro`` of a case rebuilds it. Every value is drawn even if an argument overrides it, so an argument does
not change the other values.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import ml_dtypes
import numpy as np
import numpy.typing as npt

__all__ = [
    "BACKWARD_FEATURES",
    "DTYPES",
    "FEATURES",
    "HEADS",
    "HEAD_DIMS",
    "INPUT_KINDS",
    "SEQLENS",
    "BackwardCase",
    "ForwardCase",
    "cast",
    "random_backward",
    "random_forward",
]

Array: TypeAlias = npt.NDArray[Any]
Kind: TypeAlias = Literal["gaussian", "peaked", "rising", "outlier"]

# (seqlen_q, seqlen_k) at the edges of tiles: one row, multiples, multiples +- 1, primes, and either side longer.
SEQLENS = (
    (1, 1),
    (64, 128),
    (128, 192),
    (256, 256),
    (239, 1),
    (799, 3),
    (113, 203),
    (128, 217),
    (113, 211),
    (108, 256),
    (256, 512),
    (384, 256),
    (640, 128),
    (1023, 1024),
    (1024, 1023),
)
HEADS = ((6, 6), (6, 2), (6, 1))
HEAD_DIMS = (40, 64, 80, 96, 128, 192, 256)
DTYPES = ("bfloat16", "float16", "float32")
INPUT_KINDS: tuple[Kind, ...] = ("gaussian", "peaked", "rising", "outlier")
FEATURES = (
    "causal",
    "window",
    "sink_tokens",
    "scale",
    "softcap",
    "alibi",
    "sinks",
    "bias",
    "dropout",
    "descales",
)
BACKWARD_FEATURES = tuple(feature for feature in FEATURES if feature != "descales")

_DESCALES = ("q_descale", "k_descale", "v_descale")
_FP8_LIMIT = 448.0
_PEAKED_STD = 10.0
_OUTLIER = 32.0
_RISE = 24.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardCase:
    """A forward problem and its data.

    q, k, v: (batch, rows, heads, dim), or (total, heads, dim) for varlen.
    options: keyword arguments that `reference.attention_forward` and `FlashAttnActor.forward` both take.
    seqlens: (query rows, keys) of each sequence.
    repro: the call that rebuilds the case.
    """

    q: Array
    k: Array
    v: Array
    options: dict[str, Any]
    kind: Kind
    seqlens: tuple[tuple[int, int], ...]
    repro: str

    @property
    def inputs(self) -> tuple[Array, Array, Array]:
        return self.q, self.k, self.v


def random_forward(
    seed: int,
    *,
    dtype: str | None = None,
    kind: Kind | None = None,
    varlen: bool | None = None,
    batch: int | None = None,
    seqlens: tuple[int, int] | None = None,
    heads: tuple[int, int] | None = None,
    head_dim: int | None = None,
    head_dim_v: int | None = None,
    features: Collection[str] = FEATURES,
    always: Collection[str] = (),
    alignment: str | None = None,
) -> ForwardCase:
    """A problem and its data. The seed decides everything that the arguments leave open.

    dtype: the dtype of q, k and v. 8-bit floats are never drawn.
    kind: one of INPUT_KINDS.
    seqlens: (seqlen_q, seqlen_k) of every dense sequence and of the longest varlen one. The other varlen sequences are
        shorter, and some are empty.
    heads: (heads_q, heads_kv).
    head_dim_v: head_dim by default.
    features: the options that may be drawn.
    always: the options that are always set. Some are left out without what they need: sink_tokens needs a window, bias
        a dense layout, descales an 8-bit dtype.
    alignment: the option of that name. By default it is not set.
    """
    if unknown := {*features, *always} - set(FEATURES):
        raise ValueError(f"features {sorted(unknown)}: known are {FEATURES}")
    repro = _repro(
        seed,
        dtype=dtype,
        kind=kind,
        varlen=varlen,
        batch=batch,
        seqlens=seqlens,
        heads=heads,
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        features=features,
        always=always,
        alignment=alignment,
    )
    rng = np.random.default_rng(seed)
    drawn_dtype = DTYPES[rng.integers(len(DTYPES))]
    drawn_kind = INPUT_KINDS[rng.integers(len(INPUT_KINDS))]
    drawn_varlen = bool(rng.integers(2))
    drawn_batch = int(rng.integers(1, 4))
    drawn_seqlens = SEQLENS[rng.integers(len(SEQLENS))]
    drawn_heads = HEADS[rng.integers(len(HEADS))]
    drawn_dim = HEAD_DIMS[rng.integers(len(HEAD_DIMS))]
    fractions = rng.random((64, 2)) * rng.choice([0, 1, 1, 1, 1], (64, 2))
    dtype, kind, head_dim = dtype or drawn_dtype, kind or drawn_kind, head_dim or drawn_dim
    varlen = drawn_varlen if varlen is None else varlen
    longest = seqlens or drawn_seqlens
    lengths = [longest] * (batch or drawn_batch)
    if varlen:
        for index in range(1, len(lengths)):
            shorter = fractions[index % len(fractions)] * longest
            lengths[index] = (int(shorter[0]), int(shorter[1]))
    enabled = {name for name in FEATURES if rng.random() < 0.3 and name in features} | set(always)
    heads_q, heads_kv = heads or drawn_heads
    rows, keys = (sum(column) for column in zip(*lengths, strict=True))
    q = rng.standard_normal((rows, heads_q, head_dim))
    k = rng.standard_normal((keys, heads_kv, head_dim))
    v = rng.standard_normal((keys, heads_kv, head_dim_v or head_dim))
    q, k = _INPUTS[kind](rng, q, k, [length for _, length in lengths])
    options = _draw_options(rng, enabled, dtype, varlen, lengths, (heads_q, heads_kv), head_dim)
    if alignment is not None:
        options["alignment"] = alignment
    if varlen:
        for name, column in zip(("cu_seqlens_q", "cu_seqlens_k"), zip(*lengths, strict=True), strict=True):
            options[name] = np.concatenate([[0], np.cumsum(column)]).astype(np.int32)
    else:
        q, k, v = (array.reshape(len(lengths), -1, *array.shape[1:]) for array in (q, k, v))
    return ForwardCase(
        q=cast(q, dtype),
        k=cast(k, dtype),
        v=cast(v, dtype),
        options=options,
        kind=kind,
        seqlens=tuple(lengths),
        repro=repro,
    )


def cast(array: Array, dtype: str) -> Array:
    """``array`` in the dtype with this NumPy or ml_dtypes name. 8-bit floats are clipped to +-448 first."""
    if dtype.startswith("float8"):
        array = np.clip(array, -_FP8_LIMIT, _FP8_LIMIT)
    return array.astype(getattr(ml_dtypes, dtype, dtype))


def _draw_options(
    rng: np.random.Generator,
    enabled: set[str],
    dtype: str,
    varlen: bool,
    lengths: Sequence[tuple[int, int]],
    heads: tuple[int, int],
    head_dim: int,
) -> dict[str, Any]:
    (heads_q, heads_kv), batch = heads, len(lengths)
    longest_q, longest_k = lengths[0]
    left, right = (int(bound) for bound in rng.integers(-1, max(2, longest_k // 2), 2))
    slopes = 2.0 ** (-8.0 * np.arange(1, heads_q + 1) / heads_q)
    if rng.random() < 0.5:
        slopes = slopes * rng.uniform(0.5, 2.0, (batch, 1))
    bias_heads = (batch if rng.random() < 0.5 else 1, heads_q if rng.random() < 0.5 else 1)
    bias_dtype = dtype if rng.random() < 0.5 and not dtype.startswith("float8") else "float32"
    descales = {name: rng.uniform(0.5, 1.5, (batch, heads_kv)).astype(np.float32) for name in _DESCALES}
    drawn: dict[str, dict[str, Any]] = {
        "causal": {"causal": True},
        "window": {"window_size": (left, right) if max(left, right) >= 0 else (longest_k // 3, -1)},
        "sink_tokens": {"sink_tokens": int(rng.integers(1, 6))},
        "scale": {"softmax_scale": float(rng.uniform(0.5, 1.5) / np.sqrt(head_dim))},
        "softcap": {"softcap": float(rng.choice([5.0, 30.0]))},
        "alibi": {"alibi_slopes": slopes.astype(np.float32)},
        "sinks": {"sinks": rng.standard_normal(heads_q).astype(np.float32)},
        "dropout": {
            "dropout_p": float(rng.choice([0.1, 0.17, 0.5])),
            "dropout_seed": int(rng.integers(1 << 63)) * 2 + 1,
        },
        "descales": descales,
    }
    if "bias" in enabled and not varlen:
        drawn["bias"] = {"bias": cast(rng.standard_normal((*bias_heads, longest_q, longest_k)), bias_dtype)}
    if "window" not in enabled:
        drawn.pop("sink_tokens")
    if not dtype.startswith("float8"):
        drawn.pop("descales")
    return {key: value for name in FEATURES if name in enabled for key, value in drawn.get(name, {}).items()}


def _gaussian(rng: np.random.Generator, q: Array, k: Array, keys: Sequence[int]) -> tuple[Array, Array]:
    return q, k


def _peaked(rng: np.random.Generator, q: Array, k: Array, keys: Sequence[int]) -> tuple[Array, Array]:
    """Scores have a standard deviation of 10, at the default scale."""
    return q * _PEAKED_STD, k


def _rising(rng: np.random.Generator, q: Array, k: Array, keys: Sequence[int]) -> tuple[Array, Array]:
    """Scores rise with the key's index, by about 24 in all, so every tile has a new maximum."""
    (_, heads_q, dim), heads_kv = q.shape, k.shape[1]
    signs = rng.choice([-1.0, 1.0], (heads_kv, dim))
    amount = np.sqrt(_RISE)
    ramp = np.concatenate([np.arange(1, length + 1) / length for length in keys] or [np.empty(0)])
    towards = np.repeat(signs, heads_q // heads_kv, axis=0)
    return q + towards * amount / np.sqrt(dim), ramp[:, None, None] * signs * amount


def _outlier(rng: np.random.Generator, q: Array, k: Array, keys: Sequence[int]) -> tuple[Array, Array]:
    """One key of each sequence and head is 32 times as long as the others: it takes all weight of some rows."""
    k, start = k.copy(), 0
    for length in keys:
        if length:
            outliers = start + rng.integers(length, size=k.shape[1])
            k[outliers, np.arange(k.shape[1])] *= _OUTLIER
        start += length
    return q, k


_INPUTS = {"gaussian": _gaussian, "peaked": _peaked, "rising": _rising, "outlier": _outlier}


def _repro(seed: int, **arguments: object) -> str:
    defaults = random_forward.__kwdefaults__ or {}
    texts = (f"{name}={value!r}" for name, value in arguments.items() if value != defaults[name])
    return f"random_forward({', '.join([str(seed), *texts])})"


# Backward


@dataclass(frozen=True, slots=True, kw_only=True)
class BackwardCase:
    """A backward problem and its data.

    forward: q, k, v, options and lengths.
    dout: (batch, rows, heads, dim_v), or (total, heads, dim_v) for varlen, in the dtype of q.
    out, lse: the oracle's, rounded to that dtype and to float32, as a forward kernel returns them.
    repro: the call that rebuilds the case.
    """

    forward: ForwardCase
    dout: Array
    out: Array
    lse: Array
    repro: str

    @property
    def options(self) -> dict[str, Any]:
        """Keyword arguments that `reference.attention_backward` and `FlashAttnActor.backward` both take."""
        return self.forward.options

    @property
    def arguments(self) -> tuple[Array, Array, Array, Array]:
        """(dout, q, k, v), as the oracle and `reference.gradient_tolerance` take them."""
        return (self.dout, *self.forward.inputs)

    @property
    def inputs(self) -> tuple[Array, Array, Array, Array, Array, Array]:
        """(dout, q, k, v, out, lse), as `FlashAttnActor.backward` takes them."""
        return (*self.arguments, self.out, self.lse)


def random_backward(seed: int, *, compute: str | None = None, **choices: Any) -> BackwardCase:
    """A problem and its data. The seed decides everything that the arguments leave open.

    compute: "f16", "bf16" or "tf32": the forward of float32 operands multiplies in it. It changes only out and lse.
    choices: arguments of `random_forward`. The default of features is `BACKWARD_FEATURES`.
    """
    from gpu_actors.reference import attention_forward
    from gpu_actors.reference.tolerance import round_inputs

    forward = random_forward(seed, **{"features": BACKWARD_FEATURES, **choices})
    dtype = forward.q.dtype.name
    shape = (*forward.q.shape[:-1], forward.v.shape[-1])
    # dout has its own random stream, so that it does not change what `random_forward` draws.
    dout = np.random.default_rng((seed, 1)).standard_normal(shape)
    inputs = forward.inputs if compute is None else round_inputs(*forward.inputs, compute)
    result = attention_forward(*inputs, **forward.options)
    chosen = choices if compute is None else {"compute": compute, **choices}
    arguments = (f"{name}={value!r}" for name, value in chosen.items())
    return BackwardCase(
        forward=forward,
        dout=cast(dout, dtype),
        out=cast(result.out, dtype),
        lse=result.lse.astype(np.float32),
        repro=f"random_backward({', '.join([str(seed), *arguments])})",
    )
