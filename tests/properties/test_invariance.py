"""A row of an invariant context has the same bits in every request; without the option it has not.

A text is one sequence of rows, keys and values. Its rows are requested whole, in chunks, one by one, beside other
sequences, over pages of any size, after a fork and with a reused prefix. Out and LSE must have the same bits.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from inside.kernels import decode_tiles
from inside.planning import cached
from properties.doors import DOORS
from properties.problems import Array, Problem, Spec, problem_of
from properties.strategies import budget
from properties.texts import (
    CACHED,
    CACHES,
    FORMS,
    FORWARD,
    KINDS,
    RICH,
    SERVINGS,
    SPEC,
    VARIANTS,
    Serving,
    bits,
    differing,
    hold,
    served,
)

import gpu_actors as ga

pytestmark = pytest.mark.timeout(600)  # on a crowded machine: they compile kernels

WAIT = 300.0
DEVICES = (("emulated", "sm_80"), ("emulated", "sm_90a"), ("mock", "sm_90a"))
OPENED = [pytest.param(*names, id=" ".join(names)) for names in DEVICES]


@pytest.fixture(scope="module")
def invariant() -> Iterator[Callable[[str, str], ga.GpuContext]]:
    known: dict[tuple[str, str], ga.GpuContext] = {}
    with contextlib.ExitStack() as stack:

        def find(device: str, arch: str) -> ga.GpuContext:
            if (device, arch) not in known:
                options = ga.ContextOptions(arch=arch, invariant=True)
                known[device, arch] = stack.enter_context(ga.open_context(device, options))
            return known[device, arch]

        yield find


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("device", "arch"), OPENED)
def test_a_row_has_the_same_bits_wherever_it_is_asked_for(invariant: Any, device: str, arch: str, form: str) -> None:
    doors = (*FORWARD, *CACHED, "cudnn") if form == "float16" else (*FORWARD, *CACHED)
    hold(invariant(device, arch), 6, FORMS[form], doors)


# The architecture on which the default run tests a form.
SAMPLED = {form: ("sm_80", "sm_90a")[index % 2] for index, form in enumerate(VARIANTS)}


@pytest.mark.parametrize(
    ("arch", "form"),
    [
        pytest.param(arch, form, marks=() if SAMPLED[form] == arch else (pytest.mark.sweep,))
        for arch in ("sm_80", "sm_90a")
        for form in VARIANTS
    ],
)
def test_each_variant_of_a_kernel_gives_a_row_the_same_bits(invariant: Any, arch: str, form: str) -> None:
    text = VARIANTS[form]
    spec = dataclasses.replace(SPEC, **{**text, "options": {"causal": True, **text["options"]}})
    of_caches = "how" in text
    kinds = [one for one in KINDS if not of_caches or one.door in ("paged", "cache")]
    assert not differing(invariant("emulated", arch), spec, kinds, "paged" if of_caches else "dense")


@pytest.mark.sweep
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("device", "arch"), OPENED)
def test_a_row_has_the_same_bits_with_any_options(invariant: Any, device: str, arch: str) -> None:
    hold(invariant(device, arch), 60, None, (*FORWARD, *CACHED))


@pytest.mark.sweep
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("form", CACHES)
@pytest.mark.parametrize(("device", "arch"), OPENED)
def test_a_row_has_the_same_bits_over_any_cache(invariant: Any, device: str, arch: str, form: str) -> None:
    batches = FORWARD[:2] if form == "8 bits" and arch == "sm_90a" else ()
    hold(invariant(device, arch), 15, CACHES[form], (*batches, "paged", "cache"))


@pytest.mark.sweep
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("bias", [("float32", True, True, True, False), ("bool", True, True, True, True)])
@pytest.mark.parametrize(("device", "arch"), OPENED)
def test_a_row_has_the_same_bits_beside_a_bias(invariant: Any, device: str, arch: str, bias: Any) -> None:
    text = {"dtype": "float16", "dims": (64, 64), "options": {"bias": bias}}
    hold(invariant(device, arch), 15, text, ("dense", "varlen", "paged", "cache"))


@pytest.mark.sweep
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("option", [{"alibi_slopes": "batch", "alibi_signed": True}])
@pytest.mark.parametrize(("device", "arch"), OPENED)
def test_a_row_with_what_only_batches_have_keeps_its_bits(invariant: Any, device: str, arch: str, option: Any) -> None:
    """Options that no kernel over caches has."""
    text = {"dtype": "float16", "dims": (128, 128), "options": {**option, "softmax_scale": 0.5}}
    hold(invariant(device, arch), 15, text, ("dense", "varlen"))


@pytest.mark.sweep
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_a_row_of_a_graph_has_the_same_bits(invariant: Any, arch: str) -> None:
    hold(invariant("emulated", arch), 15, FORMS["float16"], ("graph",))


# Texts in a cache


@st.composite
def lives(draw: st.DrawFn, length: int) -> list[tuple[str, int, int]]:
    """Operations on sequences that hold rows of one text: (verb, which sequence, how many rows)."""
    verbs = st.sampled_from(("attend", "attend", "attend", "fork", "cut", "begin", "together"))
    return draw(st.lists(st.tuples(verbs, st.integers(0, 7), st.integers(1, length)), min_size=4, max_size=12))


def check_life(cache: ga.KvCache, text: Problem, life: list[tuple[str, int, int]], out: Array) -> None:
    """Check that each row has its bits of ``out``, whatever its sequence shares and whatever is beside it."""
    q, k, v = (arrays[0] for arrays in (text.q, text.k, text.v))
    tokens = np.arange(len(q))
    options = {name: value for name, value in text.options.items() if name in DOORS["kv_cache"].options}
    seqs = [cache.create(tokens).result(WAIT)]

    def step(seq: ga.KvSequence, most: int) -> tuple[slice, ga.Reply[ga.AttentionOutput]]:
        begin = cache.length(seq)
        rows = slice(begin, min(len(q), begin + most))
        more = {"k": k[None, rows], "v": v[None, rows], "tokens": [tokens[rows]]}
        return rows, cache.attend(q[None, rows], [seq], **more, **options)

    for verb, which, count in life:
        seq = seqs[which % len(seqs)]
        if verb == "fork":
            seqs.append(cache.fork(seq).result(WAIT))
        elif verb == "begin":  # with pages that other sequences filled
            seqs.append(cache.create(tokens).result(WAIT))
        elif verb == "cut":
            cache.truncate(seq, min(count, cache.length(seq))).result(WAIT)
        else:
            several = seqs if verb == "together" else [seq]
            replies = [step(one, count + index) for index, one in enumerate(several) if cache.length(one) < len(q)]
            for rows, reply in replies:
                assert np.array_equal(bits(reply.result(WAIT).out[0]), bits(out[rows])), (verb, which, count)
    for seq in seqs:
        cache.free(seq).result(WAIT)


@pytest.mark.parametrize(("device", "arch"), OPENED)
def test_a_row_has_the_same_bits_whatever_its_sequence_shares(invariant: Any, device: str, arch: str) -> None:
    ctx = invariant(device, arch)
    pool = {"num_blocks": 400, "kv_heads": 1, "head_dim": 64, "dtype": "float16"}

    @budget(8)
    @given(st.data())
    def check(data: st.DataObject) -> None:
        length = data.draw(st.integers(40, 150))
        window = data.draw(st.sampled_from(((-1, -1), (40, -1))))
        mask: dict[str, Any] = {"causal": True, "window_size": window, "softmax_scale": 0.75}
        seed = data.draw(st.integers(0, 999))
        spec = dataclasses.replace(SPEC, rows=(length,), keys=(length,), options=mask, seed=seed)
        text = problem_of(spec)
        out, _ = served(ctx, spec, text, Serving("dense", 0, length))
        page = data.draw(st.sampled_from((8, 16)))
        # Each text has a new cache: pages are shared by tokens, and equal tokens of two texts have different keys.
        with ctx.kv_cache(page_size=page, **pool) as cache:
            check_life(cache, text, data.draw(lives(length)), out)

    check()


@pytest.mark.parametrize(("device", "arch"), OPENED)
def test_the_layers_of_a_step_have_the_same_bits(invariant: Any, device: str, arch: str) -> None:
    ctx, text = invariant(device, arch), problem_of(SPEC)
    q, k, v = (arrays[0] for arrays in (text.q, text.k, text.v))
    out, _ = served(ctx, SPEC, text, Serving("dense", 0, len(q)))
    spec = {"num_blocks": 40, "page_size": 16, "kv_heads": 1, "head_dim": 64, "dtype": "float16", "layers": 2}
    with ctx.kv_cache(**spec) as cache:
        seqs = [cache.create().result(WAIT) for _ in range(2)]
        for begin, end in ((0, 70), (70, 149), (149, 150)):
            rows, counts = slice(begin, end), [end - begin] * 2
            with cache.step(seqs, heads_q=4, rows=counts).result(WAIT) as step:
                for layer in range(2):
                    twice = (np.concatenate([array[rows]] * 2) for array in (q, k, v))
                    found = step.attend(layer, *twice)
                    assert np.array_equal(bits(found), bits(np.concatenate([out[rows]] * 2)))


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize(
    "mode", [{"arithmetic": "hardware"}, pytest.param({"contraction": True}, marks=pytest.mark.sweep)]
)
def test_a_gpus_arithmetic_keeps_the_bits(arch: str, mode: dict[str, Any]) -> None:
    """Tensor cores' truncated sums, functions with errors, and products that are fused into sums keep the bits."""
    options = ga.ContextOptions(arch=arch, invariant=True, emulation=ga.EmulationOptions(**mode))
    with ga.open_context("emulated", options) as ctx:
        for own in ({"softmax_scale": 0.75}, RICH):
            spec = dataclasses.replace(SPEC, options={"causal": True, **own})
            assert not differing(ctx, spec, [*SERVINGS, Serving("pointers", 149, 150)])


