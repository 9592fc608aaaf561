"""The same requests over a context in this process and over one in a child process: equal answers, equal errors."""

from __future__ import annotations

import asyncio
import re
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from fakes.fault_injector import FailingActor, FaultInjector
from inside.kv import requests
from support.service import eventually

import gpu_actors as ga

Ask = Callable[[ga.GpuContext], Any]

CACHE: dict[str, Any] = {"num_blocks": 16, "page_size": 8, "kv_heads": 2, "head_dim": 16, "dtype": "float32"}


def arrays(shape: tuple[int, ...], dtype: Any = np.float32, seed: int = 0) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def qkv(dtype: Any = np.float32, rows: int = 24) -> list[np.ndarray[Any, Any]]:
    return [arrays((2, rows, heads, 16), dtype, heads) for heads in (4, 2, 2)]


def forward(dtype: Any = np.float32, rows: int = 24, **options: Any) -> Ask:
    q, k, _ = qkv(dtype, rows)
    return lambda ctx: ctx.flash_attn.forward(q, k, arrays(k.shape, dtype, 9), **options).result(30.0)


def strided(ctx: ga.GpuContext) -> Any:
    fused = arrays((2, 640, 3, 2, 16))
    q, k, v = fused[:, ::-2, 0], fused[:, :, 1], fused[:, :, 2].transpose(1, 0, 2, 3).transpose(1, 0, 2, 3)
    return ctx.flash_attn.forward(q, k, v, return_lse=True).result(30.0)


def backward(ctx: ga.GpuContext) -> Any:
    q, k, v = qkv()
    found = ctx.flash_attn.forward(q, k, v, causal=True, return_lse=True).result(30.0)
    return ctx.flash_attn.backward(q, q, k, v, found.out, found.lse, causal=True).result(30.0)


def varlen(ctx: ga.GpuContext) -> Any:
    q, ends = arrays((20, 2, 16)), np.array([0, 5, 5, 20], np.int32)
    return ctx.flash_attn.forward(q, q, q, cu_seqlens_q=ends, cu_seqlens_k=ends, return_lse=True).result(30.0)


def paged(ctx: ga.GpuContext) -> Any:
    pages, table = arrays((6, 8, 2, 16)), np.array([[0, 2], [5, 1]], np.int32)
    q, lengths = arrays((2, 1, 4, 16)), np.array([9, 16], np.int32)
    return ctx.flash_attn.paged_forward(q, pages, pages, cache_seqlens=lengths, block_table=table).result(30.0)


def decode(ctx: ga.GpuContext) -> Any:
    caches = [arrays((2, 32, 16), seed=seed) for seed in (1, 2)]
    return ctx.flash_attn.decode(arrays((2, 4, 16)), caches, caches, 7).result(30.0)


def mha(ctx: ga.GpuContext) -> Any:
    params = ga.AttentionParams(2, 24, 24, 4, 2, 16, ga.Mask.causal())
    q, k, v = (array.transpose(0, 2, 1, 3) for array in qkv())
    found = ctx.cudnn.mha_forward(params, q, k, v, return_stats=True).result(30.0)
    return found, ctx.cudnn.mha_backward(params, q, k, v, found.out, q, found.stats).result(30.0)


def graph(ctx: ga.GpuContext) -> Any:
    made = ga.OperationGraph()
    q, k, v = (made.tensor(uid=uid, dims=(1, 2, 8, 16), dtype="float32") for uid in (1, 2, 3))
    scores = made.tanh(made.matmul(q, made.transpose(k)) / 30.0) * 30.0
    weights, stats = made.softmax_with_stats(made.mask(scores, ga.Mask.causal()))
    made.output(made.matmul(weights, v), uid=4, dtype="float32")
    made.output(stats, uid=5)
    return ctx.cudnn.execute(made, {uid: arrays((1, 2, 8, 16), seed=uid) for uid in (1, 2, 3)}).result(30.0)


def cache(ctx: ga.GpuContext) -> Any:
    row = arrays((3, 2, 16))
    with ctx.kv_cache(**CACHE) as kept:
        seq = kept.create(tokens=list(range(16))).result(30.0)
        length = kept.append(seq, row, row, tokens=[0, 1, 2]).result(30.0)
        fork = kept.fork(seq).result(30.0)
        attended = kept.attend(arrays((2, 3, 4, 16)), [seq, fork], k=row[None].repeat(2, 0), v=row[None].repeat(2, 0))
        lengths = [kept.length(seq), kept.length(fork)]
        out = attended.result(30.0).out
        kept.truncate(seq, 2).result(30.0)
        kept.free(fork).result(30.0)
        return length, lengths[0] >= 3, out, kept.length(seq), kept.stats(), fork.cached


