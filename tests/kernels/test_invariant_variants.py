"""The variants of a kernel that answer rows of one text have the same arithmetic, as NVRTC compiles it.

The source is the same, and the emulated device rounds each operation. A compiler may fuse a product into a sum in one
variant and not in another, and their rows would then differ on a GPU alone. Divisions are left out, because MUFU.RCP
also divides integers, those of indices.
"""

from __future__ import annotations

import collections
import re
from typing import Any

import pytest
from inside.kernels import DECODE, FAMILIES, SIMPLE, dispatch_key, example_problem
from support.gate import code_of, kernel_source

_ARITHMETIC = re.compile(r"\b([FD]FMA|[FD]MUL|[FD]ADD|HMMA|MUFU\.(?:EX2|LG2|RSQ|TANH))\b")
_BASE: dict[str, Any] = {"layout": "paged", "page_size": 16, "causal": True, "return_lse": True, "heads_q": 4}
_EIGHTS: dict[str, Any] = {"kv_dtype": "float8_e4m3fn", "descales": True}
_LATENT: dict[str, Any] = {"latent": True, "head_dim_v": 512}
# Kernel, dtype, head dim, and further options of a text's rows and caches.
_SHAPES: dict[str, tuple[str, str, int, dict[str, Any]]] = {
    "64 columns": (DECODE, "float16", 64, {}),
    "128 columns": (DECODE, "bfloat16", 128, {}),
    "256 columns": (DECODE, "bfloat16", 256, {}),
    "512 columns": (DECODE, "bfloat16", 320, {"head_dim_v": 512}),
    "latents": (DECODE, "bfloat16", 576, _LATENT),
    "latents in 8 bits": (DECODE, "bfloat16", 576, _LATENT | _EIGHTS),
    "a cache in 8 bits": (DECODE, "bfloat16", 128, _EIGHTS),
    "8 bits": (DECODE, "float8_e4m3fn", 64, _EIGHTS),
    "20 columns": (SIMPLE, "bfloat16", 20, {}),
    "float32": (SIMPLE, "float32", 64, {}),
    "float64": (SIMPLE, "float64", 320, {}),
}
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
}
# For the default run, which compiles each.
_SAMPLED = {
    "128 columns": ("sm_90a", ("full", "pages of one key", "packed sequences", "arrays")),
    "256 columns": ("sm_80", ("packed sequences",)),
    "512 columns": ("sm_90a", ("arrays",)),
    "latents": ("sm_90a", ("pages of one key",)),
    "a cache in 8 bits": ("sm_80", ("pages of one key",)),
    "float32": ("sm_80", ("packed sequences",)),
}


def arithmetic(arch: str, shape: str, **fields: Any) -> collections.Counter[str]:
    kernel, dtype, dim, own = _SHAPES[shape]
    problem = example_problem(dtype, dim, **{**_BASE, **own, **fields}, invariant=True, num_splits=1)
    key = dispatch_key(problem, arch, FAMILIES)
    assert key.kernel == kernel
    text = code_of(kernel_source(key), kernel).text
    assert text is not None
    found = collections.Counter(_ARITHMETIC.findall(text))
    assert found["HMMA"] or kernel == SIMPLE
    assert found["DFMA" if dtype == "float64" else "FFMA"]
    assert found["MUFU.EX2"] or dtype == "float64"
    return found


def check(arch: str, shape: str, scores: str, variants: tuple[str, ...]) -> None:
    expected = arithmetic(arch, shape, **_SCORES[scores])
    for name in variants:
        fields = _VARIANTS[name]
        if scores == "window" and "causal" in fields:
            continue  # a causal window hides other keys
        if "latents" in shape and fields.get("layout") == "pointers":
            continue  # latents have no arrays of pointers
        assert arithmetic(arch, shape, **{**_SCORES[scores], **fields}) == expected, name


@pytest.mark.timeout(300)
@pytest.mark.parametrize("shape", _SAMPLED)
def test_variants_of_one_text_have_the_same_arithmetic(shape: str) -> None:
    arch, variants = _SAMPLED[shape]
    check(arch, shape, "plain", variants)


@pytest.mark.sweep
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("scores", _SCORES)
@pytest.mark.parametrize("shape", _SHAPES)
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_all_variants_of_one_text_have_the_same_arithmetic(arch: str, shape: str, scores: str) -> None:
    check(arch, shape, scores, tuple(_VARIANTS))
