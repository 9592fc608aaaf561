"""mbarrier objects (PTX ISA 9.7.13.15)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

LARGEST: Final = (1 << 20) - 1
"""Largest value of each count (9.7.13.15.2, "Contents of the mbarrier object")."""


@dataclass
class Barrier:
    """An mbarrier after `mbarrier.init` with `expected` arrivals.

    It moves through phases 0, 1, 2, ...; a phase ends when no arrival and no transaction is pending (9.7.13.15.4,
    "Phase Completion of the mbarrier object"), and the next one then expects `expected` arrivals again.

    pending: arrivals still to come. transactions: its tx-count, below zero if bytes arrived before they were expected.
    Raises ValueError if a count leaves its range, which the ISA leaves undefined.
    """

    expected: int
    phase: int = 0
    pending: int = field(init=False)
    transactions: int = 0

    def __post_init__(self) -> None:
        self.pending = self.expected

    def _settle(self) -> None:
        if self.pending == 0 and self.transactions == 0:
            self.phase += 1
            self.pending = self.expected

    def _count(self, amount: int) -> None:
        if not -LARGEST <= self.transactions + amount <= LARGEST:
            raise ValueError(f"tx-count {self.transactions + amount} is out of range")
        self.transactions += amount

    def arrive(self) -> None:
        """`mbarrier.arrive` (9.7.13.15.13): the arrive-on operation, which may end the phase."""
        if self.pending == 0:
            raise ValueError("an arrival where none is pending")
        self.pending -= 1
        self._settle()

    def expect_tx(self, amount: int) -> None:
        """`mbarrier.expect_tx` (9.7.13.15.5.1): more bytes to wait for. It does not end a phase by itself."""
        self._count(amount)

    def complete_tx(self, amount: int) -> None:
        """complete-tx (9.7.13.15.5.2), as a bulk copy does with the bytes that it wrote: it may end the phase."""
        self._count(-amount)
        self._settle()

    def arrive_expect_tx(self, amount: int) -> None:
        """`mbarrier.arrive.expect_tx` (9.7.13.15.13): expect-tx first, then one arrival."""
        self.expect_tx(amount)
        self.arrive()

    def arrive_after_copies(self, noinc: bool) -> None:
        """`cp.async.mbarrier.arrive{.noinc}` once the thread's prior `cp.async` are done (9.7.13.15.15).

        Without `.noinc` the pending count first grows by 1, so the arrival changes nothing in total.
        """
        if not noinc:
            self.pending += 1
        self.arrive()

    def passes(self, parity: int) -> bool:
        """The result of `mbarrier.test_wait.parity`, and of a `try_wait.parity` that does not time out (9.7.13.15.16).

        The parity names the current phase, which is not complete, or the one just before it, which is. The phase before
        phase 0 is odd.
        """
        return self.phase % 2 != parity
