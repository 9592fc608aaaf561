"""Kernels of a user's own: compiled, checked against their parameters and launched, without a GPU."""

from __future__ import annotations

import ctypes
import pickle
import threading
import time
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from cases.own_kernels import SAXPY
from fakes.tensor import HostTensor
from inside.actors import LaunchKernel

import gpu_actors as ga
from gpu_actors import KernelActor
from gpu_actors.testing import FaultPlan

MANY = """
struct Pair { int first; double second; };
using index_t = int;
extern "C" __global__ void many(Pair pair, index_t offset, bool negate, unsigned char low, const unsigned short* bits,
                                double* out, void* raw) {
  if (threadIdx.x == 0) {
    out[0] = pair.first + pair.second;
    out[1] = negate ? -offset : offset;
    out[2] = low;
    out[3] = bits ? bits[0] : -1;
    if (raw) static_cast<unsigned char*>(raw)[0] = low;
  }
}
"""
PAIR = np.dtype({"names": ["first", "second"], "formats": ["i4", "f8"], "offsets": [0, 8], "itemsize": 16})
RESULT_S = 60.0


class CPair(ctypes.Structure):
    _fields_ = [("first", ctypes.c_int), ("second", ctypes.c_double)]


def make(ctx: ga.GpuContext, source: Any, entry: str) -> ga.CompiledKernel:
    return ctx.kernel(source, entry).result(RESULT_S)


@pytest.fixture(scope="module")
def emulated() -> Iterator[ga.GpuContext]:
    with ga.open_context("emulated") as ctx:
        yield ctx


@pytest.fixture(scope="module")
def saxpy(emulated: ga.GpuContext) -> ga.CompiledKernel:
    return make(emulated, SAXPY, "saxpy")


@pytest.fixture(scope="module")
def many(emulated: ga.GpuContext) -> ga.CompiledKernel:
    return make(emulated, MANY, "many")


def vectors(n: int = 1000) -> tuple[np.ndarray, np.ndarray]:
    return np.arange(n, dtype=np.float32), np.ones(n, np.float32)


# Launching


def test_a_kernel_computes_and_writes_its_arrays_in_place(saxpy: ga.CompiledKernel) -> None:
    x, y = vectors()
    result = saxpy.launch(4, 256, (1000, 2.0, x, y)).result(RESULT_S)
    assert list(result) == ["y"]
    assert result["y"] is y
    np.testing.assert_array_equal(y, 2 * x + 1)
    np.testing.assert_array_equal(x, np.arange(1000))


def test_arguments_may_be_named_and_an_array_may_be_passed_twice(saxpy: ga.CompiledKernel) -> None:
    x, _ = vectors()
    saxpy.launch((4, 1, 1), [256], {"y": x, "x": x, "a": 3, "n": np.int64(1000)}).result(RESULT_S)
    np.testing.assert_array_equal(x, 4 * np.arange(1000))


def test_every_type_of_argument_reaches_the_kernel(many: ga.CompiledKernel) -> None:
    bits = np.array([77], np.uint16)
    for pair in (np.array((7, 0.5), PAIR), np.array([(7, 0.5)], PAIR)[0], CPair(7, 0.5), bytes(CPair(7, 0.5))):
        out, raw = np.zeros(4), np.zeros(3, np.int8)
        many.launch(1, 32, (pair, np.int32(9), True, 200, bits, out, raw)).result(RESULT_S)
        assert out.tolist() == [7.5, -9, 200, 77]
        assert raw.tolist() == [-56, 0, 0]
    out = np.zeros(4)
    answer = many.launch(1, 32, (CPair(1, 2), np.int32(9), False, 0, None, out, None)).result(RESULT_S)
    assert out.tolist() == [3, 9, 0, -1]
    assert list(answer) == ["out"]


def test_arrays_of_another_library_are_written_in_place(saxpy: ga.CompiledKernel) -> None:
    x, y = vectors(8)
    theirs = HostTensor(y)
    assert saxpy.launch(1, 32, (8, 1.0, HostTensor(x), theirs)).result(RESULT_S)["y"] is theirs
    np.testing.assert_array_equal(y, x + 1)


