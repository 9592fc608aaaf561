"""``flash_attn.explain``: why a request has its kernel, from the table that docs/reports/options.md prints."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from inside.kernels import (
    FAMILIES,
    OPTIONS,
    REFERENCE,
    answering_key,
    dispatch_key,
    example_problem,
    explain_problem,
    option_cell,
    options_of,
)

import gpu_actors as ga

DENSE = ["forward_sm90", "forward_mma", "forward_wide", "forward_simple"]


def zeros(*shape: int, dtype: Any = ml_dtypes.bfloat16) -> np.ndarray:
    return np.zeros(shape, dtype)


def forward(dim: int = 64, dtype: Any = ml_dtypes.bfloat16, **options: Any) -> ga.FlashForward:
    x = zeros(1, 128, 2, dim, dtype=dtype)
    return ga.FlashForward(x, x, x, **options)


def explained(request: Any, arch: str = "sm_90a", device: str = "mock") -> Any:
    with ga.open_context(device, ga.ContextOptions(arch=arch)) as ctx:
        found = ctx.flash_attn.explain(request)
        assert isinstance(found, ga.Explanation)
        assert found.key is None or found.key == ctx.flash_attn.inspect_key(request)
    return found


def test_it_names_the_kernel_and_why_each_other_one_was_not_taken() -> None:
    found = explained(forward(out_dtype="float32"))
    assert found.key.kernel == "forward_mma"
    assert [verdict.family for verdict in found.verdicts] == [family.name for family in FAMILIES]
    assert [verdict.family for verdict in found.verdicts if verdict.taken] == ["forward_mma"]
    assert "outputs of 16 bits" in found.verdicts[0].reason


def test_the_rows_are_those_of_the_request_for_kernels_of_its_kind() -> None:
    found = explained(forward(out_dtype="float32", softcap=30.0))
    cells = [(cell.option, cell.family) for cell in found.options]
    assert cells == [(option, family) for option in ("`softcap`", '`out_dtype="float32"`') for family in DENSE]
    assert [cell.taken for cell in found.options] == [True, True, True, True, False, True, True, True]
    assert {cell.arch for cell in found.options} == {"sm_90a"}


def test_its_text_has_every_row_and_every_reason() -> None:
    found = explained(forward(dropout_p=0.1), "sm_80")
    text = str(found)
    assert text.startswith("kernel: forward_mma (sm_80)\n")
    for part in (*found.verdicts, *found.options):
        assert part.reason in text
    assert "  yes  forward_mma: " in text
    assert "  no  forward_sm90: " in text
    assert "option `dropout_p`" in text


def test_what_no_kernel_takes_is_explained() -> None:
    with ga.open_context("mock") as ctx, pytest.raises(ga.Unsupported):
        ctx.flash_attn.inspect_key(forward(576))
    found = explained(forward(576))
    assert found.key is None
    assert str(found).startswith("kernel: none\n")
    assert not any(verdict.taken for verdict in found.verdicts)
    assert all("576" in verdict.reason for verdict in found.verdicts)


def test_what_numpy_answers_says_so() -> None:
    x, lse = zeros(1, 2, 1, 512, dtype=np.float64), zeros(1, 1, 2, dtype=np.float32)
    found = explained(ga.FlashBackward(x, x, x, out=x, dout=x, lse=lse), "sm_86")  # it has too little shared memory
    assert found.key.kernel == REFERENCE.name
    assert found.verdicts[-1] == (REFERENCE.name, True, REFERENCE.reason)


def test_operands_that_tma_cannot_move_are_the_reason() -> None:
    problem = example_problem("bfloat16", 64)
    without = tuple(family for family in FAMILIES if not family.tma)
    found = explain_problem(problem, "sm_90a", answering_key(problem, "sm_90a", True, without))
    assert [verdict.family for verdict in found.verdicts] == [family.name for family in FAMILIES]
    assert [verdict.family for verdict in found.verdicts if verdict.taken] == ["forward_mma"]
    assert "TMA" in found.verdicts[0].reason


def test_a_message_that_is_no_request_is_refused() -> None:
    with ga.open_context("mock") as ctx:
        for look in (ctx.flash_attn.explain, ctx.flash_attn.inspect_key):
            with pytest.raises(ga.InvalidRequest, match="takes FlashForward") as caught:
                look(ga.MergePartials([]))  # type: ignore[arg-type]
            assert caught.value.field == "message"
        with pytest.raises(ga.InvalidRequest) as caught:
            ctx.flash_attn.explain(forward(window_size=(1,)))
        assert caught.value.field == "window_size"


# Rows of the table for a problem


def problem_of(name: str) -> ga.AttentionProblem:
    fields = dict(OPTIONS[name])
    return example_problem(fields.pop("dtype", "bfloat16"), fields.pop("head_dim", 64), **fields)


def test_a_row_is_found_for_the_problem_that_it_is_made_of() -> None:
    for name in OPTIONS:
        assert options_of(problem_of(name)) == [name]


def test_rows_are_found_for_problems_unlike_the_examples() -> None:
    def rows(dtype: str = "float16", **fields: Any) -> list[str]:
        return options_of(example_problem(dtype, 128, **fields))

    assert rows("bfloat16") == ["none"]
    assert rows() == ["float16"]
    assert rows(bias=("float16", True, False)) == ["`bias`", "float16"]
    assert rows("bfloat16", bias=("bool", True, False), bias_row=True) == ["`bias`, one row", "`bias`, a mask"]
    assert rows("bfloat16", k_positions=1) == ["`q_positions`, `k_positions`"]
    assert rows("bfloat16", dropout_heads=8) == ["`q_positions`, `k_positions`"]
    assert rows("bfloat16", window_size=(0, 7)) == ["`window_size`"]
    assert rows("bfloat16", kv_dtype="float8_e4m3fn", layout="paged") == ["a cache in float8_e4m3fn"]
    assert rows("bfloat16", alibi="batch") == ["`alibi_slopes`"]


def test_a_cell_says_what_dispatch_does() -> None:
    """For each request of the table, dispatch takes a family that the table names."""
    for name, fields in OPTIONS.items():
        if "kv_dtype" in fields and "dtype" not in fields:
            continue
        taken = [f for f in FAMILIES if f.direction == "forward" and option_cell(name, f, "sm_90a").taken]
        dense = [family.name for family in taken if family.name in DENSE]
        if dense:
            assert dispatch_key(problem_of(name), "sm_90a").kernel == dense[0], name
