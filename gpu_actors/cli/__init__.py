"""The command ``gpu-actors``: one file a subcommand, each importing what is heavy only when it runs."""

from __future__ import annotations

from gpu_actors.cli.app import main

__all__ = ["main"]
