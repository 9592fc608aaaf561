"""What every fast forward kernel must do alike: rows that see nothing, sinks, and sequences that are alone or not.

A test file derives its test classes from these and says how its kernel is asked.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
from emulated.forward import gaussian

__all__ = ["BatchInvariance", "Edges"]


class ForwardKernel:
    """DIM: the head dim of the operands. BATCHED: options of a launch that answers several sequences.

    answer: of q, k, v and options, (out, lse) of the kernel. check: the same, held against the oracle.
    """

    DIM: ClassVar[int]
    BATCHED: ClassVar[dict[str, Any]] = {}
    answer: Callable[..., tuple[Any, Any]]
    check: Callable[..., tuple[Any, Any]]

    def dense(self, rows: int, keys: int, batch: int = 1, heads: int = 2) -> list[Any]:
        shapes = ((batch, rows, heads, self.DIM), (batch, keys, 2, self.DIM), (batch, keys, 2, self.DIM))
        return [gaussian(n, shape, "float16") for n, shape in enumerate(shapes)]

    def packed(self, rows: int, keys: int) -> list[Any]:
        return [gaussian(n, (count, 2, self.DIM), "float16") for n, count in enumerate((rows, keys, keys))]


class Edges(ForwardKernel):
    ENDS: ClassVar[dict[str, Any]] = {
        "cu_seqlens_q": np.array([0, 5, 5, 8, 41], np.int32),
        "cu_seqlens_k": np.array([0, 0, 7, 9, 12], np.int32),
    }

    def test_sequences_without_rows_or_keys_and_rows_that_see_nothing(self):
        out, lse = self.check(*self.packed(41, 12), causal=True, **self.ENDS)
        assert (out[:5] == 0).all(), "five rows of a sequence without keys"
        assert np.isneginf(lse[:, :5]).all()
        assert (out[8:38] == 0).all(), "33 rows over 3 keys: the first 30 end before key 0"
        assert np.isneginf(lse[:, 8:38]).all()
        assert np.isfinite(lse[:, 38:]).all()

    def test_a_row_that_sees_nothing_has_its_sink_as_lse(self):
        sinks = np.array([0.5, -3.0], np.float32)
        out, lse = self.check(*self.packed(41, 12), causal=True, sinks=sinks, **self.ENDS)
        assert (out[:5] == 0).all()
        np.testing.assert_allclose(lse[:, :5], np.repeat(sinks[:, None], 5, 1), rtol=1e-6)

    def test_a_sink_of_minus_infinity_is_no_sink_and_a_large_one_takes_all(self):
        q, k, v = self.dense(3, 40)
        plain, plain_lse = self.answer(q, k, v, causal=True)
        out, lse = self.answer(q, k, v, causal=True, sinks=np.array([-np.inf, 300.0], np.float32))
        np.testing.assert_array_equal(out[:, :, 0], plain[:, :, 0])
        np.testing.assert_allclose(lse[:, 0], plain_lse[:, 0], rtol=1e-6)
        assert (out[:, :, 1] == 0).all()
        np.testing.assert_allclose(lse[:, 1], 300.0, rtol=1e-6)

    def test_window_0_0_is_the_rows_own_key(self):
        q, k, v = self.dense(200, 200)
        out, _ = self.answer(q, k, v, window_size=(0, 0))
        np.testing.assert_array_equal(out, v)


class BatchInvariance(ForwardKernel):
    def test_a_dense_sequence_has_the_same_bits_alone_and_in_a_batch(self):
        q, k, v = self.dense(150, 213, batch=3, heads=4)
        out, lse = self.answer(q, k, v, causal=True, **self.BATCHED)
        for index in range(3):
            alone, alone_lse = self.answer(*(x[index : index + 1] for x in (q, k, v)), causal=True)
            np.testing.assert_array_equal(alone[0], out[index])
            np.testing.assert_array_equal(alone_lse[0], lse[index])

    def test_a_packed_sequence_has_the_same_bits_alone_and_in_a_batch(self):
        ends_q, ends_k = np.array([0, 3, 170, 211], np.int32), np.array([0, 90, 95, 308], np.int32)
        q, k, v = self.packed(211, 308)
        out, lse = self.answer(q, k, v, causal=True, cu_seqlens_q=ends_q, cu_seqlens_k=ends_k, **self.BATCHED)
        for index in range(3):
            rows, keys = slice(*ends_q[index : index + 2]), slice(*ends_k[index : index + 2])
            ends = {
                "cu_seqlens_q": np.array([0, rows.stop - rows.start], np.int32),
                "cu_seqlens_k": np.array([0, keys.stop - keys.start], np.int32),
            }
            alone, alone_lse = self.answer(q[rows], k[keys], v[keys], causal=True, **ends)
            np.testing.assert_array_equal(alone, out[rows])
            np.testing.assert_array_equal(alone_lse, lse[:, rows])
