"""Caches of `generate`: steps over padded batches read the keys in place and answer as eager attention does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

import gpu_actors as ga
from gpu_actors import FlashAttnHandle

torch = pytest.importorskip("torch", reason="Transformers' models are torch's")
transformers = pytest.importorskip("transformers", reason="its caches are what is tested")
bridge = pytest.importorskip("gpu_actors.interop.transformers")
models: Any = pytest.importorskip("support.torch_models")
copies: Any = pytest.importorskip("support.torch_copies")

FAMILIES = ("llama", "llama-scaled", "qwen2", "qwen3", "mistral-window", "gemma2", "gemma3", "gpt-oss")
CACHES: dict[str, dict[str, Any]] = {
    "dynamic": {},
    "static": {"cache_implementation": "static", "disable_compile": True},
}
# Windows of 7 begin within the padding, at its end, and behind it.
LEFT = torch.tensor([[1] * 9, [0] * 5 + [1] * 4, [0] + [1] * 8])


@pytest.fixture(scope="module")
def ctx() -> Iterator[ga.GpuContext]:
    with ga.open_context("mock") as ctx:
        yield ctx


@pytest.fixture
def paged(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The options of each request over a cache from now on."""
    seen: list[dict[str, Any]] = []
    send = FlashAttnHandle.paged_forward

    def watch(self: Any, *operands: Any, **options: Any) -> Any:
        seen.append(options)
        return send(self, *operands, **options)

    monkeypatch.setattr(FlashAttnHandle, "paged_forward", watch)
    return seen


def build(family: str) -> Any:
    torch.manual_seed(0)
    model = models.FAMILIES[family]().eval()
    for name, parameter in model.named_parameters():
        if "sinks" in name:  # from_config leaves them uninitialised
            torch.nn.init.normal_(parameter)
    return model


