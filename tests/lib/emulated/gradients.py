"""Shared by the tests of all gradient kernels: cases, operands, and edge cases that each must pass.

launch: arguments of `run` that name the kernel, such as ``kernel`` or ``arch``.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from cases.finite_masks import hide_keys
from emulated.backward import backward_problem_of, run
from emulated.forward import Strided, gaussian
from emulated.sweeps import Sweep
from inside.reference import round_inputs

from gpu_actors import AttentionGradients
from gpu_actors.reference import attention_forward
from gpu_actors.testing import BackwardCase, check_gradients, random_backward

__all__ = [
    "answered",
    "case_of",
    "check",
    "check_empty_sequences",
    "check_float16_range",
    "check_lse_gradient",
    "check_padded_views",
    "check_sequences_longer_than_said",
    "operands_of",
    "problem_and_operands",
]


def case_of(sweep: Sweep, seed: int, seqlens: tuple[int, int], **choices: Any) -> BackwardCase:
    """A case in which every second bias hides keys. Gradients of rows that see only hidden keys have no correct digits,
    so dout of such rows is 0, as docs/training.md advises."""
    case = random_backward(
        seed,
        compute=sweep.compute,
        dtype=sweep.dtype,
        head_dim=sweep.head_dim,
        head_dim_v=sweep.head_dim_v,
        varlen=sweep.varlen,
        seqlens=seqlens,
        features=(),
        always=sweep.options,
        alignment=sweep.alignment,
        **choices,
    )
    if "bias" not in case.options or seed % 2 == 0:
        return case
    case = answered(case, {**case.options, "bias": hide_keys(case.options["bias"], seed, finite=True)}, sweep.compute)
    cancelled = (-np.inf < case.lse) & (case.lse < -5e3)
    return dataclasses.replace(
        case, dout=np.where(cancelled.swapaxes(-1, -2)[..., None], case.dout.dtype.type(0), case.dout)
    )


def answered(case: BackwardCase, options: dict[str, Any], compute: str | None = None) -> BackwardCase:
    """The case with these options, and with the forward's out and LSE for them. compute: as for `random_backward`."""
    inputs = case.forward.inputs if compute is None else round_inputs(*case.forward.inputs, compute)
    result = attention_forward(*inputs, **options)
    out, lse = result.out.astype(case.out.dtype), result.lse.astype(np.float32)
    return dataclasses.replace(case, forward=dataclasses.replace(case.forward, options=options), out=out, lse=lse)


def problem_and_operands(dout: Any, q: Any, k: Any, v: Any, **options: Any) -> tuple[Any, dict[str, Any]]:
    result = attention_forward(*(getattr(x, "array", x) for x in (q, k, v)), **options)
    arrays = [getattr(x, "array", x) for x in (q, k, v)]
    out, lse = result.out.astype(arrays[0].dtype), result.lse.astype(np.float32)
    named = {name: value for name, value in options.items() if isinstance(value, np.ndarray)}
    operands = {"dout": dout, "q": q, "k": k, "v": v, "out": out, "lse": lse, **named}
    return backward_problem_of(*arrays, **options), operands


def operands_of(rows: int, keys: int, *, batch: int = 1, heads: int = 2, heads_kv: int = 2) -> list[Any]:
    """dout, q, k, v in float16, with a head_dim that every family of tests compiles."""
    shapes = [(batch, n, h, 64) for n, h in ((rows, heads), (rows, heads), (keys, heads_kv), (keys, heads_kv))]
    return [gaussian(n, shape, "float16") for n, shape in enumerate(shapes)]


def check(launch: dict[str, Any], *arrays: Any, **options: Any) -> AttentionGradients:
    """Compare the gradients of these arrays (dout, q, k, v) with the oracle's, and return them."""
    problem, operands = problem_and_operands(*arrays, **options)
    gradients = run(problem, operands, **launch)
    check_gradients(gradients, *arrays, out=operands["out"], lse=operands["lse"], **options)
    return gradients


