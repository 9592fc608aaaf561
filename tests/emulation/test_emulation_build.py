"""Toolchains are found, modules are built once, and cached modules can be trusted."""

from __future__ import annotations

import logging
import os
import re
import shutil
import string
import struct
import tempfile
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from inside.package import install_hint
from support.cubins import Fork

from gpu_actors.devices.emulation import EmulatedBuffer, EmulatedModule, Toolchain, build_module, toolchain
from gpu_actors.devices.emulation.build import find_entries
from gpu_actors.devices.emulation.executor import Executor
from gpu_actors.devices.emulation.module_cache import ModuleCache
from gpu_actors.devices.emulation.unit import run_compiler
from gpu_actors.errors import CompileError, GpuActorsError, InvalidRequest

SOURCE = """
#include "ptx/types.cuh"
#include "amount.cuh"
extern "C" __global__ void add(int* out) { out[threadIdx.x] = AMOUNT + amount() * static_cast<int>(threadIdx.x); }
"""
HEADER = "DEVICE int amount() { return 10; }\n"


def build(cache: Path, *, amount: str = "5", header: str = HEADER, compiler: Toolchain | None = None) -> EmulatedModule:
    return build_module(SOURCE, {"AMOUNT": amount}, {"amount.cuh": header}, compiler, cache)


def outcome(module: EmulatedModule) -> list[int]:
    out = EmulatedBuffer(12, "out")
    module.launch("add", 1, 3, 0, struct.pack("<Q", out.address), [out])
    return [int(x) for x in out.view(np.int32)]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory, module_cache: Path) -> Path:
    """A cache with the module in it, and with the executor that all tests share."""
    folder = tmp_path_factory.mktemp("built") / "cache"
    executor = Executor.of(Toolchain.find(), {}, {})
    ModuleCache(folder, ".o").build(executor.key, lambda kept: (executor.object_in(module_cache), 0.0))
    build(folder)
    return folder


@pytest.fixture
def cache(built: Path, tmp_path: Path) -> Path:
    """A copy of `built`, so that each test may damage it."""
    return Path(shutil.copytree(built, tmp_path / "cache"))


def test_a_module_is_built_once_and_again_for_every_change_of_its_input(cache: Path) -> None:
    first = build(cache)
    assert outcome(first) == [5, 15, 25]
    again = build(cache)
    assert (again.path, again.build_seconds) == (first.path, first.build_seconds)
    assert outcome(build(cache, amount="6")) == [6, 16, 26]
    assert outcome(build(cache, header=HEADER.replace("10", "20"))) == [5, 25, 45]
    assert len(list(cache.glob("*.so"))) == 3