# The test detects seeded bugs


def test_without_the_option_rows_have_other_bits() -> None:
    for arch in ("sm_80", "sm_90a"):
        with ga.open_context("emulated", ga.ContextOptions(arch=arch)) as ctx:
            assert differing(ctx, SPEC, SERVINGS)


def splits_by_count(patch: pytest.MonkeyPatch) -> Spec:
    posed = cached.cached_problem
    patch.setattr(cached, "cached_problem", lambda *given: dataclasses.replace(posed(*given), num_splits=2))
    patch.setattr("gpu_actors.kernels.support._invariant_refusals", lambda problem: ())
    return SPEC


def tiles_by_rows(patch: pytest.MonkeyPatch) -> Spec:
    patch.setattr(decode_tiles, "packed_rows", lambda problem: problem.gqa_ratio * problem.seqlen_q)
    return SPEC


def kernel_by_rows(patch: pytest.MonkeyPatch) -> Spec:
    """Small requests take other kernels: forward_mma has tiles of 32 keys at this head dim, others have 64."""
    patch.setattr("gpu_actors.planning.forward.has_cache_form", lambda problem: problem.seqlen_q < 64)
    return dataclasses.replace(SPEC, dims=(128, 128))


@pytest.mark.parametrize("bug", [splits_by_count, tiles_by_rows, kernel_by_rows])
def test_a_seeded_bug_in_the_choice_of_a_kernel_shows(monkeypatch: pytest.MonkeyPatch, bug: Any) -> None:
    spec = bug(monkeypatch)
    with ga.open_context("emulated", ga.ContextOptions(arch="sm_80", invariant=True)) as ctx:
        assert differing(ctx, spec, SERVINGS)
