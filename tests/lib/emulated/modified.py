"""Runs the score modifications of `cases.score_mods` through one forward kernel, over many tiles. For tests."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any
from unittest import mock

import numpy as np
from cases import score_mods
from cases.score_mod_gradients import check_forward
from cases.score_mods import FIRST, OUT, STATS, Case, K, Modification, Q, V, case_of, forward_graph
from emulated.forward import run
from inside.graph import match_attention

import gpu_actors as ga

__all__ = ["check_modified", "check_modified_nonfinite", "modified_case"]

Array = Any
CAUSAL = ga.Mask.causal()


@contextlib.contextmanager
def _sized(rows: int, keys: int) -> Iterator[None]:
    with mock.patch.multiple(score_mods, ROWS=rows, KEYS=keys):
        yield


def _hidden_after(formula: Any) -> Any:
    """The formula, followed by a causal mask."""

    def causal(scores: Array, extras: list[Array]) -> Array:
        rows, keys = scores.shape[2:]
        visible = np.arange(keys)[None, :] <= np.arange(rows)[:, None] + keys - rows
        return np.where(visible, formula(scores, extras), -np.inf)

    return causal


def modified_case(name: str, dtype: str, seed: int, dim: int, rows: int, keys: int, causal: bool) -> Case:
    """A case of so many rows and keys, whose formula applies the causal mask."""
    modification = score_mods.MODIFICATIONS[name]
    with _sized(rows, keys), mock.patch.dict(score_mods.MODIFICATIONS, {name: modification._replace(keys=keys)}):
        case = case_of(name, dtype, seed, dim=dim)
    formula = _hidden_after(modification.formula) if causal else modification.formula
    return case._replace(modification=Modification(modification.build, formula, modification.extras, keys))


def check_modified(case: Case, *, causal: bool, kernel: str, **launch: Any) -> None:
    """Compare one kernel's output and LSE with the case's formula. launch: arguments of `emulated.forward.run`."""
    mask = CAUSAL if causal else ga.Mask.none()
    out, lse = _answer(case, mask, kernel=kernel, **launch)
    check_forward(case, {OUT: out, STATS: lse}, mask)


def check_modified_nonfinite(kernel: str, **launch: Any) -> None:
    """An infinite value reaches the rows that see its key, as NaN if the modification makes its weight 0."""
    case = modified_case("document mask", "float16", 1, 64, 150, 150, causal=True)
    finite, lse = _answer(case, CAUSAL, kernel=kernel, **launch)
    check_forward(case, {OUT: finite, STATS: lse}, CAUSAL)
    case.arrays[V][:, :, 100, 3::59] = np.inf
    expected = finite.astype(np.float32)
    same = case.arrays[FIRST][:, :, 100:] == case.arrays[FIRST + 1][:, :, :, 100:101]
    expected[:, :, 100:, 3::59] = np.where(same, np.inf, np.nan)
    out, _ = _answer(case, CAUSAL, kernel=kernel, **launch)
    visible = np.isfinite(lse).repeat(out.shape[-1], axis=-1)
    assert visible.mean() > 0.5
    np.testing.assert_allclose(out.astype(np.float32)[visible], expected[visible], atol=2e-3)


def _answer(case: Case, mask: ga.Mask, *, kernel: str, **launch: Any) -> tuple[Array, Array]:
    """out (batch, heads, rows, dim) and LSE (batch, heads, rows, 1)."""
    rows, keys = case.arrays[Q].shape[2], case.arrays[K].shape[2]
    with _sized(rows, keys):
        match = match_attention(forward_graph(case, mask))
        assert match.modification is not None
        problem = dataclasses.replace(match.problem, return_lse=True)
        operands = {name: case.arrays[uid].transpose(0, 2, 1, 3) for name, uid in (("q", Q), ("k", K), ("v", V))}
        operands = {name: np.ascontiguousarray(array) for name, array in operands.items()}
        for n, uid in enumerate(match.modification.tensors):
            operands[match.modification.mod.tensor_name(n)] = case.arrays[uid]
        scalars = tuple(value for _, value in match.modification.scalars)
    out, lse = run(problem, operands, kernel=kernel, score_scalars=scalars, **launch)
    return out.transpose(0, 2, 1, 3), lse[..., None]
