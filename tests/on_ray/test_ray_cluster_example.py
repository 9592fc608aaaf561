"""examples/ray_cluster.py: a folder over two workers, and a text whose keys are on both."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gpu_actors as ga

pytest.importorskip("ray")

import ray_cluster

from gpu_actors.embedding import Embedder
from gpu_actors.interop.ray import ray_pool

TEXTS = ["A worker is lost, and another one answers.", "Cats sleep all day.", "Bread needs flour and salt."]


def test_the_example_embeds_a_folder_and_generates(
    cluster: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for number, text in enumerate(TEXTS):
        (tmp_path / f"{number}.txt").write_text(f"{text}\n")
    assert ray_cluster.main([str(tmp_path), "--tokens", "6"]) == 0
    said = capsys.readouterr().out
    assert re.search(r"^2 workers: worker-1 on mock.*, worker-2 on mock", said)
    assert "3 passages embedded" in said
    assert said.splitlines()[2].endswith(TEXTS[0])
    drift = re.search(r"largest difference of a logit: (\S+)", said)
    assert drift is not None
    assert 0 < float(drift[1]) < 1e-4


async def test_the_vectors_are_those_of_one_context(cluster: Any) -> None:
    async with ga.open_context("mock") as ctx:
        expected = (await (await Embedder.open(ctx)).embed(TEXTS)).vectors
    async with ray_pool(2, device="mock") as pool:
        found = await ray_cluster.embed(pool, TEXTS)
        assert [worker.requests for worker in pool.stats().workers.values()] == [1, 1]
    np.testing.assert_allclose(found, expected, atol=1e-6)


def test_a_folder_without_text_and_a_cluster_without_room(
    cluster: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="has no text"):
        ray_cluster.main([str(tmp_path)])
    (tmp_path / "a.txt").write_text(TEXTS[0])
    assert ray_cluster.main([str(tmp_path), "--device", "cuda:0", "--start-timeout", "0.5"]) == 1
    said = capsys.readouterr().err
    assert "StartTimeout: 2 Ray workers with, each, CPU 1, GPU 1 did not start within 0.5 s" in said
