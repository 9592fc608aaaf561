"""What an invariant context refuses, and which kernel it takes: `tests/properties/test_invariance.py` checks bits."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from emulated.caller_streams import CallerDevice
from emulated.memory import host_view
from fakes.known_device import known_device
from inside.arrays import DeviceArray
from inside.cuda import CudaDevice
from inside.emulation import EmulatedApi
from inside.handles import start_context

import gpu_actors as ga
from gpu_actors.errors import Unqualified
from gpu_actors.planning.backward import pose_backward
from gpu_actors.planning.cached import pose_cached
from gpu_actors.planning.forward import pose_forward
from gpu_actors.testing import FaultPlan


@pytest.fixture(scope="module", params=["sm_80", "sm_90a"])
def ctx(request: pytest.FixtureRequest) -> Iterator[ga.GpuContext]:
    with ga.open_context("mock", ga.ContextOptions(arch=request.param, invariant=True)) as opened:
        yield opened


def zeros(*shape: int, dtype: Any = np.float16) -> np.ndarray:
    return np.zeros(shape, dtype)


def forward(rows: int = 100, dim: int = 64, dtype: Any = np.float16, **options: Any) -> ga.FlashForward:
    return ga.FlashForward(zeros(2, rows, 8, dim, dtype=dtype), *[zeros(2, 100, 2, dim, dtype=dtype)] * 2, **options)


def paged(rows: int = 1, **options: Any) -> ga.PagedForward:
    cache = zeros(2, 100, 2, 64)
    lengths = np.array([50, 90], np.int32)
    return ga.PagedForward(q=zeros(2, rows, 8, 64), k_cache=cache, v_cache=cache, cache_seqlens=lengths, **options)


def packed(**options: Any) -> ga.FlashForward:
    ends = {"cu_seqlens_q": np.array([0, 3, 9], np.int32), "cu_seqlens_k": np.array([0, 40, 100], np.int32)}
    return ga.FlashForward(zeros(9, 8, 64), *[zeros(100, 2, 64)] * 2, **{**ends, **options})


def test_the_option_is_a_bool() -> None:
    for value in (1, None, "yes"):
        with pytest.raises(ga.InvalidRequest) as refused:
            ga.ContextOptions(invariant=value)  # type: ignore[arg-type]
        assert refused.value.field == "invariant"


REQUESTS = [forward(), forward(1), forward(causal=True), packed(), paged(), paged(70)]


@pytest.mark.parametrize("request_", REQUESTS)
def test_one_kernel_and_tile_take_any_number_of_rows(ctx: ga.GpuContext, request_: Any) -> None:
    key = ctx.flash_attn.inspect_key(request_)
    assert (key.kernel, key.row_tile) == ("decode_mma", 64)


@pytest.mark.parametrize(
    ("request_", "kernel"),
    [
        (forward(dtype=np.float32), "decode_simple"),
        (forward(dtype=np.float64), "decode_simple"),
        (forward(dim=20), "decode_simple"),
        (forward(dim=512, dtype=ml_dtypes.bfloat16), "decode_mma"),
        (forward(causal=True, alignment="top_left"), "forward_mma"),
        (forward(99, causal=True, alignment="top_left"), "forward_mma"),
        (forward(dtype=np.float64, lse_dtype="float64", return_lse=True), "forward_simple"),
    ],
)
def test_options_alone_choose_another(ctx: ga.GpuContext, request_: Any, kernel: str) -> None:
    assert ctx.flash_attn.inspect_key(request_).kernel == kernel


def test_rows_that_count_from_the_first_key_have_their_bits_at_any_length() -> None:
    """With `top_left`, row i sees keys 0 to i, whatever the numbers of rows and keys."""
    rng = np.random.default_rng(5)
    q, k, v = rng.standard_normal((3, 1, 90, 2, 64)).astype(np.float16)
    options: dict[str, Any] = {"causal": True, "alignment": "top_left", "return_lse": True}
    with ga.open_context("emulated", ga.ContextOptions(arch="sm_80", invariant=True)) as ctx:
        ends = np.array([0, 90], np.int32)
        packed = {"cu_seqlens_q": ends, "cu_seqlens_k": ends}
        whole = ctx.flash_attn.forward(q, k, v, **options).result(60)
        for part in (
            ctx.flash_attn.forward(q[:, :70], k, v, **options).result(60),
            ctx.flash_attn.forward(q, k[:, :70], v[:, :70], **options).result(60),
            ctx.flash_attn.forward(q, k, v, seqused_k=np.array([70], np.int32), **options).result(60),
            ctx.flash_attn.forward(q[0], k[0], v[0], **packed, **options).result(60),
        ):
            out, lse = part.out.reshape(-1, 2, 64)[:70], part.lse.reshape(2, -1)[:, :70]
            np.testing.assert_array_equal(out.view(np.uint16), whole.out[0, :70].view(np.uint16))
            np.testing.assert_array_equal(lse, whole.lse[0, :, :70])


def test_the_mock_device_computes_graphs_that_no_kernel_takes() -> None:
    graph = ga.OperationGraph()
    a, b = (graph.tensor(uid=uid, dims=(1, 2, 8, 8), dtype="float32") for uid in (1, 2))
    graph.output(graph.matmul(a, b), uid=3, dtype="float32")
    given = dict.fromkeys((1, 2), np.ones((1, 2, 8, 8), np.float32))
    with ga.open_context("mock", ga.ContextOptions(invariant=True)) as ctx:
        assert (ctx.cudnn.execute(graph, given).result(60)[3] == 8).all()


def test_explain_says_the_rule(ctx: ga.GpuContext) -> None:
    found = ctx.flash_attn.explain(forward(causal=True))
    reasons = {verdict.family: verdict.reason for verdict in found.verdicts}
    assert "invariant=True" in reasons["forward_mma"]
    assert "invariant=True" in reasons["decode_sm90"]
    assert [verdict.family for verdict in found.verdicts if verdict.taken] == ["decode_mma"]
    assert "`invariant`" in {cell.option for cell in found.options}


@pytest.mark.parametrize(
    ("request_", "field", "nearest"),
    [
        (forward(dropout_p=0.1), "dropout_p", 0.0),
        (forward(5, pack_gqa=False), "pack_gqa", True),
        (paged(num_splits=2), "num_splits", 1),
    ],
)
def test_what_cannot_keep_the_bits_is_refused(ctx: ga.GpuContext, request_: Any, field: str, nearest: Any) -> None:
    with pytest.raises(ga.Unsupported) as refused:
        ctx.flash_attn.submit(request_).result(60)
    assert (refused.value.field, refused.value.nearest) == (field, nearest)
    accepted = dataclasses.replace(request_, **{field: nearest})
    assert ctx.flash_attn.submit(accepted).result(60).out.any() == 0


def test_a_cascade_is_refused_and_one_split_is_what_there_is(ctx: ga.GpuContext) -> None:
    spec = {"num_blocks": 4, "page_size": 8, "kv_heads": 1, "head_dim": 64, "dtype": "float16"}
    with pytest.raises(ga.Unsupported, match="invariant") as refused, ctx.kv_cache(**spec, cascade=True):
        pass
    assert (refused.value.field, refused.value.nearest) == ("cascade", "auto")
    problem, _ = pose_cached(paged(), known_device(ctx.info))
    assert (problem.num_splits, problem.invariant) == (1, True)


@pytest.mark.parametrize("invariant", [False, True])
def test_a_shared_prefix_is_read_once_only_without_the_option(invariant: bool) -> None:
    events: list[ga.TraceEvent] = []
    options = ga.ContextOptions(arch="sm_80", invariant=invariant, on_event=events.append)
    spec = {"num_blocks": 60, "page_size": 16, "kv_heads": 1, "head_dim": 64, "dtype": "float16"}
    rows = zeros(256, 1, 64)
    with ga.open_context("mock", options) as ctx, ctx.kv_cache(**spec) as cache:
        prompt = cache.create().result(60)
        cache.append(prompt, rows, rows).result(60)
        seqs = [cache.fork(prompt).result(60) for _ in range(9)]
        new = zeros(9, 1, 1, 64)
        cache.attend(zeros(9, 1, 4, 64), seqs, k=new, v=new).result(60)
    fields = next(event.fields for event in events if event.name == "launch.cascade")
    assert fields["taken"] is not invariant
    assert ("invariant=True" in fields["reason"]) is invariant


def on_device(shape: tuple[int, ...], address: int = 1 << 20) -> DeviceArray:
    strides = tuple(int(np.prod(shape[axis + 1 :])) * 2 for axis in range(len(shape)))
    return DeviceArray(address, shape, strides, np.dtype(np.float16), 0)


def test_where_operands_lie_refuses_and_changes_no_kernel(ctx: ga.GpuContext) -> None:
    q, k = on_device((2, 5, 8, 64)), on_device((2, 100, 2, 64))
    apart = on_device((2, 100, 2, 64), (1 << 20) + 2)
    assert pose_forward(ga.FlashForward(q, k, k), known_device(ctx.info))[1].kernel == "decode_mma"
    for name, request in (("k", ga.FlashForward(q, apart, k)), ("v", ga.FlashForward(q, k, apart))):
        with pytest.raises(ga.Unsupported, match="decode_mma cannot read") as refused:
            pose_forward(request, known_device(ctx.info))
        assert refused.value.field == name
    one = dataclasses.replace(paged(), k_cache=apart, v_cache=k)
    with pytest.raises(ga.Unsupported) as refused:
        pose_cached(one, known_device(ctx.info))
    assert refused.value.field == "k_cache"
    caches = [on_device((2, 100, 64)), on_device((2, 100, 64), (1 << 20) + 2)]
    lists = {"k_caches": caches[:1] * 2, "v_caches": caches}
    request_ = ga.BatchedDecode(q=zeros(2, 8, 64), **lists, seq_lens=np.array([5, 9], np.int32))
    with pytest.raises(ga.Unsupported) as refused:
        pose_cached(request_, known_device(ctx.info))
    assert refused.value.field == "v_caches"


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_bounds_of_packed_sequences_may_lie_on_the_device(arch: str, dtype: Any) -> None:
    rng = np.random.default_rng(3)
    request = packed(causal=True, return_lse=True)
    drawn = {name: rng.standard_normal(getattr(request, name).shape).astype(dtype) for name in "qkv"}
    drawn["bias"] = rng.standard_normal((2, 8, 6, 60)).astype(dtype)
    request = dataclasses.replace(request, **drawn)
    with on_emulated_device(arch) as (ctx, device):
        expected = ctx.flash_attn.submit(request).result(300)

        def answer(ends_k: list[int]) -> tuple[Any, Any]:
            arrays = {**drawn, "cu_seqlens_q": request.cu_seqlens_q, "cu_seqlens_k": np.array(ends_k, np.int32)}
            arrays["out"] = np.zeros_like(drawn["q"])
            moved = {name: device.memory.empty(array.shape, array.dtype.name) for name, array in arrays.items()}
            for name, array in arrays.items():
                host_view(moved[name])[...] = array
            longest = {"max_seqlen_q": 6, "max_seqlen_k": 60}
            found = ctx.flash_attn.submit(dataclasses.replace(request, **moved, **longest)).result(300)
            lse = DeviceArray(found.lse.data.ptr, found.lse.shape, found.lse.strides, np.dtype(np.float32), 0)
            return host_view(moved["out"]).copy(), host_view(lse).copy()

        out, lse = answer([0, 40, 100])
        assert out.tobytes() == expected.out.tobytes()
        assert lse.tobytes() == expected.lse.tobytes()
        for broken in ([0, 40, 39], [0, 40, 101]):  # a negative length, and an end beyond the keys
            out, lse = answer(broken)
            assert out[:3].tobytes() == expected.out[:3].tobytes(), "of the other sequence"
            assert np.isnan(out[3:]).all()
            assert np.isnan(lse[:, 3:]).all()


@contextlib.contextmanager
def on_emulated_device(arch: str) -> Iterator[tuple[ga.GpuContext, CudaDevice]]:
    """An invariant context on an emulated device, and the device, on which programs may have arrays."""
    options = ga.ContextOptions(arch=arch, invariant=True)
    opened: list[CudaDevice] = []

    def device() -> CudaDevice:
        opened.append(CallerDevice(0, options, EmulatedApi(arch, ga.EmulationOptions(), options)))
        opened[-1].info = dataclasses.replace(opened[-1].info, invariant=True)
        return opened[-1]

    with contextlib.closing(start_context(device, options)) as ctx:
        yield ctx, opened[0]


def test_gradients_are_deterministic(ctx: ga.GpuContext) -> None:
    x, lse = zeros(2, 100, 8, 64), np.zeros((2, 8, 100), np.float32)
    request = ga.FlashBackward(x, x, x, dout=x, out=x, lse=lse)
    assert ctx.flash_attn.inspect_key(request).deterministic
    device = known_device(dataclasses.replace(ctx.info, runs_kernels=True))  # NumPy answers on a mock device
    for field, value, nearest, more in (
        ("q_positions", np.array([[0, 2], [0, 2]], np.int32), (2,), {"window_size": (5, 5)}),
        ("bias", zeros(2, 8, 1, 100), (2, 8, 100, 100), {}),
    ):
        with pytest.raises(ga.Unsupported, match="deterministic with ContextOptions") as refused:
            pose_backward(dataclasses.replace(request, **{field: value}, **more), device)
        assert (refused.value.field, refused.value.value, refused.value.nearest) == (field, value.shape, nearest)
        accepted = np.zeros(nearest, value.dtype)
        assert pose_backward(dataclasses.replace(request, **{field: accepted}, **more), device)[1].deterministic


PLACES = np.zeros(2, np.int32)


@pytest.mark.parametrize(
    "options",
    [
        {"q_positions": PLACES},
        {"k_positions": PLACES},
        {"alignment": "top_left", "causal": True},
        {"alibi_signed": True, "alibi_slopes": np.ones(8, np.float32)},
    ],
    ids=lambda options: next(iter(options)),
)
def test_an_option_that_batches_of_8_bits_lack_is_refused_by_its_name(options: dict[str, Any]) -> None:
    name, default = next(iter(options)), "bottom_right" if "alignment" in options else None
    default = False if "alibi_signed" in options else default
    request = forward(dtype=ml_dtypes.float8_e4m3fn, **options)
    with ga.open_context("mock", ga.ContextOptions(arch="sm_80", invariant=True)) as ctx:
        with pytest.raises(ga.Unsupported, match="q of 16 bits") as refused:
            ctx.flash_attn.inspect_key(request)
        assert (refused.value.field, refused.value.nearest) == (name, default)
        assert ctx.flash_attn.inspect_key(dataclasses.replace(request, **{name: default})).kernel == "decode_mma"
        halves = {side: getattr(request, side).astype(np.float16) for side in "qkv"}
        assert ctx.flash_attn.inspect_key(dataclasses.replace(request, **halves)).kernel == "forward_mma"


def test_a_kernel_that_fails_its_proof_is_not_replaced() -> None:
    """Another kernel would give the next request other bits."""
    q, k, v = np.random.default_rng(0).standard_normal((3, 1, 16, 2, 64)).astype(np.float16)
    faults = FaultPlan().wrong("decode_mma")
    options = ga.ContextOptions(arch="sm_80", qualify="all", fault_plan=faults, invariant=True)
    with ga.open_context("emulated", options) as ctx:
        with pytest.raises(Unqualified, match="decode_mma"):
            ctx.flash_attn.forward(q, k, v).result(300)
        assert ctx.health().quarantined
        assert not any(verdict.taken for verdict in ctx.flash_attn.explain(ga.FlashForward(q, k, v)).verdicts)


def test_gradients_of_a_sequence_have_the_same_bits_in_any_batch() -> None:
    rng = np.random.default_rng(1)
    q, dout = rng.standard_normal((2, 3, 70, 4, 64)).astype(np.float16)
    k, v = rng.standard_normal((2, 3, 70, 2, 64)).astype(np.float16)
    for arch in ("sm_80", "sm_90a"):
        for seed in (1, 2):
            emulation = ga.EmulationOptions(schedule="random", seed=seed)
            options = ga.ContextOptions(arch=arch, invariant=True, emulation=emulation)
            with ga.open_context("emulated", options) as ctx:
                out, lse = ctx.flash_attn.forward(q, k, v, causal=True, return_lse=True).result(300)
                whole = ctx.flash_attn.backward(dout, q, k, v, out, lse, causal=True).result(300)
                one = slice(1, 2)
                parts = (array[one] for array in (dout, q, k, v, out, lse))
                alone = ctx.flash_attn.backward(*parts, causal=True).result(300)
            if seed == 1:
                first = whole
            for name in ("dq", "dk", "dv"):
                assert np.array_equal(getattr(whole, name).view(np.uint16), getattr(first, name).view(np.uint16))
                assert np.array_equal(getattr(alone, name)[0].view(np.uint16), getattr(whole, name)[1].view(np.uint16))


def test_a_prepared_request_over_packed_sequences_has_the_same_bits() -> None:
    rng = np.random.default_rng(2)
    request = packed(causal=True)
    request = dataclasses.replace(
        request, **{n: rng.standard_normal(getattr(request, n).shape).astype(np.float16) for n in "qkv"}
    )
    with ga.open_context("emulated", ga.ContextOptions(arch="sm_80", invariant=True)) as ctx:
        expected = ctx.flash_attn.submit(request).result(300).out
        prepared = ctx.flash_attn.prepare(request).result(300)
        assert np.array_equal(prepared.run(request.q).out.view(np.uint16), expected.view(np.uint16))
