"""The gate table: what ptxas may make of every variant of every kernel.

A row is a variant on an architecture. Nothing may be spilled, put on the stack or noted (C75xx: wgmma serialised,
setmaxnreg ignored), no local memory touched, and registers and every figure with a limit stay within it. The first
lines of the families' modules say what else they limit.
"""

from __future__ import annotations

from gates.append import APPEND
from gates.backward import BACKWARD
from gates.decode import CASCADE, DECODE_ROWS
from gates.forward import FORWARD, FORWARD_WIDE

__all__ = ["FAMILIES", "ROWS"]

FAMILIES = {family.name: family for family in (FORWARD, FORWARD_WIDE, BACKWARD, DECODE_ROWS, CASCADE, APPEND)}
ROWS = {str(row): row for family in FAMILIES.values() for row in family.rows}
assert len(ROWS) == sum(len(family.rows) for family in FAMILIES.values())
