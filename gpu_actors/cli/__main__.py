"""``python -m gpu_actors.cli``: the command, if its script is not on the path."""

from __future__ import annotations

from gpu_actors.cli import main

__all__: list[str] = []

if __name__ == "__main__":
    main()
