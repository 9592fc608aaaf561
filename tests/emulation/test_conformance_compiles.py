"""The conformance kernels compile for real architectures too, without a note that ptxas gave something up."""

from __future__ import annotations

import re

import pytest
from inside.compiling import Compiler, asset_headers
from kernel_runs import cubin_of
from second_reading import Kind, macros_of

from gpu_actors import KernelSource

VARIANTS = [  # file, architecture, macros, entries that this architecture lacks
    ("conformance/convert.cu", "sm_80", {}, ()),
    ("conformance/convert_fp8.cu", "sm_89", {}, ()),
    ("conformance/warp.cu", "sm_80", {}, ()),
    ("conformance/copies.cu", "sm_80", {}, ("mma_e4m3", "mma_e5m2")),
    ("conformance/copies.cu", "sm_89", {}, ()),
    ("conformance/pipelines.cu", "sm_90a", {}, ()),
    ("conformance/tensors.cu", "sm_90a", {}, ()),
    ("conformance/wgmma.cu", "sm_90a", {}, ()),
    ("second_reading.cu", "sm_90a", macros_of((Kind("bf16", True, True, 192), Kind("e4m3", False, False, 128))), ()),
]


@pytest.mark.parametrize(("file", "arch", "macros", "absent"), VARIANTS)
def test_nvrtc_takes_every_wrapper_and_ptxas_gives_nothing_up(
    file: str, arch: str, macros: dict[str, str], absent: tuple[str, ...]
) -> None:
    assert re.findall(r"C75\d\d.*", cubin_of(file, macros, arch, absent).log) == []


EVERY_SIZE = """
#include "ptx/wgmma.cuh"
template <int N>
DEVICE void multiply(float* out, uint64_t descriptor) {
  float d[N / 2], sum = 0.0f;
  const uint32_t a[4] = {threadIdx.x, 1, 2, 3};
  ptx::wgmma_fence();
  ptx::wgmma_ss<N, ptx::Element::f16>(d, descriptor, descriptor, false);
  ptx::wgmma_rs<N, ptx::Element::f16, true>(d, a, descriptor, true);
  ptx::wgmma_commit();
  ptx::wgmma_wait<0>();
  ptx::pin_registers(d);
  for (int i = 0; i < N / 2; i++) sum += d[i];
  out[threadIdx.x] = sum;
}
"""


def test_ptxas_takes_wgmma_of_every_size() -> None:
    sizes = range(8, 257, 8)
    kernels = "".join(
        f'extern "C" __global__ void __launch_bounds__(128) m{n}(float* out, uint64_t d) {{ multiply<{n}>(out, d); }}\n'
        for n in sizes
    )
    text = EVERY_SIZE + kernels
    source = KernelSource("sizes.cu", text, tuple(f"m{n}" for n in sizes), headers=asset_headers(text))
    cubin = Compiler().compile(source, "sm_90a")
    assert re.findall(r"C75\d\d.*", cubin.log) == []
    assert all(cubin.resources[f"m{n}"].registers >= n // 2 for n in sizes)
