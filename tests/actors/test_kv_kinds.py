"""A request on a cache that repeats an earlier one is bound to that one's plan, not checked and planned again."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import gpu_actors as ga
from gpu_actors.actors import kv_kind


@pytest.mark.parametrize("latent", [False, True], ids=["k and v", "latents"])
def test_requests_of_a_kind_are_posed_once(latent: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    posed: list[str] = []
    pose = kv_kind.pose

    def noted(store: Any, group: Any, message: Any, *others: Any) -> Any:
        posed.append(type(message).__name__)
        return pose(store, group, message, *others)

    monkeypatch.setattr(kv_kind, "pose", noted)
    k, v = np.zeros((1, 1, 1, 32), np.float32), np.zeros((1, 1, 1, 8), np.float32)
    new: dict[str, Any] = {"c_kv": k[..., :24], "k_pe": v} if latent else {"k": k, "v": v}
    spec: dict[str, Any] = {"latent_dim": 24} if latent else {"head_dim_v": 8}
    scale = {"softmax_scale": 0.1}  # a latent cache requires it
    with (
        ga.open_context("mock") as ctx,
        ctx.kv_cache(num_blocks=8, page_size=16, kv_heads=1, head_dim=32, dtype="float32", **spec) as cache,
    ):
        seq = cache.create().result(30.0)
        q = np.zeros((1, 1, 2, 32), np.float32)
        for _ in range(4):
            cache.append([seq], **new).result(30.0)
            cache.attend(q, [seq], **scale).result(30.0)
            cache.attend(q, [seq], **new, **scale).result(30.0)
        assert cache.length(seq) == 8
    assert posed == ["AppendRows", "AttendCache", "AttendCache"]
