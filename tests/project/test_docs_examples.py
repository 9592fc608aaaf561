"""Every Python example of README and docs runs unchanged: page by page, from the top, with only the page's names.

An example that needs more than the tests' extra brings says so in its first line, "# needs torch", "# needs jax" or
"# needs ray"; tests/interop and tests/on_ray run those.
"""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.docs import PAGES, examples, run_example, wants_torch
from support.service import REPOSITORY

import gpu_actors as ga
from gpu_actors import errors

ELSEWHERE = {"docs/kernel_guide.md": "tests/project/test_docs_kernel_guide.py"}
INTEROP = {
    "docs/jax.md": "tests/interop/test_docs_torch.py",
    "docs/ray.md": "tests/on_ray/test_ray_docs.py",
    "docs/training.md": "tests/interop/test_docs_torch.py",
    "docs/transformers.md": "tests/interop/test_docs_torch.py",
}


def name(page: Path) -> str:
    return page.relative_to(REPOSITORY).as_posix()


def sources(page: Path) -> list[str]:
    return [source for source in examples(page) if not wants_torch(source)]


@pytest.mark.parametrize("page", [page for page in PAGES if sources(page) and name(page) not in ELSEWHERE], ids=name)
def test_the_examples_of_the_page_run(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    for number, source in enumerate(sources(page), 1):
        run_example(source, names, f"{name(page)}, example {number}")
    if check := CHECKS.get(name(page)):
        check(names, capsys.readouterr().out)


def decoding(names: dict[str, Any], out: str) -> None:
    assert "(1, 40, 8, 64) 40\n(2, 1, 8, 64) KvCacheStats(blocks=64, free_blocks=60" in out
    assert "(2, 1, 128) 23\n" in out

    async def twice() -> list[int]:
        async with (
            ga.open_context("mock") as ctx,
            ctx.kv_cache(num_blocks=8, page_size=8, kv_heads=1, head_dim=8, dtype="float32") as cache,
        ):
            tokens, k = list(range(20)), np.ones((20, 1, 8), np.float32)
            return [(await names["prefill"](cache, tokens, k, k)).cached for _ in range(2)]

    assert asyncio.run(twice()) == [0, 16]


def every_error(names: dict[str, Any], out: str) -> None:
    assert sorted(names["met"]) == sorted(set(errors.__all__) - {"GpuActorsError", "RequestError"})


def graphs(names: dict[str, Any], out: str) -> None:
    assert "struct ScoreMod" in out


CHECKS = {"docs/decoding.md": decoding, "docs/errors.md": every_error, "docs/graphs.md": graphs}


def test_no_example_is_forgotten() -> None:
    assert all((REPOSITORY / test).is_file() for test in ELSEWHERE.values())
    for page in PAGES:
        fences = re.findall(r"^\s*```\s*(?:py|python|pycon|python3)\b.*$", page.read_text(encoding="utf-8"), re.M)
        assert len(fences) == len(examples(page)), f"{name(page)} has an example that is not found"


def test_examples_that_need_torch_are_marked_and_run_elsewhere() -> None:
    marked = {name(page) for page in PAGES if any(map(wants_torch, examples(page)))}
    assert marked == set(INTEROP)
    assert all(f'"{page}"' in (REPOSITORY / run).read_text(encoding="utf-8") for page, run in INTEROP.items())
    for page in PAGES:
        for source in sources(page):
            assert not re.search(r"^(?:import|from) (?:torch|transformers|jax|ray)\b", source, re.M), name(page)
