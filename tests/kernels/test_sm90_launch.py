"""How forward_sm90 is chosen and launched: dispatch, what TMA can move, tensor maps, the schedule's numbers."""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from emulated.forward import key_of, problem_of
from fakes.cuda import FakeCuda
from fakes.service import service
from inside.arrays import DeviceArray
from inside.attention import ScoreMod
from inside.compiling import asset_headers
from inside.cuda import CudaFailure
from inside.cuda import tensor_map as driver_maps
from inside.devices import Buffer, TensorMap
from inside.emulation import EmulatedBuffer, build_module
from support.gate import kernel_source

import gpu_actors as ga
from gpu_actors.kernels.dispatch import dispatch_key, explain, program_of
from gpu_actors.kernels.forward_sm90 import (
    COUNTER,
    FORWARD_SM90,
    schedule_layout,
    sections_of,
    sm90_packer,
    tma_refusal,
)
from gpu_actors.kernels.params import divider, forward_layout
from gpu_actors.kernels.program import NO_VALUES, Target
from gpu_actors.kernels.tiles import tile_of

KERNEL = "forward_sm90"
Q = np.zeros((2, 200, 4, 64), np.float16)
KV = np.zeros((2, 300, 2, 64), np.float16)
BASE = problem_of(Q, KV, KV)
BIAS = ("float32", True, False)


E4M3 = {"dtype": "float8_e4m3fn", "kv_dtype": "float8_e4m3fn", "out_dtype": "bfloat16", "compute": "fp8"}
WIDE_BIAS_8 = {**E4M3, "bias": BIAS, "descales": True}
WINDOW = {"window_size": (9, 0)}
MODIFIED = {"score_mod": ScoreMod("")}


def heads(dim: int, dim_v: int | None = None) -> dict[str, Any]:
    return {"head_dim": dim, "head_dim_v": dim_v or dim}


class TestDispatch:
    @pytest.mark.parametrize(
        "changes",
        [
            *(heads(dim) for dim in (32, 40, 64, 96, 128, 192, 256)),
            {"layout": "varlen"},
            *({"bias": (dtype, False, True), "dropout_p": 0.1} for dtype in ("float16", "float32", "bool")),
            {"dropout_p": 0.1, "q_positions": 2, "head_dim": 192},
            {"bias": BIAS, "dropout_p": 0.1, "head_dim": 192},
            {"bias": BIAS, "head_dim": 256},
            {"dropout_p": 0.1, "head_dim": 256},
            {**MODIFIED, "k_positions": 2, "head_dim": 256},
            {**WIDE_BIAS_8, **heads(128), "causal": True},
            {**WIDE_BIAS_8, **heads(64), **WINDOW},
            {**WIDE_BIAS_8, **heads(192), **WINDOW},
            {**WIDE_BIAS_8, **heads(128), **WINDOW, "bias": ("bool", True, False)},
        ],
        ids=str,
    )
    def test_it_takes_problems_on_hopper(self, changes):
        key = dispatch_key(dataclasses.replace(BASE, **changes), "sm_90a")
        assert (key.kernel, key.persistent) == (KERNEL, True)

    @pytest.mark.parametrize("arch", ["sm_80", "sm_89", "sm_100a", "sm_120a"])
    def test_other_architectures_take_mma_sync(self, arch):
        assert dispatch_key(BASE, arch).kernel == "forward_mma"
        assert "Hopper" in explain(BASE, arch)[0].reason

    @pytest.mark.parametrize(
        ("changes", "kernel", "field", "reason"),
        [
            ({"head_dim": 36}, "forward_simple", "head_dim", "multiples of 8"),
            ({"softmax_scale": 2.0**-40}, "forward_mma", "softmax_scale", "in fp32"),
            ({"softcap": 5000.0}, "forward_mma", "softcap", "in fp32"),
            ({"dtype": "float32", "kv_dtype": "float32", "out_dtype": "float32", "compute": "tf32"},
             "forward_mma", "dtype", ""),
            # Options that would spill registers together.
            ({"bias": BIAS, **MODIFIED}, "forward_mma", "bias", "score modification"),
            ({"dropout_p": 0.1, **MODIFIED}, "forward_mma", "dropout_p", "score modification"),
            ({"bias": BIAS, "k_positions": 2}, "forward_mma", "bias", "positions"),
            ({"dropout_p": 0.1, "q_positions": 1, "head_dim": 200}, "forward_mma", "dropout_p", "192"),
            ({"bias": BIAS, "dropout_p": 0.1, "head_dim_v": 256}, "forward_mma", "bias", "192"),
            ({"bias": BIAS, "layout": "varlen"}, None, "bias", "dense batches"),
            ({**WIDE_BIAS_8, **heads(128), **WINDOW}, "forward_simple", "bias", ""),
            ({**WIDE_BIAS_8, **heads(80), "attention_chunk": 8, "causal": True}, "forward_simple", "bias", ""),
        ],
        ids=str,
    )  # fmt: skip
    def test_what_it_refuses_goes_elsewhere_and_explain_says_why(self, changes, kernel, field, reason):
        problem = dataclasses.replace(BASE, **changes)
        refusal = FORWARD_SM90.refusal(problem, "sm_90a")
        assert refusal is not None
        assert (refusal.field, reason in refusal.reason) == (field, True)
        if kernel is not None:
            assert dispatch_key(problem, "sm_90a").kernel == kernel
            verdict = explain(problem, "sm_90a")[0]
            assert (verdict.family, verdict.taken) == (KERNEL, False)
            assert reason in verdict.reason


