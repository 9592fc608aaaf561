"""The forward kernels through NVRTC, which needs no GPU: nothing spilled, nothing on the stack, nothing serialised."""

from __future__ import annotations

import dataclasses
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from emulated.forward import key_of, ml_dtype, problem_of
from inside.compiling import Compiler, supported_archs

from gpu_actors import DispatchKey
from gpu_actors.kernels.support import ELEMENTS
from gpu_actors.kernels.variants import kernel_source


class TestCompiled:
    """NVRTC, without a GPU: registers as wide as they come, nothing spilled, nothing serialised."""

    ARCHS = ("sm_86", "sm_89", "sm_100a", "sm_120a")  # sm_80 and sm_90a compile these options among all of them
    EVERYTHING = {
        "causal": True,
        "window_size": (9, 9),
        "sink_tokens": 2,
        "alignment": "top_left",
        "softcap": 20.0,
        "alibi": "batch",
        "sinks": True,
        "return_lse": True,
    }
    SPREAD = (
        {},
        {"layout": "varlen"},
        {"causal": True},
        {"window_size": (9, 9)},
        {"window_size": (9, 9), "sink_tokens": 3},
        {"softcap": 20.0},
        {"alibi": "heads"},
        {"sinks": True},
        {"bias": ("float32", True, True)},
        {"bias": ("bfloat16", False, False)},
        {"dropout_p": 0.1},
        {"return_lse": True},
        {"head_dim": 1, "head_dim_v": 256},
        {"head_dim": 256, "head_dim_v": 1},
        {"head_dim": 192, "head_dim_v": 128, "causal": True},
        {"head_dim": 40, "head_dim_v": 40, "causal": True, "layout": "varlen"},
    )

    @staticmethod
    def key(dtype: str, arch: str, **changes: Any) -> DispatchKey:
        q = np.zeros((1, 64, 2, 128), ml_dtype(dtype))
        problem = dataclasses.replace(problem_of(q, q, q), return_lse=False)
        # Whether an architecture should run a dtype is the dispatcher's to say; here every one has to compile.
        return dataclasses.replace(key_of(dataclasses.replace(problem, **changes)), arch=arch)

    @staticmethod
    def assert_clean(keys: list[DispatchKey]) -> None:
        with ThreadPoolExecutor(2) as pool:
            cubins = list(pool.map(Compiler().compile, map(kernel_source, keys)))
        for key, cubin in zip(keys, cubins, strict=True):
            resources = cubin.resources["forward_simple"]
            assert (resources.spill_bytes, resources.stack_bytes) == (0, 0), key
            assert 0 < resources.registers <= 255, key
            assert cubin.notes == (), key

    @pytest.mark.parametrize("arch", [arch for arch in ARCHS if arch in supported_archs()])
    def test_every_dtype_compiles_for_every_other_architecture(self, arch):
        self.assert_clean([self.key(dtype, arch, causal=True, return_lse=True) for dtype in ELEMENTS])

    @pytest.mark.parametrize(("arch", "head_dim"), [("sm_80", 256), ("sm_90a", 128)])
    def test_every_dtype_compiles_with_every_option_at_once(self, arch, head_dim):
        options = {**self.EVERYTHING, "bias": ("float32", True, True), "head_dim": head_dim, "head_dim_v": head_dim}
        keys = [
            self.key(dtype, arch, dropout_p=0.0 if element.fp8 else 0.1, descales=element.fp8, **options)
            for dtype, element in ELEMENTS.items()
        ]
        self.assert_clean(keys)

    def test_the_newest_architecture_that_nvrtc_knows_compiles(self):
        newest = supported_archs()[-1]
        self.assert_clean([self.key(dtype, newest) for dtype in ("float16", "float64", "float8_e5m2")])

    @pytest.mark.parametrize("part", range(2))
    def test_each_option_and_head_dim_compiles_alone(self, part):
        self.assert_clean([self.key("bfloat16", "sm_90a", **changes) for changes in self.SPREAD[part::2]])
