"""torch's operator gives the results that it promises its tracers, in every form, compiled and exported."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import pytest
from cases.finite_masks import LOW
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

import gpu_actors as ga

torch = pytest.importorskip("torch")
interop = pytest.importorskip("gpu_actors.interop.torch")
operator = pytest.importorskip("gpu_actors.interop.torch_attention")
FakeTensorMode = torch._subclasses.FakeTensorMode
ops = torch.ops.gpu_actors


@pytest.fixture(scope="module")
def ctx() -> Iterator[ga.GpuContext]:
    with ga.open_context("mock") as ctx:
        yield ctx


def drawn(*shape: int, seed: int = 0, dtype: Any = torch.float32) -> Any:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def words(*values: Any) -> Any:
    return torch.tensor(values, dtype=torch.int32)


def qkv(batch: int = 2, rows: int = 3, keys: int = 4, dim_v: int = 6, **how: Any) -> dict[str, Any]:
    shapes = {"q": (batch, rows, 4, 8), "k": (batch, keys, 2, 8), "v": (batch, keys, 2, dim_v)}
    return {name: drawn(*shape, seed=seed, **how) for seed, (name, shape) in enumerate(shapes.items())}


def packed(rows: tuple[int, ...], keys: tuple[int, ...], **how: Any) -> dict[str, Any]:
    dense = qkv(1, sum(rows), sum(keys), **how)
    ends = {side: [sum(each[:n]) for n in range(len(each) + 1)] for side, each in (("q", rows), ("k", keys))}
    return {name: x[0] for name, x in dense.items()} | {f"cu_seqlens_{side}": words(*ends[side]) for side in "qk"}


def heads_first(**given: Any) -> dict[str, Any]:
    """The operands as transposed views of (batch, heads, rows, dim)."""
    return {name: x.transpose(1, 2).contiguous().transpose(1, 2) for name, x in qkv(**given).items()}


def gaps(**given: Any) -> dict[str, Any]:
    """The operands as parts of larger tensors, with gaps between sequences."""
    return {name: torch.cat([x, x], 1)[:, : x.shape[1]] for name, x in qkv(**given).items()}


BASE = qkv()
USED = {"seqused_q": words(2, 3), "seqused_k": words(4, 1)}
SEED = torch.tensor(7)
FORMS: dict[str, dict[str, Any]] = {
    "plain": BASE,
    "float64": qkv(dtype=torch.float64),
    "float16": qkv(dtype=torch.float16),
    "bfloat16": qkv(dtype=torch.bfloat16),
    "float8": {name: x.to(torch.float8_e4m3fn) for name, x in BASE.items()},
    "one q": {**BASE, "q": drawn(1, 3, 4, 8)},
    "one k and v": {**BASE, "k": drawn(1, 4, 2, 8), "v": drawn(1, 4, 2, 6)},
    "one v": {**BASE, "v": drawn(1, 4, 2, 6), "causal": True},
    "one of all": qkv(1),
    "one q of padded sequences": {**BASE, **USED, "q": drawn(1, 3, 4, 8)},
    "packed": packed((1, 0, 4), (3, 2, 2)),
    "packed, float64": packed((1, 0, 4), (3, 2, 2), dtype=torch.float64),
    "packed, longest given": {**packed((1, 4), (3, 2)), "max_seqlen_q": 9, "max_seqlen_k": 5},
    "packed bias": {**packed((1, 4), (3, 2)), "bias": drawn(2, 4, 4, 3)},
    "packed mask": {**packed((1, 4), (3, 2)), "bias": drawn(1, 1, 5, 6) > 0},
    "packed, no sequences": packed((), ()),
    "packed, no rows": packed((0, 0), (3, 2)),
    "padded": {**BASE, **USED},
    "padded, float64": {**qkv(dtype=torch.float64), **USED, "causal": True},
    "padded keys": {**BASE, "seqused_k": words(4, 1), "sinks": drawn(4)},
    "padded rows": {**BASE, "seqused_q": words(0, 1), "alibi_slopes": drawn(2, 4)},
    "padded, bias of each": {**BASE, **USED, "bias": drawn(2, 4, 3, 4)},
    "padded, bias of all": {**BASE, **USED, "bias": drawn(1, 4, 3, 4)},
    "padded, mask of each": {**BASE, **USED, "bias": drawn(2, 1, 3, 4) > 0},
    "padded, one sequence": {**qkv(1), "seqused_k": words(2)},
    "padded, one head": {**{name: x[:, :, :1] for name, x in qkv().items()}, "seqused_k": words(2, 0)},
    "padded, one row": {**qkv(rows=1), "seqused_k": words(2, 0)},
    "padded, no rows": {**qkv(rows=0), "seqused_k": words(2, 0)},
    "padded, no keys": {**qkv(keys=0), "seqused_q": words(2, 0)},
    "padded, gaps": {**gaps(), **USED},
    **{
        f"bias of {shape}": {**BASE, "bias": drawn(*shape), "softcap": 2.0}
        for shape in [(2, 4, 3, 4), (1, 4, 3, 4), (2, 1, 3, 4), (2, 4, 1, 4), (1, 1, 1, 4)]
    },
    "bias of float32": {**qkv(dtype=torch.float16), "bias": drawn(1, 4, 3, 4)},
    "mask": {**BASE, "bias": drawn(2, 4, 3, 4) > 0},
    "mask of one row": {**BASE, "bias": drawn(1, 1, 1, 4) > 0},
    "mask and sinks": {**BASE, "bias": drawn(1, 4, 3, 4) > 0, "sinks": drawn(4)},
    "bias of another layout": {**BASE, "bias": drawn(3, 4, 2, 4).permute(2, 1, 0, 3)},
    "sinks of float32": {**qkv(dtype=torch.float16), "sinks": drawn(4)},
    "sinks of float16": {**qkv(dtype=torch.float16), "sinks": drawn(4, dtype=torch.float16)},
    "slopes": {**BASE, "alibi_slopes": drawn(4), "alibi_signed": True},
    "dropout": {**BASE, "dropout_p": 0.3, "dropout_seed": 5},
    "a drawn seed": {**BASE, "dropout_p": 0.3, "drawn_seed": SEED, "deterministic": True},
    "positions": {**BASE, "causal": True, "q_positions": words([1, 2], [0, 1]), "k_positions": words([0, 2], [3, 1])},
    "windows": {**BASE, "window_left": 1, "window_right": 0, "sink_tokens": 1, "attention_chunk": 2},
    "compute": {**BASE, "compute": "bf16"},
    "transposed": heads_first(),
    "transposed, float64": heads_first(dtype=torch.float64),
    "gaps": gaps(),
    "rows with a stride": {name: torch.stack([x, x], -1)[..., 0] for name, x in BASE.items()},
    "no rows": qkv(rows=0),
    "no keys": qkv(keys=0),
    "no sequences": qkv(0),
    "nothing": qkv(0, 0, 0),
}  # fmt: skip
DEFAULTS: dict[str, Any] = {
    **dict.fromkeys(operator._OPERANDS),
    "causal": False,
    "alignment": "bottom_right",
    "window_left": -1,
    "window_right": -1,
    "softmax_scale": None,
    "softcap": 0.0,
    "sink_tokens": 0,
    "attention_chunk": 0,
    "alibi_signed": False,
    "dropout_p": 0.0,
    "dropout_seed": 0,
    "max_seqlen_q": None,
    "max_seqlen_k": None,
    "compute": None,
    "deterministic": False,
    "context": None,
    "drawn_seed": None,
}
UNTRAINED = ("float8", "one q of padded sequences")


def arguments(ctx: ga.GpuContext, form: str, grad: bool = False) -> list[Any]:
    """The arguments of the operator. grad: those that may require a gradient do require it."""
    given = {**DEFAULTS, **FORMS[form], "context": ctx.number}
    if grad:
        for name in operator._GRADIENTS:
            if operator._is_learnt(given[name]):
                given[name] = given[name].detach().requires_grad_()
    return list(given.values())


def of_backward(ctx: ga.GpuContext, form: str) -> list[Any]:
    given = arguments(ctx, form)
    out, lse = ops.attention(*given)
    return [drawn(*out.shape, seed=9).to(out.dtype), out, lse, *given]


def layout(tensors: Any) -> list[Any]:
    """Shape, strides, dtype and device. Strides are left out if there are no elements: NumPy's differ from torch's."""
    return [(tuple(x.shape), x.stride() if x.numel() else None, x.dtype, x.device) for x in tensors]


@pytest.mark.parametrize("form", FORMS)
def test_every_result_is_laid_out_as_it_is_promised(ctx: ga.GpuContext, form: str) -> None:
    calls = [(ops.attention, arguments(ctx, form))]
    if form not in UNTRAINED:
        calls.append((ops.attention_backward, of_backward(ctx, form)))
    for called, passed in calls:
        with FakeTensorMode() as mode:
            promised = called(*(mode.from_tensor(x) if isinstance(x, torch.Tensor) else x for x in passed))
        assert layout(called(*passed)) == layout(promised)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # by torch
@pytest.mark.parametrize("form", [form for form in FORMS if form != "nothing"])  # torch makes no fake copies of it
def test_torchs_own_check_of_operators(ctx: ga.GpuContext, form: str) -> None:
    promises = ("test_faketensor",) if form == "float8" else ("test_schema", "test_faketensor")
    traced = ("test_autograd_registration", "test_aot_dispatch_dynamic")
    given = arguments(ctx, form, grad=form not in UNTRAINED)
    torch.library.opcheck(ops.attention, given, test_utils=(*promises, *traced))
    if form not in UNTRAINED:
        torch.library.opcheck(ops.attention_backward, of_backward(ctx, form), test_utils=promises)


# Compiled and exported


@st.composite
def requests(draw: st.DrawFn) -> dict[str, Any]:
    """The keyword arguments of a call of attention."""
    dtype = draw(st.sampled_from([torch.float32, torch.float64, torch.bfloat16]))
    batch, rows, keys = draw(st.integers(1, 3)), draw(st.integers(0, 4)), draw(st.integers(0, 4))
    kind = draw(st.sampled_from(["dense", "shared", "padded", "packed"]))
    if kind == "packed":
        lengths = [tuple(draw(st.lists(st.integers(0, 3), min_size=batch, max_size=batch))) for _ in "qk"]
        made = packed(*lengths, dtype=dtype)
        rows, keys = (max(1, *each) for each in lengths)
    else:
        made = draw(st.sampled_from([qkv, heads_first, gaps]))(batch=batch, rows=rows, keys=keys, dtype=dtype)
    if kind == "shared":
        for name in draw(st.sampled_from(["q", "k", "v", "kv"])):
            made[name] = made[name][:1]
    if kind == "padded":
        for side, most in (("q", rows), ("k", keys)):
            if draw(st.booleans()):
                made[f"seqused_{side}"] = words(*(draw(st.integers(0, most)) for _ in range(batch)))
    if draw(st.booleans()) and (kind != "padded" or (rows and keys)):  # a bias of packed rows has rows and keys
        axes = [draw(st.sampled_from(sorted({1, extent}))) for extent in (batch, 4, rows)]
        made["bias"] = drawn(*axes, keys, seed=5, dtype=draw(st.sampled_from([dtype, torch.float32])))
        hidden = draw(st.sampled_from([None, False, -torch.inf, *LOW]))  # how half of the keys are hidden
        if hidden is not None:
            seen = made["bias"] > -0.5
            made["bias"] = torch.where(seen, made["bias"], hidden).to(made["bias"].dtype) if hidden else seen
    if draw(st.booleans()):
        made["sinks"] = drawn(4, seed=6)
    if draw(st.booleans()):
        made["alibi_slopes"] = drawn(*draw(st.sampled_from([(4,), (batch, 4)])), seed=7)
    made["causal"] = draw(st.booleans())
    made["window_size"] = draw(st.sampled_from([(-1, -1), (1, 0), (2, 1)]))
    made["softcap"] = draw(st.sampled_from([0.0, 2.0]))
    return made


def compared(ctx: ga.GpuContext, function: Any, compiled: Any, tensors: dict[str, Any]) -> None:
    """A compiled function has the bits and the layout of the plain one, its gradients too."""
    found = []
    for called in (compiled, function):
        learnt = {
            n: x.detach().requires_grad_()
            for n, x in tensors.items()
            if n in operator._GRADIENTS and x.is_floating_point()
        }
        out, lse = called({**tensors, **learnt})
        gradients = torch.autograd.grad(out, list(learnt.values()), torch.ones_like(out), allow_unused=True)
        found.append([out.detach(), lse, *gradients])
    assert layout(found[0]) == layout(found[1])
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


@pytest.mark.timeout(240)
@given(request=requests(), dynamic=st.booleans())
@settings(max_examples=15, deadline=None, phases=[Phase.generate])  # shrinking would compile each smaller example
def test_a_compiled_request_is_the_eager_one(ctx: ga.GpuContext, request: dict[str, Any], dynamic: bool) -> None:
    tensors = {name: value for name, value in request.items() if isinstance(value, torch.Tensor)}
    options = {name: value for name, value in request.items() if name not in tensors}

    def function(tensors: dict[str, Any]) -> Any:
        out, lse = interop.attention(**tensors, **options, context=ctx, return_lse=True)
        return out.transpose(0, 1) * 2, lse

    torch.compiler.reset()
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    compared(ctx, function, compiled, tensors)


@pytest.mark.filterwarnings(
    "ignore:.torch.jit.script_method. is deprecated:DeprecationWarning"
)  # torch's own use of it
@pytest.mark.timeout(240)  # the first one compiles torch's own headers
@pytest.mark.parametrize("form", ["one q", "padded, bias of each"])
def test_inductor_compiles_and_a_program_exports_each_layout(ctx: ga.GpuContext, form: str) -> None:
    tensors = FORMS[form]

    def function(tensors: dict[str, Any]) -> Any:
        out, lse = interop.attention(**tensors, context=ctx, return_lse=True)
        return out + 1, lse * 2

    class Module(torch.nn.Module):  # type: ignore[name-defined]
        def forward(self, tensors: dict[str, Any]) -> Any:
            return function(tensors)

    torch.compiler.reset()
    with torch._inductor.utils.fresh_cache():
        compared(ctx, function, torch.compile(function, fullgraph=True), tensors)
    program = torch.export.export(Module(), (tensors,))
    promised = [node.meta["val"] for node in program.graph.output_node().args[0]]
    exported = program.module()(tensors)
    assert layout(exported) == [(tuple(x.shape), x.stride(), x.dtype, x.device) for x in promised]
    for one, other in zip(exported, function(tensors), strict=True):
        assert torch.equal(one, other)


def test_a_graph_picks_sequences_by_a_mask(ctx: ga.GpuContext) -> None:
    """The number of sequences is unknown to a tracer."""
    keep = torch.tensor([True, False, True])

    def function(q: Any, k: Any, v: Any, keep: Any) -> Any:
        return interop.attention(q[keep], k[keep], v[keep], context=ctx)

    operands = qkv(3).values()
    torch.compiler.reset()
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
        assert torch.equal(compiled(*operands, keep), function(*operands, keep))


def test_a_graph_of_cuda_captures_neither_operator(ctx: ga.GpuContext) -> None:
    """torch.compile(mode="reduce-overhead") captures what it takes for safe, and a call here waits for its result."""
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd
    from torch._inductor.utils import is_cudagraph_unsafe_fx_node

    seen: list[Any] = []

    def keep(graph: Any, _: Any) -> Any:
        seen.extend(node for node in graph.graph.nodes if "gpu_actors" in str(node.target))
        return make_boxed_func(graph.forward)

    backend = aot_autograd(fw_compiler=keep, bw_compiler=keep)
    compiled = torch.compile(lambda q, k, v: interop.attention(q, k, v, context=ctx) + 1, backend=backend)
    compiled(*(x.requires_grad_() for x in qkv().values())).sum().backward()
    assert [str(node.target) for node in seen] == [
        f"gpu_actors.attention{suffix}.default" for suffix in ("", "_backward")
    ]
    assert all(is_cudagraph_unsafe_fx_node(node) for node in seen)


def test_the_table_has_every_argument() -> None:
    assert list(DEFAULTS) == list(operator._NAMES)
    named = {name for form in FORMS.values() for name in form}
    assert named >= set(inspect.signature(interop.attention).parameters) - {
        *("context", "window_size", "alignment", "softmax_scale", "return_lse")
    }