def steps(layers: int = 3, begin: Any = (), rows: Any = 2, **changes: Any) -> Ask:
    """Two steps over a cache of several layers, the second with ``out``. begin: options of both."""
    latent = changes.get("latent_dim", 0)
    names, widths = (("c_kv", "k_pe"), (latent, 64)) if latent else (("k", "v"), (16, 16))
    leading = (2, rows) if isinstance(rows, int) else (sum(rows),)
    spec = {**CACHE, **changes}

    def new(leading: tuple[int, ...], seed: int) -> dict[str, Any]:
        shapes = [(*leading, spec["kv_heads"], width) for width in widths]
        return {
            name: arrays(shape, seed=seed + index)
            for index, (name, shape) in enumerate(zip(names, shapes, strict=True))
        }

    def ask(ctx: ga.GpuContext) -> Any:
        with ctx.kv_cache(**spec, layers=layers) as kept:
            seqs = [kept.create().result(30.0) for _ in range(2)]
            kept.append(seqs, **new((layers, 2, 5) if layers > 1 else (2, 5), 1)).result(30.0)
            outs: list[Any] = []
            for number in range(2):
                step = kept.step(seqs, heads_q=4, rows=rows, **dict(begin)).result(30.0)
                for layer in range(layers):
                    q = arrays((*leading, 4, sum(widths) if latent else 16), seed=layer)
                    out = np.zeros((*leading, 4, latent or 16), np.float32) if number else None
                    outs.append(step.attend(layer, q, out=out, **new(leading, 7 * layer)))
                    assert out is None or outs[-1] is out
                outs.append((step.lengths, step.commit().result(30.0)))
            return outs, [kept.length(seq) for seq in seqs], kept.stats()

    return ask


def wrong_layer(**changes: Any) -> Ask:
    """One layer of a step whose arguments are not what the step was begun for."""
    arguments: dict[str, Any] = {"layer": 1, "q": arrays((1, 1, 4, 16)), "k": arrays((1, 1, 2, 16))}

    def ask(ctx: ga.GpuContext) -> Any:
        with ctx.kv_cache(**CACHE, layers=2) as kept:
            seq = kept.create().result(30.0)
            with kept.step([seq], heads_q=4).result(30.0) as step:
                return step.attend(**{**arguments, "v": arguments["k"], **changes})

    return ask


def full_cache(ctx: ga.GpuContext) -> Any:
    with ctx.kv_cache(**CACHE) as kept:
        seq = kept.create().result(30.0)
        row = arrays((200, 2, 16))
        return kept.append(seq, row, row).result(30.0)


def freed(ctx: ga.GpuContext) -> Any:
    with ctx.kv_cache(**CACHE) as kept:
        seq = kept.create().result(30.0)
        kept.free(seq).result(30.0)
        return kept.length(seq)


def closed_cache(ctx: ga.GpuContext) -> Any:
    with ctx.kv_cache(**CACHE) as kept:
        pass
    return kept.stats()


def given_out(ctx: ga.GpuContext) -> Any:
    q, k, v = qkv(rows=300)
    small, large, shared = np.zeros((2, 4, 4, 16), np.float32), np.zeros_like(q), ctx.empty(q.shape)
    replies = [
        ctx.flash_attn.forward(q[:, :4], k, v, out=small),
        ctx.flash_attn.forward(q, k, v, out=large[:, ::-1]),
        ctx.flash_attn.forward(q, k, v, out=shared),
    ]
    outs = [reply.result(30.0).out for reply in replies]
    return [outs[0] is small, outs[1].base is large, outs[2] is shared], small, large, shared


def own_actor(ctx: ga.GpuContext) -> Any:
    reply = ctx.actor(FaultInjector).submit(("echo", {"a": arrays((3, 4)), "b": [np.arange(5), "text", (1, None)]}))
    return reply.result(30.0)


def priorities(ctx: ga.GpuContext) -> Any:
    done: list[int] = []
    actor = ctx.actor(FaultInjector)

    def queued() -> int:
        return ctx.stats()[FaultInjector.label].queued

    with tempfile.TemporaryDirectory() as folder:
        gate = Path(folder, "open")
        first = actor.submit(("until", str(gate)))
        eventually(Path(folder, "begun").exists)  # otherwise the actor may take the next request with it
        replies = [actor.submit(("echo", priority), priority=priority) for priority in (1, 3, 2)]
        for reply in replies:
            reply.add_done_callback(lambda told: done.append(told.result()))
        eventually(lambda: queued() == len(replies))
        gate.touch()
        for reply in (first, *replies):
            reply.result(30.0)
    return done


