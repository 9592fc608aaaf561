"""Dense requests of few rows, whose rows are packed as over a cache: the choice, and the kernels' answers."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import numpy as np
import pytest
from cases.poison import poison_unseen
from emulated import contraction
from emulated.decode import allocate, device_of, kernel_of
from emulated.forward import problem_of
from emulated.memory import run_launch
from emulated.sweeps import LAUNCHES
from inside.attention import ScoreMod
from inside.devices import Launch, OutputSpec
from inside.testing import FEATURES
from support.gate import kernel_source

from gpu_actors import AttentionProblem
from gpu_actors.kernels.dispatch import FAMILIES, WITHOUT_CHUNKS, WITHOUT_TMA, dispatch_key
from gpu_actors.kernels.few_rows import (
    Packing,
    as_cache,
    packed_program,
    packing_of,
)
from gpu_actors.kernels.program import NO_VALUES, Target
from gpu_actors.kernels.support import example_problem
from gpu_actors.testing import ForwardCase, check_output, random_forward

ARCHES = ("sm_80", "sm_90a")
SHARED = tuple(set(FEATURES) - {"dropout"})


def dense(
    rows: int = 1,
    keys: int = 4096,
    *,
    batch: int = 1,
    heads: tuple[int, int] = (8, 1),
    dim: int = 128,
    dtype: str = "bfloat16",
    **fields: Any,
) -> AttentionProblem:
    sizes = {"seqlen_q": rows, "seqlen_k": keys, "total_q": batch * rows, "total_k": batch * keys}
    return example_problem(dtype, dim, batch=batch, heads_q=heads[0], heads_kv=heads[1], **sizes | fields)


def weighed(problem: AttentionProblem, arch: str = "sm_90a", **more: Any) -> Packing | None:
    return packing_of(problem, dispatch_key(problem, arch), more.pop("families", FAMILIES), **more)


# The choice

# Architecture, changes of a problem, and the kernel and packed rows of its tile; None: tiles of one head's rows.
CHOICES: list[tuple[str, dict[str, Any], tuple[str, int] | None]] = [
    ("sm_90a", {}, ("decode_mma", 16)),
    ("sm_80", {}, ("decode_mma", 16)),
    ("sm_90a", {"rows": 4}, ("decode_sm90", 64)),
    ("sm_80", {"rows": 4}, ("decode_mma", 32)),
    ("sm_90a", {"rows": 63}, ("decode_sm90", 128)),
    ("sm_80", {"rows": 63}, ("decode_mma", 64)),
    ("sm_90a", {"rows": 64}, None),
    # Few keys are not split, but one head's rows fill less of a tile than a group's.
    ("sm_90a", {"keys": 256}, ("decode_mma", 16)),
    ("sm_80", {"keys": 256}, ("decode_mma", 16)),
    ("sm_90a", {"keys": 256, "heads": (8, 8)}, None),
    ("sm_80", {"keys": 256, "heads": (8, 8)}, None),
    # One head a group: keys are split if heads are few, and not if they are many.
    ("sm_90a", {"rows": 32, "heads": (32, 32)}, ("decode_sm90", 64)),
    ("sm_80", {"rows": 32, "heads": (32, 32)}, ("decode_mma", 32)),
    ("sm_90a", {"rows": 32, "heads": (32, 32), "batch": 64}, None),
    ("sm_80", {"rows": 1, "heads": (32, 32), "batch": 64}, None),
    # Many heads a group: fewer tiles read the same keys.
    ("sm_90a", {"heads": (32, 2), "batch": 64}, ("decode_sm90", 64)),
    ("sm_80", {"heads": (32, 2), "batch": 64}, ("decode_mma", 16)),
    # A window leaves too few keys to split.
    ("sm_90a", {"heads": (8, 8)}, ("decode_mma", 16)),
    ("sm_90a", {"heads": (8, 8), "window_size": (200, 0)}, None),
    ("sm_90a", {"dim": 256}, ("decode_mma", 16)),
    ("sm_90a", {"dim": 64, "rows": 8, "causal": True}, ("decode_sm90", 64)),
    ("sm_90a", {"dtype": "float16", "out_dtype": "float32"}, ("decode_mma", 16)),
    ("sm_90a", {"dtype": "float8_e4m3fn"}, ("decode_mma", 16)),
    ("sm_90a", {"dtype": "float8_e5m2", "rows": 4, "descales": True}, ("decode_sm90", 64)),
    ("sm_90a", {"bias": ("bool", True, True), "rows": 4}, ("decode_mma", 32)),
]


@pytest.mark.parametrize(("arch", "fields", "wanted"), CHOICES, ids=str)
def test_rows_are_packed_by_flash_attentions_rule(arch, fields, wanted):
    found = weighed(dense(**fields), arch)
    assert found is None or found.reason
    assert ((found.key.kernel, found.key.row_tile) if found is not None and found.taken else None) == wanted, found


LEFT: list[dict[str, Any]] = [
    {"dropout_p": 0.1},
    {"score_mod": ScoreMod("")},
    {"alibi": "heads", "alibi_signed": True},
    {"q_positions": 1},
    {"k_positions": 2},
    {"dropout_heads": 16, "dropout_p": 0.1},
    {"score_max": True},
    {"causal": True, "alignment": "top_left"},
    {"alibi": "batch", "alignment": "top_left"},
    {"attention_chunk": 64, "alignment": "top_left"},
    {"layout": "varlen"},
    {"rows": 0},
    {"keys": 0, "return_lse": True},
    {"batch": 0},
    {"dtype": "float32"},
    {"dtype": "float32", "compute": "tf32"},
    {"dim": 20},
    {"softmax_scale": -1.0},
]


@pytest.mark.parametrize("fields", LEFT, ids=str)
def test_what_packed_rows_do_not_have_stays_where_it_is(fields):
    for arch in ARCHES:
        assert weighed(dense(**fields), arch) is None


@pytest.mark.parametrize(
    "fields",
    [
        {"alignment": "top_left"},  # nothing in this request counts from the diagonal
        {"window_size": (3000, 5), "sink_tokens": 3},
        {"softcap": 20.0, "sinks": True},
        {"alibi": "batch", "bias": ("bfloat16", False, True)},
    ],
    ids=str,
)
def test_options_that_both_have_are_packed(fields):
    for arch in ARCHES:
        found = weighed(dense(rows=3, **fields), arch)
        assert found is not None
        assert found.taken
        assert (found.key.layout, found.key.alignment) == ("cache", "bottom_right")


def test_operands_that_tma_cannot_move_leave_the_kernels_that_need_it():
    assert weighed(dense(rows=4), families=WITHOUT_TMA).key.kernel == "decode_mma"
    assert weighed(dense(rows=4), families=WITHOUT_CHUNKS) is None, "decode_simple is for what tensor cores do not take"


def test_a_gradient_and_a_request_over_a_cache_are_left_alone():
    for problem in (dense(direction="backward"), as_cache(dense())):
        assert weighed(problem) is None


def test_the_devices_multiprocessors_decide():
    """A device of unknown size counts as that of the data sheet."""
    problem = dense(rows=16, heads=(8, 8), keys=1024)
    assert weighed(problem).taken
    assert not weighed(problem, multiprocessors=8).taken
    for arch, count in (("sm_80", 108), ("sm_90a", 132)):
        assert weighed(dense(batch=20), arch) == weighed(dense(batch=20), arch, multiprocessors=count)


def test_the_reason_has_the_numbers_of_the_rule():
    assert weighed(dense()).reason == (
        "rows are packed by FlashAttention's rule: num_splits is 55; "
        "in forward_sm90 one head's rows fill 1% of tiles of 128, those of a group 6%"
    )
    tiled = weighed(dense(heads=(8, 8), keys=256)).reason
    assert tiled.startswith("rows stay in tiles by FlashAttention's rule: num_splits is 1; ")
    assert weighed(dense(), asked=False).reason == "pack_gqa=False: rows stay in tiles"


# The kernels


def run(case: ForwardCase, arch: str, *, multiprocessors: int = 3, **emulation: Any) -> tuple[Any, Any, str]:
    """(out, lse, kernel) of packed rows, even if the rule would not pack them."""
    options = {name: value for name, value in case.options.items() if name != "dropout_seed"}
    problem = problem_of(*case.inputs, **options)
    found = weighed(problem, arch)
    assert found is not None
    device = device_of(arch, **{"arithmetic": contraction.arithmetic(), **emulation})
    program = packed_program(problem, found.key, Target(multiprocessors, device.encode_tensor_map))
    arrays = {name: value for name, value in options.items() if isinstance(value, np.ndarray)}
    inputs = dict(zip("qkv", case.inputs, strict=True)) | arrays
    outputs = {
        "out": OutputSpec((*case.q.shape[:-1], problem.head_dim_v), problem.out_dtype),
        "lse": OutputSpec(problem.lse_shape, "float32"),
    }
    steps = program.steps(tuple(kernel_of(device, kernel_source(part)) for part in program.keys), NO_VALUES)
    results = run_launch(device, Launch(found.key, inputs, outputs, lambda _: {}, steps, program.scratch))
    return results["out"], results["lse"], found.key.kernel


def check(case: ForwardCase, arch: str, **launch: Any) -> str:
    out, lse, kernel = run(case, arch, **launch)
    check_output(out, lse, *case.inputs, repro=case.repro, **case.options)
    return kernel


def few_rows(seed: int, features: Any = (), always: Any = (), **choices: Any) -> ForwardCase:
    """A dense case of 1 to 63 rows and 1 to 16 heads a KV head, in lengths that no tile divides."""
    rng = np.random.default_rng([seed, 7])
    group, heads_kv = int(rng.integers(1, 17)), int(rng.integers(1, 3))
    rows = int(rng.integers(1, 64 if seed % 2 else 9))
    given = {
        "dtype": ("float16", "bfloat16")[seed % 2],
        "varlen": False,
        "seqlens": (rows, int(rng.integers(1, 400))),
        "heads": (group * heads_kv, heads_kv),
        "head_dim": 64,
    }
    return poison_unseen(random_forward(seed, features=features, always=always, **given | choices))


VARIANT = ("causal", "window", "sink_tokens")  # options of the variant that the default run compiles


@pytest.mark.parametrize("arch", ARCHES)
def test_a_sample_agrees_with_the_oracle(arch):
    for seed, case in enumerate((few_rows(1, always=VARIANT, batch=1), few_rows(7, always=VARIANT))):
        delivery, schedule = LAUNCHES[seed * 5 % len(LAUNCHES)]
        check(case, arch, multiprocessors=1 + seed, delivery=delivery, schedule=schedule, seed=seed)
    for rows, keys in ((40, 3), (33, 1)):  # the first rows see no key
        check(few_rows(1, always=VARIANT, seqlens=(rows, keys), heads=(4, 2)), arch)


@pytest.mark.parametrize("arch", ARCHES)
def test_keys_and_values_are_read_where_they_lie(arch):
    """Heads lie before rows, with gaps between sequences, and values apart from keys."""
    case = few_rows(5, always=VARIANT, seqlens=(9, 300), heads=(8, 2), batch=2)
    memory = allocate((2, 3, 2, 310, 64), "bfloat16")
    memory[...] = np.nan
    views = []
    for side, array in enumerate((case.k, case.v)):
        view = memory[side, :2, :, 4:304].swapaxes(1, 2)
        view[...] = array
        views.append(view)
    moved = dataclasses.replace(case, k=views[0], v=views[1])
    for one, other in zip(run(moved, arch)[:2], run(case, arch)[:2], strict=True):
        np.testing.assert_array_equal(one, other)
    check(moved, arch)


@pytest.mark.sweep
@pytest.mark.usefixtures("fused_or_not")
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("arch", ARCHES)
def test_every_option_of_both_agrees_with_the_oracle(arch):
    """Each dtype and input kind, head dims other than 64, and drawn options of packed rows."""
    kernels = set()
    for seed in range(60):
        delivery, schedule = LAUNCHES[seed % len(LAUNCHES)]
        choices: dict[str, Any] = {"head_dim": (64, 128, 40, 96, 256)[seed % 5], "features": SHARED}
        if arch == "sm_90a" and seed % 4 == 3:
            eighths = {"dtype": ("float8_e4m3fn", "float8_e5m2")[seed // 4 % 2], "head_dim": (64, 128)[seed // 8 % 2]}
            choices = eighths | {"features": tuple(set(SHARED) - {"bias"})}  # with a bias some go to forward_simple
        case = few_rows(seed, **choices)
        kernels.add(check(case, arch, multiprocessors=1 + seed % 5, delivery=delivery, schedule=schedule, seed=seed))
    assert kernels == ({"decode_mma", "decode_sm90"} if arch == "sm_90a" else {"decode_mma"})


@pytest.mark.sweep
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("arch", ARCHES)
def test_the_grid_of_groups_rows_and_masks_agrees_with_the_oracle(arch):
    masks = ((), ("causal",), ("causal", "window"), ("window", "sink_tokens"))
    for seed, (group, rows, always) in enumerate(itertools.product((1, 2, 3, 6, 8, 16), (1, 2, 17, 63), masks)):
        keys = (1, 63, 130, 517)[seed % 4]
        check(few_rows(seed | 1, always=always, heads=(group, 1), seqlens=(rows, keys)), arch, seed=seed)
