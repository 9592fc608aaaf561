"""torch's FlexAttention through a context: score_mod and mask_mod, traced into operation graphs."""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import gpu_actors as ga

torch = pytest.importorskip("torch", reason="flex_attention is of torch's tensors")
interop = pytest.importorskip("gpu_actors.interop.torch")
flex = pytest.importorskip("torch.nn.attention.flex_attention")
shared = pytest.importorskip("support.torch_flex")
drawn, operands, explicit = shared.drawn, shared.operands, shared.explicit
BATCH, HEADS, ROWS, KEYS, DIM = shared.BATCH, shared.HEADS, shared.ROWS, shared.KEYS, shared.DIM
Mod = Callable[..., Any]


@pytest.fixture(scope="module")
def ctx() -> Iterator[ga.GpuContext]:
    with ga.open_context("mock") as ctx:
        yield ctx


@pytest.fixture(scope="module")
def emulated() -> Iterator[ga.GpuContext]:
    with ga.open_context("emulated") as ctx:
        yield ctx


SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625], dtype=torch.float64)
IDS = torch.tensor([[0] * 5 + [1] * 9 + [2] * 6, [3] * 11 + [1] * 9])
PREFIX = torch.tensor([3, 7])
TABLE = drawn(ROWS + KEYS, seed=9, grad=False)
BIAS = drawn(HEADS, ROWS, KEYS, seed=10, grad=False)
BY_HEAD = torch.tensor([True, False, True, True])


