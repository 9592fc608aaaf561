"""``gpu-actors report``: writes a server's page into one file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

import typer

from gpu_actors.cli.output import JsonOption, write_json, write_note
from gpu_actors.errors import GpuActorsError, InvalidRequest

__all__ = ["report"]

_MOST_BYTES = 64 << 20


def report(
    source: Annotated[
        str, typer.Argument(help="The address of a server's page, or a file that its status.json was saved to.")
    ] = "http://127.0.0.1:8000/",
    output: Annotated[Path, typer.Option("--output", "-o", help="The file to write.")] = Path("report.html"),
    timeout: Annotated[float, typer.Option(help="Seconds to wait for the server.")] = 10.0,
    as_json: JsonOption = False,
) -> None:
    """Write the page of a running server into one HTML file, which needs no server and no network.

    With --json it prints the state instead, as /status.json returns it.
    """
    from gpu_actors.server.status.files import report as page

    snapshot = _read(source, timeout)
    if as_json:
        write_json(snapshot)
        return
    text = page(snapshot)
    output.write_text(text, encoding="utf-8")
    write_note(f"{output}: {len(text.encode()):,} bytes, {snapshot['verdict']['state']}")


def _read(source: str, timeout: float) -> dict[str, Any]:
    scheme = urlsplit(source).scheme
    raw = _fetch(source, timeout) if scheme in ("http", "https") else Path(source).read_bytes()
    try:
        found = json.loads(raw)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise InvalidRequest("source", source, "must be the address of a page, or a file with its status.json")
    return found


def _fetch(address: str, timeout: float) -> bytes:
    import urllib.error
    import urllib.request

    if not address.endswith(".json"):
        address = f"{address.rstrip('/')}/status.json"
    try:
        with urllib.request.urlopen(address, timeout=timeout) as reply:
            found: bytes = reply.read(_MOST_BYTES)
    except urllib.error.HTTPError as error:
        raise GpuActorsError(f"{address} answers {error.code}: {error.read(500).decode(errors='replace')}") from None
    except (urllib.error.URLError, OSError) as error:
        raise GpuActorsError(f"{address} cannot be read: {getattr(error, 'reason', error)}") from None
    return found
