"""Every option of interop.jax's attention under jit, grad and vmap: the service's answers, or typed refusals."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import gpu_actors as ga

jax = pytest.importorskip("jax", reason="these are functions of JAX's arrays")
interop = pytest.importorskip("gpu_actors.interop.jax")
jnp = jax.numpy


@pytest.fixture(scope="module")
def ctx() -> Iterator[ga.GpuContext]:
    with ga.open_context("mock") as ctx:
        yield ctx


def drawn(*shape: int, seed: int = 0, dtype: str = "float32") -> Any:
    return jnp.asarray(np.random.default_rng((seed, *shape)).standard_normal(shape), dtype)


def lengths(*values: int) -> Any:
    return jnp.array(values, "int32")


SHAPES = {"q": (2, 5, 4, 8), "k": (2, 6, 2, 8), "v": (2, 6, 2, 4)}
BASE = {name: drawn(*shape, seed=n) for n, (name, shape) in enumerate(SHAPES.items(), 1)}
HALF = {name: array.astype("float16") for name, array in BASE.items()}
# Arrays by name, and other options.
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "mask of all": ({"bias": jnp.tril(jnp.ones((1, 1, 5, 6), bool))}, {}),
    "mask of each": ({"bias": drawn(2, 4, 5, 6) > -1}, {"softcap": 2.0}),
    "mask of one row": ({"bias": jnp.arange(12).reshape(2, 1, 1, 6) % 3 > 0}, {}),
    "mask and sinks": ({"bias": drawn(1, 4, 5, 6) > -1, "sinks": drawn(4)}, {}),
    "bias of one row": ({"bias": drawn(1, 4, 1, 6)}, {"window_size": [2, 1]}),
    "bias of float32": ({**HALF, "bias": drawn(2, 1, 5, 6)}, {}),
    "out of float32": (HALF, {"out_dtype": "float32", "causal": True}),
    "out of float32 and sinks": ({**HALF, "sinks": drawn(4)}, {"out_dtype": "float32"}),
    "lengths of keys": ({"seqused_k": lengths(3, 6)}, {}),
    "lengths of rows": ({"seqused_q": lengths(5, 2)}, {"causal": True, "attention_chunk": 2}),
    "lengths and bias": ({"seqused_k": lengths(0, 5), "bias": drawn(2, 4, 5, 6)}, {}),
    "lengths and mask": ({"seqused_k": lengths(4, 5), "bias": drawn(1, 1, 5, 6) > -1}, {}),
    "lengths, sinks and dropout": ({"seqused_k": lengths(3, 6), "sinks": drawn(4)}, {"dropout_p": 0.3}),
    "one q": ({"q": BASE["q"][:1]}, {}),
    "one k and v": ({"k": BASE["k"][:1], "v": BASE["v"][:1]}, {"causal": True, "sink_tokens": 1}),
    "one v and a bias": ({"v": BASE["v"][:1], "bias": drawn(2, 4, 5, 6)}, {}),
    "one q, sinks and dropout": ({"q": BASE["q"][:1], "sinks": drawn(4)}, {"dropout_p": 0.3}),
    "slopes": ({"alibi_slopes": drawn(4)}, {"alibi_signed": True}),
    "slopes of each": ({"alibi_slopes": drawn(2, 4)}, {"softmax_scale": 0.4, "deterministic": True}),
    "compute": ({}, {"compute": "bf16"}),
    "no keys": ({"k": BASE["k"][:, :0], "v": BASE["v"][:, :0]}, {}),
    "no rows": ({"q": BASE["q"][:, :0]}, {"alignment": "top_left"}),
    "no sequences": ({name: array[:0] for name, array in BASE.items()}, {}),
}


def on_host(arrays: dict[str, Any]) -> dict[str, Any]:
    return {name: np.asarray(array) for name, array in arrays.items()}


@pytest.mark.parametrize("case", CASES)
def test_every_option_is_that_of_the_service_under_jit_grad_and_vmap(ctx: ga.GpuContext, case: str) -> None:
    arrays, options = {**BASE, **CASES[case][0]}, CASES[case][1]
    direct = {name: value for name, value in options.items() if name != "deterministic"}
    wanted = ctx.flash_attn.forward(**on_host(arrays), **direct, return_lse=True).result()
    dout = drawn(*wanted.out.shape, seed=9).astype(wanted.out.dtype)

    def attend(arrays: Any) -> Any:
        return interop.attention(**arrays, **options, context=ctx, return_lse=True)

    def loss(arrays: Any, dout: Any) -> Any:
        return (attend(arrays)[0].astype("float32") * dout.astype("float32")).sum()

    out, lse = jax.jit(attend)(arrays)
    np.testing.assert_array_equal(out, wanted.out)
    np.testing.assert_array_equal(lse, wanted.lse)
    assert (out.dtype, lse.dtype) == (wanted.out.dtype, wanted.lse.dtype)

    def gradients(arrays: Any, dout: Any) -> Any:
        slopes = {name: array for name, array in arrays.items() if name.endswith("slopes")}
        rest = {name: array for name, array in arrays.items() if name not in slopes}
        return jax.grad(lambda rest: loss({**rest, **slopes}, dout), allow_int=True)(rest)

    found = jax.jit(gradients)(arrays, dout)
    narrow = wanted.out.astype(arrays["q"].dtype), np.asarray(dout.astype(arrays["q"].dtype))
    backward = {name: value for name, value in options.items() if name != "out_dtype"}
    expected = ctx.flash_attn.backward(
        **on_host(arrays), **backward, out=narrow[0], lse=wanted.lse, dout=narrow[1]
    ).result()
    for name, gradient in found.items():
        if jnp.issubdtype(arrays[name].dtype, jnp.floating):
            np.testing.assert_array_equal(gradient, getattr(expected, f"d{name}"))
        else:
            assert gradient.dtype == jax.dtypes.float0

    # Two elements: the arrays, and their sequences the other way round.
    other = {name: array[::-1] if len(array) == 2 else array for name, array in arrays.items()}
    stacked = jax.tree.map(lambda *each: jnp.stack(each), arrays, other)
    both = jnp.stack([dout, dout])
    together, of_both = jax.vmap(attend)(stacked), jax.vmap(gradients)(stacked, both)
    for n, element in enumerate((arrays, other)):
        for one, alone in zip(together, attend(element), strict=True):
            np.testing.assert_allclose(one[n], alone, rtol=1e-5, atol=1e-6)
        for name, alone in gradients(element, dout).items():
            assert of_both[name][n].shape == alone.shape
            if alone.dtype != jax.dtypes.float0:
                np.testing.assert_allclose(of_both[name][n], alone, rtol=2e-3, atol=2e-3)
    # An operand that is not mapped has the sum of the elements' gradients.
    shared = jax.grad(lambda q: jax.vmap(lambda dout: loss({**arrays, "q": q}, dout))(both).sum())(arrays["q"])
    np.testing.assert_allclose(shared, 2 * found["q"], rtol=2e-3, atol=4e-3)


def test_lengths_that_are_mapped_alone_are_each_elements(ctx: ga.GpuContext) -> None:
    def attend(used: Any, q: Any) -> Any:
        return interop.attention(q, BASE["k"], BASE["v"], seqused_k=used, causal=True, context=ctx)

    used = jnp.array([[3, 6], [1, 0], [6, 5]], "int32")
    together = jax.jit(jax.vmap(attend, (0, None)))(used, BASE["q"])
    for n in range(3):
        np.testing.assert_allclose(together[n], attend(used[n], BASE["q"]), rtol=1e-5, atol=1e-6)
    gradients = jax.vmap(jax.grad(lambda q, used: (attend(used, q) ** 2).sum()), (None, 0))(BASE["q"], used)
    alone = jax.grad(lambda q: (attend(used[2], q) ** 2).sum())(BASE["q"])
    np.testing.assert_allclose(gradients[2], alone, rtol=1e-4, atol=1e-5)
    with pytest.raises(ga.InvalidRequest) as refused, interop.typed_errors():
        jax.block_until_ready(jax.vmap(attend, (0, None))(used + 1, BASE["q"]))
    assert refused.value.field == "seqused_k"


def test_no_elements_give_nothing(ctx: ga.GpuContext) -> None:
    none = {name: jnp.zeros((0, *array.shape)) for name, array in BASE.items()}
    for options in ({}, {"sinks": drawn(4)}, {"dropout_p": 0.5}):
        found = jax.vmap(lambda a, o=options: interop.attention(**a, **o, context=ctx))(none)
        assert found.shape == (0, 2, 5, 4, 4)


@pytest.mark.filterwarnings("ignore:Explicitly requested dtype")
def test_what_is_not_taken_is_refused_by_its_field(ctx: ga.GpuContext) -> None:
    def refused(field: str, kind: Any = ga.Unsupported, **given: Any) -> None:
        for wrap in (lambda f: f, jax.jit, lambda f: jax.grad(lambda q: f(q).sum())):
            with pytest.raises(kind) as caught:
                wrap(lambda q: interop.attention(**{**BASE, "q": q, **given}, context=ctx))(given.get("q", BASE["q"]))
            assert caught.value.field == field

    taken = {*BASE, "bias", "dropout_seed", "return_lse", *interop._OPTIONS}
    for field in dataclasses.fields(ga.FlashForward):
        if field.name not in taken:
            refused(field.name, **{field.name: BASE["q"]})
            assert interop.attention(**BASE, **{field.name: None}, context=ctx).shape == (2, 5, 4, 4)
    refused("lse_dtype", ga.InvalidRequest, lse_dtype="float64")
    refused("lse_dtype", lse_dtype="float64", return_lse=True)
    refused("seqused_k", ga.InvalidRequest, seqused_k=lengths(1, 2, 3))
    refused("seqused_k", ga.InvalidRequest, seqused_k=[3, 6])
    refused("seqused_q", ga.InvalidRequest, seqused_q=drawn(2))
    refused("softcap", ga.InvalidRequest, softcap=jnp.float32(2))
    refused("dropout_seed", ga.InvalidRequest, dropout_p=0.5, dropout_seed=jnp.int32(-1))
    refused("dropout_seed", ga.InvalidRequest, dropout_p=0.5, dropout_seed=True)
    refused("bias", ga.InvalidRequest, bias=jnp.ones((1, 1, 5, 6), int))
    refused("k", ga.InvalidRequest, k=drawn(3, 6, 2, 8))
    refused("q", q=BASE["q"].astype("float8_e5m2"))
    # Only the gradient is refused.
    given = {**BASE, "q": BASE["q"][:1], "seqused_k": lengths(3, 6)}
    assert interop.attention(**given, context=ctx).shape == (2, 5, 4, 4)
    with pytest.raises(ga.Unsupported) as caught:
        jax.jit(jax.grad(lambda k: interop.attention(**{**given, "k": k}, context=ctx).sum()))(BASE["k"])
    assert caught.value.field == "q"


def test_seeds_of_64_bits_keep_them_all(ctx: ga.GpuContext) -> None:
    def attend(seed: Any) -> Any:
        return interop.attention(**BASE, dropout_p=0.5, dropout_seed=seed, context=ctx)

    large = (7 << 40) + 1
    wanted = attend(large)
    np.testing.assert_array_equal(attend(np.int64(large)), wanted)
    with jax.enable_x64(True):
        np.testing.assert_array_equal(attend(jnp.uint64(large)), wanted)
        np.testing.assert_array_equal(jax.jit(attend)(jnp.uint64(large)), wanted)


@pytest.mark.parametrize(("low", "far"), [(-30.0, 1e-12), (-1e4, 1e-9), (-1e9, 1e-6)])
def test_float64_is_float64_throughout(ctx: ga.GpuContext, low: float, far: float) -> None:
    """Also if a low finite bias hides a row: its LSE in fp32 would lose how many keys the row sees.

    far: the rounding error of such a row's scores, in float64 too.
    """
    with jax.enable_x64(True):
        q, k, v = (drawn(2, 6, 2, 8, seed=n, dtype="float64") for n in range(3))
        bias = jnp.zeros((1, 1, 6, 6)).at[:, :, 1].set(low).at[:, :, 3, :4].set(low)

        def attend(q: Any, k: Any, v: Any, bias: Any) -> Any:
            return interop.attention(q, k, v, bias=bias, context=ctx)

        def of_jax(q: Any, k: Any, v: Any, bias: Any) -> Any:  # JAX's own attention computes its softmax in float32
            scores = jnp.einsum("bihd,bjhd->bhij", q, k) / np.sqrt(8) + bias
            return jnp.einsum("bhij,bjhd->bihd", jax.nn.softmax(scores), v)

        found, wanted = (
            jax.jit(jax.grad(lambda *x, f=f: jnp.sin(f(*x)).sum(), (0, 1, 2, 3)))(q, k, v, bias)
            for f in (attend, of_jax)
        )
        for one, other in zip(found, wanted, strict=True):
            np.testing.assert_allclose(one, other, rtol=far, atol=far)
        for dtype in ("float32", "float64"):
            _, lse = interop.attention(q, k, v, lse_dtype=dtype, return_lse=True, context=ctx)
            arrays = map(np.asarray, (q, k, v))
            direct = ctx.flash_attn.forward(*arrays, lse_dtype=dtype, return_lse=True).result().lse
            assert lse.dtype == dtype
            np.testing.assert_array_equal(lse, direct)