def test_what_is_not_named_in_out_is_not_written_back(many: ga.CompiledKernel) -> None:
    out, raw = np.zeros(4), np.zeros(1, np.int8)
    answer = many.launch(1, 32, (CPair(1, 2), np.int32(0), False, 5, None, out, raw), out="raw").result(RESULT_S)
    assert (list(answer), raw.tolist(), out.tolist()) == (["raw"], [5], [0, 0, 0, 0])
    answer = many.launch(1, 32, (CPair(1, 2), np.int32(0), False, 5, None, out, raw), out=[5, "raw"]).result(RESULT_S)
    assert (list(answer), out.tolist()) == (["out", "raw"], [3, 0, 5, -1])


def test_an_array_without_elements_is_an_argument_too(saxpy: ga.CompiledKernel) -> None:
    x, y = vectors(0)
    assert saxpy.launch(1, 32, (0, 1.0, x, y)).result(RESULT_S)["y"] is y


def test_half_precision_and_bfloat16_are_what_cuda_calls_them(emulated: ga.GpuContext) -> None:
    source = """
      struct __nv_bfloat16 { unsigned short bits; };
      extern "C" __global__ void copy(const __nv_bfloat16* x, __nv_bfloat16* y) { y[threadIdx.x] = x[threadIdx.x]; }
    """
    copy = make(emulated, source, "copy")
    x, y = np.arange(32).astype(ml_dtypes.bfloat16), np.zeros(32, ml_dtypes.bfloat16)
    copy.launch(1, 32, (x, y)).result(RESULT_S)
    np.testing.assert_array_equal(x, y)
    with pytest.raises(ga.InvalidRequest, match="must be bfloat16"):
        copy.launch(1, 32, (x, np.zeros(32, np.float16))).result(RESULT_S)


def own_asm(statement: str) -> str:
    return f"""
      extern "C" __global__ void f(const float* x, float* y) {{
        const float a = x[threadIdx.x];
        float b;
        {statement}
        y[threadIdx.x] = b;
      }}
    """


def test_asm_of_a_users_own_is_executed(emulated: ga.GpuContext) -> None:
    statement = """asm("{.reg .f32 t; rcp.approx.ftz.f32 t, %1; lg2.approx.f32 %0, t;}" : "=f"(b) : "f"(a));"""
    x, y = np.exp2(np.arange(32)).astype(np.float32), np.zeros(32, np.float32)
    make(emulated, own_asm(statement), "f").launch(1, 32, (x, y)).result(RESULT_S)
    np.testing.assert_array_equal(y, -np.arange(32, dtype=np.float32))


def test_asm_that_is_not_known_is_named_with_its_line(emulated: ga.GpuContext) -> None:
    x = np.ones(32, np.float32)
    source = ga.KernelSource("mine.cu", own_asm('asm("sqrt.rn.f32 %0, %1;" : "=f"(b) : "f"(a));'), ("f",))
    words = r"assembly in f.*mine\.cu:5: .*the instruction 'sqrt.rn.f32' is not known"
    with pytest.raises(ga.LaunchError, match=words):
        make(emulated, source, "f").launch(1, 32, (x, x.copy())).result(RESULT_S)


def test_asm_of_another_form_is_a_compile_error_with_its_line(emulated: ga.GpuContext) -> None:
    statement = 'asm("x %[b];" : [b] "=f"(b));'
    source = ga.KernelSource("mine.cu", own_asm(statement), ("f",))
    with pytest.raises(ga.CompileError, match=r"mine\.cu:5: an asm statement that the emulated device") as caught:
        make(emulated, source, "f")
    assert caught.value.source_line == statement


def test_dynamic_shared_memory_and_the_packages_headers(emulated: ga.GpuContext) -> None:
    source = """
      #include "ptx/types.cuh"
      extern "C" __global__ void turn(int* x) {
        DYNAMIC_SHARED(memory);
        int* shared = reinterpret_cast<int*>(memory);
        shared[threadIdx.x] = x[threadIdx.x];
        __syncthreads();
        x[threadIdx.x] = shared[blockDim.x - 1 - threadIdx.x];
      }
    """
    x = np.arange(64, dtype=np.int32)
    turn = make(emulated, source, "turn")
    turn.launch(1, 64, [x], shared_bytes=256).result(RESULT_S)
    np.testing.assert_array_equal(x, np.arange(64)[::-1])
    with pytest.raises(ga.LaunchError, match="out_of_bounds"):
        turn.launch(1, 64, [x]).result(RESULT_S)


