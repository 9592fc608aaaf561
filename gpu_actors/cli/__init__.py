"""The command ``gpu-actors``, with one file per subcommand. Each imports heavy modules only when it runs."""

from __future__ import annotations

import sys

__all__ = ["main"]


def main() -> None:
    """Run the command. If its libraries (extra "cli") are missing, say what it needs and exit with 1."""
    from gpu_actors.extras import missing

    try:
        import rich  # noqa: F401 - every subcommand but --help needs it
        import typer  # noqa: F401
    except ModuleNotFoundError as error:
        sys.exit(f"gpu-actors: {missing(error, 'cli')}")
    from gpu_actors.cli.app import main as run

    run()
