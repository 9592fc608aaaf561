"""Dense batches whose sequences end before their rows and keys do, with NaN in what is left."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from inside.testing import cast

import gpu_actors as ga
from gpu_actors.testing import check_gradients, check_output

__all__ = ["PaddedCase", "check_padded"]


@dataclass
class PaddedCase:
    """rows, keys: that count of each sequence; None: all do. options: of the request. longest: rows and keys of the
    batch."""

    rows: tuple[int, ...] | None = (40, 0, 70, 1)
    keys: tuple[int, ...] | None = (33, 90, 0, 90)
    longest: tuple[int, int] = (70, 90)
    heads: tuple[int, int] = (4, 2)
    dims: tuple[int, int] = (64, 64)
    dtype: str = "float32"
    options: dict[str, Any] = field(default_factory=dict)
    backward: bool = True

    @property
    def batch(self) -> int:
        return len(self.rows or self.keys or ())

    @property
    def lengths(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        rows, keys = ((longest,) * self.batch for longest in self.longest)
        return self.rows or rows, self.keys or keys

    @property
    def used(self) -> dict[str, Any]:
        given = {"seqused_q": self.rows, "seqused_k": self.keys}
        return {name: np.array(lengths, np.int32) for name, lengths in given.items() if lengths is not None}


# Options of a sequence, and of a batch.
_EACH = ("q_descale", "k_descale", "v_descale", "q_positions", "k_positions")


def check_padded(ctx: ga.GpuContext, case: PaddedCase, seed: int = 0) -> None:
    """A padded request and its gradients: each sequence as the oracle has it alone, and 0 in the padding."""
    rng = np.random.default_rng(seed)
    (rows, keys), (heads, heads_kv), (dim, dim_v) = case.lengths, case.heads, case.dims
    shapes = {"q": (heads, dim), "k": (heads_kv, dim), "v": (heads_kv, dim_v), "dout": (heads, dim_v)}
    arrays: dict[str, Any] = {}
    for name, shape in shapes.items():
        longest, lengths = (case.longest[1], keys) if name in "kv" else (case.longest[0], rows)
        arrays[name] = cast(rng.standard_normal((case.batch, longest, *shape)), case.dtype)
        for index, length in enumerate(lengths):
            arrays[name][index, length:] = np.nan
    q, k, v, dout = arrays.values()
    given = {**case.options, **case.used}
    result = ctx.flash_attn.forward(q, k, v, return_lse=True, **given).result(120)
    assert result.out.shape == dout.shape
    assert result.lse.shape == (case.batch, heads, case.longest[0])
    gradients = None
    if case.backward:
        gradients = ctx.flash_attn.backward(dout, q, k, v, result.out, result.lse, **given).result(120)
        for name in ("dq", "dk", "dv"):
            assert getattr(gradients, name).shape == arrays[name[1]].shape
    sinks = case.options.get("sinks")
    dsinks = None if sinks is None else np.zeros(len(sinks))
    bias = case.options.get("bias")
    dbias = None if bias is None or bias.dtype == np.bool_ else np.zeros(bias.shape)
    for b, (r, n) in enumerate(zip(rows, keys, strict=True)):
        options = dict(case.options)
        for name, value in case.options.items():
            if name in _EACH or (name == "alibi_slopes" and value.ndim == 2):
                options[name] = value[b : b + 1]
        if bias is not None:
            corner = slice(b, b + 1) if len(bias) > 1 else slice(1), slice(None), slice(r), slice(n)
            options["bias"] = bias[corner]
        part = (q[b : b + 1, :r], k[b : b + 1, :n], v[b : b + 1, :n])
        assert (result.out[b, r:] == 0).all(), "padding"
        left = result.lse[b, :, r:]
        nothing = np.full(heads, -np.inf, np.float32) if sinks is None else sinks
        np.testing.assert_allclose(left, np.broadcast_to(nothing[:, None], left.shape), atol=1e-6)
        if r:
            check_output(result.out[b : b + 1, :r], result.lse[b : b + 1, :, :r], *part, repro=str(case), **options)
        if gradients is None:
            continue
        for name, count in (("dq", r), ("dk", n), ("dv", n)):
            assert (getattr(gradients, name)[b, count:] == 0).all(), f"{name} of padding"
        cut = ga.AttentionGradients(
            gradients.dq[b : b + 1, :r], gradients.dk[b : b + 1, :n], gradients.dv[b : b + 1, :n]
        )
        if dsinks is not None or (dbias is not None and r and n):
            from gpu_actors.reference import attention_backward

            own = attention_backward(dout[b : b + 1, :r], *part, **options)
            if dsinks is not None:
                dsinks = dsinks + own.dsinks
                cut = cut._replace(dsinks=own.dsinks.astype(np.float32))  # the sum over sequences is compared below
            if dbias is not None:
                dbias[corner] += own.dbias
                shared = own.dbias.astype(bias.dtype)
                cut = cut._replace(dbias=shared if len(bias) == 1 else gradients.dbias[corner])
        elif dbias is not None:
            continue  # no pair
        out, lse = result.out[b : b + 1, :r], result.lse[b : b + 1, :, :r]
        check_gradients(cut, dout[b : b + 1, :r], *part, out=out, lse=lse, repro=str(case), **options)
    if gradients is not None and dbias is not None:
        np.testing.assert_allclose(gradients.dbias, dbias, rtol=2e-2, atol=2e-2)
        if len(bias) > 1:
            past = np.ones(bias.shape, bool)
            for b, (r, n) in enumerate(zip(rows, keys, strict=True)):
                past[b, :, :r, : n if r else 0] = False
            assert not gradients.dbias[past].any(), "dbias of padding"
    if gradients is not None and sinks is not None:
        np.testing.assert_allclose(gradients.dsinks, dsinks, rtol=2e-2, atol=2e-2)
