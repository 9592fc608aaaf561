"""Score modifications in forward_sm90 on the CPU, against their formulas in NumPy: many tiles, masks, deliveries."""

from __future__ import annotations

import pytest
from cases.score_mods import MODIFICATIONS
from emulated.modified import check_modified, modified_case
from emulated.sweeps import LAUNCHES, launch_of

KERNEL = "forward_sm90"
NAMES = tuple(name for name in MODIFICATIONS if name != "t5 relative bias")  # which is the kernel's own bias
SHAPES = ((1, 1), (70, 31), (113, 203), (300, 520))


def check(name: str, dtype: str, dim: int, shape: tuple[int, int], causal: bool, number: int) -> None:
    case = modified_case(name, dtype, number, dim, *shape, causal)
    blocks = (1, 3, None)[number % 3]
    check_modified(case, causal=causal, kernel=KERNEL, multiprocessors=blocks, seed=number, **launch_of(5 * number))


@pytest.mark.parametrize("causal", [False, True])
def test_a_modification_reads_the_rows_and_keys_that_it_is_given(causal):
    """Tensors of rows and of keys end where the sequence does, which is inside a tile."""
    for number, shape in enumerate(SHAPES):
        check("document mask", "float16", 64, shape, causal, number)


@pytest.mark.sweep
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("dim", [64, 96, 128, 192, 256])
@pytest.mark.parametrize("name", NAMES)
def test_every_modification_with_every_tile(name, dim):
    for number, shape in enumerate(SHAPES):
        for causal in (False, True):
            check(name, "bfloat16" if dim % 128 else "float16", dim, shape, causal, number + dim)


@pytest.mark.sweep
@pytest.mark.timeout(1800)
@pytest.mark.usefixtures("fused_or_not")
@pytest.mark.parametrize("name", ["document mask", "tanh gating"])
def test_every_delivery_and_schedule(name):
    for number in range(len(LAUNCHES)):
        check(name, "bfloat16", 128, (300, 520), bool(number % 2), number)
