"""``gpu-actors bench``: runs one of the suites in gpu_actors.bench and shows its figures."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any

import typer

from gpu_actors.bench import environment
from gpu_actors.cli.output import DeviceOption, JsonOption, write_json, write_table
from gpu_actors.errors import InvalidRequest

__all__ = ["bench"]


def bench(
    suite: Annotated[str, typer.Argument(help="bridge, compile, imports, ... (see --list).")] = "",
    list_suites: Annotated[bool, typer.Option("--list", help="List the suites and exit.")] = False,
    as_json: JsonOption = False,
    device: DeviceOption = "auto",
) -> None:
    """Measure this machine: run a benchmark suite and print its figures."""
    suites = _suites()
    if list_suites:
        for name in suites:
            typer.echo(name)
        return
    names = ", ".join(suites) or "none is installed"
    if not suite:
        raise InvalidRequest("suite", None, f"name a suite: {names}")
    if suite not in suites:
        raise InvalidRequest("suite", suite, f"must be one of {names}")
    figures = {"environment": environment()} | _run(importlib.import_module(f"gpu_actors.bench.{suite}").run, device)
    if as_json:
        write_json(figures)
    else:
        write_table(("figure", "value"), _flat(figures), title=suite)


def _suites() -> list[str]:
    try:
        package = importlib.import_module("gpu_actors.bench")
    except ImportError:
        return []
    return sorted(module.name for module in pkgutil.iter_modules(package.__path__) if module.name[0] != "_")


def _run(run: Callable[..., Mapping[str, Any]], device: str) -> dict[str, Any]:
    # A suite that has no device to choose, such as the import times, takes none.
    takes_device = "device" in inspect.signature(run).parameters
    return dict(run(device=device) if takes_device else run())


def _flat(figures: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in figures.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
