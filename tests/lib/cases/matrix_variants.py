"""Finds which kernels the rows of `matrix` launch first, without launching them."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any
from unittest import mock

from inside.compiling import Variant
from inside.kernels import variant_of
from matrix.table import FAMILIES
from support import gate

__all__ = ["first_variant"]


class _Asked(Exception):
    """A row asks for the source of a kernel."""

    def __init__(self, of: Any) -> None:
        super().__init__(of)
        self.of = of


def first_variant(family: str, row: str, grid: bool = False) -> Variant | None:
    """The variant that a row launches first, or None if it asks for no source. grid: ``row`` is one of GRID."""

    def kernel_source(of: Any) -> Any:
        raise _Asked(of)

    with _replaced(kernel_source):
        try:
            if grid:
                FAMILIES[family].run_variant(row, thorough=False)
            else:
                FAMILIES[family].run(row)
        except _Asked as asked:
            return variant_of(asked.of)
    return None


@contextlib.contextmanager
def _replaced(kernel_source: Any) -> Iterator[None]:
    """Replace `kernel_source` in every module that imported it from `support.gate`."""
    with contextlib.ExitStack() as stack:
        for module in list(sys.modules.values()):
            if vars(module).get("kernel_source") is gate.kernel_source and module is not gate:
                stack.enter_context(mock.patch.object(module, "kernel_source", kernel_source))
        yield