def check_empty_sequences(launch: dict[str, Any]) -> None:
    ends = {
        "cu_seqlens_q": np.array([0, 5, 5, 8, 150], np.int32),
        "cu_seqlens_k": np.array([0, 0, 90, 130, 133], np.int32),
    }
    dout, q, k, v = (gaussian(n, (rows, 2, 64), "float16") for n, rows in enumerate((150, 150, 133, 133)))
    gradients = check(launch, dout, q, k, v, causal=True, **ends)
    assert (gradients.dq[:5] == 0).all()
    assert (gradients.dk[:90] == 0).all()


def check_sequences_longer_than_said(launch: dict[str, Any], rows: int) -> None:
    ends = {name: np.array([0, 10, rows], np.int32) for name in ("cu_seqlens_q", "cu_seqlens_k")}
    arrays = [gaussian(n, (rows, 2, 64), "float16") for n in range(4)]
    problem, operands = problem_and_operands(*arrays, causal=True, **ends)
    short = run(dataclasses.replace(problem, seqlen_q=10, seqlen_k=10), operands, **launch)
    check_gradients(short, *arrays, out=operands["out"], lse=operands["lse"], causal=True, **ends)


def check_float16_range(launch: dict[str, Any], of_dout: float, of_v: float, **options: Any) -> None:
    """Check gradients from a dO and a V of these standard deviations, with a dS beyond or below float16's range."""
    dout, q, k, v = operands_of(150, 150)
    dout, v = ((x.astype(float) * factor).astype(np.float16) for x, factor in ((dout, of_dout), (v, of_v)))
    check(launch, dout, q * np.float16(0.01), k * np.float16(0.01), v, **options)


def check_lse_gradient(launch: dict[str, Any]) -> None:
    dout, q, k, v = operands_of(90, 70)
    problem, operands = problem_and_operands(dout, q, k, v, causal=True)
    dlse = gaussian(9, operands["lse"].shape)
    gradients = run(problem, {**operands, "dlse": dlse}, **launch)
    # An output whose products with dout are less by dlse.
    wide = dout.astype(np.float64)
    share = np.moveaxis(dlse, 1, 2)[..., None] * wide / np.square(wide).sum(-1, keepdims=True)
    saved = {"out": operands["out"] - share, "lse": operands["lse"]}
    check_gradients(gradients, dout, q, k, v, **saved, causal=True)


def padded_view(seed: int, length: int, heads: int, padding: int) -> Strided:
    """(batch, heads, rows, dim) storage with NaN between rows, heads and sequences."""
    base = np.full((2, heads + 1, length + 2, 64 + 2 * padding), np.nan, np.float16)
    array = base[:, 1:, 1 : length + 1, padding : padding + 64].transpose(0, 2, 1, 3)
    array[...] = gaussian(seed, array.shape)
    return Strided(array, base)


def check_padded_views(launch: dict[str, Any], read: int, written: int) -> None:
    """Transposed padded views are read and written in place. read, written: elements on each side of a row."""
    rows, keys = (137, 4), (170, 2)
    dout, q, k, v = (padded_view(n, *shape, read) for n, shape in enumerate((rows, rows, keys, keys)))
    shapes = {"dq": rows, "dk": keys, "dv": keys}
    targets = {name: padded_view(7, *shape, written) for name, shape in shapes.items()}
    for target in targets.values():
        target.array[...] = np.nan
    problem, operands = problem_and_operands(dout, q, k, v, causal=True)
    gradients = run(problem, {**operands, **targets}, **launch)
    saved = {"out": operands["out"], "lse": operands["lse"]}
    check_gradients(gradients, dout.array, q.array, k.array, v.array, causal=True, **saved)
    for target in targets.values():
        assert np.isfinite(target.base).sum() == target.array.size, "only the view was written"
