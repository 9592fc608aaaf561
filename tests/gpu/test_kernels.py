"""Every kernel of the dispatch table on a GPU through the public entrance, on the requests of `candidates`."""

from __future__ import annotations

from typing import Any

import pytest
from cases.gpu_candidates import CANDIDATES, REPEATABLE, Candidate
from inside.kernels import FAMILIES

from gpu_actors.errors import Unsupported

pytestmark = pytest.mark.gpu


def kernel_of(context: Any, request: Any) -> str | None:
    """The kernel that would answer, or None."""
    try:
        key = context.flash_attn.inspect_key(request)
    except Unsupported:
        return None
    return str(key.kernel)


@pytest.mark.parametrize("candidate", CANDIDATES, ids=str)
def test_a_candidate_is_answered_right(context: Any, candidate: Candidate) -> None:
    if not candidate.runs_on(context.info.arch):
        pytest.skip(f"{context.info.arch} is below compute capability {candidate.first / 10}")
    asked = candidate.make()
    kernel = kernel_of(context, asked.request)
    if kernel is None:
        with pytest.raises(Unsupported):
            context.flash_attn.submit(asked.request).result(120)
        return
    asked.check(context.flash_attn.submit(asked.request).result(120), kernel)


@pytest.mark.parametrize("candidate", REPEATABLE, ids=str)
def test_a_candidate_is_answered_alike_twice(context: Any, candidate: Candidate) -> None:
    """Two requests have the same bits."""
    if not candidate.runs_on(context.info.arch):
        pytest.skip(f"{context.info.arch} is below compute capability {candidate.first / 10}")
    asked = candidate.make()
    if kernel_of(context, asked.request) is None:
        pytest.skip("no kernel takes it")
    first, second = (context.flash_attn.submit(asked.request).result(120) for _ in range(2))
    for one, other in zip(first, second, strict=True):
        assert (one is None) == (other is None)
        assert one is None or one.tobytes() == other.tobytes()


def test_the_kernels_of_this_architecture_are_all_reached(context: Any) -> None:
    reached = {kernel_of(context, c.make().request) for c in CANDIDATES if c.runs_on(context.info.arch)}
    own = {family.name for family in FAMILIES if reaches(family, context.info.arch)}
    assert own <= reached


def reaches(family: Any, arch: str) -> bool:
    """Whether a family is for this architecture: the sm_90 kernels are for sm_90a alone."""
    return not family.name.endswith("_sm90") or arch == "sm_90a"
