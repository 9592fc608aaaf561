"""Parts that the subcommands share: options, the streams for text, and the forms of errors and JSON."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Annotated, Any, TextIO, TypeAlias

import typer

from gpu_actors.errors import RequestError
from gpu_actors.values import show

if TYPE_CHECKING:
    from rich.progress import Progress

__all__ = [
    "CacheDtypeOption",
    "DeviceOption",
    "DtypeOption",
    "JsonOption",
    "chosen_device",
    "error_sentence",
    "progress_bar",
    "silence_if_closed",
    "write_error",
    "write_json",
    "write_json_list",
    "write_note",
    "write_table",
]

DeviceOption: TypeAlias = Annotated[
    str, typer.Option("--device", help="auto, cuda, cuda:N, emulated or mock.", metavar="DEVICE")
]
DtypeOption: TypeAlias = Annotated[
    str | None, typer.Option(help="Of attention: float16, bfloat16 or float32. Default: that of the weights.")
]
CacheDtypeOption: TypeAlias = Annotated[
    str | None, typer.Option(help="Of the KV cache: as --dtype, or float8_e4m3fn or float8_e5m2.")
]
JsonOption: TypeAlias = Annotated[bool, typer.Option("--json", help="Print JSON on standard output.")]

PIPE_WIDTH = 160
PREDICATES = ("is ", "must ", "does ", "cannot ", "needs ", "lacks ", "holds ")


def error_sentence(error: Exception) -> str:
    """An error as a sentence for the user: what is wrong, and what to do."""
    if isinstance(error, OSError) and error.strerror:
        place = f"{error.filename}: " if error.filename else ""
        return f"{place}{error.strerror}"
    if not isinstance(error, RequestError):
        return str(error) or type(error).__name__
    nearest = getattr(error, "nearest", None)
    hint = "" if nearest is None else f" (nearest supported: {nearest})"
    if error.value is None:
        return f"{error.reason}{hint}"
    predicate = error.reason.startswith(PREDICATES)
    return f"{error.field} {_spelled(error.value, predicate)}{' ' if predicate else ': '}{error.reason}{hint}"


def _spelled(value: object, predicate: bool) -> str:
    """A value in a sentence: quoted if a colon follows, or if it would not be visible."""
    plain = isinstance(value, str) and predicate and value.isprintable() and value == value.strip() != ""
    return str(value) if plain else show(value)


def silence_if_closed(stream: TextIO) -> None:
    """Discard text that a standard stream could not take, or the interpreter would write it again at its exit."""
    try:
        stream.flush()
    except OSError:
        with contextlib.suppress(OSError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, stream.fileno())
            os.close(nowhere)


def write_note(sentence: str) -> None:
    """Write one line, not an error, to standard error. Does nothing if standard error is closed."""
    try:
        typer.echo(sentence, err=True)
    except OSError:
        silence_if_closed(sys.stderr)


def chosen_device(device: str, quiet: bool) -> str:
    """The device that DEVICE means here. Unless quiet, a note says why "auto" is the CPU."""
    from gpu_actors.devices.select import choose_device

    device, obstacle = choose_device(device)
    if obstacle is not None and not quiet:
        write_note(f"computes on the CPU: {obstacle}")
    return device


def write_error(sentence: str) -> None:
    """Write an error as one line to standard error. Does nothing if standard error is closed."""
    write_note(f"gpu-actors: {sentence}")


def write_json(value: object) -> None:
    """Write one JSON document to standard output. Raises ValueError for NaN, which JSON lacks."""
    typer.echo(json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False))


def write_json_list(items: Iterable[object]) -> None:
    """Write a JSON list to standard output, one line per item, as the items come."""
    separator = "["
    for item in items:
        sys.stdout.write(f"{separator}\n{json.dumps(item, ensure_ascii=False, allow_nan=False)}")
        separator = ","
    sys.stdout.write("[]\n" if separator == "[" else "\n]\n")
    sys.stdout.flush()


def write_table(columns: Sequence[str], rows: Iterable[Sequence[Any]], *, title: str | None = None) -> None:
    """Write a table to standard output. Columns of numbers are aligned to the right."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    cells = [list(row) for row in rows]
    table = Table(title=title, title_justify="left")
    for index, column in enumerate(columns):
        numeric = bool(cells) and all(isinstance(row[index], int | float) for row in cells)
        table.add_column(column, justify="right" if numeric else "left", overflow="fold")
    for row in cells:
        # Cells are Text, so that brackets in a user's words are not taken for markup.
        table.add_row(*(Text(f"{cell:.3f}" if isinstance(cell, float) else str(cell)) for cell in row))

    class Unbroken(Console):
        def on_broken_pipe(self) -> None:  # rich's own would exit with a code of its own
            raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))

    console = Unbroken()
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = PIPE_WIDTH
    console.print(table)


def progress_bar(*, quiet: bool) -> Progress:
    """A progress bar on standard error; hidden if standard error is not a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]}"),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=quiet or not console.is_terminal,
    )
