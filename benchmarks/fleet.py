"""Simulates many workers: ``python -m benchmarks.fleet --plot fleet.svg``. Nothing in it is measured.

The command above runs a study: rows of figures from 1 to 1,000 workers. Each row holds the settings that differ from
the defaults, so ``python -m benchmarks.fleet --workers 125 --policy two`` runs one row, or any other settings, alone.
The same settings and costs give the same figures. fleet_costs.json says which costs are assumed, published or measured.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from benchmarks.fleet_costs import load_costs
from gpu_actors.bench import environment, in_rows
from gpu_actors.cli.output import write_table
from gpu_actors.errors import GpuActorsError
from gpu_actors.extras import missing

__all__ = ["COLUMNS", "STUDY", "main", "measure", "run", "table"]

COLUMNS = ("group", "settings", "requests", "first p50 ms", "first p99 ms", "hit", "busiest worker", "router", "lost")

_CELL = 125
_CELLS = {"workers": 1000, "cells": 8}
_LOADED = {"workers": _CELL, "work": "forwards", "policy": "two", "rate": 80.0, "seconds": 12.0, "warm": 4.0}
_BIG = {"directory": 1 << 20}
_DEATH = _BIG | {"kill_at": 60.0}

# By the question that a group of rows answers.
STUDY: Mapping[str, tuple[Mapping[str, Any], ...]] = {
    "scale": (
        {"workers": 1},
        {"workers": 8},
        {"workers": 32},
        {"workers": _CELL},
        _BIG | {"workers": _CELL},
        _BIG | {"workers": 740},
        _BIG | {"workers": 1000},
        _BIG | {"workers": 1000, "routers": 8},
        _BIG | _CELLS,
    ),
    "seeds": tuple(_BIG | {"workers": _CELL, "seed": seed} for seed in (1, 2, 3)),
    "policy": tuple(_BIG | {"workers": _CELL, "policy": policy} for policy in ("random", "two", "ring", "home")),
    "directory": tuple({"workers": _CELL, "directory": 1 << bits} for bits in (12, 14, 16, 17, 18, 20)),
    "prefixes": tuple(
        _BIG | {"workers": _CELL, "zipf": zipf, "slots": slots} for slots in (64, 8) for zipf in (0.0, 1.0, 2.0)
    ),
    "stale turns": tuple(
        _BIG | {"workers": _CELL, "routers": 4, "sticky": sticky, "stale": stale}
        for sticky in (True, False)
        for stale in (0.0, 1.0, 10.0)
    ),
    "stale forwards": (
        *(_LOADED | {"routers": 4, "stale": stale} for stale in (0.0, 0.01, 0.1, 1.0)),
        _LOADED | {"policy": "random"},
    ),
    "death": (
        _DEATH | {"workers": 8, "kill": 1},
        _DEATH | {"workers": _CELL, "kill": 8},
        _DEATH | {"workers": _CELL, "kill": 60},
        _DEATH | {"workers": _CELL, "kill": 60, "repeat": 0.0, "burst_repeat": 64.0},
        _DEATH | _CELLS | {"kill": 8},
        _DEATH | _CELLS | {"kill": _CELL},
    ),
}


def run(quick: bool = False) -> dict[str, Any]:
    """Run the study. quick: only its rows of at most 8 workers."""
    model = _model()
    costs = load_costs()
    rows = []
    for group, runs in STUDY.items():
        for given in runs:
            if quick and given["workers"] > 8:
                continue
            fleet = model.Fleet(model.Settings(**given), costs)
            fleet.run()
            row = {"group": group, "settings": dict(given), **fleet.figures()}
            rows.append(row | ({"timeline": fleet.timeline()} if "kill" in given else {}))
    return {
        "kind": "simulation",
        "note": "a simulation with costs that are mostly assumed; nothing here is a measurement of a fleet",
        "costs": {**costs._asdict()},
        "rows": rows,
    }


def table(found: Mapping[str, Any]) -> Iterator[tuple[Any, ...]]:
    """One row for each row that `run` gave."""
    for row in found["rows"]:
        settings = " ".join(f"{name}={value}" for name, value in row["settings"].items())
        first = row["first_ms"] or {"p50": None, "p99": None}
        busy = row["worker_busy"]["most"], row["router_busy"]
        yield row["group"], settings, row["requests"], first["p50"], first["p99"], row["hit"], *busy, row["lost"]


def measure(sizes: tuple[int, ...] = (1, 8, 32, 125, 1000), choices: int = 300) -> dict[str, Any]:
    """The CPU time that the choice of a home takes on this machine, in microseconds: medians of the thread's own time.

    router_us: by the number of workers, what `PooledKvCache.create` does before it asks a worker: candidates, loads,
    the directory or the ring. At least half of the prompts, of 64 pages, are new. router_look_us: a look at one
    worker's health, which a router repeats for each worker after 20 ms.
    """
    from gpu_actors.context import open_context
    from gpu_actors.distributed import ContextPool

    found = {}
    with open_context("mock") as context:
        looks = [_cpu_us(context.health) for _ in range(choices)]
        for workers in sizes:
            pool = ContextPool({f"worker-{number}": context for number in range(workers)}, seed=0)
            for member in pool.candidates().values():
                member._health_time = math.inf  # looks are counted apart
            dice = random.Random(0)
            taken = []
            for number in range(choices):
                prompt = number if number % 2 else dice.randrange(number + 1)
                taken.append(_cpu_us(partial(_choose, pool, [b"%d/%d" % (prompt, page) for page in range(64)])))
            found[str(workers)] = round(statistics.median(taken), 1)
    return {"router_us": found, "router_look_us": round(statistics.median(looks), 1)}


def _choose(pool: Any, digests: list[bytes]) -> None:
    members = pool.candidates()
    pool.homes.choose(digests, {name: member.sequences for name, member in members.items()})


def _cpu_us(call: Callable[[], object]) -> float:
    began = time.thread_time()
    call()
    return (time.thread_time() - began) * 1e6


def _model() -> ModuleType:
    try:
        from benchmarks import fleet_model
    except ImportError as error:
        raise GpuActorsError(f"nothing can be simulated: {missing(error, 'test')}") from error
    return fleet_model


def main(arguments: list[str] | None = None) -> None:
    model = _model()
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.fleet", description=__doc__, argument_default=argparse.SUPPRESS
    )
    study = parser.add_argument_group("the study")
    study.add_argument("--quick", action="store_true", default=False, help="only its rows of at most 8 workers")
    study.add_argument("--out", type=Path, default=None, help="also write its figures to this file, as JSON")
    study.add_argument("--plot", type=Path, default=None, help="also draw them to this file")
    parser.add_argument("--measure", action="store_true", default=False, help="measure the choices of a router here")
    single = parser.add_argument_group("one run, where any of these is given")
    single.add_argument("--costs", type=Path, help="a JSON like benchmarks/fleet_costs.json")
    defaults = model.Settings()
    for field in dataclasses.fields(defaults):
        default = getattr(defaults, field.name)
        kind: Callable[[str], Any] = _truth if isinstance(default, bool) else type(default)
        single.add_argument(f"--{field.name.replace('_', '-')}", type=kind, help=f"{default}")
    given = vars(parser.parse_args(arguments))
    quick, out, plot, measured = (given.pop(name) for name in ("quick", "out", "plot", "measure"))
    if measured:
        print(in_rows(measure()), end="")
    elif given:
        costs = given.pop("costs", None)
        settings = model.Settings(**given)
        figures = model.simulate(settings, load_costs(costs.read_text(encoding="utf-8") if costs else None))
        print(in_rows({"kind": "simulation", "settings": model.changed(settings), **figures}), end="")
    else:
        found = {"environment": environment()} | run(quick)
        if out is not None:
            out.write_text(in_rows(found), encoding="utf-8")
        write_table(COLUMNS, table(found), title=f"SIMULATED: {found['note']}")
        if plot is not None:
            from benchmarks.fleet_plot import draw

            draw(found, plot)


def _truth(text: str) -> bool:
    return {"yes": True, "no": False}[text]


if __name__ == "__main__":
    main()
