"""Whole contexts on the driver: steps that are recorded, and what a program sees when the device is lost."""

from __future__ import annotations

from typing import Any

import numpy as np
from support.kv_cache import wait

import gpu_actors as ga

SETTINGS: dict[str, Any] = {"num_blocks": 16, "page_size": 8, "kv_heads": 2, "head_dim": 64, "dtype": "float16"}


def generate(steps: int, **options: Any) -> tuple[list[np.ndarray], Any]:
    """Decodes two sequences for some steps. Gives the outputs, and how many launches were recorded and replayed."""
    rng, outs = np.random.default_rng(1), []

    def draw(*shape: int) -> np.ndarray:
        return rng.standard_normal((*shape, 64)).astype(np.float16)

    with ga.open_context("cuda", ga.ContextOptions(**options)) as ctx, ctx.kv_cache(**SETTINGS) as cache:
        seqs = [wait(cache.create()) for _ in range(2)]
        wait(cache.append(seqs, draw(12, 2), draw(12, 2), cu_seqlens=np.array([0, 5, 12], np.int32)))
        for _ in range(steps):
            q, k, v = draw(2, 1, 4), draw(2, 1, 2), draw(2, 1, 2)
            outs.append(wait(cache.attend(q, seqs, k=k, v=v, num_splits=2)).out)
        return outs, ctx.actor(ga.KvCacheActor).recording_stats()


def test_recorded_steps_of_decoding_give_what_fresh_launches_give() -> None:
    plain, none = generate(4)
    recorded, stats = generate(4, record_launches=True)
    assert tuple(none) == (0, 0, 0)
    assert stats.recorded + stats.replayed == 4
    assert stats.replayed >= 2, stats
    np.testing.assert_array_equal(recorded, plain)


BODY = """
import gpu_actors as ga
q = np.random.default_rng(0).standard_normal((1, 40, 2, 64)).astype(np.float16)

def say(reply):
    try:
        reply.result(60)
        print("answered")
    except ga.GpuActorsError as error:
        print(type(error).__name__)
"""


def test_a_lost_device_is_told_to_every_request_and_stays_lost(in_a_process: Any) -> None:
    ended = in_a_process(
        BODY
        + """
with ga.open_context("cuda") as ctx:
    say(ctx.flash_attn.forward(q, q, q))
    control.fail_launch(700)
    for reply in [ctx.flash_attn.forward(q, q, q) for _ in range(3)]:
        say(reply)
    say(ctx.flash_attn.forward(q, q, q))
    health = ctx.health()
    print(health.state, health.ready, ctx.generation)
"""
    )
    assert ended.stdout.split() == ["answered", *["ContextLost"] * 4, "failed", "False", "2"], ended.stderr


def test_an_isolated_context_goes_on_in_another_process_after_an_access_out_of_bounds(in_a_process: Any) -> None:
    ended = in_a_process(
        BODY
        + f"""
store = 'extern "C" __global__ void store(float* x, long long i) {{ x[i] = 1; }}'
with ga.open_context("cuda", isolation="process") as ctx:
    first, pid = ctx.flash_attn.forward(q, q, q).result(60).out, ctx.pid
    cache = ctx.kv_cache(**{SETTINGS!r}).__enter__()
    kernel = ctx.kernel(store, "store").result(60)
    say(kernel.launch(1, 1, (np.zeros(4, np.float32), np.int64(1 << 40))))
    say(cache.create())
    say(kernel.launch(1, 1, (np.zeros(4, np.float32), np.int64(0))))
    again = ctx.flash_attn.forward(q, q, q).result(60).out
    print((again == first).all(), ctx.pid != pid, ctx.generation)
    with ctx.kv_cache(**{SETTINGS!r}) as another:
        say(another.create())
    kernel = ctx.kernel(store, "store").result(60)
    say(kernel.launch(1, 1, (np.zeros(4, np.float32), np.int64(0))))
"""
    )
    said = ["ContextLost", "StaleBuffer", "StaleBuffer", "True", "True", "2", "answered", "answered"]
    assert ended.stdout.split() == said, ended.stderr
