"""The cost of importing the package, and the size of its wheel: ``python -m gpu_actors.bench.imports`` prints JSON.

The budget is 0.3 s for ``import gpu_actors``.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

__all__ = ["main", "run"]

_IMPORT = """\
import sys, time
start = time.perf_counter()
import {module}
print(time.perf_counter() - start, len(sys.modules))
"""
_ROOT = Path(__file__).parents[2]


def run(imports: int = 7) -> dict[str, object]:
    """Seconds and modules of an import, and bytes of a wheel.

    Every import has its own interpreter. The times are the median and the least, and numpy's is a part of them that
    does not belong to this package. The wheel is None if there is no source tree or pip cannot build it.
    """
    return {"gpu_actors": _import("gpu_actors", imports), "numpy": _import("numpy", imports), "wheel": _wheel()}


def _import(module: str, times: int) -> dict[str, object]:
    seconds: list[float] = []
    modules = 0
    for _ in range(times + 1):
        command = [sys.executable, "-c", _IMPORT.format(module=module)]
        process = subprocess.run(command, capture_output=True, text=True, check=True, cwd=_ROOT)
        elapsed, loaded = process.stdout.split()
        seconds.append(float(elapsed))
        modules = int(loaded)
    # The first import reads the files from the disk.
    measured = seconds[1:]
    return {
        "median_s": round(statistics.median(measured), 3),
        "least_s": round(min(measured), 3),
        "modules": modules,
    }


def _wheel() -> dict[str, object] | None:
    if not (_ROOT / "pyproject.toml").exists():
        return None
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--quiet", "--wheel-dir", folder, str(_ROOT)]
        if subprocess.run(command, capture_output=True, check=False).returncode != 0:
            return None
        wheel = next(Path(folder).glob("*.whl"))
        with zipfile.ZipFile(wheel) as archive:
            files = [entry for entry in archive.infolist() if not entry.is_dir()]
        unpacked = sum(entry.file_size for entry in files)
        return {"name": wheel.name, "bytes": wheel.stat().st_size, "unpacked_bytes": unpacked, "files": len(files)}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m gpu_actors.bench.imports", description=__doc__)
    parser.add_argument("--imports", type=int, default=7, help="imports to time (default: %(default)s)")
    options = parser.parse_args(arguments)
    json.dump(run(options.imports), sys.stdout, indent=2)
    sys.stdout.write("\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
