"""No result depends on whether the compiler fuses products into the sums that they enter."""

from __future__ import annotations

import numpy as np
import pytest
from cases.steady_scores import check_steady, check_steady_decode
from emulated.forward import qkv
from mutation import hopper as sm90_mutation
from mutation import hopper_mutants as sm90_mutants
from mutation.decode import run_probes as run_decode_probes
from mutation.decode_mutants import DECODE_DEFECTS
from mutation.forward_mutants import FUSED_CORRECTION, Mutant

import gpu_actors as ga
from gpu_actors.testing import check_output

E4M3 = "float8_e4m3fn"
fused = pytest.mark.parametrize("fused", [False, True], ids=["separate", "fused"])


@fused
@pytest.mark.parametrize(
    ("kernel", "dtype"),
    [("forward_mma", "float16"), ("forward_sm90", "bfloat16"), ("forward_sm90", E4M3), ("forward_simple", "float16")],
)
def test_the_lse_does_not_drift_with_the_number_of_keys(kernel: str, dtype: str, fused: bool) -> None:
    check_steady(kernel, dtype, fused=fused)


@fused
def test_the_lse_of_cached_keys_does_not_drift_with_their_number(fused: bool) -> None:
    check_steady_decode(fused=fused)


@pytest.mark.timeout(300)  # clang++ or zig builds the kernel and parts of its own
def test_the_lse_does_not_drift_where_products_are_fused_here_and_there() -> None:
    check_steady("forward_mma", "float16", fused="random")


def correction_of(mutants: tuple[Mutant, ...]) -> Mutant:
    return next(mutant for mutant in mutants if (mutant.old, mutant.new) == FUSED_CORRECTION)


# Of forward_mma, the tests of its defects do that.
def test_a_fused_correction_of_forward_sm90_is_caught(tmp_path) -> None:
    with pytest.raises(AssertionError, match="lse is wrong"):
        sm90_mutation.run_probes(correction_of(sm90_mutants.MUTANTS), tmp_path)


def test_a_fused_correction_of_decode_mma_is_caught(tmp_path) -> None:
    with pytest.raises(AssertionError, match="lse is wrong"):
        run_decode_probes(correction_of(DECODE_DEFECTS), tmp_path)


@fused
def test_a_context_fuses_products_if_it_is_asked_to(fused: bool) -> None:
    """forward_simple sums products in fp32, whose last bits differ then."""
    q, k, v = qkv(16, 40)
    options = ga.ContextOptions(emulation=ga.EmulationOptions(contraction=fused))
    with ga.open_context("emulated", options) as ctx:
        out = ctx.flash_attn.forward(q, k, v).result(120).out
    with ga.open_context("emulated") as ctx:
        separate = ctx.flash_attn.forward(q, k, v).result(120).out
    check_output(out, None, q, k, v)
    assert np.array_equal(out, separate) == (not fused)
