"""attention of interop.jax under jit, grad and vmap: answers, gradients, requests, threads and errors."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import gpu_actors as ga
from gpu_actors.testing import check_gradients, check_output

jax = pytest.importorskip("jax", reason="these are functions of JAX's arrays")
interop = pytest.importorskip("gpu_actors.interop.jax")
jnp = jax.numpy

MASKED = {"causal": True, "window_size": (20, 0), "softmax_scale": 0.3, "softcap": 4.0}


@pytest.fixture(scope="module")
def ctx() -> Iterator[ga.GpuContext]:
    with ga.open_context("mock") as ctx:
        yield ctx


def drawn(*shape: int, seed: int = 0, dtype: str = "float32") -> Any:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def qkv(*lead: int, dtype: str = "float32", kv_heads: int = 2) -> tuple[Any, ...]:
    shapes = ((2, 12, 4, 16), (2, 20, kv_heads, 16), (2, 20, kv_heads, 8))
    return tuple(drawn(*lead, *shape, seed=n, dtype=dtype) for n, shape in enumerate(shapes, 1))


def submitted(ctx: ga.GpuContext) -> int:
    return ctx.stats()["flash_attn"].submitted


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_answers_and_gradients_under_jit_are_within_the_oracles_rounding(ctx: ga.GpuContext, dtype: str) -> None:
    q, k, v = qkv(dtype=dtype)
    bias, sinks = drawn(1, 4, 12, 20, seed=5, dtype=dtype), drawn(4, seed=6)
    dout = drawn(2, 12, 4, 8, seed=7, dtype=dtype)

    def loss(*given: Any) -> Any:
        q, k, v, bias, sinks = given
        out = interop.attention(q, k, v, bias=bias, sinks=sinks, **MASKED, context=ctx)
        return (out.astype("float32") * dout.astype("float32")).sum(), out

    (_, out), found = jax.jit(jax.value_and_grad(loss, (0, 1, 2, 3, 4), has_aux=True))(q, k, v, bias, sinks)
    q, k, v, bias, sinks, dout = map(np.asarray, (q, k, v, bias, sinks, dout))
    assert out.dtype == q.dtype
    check_output(np.asarray(out), None, q, k, v, bias=bias, sinks=sinks, **MASKED)
    gradients = ga.AttentionGradients(*map(np.asarray, found))
    check_gradients(gradients, dout, q, k, v, bias=bias, sinks=sinks, **MASKED)


def test_answers_are_those_of_jaxs_own_attention(ctx: ga.GpuContext) -> None:
    q, k, v = qkv()
    own = jax.jit(lambda q, k, v: interop.attention(q, k, v, causal=True, alignment="top_left", context=ctx))

    @jax.jit
    def of_jax(q: Any, k: Any, v: Any) -> Any:
        v = jnp.pad(v, ((0, 0), (0, 0), (0, 0), (0, 8)))  # JAX's function has one head dim
        return jax.nn.dot_product_attention(q, k, v, is_causal=True)[..., :8]

    np.testing.assert_allclose(own(q, k, v), of_jax(q, k, v), rtol=1e-5, atol=1e-5)
    found, wanted = (jax.jit(jax.grad(lambda *x, f=f: (f(*x) ** 2).sum(), (0, 1, 2)))(q, k, v) for f in (own, of_jax))
    for gradient, other in zip(found, wanted, strict=True):
        np.testing.assert_allclose(gradient, other, rtol=1e-4, atol=1e-4)


def elementwise(function: Any, axes: tuple[Any, ...], operands: tuple[Any, ...], size: int) -> Any:
    """The result that vmap promises: the function of each element, stacked."""
    rows = [
        function(*(x if axis is None else jnp.take(x, n, axis) for x, axis in zip(operands, axes, strict=True)))
        for n in range(size)
    ]
    return jax.tree.map(lambda *each: jnp.stack(each), *rows)


AXES = [
    (0, 0, 0, None, None),
    (0, None, None, None, None),
    (None, 0, 0, 0, None),
    (None, None, None, None, 0),
    (1, 3, 0, 2, 0),
]


@pytest.mark.parametrize("axes", AXES, ids=str)
@pytest.mark.parametrize("batches", [1, 2], ids=["bias of all", "bias of each"])
def test_vmap_is_one_request_and_each_elements_answer(ctx: ga.GpuContext, axes: Any, batches: int) -> None:
    shapes = ((2, 12, 4, 16), (2, 20, 2, 16), (2, 20, 2, 8), (batches, 4, 12, 20), (4,))
    operands = tuple(
        drawn(*(shape if axis is None else (*shape[:axis], 3, *shape[axis:])), seed=n)
        for n, (shape, axis) in enumerate(zip(shapes, axes, strict=True))
    )

    def attend(q: Any, k: Any, v: Any, bias: Any, slopes: Any) -> Any:
        return interop.attention(q, k, v, bias=bias, alibi_slopes=abs(slopes), context=ctx)

    def gradient(*operands: Any) -> Any:
        return jax.grad(lambda *x: (attend(*x, operands[4]) ** 2).sum(), (0, 1, 2, 3))(*operands[:4])

    before = submitted(ctx)
    found = jax.jit(jax.vmap(attend, axes))(*operands)
    assert found.shape == (3, 2, 12, 4, 8)
    assert submitted(ctx) == before + 1
    np.testing.assert_allclose(found, elementwise(attend, axes, operands, 3), rtol=1e-5, atol=1e-5)
    before = submitted(ctx)
    gradients = jax.jit(jax.vmap(gradient, axes))(*operands)
    jax.block_until_ready(gradients)
    assert submitted(ctx) == before + 2
    for own, other in zip(gradients, elementwise(gradient, axes, operands, 3), strict=True):
        np.testing.assert_allclose(own, other, rtol=1e-4, atol=1e-4)


def test_vmap_of_vmap_and_of_the_loss_of_a_batch(ctx: ga.GpuContext) -> None:
    q, k, v = qkv(2, 3)

    def attend(q: Any, k: Any, v: Any) -> Any:
        return interop.attention(q, k, v, causal=True, context=ctx)

    before = submitted(ctx)
    found = jax.vmap(jax.vmap(attend, (0, None, 0)), (0, 0, 0))(q, k[:, 0], v)
    assert submitted(ctx) == before + 1
    for i, j in np.ndindex(2, 3):
        np.testing.assert_allclose(found[i, j], attend(q[i, j], k[i, 0], v[i, j]), rtol=1e-5, atol=1e-5)
    # The gradient of an operand that is not mapped is summed over the elements.
    shared = jax.grad(lambda k: (jax.vmap(attend, (0, None, 0))(q[0], k, v[0]) ** 2).sum())(k[0, 0])
    each = sum(jax.grad(lambda k, n=n: (attend(q[0, n], k, v[0, n]) ** 2).sum())(k[0, 0]) for n in range(3))
    np.testing.assert_allclose(shared, each, rtol=1e-4, atol=1e-4)


def test_dropout_takes_its_seed_in_the_program_and_drops_alike_under_vmap(ctx: ga.GpuContext) -> None:
    q, k, v = qkv(3)
    seeds = jnp.array([3, 4, 3])

    @jax.jit
    def attend(q: Any, k: Any, v: Any, seed: Any) -> Any:
        return interop.attention(q, k, v, dropout_p=0.5, dropout_seed=seed, context=ctx)

    direct = ctx.flash_attn.forward(*map(np.asarray, (q[0], k[0], v[0])), dropout_p=0.5, dropout_seed=3).result().out
    np.testing.assert_array_equal(attend(q[0], k[0], v[0], 3), direct)
    together = jax.vmap(attend)(q, k, v, seeds)
    for n in range(3):
        np.testing.assert_array_equal(together[n], attend(q[n], k[n], v[n], seeds[n]))
    with_key = [attend(q[0], k[0], v[0], jax.random.key(n)) for n in (0, 0, 1)]
    np.testing.assert_array_equal(with_key[0], with_key[1])
    assert not np.array_equal(with_key[0], with_key[2])
    options = {"dropout_p": 0.5, "dropout_seed": (7 << 40) + 1}
    large = interop.attention(q[0], k[0], v[0], **options, context=ctx)
    np.testing.assert_array_equal(
        large, ctx.flash_attn.forward(*map(np.asarray, (q[0], k[0], v[0])), **options).result().out
    )
    loss = jax.grad(lambda q: attend(q, k[0], v[0], jnp.int32(3)).sum())
    assert np.isfinite(loss(q[0])).all()


def test_the_lse_is_given_and_has_no_gradient(ctx: ga.GpuContext) -> None:
    q, k, v = qkv()
    out, lse = jax.jit(lambda *x: interop.attention(*x, return_lse=True, context=ctx))(q, k, v)
    scores = np.einsum("bihd,bjhd->bhij", q, np.repeat(k, 2, 2)) / 4
    assert out.shape == (2, 12, 4, 8)
    np.testing.assert_allclose(lse, np.log(np.exp(scores).sum(-1)), rtol=1e-5)

    def loss(part: int) -> Any:
        return lambda q: interop.attention(q, k, v, return_lse=True, context=ctx)[part].sum()

    assert jax.grad(loss(0))(q).shape == q.shape
    with pytest.raises(ga.Unsupported, match="no gradient"):
        jax.grad(loss(1))(q)

    def by_slopes(slopes: Any, q: Any) -> Any:
        return interop.attention(q, k, v, alibi_slopes=slopes, context=ctx).sum()

    assert jax.grad(by_slopes, 1)(jnp.ones(4), q).shape == q.shape
    with pytest.raises(ga.Unsupported, match="alibi_slopes"):
        jax.grad(by_slopes)(jnp.ones(4), q)


def test_programs_of_several_threads_wait_for_each_other_at_no_place(ctx: ga.GpuContext) -> None:
    """XLA has a thread for each core, and each may block in a callback while the service answers another."""
    threads, steps = 8, 3
    start = threading.Barrier(threads)

    @jax.jit
    def step(q: Any, k: Any, v: Any) -> Any:
        def loss(q: Any) -> Any:
            # Large enough for XLA to spread the products over its threads; the two attentions are independent.
            mixed = jnp.einsum("bihd,de->bihe", q, jnp.ones((64, 64)) / 64)
            first = interop.attention(mixed, k, v, causal=True, context=ctx)
            second = interop.attention(q, k, v, context=ctx)
            return ((first + second) ** 2).sum()

        return jax.value_and_grad(loss)(q)

    def run(number: int) -> Any:
        q, k, v = (drawn(1, 256, 2, 64, seed=3 * number + n) for n in range(3))
        start.wait()
        return [jax.block_until_ready(step(q, k, v)) for _ in range(steps)]

    with ThreadPoolExecutor(threads) as pool:
        found = list(pool.map(run, range(threads)))
    assert len({float(results[0][0]) for results in found}) == threads
    for results in found:
        for loss, gradient in results:
            assert float(loss) == float(results[0][0])
            np.testing.assert_array_equal(gradient, results[0][1])


def test_a_program_that_is_dispatched_many_times_before_it_is_awaited_ends(ctx: ga.GpuContext) -> None:
    q, k, v = qkv()
    attend = jax.jit(lambda q, k, v: interop.attention(q, k, v, context=ctx))
    results = [attend(q * n, k, v) for n in range(20)]
    jax.block_until_ready(results)
    np.testing.assert_array_equal(results[1], attend(q, k, v))


def test_an_equal_call_is_not_compiled_again(ctx: ga.GpuContext) -> None:
    q, k, v = qkv()
    traced = []

    @jax.jit
    def attend(q: Any) -> Any:
        traced.append(1)
        return interop.attention(q, k, v, context=ctx)

    for n in range(3):
        attend(q * n)
    assert len(traced) == 1
    call = interop._Call(1, (("causal", True),), False, 0)
    assert interop._answering(call, ("q", "k", "v"), ()) is interop._answering(call._replace(), ("q", "k", "v"), ())


class TestErrors:
    def test_what_does_not_fit_is_refused_as_it_is_traced(self):
        # A separate context: requests that JAX still computes for an earlier test would be counted.
        with ga.open_context("mock") as ctx:
            self.check_refusals(ctx)

    def check_refusals(self, ctx):
        q, k, v = qkv()

        def refused(field: str, kind: Any = ga.InvalidRequest, given: Any = (q, k, v), **options: Any) -> None:
            before = submitted(ctx)
            with pytest.raises(kind) as caught:
                jax.jit(lambda *x: interop.attention(*x, **{"context": ctx, **options}))(*given)
            assert caught.value.field == field
            assert submitted(ctx) == before

        refused("context", context="mock")
        refused("q", given=(q[0], k, v))
        refused("k", given=(q, k[..., :8], v))
        refused("softcap", softcap=-1.0)
        refused("dropout_p", dropout_p=1.5)
        refused("dropout_seed", dropout_p=0.5, dropout_seed=-1)
        refused("dropout_seed", dropout_p=0.5, dropout_seed=jnp.ones(2, int))
        refused("dropout_seed", dropout_p=0.5, dropout_seed=jnp.ones(()))
        refused("cu_seqlens_q", ga.Unsupported, cu_seqlens_q=jnp.arange(3))
        with pytest.raises(TypeError, match="takes no mask; its options are"):
            interop.attention(q, k, v, mask=None, context=ctx)
        refused("bias", bias=jnp.ones((1, 3, 12, 20)))

    def test_an_error_of_the_running_program_is_found_again(self):
        q, k, v = qkv()
        with ga.open_context("mock") as closed:
            attend = jax.jit(lambda q: interop.attention(q, k, v, context=closed))
            jax.block_until_ready(attend(q))
        with pytest.raises(ga.ActorStopped, match="not open") as caught, interop.typed_errors():
            jax.block_until_ready(attend(q))
        assert "ActorStopped" in str(caught.value.__cause__)
        with pytest.raises(Exception, match="gpu_actors error") as unwrapped:
            jax.block_until_ready(attend(q))
        assert not isinstance(unwrapped.value, ga.ActorStopped)

    def test_errors_of_concurrent_programs_are_each_their_own(self, ctx):
        q, k, v = qkv()
        with ga.open_context("mock") as closed:
            pass
        programs = [jax.jit(lambda q, c=c: interop.attention(q, k, v, context=c)) for c in (ctx, closed)]

        def run(number: int) -> Any:
            try:
                with interop.typed_errors():
                    return jax.block_until_ready(programs[number % 2](q)).shape
            except ga.ActorStopped as error:
                return error

        with ThreadPoolExecutor(6) as pool:
            found = list(pool.map(run, range(12)))
        assert [isinstance(each, ga.ActorStopped) for each in found] == [False, True] * 6
        assert len({id(each) for each in found[1::2]}) == 6

    def test_other_errors_pass(self):
        with pytest.raises(KeyError), interop.typed_errors():
            raise KeyError("gpu_actors error 1")
        with pytest.raises(ValueError, match="999999"), interop.typed_errors():
            raise ValueError("gpu_actors error 999999")

    def test_a_running_loop_is_not_blocked(self, ctx):
        q, k, v = qkv()

        async def main() -> Any:
            with pytest.raises(ga.WouldBlock), interop.typed_errors():
                jax.block_until_ready(interop.attention(q, k, v, context=ctx))
            return await asyncio.to_thread(lambda: jax.block_until_ready(interop.attention(q, k, v, context=ctx)))

        assert asyncio.run(main()).shape == (2, 12, 4, 8)

    def test_second_derivatives_and_forward_mode_are_refused_by_jax(self, ctx):
        q, k, v = qkv()

        def loss(q: Any) -> Any:
            return (interop.attention(q, k, v, context=ctx) ** 2).sum()

        with pytest.raises(TypeError, match="custom_vjp"):
            jax.jvp(loss, (q,), (q,))
        with pytest.raises(ValueError, match="do not support JVP"):
            jax.grad(lambda q: jax.grad(loss)(q).sum())(q)