def test_macros_and_headers_of_a_kernel_source_count(emulated: ga.GpuContext) -> None:
    source = ga.KernelSource(
        "add", '#include "one.cuh"\nextern "C" __global__ void add(int* x) { *x += one() + TWO; }', ("add",),
        headers={"one.cuh": "__device__ inline int one() { return 1; }"}, macros={"TWO": 2},
    )  # fmt: skip
    x = np.zeros(1, np.int32)
    make(emulated, source, "add").launch(1, 1, (x,)).result(RESULT_S)
    assert x[0] == 3


def test_a_kernel_that_goes_wrong_is_a_launch_error_and_the_next_one_runs(saxpy: ga.CompiledKernel) -> None:
    x, y = vectors()
    with pytest.raises(ga.LaunchError, match="buffer 'x'"):
        saxpy.launch(8, 256, (2000, 1.0, x, y)).result(RESULT_S)
    np.testing.assert_array_equal(y, 1)
    saxpy.launch(4, 256, (1000, 1.0, x, y)).result(RESULT_S)
    np.testing.assert_array_equal(y, x + 1)


# Refusals


@pytest.mark.parametrize(
    ("change", "field", "words"),
    [
        ({"args": ()}, "args", "int n, float a, const float\\* x, float\\* y"),
        ({"args": 5}, "args", "a tuple, a list, or a mapping"),
        ({"args": {"n": 1}}, "args['a']", "is missing"),
        ({"args": {"z": 1}}, "args", "parameters are n, a, x, y"),
        ({"n": 1.0}, "args['n']", "an integer"),
        ({"n": True}, "args['n']", "a number"),
        ({"n": 1 << 31}, "args['n']", "2147483647"),
        ({"n": "1"}, "args['n']", "an integer"),
        ({"a": 1e39}, "args['a']", "beyond the range"),
        ({"a": 10**400}, "args['a']", "beyond the range"),
        ({"a": np.longdouble("1e4000")}, "args['a']", "beyond the range"),
        ({"a": "x"}, "args['a']", "a real number"),
        ({"a": 1j}, "args['a']", "a real number"),
        ({"a": None}, "args['a']", "a real number"),
        ({"a": np.zeros(1)}, "args['a']", "a number"),
        ({"x": 4096}, "args['x']", "an array"),
        ({"x": np.zeros(8)}, "args['x']", "must be float32, for const float\\* x"),
        ({"x": np.zeros(16, np.float32)[::2]}, "args['x']", "C-contiguous"),
        ({"x": np.zeros((4, 2), np.float32).T}, "args['x']", "C-contiguous"),
        ({"out": "x"}, "out", "writes through: y"),
        ({"out": "z"}, "out", "writes through: y"),
        ({"out": 9}, "out", "writes through: y"),
        ({"out": 1.5}, "out", "writes through: y"),
        ({"grid": 0}, "grid", "1"),
        ({"grid": (1, 65536)}, "grid", "65535"),
        ({"grid": (1, 1, 1, 1)}, "grid", "one to three"),
        ({"grid": ()}, "grid", "one to three"),
        ({"grid": "1"}, "grid", "int"),
        ({"block": (64, 32)}, "block", "2048 threads"),
        ({"block": (1, 1, 65)}, "block", "64"),
        ({"shared_bytes": 1 << 20}, "shared_bytes", "must be"),
        ({"shared_bytes": -1}, "shared_bytes", "must be"),
    ],
)
def test_what_does_not_fit_is_refused_by_its_name(
    saxpy: ga.CompiledKernel, mocked: ga.CompiledKernel, change: dict[str, Any], field: str, words: str
) -> None:
    x, y = vectors(8)
    values = {"n": 8, "a": 1.0, "x": x, "y": y} | {name: change[name] for name in "naxy" if name in change}
    options = {"out": change.get("out"), "shared_bytes": change.get("shared_bytes", 0)}
    for kernel in (saxpy, mocked):
        launch = kernel.launch(change.get("grid", 1), change.get("block", 32), change.get("args", values), **options)
        with pytest.raises(ga.InvalidRequest, match=words) as caught:
            launch.result(RESULT_S)
        assert caught.value.field == field
    np.testing.assert_array_equal(y, 1)


