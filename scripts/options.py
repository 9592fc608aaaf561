"""Which kernel takes which option on which architecture, from the checks that requests go through.

python scripts/options.py            prints docs/reports/options.md
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from gpu_actors.kernels.dispatch import FAMILIES
from gpu_actors.kernels.option_table import OPTIONS, option_cell

ARCHS = ("sm_80", "sm_90a")


def page() -> str:
    """The text of docs/reports/options.md."""
    reasons: dict[str, int] = {}
    heads = [f"{family.name} {arch}" for family in FAMILIES for arch in ARCHS]
    lines = [f"| option | {' | '.join(heads)} |", f"|---{'|---' * len(heads)}|"]
    for name in OPTIONS:
        cells = [option_cell(name, family, arch) for family in FAMILIES for arch in ARCHS]
        numbers = ["x" if cell.taken else _number(cell.reason, reasons) for cell in cells]
        lines.append(f"| {name} | {' | '.join(numbers)} |")
    notes = [f"{number}. {reason}." for reason, number in reasons.items()]
    return f"{_HEAD}\n{chr(10).join(lines)}\n\n{_NOTES}\n\n{chr(10).join(notes)}\n"


_HEAD = """# Options by kernel and architecture

In a clone, `python scripts/options.py` makes this page from the checks that requests go through: each option with a
request of bfloat16 and head dim 64, in the layout that a kernel is for. An x is a kernel that takes it; a number is
the reason for which it does not. A request that one kernel refuses goes to the next one of its kind. sm_86 and sm_89
take what sm_80 takes. Blackwell takes that too, and fp8 by forward_simple. `ctx.flash_attn.explain(request)` prints
the rows of one request, for the device of its context.
"""
_NOTES = "## Reasons"


def _number(reason: str, reasons: dict[str, int]) -> str:
    return str(reasons.setdefault(reason[0].upper() + reason[1:], len(reasons) + 1))


if __name__ == "__main__":
    sys.stdout.write(page())