REQUESTS: dict[str, Ask] = {
    "float32": forward(return_lse=True),
    "float16": forward(np.float16, causal=True),
    "bfloat16": forward(ml_dtypes.bfloat16, softcap=3.0, window_size=(4, 0)),
    "fp8": forward(ml_dtypes.float8_e4m3fn, softmax_scale=0.5),
    "float64": forward(np.float64, rows=200, dropout_p=0.3, dropout_seed=7),
    "options": forward(alibi_slopes=np.ones(4, np.float32), sinks=np.zeros(4, np.float32), alignment="top_left"),
    "bias": forward(bias=arrays((1, 1, 24, 24))),
    "strided": strided,
    "backward": backward,
    "varlen": varlen,
    "no rows": lambda ctx: ctx.flash_attn.forward(*(arrays((1, 0, 2, 16)) for _ in range(3))).result(30.0),
    "one array thrice": lambda ctx: ctx.flash_attn.forward(*[arrays((1, 8, 2, 16))] * 3).result(30.0),
    "paged": paged,
    "decode": decode,
    "mha": mha,
    "graph": graph,
    "cache": cache,
    "steps": steps(),
    "steps of lists": steps(rows=[3, 0]),
    "steps of one layer": steps(1),
    "steps with options": steps(
        begin={
            "softmax_scale": 0.3,
            "rope": ga.Rope(dim=16),
            "sinks": arrays((4,)),
            "layer_options": {1: {"window_size": (2, 0), "sinks": None}},
        }
    ),
    "steps of latents": steps(
        begin={"softmax_scale": 0.1}, kv_heads=1, head_dim=512 + 64, latent_dim=512, num_blocks=4
    ),
    "steps of large rows": steps(rows=20),
    "steps like": steps(begin={"like": {"q": arrays((2, 2, 4, 16)), "out": arrays((2, 2, 4, 16))}}),
    "out": given_out,
    "own actor": own_actor,
    "priorities": priorities,
    "probe": lambda ctx: ctx.probe(30.0).result(),
    "inspect_key": lambda ctx: ctx.flash_attn.inspect_key(ga.FlashForward(*qkv(np.float16))),
    "info": lambda ctx: ctx.info,
    "generation": lambda ctx: ctx.generation,
    "labels": lambda ctx: list(ctx.stats()),
}

REFUSALS: dict[str, Ask] = {
    "shapes": lambda ctx: ctx.flash_attn.forward(arrays((1, 4, 2, 16)), *[arrays((1, 4, 3, 16))] * 2).result(30.0),
    "no array": lambda ctx: ctx.flash_attn.forward("q", *qkv()[1:]).result(30.0),
    "dtype": lambda ctx: ctx.flash_attn.forward(*[np.zeros((1, 4, 2, 16), np.complex64)] * 3).result(30.0),
    "read-only out": lambda ctx: forward(out=np.broadcast_to(np.float32(0), (2, 24, 4, 16)))(ctx),
    "head_dim": lambda ctx: ctx.flash_attn.forward(*[arrays((1, 4, 2, 520))] * 3).result(30.0),
    "priority": lambda ctx: forward(priority="high")(ctx),
    "past deadline": lambda ctx: forward(timeout=-1.0)(ctx),
    "both limits": lambda ctx: forward(timeout=1.0, deadline=1.0)(ctx),
    "full cache": full_cache,
    "layer": wrong_layer(layer=2),
    "no layer": wrong_layer(layer="1"),
    "no q of a layer": wrong_layer(q=None),
    "no array of a layer": wrong_layer(q="q"),
    "a layer without k": wrong_layer(k=None),
    "shape of a layer": wrong_layer(q=arrays((1, 2, 4, 16))),
    "dtype of a layer": wrong_layer(v=arrays((1, 1, 2, 16), np.float64)),
    "strides of a layer": wrong_layer(q=arrays((1, 1, 4, 32))[..., ::2]),
    "unknown array of a layer": wrong_layer(c_kv=arrays((1, 1, 2, 16))),
    "missing layers": wrong_layer(),
    "options of a step": steps(begin={"layer_options": {1: {"seqs": []}}}),
    "steps that are full": steps(rows=70),
    "rows of a step": steps(rows=[1, -1]),
    "no step": lambda ctx: ctx.actor(ga.KvCacheActor).submit(requests.EndStep(1, 5, True)).result(30.0),
    "freed sequence": freed,
    "closed cache": closed_cache,
    "not entered": lambda ctx: ctx.kv_cache(**CACHE).create().result(30.0),
    "spec": lambda ctx: ctx.kv_cache(**{**CACHE, "page_size": 0}).__enter__(),
    "kernel source": lambda ctx: ctx.kernel("int x;", "missing").result(30.0),
    "kernel on mock": lambda ctx: (
        ctx.kernel('extern "C" __global__ void k(float* x) {}', "k").result(30.0).launch(1, 1, [arrays((4,))])
    ).result(30.0),
    "foreign kernel": lambda ctx: ctx.actor(ga.KernelActor).submit(object).result(30.0),
    "message": lambda ctx: ctx.flash_attn.submit(3).result(30.0),
    "failing actor": lambda ctx: ctx.actor(FailingActor).submit(1).result(30.0),
    "crashing actor": lambda ctx: ctx.actor(FaultInjector).submit(("raise", ValueError("as asked"))).result(30.0),
}


