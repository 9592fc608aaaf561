"""Batches as engines make them, over scattered pages, and their attention by torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch


def interleaved(blocks: int) -> list[int]:
    """The numbers of all blocks but 0: the odd ones upwards, then the even ones downwards."""
    return [*range(1, blocks, 2), *range((blocks - 1) // 2 * 2, 1, -2)]


@dataclass
class Batch:
    """New rows of sequences. rows: of each. past: what each had before. q, k, v: (total, heads, dim) of the new rows.

    keys, values: of each sequence, (length, heads_kv, dim), with the new ones.
    """

    rows: list[int]
    past: list[int]
    q: Any
    k: Any
    v: Any
    keys: list[Any]
    values: list[Any]

    @classmethod
    def successive(
        cls, rows: Sequence[Sequence[int]], heads: int, kv_heads: int, dim: int, dtype: Any, seed: int = 0
    ) -> list[Batch]:
        """Batches of the same sequences, one after the other."""
        generator = torch.Generator().manual_seed(seed)
        lengths = [sum(counts) for counts in zip(*rows, strict=True)]
        drawn = [torch.randn(2, length, kv_heads, dim, generator=generator).to(dtype) for length in lengths]
        past = [0] * len(lengths)
        made = []
        for counts in rows:
            ends = [begin + count for begin, count in zip(past, counts, strict=True)]
            q = torch.randn(sum(counts), heads, dim, generator=generator).to(dtype)
            new = torch.cat([x[:, begin:end] for x, begin, end in zip(drawn, past, ends, strict=True)], dim=1)
            seen = [x[:, :end] for x, end in zip(drawn, ends, strict=True)]
            made.append(cls(list(counts), past, q, new[0], new[1], [x[0] for x in seen], [x[1] for x in seen]))
            past = ends
        return made

    @property
    def seq_lens(self) -> Any:
        return torch.tensor([len(keys) for keys in self.keys], dtype=torch.int32)

    @property
    def cu_seqlens_q(self) -> Any:
        ends = torch.tensor(self.rows).cumsum(0)
        return torch.nn.functional.pad(ends, (1, 0)).to(torch.int32)

    def block_table(self, blocks: Sequence[int], page_size: int) -> Any:
        """Each sequence's blocks, from an equal share of ``blocks``; entries past its end are -1."""
        share = len(blocks) // len(self.rows)
        table = torch.tensor(blocks[: share * len(self.rows)], dtype=torch.int32).reshape(-1, share)
        used = (self.seq_lens + page_size - 1) // page_size
        assert int(used.max()) <= share
        return table.masked_fill(torch.arange(share) >= used[:, None], -1)

    def slots(self, table: Any, page_size: int) -> list[int]:
        """Where each new row goes: block * page_size + row of the block."""
        return [
            int(table[seq, place // page_size]) * page_size + place % page_size
            for seq, (begin, count) in enumerate(zip(self.past, self.rows, strict=True))
            for place in range(begin, begin + count)
        ]


def expected(
    batch: Batch,
    scale: float,
    *,
    reach: int | None = None,
    softcap: float = 0.0,
    slopes: Sequence[float] | None = None,
    sinks: Sequence[float] | None = None,
) -> Any:
    """The formula in float64: (total, heads, dim). reach: how many keys before its own a row sees."""
    parts = []
    for q, keys, values in zip(batch.q.double().split(batch.rows), batch.keys, batch.values, strict=True):
        ratio = q.shape[1] // keys.shape[1]
        k, v = (x.double().repeat_interleave(ratio, 1) for x in (keys, values))
        scores = torch.einsum("qhd,khd->hqk", q, k) * scale
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        behind = torch.arange(len(k) - len(q), len(k))[:, None] - torch.arange(len(k))
        if slopes is not None:
            scores = scores - torch.tensor(slopes, dtype=torch.float64)[:, None, None] * behind
        hidden = (behind < 0) if reach is None else (behind < 0) | (behind > reach)
        scores = scores.masked_fill(hidden, -torch.inf)
        if sinks is None:
            weights = scores.softmax(-1)
        else:
            column = torch.tensor(sinks, dtype=torch.float64)[:, None, None].expand(-1, len(q), 1)
            weights = torch.cat([scores, column], -1).softmax(-1)[..., :-1]
        parts.append(torch.einsum("hqk,khd->qhd", weights, v))
    return torch.cat(parts)
