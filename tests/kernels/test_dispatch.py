"""Which kernel answers a problem, the key, source and grid that follow, and why."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
from support.gate import kernel_source

from gpu_actors import AttentionProblem, DispatchKey
from gpu_actors.errors import InvalidRequest, Unsupported
from gpu_actors.kernels.dispatch import FAMILIES, REFERENCE, dispatch_key, explain, program_of
from gpu_actors.kernels.occupancy import shared_mem_limit
from gpu_actors.kernels.support import ELEMENTS, capability, example_problem
from gpu_actors.kernels.variants import standard_variants, usual_backward_keys

BASE = example_problem(
    "bfloat16", 64, batch=2, seqlen_q=100, seqlen_k=300, total_q=200, total_k=600, heads_q=6, heads_kv=2
)
ARCHS = ("sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_120a")


def problem(**changes: object) -> AttentionProblem:
    return dataclasses.replace(BASE, **changes)


# The tests below check the mechanism, independently of the faster kernels in FAMILIES.
SIMPLE = tuple(family for family in FAMILIES if family.name == "forward_simple")


def simple_key(given: AttentionProblem, arch: str = "sm_90a") -> DispatchKey:
    return dispatch_key(given, arch, SIMPLE)


def macros(**changes: object) -> dict[str, str]:
    return dict(kernel_source(simple_key(problem(**changes))).macros)


class TestKeys:
    def test_a_key_carries_what_decides_the_code_and_no_sizes(self):
        key = simple_key(problem(causal=True, softcap=5.0, sinks=True, bias=("float32", True, False)))
        assert (key.kernel, key.arch, key.direction, key.layout) == ("forward_simple", "sm_90a", "forward", "dense")
        assert (key.mask, key.softcap, key.sinks, key.bias, key.gqa_ratio) == ("causal", True, True, "float32", 3)
        assert (key.num_splits, key.persistent) == (1, False)
        larger = problem(causal=True, softcap=9.0, sinks=True, bias=("float32", True, False), batch=7, seqlen_k=999)
        assert simple_key(larger) == key

    def test_every_option_changes_the_key(self):
        options = {
            "layout": "varlen",
            "causal": True,
            "window_size": (3, 3),
            "alignment": "top_left",
            "softcap": 1.0,
            "alibi": "heads",
            "sinks": True,
            "sink_tokens": 1,
            "bias": ("float32", False, False),
            "dropout_p": 0.1,
            "return_lse": True,
            "head_dim": 72,
            "head_dim_v": 72,
            "heads_kv": 3,
        }
        keys = [simple_key(BASE), *(simple_key(problem(**{name: value})) for name, value in options.items())]
        assert len(set(keys)) == len({key.digest for key in keys}) == len(keys)

    def test_an_unsupported_problem_has_no_key(self):
        with pytest.raises(Unsupported) as refused:
            simple_key(problem(head_dim=600))
        assert refused.value.field == "head_dim"

    def test_what_no_family_takes_is_refused_with_the_last_familys_reason(self):
        for changes, field, nearest in (
            ({"direction": "backward"}, "direction", "forward"),
            ({"layout": "paged", "page_size": 16}, "layout", "varlen"),
        ):
            with pytest.raises(Unsupported) as refused:
                simple_key(problem(**changes))
            assert (refused.value.field, refused.value.nearest) == (field, nearest)

    def test_the_oracle_takes_what_no_kernel_does_and_nothing_that_is_unsupported(self):
        families = (*SIMPLE, REFERENCE)
        assert dispatch_key(problem(direction="backward"), "sm_90a", families).kernel == "reference"
        assert dispatch_key(BASE, "sm_90a", families).kernel == "forward_simple"
        with pytest.raises(Unsupported):
            dispatch_key(problem(head_dim=600), "sm_90a", families)

    def test_without_families_there_is_no_kernel(self):
        with pytest.raises(Unsupported, match="no kernel"):
            dispatch_key(BASE, "sm_90a", ())


class TestExplain:
    PICKY = dataclasses.replace(
        SIMPLE[0],
        name="picky",
        refuses=lambda problem, arch: (
            None if problem.causal else Unsupported("causal", False, "picky is causal only", True)
        ),
        reason="is for causal problems",
    )

    def test_it_says_for_each_family_why_it_was_or_was_not_taken(self):
        families = (self.PICKY, *SIMPLE)
        refused, taken = explain(BASE, "sm_90a", families)
        assert (refused.family, refused.taken) == ("picky", False)
        assert "causal only" in refused.reason
        assert taken == ("forward_simple", True, SIMPLE[0].reason)
        first, second = explain(problem(causal=True), "sm_90a", families)
        assert first.taken
        assert second == ("forward_simple", False, "picky comes first and takes it")

    def test_the_first_family_that_takes_a_problem_is_the_keys(self):
        families = (self.PICKY, *SIMPLE)
        assert dispatch_key(problem(causal=True), "sm_90a", families).kernel == "picky"
        assert dispatch_key(BASE, "sm_90a", families).kernel == "forward_simple"

    def test_of_an_unsupported_problem_it_gives_the_reason_of_the_check(self):
        (verdict,) = explain(problem(head_dim=600), "sm_90a", SIMPLE)
        assert not verdict.taken
        assert "head_dim=600" in verdict.reason


def forward(dtype: str = "float16", **changes: Any) -> AttentionProblem:
    return dataclasses.replace(example_problem(dtype, 64), **changes)


def backward(dtype: str = "float16", **changes: Any) -> AttentionProblem:
    return dataclasses.replace(example_problem(dtype, 64, direction="backward"), **changes)


def dims(of_keys: int, of_values: int) -> dict[str, int]:
    return {"head_dim": of_keys, "head_dim_v": of_values}


TF32 = {"compute": "tf32"}
FP8 = "float8_e4m3fn"
BIAS = {"bias": ("float16", False, False)}
TAKEN = [
    ("forward_mma", "sm_80", forward(**dims(32, 256))),
    ("forward_mma", "sm_80", forward("float32", **TF32)),
    ("forward_simple", "sm_90a", forward("float32", compute="f32")),
    ("forward_simple", "sm_90a", forward("float64")),
    ("forward_wide", "sm_80", forward(**dims(264, 264))),
    ("forward_wide", "sm_90a", forward("bfloat16", **dims(512, 256))),
    ("forward_wide", "sm_120a", forward(**dims(64, 512))),
    *(("backward_mma", arch, backward()) for arch in ("sm_80", "sm_89", "sm_100a", "sm_120a")),
    ("backward_mma", "sm_80", backward("float32", **TF32)),
    ("backward_mma", "sm_80", backward(softmax_scale=-0.5)),
    ("backward_mma", "sm_80", backward(**dims(32, 256))),
    ("backward_simple", "sm_80", backward("float32", compute="f32")),
    ("backward_simple", "sm_90a", backward("float64")),
    ("backward_simple", "sm_86", backward(head_dim=36)),
    ("backward_simple", "sm_90a", backward(**dims(1, 255))),
    *(
        ("backward_sm90", "sm_90a", backward(**dims(*widths)))
        for widths in ((32, 32), (96, 128), (136, 192), (256, 256))
    ),
    *(
        ("backward_sm90", "sm_90a", backward(**changes))
        for changes in ({"layout": "varlen"}, BIAS, {"dropout_p": 0.1}, {"softcap": 20.0}, {"alibi": "heads"})
    ),
]
# A family, the architecture, a problem, the kernel that takes it, and words of the family's reason to refuse it.
REFUSED = [
    ("forward_mma", "sm_80", forward(head_dim=36), "forward_simple", "multiples of 8"),
    ("forward_mma", "sm_80", forward(head_dim_v=4), "forward_simple", "from 8 to 256"),
    ("forward_mma", "sm_80", forward(softmax_scale=0.0), "forward_simple", "positive scale"),
    ("forward_mma", "sm_80", forward(softmax_scale=-1.0), "forward_simple", "positive scale"),
    ("forward_wide", "sm_80", forward(**dims(500, 512)), "forward_simple", "multiples of 8 from 8 to 512"),
    ("forward_wide", "sm_80", forward(**dims(512, 300)), "forward_simple", "multiples of 8"),
    ("forward_wide", "sm_80", forward(**dims(512, 512), softmax_scale=-1.0), "forward_simple", "positive scale"),
    ("forward_wide", "sm_80", forward("float32", **dims(512, 512), **TF32), "forward_simple", "float16, bfloat16"),
    ("forward_sm90", "sm_90a", forward(FP8, head_dim=40), "forward_simple", ""),
    ("forward_sm90", "sm_90a", forward(FP8, head_dim_v=72), "forward_simple", ""),
    ("backward_mma", "sm_80", backward(head_dim=36), "backward_simple", "from 8 to 256 (nearest supported: 40)"),
    ("backward_mma", "sm_80", backward(head_dim_v=4), "backward_simple", "from 8 to 256 (nearest supported: 8)"),
    ("backward_mma", "sm_80", backward("float32", compute="f32"), "backward_simple", "nearest supported: 'tf32'"),
    ("backward_mma", "sm_80", backward("float64"), "backward_simple", "float16, float32, bfloat16"),
    ("backward_sm90", "sm_90a", backward(**BIAS, softcap=20.0, head_dim=136), "backward_mma", "beside a derivative"),
    ("backward_sm90", "sm_90a", backward(head_dim=36), "backward_simple", "nearest supported: 40"),
    ("backward_sm90", "sm_90a", backward(softmax_scale=2.0**-40), "backward_mma", "in fp32"),
]


@pytest.mark.parametrize(("kernel", "arch", "given"), TAKEN, ids=lambda value: value if isinstance(value, str) else "")
def test_the_fastest_kernel_that_can_takes_a_problem(kernel, arch, given):
    assert dispatch_key(given, arch).kernel == kernel


@pytest.mark.parametrize(
    ("family", "arch", "given", "taker", "words"), REFUSED, ids=lambda value: value if isinstance(value, str) else ""
)
def test_what_a_kernel_refuses_another_takes_and_explain_says_why(family, arch, given, taker, words):
    assert dispatch_key(given, arch).kernel == taker
    verdict = next(verdict for verdict in explain(given, arch) if verdict.family == family)
    assert not verdict.taken
    assert words in verdict.reason


class TestSources:
    def test_options_that_are_off_are_no_macros(self):
        assert macros() == {
            "HEAD_DIM": "64",
            "HEAD_DIM_V": "64",
            "BLOCK_M": "32",
            "BLOCK_N": "32",
            "WARPS": "4",
            "SHARED_BYTES": str(((32 + 32) * 65 + 32 * 32) * 4),
            "ELEMENT": "bfloat16_t",
            "KV_ELEMENT": "bfloat16_t",
            "OUT_ELEMENT": "bfloat16_t",
        }

    @pytest.mark.parametrize(
        ("changes", "added"),
        [
            ({"layout": "varlen"}, {"VARLEN": "1"}),
            ({"causal": True}, {"CAUSAL": "1"}),
            ({"window_size": (3, 0)}, {"WINDOW": "1"}),
            (
                {"causal": True, "window_size": (3, 0), "sink_tokens": 2},
                {"CAUSAL": "1", "WINDOW": "1", "SINK_TOKENS": "1"},
            ),
            ({"causal": True, "sink_tokens": 2}, {"CAUSAL": "1"}),
            ({"causal": True, "alignment": "top_left"}, {"CAUSAL": "1", "TOP_LEFT": "1"}),
            ({"alignment": "top_left"}, {}),
            ({"alibi": "batch", "alignment": "top_left"}, {"ALIBI": "1", "TOP_LEFT": "1"}),
            ({"softcap": 3.0}, {"SOFTCAP": "1"}),
            ({"sinks": True}, {"SINKS": "1"}),
            ({"bias": ("float32", True, True)}, {"BIAS_ELEMENT": "float"}),
            ({"dropout_p": 0.5}, {"DROPOUT": "1"}),
            ({"return_lse": True}, {"LSE": "1"}),
            ({"heads_kv": 1}, {}),
        ],
    )
    def test_each_option_adds_its_macro(self, changes, added):
        assert macros(**changes) == {**macros(), **added}

    @pytest.mark.parametrize(("compute", "bits"), [("f32", None), ("tf32", "11"), ("f16", "11"), ("bf16", "8")])
    def test_reduced_precision_of_float32_sets_the_bits_of_operands(self, compute, bits):
        chosen = macros(dtype="float32", kv_dtype="float32", out_dtype="float32", compute=compute)
        assert chosen.get("COMPUTE_BITS") == bits

    def test_keys_that_differ_in_run_time_choices_alone_share_a_source(self):
        sources = {kernel_source(simple_key(problem(heads_kv=heads))) for heads in (1, 2, 3, 6)}
        assert len(sources) == 1

    def test_a_source_holds_its_headers_and_names_its_arch_and_entry(self):
        source = kernel_source(simple_key(BASE, "sm_80"))
        assert source.entry_points == ("forward_simple",)
        assert source.arch == "sm_80"
        assert {"common/params.cuh", "common/mask.cuh", "common/types.cuh", "ptx/types.cuh"} <= set(source.headers)

    def test_the_oracles_key_has_no_source(self):
        key = dispatch_key(problem(direction="backward"), "sm_90a", (REFERENCE,))
        with pytest.raises(InvalidRequest, match="forward_simple"):
            kernel_source(key)


class TestGeometry:
    def test_the_grid_is_flat_and_has_a_block_for_each_tile_of_rows(self):
        key = simple_key(BASE)
        geometry = program_of(BASE, key).parts[-1].geometry
        assert geometry.grid == (4 * 6 * 2, 1, 1)
        assert geometry.block == (128, 1, 1)
        assert geometry.shared_bytes == int(kernel_source(key).macros["SHARED_BYTES"])

    def test_more_than_65535_sequences_heads_or_tiles_still_fit(self):
        for changes in ({"batch": 70_000}, {"heads_q": 70_000, "heads_kv": 1}, {"seqlen_q": 70_000 * 32}):
            large = problem(**changes)
            grid = program_of(large, simple_key(large)).parts[-1].geometry.grid
            assert grid[0] >= 70_000
            assert grid[1:] == (1, 1)

    def test_a_grid_past_its_limit_is_refused_with_a_batch_that_fits(self):
        large = problem(batch=1 << 20, seqlen_q=1 << 20)
        with pytest.raises(Unsupported) as refused:
            program_of(large, simple_key(large)).parts[-1].geometry
        assert refused.value.field == "batch"
        fits = problem(batch=refused.value.nearest, seqlen_q=1 << 20)
        assert program_of(fits, simple_key(fits)).parts[-1].geometry.grid[0] < 1 << 31

    def test_more_work_over_a_cache_than_a_grid_holds_is_refused_by_its_batch(self):
        for splits in (0, 2):
            large = example_problem("float32", 64, layout="cache", batch=1 << 31, num_splits=splits)
            with pytest.raises(Unsupported) as refused:
                program_of(large, dispatch_key(large, "sm_80"))
            assert refused.value.field == "batch"


class TestStandardVariants:
    @pytest.mark.parametrize("arch", ARCHS)
    def test_they_cover_the_usual_dtypes_head_dims_and_masks_once_each(self, arch):
        """None needs more shared memory than its GPU has."""
        keys, limit = standard_variants(arch), shared_mem_limit(capability(arch))
        assert len({kernel_source(key) for key in keys}) == len(keys)
        seen = {(key.dtype, key.head_dim) for key in keys}
        assert set(itertools.product(("float16", "bfloat16"), (64, 80, 96, 128, 192, 256))) <= seen
        assert {key.mask for key in keys} >= {"full", "causal", "causal_window"}
        assert {key.layout for key in keys} == {"dense", "varlen", "paged", "pointers"}
        assert any(ELEMENTS[key.dtype].fp8 for key in keys) == (arch in ("sm_90a", "sm_100a", "sm_120a"))
        for key in keys:
            shared = int(kernel_source(key).macros["SHARED_BYTES"])
            assert shared <= limit
            assert (shared == 0) == (key.kernel in ("decode_plan", "decode_combine"))

    @pytest.mark.parametrize("arch", ARCHS)
    def test_gradients_have_usual_variants_too(self, arch):
        keys = usual_backward_keys(arch)
        assert len({kernel_source(key) for key in keys}) == len(keys)
        names = {"backward_prepare", "backward_mma", "backward_finish"}
        on_hopper = {f"backward_{part}_sm90" for part in ("prepare", "finish")} | {"backward_sm90"}
        assert {key.kernel for key in keys} == (on_hopper if arch == "sm_90a" else names)
        assert {key.head_dim for key in keys} == {64, 128, 256}
