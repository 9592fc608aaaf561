"""Counts what a warp does in an iteration of a kernel's main loop, from its machine code.

NVIDIA's disassembler prints the code and needs no GPU. Bytes and multiply-adds follow from the instructions' names,
which the CUDA Binary Utilities describe.
"""

from __future__ import annotations

import collections
import importlib.util
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

__all__ = ["Step", "disassemble", "find_disassembler", "main_step", "steps"]

_LABEL = re.compile(r"^\s*(\.L_\w+):")
_INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(@!?\w+\s+)?([A-Z][A-Zx0-9_.]*)\s*(.*?)\s*;")
_TARGET = re.compile(r"`\((\.L_\w+)\)")
_GROUP_PRODUCT = re.compile(r"[A-Z]GMMA\.64x(\d+)x(\d+)")
_PRODUCTS = {"HMMA.16816": 16 * 8 * 16, "HMMA.1688": 16 * 8 * 8, "QMMA.16832": 16 * 8 * 32, "IMMA.16832": 16 * 8 * 32}
_FIRST_WAIT, _LAST_WAIT = "gsb0, 0x1", "gsb0, 0x0"
_SHORT = 8  # a branch over at most so many instructions skips no mask
# Their rate is half that of multiply-adds: CUDA C++ Programming Guide, "Arithmetic Instructions".
_CONVERSIONS = ("F2FP", "F2F", "F2I", "I2F", "PRMT")
_CHOICES = ("FMNMX", "FSEL", "FSETP", "IMNMX", "ISETP", "PLOP3", "SEL", "VIMNMX")
_HALF_RATE = frozenset((*_CONVERSIONS, *_CHOICES, "IADD3", "IABS", "LEA", "LOP3", "SHF", "VIADD"))


class _Line(NamedTuple):
    """An instruction. target: the index that a branch leads to, or None."""

    name: str
    operands: str
    conditional: bool
    target: int | None

    @property
    def opcode(self) -> str:
        return self.name.partition(".")[0]

    @property
    def product(self) -> bool:
        return self.opcode in ("HMMA", "HGMMA", "QGMMA", "IGMMA", "IMMA", "QMMA")


class Step(NamedTuple):
    """What one warp does in one iteration.

    opcodes: instructions by name without suffixes. products: multiply-adds, a warp's share if a warpgroup makes them.
    shared: bytes that it moves into and out of shared memory, likewise. half_rate: instructions that take twice an
    issue slot in their unit. masks: instructions that a branch skips if nothing is hidden; the other counts leave them
    out. overlapped: exponentials between the wait for the first products and the wait for all of them, 0 without
    warpgroups. inner: one round of each loop inside that multiplies, if there is one.
    """

    opcodes: collections.Counter[str]
    products: float
    shared: float
    half_rate: int
    masks: int = 0
    overlapped: int = 0
    inner: Step | None = None

    @property
    def instructions(self) -> int:
        return self.opcodes.total()

    @property
    def special(self) -> int:
        """Instructions of the special function unit."""
        return self.opcodes["MUFU"]

    def making(self, products: float) -> Step:
        """The same step, with enough further rounds of its inner loops to make ``products`` multiply-adds."""
        if self.inner is None or products <= self.products:
            return self
        rounds = (products - self.products) / self.inner.products
        opcodes = self.opcodes.copy()
        for name, count in self.inner.opcodes.items():
            opcodes[name] += round(rounds * count)
        shared = self.shared + rounds * self.inner.shared
        return self._replace(
            opcodes=opcodes,
            products=products,
            shared=shared,
            half_rate=self.half_rate + round(rounds * self.inner.half_rate),
        )


def find_disassembler() -> Path | None:
    """nvdisasm from the installed wheels, or on PATH."""
    found = importlib.util.find_spec("nvidia")
    folders = [] if found is None else list(found.submodule_search_locations or ())
    wheels = (path for folder in folders for path in sorted(Path(folder).glob("*/bin/nvdisasm")))
    on_path = shutil.which("nvdisasm")
    return next(wheels, None) or (Path(on_path) if on_path else None)


def disassemble(cubin: bytes, *options: str) -> str:
    """The text that nvdisasm prints of a cubin's code.

    Raises FileNotFoundError if it is not installed, CalledProcessError if it cannot read the cubin.
    """
    tool = find_disassembler()
    if tool is None:
        raise FileNotFoundError("nvdisasm is neither in the installed wheels (nvidia-cuda-nvdisasm) nor on the path")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        done = subprocess.run(
            [tool, *options, "-c", "-ndf", path], capture_output=True, text=True, check=True, timeout=120
        )
    return done.stdout


