"""The tile table, shared-memory limits and FlashAttentionConfig."""

from __future__ import annotations

import dataclasses
import itertools
import re

import pytest
from inside.attention import Layout, MaskKind
from inside.compiling import asset_text

from gpu_actors.errors import InvalidRequest, Unsupported
from gpu_actors.kernels.flash_attention_config import FlashAttentionConfig
from gpu_actors.kernels.occupancy import shared_mem_limit
from gpu_actors.kernels.support import ELEMENTS, capability
from gpu_actors.kernels.tiles import (
    TILES,
    Tile,
    padded_head_dim,
    shared_mem_bytes,
    tile_for,
)

ARCHS = ("sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_120a")
MASKS = ("full", "causal", "window", "causal_window")
LAYOUTS: tuple[Layout, ...] = ("dense", "paged")
DIRECTIONS = {row.kernel: row.direction for row in TILES}
# Head dims at which rows of the table begin and end; between them memory only grows.
DIMS = sorted({1, 512} | {row.head_dim + more for row in TILES for more in (0, 1) if row.head_dim < 512})


@pytest.mark.parametrize("kernel", sorted(DIRECTIONS))
def test_every_tile_fits_the_shared_memory_of_every_architecture(kernel):
    for arch, dtype, dim, mask in itertools.product(ARCHS, ELEMENTS, DIMS, MASKS):
        tile = tile_or_none(kernel, arch, dtype, dim, mask)
        assert tile or kernel != "forward_simple", "the plain kernel has a tile for everything"
        if tile is not None:
            used = shared_mem_bytes(kernel, tile, dtype, dim, dim)
            assert used <= shared_mem_limit(capability(arch)), (arch, dtype, dim, mask, tile, used)


def test_tiles_of_narrower_values_fit_too():
    dims_v = (8, 64, 128, 136, 192)
    for dim_v, dtype, dim, mask in itertools.product(dims_v, ("float16", "bfloat16"), range(8, 257, 8), MASKS):
        tile = tile_or_none("forward_sm90", "sm_90a", dtype, max(dim, dim_v), mask, dim_v=dim_v)
        assert shared_mem_bytes("forward_sm90", tile, dtype, dim, dim_v) <= shared_mem_limit(90), (dtype, dim, mask)


def test_each_row_of_the_table_is_reached():
    """A head dim at which the row ends reaches it, or one that leaves more shared memory."""
    dims = {kernel: {64, 128, 192} | {row.head_dim for row in TILES if row.kernel == kernel} for kernel in DIRECTIONS}
    archs, dtypes, flags = (
        ("sm_80", "sm_86", "sm_90a"),
        ("float16", "float32", "float64", "float8_e4m3fn"),
        (True, False),
    )
    queries = (
        query
        for kernel in dims
        for query in itertools.product([kernel], archs, dtypes, dims[kernel], MASKS, flags, LAYOUTS, flags, flags)
    )
    tiles = {id(tile_or_none(*query)) for query in queries}
    tiles.add(id(tile_or_none("forward_sm90", "sm_90a", "bfloat16", 192, "full", dim_v=128)))
    assert [row for row in TILES if id(row.tile) not in tiles] == []


def tile_or_none(
    kernel: str,
    arch: str,
    dtype: str,
    dim: int,
    mask: MaskKind,
    scale_only: bool = True,
    layout: Layout = "dense",
    plain: bool = True,
    bare: bool = True,
    dim_v: int | None = None,
) -> Tile | None:
    try:
        return tile_for(kernel, DIRECTIONS[kernel], arch, dtype, dim, mask, scale_only, layout, plain, bare, dim_v)
    except Unsupported:
        return None


def test_a_problem_outside_the_table_is_refused():
    with pytest.raises(Unsupported) as refused:
        tile_for("forward_simple", "forward", "sm_80", "float16", 513, "full")
    assert (refused.value.field, refused.value.nearest) == ("head_dim", 512)
    with pytest.raises(Unsupported, match="backward"):
        tile_for("forward_simple", "backward", "sm_80", "float16", 64, "full")


def test_tiles_of_hopper_kernels_are_for_hopper_alone():
    for arch in ("sm_80", "sm_89", "sm_100a", "sm_103a", "sm_120a", "sm_121a"):
        for kernel in ("forward_sm90", "backward_sm90"):
            assert tile_or_none(kernel, arch, "bfloat16", 64, "full") is None
            assert tile_or_none(kernel, "sm_90a", "bfloat16", 64, "full") is not None
    with pytest.raises(InvalidRequest):
        tile_or_none("forward_mma", "hopper", "bfloat16", 64, "full")