def texts(model: Any, count: int, **options: Any) -> Any:
    ids = torch.randint(1, 250, LEFT.shape, generator=torch.Generator().manual_seed(1))
    greedy = {"max_new_tokens": count, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    with torch.no_grad():
        return model.generate(ids, attention_mask=LEFT, **greedy, **options)


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("family", FAMILIES)
def test_no_step_copies_keys_and_tokens_are_those_of_eager_attention(
    ctx: ga.GpuContext, paged: list[dict[str, Any]], family: str, cache: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    count, copied = 12, []
    attend = bridge._attend

    def watched(context: Any, module: Any, q: Any, k: Any, v: Any, *rest: Any, **given: Any) -> Any:
        with copies.Copies() as mode:
            mode.watch(k, v)
            made = attend(context, module, q, k, v, *rest, **given)
        if q.shape[2] == 1:
            copied.extend(mode.copies)
        return made

    monkeypatch.setattr(bridge, "_attend", watched)
    model = build(family)
    wanted = texts(model, count, **CACHES[cache])
    bridge.register(ctx, "caches", model=model)
    assert texts(model, count, **CACHES[cache]).tolist() == wanted.tolist()
    assert copied == []
    # A layer with a window needs no request over a cache once its window is past the padding.
    assert len(paged) >= 2
    assert all(options["cache_leftpad"].max() > 0 for options in paged)


def test_kernels_read_windows_and_sinks_behind_padding() -> None:
    model = build("gpt-oss")
    wanted = texts(model, 3, **CACHES["static"])
    with ga.open_context("emulated") as emulated:
        bridge.register(emulated, "caches", model=model)
        assert texts(model, 3, **CACHES["static"]).tolist() == wanted.tolist()


# Calls of three rows over seven keys for which a request over a cache would lose something


def operands(grad: bool = False) -> list[Any]:
    random = torch.Generator().manual_seed(2)
    shapes = ((3, 4, 3, 8), (3, 2, 9, 8), (3, 2, 9, 8))
    return [torch.randn(shape, generator=random).requires_grad_(grad) for shape in shapes]


def call(ctx: ga.GpuContext, given: list[Any], mask: Any = LEFT, **options: Any) -> Any:
    columns = mask.T.to(torch.int32)[:, :, None, None]
    return bridge._attend(ctx, torch.nn.Module(), *given, columns, **options)[0]


def plain(given: list[Any], mask: Any = LEFT) -> Any:
    """The formula's output (batch, rows, heads, dim), with 0 in rows of padding."""
    q, k, v = given
    k, v = (x.repeat_interleave(2, 1) for x in (k, v))
    rows, keys = q.shape[2], k.shape[2]
    later = torch.arange(keys) > torch.arange(keys - rows, keys)[:, None]
    hidden = later[None, None] | ~mask.bool()[:, None, None]
    weights = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(hidden, -torch.inf).softmax(-1)
    return (weights.nan_to_num() @ v).transpose(1, 2)


def padded(*firsts: int) -> Any:
    return (torch.arange(9) >= torch.tensor(firsts)[:, None]).int()


@pytest.mark.parametrize("mask", [LEFT, padded(0, 7, 8), padded(3, 9, 0)], ids=["left", "among the rows", "no key"])
def test_rows_are_those_of_the_formula_and_rows_of_padding_are_0(
    ctx: ga.GpuContext, paged: list[dict[str, Any]], mask: Any
) -> None:
    given = operands()
    torch.testing.assert_close(call(ctx, given, mask), plain(given, mask), rtol=1e-4, atol=1e-5)
    assert len(paged) == 1


def test_keys_behind_the_last_that_counts_are_not_read(ctx: ga.GpuContext, paged: list[dict[str, Any]]) -> None:
    mask = padded(0, 5, 1) * (torch.arange(9) < torch.tensor([9, 8, 7])[:, None])
    given = operands()
    for x in given[1:]:
        x.masked_fill_(~mask.bool()[:, None, :, None], torch.nan)
    wanted = plain([x.nan_to_num() for x in given], mask)
    kept = mask[:, -3:].bool()
    torch.testing.assert_close(call(ctx, given, mask)[kept], wanted[kept], rtol=1e-4, atol=1e-5)
    assert len(paged) == 1


def test_gradients_flow(ctx: ga.GpuContext, paged: list[dict[str, Any]]) -> None:
    given, beside = operands(grad=True), operands(grad=True)
    call(ctx, given).square().sum().backward()
    plain(beside).square().sum().backward()
    for one, other in zip(given, beside, strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-5)
    assert paged == []


def test_an_autocast_casts(ctx: ga.GpuContext) -> None:
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert call(ctx, operands()).dtype == torch.bfloat16


@pytest.mark.filterwarnings("ignore:.*torch.jit.script")  # torch's own use of it
def test_tangents_are_refused(ctx: ga.GpuContext) -> None:
    q, k, v = operands()
    with torch.no_grad(), torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(q, torch.ones_like(q))
        with pytest.raises(ga.Unsupported, match="forward-mode"):
            call(ctx, [dual, k, v])


def test_dropout_drops(ctx: ga.GpuContext) -> None:
    given = operands()
    torch.manual_seed(3)
    assert not torch.allclose(call(ctx, given, dropout=0.5), plain(given), atol=1e-2)


@pytest.mark.parametrize(
    "ask",
    [
        pytest.param(lambda ctx: call(ctx, operands(), LEFT * (torch.arange(9) != 6)), id="holes"),
        pytest.param(lambda ctx: call(ctx, [x[:, :, :9] for x in prompt()]), id="a prompt"),
    ],
)
def test_other_keys_are_packed(
    ctx: ga.GpuContext, paged: list[dict[str, Any]], ask: Callable[[ga.GpuContext], Any]
) -> None:
    assert ask(ctx).isfinite().all()
    assert paged == []


def prompt() -> list[Any]:
    random = torch.Generator().manual_seed(2)
    return [torch.randn(3, heads, 9, 8, generator=random) for heads in (4, 2, 2)]
