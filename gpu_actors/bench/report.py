"""The results of a GPU suite, as JSON, as a table and as a plot."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from gpu_actors.bench.ceilings import Ceilings
from gpu_actors.bench.suite import Row, Settings
from gpu_actors.errors import GpuActorsError
from gpu_actors.extras import missing, version_of

__all__ = ["COLUMNS", "draw", "figures", "git_revision", "gpu_record", "table"]

_PEER_PACKAGES = ("torch", "triton", "flashinfer-python", "nvidia-cudnn-frontend", "nvidia-cudnn-cu13", "flash-attn-4")
_SMI_FIELDS = ("name", "driver_version", "clocks.sm", "clocks.mem", "power.limit", "temperature.gpu")

_HEIGHT_A_CASE = 0.22
_COLOURS = ("#1b6ca8", "#8fb8de", "#d1495b", "#edae49", "#66a182", "#8d6a9f", "#7a7a7a", "#3d3d3d")

COLUMNS = ("case", "subject", "ms", "p10", "p90", "TFLOP/s", "GB/s", "of ceiling", "remark")


def figures(
    suite: str, rows: Sequence[Row], settings: Settings, ceilings: Ceilings, gpu: Mapping[str, Any]
) -> dict[str, Any]:
    """All figures for JSON. ``of_ceiling``: the share of the copy's GB/s for decodes, else of the product's TFLOP/s."""
    return {
        "suite": suite,
        "kind": "measurement",
        "git": git_revision(),
        "gpu": dict(gpu),
        "packages": {name: version_of(name) for name in _PEER_PACKAGES},
        "settings": asdict(settings),
        "ceilings": asdict(ceilings),
        "counts": {
            status: sum(row.status == status for row in rows) for status in sorted({row.status for row in rows})
        },
        "rows": [_record(row, ceilings) for row in rows],
    }


def table(figures: Mapping[str, Any]) -> Iterator[tuple[Any, ...]]:
    """The rows of `COLUMNS` for the result of `figures`."""
    for row in figures["rows"]:
        times, share = row["times_ms"], row["of_ceiling"]
        cells = ["-"] * 6
        if times is not None:
            numbers = (times["median"], times["p10"], times["p90"], row["tflops"], row["gbs"], share)
            formats = ("{:.4f}", "{:.4f}", "{:.4f}", "{:.1f}", "{:.0f}", "{:.0%}")
            cells = ["-" if n is None else form.format(n) for n, form in zip(numbers, formats, strict=True)]
        yield (row["case"]["name"], row["subject"], *cells, _remark(row))


def draw(figures: Mapping[str, Any], path: Path) -> None:
    """Draw the result of `figures` as a PNG: bars with their p10 and p90 for each case, and the ceiling of the run.

    Raises GpuActorsError if matplotlib is missing or nothing was timed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise GpuActorsError(f"nothing can be drawn: {missing(error, 'bench')}") from error
    timed = [row for row in figures["rows"] if row["times_ms"] is not None]
    if not timed:
        raise GpuActorsError("there is nothing to draw: no case was timed")
    cases = list(dict.fromkeys(row["case"]["name"] for row in timed))
    subjects = list(dict.fromkeys(row["subject"] for row in timed))
    rate, unit, ceiling = _axis(figures)
    height = 1.6 + _HEIGHT_A_CASE * len(cases) * (len(subjects) + 1)
    figure = Figure(figsize=(9, height), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for number, subject in enumerate(subjects):
        colour = _COLOURS[number % len(_COLOURS)]
        _bars(axes, [row for row in timed if row["subject"] == subject], cases, rate, number, len(subjects), colour)
    axes.set_yticks(range(len(cases)), cases)
    axes.invert_yaxis()
    axes.set_xlabel(unit)
    if ceiling is not None:
        axes.axvline(ceiling, color="black", linestyle="--", linewidth=1, label="ceiling of this run")
    axes.set_title(f"{figures['suite']} on {figures['gpu'].get('name', 'an unnamed device')}", loc="left")
    axes.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))
    figure.savefig(path, dpi=150)


