"""The types of a message's fields tell which hold arrays, for the package's messages and a program's own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from inside.attention import array_fields
from inside.attention import requests as messages

import gpu_actors as ga

if TYPE_CHECKING:
    from decimal import Decimal


def test_q_comes_first_and_lists_of_arrays_are_told_apart() -> None:
    fields = array_fields(ga.BatchedDecode)
    assert list(fields)[:4] == ["q", "k_caches", "v_caches", "seq_lens"]
    assert [name for name, several in fields.items() if several] == ["k_caches", "v_caches"]
    assert {"causal", "softcap", "block_mask"}.isdisjoint(array_fields(ga.FlashForward))


@dataclass
class Own:
    amount: Decimal  # imported only for type checkers
    text: Sequence[str]
    rows: npt.NDArray[np.float32]
    more: messages.Array | None = None
    plain: np.ndarray[Any, Any] | None = None


def test_a_message_of_a_program_may_have_types_that_cannot_be_found() -> None:
    @dataclass
    class Local(Own):
        other: Unknown = None  # type: ignore[name-defined]  # noqa: F821

    for kind in (Own, Local):
        assert array_fields(kind) == {"rows": False, "more": False, "plain": False}