def same(one: Any, other: Any) -> bool:
    if isinstance(one, np.ndarray):
        bits = (one.shape, one.dtype, one.strides) == (other.shape, other.dtype, other.strides)
        return bool(bits and one.tobytes() == other.tobytes())
    if isinstance(one, tuple | list):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    return bool(one == other)


@pytest.mark.parametrize("name", REQUESTS)
def test_equal_answers(direct: ga.GpuContext, isolated: ga.GpuContext, name: str) -> None:
    want, got = REQUESTS[name](direct), REQUESTS[name](isolated)
    assert same(want, got), (want, got)


@pytest.mark.parametrize("name", REFUSALS)
def test_equal_errors(direct: ga.GpuContext, isolated: ga.GpuContext, name: str) -> None:
    raised: list[ga.GpuActorsError] = []
    for ctx in (direct, isolated):
        with pytest.raises(ga.GpuActorsError) as caught:
            REFUSALS[name](ctx)
        raised.append(caught.value)
    want, got = raised
    assert type(want) is type(got)
    first, second = (re.sub(r"cache \d+", "cache", str(error)) for error in raised)  # each process numbers its caches
    assert first == second
    assert type(want.__cause__) is type(got.__cause__)


def test_the_counts_are_equal(direct: ga.GpuContext, isolated: ga.GpuContext) -> None:
    counted = []
    for ctx in (direct, isolated):
        before = ctx.stats()["flash_attn"]
        for _ in range(5):
            REQUESTS["float32"](ctx)
        with pytest.raises(ga.InvalidRequest):
            REFUSALS["shapes"](ctx)
        after = ctx.stats()["flash_attn"]
        counted.append(
            [getattr(after, name) - getattr(before, name) for name in ("submitted", "launched", "completed")]
        )
        assert after.queued == 0
        assert ctx.flash_attn.stats().errors["InvalidRequest"] >= 1
        assert ctx.flash_attn.plan_cache_stats().hits > 0
        assert ctx.cudnn.plan_cache_stats().entries >= 0
        assert ctx.nvrtc.cache_stats().misses >= 0
        assert ctx.flash_attn.recording_stats() is not None
        assert ctx.health().ready
    assert counted[0] == counted[1] == [6, 5, 5]


def test_both_are_driven_from_tasks_and_threads(direct: ga.GpuContext, isolated: ga.GpuContext) -> None:
    q, k, v = qkv()
    for ctx in (direct, isolated):
        found: list[Any] = []

        async def many(ctx: ga.GpuContext = ctx, found: list[Any] = found) -> None:
            found.extend(await asyncio.gather(*(ctx.flash_attn.forward(q, k, v) for _ in range(32))))

        threads = [threading.Thread(target=lambda many=many: asyncio.run(many())) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30.0)
        assert len(found) == 96
        assert all(same(found[0], each) for each in found)


async def test_a_cancelled_request_is_not_worked_on(isolated: ga.GpuContext) -> None:
    actor = isolated.actor(FaultInjector)
    before = actor.stats()
    first = actor.submit(("sleep", 0.4))
    tasks = [asyncio.ensure_future(actor.submit(("sleep", 5.0)).wait()) for _ in range(4)]
    await asyncio.sleep(0.1)
    for task in tasks:
        task.cancel()
    assert all(
        isinstance(each, asyncio.CancelledError) for each in await asyncio.gather(*tasks, return_exceptions=True)
    )
    began = time.monotonic()
    await first
    assert await actor.submit(("echo", 1)) == 1
    assert time.monotonic() - began < 3.0
    assert actor.stats().cancelled - before.cancelled == 4


