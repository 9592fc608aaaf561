"""The plot of the simulated fleet: how scale, policies, the directory, stale loads and deaths change a first token's
time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gpu_actors.errors import GpuActorsError
from gpu_actors.extras import missing

__all__ = ["draw"]

_P50, _P99, _THIRD = "#8fb8de", "#1b6ca8", "#d1495b"


def draw(found: Mapping[str, Any], path: Path) -> None:
    """Draw what `benchmarks.fleet.run` gave. Raises GpuActorsError if matplotlib or rows of the whole study are
    missing.
    """
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError as error:
        raise GpuActorsError(f"nothing can be drawn: {missing(error, 'bench')}") from error
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for row in found["rows"]:
        groups.setdefault(row["group"], []).append(row)
    if len(groups) < 6:
        raise GpuActorsError("there is nothing to draw: the quick study has a few rows only")
    figure = Figure(figsize=(11, 7), layout="constrained")
    places = figure.subplots(2, 3)
    _bars(
        places[0][0], groups["scale"], [_scale(row["settings"]) for row in groups["scale"]], "from 1 to 1,000 workers"
    )
    _bars(
        places[0][1],
        groups["policy"],
        [row["settings"]["policy"] for row in groups["policy"]],
        "125 workers, by policy",
    )
    names = [f"{row['settings']['directory']:,}" for row in groups["directory"]]
    _bars(places[0][2], groups["directory"], names, "125 workers, by digests in the directory")
    names = [f"{row['settings']['zipf']:g}, {row['settings']['slots']}" for row in groups["prefixes"]]
    _bars(places[1][0], groups["prefixes"], names, "125 workers, by popularity and slots")
    names = [_stale(row["settings"]) for row in groups["stale forwards"]]
    _bars(places[1][1], groups["stale forwards"], names, "forwards at 80%, by age of loads in s")
    _deaths(places[1][2], groups["death"])
    figure.suptitle("SIMULATED, with assumed costs: time to a first token", x=0.01, ha="left")
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "fleet"}):
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def _bars(axes: Any, rows: Sequence[Mapping[str, Any]], names: Sequence[str], title: str) -> None:
    for offset, share, colour in ((-0.2, "p50", _P50), (0.2, "p99", _P99)):
        values = [row["first_ms"][share] for row in rows]
        axes.bar([at + offset for at in range(len(rows))], values, 0.4, color=colour, label=share)
    axes.set_yscale("log")
    axes.set_ylabel("ms")
    axes.set_xticks(range(len(rows)), names, rotation=30, ha="right", fontsize=7)
    axes.set_title(title, fontsize=9, loc="left")
    axes.legend(fontsize=7)


def _deaths(axes: Any, rows: Sequence[Mapping[str, Any]]) -> None:
    for row, colour in zip(rows, (_P50, _P99, _THIRD, "#edae49", "#66a182", "#3d3d3d"), strict=True):
        settings = row["settings"]
        budget = ", small budget" if "burst_repeat" in settings else ""
        seconds, values = zip(*row["timeline"], strict=True)
        axes.plot(
            seconds, values, color=colour, linewidth=1, label=f"{settings['kill']} of {settings['workers']}{budget}"
        )
    axes.set_yscale("log")
    axes.set_xlim(40, 100)
    axes.set_xlabel("s")
    axes.set_ylabel("p99, ms")
    axes.set_title("workers die at 60 s", fontsize=9, loc="left")
    axes.legend(fontsize=7)


def _scale(settings: Mapping[str, Any]) -> str:
    notes = [f"{settings['cells']} cells"] if "cells" in settings else []
    notes += [f"{settings['routers']} routers"] if "routers" in settings else []
    notes += ["large directory"] if "directory" in settings and not notes else []
    return ", ".join([str(settings["workers"]), *notes])


def _stale(settings: Mapping[str, Any]) -> str:
    return "random" if settings["policy"] == "random" else f"{settings['stale']:g}"
