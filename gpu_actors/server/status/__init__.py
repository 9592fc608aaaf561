"""The status of a context: its state as JSON, and a page that shows it.

`StatusBoard` reads one context, or the workers of a pool, for any number of viewers. `gpu_actors.asgi.routes`
serves the page, and ``gpu-actors report`` writes it into one file. docs/operate.md shows it.
"""

from __future__ import annotations

from gpu_actors.server.status.board import StatusBoard
from gpu_actors.server.status.files import report

__all__ = ["StatusBoard", "report"]