def test_a_cancelled_forward_is_answered_at_once_and_an_append_has_a_true_answer(isolated: ga.GpuContext) -> None:
    options = ga.ContextOptions(mock=ga.MockOptions(latency=0.4), max_in_flight=1)
    row = arrays((3, 2, 16))
    with ga.open_context("mock", options, isolation="process") as ctx, ctx.kv_cache(**CACHE) as kept:
        q, k, v = qkv()
        replies = [ctx.flash_attn.forward(q, k, v) for _ in range(3)]
        assert replies[2].cancel()
        assert replies[2].cancelled()
        seq = kept.create().result(30.0)
        launched = kept.append(seq, row, row)
        while kept.length(seq) != 3:  # until it has been launched
            time.sleep(0.01)
        queued = kept.append(seq, row, row)
        assert not launched.cancel()
        assert not queued.cancel()  # the process decides, and answers by the reply
        with pytest.raises(ga.RequestCancelled):
            queued.result(30.0)
        assert launched.result(30.0) == 3
        assert kept.length(seq) == 3


def test_a_full_mailbox_and_a_full_channel_refuse() -> None:
    options = ga.ContextOptions(actors=(FaultInjector,), mailbox_capacity=4, hang_timeout=60.0)
    with ga.open_context("mock", options, isolation="process") as ctx:
        actor = ctx.actor(FaultInjector)
        replies = [actor.submit(("sleep", 0.3))] + [actor.submit(("sleep", 0.0)) for _ in range(12)]
        found = [type(_outcome(reply)).__name__ for reply in replies]
        assert "Overloaded" in found[5:]
        assert "float" in found[:5]
        stopped = actor.submit(("now", "SIGSTOP"))
        time.sleep(0.3)
        late = [actor.submit(("echo", "x" * 4096), timeout=3.0) for _ in range(400)]
        refused = [reply for reply in late if reply.done()]
        assert refused
        assert all(isinstance(reply.exception(), ga.Overloaded) for reply in refused)
        began = time.monotonic()
        assert ctx.flash_attn.forward(*qkv()).done() or time.monotonic() - began < 1.0
        assert type(_outcome(late[0])).__name__ == "DeadlineExceeded"
        assert not stopped.done()
        ctx._generations.connection.kill()  # type: ignore[attr-defined]
        assert type(_outcome(stopped)).__name__ == "ContextLost"


def _outcome(reply: ga.Reply[Any]) -> Any:
    try:
        return reply.result(30.0)
    except ga.GpuActorsError as error:
        return error


def test_health_of_a_failing_actor_crosses_at_once() -> None:
    from gpu_actors.testing import FaultPlan

    options = ga.ContextOptions(fault_plan=FaultPlan().fail(launch=None), degraded_after=2, probe_interval=60.0)
    for isolation in (None, "process"):
        with ga.open_context("mock", options, isolation=isolation) as ctx:  # type: ignore[arg-type]
            for _ in range(3):
                with pytest.raises(ga.LaunchError):
                    ctx.flash_attn.forward(*qkv()).result(30.0)
            health = ctx.health()
            assert (health.state, health.ready) == ("degraded", False)
            assert health.failures["flash_attn"] >= 2
            with pytest.raises(ga.LaunchError):
                ctx.probe(30.0).result()


def test_draining_and_closing() -> None:
    for isolation in (None, "process"):
        options = ga.ContextOptions(mock=ga.MockOptions(latency=0.1), drain_timeout=0.0)
        with ga.open_context("mock", options, isolation=isolation) as ctx:  # type: ignore[arg-type]
            replies = [ctx.flash_attn.forward(*qkv()) for _ in range(3)]
            with pytest.raises(ga.DeadlineExceeded):
                ctx.drain(0.01).result()
            assert ctx.health().state == "draining"
            assert ctx.drain(30.0).result() is None
            assert all(reply.done() for reply in replies)
            with pytest.raises(ga.ActorStopped):
                ctx.flash_attn.forward(*qkv()).result()
        assert ctx.health().state == "stopped"
        with pytest.raises(ga.ActorStopped):
            ctx.flash_attn.forward(*qkv()).result()