class TestOperands:
    SHAPE = (2, 200, 4, 64)
    STRIDES = (51200, 256, 64, 1)

    def test_contiguous_operands_suit_tensor_maps(self):
        assert tma_refusal("q", self.SHAPE, self.STRIDES, 4096) is None

    @pytest.mark.parametrize(
        ("strides", "address"),
        [
            ((51200, 260, 65, 1), 0),  # heads 130 bytes apart
            ((51200, 252, 64, 1), 0),
            ((0, 256, 64, 1), 0),
            ((51200, -256, 64, 1), 0),
            ((1 << 40, 256, 64, 1), 0),
            ((51200, 256, 1, 4), 0),
            (STRIDES, 8),
        ],
    )
    def test_others_are_refused_by_name(self, strides, address):
        refusal = tma_refusal("k", self.SHAPE, strides, address)
        assert refusal is not None
        assert refusal.field == "k"
        assert "TMA" in refusal.reason

    def test_an_axis_of_one_element_may_have_any_stride(self):
        assert tma_refusal("q", (1, 200, 1, 64), (7, 64, 3, 1)) is None
        assert tma_refusal("q", (0, 200, 4, 64), (1, 1, 1, 1)) is None

    @pytest.mark.parametrize(("head_dim", "row"), [(64, 128), (72, 144), (256, 512)])
    def test_what_an_axis_of_one_element_strides_over_is_a_row(self, head_dim, row):
        """The driver checks the stride of such an axis too."""
        q, kv = np.zeros((1, 1, 1, head_dim), np.float16), np.zeros((1, 200, 1, head_dim), np.float16)
        problem = dataclasses.replace(problem_of(q, kv, kv), return_lse=False)
        far = 1 << 41  # bytes, more than a tensor map takes
        strides = {"q": (far, far, far, 1), "out": (1, 1, 1, 1)}
        buffers = {
            name: Buffer(4096, array.shape, strides.get(name, (far, 8 * head_dim, 3, 1)), "float16")
            for name, array in {"q": q, "k": kv, "v": kv, "out": q}.items()
        }
        maps: list[TensorMap] = []

        def encode(tensor_map: TensorMap) -> bytes:
            maps.append(tensor_map)
            return bytes(128)

        counter = Buffer(64, (1,), (1,), "int32")
        sm90_packer(problem, key_of(problem, "sm_90a", KERNEL), encode)({**buffers, COUNTER: counter}, NO_VALUES)
        found = sorted((given.shape[1], given.strides) for given in maps)
        assert found == [(1, (row, row, row))] * 2 + [(200, (16 * head_dim, row, row))] * 2

    def test_packing_refuses_what_no_plan_should_have_sent(self):
        with pytest.raises(ga.InvalidRequest, match="TMA") as refused:
            packed(k=OPERANDS["k"]._replace(strides=(38400, 132, 66, 1)))
        assert refused.value.field == "k"


def dense(shape: tuple[int, ...]) -> Buffer:
    return Buffer(4096, shape, (shape[1] * shape[2] * 64, shape[2] * 64, 64, 1), "float16")


OPERANDS = {
    "q": dense(Q.shape),
    "k": dense(KV.shape),
    "v": dense(KV.shape),
    "out": dense(Q.shape),
    COUNTER: Buffer(64, (1,), (1,), "int32"),
    "lse": Buffer(4096, (2, 4, 200), (800, 200, 1), "float32"),
}


def packed(**changed: Buffer) -> bytes:
    key = key_of(BASE, "sm_90a", KERNEL)
    return sm90_packer(BASE, key, lambda tensor_map: bytes(128))({**OPERANDS, **changed}, NO_VALUES)


@pytest.fixture
def launched() -> list[str]:
    return []