def _axis(figures: Mapping[str, Any]) -> tuple[str, str, float | None]:
    """(name of the rate, its unit, the ceiling)."""
    if figures["suite"] == "decode":
        return "gbs", "GB/s of operands, each counted once", figures["ceilings"]["copy"]
    return "tflops", "TFLOP/s", figures["ceilings"]["matmul"]


def _bars(
    axes: Any,
    rows: Sequence[Mapping[str, Any]],
    cases: Sequence[str],
    rate: str,
    number: int,
    subjects: int,
    colour: str,
) -> None:
    """The bars of one subject. Rates fall as times rise, so the p90 of the time is the lower end of the rate."""
    thick = 0.85 / subjects
    places = [cases.index(row["case"]["name"]) + (number - (subjects - 1) / 2) * thick for row in rows]
    rates = [row[rate] for row in rows]
    times = [row["times_ms"] for row in rows]
    low = [value * (1 - time["median"] / time["p90"]) for value, time in zip(rates, times, strict=True)]
    high = [value * (time["median"] / time["p10"] - 1) for value, time in zip(rates, times, strict=True)]
    axes.barh(
        places, rates, thick, xerr=(low, high), color=colour, label=rows[0]["subject"], error_kw={"linewidth": 0.8}
    )


def git_revision() -> str | None:
    """The revision of this package's checkout, with "+" if files have changed. None for an installed package."""
    root = Path(__file__).parents[2]
    if not (root / ".git").exists() or shutil.which("git") is None:
        return None

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(root), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.strip()

    try:
        return git("rev-parse", "HEAD") + ("+" if git("status", "--porcelain", "--untracked-files=no") else "")
    except (subprocess.SubprocessError, OSError):
        return None


def gpu_record(index: int) -> dict[str, Any]:
    """The GPU's properties by CuPy and nvidia-smi. Clocks are the current clocks."""
    from cupy.cuda import runtime

    properties = runtime.getDeviceProperties(index)
    record: dict[str, Any] = {
        "name": properties["name"].decode(errors="replace").rstrip("\0"),
        "capability": f"{properties['major']}.{properties['minor']}",
        "multiprocessors": properties["multiProcessorCount"],
        "memory_bytes": properties["totalGlobalMem"],
        "l2_bytes": properties["l2CacheSize"],
        "cuda_driver": runtime.driverGetVersion(),
        "cuda_runtime": runtime.runtimeGetVersion(),
    }
    smi = shutil.which("nvidia-smi")
    if smi is not None:
        command = [smi, f"--id={index}", f"--query-gpu={','.join(_SMI_FIELDS)}", "--format=csv,noheader"]
        process = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
        if process.returncode == 0:
            record["nvidia_smi"] = dict(zip(_SMI_FIELDS, process.stdout.strip().split(", "), strict=False))
    return record


def _record(row: Row, ceilings: Ceilings) -> dict[str, Any]:
    return {
        "case": row.case.record(),
        "subject": row.subject,
        "status": row.status,
        "reason": row.reason,
        "kernels": list(row.kernels),
        "checked": None if row.checked is None else row.checked._asdict(),
        "times_ms": None if row.times is None else asdict(row.times),
        "back_to_back": row.held,
        "requests_per_second": row.requests_per_second,
        "tflops": row.tflops,
        "gbs": row.gbs,
        "of_ceiling": _share(row, ceilings),
    }


def _share(row: Row, ceilings: Ceilings) -> float | None:
    rate, ceiling = (row.gbs, ceilings.copy) if row.case.kind == "decode" else (row.tflops, ceilings.matmul)
    return None if rate is None or ceiling is None else rate / ceiling


def _remark(row: Mapping[str, Any]) -> str:
    if row["status"] != "timed":
        return f"{row['status']}: {row['reason']}"
    remarks = ["+".join(row["kernels"])] if row["kernels"] else []
    if row["requests_per_second"] is not None:
        remarks.append(f"{row['requests_per_second']:.0f} requests/s")
    if not row["back_to_back"]:
        remarks.append("time on the host is in it")
    return ", ".join(remarks)
