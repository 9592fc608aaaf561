"""The driver runs ``lines.py LIBRARY NAME ISSUED FRAME...``, which prints where a finding was made, in a fault's words.

NAME: what the kernel's source is called. ISSUED, FRAME: the offsets of `emulation::Fault`.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from gpu_actors.devices.emulation.build import SOURCE
from gpu_actors.devices.emulation.source_lines import describe_lines, fault_lines


def main(library: str, name: str, issued: str, *frames: str) -> None:
    found = fault_lines(Path(library), [*map(int, frames)], int(issued), {SOURCE: name})
    sys.stdout.write(describe_lines(*found))


if __name__ == "__main__":
    main(*sys.argv[1:])
