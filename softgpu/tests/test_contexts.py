"""Whole contexts on the driver: what a program sees when the device is lost."""

from __future__ import annotations

from typing import Any

SETTINGS: dict[str, Any] = {"num_blocks": 16, "page_size": 8, "kv_heads": 2, "head_dim": 64, "dtype": "float16"}

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


def test_arrays_of_the_host_leave_the_current_device_of_a_thread_alone(in_a_process: Any) -> None:
    """A step and a prepared request launch on the caller's thread, whose current device may be another."""
    ended = in_a_process(
        BODY
        + f"""
q = q[:, :1]
with ga.open_context("cuda:0") as ctx, ctx.kv_cache(**{SETTINGS!r}, layers=1) as cache:
    seq = cache.create().result(60)
    runtime.setDevice(1)
    print((ctx.flash_attn.forward(q, q, q).result(60).out == q).all(), runtime.getDevice())
    plan = ctx.flash_attn.prepare(ga.FlashForward(q, q, q)).result(60)
    for _ in range(2):
        step = cache.step([seq], heads_q=2, like=dict(q=q, k=q, v=q)).result(60)
        print((step.attend(0, q, q, q) == q).all(), (plan.run(q).out == q).all(), runtime.getDevice())
        print(*step.commit().result(60))
""",
        SOFTGPU_DEVICES="2",
    )
    said = ["True", "1", "True", "True", "1", "1", "True", "True", "1", "2"]
    assert ended.stdout.split() == said, ended.stdout + ended.stderr
