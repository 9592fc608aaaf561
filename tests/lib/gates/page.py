"""Judges every row of a family and writes the results, for scripts/gate."""

from __future__ import annotations

import sys
import time
from concurrent.futures import ThreadPoolExecutor

from gates.rows import NVRTC, Family, Found, Row, examine, faults
from inside.compiling import Compiler
from support.logs import write_log

__all__ = ["write_page"]


def write_page(family: Family) -> int:
    """Returns 1 if a row has a fault or takes too long to compile, else 0."""
    judged: list[tuple[Row, Found, str]] = []
    with ThreadPoolExecutor(2) as pool:  # NVRTC compiles without the interpreter's lock
        for row, found in zip(family.rows, pool.map(examine, family.rows), strict=True):
            judged.append((row, found, "; ".join(faults(found)) or "passes"))
            sys.stdout.write(f"{row}: {judged[-1][2]}\n")
            sys.stdout.flush()
    figures = list(dict.fromkeys(name for _, found, _ in judged for name in found.figures))
    seconds = [_seconds(row, found, family.seconds) for row, found, _ in judged]
    lines = []
    for (row, found, verdict), timed in zip(judged, seconds, strict=True):
        shown = (f"{found.figures[name]:.10g}" if name in found.figures else "" for name in figures)
        lines.append(f"| {row} | {found.code.resources.registers} | {' | '.join(shown)} | {timed:.2f} | {verdict} |")
    passed = sum(verdict == "passes" for _, _, verdict in judged)
    late = sum(timed > family.seconds for timed in seconds)
    summary = f"{passed} of {len(judged)} rows pass"
    if late:
        summary += f"; {late} take more than {family.seconds:g} s to compile"
    write_log(f"gate_{family.name}", summary, ("row", "registers", *figures, "seconds", "verdict"), lines)
    sys.stdout.write(summary + "\n")
    return 1 if late or passed < len(judged) else 0


def _seconds(row: Row, found: Found, limit: float) -> float:
    """Processor time of a cold compile by NVRTC; if it is over the limit, the lesser of two: other work only adds."""
    if row.compiler != NVRTC:
        return 0.0
    if found.seconds <= limit:
        return found.seconds
    start = time.thread_time()
    Compiler().compile(found.plan.source)
    return min(found.seconds, time.thread_time() - start)