def main_step(text: str, products: float) -> Step | None:
    """The loop of a disassembled kernel with the most multiply-adds up to ``products``, and the shortest of those.

    products: of a warp and step. The step includes as many rounds of the loops inside as make them. None for a kernel
    without such a loop that also has exponentials.
    """
    found = [step for step in steps(text) if step.products <= products]
    best = max(found, key=lambda step: (step.products, -step.instructions), default=None)
    return None if best is None else best.making(products)


def steps(text: str) -> list[Step]:
    """Every loop of a disassembled kernel that has products and exponentials."""
    lines = _lines(text)
    # Spinning waits lie behind the kernel's end, and jump back into the loops without a condition.
    spans = [
        (line.target, end + 1)
        for end, line in enumerate(lines)
        if line.target is not None
        and line.target <= end
        and (line.conditional or not any(each.opcode == "EXIT" for each in lines[line.target : end]))
        and any(each.product for each in lines[line.target : end])
    ]
    found = []
    for span in dict.fromkeys(spans):
        within = [other for other in spans if _inside(other, span)]
        outermost = [_step(lines, other) for other in within if not any(_inside(other, third) for third in within)]
        step = _step(lines, span)
        found.append(step._replace(inner=_together(outermost)) if outermost else step)
    return [step for step in found if step.special]


def _together(rounds: Sequence[Step]) -> Step:
    """The sum of one round of each."""
    return Step(
        sum((one.opcodes for one in rounds), collections.Counter()),
        sum(one.products for one in rounds),
        sum(one.shared for one in rounds),
        sum(one.half_rate for one in rounds),
    )


def _inside(span: tuple[int, int], outer: tuple[int, int]) -> bool:
    return span != outer and outer[0] <= span[0] and span[1] <= outer[1]


def _lines(text: str) -> list[_Line]:
    labels: dict[str, int] = {}
    found: list[tuple[str, str, bool, str | None]] = []
    for line in text.splitlines():
        if label := _LABEL.match(line):
            labels[label[1]] = len(found)
        elif instruction := _INSTRUCTION.match(line):
            predicate, name, operands = instruction.groups()
            target = _TARGET.search(operands) if name.startswith("BRA") else None
            # A branch may also name its predicate as an operand.
            conditional = predicate is not None or operands.startswith(("P", "UP", "!"))
            found.append((name, operands, conditional, target[1] if target else None))
    return [_Line(*line[:3], labels.get(line[3]) if line[3] else None) for line in found]


def _step(lines: Sequence[_Line], span: tuple[int, int]) -> Step:
    kept, masks = _kept(lines, span)
    opcodes = collections.Counter(line.opcode for line in kept)
    return Step(
        opcodes,
        sum(_products(line) for line in kept),
        sum(_shared(line) for line in kept),
        sum(line.opcode in _HALF_RATE for line in kept),
        masks,
        _overlapped(kept),
    )


def _kept(lines: Sequence[_Line], span: tuple[int, int]) -> tuple[list[_Line], int]:
    """The instructions of an iteration without a mask, and how many others there are.

    A mask is more than `_SHORT` instructions that a branch skips, without products and exponentials.
    """
    kept: list[_Line] = []
    at, masks = span[0], 0
    while at < span[1]:
        line = lines[at]
        kept.append(line)
        at += 1
        if line.conditional and line.target is not None and at < line.target < span[1]:
            passed = lines[at : line.target]
            if len(passed) > _SHORT and not any(each.product or each.opcode == "MUFU" for each in passed):
                masks += len(passed)
                at = line.target
    return kept, masks


def _overlapped(kept: Sequence[_Line]) -> int:
    """Exponentials between a wait that leaves products running and the next one that leaves none."""
    count, running = 0, False
    for line in kept:
        if line.opcode == "WARPGROUP" and _FIRST_WAIT in line.operands:
            running = True
        elif line.opcode == "WARPGROUP" and _LAST_WAIT in line.operands:
            running = False
        elif line.opcode == "MUFU":
            count += running
    return count


def _products(line: _Line) -> float:
    if group := _GROUP_PRODUCT.match(line.name):
        return 64 * int(group[1]) * int(group[2]) / 4
    return next((count for name, count in _PRODUCTS.items() if line.name.startswith(name)), 0)


def _shared(line: _Line) -> float:
    if group := _GROUP_PRODUCT.match(line.name):
        # 32 bytes of each column of B, and of each of A's 64 rows if both operands have descriptors.
        both = line.operands.partition(",")[2].lstrip().startswith("gdesc")
        return 32 * (int(group[1]) + 64 * both) / 4
    if line.opcode in ("LDSM", "STSM"):
        return 128 * (int(line.name[-1]) if line.name[-2] == "." else 1)
    if line.opcode in ("LDS", "STS"):
        width = next((int(part) for part in line.name.split(".") if part in ("64", "128")), 32)
        return 32 * width / 8
    return 0