@pytest.fixture
def cuda(launched: list[str]) -> FakeCuda:
    """A driver whose kernels note that they ran and compute nothing."""

    def kernel(name: str) -> Any:
        return lambda memory, params, geometry: launched.append(name)

    return FakeCuda({name: kernel(name) for name in ("forward_mma", "forward_simple", KERNEL)})


class TestDeviceArrays:
    @staticmethod
    def array(cuda: FakeCuda, shape: tuple[int, ...], strides: tuple[int, ...], offset: int = 0) -> DeviceArray:
        block = cuda.put(np.zeros(1 << 20, np.uint8))
        dtype = np.dtype(ml_dtypes.bfloat16)
        return DeviceArray(block.address + offset, shape, tuple(2 * step for step in strides), dtype, 0, owner=block)

    @pytest.mark.parametrize(
        ("pitch", "offset", "kernel"),
        [(72, 16, KERNEL), (66, 0, "forward_mma"), (72, 8, "forward_mma")],
    )
    def test_strides_and_addresses_decide_and_the_key_says_so(
        self, cuda, launched, monkeypatch, caplog, pitch, offset, kernel
    ):
        shape, strides = (1, 40, 2, 64), (80 * pitch, 2 * pitch, pitch, 1)
        q, k, v = (self.array(cuda, shape, strides, offset) for _ in range(3))
        with service(cuda, monkeypatch) as ctx:
            request = ga.FlashForward(q, k, v)
            caplog.set_level("INFO", logger="gpu_actors")
            assert ctx.flash_attn.inspect_key(request).kernel == kernel
            assert ("without TMA" in caplog.text) == (kernel != KERNEL)
            ctx.flash_attn.submit(request).result(60)
            assert launched == [kernel]

    @pytest.mark.parametrize(("pitch", "kernel"), [(64, "backward_sm90"), (66, "backward_mma")])
    def test_the_key_of_a_gradient_says_so_too(self, cuda, monkeypatch, pitch, kernel):
        shape = (1, 40, 2, 64)
        strides, plain = (80 * pitch, 2 * pitch, pitch, 1), (5120, 128, 64, 1)
        q, v, out, dout = (self.array(cuda, shape, plain) for _ in range(4))
        lse = dataclasses.replace(self.array(cuda, (1, 2, 40), (160, 80, 2)), dtype=np.dtype(np.float32))
        with service(cuda, monkeypatch) as ctx:
            request = ga.FlashBackward(self.array(cuda, shape, strides), q, v, out=out, dout=dout, lse=lse)
            assert ctx.flash_attn.inspect_key(request).kernel == kernel

    def test_the_same_strides_at_another_address_get_another_plan(self, cuda, launched, monkeypatch):
        shape, strides = (1, 40, 2, 64), (5120, 128, 64, 1)
        with service(cuda, monkeypatch) as ctx:
            for offset in (0, 2, 0):
                operands = [self.array(cuda, shape, strides, offset) for _ in range(3)]
                ctx.flash_attn.forward(*operands).result(60)
            assert launched == [KERNEL, "forward_mma", KERNEL]

    @pytest.mark.parametrize(("offset", "kernel"), [(0, KERNEL), (4, "forward_mma")])
    def test_a_graph_goes_where_its_operands_can_be_loaded(self, cuda, launched, monkeypatch, offset, kernel):
        graph, shape = ga.OperationGraph(), (1, 2, 40, 64)
        q, k, v = (graph.tensor(uid=uid, dims=shape, dtype="bfloat16") for uid in (1, 2, 3))
        out = graph.matmul(graph.softmax(graph.matmul(q, graph.transpose(k)) * 0.125), v)
        graph.output(out, uid=4, dtype="bfloat16")
        arrays = {uid: self.array(cuda, shape, (5120, 2560, 64, 1), offset) for uid in (1, 2, 3)}
        with service(cuda, monkeypatch) as ctx:
            ctx.cudnn.execute(graph, arrays).result(60)
        assert launched == [kernel]


