"""FlashAttentionConfig: the tiles that FlashAttention-2 would choose. No kernel here reads it; see `tiles`."""

from __future__ import annotations

import numbers
from dataclasses import dataclass
from typing import Any

from gpu_actors.errors import Unsupported
from gpu_actors.fields import expect, integer
from gpu_actors.kernels.occupancy import shared_mem_limit
from gpu_actors.kernels.support import ELEMENTS

__all__ = ["FlashAttentionConfig"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FlashAttentionConfig:
    """Tiles of FlashAttention-2's forward with a pipeline of K and V tiles (Dao, arXiv 2307.08691).

    head_dim: of q, k and v. seq_q, seq_kv: rows. sm: compute capability times ten, 80 for 8.0.
    block_m, block_n: query rows and keys of a tile. num_warps: per block. num_stages: K and V tiles in flight.
    dtype: of q, k and v in shared memory. `auto` makes the usual one; the constructor takes any fields.
    """

    head_dim: int
    seq_q: int
    seq_kv: int
    causal: bool
    sm: int
    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    dtype: str = "float16"

    @classmethod
    def auto(
        cls, head_dim: int, seq_q: int, seq_kv: int, causal: bool, sm: int, *, dtype: str = "float16"
    ) -> FlashAttentionConfig:
        """The usual configuration: 128 x 128 up to dim 64, 128 x 64 up to 128, else 64 x 64.

        8 warps on sm 90 and newer if block_m is 128, else 4; 3 stages on sm 90 and newer, else 2. If
        these exceed the shared memory of a block, there are fewer stages. Raises Unsupported if even one
        stage does not fit (float32 of dim 256 on sm 80, say), and for an unknown dtype or sm. Raises
        InvalidRequest for a size or an sm that is no int.
        """
        for name, size in (("head_dim", head_dim), ("seq_q", seq_q), ("seq_kv", seq_kv)):
            integer(name, size, 0)
        given: object = sm
        sound = isinstance(given, numbers.Integral) and not isinstance(given, bool)
        expect(sound, "sm", sm, "must be an int, ten times the compute capability: 80 for 8.0")
        if dtype not in ELEMENTS:
            raise Unsupported("dtype", dtype, f"tiles are known for {', '.join(ELEMENTS)}", nearest="float32")
        limit = shared_mem_limit(sm)
        problem: dict[str, Any] = {"seq_q": seq_q, "seq_kv": seq_kv, "causal": causal, "sm": sm, "dtype": dtype}
        for dim in range(head_dim, 0, -1):
            block_m, block_n = (128, 128) if dim <= 64 else (128, 64) if dim <= 128 else (64, 64)
            warps = 8 if sm >= 90 and block_m >= 128 else 4
            tile: dict[str, Any] = {"block_m": block_m, "block_n": block_n, "num_warps": warps}
            for stages in range(3 if sm >= 90 else 2, 0, -1):
                config = cls(head_dim=dim, num_stages=stages, **tile, **problem)
                if config.shared_mem_bytes > limit:
                    continue
                if dim == head_dim:
                    return config
                reason = (
                    f"one stage of tiles of {dtype} does not fit into the {limit} bytes of shared memory that a "
                    f"block has on compute capability {sm // 10}.{sm % 10}"
                )
                raise Unsupported("head_dim", head_dim, reason, nearest=dim)
        raise Unsupported("head_dim", head_dim, "a head has at least one element", nearest=1)

    @property
    def shared_mem_bytes(self) -> int:
        """The bytes of the Q tile, of num_stages K and V tiles, and of a float for each query row."""
        rows = self.block_m + 2 * self.num_stages * self.block_n
        return rows * self.head_dim * ELEMENTS[self.dtype].itemsize + 4 * self.block_m

    @property
    def num_q_tiles(self) -> int:
        return -(-self.seq_q // self.block_m)

    @property
    def num_kv_tiles(self) -> int:
        return -(-self.seq_kv // self.block_n)
