"""The variants of decode_mma that answer rows of one text have the same arithmetic, as NVRTC compiles it.

The source is the same, and the emulated device rounds each operation. A compiler may fuse a product into a sum in one
variant and not in another, and their rows would have other bits on a GPU alone. Divisions are left out: MUFU.RCP also
divides integers, those of places.
"""

from __future__ import annotations

import collections
import re
from typing import Any

import pytest
from inside.kernels import DECODE, FAMILIES, dispatch_key, example_problem
from support.gate import code_of, kernel_source

_ARITHMETIC = re.compile(r"\b(FFMA|FMUL|FADD|HMMA|MUFU\.(?:EX2|LG2|RSQ|TANH))\b")
_BASE: dict[str, Any] = {"layout": "paged", "page_size": 16, "causal": True, "return_lse": True, "heads_q": 4}
_VARIANTS: dict[str, dict[str, Any]] = {
    "full": {"causal": False},
    "packed rows": {"varlen_q": True},
    "pages of one key": {"page_size": 1, "varlen_q": True},
    "a cache": {"layout": "cache", "page_size": 0},
    "arrays": {"layout": "pointers", "page_size": 0, "causal": False},
    "padding": {"cache_leftpad": True},
    "packed sequences": {"layout": "cache", "page_size": 0, "cache_leftpad": True, "varlen_q": True},
    "positions": {"q_positions": 1},
}
_SCORES: dict[str, dict[str, Any]] = {
    "plain": {},
    "scores": {"softcap": 5.0, "alibi": "heads", "sinks": True},
    "window": {"window_size": (100, 0), "sink_tokens": 3},
    "8 bits": {"kv_dtype": "float8_e4m3fn", "descales": True},
}
_SAMPLED = ("full", "pages of one key", "packed sequences", "arrays")


def arithmetic(arch: str, **fields: Any) -> collections.Counter[str]:
    problem = example_problem("bfloat16", 128, **{**_BASE, **fields}, invariant=True, num_splits=1)
    key = dispatch_key(problem, arch, FAMILIES)
    assert (key.kernel, key.row_tile) == (DECODE, 64)
    text = code_of(kernel_source(key), DECODE).text
    assert text is not None
    return collections.Counter(_ARITHMETIC.findall(text))


def check(arch: str, scores: str, variants: tuple[str, ...]) -> None:
    expected = arithmetic(arch, **_SCORES[scores])
    assert expected["HMMA"]
    assert expected["FFMA"]
    assert expected["MUFU.EX2"]
    for name in variants:
        if scores == "window" and "causal" in _VARIANTS[name]:
            continue  # which hides other keys
        assert arithmetic(arch, **{**_SCORES[scores], **_VARIANTS[name]}) == expected, name


@pytest.mark.timeout(300)
def test_variants_of_one_text_have_the_same_arithmetic() -> None:
    check("sm_90a", "plain", _SAMPLED)


@pytest.mark.sweep
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("scores", _SCORES)
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_all_variants_of_one_text_have_the_same_arithmetic(arch: str, scores: str) -> None:
    check(arch, scores, tuple(_VARIANTS))
