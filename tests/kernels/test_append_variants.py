"""Variants of the append and page-copy kernels: what they take and refuse, and which are compiled in advance."""

from __future__ import annotations

import dataclasses
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from gates.append import PROBLEM
from inside.compiling import Variant
from support.gate import ARCHS

import gpu_actors as ga
from gpu_actors.errors import InvalidRequest, Unsupported
from gpu_actors.kernels.append import Rope, append_variant
from gpu_actors.kernels.copy_pages import page_copy_geometry
from gpu_actors.kernels.key_checks import check_key
from gpu_actors.kernels.variants import kv_variants, standard_variants


def variant(**changes: Any) -> Variant:
    return append_variant(dataclasses.replace(PROBLEM, **changes), "sm_80")


class TestSupport:
    def test_variants_hold_what_is_compiled_and_no_sizes(self):
        assert variant() == variant(batch=9, total=99, heads_kv=7, page_size=64, num_blocks=8)
        assert variant() != variant(rope=Rope(dim=8))
        assert variant(rope=Rope(dim=8)) == variant(rope=Rope(dim=8, base=3.0))
        assert len({variant(layout=layout, max_seq=4) for layout in ("paged", "dense", "pointers")}) == 3
        assert str(variant()).startswith("kernel=append,arch=sm_80,CACHE_ELEMENT=bfloat16_t")
        assert variant().source == variant(batch=5).source

    @pytest.mark.parametrize(
        ("field", "changes"),
        [
            ("dtype", {"dtype": "float64", "cache_dtype": "float64", "rope": Rope(dim=8)}),
            ("dtype", {"dtype": "float64", "cache_dtype": "float32"}),
            ("cache_dtype", {"dtype": "float32", "cache_dtype": "float64"}),
            ("dtype", {"dtype": "int8"}),
            ("dtype", {"dtype": "float8_e4m3fn", "cache_dtype": "float8_e5m2"}),
            ("cache_dtype", {"cache_dtype": "float16"}),
            ("cache_dtype", {"cache_dtype": "float32"}),
            ("cache_dtype", {"descales": True}),
            ("head_dim", {"head_dim": 513}),
            ("head_dim_v", {"head_dim_v": 0}),
            ("rope.dim", {"rope": Rope(dim=130)}),
            ("dtype", {"dtype": "float8_e5m2", "cache_dtype": "float8_e5m2", "rope": Rope(dim=8)}),
            ("heads_q", {"heads_q": 4}),
            ("positions", {"positions": True}),
        ],
    )
    def test_what_the_kernel_does_not_take_is_refused_by_name(self, field, changes):
        with pytest.raises(Unsupported) as caught:
            variant(**changes)
        assert caught.value.field == field

    def test_an_architecture_without_the_kernel_is_refused(self):
        for arch, error in (("sm_75", Unsupported), ("sm_90", Unsupported), ("gpu", InvalidRequest)):
            with pytest.raises(error, match="arch"):
                append_variant(PROBLEM, arch)

    @pytest.mark.parametrize(
        ("field", "given"),
        [
            ("rope.dim", {"dim": 7}),
            ("rope.dim", {"dim": 0}),
            ("rope.dim", {"dim": True}),
            ("rope.base", {"dim": 8, "base": 0.0}),
            ("rope.base", {"dim": 8, "base": float("inf")}),
            ("rope.inv_freq", {"dim": 8, "inv_freq": (1.0, 2.0)}),
            ("rope.inv_freq", {"dim": 4, "inv_freq": (1.0, float("nan"))}),
            ("rope.table_rows", {"dim": 4, "table_rows": -1}),
        ],
    )
    def test_a_rotation_that_is_none_is_refused_by_name(self, field, given):
        with pytest.raises(InvalidRequest) as caught:
            Rope(**given)
        assert caught.value.field == field

    def test_a_grid_that_is_too_large_is_refused(self):
        pool = dataclasses.replace(PROBLEM, page_size=256, heads_kv=8, num_blocks=4)
        with pytest.raises(Unsupported, match="pairs"):
            page_copy_geometry(1 << 30, pool)


class TestWarming:
    @pytest.mark.parametrize("arch", ARCHS)
    def test_usual_variants_pass_and_are_compiled_once_each(self, arch):
        variants = kv_variants(arch)
        assert [check_key(variant) for variant in variants] == variants
        assert len({variant.source for variant in variants}) == len(variants)

    def test_a_warmed_cache_serves_where_nothing_may_be_compiled(self, tmp_path):
        """The cache's pages have the request's dtype."""
        facts = {"layout": "paged", "dtype": "bfloat16", "head_dim": 128, "descales": False}
        macros = {"PAGED": 1, "ELEMENT": "bfloat16_t", "CACHE_ELEMENT": "bfloat16_t", "HEAD_DIM": 128}
        keys: list[Any] = [
            key
            for key in standard_variants("sm_90a")
            if key.kernel.startswith("decode") and all(getattr(key, fact) == wanted for fact, wanted in facts.items())
        ]
        keys += [v for v in kv_variants("sm_90a") if v.kernel == "copy_pages" or macros.items() <= v.macros.items()]
        options = ga.ContextOptions(arch="sm_90a", cache_dir=tmp_path)
        with ga.open_context("mock", options) as ctx:
            assert [variant.key for variant in ctx.nvrtc.warm(keys).result(100)] == keys
        options = dataclasses.replace(options, offline=True, compile_on_mock=True)
        rows = np.zeros((1, 3, 8, 128), ml_dtypes.bfloat16)
        with (
            ga.open_context("mock", options) as ctx,
            ctx.kv_cache(num_blocks=4, page_size=16, kv_heads=2, head_dim=128, dtype="bfloat16") as cache,
        ):
            seq = cache.create().result(10)
            for rope in (None, Rope(dim=128)):
                cache.attend(rows, [seq], k=rows[:, :, :2], v=rows[:, :, :2], rope=rope).result(10)
            with pytest.raises(ga.CompileError):
                cache.attend(rows, [seq], k=rows[:, :, :2], v=rows[:, :, :2], rope=Rope(dim=6)).result(10)

    @pytest.mark.parametrize(
        ("field", "changes"),
        [
            ("arch", {"arch": "sm_90"}),
            ("arch", {"arch": 80}),
            ("kernel", {"kernel": "appendix"}),
            ("kernel", {"kernel": 3}),
            ("macros", {"macros": {"HEAD DIM": 64}}),
            ("macros['HEAD_DIM']", {"macros": {"HEAD_DIM": None}}),
            ("headers", {"headers": {"/etc/passwd": ""}}),
        ],
    )
    def test_a_variant_of_no_kernel_is_refused_by_name(self, field, changes):
        with ga.open_context("mock") as ctx, pytest.raises((InvalidRequest, Unsupported)) as caught:
            ctx.nvrtc.warm([dataclasses.replace(variant(), **changes)]).result(30)
        assert caught.value.field == field
