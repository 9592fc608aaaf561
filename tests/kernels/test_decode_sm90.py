"""Which problems decode_sm90 takes, which decode_mma keeps, and its tiles."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from cases.cached_batches import random_batch
from emulated import decode as emulated_decode
from emulated.decode import DecodeCase, problem_of

from gpu_actors.kernels.decode_sm90 import NAME, part_of, sm90_decode_tile
from gpu_actors.kernels.decode_tiles import decode_tile
from gpu_actors.kernels.dispatch import dispatch_key, explain

ARCH = "sm_90a"
CASE = DecodeCase(
    random_batch(4, (300, 0, 5, 64), rows=8, heads=(4, 2), dim=128, dtype="bfloat16"), options={"causal": True}
)
PROBLEM = problem_of(CASE, CASE.operands())
FP8_ROWS = {**dict.fromkeys(("dtype", "kv_dtype"), "float8_e4m3fn"), "out_dtype": "bfloat16", "compute": "fp8"}


class TestDispatch:
    @pytest.mark.parametrize(
        ("changes", "row_tile"),
        [
            ({}, 64),
            ({"seqlen_q": 32}, 64),
            ({"seqlen_q": 33}, 128),
            ({"page_size": 24, "seqlen_k": 720}, 64),
            ({"layout": "cache", "page_size": 0, "head_dim": 128, "head_dim_v": 40}, 64),
            ({"kv_dtype": "float8_e4m3fn", "descales": True}, 64),
            ({"kv_dtype": "float8_e5m2", "seqlen_q": 40}, 128),
            # New rows of 8 bits, which forward_sm90 refuses over a cache.
            ({**FP8_ROWS, "seqlen_q": 100}, 128),
        ],
    )
    def test_it_takes_sixteen_packed_rows_and_more(self, changes: dict[str, Any], row_tile: int) -> None:
        key = dispatch_key(dataclasses.replace(PROBLEM, **changes), ARCH)
        assert (key.kernel, key.row_tile) == (NAME, row_tile)
        assert sm90_decode_tile(key).tile.block_n == decode_tile(key).tile.block_n, "split and merge count other tiles"

    @pytest.mark.parametrize(
        ("changes", "reason"),
        [
            ({"seqlen_q": 7}, "16 rows times heads"),
            ({"num_splits": 2}, "16 heads a KV head"),
            ({"head_dim": 136}, "in registers"),
            ({"head_dim_v": 256}, "in registers"),
            ({"layout": "pointers", "page_size": 0}, "computes cache, paged"),
            ({"page_size": 1}, "multiple of 8 keys"),
            ({"page_size": 12}, "multiple of 8 keys"),
        ],
    )
    def test_others_stay_with_decode_mma(self, changes: dict[str, Any], reason: str) -> None:
        problem = dataclasses.replace(PROBLEM, **changes)
        assert dispatch_key(problem, ARCH).kernel == "decode_mma"
        verdict = next(verdict for verdict in explain(problem, ARCH) if verdict.family == NAME)
        assert not verdict.taken
        assert reason in verdict.reason

    @pytest.mark.parametrize("arch", ["sm_80", "sm_89", "sm_100a"])
    def test_other_architectures_stay_with_decode_mma(self, arch: str) -> None:
        assert dispatch_key(PROBLEM, arch).kernel == "decode_mma"


@pytest.mark.parametrize(("page_size", "part"), [(0, 64), (8, 8), (24, 8), (16, 16), (64, 64), (96, 32), (256, 64)])
def test_copies_bring_what_pages_and_tiles_share(page_size: int, part: int) -> None:
    assert part_of(page_size, 64) == part


@pytest.mark.parametrize("dims", [(128, 128), (64, 64), (128, 64)])
@pytest.mark.parametrize("row_tile", [64, 128])
@pytest.mark.parametrize(("kv_dtype", "itemsize"), [("bfloat16", 2), ("float8_e4m3fn", 1)])
def test_128_kib_are_on_their_way_while_a_stage_is_multiplied(
    dims: tuple[int, int], row_tile: int, kv_dtype: str, itemsize: int
) -> None:
    given: dict[str, Any] = {"head_dim": dims[0], "head_dim_v": dims[1], "row_tile": row_tile, "kv_dtype": kv_dtype}
    tile, blocks, shared = sm90_decode_tile(dataclasses.replace(emulated_decode.key_of(PROBLEM, ARCH, NAME), **given))
    stage = tile.block_n * sum(dims) * itemsize
    assert blocks == 1
    assert (tile.stages - 1) * stage >= 128 << 10
    assert shared <= 232448
