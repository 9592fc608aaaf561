"""The cost of importing the package, and the size of its wheel: ``gpu-actors bench imports``.

The budget of ``import gpu_actors`` is three times the time of ``import numpy``, which is part of it.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

__all__ = ["import_times", "run"]

_IMPORT = """\
import sys, time
start = time.perf_counter(), time.process_time()
import {module}
print(time.perf_counter() - start[0], time.process_time() - start[1], len(sys.modules))
"""
_ROOT = Path(__file__).parents[2]


def run(imports: int = 25) -> dict[str, object]:
    """`import_times`, and the bytes of a wheel. The wheel is None if there is no source tree or pip cannot build it."""
    return {**import_times(imports), "wheel": _wheel()}


def import_times(imports: int = 25) -> dict[str, dict[str, float]]:
    """Seconds, processor seconds and modules of ``import numpy`` and ``import gpu_actors``, with the ratios of times.

    Every import has its own interpreter. The two take turns, because other work on the machine varies. Times are the
    median and the least. NumPy starts threads; their processor time counts too.
    """
    rows: dict[str, list[list[float]]] = {"numpy": [], "gpu_actors": []}
    with tempfile.TemporaryDirectory() as folder:
        # The files are compiled once and read from then on, even if the environment says otherwise.
        environment = os.environ | {"PYTHONPYCACHEPREFIX": folder, "PYTHONDONTWRITEBYTECODE": ""}
        for _ in range(imports + 1):
            for module, row in rows.items():
                command = [sys.executable, "-c", _IMPORT.format(module=module)]
                output = subprocess.check_output(command, text=True, cwd=_ROOT, env=environment)
                row.append([float(figure) for figure in output.split()])
    figures: dict[str, dict[str, float]] = {}
    for module, (_, *measured) in rows.items():
        seconds, processor, modules = zip(*measured, strict=True)
        medians = {"median_s": round(statistics.median(seconds), 4), "cpu_s": round(statistics.median(processor), 4)}
        figures[module] = {**medians, "least_s": round(min(seconds), 4), "modules": int(modules[0])}
    ours, numpy = figures["gpu_actors"], figures["numpy"]
    figures["ratio"] = {name: round(ours[name] / numpy[name], 2) for name in ("median_s", "cpu_s")}
    return figures


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
