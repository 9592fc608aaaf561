"""A context on a GPU proves its kernels and finds none of them wrong.

GPU_ACTORS_TEST_DEVICE=emulated rehearses these tests where there is no GPU.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gpu_actors as ga
from gpu_actors.testing import check_output

pytestmark = pytest.mark.gpu

DEVICE = os.environ.get("GPU_ACTORS_TEST_DEVICE", "cuda")
ROWS = np.random.default_rng(3).standard_normal((1, 70, 4, 64)).astype(np.float16)


def asked(ctx: ga.GpuContext) -> None:
    """A request of each kind."""
    rows = ROWS
    result = ctx.flash_attn.forward(rows, rows, rows, causal=True, return_lse=True, timeout=300.0).result()
    check_output(result.out, result.lse, rows, rows, rows, causal=True)
    backward = ctx.flash_attn.backward
    backward(rows, rows, rows, rows, result.out, result.lse, causal=True, timeout=300.0).result()
    with ctx.kv_cache(num_blocks=8, page_size=16, kv_heads=4, head_dim=64, dtype="float16") as cache:
        seq = cache.create().result()
        cache.attend(rows[:, :1], [seq], k=rows[:, :20], v=rows[:, :20], rope=ga.Rope(dim=64), timeout=300.0).result()
    ctx.flash_attn.merge([result, result], timeout=300.0).result()


@pytest.mark.timeout(600)
def test_each_kind_of_kernel_is_qualified_and_its_verdict_kept(tmp_path: Path) -> None:
    seen: list[Any] = []
    options: dict[str, Any] = {"qualify": "first-use", "cache_dir": tmp_path, "on_event": seen.append}
    for kept in (False, True):
        with ga.open_context(DEVICE, ga.ContextOptions(**options)) as ctx:
            asked(ctx)
            assert ctx.health().quarantined == ()
        events = [event for event in seen if event.name.startswith("kernel.")]
        assert {event.name for event in events} == {"kernel.qualified"}
        assert {event.fields["kept"] for event in events} == {kept}
        assert len({event.fields["kernel"] for event in events}) >= 5
        seen.clear()
