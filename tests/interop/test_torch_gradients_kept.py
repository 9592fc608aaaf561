"""A tensor that requires grad is refused if its gradient would be lost, at every entry and for every operand."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from cases.array_entries import ENTRIES, Entry

import gpu_actors as ga

torch = pytest.importorskip("torch")

OPERANDS = [
    (name, field)
    for name, entry in ENTRIES.items()
    for field, array in entry.arrays.items()
    if (array[0] if isinstance(array, list) else array).dtype.kind == "f"
]


@pytest.fixture(scope="module")
def ctx() -> Iterator[ga.GpuContext]:
    with ga.open_context("mock") as ctx:
        yield ctx


def with_grad(entry: Entry, field: str) -> dict[str, Any]:
    """The entry's arrays, one of which requires grad."""

    def leaf(array: np.ndarray) -> Any:
        return torch.from_numpy(array.copy()).requires_grad_()

    array = entry.arrays[field]
    return {**entry.arrays, field: [leaf(part) for part in array] if isinstance(array, list) else leaf(array)}


@pytest.mark.parametrize(("name", "field"), OPERANDS)
def test_a_tensor_that_requires_grad_is_refused_by_name(ctx: ga.GpuContext, name: str, field: str) -> None:
    entry = ENTRIES[name]
    with pytest.raises(ga.InvalidRequest, match=r"requires grad.*gpu_actors\.interop\.torch\.attention") as caught:
        entry.ask(ctx, with_grad(entry, field)).result(60)
    several = isinstance(entry.arrays[field], list)
    assert caught.value.field == {"execute": f"tensor {field}"}.get(name, f"{field}[0]" if several else field)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize(("name", "field"), OPERANDS)
def test_it_is_taken_where_the_caller_has_switched_gradients_off(
    ctx: ga.GpuContext, name: str, field: str, mode: Any
) -> None:
    entry = ENTRIES[name]
    given = with_grad(entry, field)
    with mode():
        reply = entry.ask(ctx, given)
    reply.result(60)  # the mode in which the request is made counts


def test_an_output_that_requires_grad_is_refused(ctx: ga.GpuContext) -> None:
    x = torch.zeros(1, 2, 1, 8)
    with pytest.raises(ga.InvalidRequest, match="requires grad") as caught:
        ctx.flash_attn.forward(x, x, x, out=torch.zeros(1, 2, 1, 8).requires_grad_()).result(60)
    assert caught.value.field == "out"


def test_what_was_computed_from_a_parameter_is_refused_and_its_detached_value_is_taken(ctx: ga.GpuContext) -> None:
    x = torch.ones(1, 2, 1, 8)
    q = x * torch.nn.Parameter(torch.tensor(2.0))
    with pytest.raises(ga.InvalidRequest, match=r"tensor\.detach\(\)"):
        ctx.flash_attn.forward(q, x, x).result(60)
    torch.testing.assert_close(ctx.flash_attn.forward(q.detach(), x, x).result(60).out, x)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script")
def test_a_tangent_is_not_dropped(ctx: ga.GpuContext) -> None:
    x = torch.ones(1, 2, 1, 8)
    with torch.autograd.forward_ad.dual_level():
        q = torch.autograd.forward_ad.make_dual(x, x)
        with pytest.raises(ga.InvalidRequest, match="is a dual tensor") as caught:
            ctx.flash_attn.forward(x, q, x).result(60)
    assert caught.value.field == "k"


def test_a_dispatch_key_is_refused_as_the_request_would_be(ctx: ga.GpuContext) -> None:
    x = torch.zeros(1, 2, 1, 8)
    with pytest.raises(ga.InvalidRequest, match="requires grad"):
        ctx.flash_attn.inspect_key(ga.FlashForward(x.clone().requires_grad_(), x, x))
