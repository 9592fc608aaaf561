"""``gpu-actors bench``: runs one of the suites in gpu_actors.bench and shows its figures."""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from gpu_actors.bench import SUITES, environment, in_rows
from gpu_actors.cli.output import DeviceOption, JsonOption, write_json, write_note, write_table
from gpu_actors.errors import InvalidRequest
from gpu_actors.tracing.chrome import replace_file

__all__ = ["bench"]

_BAD = ("wrong", "failed")


def bench(
    suite: Annotated[str, typer.Argument(help="forward, backward, decode, bridge, ... (see --list).")] = "",
    list_suites: Annotated[bool, typer.Option("--list", help="List the suites and exit.")] = False,
    as_json: JsonOption = False,
    device: DeviceOption = "auto",
    quick: Annotated[bool, typer.Option("--quick", help="Only the most telling cases of a GPU suite.")] = False,
    minutes: Annotated[float | None, typer.Option("--minutes", help="Begin no case of a GPU suite later.")] = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="Also write the JSON to this file; a GPU suite after each case.")
    ] = None,
    plot: Annotated[Path | None, typer.Option("--plot", help="Also draw the figures of a GPU suite (PNG).")] = None,
) -> None:
    """Measure this machine: run a benchmark suite and print its figures."""
    if list_suites:
        for name in SUITES:
            typer.echo(name)
        return
    names = ", ".join(SUITES)
    if not suite:
        raise InvalidRequest("suite", None, f"name a suite: {names}")
    if suite not in SUITES:
        raise InvalidRequest("suite", suite, f"must be one of {names}")

    def keep(found: Mapping[str, Any]) -> dict[str, Any]:
        figures = {"environment": environment()} | dict(found)
        if out is not None:
            replace_file(out, [in_rows(figures)])
        return figures

    given = {"device": device, "quick": quick, "minutes": minutes, "keep": keep}
    figures = keep(_run(pkgutil.resolve_name(f"gpu_actors.bench.{SUITES[suite]}"), given))
    if as_json:
        write_json(figures)
    else:
        _show(suite, figures)
    if plot is not None:
        _draw(suite, figures, plot)
    if any(row["subject"].startswith("gpu_actors") and row["status"] in _BAD for row in _measured(figures)):
        raise typer.Exit(1)


def _run(run: Callable[..., Mapping[str, Any]], given: Mapping[str, Any]) -> dict[str, Any]:
    # A suite takes only the options that apply to it. The import times, for example, have no device to choose.
    taken = inspect.signature(run).parameters
    return dict(run(**{name: value for name, value in given.items() if name in taken}))


def _show(suite: str, figures: Mapping[str, Any]) -> None:
    kind = figures.get("kind")
    if kind == "measurement":
        from gpu_actors.bench import report

        ceilings = figures["ceilings"]
        write_table(report.COLUMNS, report.table(figures), title=f"{suite} on {figures['gpu'].get('name')}")
        write_note(f"ceilings of this run: {ceilings['matmul']} TFLOP/s, {ceilings['copy']} GB/s ({ceilings['how']})")
    elif kind == "load":
        from gpu_actors.bench import serve

        title = f"{suite}: streams of {figures['tokens_a_stream']} tokens"
        write_table(serve.COLUMNS, serve.table(figures), title=title)
    else:
        write_table(("figure", "value"), _flat(figures), title=suite)


def _draw(suite: str, figures: Mapping[str, Any], path: Path) -> None:
    if figures.get("kind") != "measurement":
        raise InvalidRequest("plot", str(path), f"must be left out: only measurements of a GPU are drawn, not {suite}")
    from gpu_actors.bench.report import draw

    draw(figures, path)


def _measured(figures: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return list(figures["rows"]) if figures.get("kind") == "measurement" else []


def _flat(figures: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in figures.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
