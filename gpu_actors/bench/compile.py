"""The times of compiles and cache lookups: ``gpu-actors bench compile``.

It needs NVRTC and no GPU. The figures are medians, in milliseconds for compiles and microseconds for lookups. The
budgets are 1 s for a cold compile of a variant and 200 us for a warm lookup.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from gpu_actors.attention.problem import DispatchKey
from gpu_actors.compiling.compiler import Compiler
from gpu_actors.compiling.cubin_cache import CubinCache
from gpu_actors.compiling.source import KernelSource
from gpu_actors.compiling.toolchain import find_toolchain, load_nvrtc
from gpu_actors.compiling.variant import Variant
from gpu_actors.devices.emulation.unit import write_headers

__all__ = ["beside_cupy", "measure", "run"]

_SOURCE = """\
#include <cuda_fp16.h>
extern "C" __global__ void scale(__half* x, float factor, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) x[i] = __float2half(__half2float(x[i]) * factor + VARIANT);
}
"""


def measure(arch: str = "sm_90a", compiles: int = 7, lookups: int = 2000) -> dict[str, object]:
    """Time a small kernel that includes cuda_fp16.h, with a cache in a temporary folder."""
    start = time.perf_counter()
    load_nvrtc()
    load = time.perf_counter() - start
    toolchain = find_toolchain()
    variants = [_variant(number, arch) for number in range(compiles + 1)]
    compiler = Compiler()
    with tempfile.TemporaryDirectory() as folder:
        cache = CubinCache(folder)
        cache.get_or_compile(variants[0], compiler.compile)  # reads the toolkit's headers once
        cold = [_seconds(partial(cache.get_or_compile, variant, compiler.compile)) for variant in variants[1:]]
        memory = [_seconds(lambda: cache.get(variants[1])) for _ in range(lookups)]
        disk = list(_disk_lookups(folder, variants[1], lookups // 10))
        fresh = [_seconds(lambda: CubinCache(folder).get(variants[1])) for _ in range(lookups // 10)]
        entry_bytes = cache.stats().bytes // cache.stats().entries
    return {
        "nvrtc": toolchain.version if toolchain else None,
        "arch": arch,
        "load_nvrtc_ms": round(load * 1e3, 1),
        "cold_compile_ms": _median(cold, 1e3),
        "warm_lookup_memory_us": _median(memory, 1e6),
        "warm_lookup_disk_us": _median(disk, 1e6),
        "open_and_lookup_disk_us": _median(fresh, 1e6),
        "entry_bytes": entry_bytes,
    }


def run(arch: str = "sm_90a") -> dict[str, object]:
    """`measure`, and the seconds of a cold compile of each kernel that ``gpu-actors warm --backward`` compiles.

    Each variant is compiled three times and the least time counts, because other work of the machine only adds time.
    """
    from gpu_actors.kernels.variants import kv_variants, standard_variants, usual_backward_keys, variant_of

    compiler = Compiler()
    times: dict[str, list[float]] = {}
    for key in (*standard_variants(arch), *kv_variants(arch), *usual_backward_keys(arch)):
        variant = variant_of(key)
        build = partial(compiler.compile, variant.source, arch)
        times.setdefault(variant.kernel, []).append(min(_seconds(build) for _ in range(3)))
    variants = {
        kernel: {
            "variants": len(seconds),
            "median_s": round(statistics.median(seconds), 3),
            "slowest_s": round(max(seconds), 3),
        }
        for kernel, seconds in times.items()
    }
    return measure(arch) | {"cold_variants": variants, "beside_cupy": beside_cupy(arch)}


def beside_cupy(arch: str = "sm_90a", times: int = 5) -> dict[str, object]:
    """Time cold compiles of one bfloat16 variant of each forward kernel, in turns with those of CuPy's RawModule.

    Times are in seconds, the median and the least. CuPy names the architecture without its "a", so a kernel for one
    exact architecture does not compile there: "cupy_s" then has the error, and "cupy_exact_arch_s" the times of the
    same path with the full name.
    """
    from gpu_actors.kernels.variants import standard_variants, variant_of

    keys: dict[str, DispatchKey] = {}
    for key in standard_variants(arch):
        if key.direction == "forward" and (key.dtype, key.head_dim, key.mask) == ("bfloat16", 128, "causal"):
            keys.setdefault(key.kernel, key)
    return {kernel: _beside_cupy(variant_of(key).source, arch, times) for kernel, key in keys.items()}


def _beside_cupy(source: KernelSource, arch: str, times: int) -> dict[str, object]:
    with tempfile.TemporaryDirectory() as headers:
        write_headers(source.headers, Path(headers))
        through_cupy = partial(_through_cupy, source, Path(headers))
        ways: dict[str, Callable[[], object]] = {
            "ours_s": partial(Compiler().compile, source, arch),
            "cupy_s": partial(through_cupy, arch.rstrip("af")),
        }
        try:
            ways["cupy_s"]()
        except Exception as error:
            refusal = f"{type(error).__name__}: {_first_error(str(error))}"
            ways["cupy_exact_arch_s"] = partial(through_cupy, arch)
            del ways["cupy_s"]
            return {"cupy_s": refusal} | _in_turns(ways, times)
        return _in_turns(ways, times)


def _in_turns(ways: dict[str, Callable[[], object]], times: int) -> dict[str, object]:
    samples: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(times):
        for name, way in ways.items():
            samples[name].append(_seconds(way))
    return {name: _short(seconds) for name, seconds in samples.items()}


def _through_cupy(source: KernelSource, headers: Path, arch: str) -> object:
    """Compile as RawModule(code=..., options=...) does for a device, with its own program and options.

    headers: the folder of the source's headers. RawModule itself calls the driver, so it cannot be timed without a GPU.
    """
    from cupy.cuda import compiler

    toolchain = find_toolchain()
    assert toolchain is not None
    folders = (headers, *toolchain.include_dirs)
    options = ("-std=c++17", *(f"-D{name}={value}" for name, value in source.macros.items()))
    options += tuple(f"-I{folder}" for folder in folders)
    options += ("-ftz=true", f"-arch={arch}", "--device-as-default-execution-space")
    program = compiler._NVRTCProgram(source.source, "kernel.cu", method="cubin")
    return program.compile(options)


def _first_error(log: str) -> str:
    lines = [line for line in log.splitlines() if "error" in line]
    return (lines or log.splitlines() or [""])[0][:200]


def _short(seconds: list[float]) -> dict[str, float]:
    return {"median": round(statistics.median(seconds), 3), "least": round(min(seconds), 3)}


def _variant(number: int, arch: str) -> Variant:
    return Variant.of(KernelSource("scale.cu", _SOURCE, ("scale",), macros={"VARIANT": number}), arch)


def _disk_lookups(folder: str, variant: Variant, rounds: int) -> Iterator[float]:
    """Times of lookups from disk: the bound of the memory is smaller than any cubin. The key is cached."""
    cache = CubinCache(folder, max_memory_bytes=0)
    cache.key(variant)
    for _ in range(rounds):
        yield _seconds(lambda: cache.get(variant))


def _seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    result = call()
    seconds = time.perf_counter() - start
    assert result is not None
    return seconds


def _median(seconds: list[float], unit: float) -> float:
    return round(statistics.median(seconds) * unit, 2)
