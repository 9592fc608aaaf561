"""Builds the driver, its worker and CuPy's runtime module, once for each state of their sources.

NVIDIA's runtime is linked into one module of CuPy's wheel, `cupy_backends.cuda.api.runtime`, and accepts no other
driver. Only that module is built again, from CuPy's source distribution (MIT) and against the functions of
driver/runtime_api.cpp. All other modules are the wheel's.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.metadata
import importlib.util
import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import platformdirs

__all__ = ["MODULE", "build"]

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
MODULE = "cupy_backends.cuda.api.runtime"
_HEADERS = ("nvidia-cuda-crt", "nvidia-cuda-profiler-api")  # what nvidia-cuda-runtime's own headers include
_FLAGS = ("-std=c++17", "-O1", "-g", "-fPIC", "-Wall", "-Wextra", "-Werror")
# The emulation's structs, which the driver and the worker share with built kernels.
_SHARED = ("emulation/core.cuh", "emulation/overloads.cuh", "emulation/state.cuh")


def build() -> Path:
    """The folder with libcuda.so.1, softgpu-worker and overlay/. Takes half a minute the first time.

    Needs g++ and, that first time, a package index. Raises CalledProcessError with the output of what failed.
    """
    cache = _cache()
    folder = cache / _key()
    if folder.is_dir():
        return folder
    with open(cache / "lock", "w") as lock:  # closing it frees the lock
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.is_dir():
            with tempfile.TemporaryDirectory(dir=cache) as scratch:
                made = Path(scratch) / "made"
                made.mkdir()
                _build(cache, made)
                made.rename(folder)
    return folder


def _cache() -> Path:
    given = os.environ.get("SOFTGPU_CACHE_DIR")
    folder = Path(given) if given else platformdirs.user_cache_path("gpu-actors") / "softgpu"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder


def _cupy() -> importlib.metadata.Distribution:
    for name in ("cupy-cuda13x", "cupy-cuda12x"):
        try:
            return importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    raise RuntimeError("CuPy's wheel is not installed")


def _key() -> str:
    digest = hashlib.sha256(f"{sys.version} {_cupy().version} {_compiler()}".encode())
    sources = [*sorted(HERE.glob("*/*.cpp")), *sorted(HERE.glob("*/*.h")), Path(__file__)]
    for path in (*sources, *(ROOT / "kernels_cu" / name for name in _SHARED)):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def _compiler() -> str:
    return os.environ.get("CXX", "g++")


def _build(cache: Path, made: Path) -> None:
    version = _cupy().version
    source = _source(cache, version)
    headers = _tools(cache)
    includes = [f"-I{ROOT / 'kernels_cu'}", *(f"-isystem{folder}" for folder in headers)]
    jobs = [
        (path, made / f"{path.stem}.o", (*_FLAGS, "-fvisibility=hidden", *includes))
        for path in HERE.glob("driver/*.cpp")
    ]
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        objects = list(pool.map(lambda job: _compile(*job), jobs))
        runtime = _compile(_cython(cache, source, made), made / "runtime.o", _runtime_flags(source, headers))
    linked = [*map(str, objects), str(_missing(made, runtime, objects))]
    library = made / "libcuda.so.1"
    _run(_compiler(), "-shared", *linked, "-Wl,-soname,libcuda.so.1", "-o", library, "-ldl", "-lpthread")
    worker = [str(path) for path in sorted(HERE.glob("worker/*.cpp"))]
    _run(_compiler(), *_FLAGS, *includes, *worker, "-rdynamic", "-o", made / "softgpu-worker", "-ldl", "-lpthread")
    (made / "overlay").mkdir()
    module = made / "overlay" / f"runtime{sysconfig.get_config_var('EXT_SUFFIX')}"
    _run(_compiler(), "-shared", runtime, library, "-o", module)
    for path in (*made.glob("*.o"), *made.glob("*.cpp")):
        path.unlink()


def _compile(source: Path, made: Path, flags: Sequence[str]) -> Path:
    _run(_compiler(), *flags, "-c", source, "-o", made)
    return made


def _run(*command: object, cwd: Path | None = None, env: dict[str, str] | None = None) -> str:
    result = subprocess.run(list(map(str, command)), capture_output=True, text=True, cwd=cwd, env=env, check=False)
    if result.returncode:
        sys.stderr.write(result.stdout + result.stderr)
        result.check_returncode()
    return result.stdout


# ---- CuPy's module


def _source(cache: Path, version: str) -> Path:
    """CuPy's source distribution, unpacked."""
    folder = cache / f"cupy-{version}"
    if not folder.is_dir():
        with tempfile.TemporaryDirectory(dir=cache) as scratch:
            # CuPy's setup asks for a CUDA toolkit before it tells its own name, unless it may use stubs.
            environment = {**os.environ, "CUPY_INSTALL_USE_STUB": "1"}
            pip = (sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-binary", "cupy", "-d", scratch)
            _run(*pip, f"cupy=={version}", env=environment)
            (packed,) = Path(scratch).glob("cupy-*.tar.gz")
            with tarfile.open(packed) as archive:
                archive.extractall(scratch, filter="data")
            (Path(scratch) / folder.name).rename(folder)
    return folder


def _cython_version() -> str:
    """The version of Cython that made the wheel's modules. Modules of one program share its types."""
    path = next(Path(str(_cupy().locate_file("cupy_backends/cuda/api"))).glob("runtime.*.so"))
    found = re.search(rb"_cython_(\d+)_(\d+)_(\w+)", path.read_bytes())
    if found is None:
        raise RuntimeError(f"{path} does not say which Cython made it")
    return ".".join(part.decode() for part in found.groups())


def _tools(cache: Path) -> list[Path]:
    """The folders of the toolkit's headers. Installs Cython beside them."""
    folder = cache / f"tools-{_cython_version()}"
    if not folder.is_dir():
        with tempfile.TemporaryDirectory(dir=cache) as scratch:
            wanted = (f"cython=={_cython_version()}", *_HEADERS)
            _run(sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", f"{scratch}/tools", *wanted)
            (Path(scratch) / "tools").rename(folder)
    spec = importlib.util.find_spec("nvidia")
    installed = [Path(path) for path in (spec.submodule_search_locations if spec else None) or ()]
    return [*(path / "cu13" / "include" for path in installed), folder / "nvidia" / "cu13" / "include"]


# What CuPy's own setup gives Cython (install/cupy_builder/cupy_setup_build.py).
_CYTHON = """
import sys
from Cython import __version__
from Cython.Compiler.Main import compile_single
from Cython.Compiler.Options import CompilationOptions, default_options
directives = {"embedsignature": True, "c_api_binop_methods": True, "binding": False, "warn.deprecated.IF": False,
              "freethreading_compatible": True}
constants = {"CUPY_USE_CUDA_PYTHON": False, "CUPY_CUFFT_STATIC": False, "CUPY_CYTHON_VERSION": __version__,
             "CUPY_CUDA_VERSION": 13000, "CUPY_HIP_VERSION": 0}
module, made = sys.argv[1:]
options = CompilationOptions(default_options, language_level=3, cplus=True, output_file=made,
                             compiler_directives=directives, compile_time_env=constants)
result = compile_single(module.replace(".", "/") + ".pyx", options, full_module_name=module)
sys.exit(bool(result.num_errors))
"""


def _cython(cache: Path, source: Path, made: Path) -> Path:
    output = made / "runtime_module.cpp"
    environment = {**os.environ, "PYTHONPATH": str(cache / f"tools-{_cython_version()}")}
    _run(sys.executable, "-c", _CYTHON, MODULE, output, cwd=source, env=environment)
    return output


def _runtime_flags(source: Path, headers: Sequence[Path]) -> list[str]:
    folders = [*headers, source / "cupy_backends" / "cuda" / "api", Path(sysconfig.get_paths()["include"])]
    return ["-O1", "-fPIC", "-w", *(f"-I{folder}" for folder in folders)]


def _missing(made: Path, runtime: Path, objects: Sequence[Path]) -> Path:
    """Compile the runtime functions that CuPy links and this driver lacks. Each reports itself when it is called."""

    def symbols(*command: object) -> set[str]:
        return {line.split()[-1] for line in _run("nm", *command).splitlines() if line.split()}

    wanted = {name for name in symbols("-u", runtime) if re.match(r"cuda[A-Z]", name)}
    there = symbols("--defined-only", *objects)
    lines = ['extern "C" int softgpu_missing(const char*);']
    for name in sorted(wanted - there):
        head = f'extern "C" __attribute__((visibility("default"))) int {name}()'
        lines.append(f'{head} {{ return softgpu_missing("{name}"); }}')
    source = made / "missing.cpp"
    source.write_text("\n".join(lines) + "\n")
    return _compile(source, made / "missing.o", ("-fPIC",))


if __name__ == "__main__":
    sys.stdout.write(f"{build()}\n")
