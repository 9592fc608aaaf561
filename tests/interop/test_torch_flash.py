"""torch's own attention with the service as its flash attention: varlen_attn, scaled_dot_product_attention, gradients.

On torch's CPU build the dispatcher calls the operators of flash attention for tensors of the CPU once they are
registered, so both functions are called by their public names here. On a GPU the same functions are under the key
CUDA.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import gpu_actors as ga

torch = pytest.importorskip("torch")
registry = pytest.importorskip("torch.nn.attention._registry", reason="torch has no registry of flash attention")
varlen = pytest.importorskip("torch.nn.attention.varlen")
flash: Any = pytest.importorskip("gpu_actors.interop.torch_flash")

sdpa = torch.nn.functional.scaled_dot_product_attention
ENDS_Q = [0, 5, 6, 30]
ENDS_K = [0, 9, 10, 40]


@pytest.fixture(scope="module", params=["mock", "emulated"])
def ctx(request: pytest.FixtureRequest) -> Iterator[ga.GpuContext]:
    with ga.open_context(request.param) as ctx:
        yield ctx


@pytest.fixture
def active(ctx: ga.GpuContext) -> Iterator[ga.GpuContext]:
    flash.register_flash_attention(ctx)
    torch.nn.attention.activate_flash_attention_impl("gpu_actors")
    yield ctx
    torch.nn.attention.restore_flash_attention_impl()


def drawn(*shape: int, dtype: Any = torch.float16, grad: bool = False, seed: int = 0) -> Any:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))
    return values.to(dtype).requires_grad_(grad)


def packed(heads: int = 4, kv_heads: int = 2, **options: Any) -> tuple[Any, ...]:
    q = drawn(ENDS_Q[-1], heads, 32, **options)
    k, v = (drawn(ENDS_K[-1], kv_heads, 32, seed=seed, **options) for seed in (1, 2))
    ends = [torch.tensor(each, dtype=torch.int32) for each in (ENDS_Q, ENDS_K)]
    return q, k, v, *ends, 24, 30


def plain(q: Any, k: Any, v: Any, hidden: Any = None, scale: float | None = None) -> tuple[Any, Any]:
    """The output (rows, heads, dim) and the LSE (heads, rows) of one sequence, in float64."""
    groups = q.shape[1] // k.shape[1]
    k, v = (each.repeat_interleave(groups, 1) for each in (k, v))
    scores = torch.einsum("rhd,khd->hrk", q.double(), k.double()) * (scale or q.shape[-1] ** -0.5)
    if hidden is not None:
        scores = scores.masked_fill(hidden, float("-inf"))
    lse = scores.logsumexp(-1)
    return torch.einsum("hrk,khd->rhd", (scores - lse[..., None]).exp(), v.double()), lse


def hidden_by(rows: int, keys: int, window: tuple[int, int]) -> Any:
    """The pairs that a window hides, aligned to the last row and key."""
    distance = torch.arange(keys)[None] - torch.arange(rows)[:, None] - (keys - rows)
    left, right = (float("inf") if each < 0 else each for each in window)
    return (distance < -left) | (distance > right)


def close(found: Any, wanted: Any, tolerance: float = 4e-3) -> None:
    torch.testing.assert_close(found.double(), wanted.double(), atol=tolerance, rtol=tolerance)


# varlen_attn


@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (3, 0), (2, 1)])
def test_varlen_attention_and_its_lse(active: ga.GpuContext, window: tuple[int, int]) -> None:
    q, k, v, ends_q, ends_k, *longest = packed()
    before = active.stats()["flash_attn"].completed
    out, lse = varlen.varlen_attn(
        *(q, k, v, ends_q, ends_k, *longest),
        window_size=window,
        enable_gqa=True,
        return_aux=varlen.AuxRequest(lse=True),
    )
    assert active.stats()["flash_attn"].completed == before + 1
    for a, b, c, d in zip(ENDS_Q, ENDS_Q[1:], ENDS_K, ENDS_K[1:], strict=False):
        wanted, wanted_lse = plain(q[a:b], k[c:d], v[c:d], hidden_by(b - a, d - c, window))
        close(out[a:b], wanted)
        close(lse[:, a:b], wanted_lse)


def test_varlen_attention_into_an_array(active: ga.GpuContext) -> None:
    arguments = packed(kv_heads=4)
    out = torch.full_like(arguments[0], torch.nan)
    varlen.varlen_attn_out(out, *arguments, scale=0.3)
    close(out, varlen.varlen_attn(*arguments, scale=0.3), 0)


def test_gradients_of_varlen_attention(active: ga.GpuContext) -> None:
    q, k, v, ends_q, ends_k, *longest = packed(dtype=torch.float32, grad=True)
    dout = drawn(*q.shape, dtype=torch.float32, seed=9)
    out = varlen.varlen_attn(q, k, v, ends_q, ends_k, *longest, window_size=(-1, 0), enable_gqa=True)
    found = torch.autograd.grad(out, (q, k, v), dout)
    pairs = zip(ENDS_Q, ENDS_Q[1:], ENDS_K, ENDS_K[1:], strict=False)
    wanted_out = torch.cat([plain(q[a:b], k[c:d], v[c:d], hidden_by(b - a, d - c, (-1, 0)))[0] for a, b, c, d in pairs])
    wanted = torch.autograd.grad(wanted_out, (q, k, v), dout.double())
    for one, other in zip(found, wanted, strict=True):
        close(one, other, 1e-4)


def test_pages(active: ga.GpuContext) -> None:
    k, v = (drawn(6, 8, 2, 32, seed=seed) for seed in (1, 2))  # pages of 8 tokens
    table = torch.tensor([[4, 0, 2], [1, 5, 3]], dtype=torch.int32)
    lengths = torch.tensor([19, 5], dtype=torch.int32)
    q, ends = drawn(4, 4, 32), torch.tensor([0, 3, 4], dtype=torch.int32)
    for splits in (None, 1):
        out = varlen.varlen_attn(
            *(q, k, v, ends, None, 3, 24),
            window_size=(-1, 0),
            enable_gqa=True,
            seqused_k=lengths,
            block_table=table,
            num_splits=splits,
        )
        for one, (a, b) in enumerate([(0, 3), (3, 4)]):
            keys, values = (each[table[one].long()].flatten(0, 1)[: lengths[one]] for each in (k, v))
            close(out[a:b], plain(q[a:b], keys, values, hidden_by(b - a, int(lengths[one]), (-1, 0)))[0])


# scaled_dot_product_attention


@pytest.mark.parametrize(("causal", "mask"), [(False, None), (True, None), (False, "bool"), (False, "float")])
def test_torchs_function_and_its_gradients(active: ga.GpuContext, causal: bool, mask: str | None) -> None:
    shape = (2, 4, 24, 32)
    q, k, v = (drawn(*shape, dtype=torch.float32, grad=True, seed=seed) for seed in range(3))
    seen = torch.rand(24, 24, generator=torch.Generator().manual_seed(5)) > 0.3
    seen.fill_diagonal_(True)
    given = {None: None, "bool": seen, "float": drawn(2, 1, 24, 24, dtype=torch.float32)}[mask]
    dout = drawn(*shape, dtype=torch.float32, seed=7)
    before = active.stats()["flash_attn"].completed
    out = sdpa(q, k, v, attn_mask=given, is_causal=causal)
    found = torch.autograd.grad(out, (q, k, v), dout)
    assert active.stats()["flash_attn"].completed == before + 2
    assert out.stride() == q.stride()
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        own = sdpa(q, k, v, attn_mask=given, is_causal=causal)
    assert active.stats()["flash_attn"].completed == before + 2
    close(out, own, 1e-4)
    for one, other in zip(found, torch.autograd.grad(own, (q, k, v), dout), strict=True):
        close(one, other, 1e-4)


def test_the_operators_that_torch_calls_on_a_gpu(active: ga.GpuContext) -> None:
    """The test calls the operators that scaled_dot_product_attention calls for tensors of a GPU."""
    q, k, v = (drawn(2, 4, 24, 32, dtype=torch.float32, grad=True, seed=seed) for seed in range(3))
    dout = drawn(2, 4, 24, 32, dtype=torch.float32, seed=7)
    out, lse, *_, max_q, max_k, state, _, _ = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True)
    assert (max_q, max_k, state.shape, lse.shape) == (24, 24, (2,), (2, 4, 24))
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        own = sdpa(q, k, v, is_causal=True)
    close(out, own, 1e-4)
    wanted = torch.autograd.grad(own, (q, k, v), dout)
    for one, other in zip(torch.autograd.grad(out, (q, k, v), dout), wanted, strict=True):
        close(one, other, 1e-4)


def test_dropout_is_that_of_a_seed_and_backward_drops_the_same(active: ga.GpuContext) -> None:
    q, k, v = (drawn(1, 2, 16, 32, dtype=torch.float32, grad=True, seed=seed) for seed in range(3))

    def dropped() -> Any:
        torch.manual_seed(4)
        return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.3)[0]

    out = dropped()
    close(out, dropped(), 0)
    assert not torch.equal(out, torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.3)[0])
    # The output is linear in v, so the sum of v times its gradient is the output's sum.
    (gradient,) = torch.autograd.grad(out, v, torch.ones_like(out))
    assert float((gradient * v).sum().detach()) == pytest.approx(float(out.sum().detach()), rel=1e-4)


# Limits


def test_what_no_kernel_computes_is_refused_and_nothing_falls_back(active: ga.GpuContext) -> None:
    q = drawn(1, 1, 8, 520)
    with pytest.raises(ga.Unsupported) as caught:
        sdpa(q, q, q)
    with pytest.raises(ga.Unsupported) as direct:
        active.flash_attn.forward(*(q.transpose(1, 2).numpy(),) * 3).result()
    assert (caught.value.field, caught.value.reason) == (direct.value.field, direct.value.reason)
    arguments = packed(kv_heads=4)
    lengths = torch.tensor([1, 1, 1], dtype=torch.int32)
    with pytest.raises(ga.Unsupported, match="num_splits"):
        varlen.varlen_attn(*arguments, num_splits=2)
    with pytest.raises(ga.RequestError, match="seqused_k"):
        varlen.varlen_attn(*arguments, seqused_k=lengths)
    pages = [drawn(3, 8, 4, 32, seed=seed) for seed in (1, 2)]
    with pytest.raises(ga.InvalidRequest, match="seqused_k"):
        varlen.varlen_attn(arguments[0], *pages, *arguments[3:], block_table=lengths[:, None])
    with pytest.raises(ga.Unsupported, match="return_debug_mask"):
        torch.ops.aten._scaled_dot_product_flash_attention(*(drawn(1, 1, 8, 32),) * 3, 0.0, False, True)


LOST = {
    "alibi_slopes": {"alibi_slopes": torch.tensor([0.5, 0.2])},
    "seqused_k": {"seqused_k": torch.tensor([3], dtype=torch.int32)},
    "block_table": {
        "seqused_k": torch.tensor([3], dtype=torch.int32),
        "block_table": torch.tensor([[0]], dtype=torch.int32),
    },
}


@pytest.mark.parametrize("name", LOST)
def test_an_option_that_torchs_backward_loses_is_refused_where_gradients_are_recorded(
    active: ga.GpuContext, name: str
) -> None:
    q, k, v = (drawn(1, 8, 2, 32, dtype=torch.float32, seed=seed, grad=True) for seed in range(3))

    def attend() -> Any:
        given = (q, k, v, None, None, 8, 8, 0.0, False, False)
        return torch.ops.aten._flash_attention_forward(*given, **LOST[name])[0]

    with pytest.raises(ga.Unsupported, match="gradients would be wrong") as caught:
        attend()
    assert caught.value.field in LOST[name]
    with torch.no_grad():
        assert attend().isfinite().all()


def test_dropout_that_has_no_seed_for_backward_or_no_kernel_is_refused(active: ga.GpuContext) -> None:
    q = drawn(1, 2, 8, 32)
    with pytest.raises(ga.Unsupported, match="dropout_p"):
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, q, q, 0.5)
    given = (*(drawn(1, 8, 2, 32),) * 3, None, None, 8, 8, 0.5, False, False)
    with pytest.raises(ga.Unsupported, match="dropout_p"):
        torch.ops.aten._flash_attention_forward(*given, **LOST["block_table"])


async def test_a_loop_is_not_blocked(active: ga.GpuContext) -> None:
    with pytest.raises(ga.WouldBlock):
        varlen.varlen_attn(*packed(kv_heads=4))


def test_torchs_own_kernels_are_back_after_restoring(ctx: ga.GpuContext) -> None:
    q = drawn(1, 2, 16, 32, dtype=torch.float32)
    own = sdpa(q, q, q)
    assert flash.register_flash_attention(ctx, "gpu_actors_again") == "gpu_actors_again"
    assert "gpu_actors_again" in torch.nn.attention.list_flash_attention_impls()
    before = ctx.stats()["flash_attn"].completed
    torch.nn.attention.activate_flash_attention_impl("gpu_actors_again")
    assert torch.nn.attention.current_flash_attention_impl() == "gpu_actors_again"
    close(sdpa(q, q, q), own, 1e-4)
    assert ctx.stats()["flash_attn"].completed == before + 1
    torch.nn.attention.restore_flash_attention_impl()
    assert torch.equal(sdpa(q, q, q), own)
    with pytest.raises(NotImplementedError):
        varlen.varlen_attn(*packed(kv_heads=4))
    assert ctx.stats()["flash_attn"].completed == before + 1


def test_a_closed_context_and_what_is_no_context_or_name() -> None:
    with ga.open_context("mock") as closed:
        flash.register_flash_attention(closed, "closed")
        for context, name in (("mock", "x"), (closed, ""), (closed, 3)):
            with pytest.raises(ga.InvalidRequest):
                flash.register_flash_attention(context, name)
        torch.nn.attention.activate_flash_attention_impl("closed")
    try:
        with pytest.raises(ga.ActorStopped):
            varlen.varlen_attn(*packed(kv_heads=4))
    finally:
        torch.nn.attention.restore_flash_attention_impl()