def causal(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return q_idx >= kv_idx


def window(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return (q_idx - kv_idx).abs() <= 3


def document(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return IDS[b, q_idx] == IDS[b, kv_idx]


def prefix(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return kv_idx < PREFIX[b]


def dilated(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return (kv_idx % 3 == q_idx // 4) ^ BY_HEAD[h]


def nothing_early(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return (q_idx > 4) & (kv_idx < q_idx - 2 * h)


def shifted(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return q_idx >= kv_idx - h


def soft_cap(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return 2 * torch.tanh(score / 2)


def alibi(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return score + SLOPES[h] * (kv_idx - q_idx)


def relative(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return score + TABLE[q_idx - kv_idx + KEYS]


def bias(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return score + BIAS[h, q_idx, kv_idx]


def by_parity(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return torch.where((q_idx - kv_idx) % 2 == 0, score, score.abs().clamp(max=1.5) - 0.5 * (h == 2))


def hides(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return torch.where(q_idx >= kv_idx, score, -float("inf"))


def turned(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return torch.sin(score) + torch.cos(score * (q_idx - kv_idx)) - torch.tan(0.5 * torch.tanh(score) + h)


def no_score(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return -0.125 * (q_idx - kv_idx).abs()


MODS = [None, soft_cap, alibi, relative, bias, by_parity, hides, turned, no_score]
MASKS = [
    None,
    causal,
    window,
    document,
    prefix,
    dilated,
    nothing_early,
    shifted,
    flex.and_masks(causal, window, document),
    flex.or_masks(prefix, causal),
    flex.and_masks(flex.or_masks(prefix, causal), document),
]


def name(mod: Any) -> str:
    if isinstance(mod, str):
        return mod
    return "none" if mod is None else f"{mod.__qualname__.split('.')[0]}{MASKS.index(mod) if mod in MASKS else ''}"


@pytest.mark.parametrize(
    ("score_mod", "mask_mod"),
    [(mod, None) for mod in MODS] + [(None, mask) for mask in MASKS[1:]] + [(alibi, MASKS[-1]), (soft_cap, causal)],
    ids=name,
)
def test_answers_and_gradients_are_those_of_the_explicit_softmax(
    ctx: ga.GpuContext, score_mod: Any, mask_mod: Any
) -> None:
    q, k, v = operands()
    out, lse = interop.flex_attention(q, k, v, score_mod, mask_mod, return_lse=True, context=ctx)
    expected, expected_lse = explicit(q, k, v, score_mod, mask_mod)
    torch.testing.assert_close(out, expected, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-9, atol=1e-9)
    upstream = drawn(*out.shape, seed=5, grad=False)
    found = torch.autograd.grad(out, (q, k, v), upstream)
    wanted = torch.autograd.grad(expected, (q, k, v), upstream, materialize_grads=True)
    for gradient, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(gradient, other, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("score_mod", "mask_mod"),
    [(None, None), (alibi, causal), (soft_cap, window), (relative, document), (bias, prefix), (None, MASKS[-1])],
    ids=name,
)
def test_answers_are_those_of_torchs_own_function(ctx: ga.GpuContext, score_mod: Any, mask_mod: Any) -> None:
    q, k, v = operands(heads_kv=2, grad=False)
    block_mask = mask_mod and flex.create_block_mask(mask_mod, BATCH, HEADS, ROWS, KEYS, device="cpu", BLOCK_SIZE=4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that it is slow without torch.compile
        torch._dynamo.reset()
        options = {"scale": 0.4, "enable_gqa": True, "return_aux": flex.AuxRequest(lse=True)}
        wanted, aux = flex.flex_attention(q, k, v, score_mod, block_mask, **options)
    found, own = interop.flex_attention(q, k, v, score_mod, block_mask, **options, context=ctx)
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(own.lse, aux.lse, rtol=1e-9, atol=1e-9)
    assert own.max_scores is None


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_kernels_compute_a_traced_modification_forward_and_backward(emulated: ga.GpuContext, dtype: Any) -> None:
    q, k, v = (drawn(1, heads, 24, 32, seed=n, dtype=dtype) for n, heads in enumerate((4, 2, 2)))
    ids = torch.tensor([0] * 10 + [1] * 14)

    def packed(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (ids[q_idx] == ids[kv_idx]) & (q_idx >= kv_idx)

    def capped(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return 3 * torch.tanh((score + SLOPES[h].float() * (kv_idx - q_idx)) / 3)

    out = interop.flex_attention(q, k, v, capped, packed, enable_gqa=True, context=emulated)
    expected, _ = explicit(q, k, v, capped, packed)
    # The rounding of the dtype, of the weights and of the result.
    tolerance = 4 * torch.finfo(dtype).eps
    torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance)
    upstream = drawn(*out.shape, seed=5, dtype=dtype, grad=False)
    found = torch.autograd.grad(out, (q, k, v), upstream)
    for gradient, other in zip(found, torch.autograd.grad(expected, (q, k, v), upstream.double()), strict=True):
        largest = float(other.abs().max())
        torch.testing.assert_close(gradient, other, rtol=tolerance, atol=2 * tolerance * largest)


@pytest.fixture
def graphs(ctx: ga.GpuContext, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The graphs that are executed from now on."""
    seen: list[Any] = []
    execute = type(ctx.cudnn).execute
    monkeypatch.setattr(
        type(ctx.cudnn), "execute", lambda self, graph, arrays: seen.append(graph) or execute(self, graph, arrays)
    )
    return seen


@pytest.mark.parametrize("mod", [*MODS[1:], *MASKS[1:]], ids=name)
def test_kernels_have_a_plan_for_what_is_answered_without_them(
    ctx: ga.GpuContext, emulated: ga.GpuContext, mod: Mod, graphs: list[Any]
) -> None:
    interop.flex_attention(*operands(torch.float16, grad=False), *shared.split(mod), context=ctx)
    assert emulated.cudnn.inspect_plan(graphs[0]).key.kernel


def test_captured_tensors_learn(ctx: ga.GpuContext) -> None:
    q, k, v = operands()
    slopes, table, cap = (drawn(*shape, seed=7) for shape in ((HEADS,), (ROWS + KEYS, HEADS), ()))

    def learns(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score * cap + slopes[h].exp() * (kv_idx - q_idx) * 0.1 + table[q_idx - kv_idx + KEYS, h]

    out = interop.flex_attention(q, k, v, learns, causal, context=ctx)
    learned = (slopes, table, cap)
    found = torch.autograd.grad(out.square().sum(), learned)
    wanted = torch.autograd.grad(explicit(q, k, v, learns, causal)[0].square().sum(), learned)
    for gradient, other in zip(found, wanted, strict=True):
        assert other.abs().max() > 0
        torch.testing.assert_close(gradient, other, rtol=1e-9, atol=1e-9)


def test_only_what_is_asked_for_is_differentiated(ctx: ga.GpuContext) -> None:
    q, k, v = operands(grad=False)
    k.requires_grad_()
    interop.flex_attention(q, k, v, alibi, causal, context=ctx).sum().backward()
    assert k.grad is not None
    assert q.grad is None
    assert v.grad is None
    assert not interop.flex_attention(*(x.detach() for x in (q, k, v)), context=ctx).requires_grad


def test_a_causal_mask_is_one_that_kernels_skip_tiles_for(ctx: ga.GpuContext, graphs: list[Any]) -> None:
    q, k, v = (drawn(1, 2, 16, 32, seed=n, dtype=torch.float16, grad=False) for n in range(3))
    for mask_mod in (causal, flex.and_masks(causal, lambda b, h, q, kv: kv > 2), flex.or_masks(prefix, causal)):
        interop.flex_attention(q, k, v, None, mask_mod, context=ctx)
    assert [ctx.cudnn.inspect_plan(graph).key.causal for graph in graphs] == [True, True, False]


def test_views_and_one_sequence_of_keys_for_all_queries(ctx: ga.GpuContext) -> None:
    q, k, v = operands(grad=False)
    turned = q.transpose(1, 2).contiguous().transpose(1, 2)
    shared = [x[:1] for x in (k, v)]
    found = interop.flex_attention(turned, *shared, alibi, context=ctx)
    expected, _ = explicit(q, *(x.expand(BATCH, -1, -1, -1) for x in shared), alibi, None)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


def error_function(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return score + torch.erf(score)


def bits(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return (q_idx & 3) == (kv_idx & 3)


def branches(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    if q_idx > 3:
        return score
    return score * 2


def by_score(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return SLOPES[(score > 0).int()]


def in_steps(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return IDS[b][q_idx] == 1


def rounds(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return score.half() * 2


def fails(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return score.no_such_method()


@pytest.mark.parametrize(
    ("mod", "operation", "reason"),
    [
        (error_function, "aten.erf", "is no operation of a graph"),
        (bits, "aten.bitwise_and", "bits of integers"),
        (by_score, "aten.index", "depends on the score"),
        (in_steps, "aten.index", "all axes in one"),
        (rounds, "aten._to_copy", "rounds to torch.float16"),
        (branches, "", "Python decides by the value"),
        (fails, "", "no_such_method"),
    ],
    ids=name,
)
def test_what_no_graph_has_is_refused_with_its_operation_and_line(
    ctx: ga.GpuContext, mod: Any, operation: str, reason: str
) -> None:
    q, k, v = operands(grad=False)
    is_mask = mod.__code__.co_argcount == 4
    with pytest.raises(ga.Unsupported, match=reason) as caught:
        interop.flex_attention(q, k, v, *((None, mod) if is_mask else (mod,)), context=ctx)
    error = caught.value
    assert error.field.startswith("mask_mod" if is_mask else "score_mod")
    assert operation in str(error.value)
    first = mod.__code__.co_firstlineno
    lines = [f"{__file__}:{line}" for line in range(first, first + 4)]
    assert any(line in str(error) for line in lines), str(error)


def test_an_index_outside_of_its_tensor_is_refused_with_its_line(ctx: ga.GpuContext) -> None:
    q, k, v = operands(grad=False)

    def outside(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score + SLOPES[kv_idx]

    with pytest.raises(ga.InvalidRequest, match="out of bounds") as caught:
        interop.flex_attention(q, k, v, outside, context=ctx)
    assert f"{__file__}:{outside.__code__.co_firstlineno + 1}" in caught.value.field


def test_a_block_mask_of_other_lengths_or_without_a_mask_mod_is_refused(ctx: ga.GpuContext) -> None:
    q, k, v = operands(grad=False)
    longer = flex.create_block_mask(causal, BATCH, HEADS, 2 * ROWS, KEYS, device="cpu", BLOCK_SIZE=4)
    with pytest.raises(ga.InvalidRequest, match="rows and keys"):
        interop.flex_attention(q, k, v, None, longer, context=ctx)
    other = flex.create_block_mask(causal, BATCH, HEADS - 1, ROWS, KEYS, device="cpu", BLOCK_SIZE=4)
    with pytest.raises(ga.InvalidRequest, match="heads"):
        interop.flex_attention(q, k, v, None, other, context=ctx)
    made = flex.create_block_mask(causal, BATCH, HEADS, ROWS, KEYS, device="cpu", BLOCK_SIZE=4)
    blocks = flex.BlockMask.from_kv_blocks(
        made.full_kv_num_blocks, made.full_kv_indices, BLOCK_SIZE=4, seq_lengths=(ROWS, KEYS)
    )
    with pytest.raises(ga.Unsupported, match="without a mask_mod"):
        interop.flex_attention(q, k, v, None, blocks, context=ctx)


def test_arguments_that_do_not_fit_are_refused(ctx: ga.GpuContext) -> None:
    q, k, v = operands(grad=False)

    def refused(field: str, kind: Any = ga.InvalidRequest, *given: Any, **options: Any) -> None:
        with pytest.raises(kind) as caught:
            interop.flex_attention(*(given or (q, k, v)), **{"context": ctx, **options})
        assert caught.value.field == field

    refused("context", context=None)
    refused("query", ga.InvalidRequest, q[0], k, v)
    refused("key", ga.InvalidRequest, q, k.float(), v)
    refused("key", ga.InvalidRequest, q, k[:, :2], v[:, :2])
    refused("enable_gqa", ga.InvalidRequest, q, k[:, :3], v[:, :3], enable_gqa=True)
    refused("value", ga.InvalidRequest, q, k, v[:, :, :3])
    refused("key", ga.InvalidRequest, q, k[..., :4], v)
    refused("query", ga.Unsupported, q.long(), k.long(), v.long())
    refused("block_mask", block_mask=3)
    refused("mask_mod", block_mask=lambda b, h, q, kv: q - kv)
    refused("return_lse", return_lse=True, return_aux=flex.AuxRequest(lse=True))
    refused("return_aux", ga.Unsupported, return_aux=flex.AuxRequest(max_scores=True))


def test_it_blocks_no_running_loop(ctx: ga.GpuContext) -> None:
    async def attend() -> None:
        interop.flex_attention(*operands(), context=ctx)

    with pytest.raises(ga.WouldBlock, match="running event loop"):
        asyncio.run(attend())


def test_second_derivatives_and_a_closed_context_are_refused() -> None:
    q, k, v = operands()
    with ga.open_context("mock") as ctx:
        out = interop.flex_attention(q, k, v, context=ctx)
        (first,) = torch.autograd.grad(out.sum(), q, create_graph=True)
        with pytest.raises(ga.Unsupported, match="differentiable once"):
            first.sum().backward()
    with pytest.raises(ga.ActorStopped):
        interop.flex_attention(q, k, v, context=ctx)


# Cached traces

WINDOW = 3


@pytest.fixture
def traces(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the functions that were traced, in order."""
    from gpu_actors.interop import flex as ours

    found: list[str] = []
    trace = ours._trace

    def counted(name: str, *arguments: Any, **options: Any) -> Any:
        found.append(name)
        return trace(name, *arguments, **options)

    monkeypatch.setattr(ours, "_trace", counted)
    return found


def agrees_with(ctx: ga.GpuContext, score_mod: Mod | None, mask_mod: Mod | None = None) -> None:
    q, k, v = operands(grad=False)
    out = interop.flex_attention(q, k, v, score_mod, mask_mod, context=ctx)
    torch.testing.assert_close(out, explicit(q, k, v, score_mod, mask_mod)[0])


def test_a_function_is_traced_once(ctx: ga.GpuContext, traces: list[str]) -> None:
    slopes = drawn(HEADS, grad=False)

    def score_mod(score: Any, b: Any, h: Any, row: Any, key: Any) -> Any:
        return score + slopes[h] * (key - row)

    def mask_mod(b: Any, h: Any, row: Any, key: Any) -> Any:
        return row >= key

    for _ in range(3):
        agrees_with(ctx, score_mod, mask_mod)
    assert traces == ["score_mod", "mask_mod"]
    q, k, v = operands(torch.float32, grad=False)
    interop.flex_attention(q, k, v, score_mod, context=ctx)
    assert traces == ["score_mod", "mask_mod", "score_mod"], "scores of another dtype are traced on their own"


def test_what_a_function_reads_is_what_it_is_now(ctx: ga.GpuContext, traces: list[str]) -> None:
    """A changed number, a replaced tensor and a written tensor are read anew, also if folded before the trace."""
    slopes, factor, limit = drawn(HEADS, grad=False), 2.0, torch.tensor(5)

    def score_mod(score: Any, b: Any, h: Any, row: Any, key: Any) -> Any:
        return score * factor + slopes[h]

    def folded(score: Any, b: Any, h: Any, row: Any, key: Any) -> Any:
        return score + (slopes * 2)[h]

    def mask_mod(b: Any, h: Any, row: Any, key: Any) -> Any:
        return (key - row < int(limit)) & (row + WINDOW > 0)

    def all_agree() -> None:
        for mod in (score_mod, folded):
            agrees_with(ctx, mod, mask_mod)

    all_agree()
    factor = 0.5
    all_agree()
    slopes.mul_(3)
    all_agree()
    slopes.data.mul_(0.5)  # does not change the tensor's version
    all_agree()
    slopes = drawn(HEADS, seed=9, grad=False)
    all_agree()
    limit.fill_(2)
    all_agree()
    limit.data.fill_(4)
    all_agree()
    count = len(traces)
    agrees_with(ctx, score_mod)
    assert len(traces) == count, "what has not changed is kept"


def test_a_global_that_a_function_within_reads_counts(
    ctx: ga.GpuContext, traces: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def near(row: Any, key: Any) -> Any:
        return (row - key).abs() <= WINDOW

    def mask_mod(b: Any, h: Any, row: Any, key: Any) -> Any:
        return near(row, key)

    agrees_with(ctx, None, mask_mod)
    agrees_with(ctx, None, mask_mod)
    assert traces == ["mask_mod"]
    monkeypatch.setitem(globals(), "WINDOW", 1)
    agrees_with(ctx, None, mask_mod)
    assert traces == ["mask_mod"] * 2


def test_a_function_that_reads_an_object_is_traced_each_time(ctx: ga.GpuContext, traces: list[str]) -> None:
    class Settings:
        factor = 2.0

    settings = Settings()

    def score_mod(score: Any, b: Any, h: Any, row: Any, key: Any) -> Any:
        return score * settings.factor

    agrees_with(ctx, score_mod)
    settings.factor = 3.0
    agrees_with(ctx, score_mod)
    assert traces == ["score_mod"] * 2


def test_a_trace_lasts_no_longer_than_its_function(ctx: ga.GpuContext) -> None:
    import gc
    import weakref

    from gpu_actors.interop import flex_cache

    def made() -> tuple[Mod, Any]:
        slopes = drawn(HEADS, grad=False)
        return (lambda score, b, h, row, key: score + slopes[h]), weakref.ref(slopes)

    score_mod, slopes = made()
    agrees_with(ctx, score_mod)
    assert score_mod in flex_cache._known
    del score_mod
    gc.collect()
    assert slopes() is None