@pytest.mark.parametrize(
    ("pair", "offset", "words"),
    [
        (bytes(15), np.int32(1), "15 bytes.*takes 16 bytes"),
        (3, np.int32(1), "the bytes of Pair"),
        (np.zeros(2, PAIR), np.int32(1), "the bytes of Pair"),
        (CPair(), 1, "the bytes of index_t"),
        (CPair(), np.int64(1), "8 bytes.*takes 4 bytes"),
    ],
)
def test_structs_and_names_of_the_sources_own_go_by_their_bytes(
    many: ga.CompiledKernel, pair: Any, offset: Any, words: str
) -> None:
    with pytest.raises(ga.InvalidRequest, match=words):
        many.launch(1, 32, (pair, offset, True, 1, None, np.zeros(4), None)).result(RESULT_S)


def test_arrays_that_overlap_in_part_are_refused_where_one_is_written(saxpy: ga.CompiledKernel) -> None:
    both = np.ones(12, np.float32)
    with pytest.raises(ga.InvalidRequest, match=r"overlaps args\['x'\]"):
        saxpy.launch(1, 32, (8, 1.0, both[:8], both[4:])).result(RESULT_S)


def test_the_writable_view_of_shared_memory_is_written_where_a_read_only_one_came_first(
    saxpy: ga.CompiledKernel,
) -> None:
    _, y = vectors()
    x = y.view()
    x.flags.writeable = False
    assert saxpy.launch(4, 256, (1000, 2.0, x, y)).result(RESULT_S)["y"] is y
    assert np.array_equal(y, np.full(1000, 3.0))


@pytest.mark.parametrize("name", ["a" * 300, "b/" * 3000 + "c"])
def test_an_include_too_long_for_a_file_system_fails_by_itself(name: str) -> None:
    with ga.open_context("emulated") as emulated:
        with pytest.raises(ga.CompileError):
            make(emulated, f'#include "{name}"\n{SAXPY}', "saxpy")
        health = emulated.health()
        assert (health.failures["kernels"], health.state) == (0, "ready")


def test_a_read_only_array_is_not_written(saxpy: ga.CompiledKernel) -> None:
    x, y = vectors(8)
    y.flags.writeable = False
    with pytest.raises(ga.InvalidRequest, match="read-only"):
        saxpy.launch(1, 32, (8, 1.0, x, y)).result(RESULT_S)


