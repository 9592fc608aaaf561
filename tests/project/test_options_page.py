"""The page of options by kernel agrees with the checks of requests."""

from __future__ import annotations

import re
from typing import Any

from support.modules import ROOT, module_at

options: Any = module_at(ROOT / "scripts" / "options.py")


def test_the_page_is_what_the_script_makes() -> None:
    written = (ROOT / "docs" / "reports" / "options.md").read_text(encoding="utf-8")
    assert written == options.page(), "python scripts/options.py > docs/reports/options.md"


def test_each_cell_is_a_kernel_or_the_number_of_its_reason() -> None:
    table, reasons = options.page().split("## Reasons")
    numbers = set(re.findall(r"^(\d+)\. .+\.$", reasons, re.M))
    rows = [line.strip("|").split("|")[1:] for line in table.splitlines() if line.startswith("| ")][1:]
    cells = {cell.strip() for row in rows for cell in row}
    assert len(rows) == len(options.OPTIONS)
    assert cells == {"x"} | numbers