class TestDriver:
    MAP = TensorMap(4096, "bfloat16", (64, 200, 4, 2), (512, 128, 102400), (64, 128, 1, 1), "128B")

    @pytest.fixture
    def calls(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
        seen: list[Any] = []
        monkeypatch.setattr(driver_maps, "library", lambda: SimpleNamespace(cuTensorMapEncodeTiled=self.encode(seen)))
        driver_maps.encode_tensor_map.cache_clear()
        yield seen
        driver_maps.encode_tensor_map.cache_clear()

    @staticmethod
    def encode(seen: list[Any]) -> Any:
        """The driver's function as a C function of its signature, which writes 128 bytes of 7."""
        word, long = ctypes.c_uint32, ctypes.c_uint64
        lists = [ctypes.POINTER(long), ctypes.POINTER(long), ctypes.POINTER(word), ctypes.POINTER(word)]
        enums = [ctypes.c_int] * 4

        @ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_int, word, ctypes.c_void_p, *lists, *enums)
        def encode(place, dtype, rank, address, shape, strides, box, steps, *modes):
            seen.append((place % 64, dtype, rank, address, shape[:rank], strides[: rank - 1], box[:rank], modes))
            assert steps[:rank] == [1] * rank
            ctypes.memset(place, 7, 128)
            return 1 if dtype == 6 else 0

        return encode

    def test_the_driver_is_given_the_map_at_64_bytes(self, calls):
        assert driver_maps.encode_tensor_map(self.MAP) == b"\7" * 128
        assert calls == [(0, 9, 4, 4096, [64, 200, 4, 2], [512, 128, 102400], [64, 128, 1, 1], (0, 3, 3, 0))]

    def test_maps_that_differ_in_one_field_are_different_maps(self, calls):
        """An allocator may return the same address again for an array of other strides."""
        others = {"address": 8192, "dtype": "float32", "shape": (64, 200, 4, 3), "strides": (512, 128, 204800)}
        others |= {"box": (64, 64, 1, 1), "swizzle": "64B"}
        assert others.keys() == set(TensorMap._fields)
        maps = [self.MAP, *(self.MAP._replace(**{name: value}) for name, value in others.items())]
        for one in maps * 2:
            driver_maps.encode_tensor_map(one)
        assert len(calls) == len(maps)

    def test_a_refusal_is_an_error(self, calls):
        with pytest.raises(CudaFailure, match="refuses"):
            driver_maps.encode_tensor_map(self.MAP._replace(dtype="float16"))


class TestSchedule:
    @pytest.mark.parametrize("divisor", [1, 2, 3, 7, 127, 128, 641, 1000003, (1 << 30) - 1, 1 << 30])
    def test_division_by_multiplication_is_exact(self, divisor):
        multiplier, shift = divider(divisor)
        edges = {n for k in (0, 1, 2, (1 << 31) // divisor) for n in range(k * divisor - 1, k * divisor + 2)}
        for n in {*edges, (1 << 31) - 1, 12345678} - {-1}:
            if 0 <= n < 1 << 31:
                quotient = n if multiplier == 0 else (n * multiplier >> 32) >> shift
                assert quotient == n // divisor
        assert multiplier < 1 << 32

    def test_a_block_a_multiprocessor_and_no_more_than_tiles(self):
        key = key_of(BASE, "sm_90a", KERNEL)
        assert program_of(BASE, key, Target()).parts[-1].geometry.grid == (16, 1, 1)
        assert program_of(BASE, key, Target(5)).parts[-1].geometry.grid == (5, 1, 1)
        large = dataclasses.replace(BASE, batch=100, total_q=20000, total_k=30000)
        assert program_of(large, key, Target()).parts[-1].geometry.grid == (132, 1, 1)
        assert program_of(large, key, Target(114)).parts[-1].geometry.grid == (114, 1, 1)
        assert program_of(BASE, key, Target()).parts[-1].geometry.block == (512, 1, 1)

    def test_sections_hold_what_l2_does(self):
        tile = tile_of(key_of(BASE, "sm_90a", KERNEL))
        assert sections_of(BASE, tile) == (16, 2, 8, 8)
        long = dataclasses.replace(BASE, seqlen_k=1 << 17)
        assert sections_of(long, tile).heads == 2, "two query heads share the KV head that fits"

    def test_the_struct_is_what_a_compiler_makes_of_it(self):
        source = (
            '#include "forward_sm90/params.cuh"\nextern "C" __global__ void sizes(int* out) {'
            "out[0] = sizeof(Sm90Params); out[1] = __builtin_offsetof(Sm90Params, params);"
            "out[2] = __builtin_offsetof(Sm90Params, schedule); out[3] = sizeof(Schedule);"
            "out[4] = __builtin_offsetof(Sm90Params, out); }"
        )
        macros = dict(kernel_source(key_of(BASE, "sm_90a", KERNEL)).macros)
        module = build_module(source, macros, asset_headers(source))
        out = EmulatedBuffer.of(np.zeros(5, np.int32), "out")
        module.launch("sizes", 1, 32, 0, out.address.to_bytes(8, "little"), [out])
        size, params, schedule, schedule_size, last_map = out.view(np.int32, (5,)).tolist()
        assert (last_map, params, schedule) == (384, 512, 512 + forward_layout().size)
        assert schedule_size == schedule_layout().size
        assert len(packed()) == size
