"""Every Python example of README and docs runs, page by page, with the names that its page takes for given."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from docs_support import PAGES, examples, run_example, wants_torch
from service_support import REPOSITORY, rows

import gpu_actors as ga
from gpu_actors.testing import FaultPlan, check_gradients, random_backward

Names = dict[str, Any]


@contextmanager
def bare() -> Iterator[Names]:
    yield {}


@contextmanager
def service() -> Iterator[Names]:
    """What most pages take for given: the package, an open context, and operands."""
    with ga.open_context("mock") as ctx:
        yield {"ga": ga, "pytest": pytest, "ctx": ctx, "q": rows(4), "k": rows(4), "v": rows(4)}


@contextmanager
def filled_cache() -> Iterator[Names]:
    with (
        ga.open_context("mock") as ctx,
        ctx.kv_cache(num_blocks=8, page_size=8, kv_heads=1, head_dim=128, dtype="float32") as cache,
    ):
        sequences = [cache.create().result(), cache.create().result()]
        q, k, v = np.ones((3, 5, 1, 128), np.float32)
        ends = np.array([0, 2, 5], np.int32)
        yield {"ga": ga, "cache": cache, "sequences": sequences, "q": q, "k": k, "v": v, "ends": ends}


@contextmanager
def faulty() -> Iterator[Names]:
    with service() as names:
        yield names | {"FaultPlan": FaultPlan}


@contextmanager
def learning() -> Iterator[Names]:
    with service() as names:
        names |= {"step": 3, "dout": rows(4)}
        yield names | {"random_backward": random_backward, "check_gradients": check_gradients}


KERNEL = """
#include "ptx/types.cuh"
struct Params { float* x; int n; };
extern "C" __global__ void entry(const __grid_constant__ Params params) {
  if (blockIdx.x == 0 && blockIdx.y == 0) params.x[threadIdx.x] = float(params.n);
}
"""


@contextmanager
def own_kernel() -> Iterator[Names]:
    Path("kernel.cu").write_text(KERNEL)
    yield {"Path": Path, "struct": struct, "array": np.zeros(128, np.float32), "n": 7}


SETTINGS: dict[str, Callable[[], AbstractContextManager[Names]]] = {
    "README.md": bare,
    "docs/actors.md": bare,
    "docs/append.md": filled_cache,
    "docs/kernels.md": service,
    "docs/testing.md": faulty,
    "docs/tracing.md": service,
    "docs/training.md": learning,
    "kernels_cu/emulation/README.md": own_kernel,
}
ELSEWHERE = {
    "docs/decoding.md": "tests/test_docs_decoding.py",
    "docs/graphs.md": "tests/test_docs_graphs.py",
    "docs/transformers.md": "tests/interop/test_docs_torch.py",
}


@pytest.mark.parametrize("page", SETTINGS)
def test_the_examples_of_the_page_run(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    sources = [source for source in examples(REPOSITORY / page) if not wants_torch(source)]
    assert sources
    with SETTINGS[page]() as names:
        for number, source in enumerate(sources, 1):
            run_example(source, names, f"{page}, example {number}")


def test_no_page_with_examples_is_forgotten() -> None:
    found = {page.relative_to(REPOSITORY).as_posix() for page in PAGES if examples(page)}
    assert found == set(SETTINGS) | set(ELSEWHERE)
    assert all((REPOSITORY / test).is_file() for test in ELSEWHERE.values())