def test_a_damaged_module_is_built_anew(cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    """An empty module, one with a flipped bit, and a sound one in the place of another."""
    (library,) = cache.glob("*.so")
    kept = library.read_bytes()
    other = build(cache, amount="6").path.read_bytes()
    for damaged in (b"", kept[:5000] + bytes([kept[5000] ^ 1]) + kept[5001:], other):
        library.write_bytes(damaged)
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            assert outcome(build(cache)) == [5, 15, 25]
        assert "built anew" in caplog.text
        assert library.read_bytes()[:4] == b"\x7fELF"


def test_a_cache_that_cannot_be_made_keeps_modules_for_this_process(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    with caplog.at_level(logging.WARNING):
        first = build(tmp_path / "file" / "cache", amount="7")
        assert outcome(first) == [7, 17, 27]
        assert build(tmp_path / "file" / "cache", amount="7").path == first.path
    assert "for this process only" in caplog.text


def test_many_builders_of_one_module_compile_it_once(cache: Path) -> None:
    """The builders are threads and another process."""
    built: list[EmulatedModule] = []
    with Fork(lambda pipe: pipe.send((pipe.recv(), outcome(build(cache, amount="8"))))) as pipe:
        threads = [threading.Thread(target=lambda: built.append(build(cache, amount="8"))) for _ in range(6)]
        pipe.send("go")
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert pipe.recv() == ("go", [8, 18, 28])
    assert len({(module.path, module.build_seconds) for module in built}) == 1


def test_an_executor_is_compiled_and_kept_or_refused_with_what_the_compiler_says(tmp_path: Path) -> None:
    (compiler := tmp_path / "g++").write_text("#!/bin/sh\nfor last; do :; done\necho object >$last\n")
    compiler.chmod(0o700)
    for version in ("first", "refusing"):
        executor = Executor.of(Toolchain("g++", (str(compiler),), f"{tmp_path} {version}"), {}, {})
        if version == "first":
            assert executor.object_in(tmp_path / "cache") == b"object\n"
            compiler.write_text("#!/bin/sh\necho no; exit 1\n")
            assert executor.object_in(tmp_path / "other") == b"object\n"
        else:
            with pytest.raises(CompileError, match=r"executor does not compile:\nno"):
                executor.object_in(tmp_path / "cache")


def test_an_error_names_the_line_of_the_source(cache: Path) -> None:
    source = '#include "ptx/types.cuh"\nextern "C" __global__ void k(int* p) {\n  *p = nothing;\n}\n'
    with pytest.raises(CompileError, match=r"wrong\.cu does not compile for the CPU") as caught:
        build_module(source, cache_dir=cache, name="wrong.cu")
    assert caught.value.source_line == "*p = nothing;"
    assert "nothing" in caught.value.log
    assert "wrong.cu:3" in caught.value.log


def test_a_file_without_kernels_is_refused(cache: Path) -> None:
    with pytest.raises(InvalidRequest, match="at least one"):
        build_module('// extern "C" __global__ void gone() {}\nint x;', cache_dir=cache)


def test_entry_points_are_found_however_they_are_spelled() -> None:
    source = """
      extern "C" __global__ void plain(int a) {}
      extern "C" __global__ void __launch_bounds__(THREADS(2, (3)), 1) bounded(const __grid_constant__ Params p) {}
      extern "C" __global__ __launch_bounds__(128)
          void before(int a);
      extern "C" __global__ void before(int a) {}
      // extern "C" __global__ void comment() {}
      extern "C" void host_function() {}
      __global__ void not_extern(int a) {}
    """
    assert find_entries(source) == ("plain", "bounded", "before")


def test_toolchains_are_found_by_preference_and_by_name() -> None:
    zig = Path(Toolchain.find("zig").command[0])
    assert (zig.name, zig.parent.name) == ("zig", "ziglang")
    found = Toolchain.find()
    assert (shutil.which("g++") is not None) == (found.name == "g++")
    assert found.version
    with pytest.raises(InvalidRequest, match=r"g\+\+, clang\+\+, zig"):
        Toolchain.find("nvcc")


def test_without_a_compiler_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr("sys.path", [])
    with pytest.raises(GpuActorsError, match=re.escape(install_hint("emulation"))):
        Toolchain.find()


@pytest.mark.parametrize("knows", [True, False])
def test_a_clang_that_cannot_be_told_where_to_fuse_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, knows: bool
) -> None:
    """For example, clang++ 14 refuses the option."""
    clang = tmp_path / "clang++"
    clang.write_text(f"#!/bin/sh\ncase $1 in --version) echo a clang;; *) exit {int(not knows)};; esac\n")
    clang.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert Toolchain.fusing_at_random(0).name == ("clang++" if knows else "zig")
    monkeypatch.setitem(toolchain._FINDERS, "zig", lambda: None)
    if not knows:
        with pytest.raises(GpuActorsError, match="a clang does not know -ffp-contract=fast-honor-pragmas"):
            Toolchain.fusing_at_random(0)


def test_switching_by_ucontext_gives_the_same_results(module_cache: Path) -> None:
    """Processors other than x86-64 use ucontext."""
    source = """
      #include "ptx/types.cuh"
      extern "C" __global__ void turn(int* out) {
        __shared__ int shared[64];
        shared[threadIdx.x] = threadIdx.x;
        __syncthreads();
        int sum = 0;
        for (int i = 0; i < 5; i++) sum += __shfl_xor_sync(~0u, shared[63 - threadIdx.x], i);
        out[blockIdx.x * 64 + threadIdx.x] = sum;
      }
      extern "C" __global__ void stuck(int* out) { if (threadIdx.x) __syncwarp(); }
    """
    lane = 63 - np.arange(64)
    expected = np.stack([lane[np.arange(64) ^ i] for i in range(5)]).sum(0)
    for macros in ({}, {"GPU_ACTORS_UCONTEXT": "1"}):
        module = build_module(source, macros, cache_dir=module_cache)
        out = EmulatedBuffer(4 * 64 * 3, "out")
        module.launch("turn", 3, 64, 0, struct.pack("<Q", out.address), [out])
        np.testing.assert_array_equal(out.view(np.int32, (3, 64)), np.tile(expected, (3, 1)))
        with pytest.raises(GpuActorsError, match="deadlock"):
            module.launch("stuck", 1, 32, 0, struct.pack("<Q", out.address), [out])


FUSED = """
#include "ptx/types.cuh"
extern "C" __global__ void differences(const float* in, float* out) {
  // Products of their own: one that is used twice is not fused.
  out[0] = in[0] * in[1] - in[2];
  out[1] = __fmul_rn(in[3], in[4]) - in[5];
  out[2] = __fsub_rn(in[6] * in[7], in[8]);
  out[3] = __fadd_rn(in[9] * in[10], -in[11]);
}
"""


LEAN = FUSED.replace("ptx/types.cuh", "ptx.cuh")  # with the wrappers of tensor cores, so hardly optimised


@pytest.mark.timeout(180)  # zig builds parts of its own first
@pytest.mark.parametrize(("name", "source"), [(None, LEAN), ("zig", FUSED)], ids=["None", "zig"])
def test_products_are_fused_where_that_is_asked_for_and_allowed(
    module_cache: Path, name: str | None, source: str
) -> None:
    found = Toolchain.find(name)
    factor = np.float32(1 + 2**-12)
    given = EmulatedBuffer.of(np.array([factor, factor, factor * factor] * 4, np.float32), "in")
    out = EmulatedBuffer(16, "out")
    params = [struct.pack("<Q", place.address) for place in (given, out)]
    for contraction in (False, True):  # in one cache: neither is taken for the other
        module = build_module(source, toolchain=replace(found, contraction=contraction), cache_dir=module_cache)
        module.launch("differences", 1, 1, 0, params, [given, out])
        assert out.view(np.float32).tolist() == [2**-24 * contraction, 0, 0, 0]


def test_a_processor_that_cannot_fuse_products_is_a_compile_error(cache: Path) -> None:
    found = Toolchain.find()
    without = replace(found, command=(*found.command, "-U__FMA__", "-U__ARM_FEATURE_FMA"), contraction=True)
    with pytest.raises(CompileError, match="fused multiply-add"):
        build_module(FUSED, toolchain=without, cache_dir=cache)


OVERLOADS = """
extern "C" __global__ void each(double* out) {
  const float x = -2.5f;
  const int n = -3;
  double* at = out;
  // What a float gives is a float, what an integer gives a double.
  const size_t floats[] = {sizeof(exp(x)), sizeof(abs(x)), sizeof(floor(x)), sizeof(pow(x, x)), sizeof(fma(x, x, x))};
  const size_t doubles[] = {sizeof(exp(n)), sizeof(sqrt(4)), sizeof(pow(x, n)), sizeof(fma(x, n, n))};
  for (size_t bytes : floats) *at++ = bytes == 4;
  for (size_t bytes : doubles) *at++ = bytes == 8;
  *at++ = abs(x);
  *at++ = abs(n);
  *at++ = abs(-5000000000ll);
  *at++ = abs(-2.25);
  *at++ = sqrt(4);
  *at++ = pow(2.0f, n);
  *at++ = fmax(x, 1);
  *at++ = fma(x, x, x);
  *at++ = lround(2.5f);
  double sine, cosine;
  sincos(0.0, &sine, &cosine);
  *at++ = sine + cosine + exp10(2.0);
  float sine_f, cosine_f;
  sincosf(0.0f, &sine_f, &cosine_f);
  *at++ = sine_f + cosine_f + exp10f(1.0f);
  *at++ = isnan(n) + 2 * isnan(x) + 4 * isinf(x / 0.0f) + 8 * isfinite(x) + 16 * signbit(x);
}
"""


def test_functions_of_c_have_the_overloads_that_cuda_has(cache: Path) -> None:
    out = EmulatedBuffer(21 * 8, "out")
    module = build_module(OVERLOADS, cache_dir=cache)
    module.launch("each", 1, 1, 0, struct.pack("<Q", out.address), [out])
    assert out.view(np.float64).tolist() == [1] * 9 + [2.5, 3, 5e9, 2.25, 2, 0.125, 1, 3.75, 3, 101, 11, 28]


LIBRARY = """
#include "ptx/types.cuh"
extern "C" __global__ void each(long long* out) {
  char from[8] = "abcdefg", to[8];
  memcpy(to, from, 8);
  memmove(to + 1, to, 3);
  memset(to + 5, 'z', 2);
  void* memory = malloc(16);
  *out++ = memory != nullptr;
  free(memory);
  *out++ = memcmp(to, "aabcezz", 8);
  *out++ = strlen(to);
  *out++ = labs(-7) + llabs(-8);
  const long long before = clock64();
  *out++ = clock64() > before && clock() >= 0;
  if (out == nullptr) printf("%d\\n", to[0]);
}
"""


def test_functions_of_c_that_cuda_has_bear_a_header_and_need_none(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Headers of threads and signals would be a third of a small kernel's text. Only the executor has them."""
    headers = "#include <stdio.h>\n#include <stdlib.h>\n#include <string.h>\n#include <time.h>\n"
    out = EmulatedBuffer(5 * 8, "out")
    build_module(headers + LIBRARY, cache_dir=cache).launch("each", 1, 1, 0, struct.pack("<Q", out.address), [out])
    assert out.view(np.int64).tolist() == [1, 0, 7, 15, 1]
    read: list[str] = []

    def compiled(toolchain: Toolchain, arguments: list[str], work: Path, *rest: Any) -> None:
        run_compiler(toolchain, arguments, work, *rest)
        if "-E" in arguments:
            read.append((work / "expanded.cpp").read_text(encoding="utf-8"))

    monkeypatch.setattr("gpu_actors.devices.emulation.build.run_compiler", compiled)
    out = EmulatedBuffer(5 * 8, "out")
    build_module(LIBRARY, cache_dir=cache).launch("each", 1, 1, 0, struct.pack("<Q", out.address), [out])
    assert out.view(np.int64).tolist() == [1, 0, 7, 15, 1]
    (text,) = read
    assert "memcpy" in text
    assert not re.findall(r"\b(?:pthread_create|sigaction|fprintf|backtrace|swapcontext)\b", text)


def test_a_build_that_takes_its_time_is_in_the_log(
    cache: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with caplog.at_level(logging.INFO):
        monkeypatch.setattr("gpu_actors.devices.emulation.unit._QUIET_SECONDS", 3600.0)
        build_module(SOURCE, {"AMOUNT": "12"}, {"amount.cuh": HEADER}, cache_dir=cache, name="mine.cu")
        assert "compiled" not in caplog.text
        monkeypatch.setattr("gpu_actors.devices.emulation.unit._QUIET_SECONDS", 0.0)
        build_module(SOURCE, {"AMOUNT": "13"}, {"amount.cuh": HEADER}, cache_dir=cache, name="mine.cu")
    assert "mine.cu is being compiled for the CPU" in caplog.text


MULTIPLIES = """
#include "ptx.cuh"
extern "C" __global__ void k(float* out) { out[0] = 1; }
"""


@pytest.mark.parametrize(
    ("source", "contraction", "level"),
    [
        (MULTIPLIES, False, "-Og"),
        (MULTIPLIES, True, "-O1"),
        (SOURCE + "LITTLE_ARITHMETIC\n", False, "-Og"),
        (SOURCE, False, "-O2"),
    ],
    ids=["tensor cores", "tensor cores, fused", "little", "arithmetic of its own"],
)
def test_only_a_kernel_of_little_arithmetic_of_its_own_is_hardly_optimised(
    source: str, contraction: bool, level: str, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The arithmetic of tensor cores is in the executor. g++ fuses no products at -Og."""
    options: list[str] = []

    def compiled(toolchain: Toolchain, arguments: list[str], *rest: Any) -> None:
        options.extend(toolchain.flags)
        options.extend(arguments)
        if "-E" not in arguments:
            raise CompileError("its options are known")
        run_compiler(toolchain, arguments, *rest)

    monkeypatch.setattr("gpu_actors.devices.emulation.build.run_compiler", compiled)
    found = replace(Toolchain.find(), contraction=contraction)
    with pytest.raises(CompileError, match="its options are known"):
        build_module(source, {"AMOUNT": "14"}, {"amount.cuh": HEADER}, found, cache)
    expected = level if found.name == "g++" else "-O2"
    assert [option for option in options if option.startswith("-O")][-1] == expected


def test_a_temporary_folder_whose_name_is_no_utf_8(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = os.fsdecode(os.fsencode(tmp_path) + b"/\xff")
    os.mkdir(folder)
    monkeypatch.setattr(tempfile, "tempdir", folder)
    source = '#include "ptx/types.cuh"\nextern "C" __global__ void f(int* p) { *p = 1; }'
    module = build_module(source, cache_dir=tmp_path / "cache")
    assert module.entries == ("f",)
    with pytest.raises(CompileError) as caught:
        build_module(source.replace("1;", "nothing;"), cache_dir=tmp_path / "cache")
    assert caught.value.source_line == source.replace("1;", "nothing;").splitlines()[1]


def test_macros_of_any_name_leave_the_emulation_itself_alone(module_cache: Path) -> None:
    """NVRTC includes nothing before a source, so every name is the user's."""
    letters = f"{string.ascii_letters}_"
    names = [a + b for a in letters for b in ("", *letters, *string.digits)]
    taken = {"do", "if", "or", "_", "__"}
    inside = ["VALUE", "bytes", "emulation", "index", "block", "dim", "grid", "self", "Request", "request", "launch"]
    source = (
        'extern "C" __global__ void kernel(int* out) {\n'
        "  __shared__ int shared[1];\n"
        "  shared[0] = N + VALUE + sizeof(threadIdx) + sizeof(blockIdx) + sizeof(blockDim) + sizeof(gridDim);\n"
        "  __syncthreads();\n"
        "  *out = __shfl_sync(0xffffffffu, shared[0], 0);\n"
        "}\nGPU_ACTORS_PARAMETERS(kernel)\n"
    )
    module = build_module(
        source, {name: "7" for name in (*names, *inside) if name not in taken}, cache_dir=module_cache
    )
    out = EmulatedBuffer(4, "out")
    module.launch("kernel", 1, 1, 0, struct.pack("<Q", out.address), [out])
    assert out.view(np.int32)[0] == 14 + 4 * 12
    assert module.parameter_bytes("kernel") == (8,)


def test_macros_that_a_source_defines_leave_what_follows_it_alone(module_cache: Path) -> None:
    source = '#define P 1\n#define bytes 2\n#define r 3\nextern "C" __global__ void kernel(int* out) { *out = P; }\n'
    module = build_module(f"{source}GPU_ACTORS_PARAMETERS(kernel)\n", cache_dir=module_cache)
    assert module.parameter_bytes("kernel") == (8,)