def test_shared_memory_limits_are_the_documented_ones():
    for kib, sms in {64: (75,), 99: (86, 89, 120, 121), 163: (80, 87), 227: (90, 100, 103)}.items():
        assert {shared_mem_limit(sm) for sm in sms} == {kib * 1024}
    with pytest.raises(Unsupported) as refused:
        shared_mem_limit(70)
    assert refused.value.nearest == 75


def config_of(head_dim: int = 64, sm: int = 80, **given: str) -> FlashAttentionConfig:
    return FlashAttentionConfig.auto(head_dim, 512, 1025, True, sm, **given)


class TestFlashAttentionConfig:
    def test_auto_picks_tiles_by_head_dim_and_warps_and_stages_by_architecture(self):
        blocks_of = {1: (128, 128), 64: (128, 128), 65: (128, 64), 128: (128, 64), 129: (64, 64), 256: (64, 64)}
        for (head_dim, blocks), sm in itertools.product(blocks_of.items(), (80, 90, 100)):
            config = config_of(head_dim, sm)
            assert (config.block_m, config.block_n) == blocks
            assert config.num_warps == (8 if sm >= 90 and blocks[0] >= 128 else 4)
            assert config.num_stages == (3 if sm >= 90 else 2)
            given = (config.head_dim, config.seq_q, config.seq_kv, config.causal, config.sm)
            assert given == (head_dim, 512, 1025, True, sm)

    def test_tile_counts_follow_from_the_blocks(self):
        config = config_of()
        assert (config.num_q_tiles, config.num_kv_tiles) == (4, 9)
        sizes = (0, 1, 128, 129)
        counts = [dataclasses.replace(config, seq_q=size, seq_kv=size, block_n=64) for size in sizes]
        assert [(each.num_q_tiles, each.num_kv_tiles) for each in counts] == [(0, 0), (1, 1), (1, 2), (2, 3)]

    def test_shared_memory_holds_q_the_stages_of_k_and_v_and_a_float_a_row(self):
        config = config_of(128, 90)
        assert config.shared_mem_bytes == (128 + 2 * 3 * 64) * 128 * 2 + 128 * 4
        doubles = dataclasses.replace(config, dtype="float64")
        assert doubles.shared_mem_bytes == (128 + 2 * 3 * 64) * 128 * 8 + 128 * 4

    def test_stages_are_given_up_where_shared_memory_does_not_hold_them(self):
        # float32 of dim 128 would take 262,656 bytes with three stages; a Hopper block has 232,448.
        assert config_of(128, 90, dtype="float32").num_stages == 2
        assert config_of(128, 80, dtype="float32").num_stages == 1
        assert config_of(256, 86).num_stages == 1

    def test_tiles_that_fit_with_no_stage_are_refused_with_the_nearest_head_dim(self):
        with pytest.raises(Unsupported, match="shared memory") as refused:
            config_of(256, dtype="float32")
        nearest = refused.value.nearest
        assert refused.value.field == "head_dim"
        config = config_of(nearest, dtype="float32")
        assert config.head_dim == nearest
        assert config.shared_mem_bytes <= shared_mem_limit(80)
        with pytest.raises(Unsupported):
            config_of(nearest + 1, dtype="float32")

    def test_an_unknown_dtype_and_an_empty_head_are_refused(self):
        with pytest.raises(Unsupported, match="int8"):
            config_of(dtype="int8")
        with pytest.raises(Unsupported, match="at least one"):
            config_of(0)

    @pytest.mark.parametrize(("name", "value"), [("sm", "sm_80"), ("sm", True), ("head_dim", "64"), ("seq_q", -1)])
    def test_what_is_no_size_is_refused_by_its_name(self, name, value):
        sizes = {"head_dim": 64, "seq_q": 512, "seq_kv": 1025, "causal": True, "sm": 80}
        with pytest.raises(InvalidRequest) as refused:
            FlashAttentionConfig.auto(**sizes | {name: value})
        assert (refused.value.field, refused.value.value) == (name, value)


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn"])
def test_host_and_hopper_kernel_pad_head_dims_alike(dtype):
    """padded_dim of forward_sm90/boxes.cuh: ``dim <= bound && !FP8 ? padded : .. : last``."""
    rule = re.search(r"padded_dim\(int dim\) \{\s*return (.*?);", asset_text("forward_sm90/boxes.cuh"), re.S)
    assert rule is not None
    cases = re.findall(r"dim <= (\d+)( && !FP8)? \? (\d+)", rule[1])
    assert len(cases) == rule[1].count("?") == 4
    last = int(rule[1].rpartition(":")[2])
    for dim in range(1, last + 1):
        taken = (int(pad) for bound, no_fp8, pad in cases if dim <= int(bound) and not (no_fp8 and dtype != "bfloat16"))
        assert padded_head_dim(dim, dtype) == next(taken, last)
