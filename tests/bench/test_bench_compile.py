"""The compile suite's comparison with CuPy's own way to compile."""

from __future__ import annotations

import dataclasses

import pytest
from inside.compiling import Variant
from inside.kernels import variants

from gpu_actors import KernelSource
from gpu_actors.bench import compile as suite

OWN = """
extern "C" __global__ void __launch_bounds__(128, 1) forward_sm90(int* x) {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 64;");
  x[threadIdx.x] = 1;
}
"""


def test_a_compile_is_timed_beside_cupys_and_what_cupy_cannot_compile_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = next(key for key in variants.standard_variants("sm_80") if key.kernel == "forward_mma")
    plain = dataclasses.replace(
        usual, kernel="forward_simple", head_dim=128, head_dim_v=128, mask="causal", arch="sm_90a"
    )
    keys = [plain, dataclasses.replace(plain, kernel="forward_sm90")]
    sources = {
        plain.kernel: variants.variant_of(plain).source,
        "forward_sm90": KernelSource("own.cu", OWN, ("forward_sm90",)),
    }
    monkeypatch.setattr(variants, "standard_variants", lambda arch: keys)
    monkeypatch.setattr(variants, "variant_of", lambda key: Variant.of(sources[key.kernel], "sm_90a"))
    result = suite.beside_cupy("sm_90a", times=1)
    both = result["forward_simple"]
    assert isinstance(both, dict)
    assert both["ours_s"]["median"] > 0
    assert both["cupy_s"]["median"] > 0
    refused = result["forward_sm90"]
    assert isinstance(refused, dict)
    assert "setmaxnreg" in refused["cupy_s"]
    assert refused["cupy_exact_arch_s"]["median"] > 0