@pytest.mark.parametrize(
    ("source", "entry", "error", "words"),
    [
        (SAXPY, "other", ga.InvalidRequest, 'extern "C" __global__ void other'),
        (SAXPY, "no name", ga.InvalidRequest, "entry_points"),
        (SAXPY, None, ga.InvalidRequest, "entry=None"),
        (b"", "saxpy", ga.InvalidRequest, "source"),
        ('extern "C" __global__ void k(int n) { n = nothing; }', "k", ga.CompileError, "nothing"),
        ('#define half double\nextern "C" __global__ void k(half x) {}', "k", ga.InvalidRequest, "of \\[8\\] bytes"),
        (
            '#define MORE , int m\nextern "C" __global__ void k(int n MORE) {}',
            "k",
            ga.InvalidRequest,
            "\\[4, 4\\] bytes",
        ),
    ],
)
def test_sources_that_cannot_be_launched_are_refused(
    emulated: ga.GpuContext, source: Any, entry: Any, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        make(emulated, source, entry)


# The service around it


@pytest.fixture(scope="module")
def mocked() -> Iterator[ga.CompiledKernel]:
    with ga.open_context("mock") as ctx:
        yield make(ctx, SAXPY, "saxpy")


def test_on_mock_a_launch_says_that_nothing_computes_it(mocked: ga.CompiledKernel) -> None:
    x, y = vectors(8)
    with pytest.raises(ga.MockModeError, match="emulated"):
        mocked.launch(1, 32, (8, 1.0, x, y)).result(RESULT_S)
    np.testing.assert_array_equal(y, 1)


def test_on_mock_a_source_is_compiled_where_that_is_asked_for() -> None:
    with ga.open_context("mock", ga.ContextOptions(compile_on_mock=True)) as ctx:
        kernel = make(ctx, SAXPY, "saxpy")
        assert kernel.cubin is not None
        assert kernel.parameter_bytes == (4, 4, 8, 8)
        with pytest.raises(ga.CompileError, match="nothing"):
            make(ctx, 'extern "C" __global__ void k(int n) { n = nothing; }', "k")


def test_a_kernel_of_another_context_is_refused(saxpy: ga.CompiledKernel) -> None:
    with ga.open_context("mock") as other:
        handle = other.actor(KernelActor)
        with pytest.raises(ga.InvalidRequest, match="of this context"):
            handle.submit(LaunchKernel(saxpy, 1, 32, (8, 1.0, *vectors(8)), None, 0)).result(RESULT_S)
        with pytest.raises(ga.InvalidRequest, match="KernelActor takes"):
            handle.submit("nonsense").result(RESULT_S)


def test_a_closed_context_answers_launches_of_its_kernels() -> None:
    with ga.open_context("emulated") as ctx:
        kernel = make(ctx, SAXPY, "saxpy")
    with pytest.raises(ga.ActorStopped):
        kernel.launch(1, 32, (8, 1.0, *vectors(8))).result(RESULT_S)
    with pytest.raises(ga.NotCopyable, match="CompiledKernel"):
        pickle.dumps(kernel)


def test_equal_sources_asked_for_at_once_are_compiled_once() -> None:
    events: list[str] = []
    # A new source each time: a kernel in the cache may be ready before the second request comes.
    source = f"{SAXPY}// {time.time_ns()}\n"
    with ga.open_context("emulated", ga.ContextOptions(on_event=lambda event: events.append(event.name))) as ctx:
        replies = [ctx.kernel(source, "saxpy") for _ in range(6)]
        assert {reply.result(RESULT_S).entry for reply in replies} == {"saxpy"}
    assert events.count("compile.started") == 1


def test_a_request_that_expires_while_its_kernel_is_compiled_is_answered() -> None:
    started, go_on = threading.Event(), threading.Event()

    def hold(event: ga.TraceEvent) -> None:
        if event.name == "compile.started":
            started.set()
            assert go_on.wait(60)

    with ga.open_context("emulated", ga.ContextOptions(on_event=hold)) as ctx:
        late = ctx.kernel(SAXPY + "// held up\n", "saxpy", timeout=0.05)
        with pytest.raises(ga.DeadlineExceeded):
            late.result(RESULT_S)
        go_on.set()
        make(ctx, SAXPY, "saxpy")
        stats = ctx.stats()["kernels"]
        assert (stats.queued, stats.completed, stats.failed) == (0, 1, 1)


def test_faults_at_its_launches_are_answered_and_deadlines_end_a_hang() -> None:
    plan = FaultPlan().fail(launch=1).hang(launch=3)
    x, y = vectors(8)
    with ga.open_context("emulated", ga.ContextOptions(fault_plan=plan)) as ctx:
        kernel = make(ctx, SAXPY, "saxpy")
        with pytest.raises(ga.LaunchError):
            kernel.launch(1, 32, (8, 1.0, x, y)).result(RESULT_S)
        kernel.launch(1, 32, (8, 1.0, x, y)).result(RESULT_S)
        np.testing.assert_array_equal(y, x + 1)
        with pytest.raises(ga.DeadlineExceeded):
            kernel.launch(1, 32, (8, 1.0, x, y), timeout=0.05).result(RESULT_S)
        assert ctx.stats()["kernels"].launched == 3


def test_raw_modules_are_for_cuda_alone(saxpy: ga.CompiledKernel, mocked: ga.CompiledKernel) -> None:
    for kernel in (saxpy, mocked):
        with pytest.raises(ga.Unsupported, match="CUDA alone") as caught:
            kernel.raw_module()
        assert caught.value.nearest == "cuda"


def test_raw_modules_of_cubins_are_for_cuda_alone() -> None:
    source = ga.KernelSource("saxpy.cu", SAXPY, ("saxpy",))
    for device in ("mock", "emulated"):
        with ga.open_context(device) as ctx:
            cubin = ctx.nvrtc.compile(source).result(RESULT_S)
            with pytest.raises(ga.Unsupported, match="CUDA alone") as caught:
                ctx.nvrtc.raw_module(cubin)
            assert caught.value.nearest == "cuda"
            for wrong in (cubin.data, source, None):
                with pytest.raises(ga.InvalidRequest, match="must be a Cubin"):
                    ctx.nvrtc.raw_module(wrong)


def test_a_kernels_repr_is_its_declaration(saxpy: ga.CompiledKernel) -> None:
    assert repr(saxpy) == "<CompiledKernel saxpy(int n, float a, const float* x, float* y)>"
