"""The gate table: limits of the code that ptxas makes of the variants of every kernel.

A row is a variant on an architecture. Code may have no spills, no stack, no notes (C75xx: wgmma serialised, setmaxnreg
ignored) and no access to local memory; registers and every figure with a limit must stay within it. The first lines of
the families' modules say what else they limit.
"""

from __future__ import annotations

from gates.append import APPEND
from gates.backward import BACKWARD
from gates.backward_sm90 import BACKWARD_SM90_ROWS
from gates.decode import CASCADE, DECODE_ROWS
from gates.decode_sm90 import DECODE_SM90
from gates.forward import FORWARD, FORWARD_WIDE
from gates.forward_sm90 import FORWARD_SM90
from gates.merge import MERGE
from gates.plain import FORWARD_SIMPLE, POSITIONED
from gates.score_mods import SCORE_MODS

__all__ = ["FAMILIES", "ROWS"]

_ALL = (FORWARD, FORWARD_WIDE, FORWARD_SM90, BACKWARD, BACKWARD_SM90_ROWS, DECODE_ROWS, DECODE_SM90, CASCADE)
FAMILIES = {family.name: family for family in (*_ALL, APPEND, SCORE_MODS, MERGE, FORWARD_SIMPLE, POSITIONED)}
ROWS = {str(row): row for family in FAMILIES.values() for row in family.rows}
assert len(ROWS) == sum(len(family.rows) for family in FAMILIES.values())
