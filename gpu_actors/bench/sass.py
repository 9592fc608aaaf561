"""Counts the instructions of a cubin's main loop, where NVIDIA's disassembler is installed."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import NamedTuple

__all__ = ["Loop", "disassemble", "find_disassembler", "loops", "main_loop"]

_LABEL = re.compile(r"^\s*(\.L_\w+):")
_INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?\w+\s+)?([A-Z][A-Z0-9_.]*)(.*)")
_TARGET = re.compile(r"`\((\.L_\w+)\)")
_TENSOR = ("HMMA", "HGMMA", "QGMMA", "IMMA", "QMMA")


class Loop(NamedTuple):
    """instructions: a warp's, from the label to the branch back, each counted once. tensor: matrix products among them.

    special: those of the MUFU. inner: the loop inside that has products, where there is one. warpgroups: whether the
    products are those of whole warpgroups. skipped: instructions of the largest part without products and exponentials
    that a branch passes by; such a loop of warpgroups keeps its mask there.
    """

    instructions: int
    tensor: int
    special: int
    inner: Loop | None = None
    warpgroups: bool = False
    skipped: int = 0

    @property
    def unmasked(self) -> int:
        """The instructions of an iteration without a mask."""
        return self.instructions - self.skipped if self.warpgroups else self.instructions

    def executed(self, products: int) -> int:
        """The instructions of an iteration that makes so many products: what is missing comes from the inner loop."""
        if self.inner is None or products <= self.tensor:
            return self.unmasked
        return self.unmasked + round((products - self.tensor) / self.inner.tensor * self.inner.instructions)


def find_disassembler() -> Path | None:
    """nvdisasm of the installed wheels, or on the path."""
    found = importlib.util.find_spec("nvidia")
    folders = [] if found is None else list(found.submodule_search_locations or ())
    wheels = (path for folder in folders for path in sorted(Path(folder).glob("*/bin/nvdisasm")))
    on_path = shutil.which("nvdisasm")
    return next(wheels, None) or (Path(on_path) if on_path else None)


def disassemble(cubin: bytes, *options: str) -> str:
    """What nvdisasm prints of a cubin's code.

    Raises FileNotFoundError where it is not installed, CalledProcessError where it cannot read the cubin.
    """
    tool = find_disassembler()
    if tool is None:
        raise FileNotFoundError("nvdisasm is neither in the installed wheels (nvidia-cuda-nvdisasm) nor on the path")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        done = subprocess.run([tool, *options, "-c", path], capture_output=True, text=True, check=True, timeout=120)
    return done.stdout


def main_loop(cubin: bytes) -> Loop | None:
    """The loop over key tiles that makes do with the fewest instructions a product: the one without masks.

    None without a disassembler that knows the architecture, or for a kernel that has no loop with both products and
    exponentials.
    """
    try:
        text = disassemble(cubin)
    except (FileNotFoundError, subprocess.CalledProcessError):
        return None
    found = [loop for loop in loops(text) if loop.tensor and loop.special]
    return min(found, key=lambda loop: loop.unmasked / loop.tensor, default=None)


def loops(text: str) -> list[Loop]:
    """Of a disassembly: every loop that holds no other with exponentials in it."""
    labels: dict[str, int] = {}
    names: list[str] = []
    spans: list[tuple[int, int]] = []
    ahead: list[tuple[int, str]] = []  # branches to labels that come later
    for line in text.splitlines():
        if label := _LABEL.match(line):
            labels[label[1]] = len(names)
        elif instruction := _INSTRUCTION.match(line):
            name, rest = instruction.groups()
            target = _TARGET.search(rest)
            if name.startswith("BRA") and target:
                if target[1] in labels:
                    spans.append((labels[target[1]], len(names) + 1))
                else:
                    ahead.append((len(names) + 1, target[1]))
            names.append(name)

    passed = [(start, labels[name]) for start, name in ahead if name in labels]

    def inside(outer: tuple[int, int]) -> list[tuple[int, int]]:
        return [span for span in spans if span != outer and outer[0] <= span[0] and span[1] <= outer[1]]

    def count(span: tuple[int, int], prefixes: str | tuple[str, ...]) -> int:
        return sum(name.startswith(prefixes) for name in names[slice(*span)])

    def loop(span: tuple[int, int], inner: Loop | None = None) -> Loop:
        groups = count(span, ("HGMMA", "QGMMA")) > 0
        skipped = [
            end - start
            for start, end in passed
            if span[0] <= start and end < span[1] and not count((start, end), (*_TENSOR, "MUFU"))
        ]
        return Loop(
            span[1] - span[0], count(span, _TENSOR), count(span, "MUFU"), inner, groups, max(skipped, default=0)
        )

    found: list[Loop] = []
    for span in spans:
        within = inside(span)
        if any(count(other, "MUFU") for other in within):
            continue
        products = [loop(other) for other in within if count(other, _TENSOR)]
        found.append(loop(span, max(products, key=lambda one: one.tensor, default=None)))
    return found
