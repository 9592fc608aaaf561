"""The plot of a GPU suite: bars of each case's subjects, with their p10 and p90, and the ceiling of the run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gpu_actors.errors import GpuActorsError
from gpu_actors.extras import missing

__all__ = ["draw"]

_HEIGHT_A_CASE = 0.22
_COLOURS = ("#1b6ca8", "#8fb8de", "#d1495b", "#edae49", "#66a182", "#8d6a9f", "#7a7a7a", "#3d3d3d")


def draw(figures: Mapping[str, Any], path: Path) -> None:
    """Draw the figures of `report.figures` as a PNG.

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
    """The bars of one subject. Rates fall as times rise, so that p90 of the time is the lower end of the rate."""
    thick = 0.85 / subjects
    places = [cases.index(row["case"]["name"]) + (number - (subjects - 1) / 2) * thick for row in rows]
    rates = [row[rate] for row in rows]
    times = [row["times_ms"] for row in rows]
    low = [value * (1 - time["median"] / time["p90"]) for value, time in zip(rates, times, strict=True)]
    high = [value * (time["median"] / time["p10"] - 1) for value, time in zip(rates, times, strict=True)]
    axes.barh(
        places, rates, thick, xerr=(low, high), color=colour, label=rows[0]["subject"], error_kw={"linewidth": 0.8}
    )
