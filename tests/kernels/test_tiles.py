"""The tile table, shared-memory limits and FlashAttentionConfig."""

from __future__ import annotations

import dataclasses
import itertools
import re

import pytest
from inside.compiling import asset_text
from inside.package import Layout, MaskKind

from gpu_actors.errors import InvalidRequest, Unsupported
from gpu_actors.kernels.occupancy import shared_mem_limit
from gpu_actors.kernels.support import ELEMENTS
from gpu_actors.kernels.tiles import (
    TILES,
    FlashAttentionConfig,
    Tile,
    arch_class,
    padded_head_dim,
    shared_mem_bytes,
    tile_for,
)

ARCHS = ("sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_120a")
MASKS = ("full", "causal", "window", "causal_window")
LAYOUTS: tuple[Layout, ...] = ("dense", "paged")
KIB = 1024
DIRECTIONS = {row.kernel: row.direction for row in TILES}


@pytest.mark.parametrize("kernel", sorted({row.kernel for row in TILES}))
@pytest.mark.parametrize("arch", ARCHS)
def test_every_tile_fits_the_shared_memory_of_every_architecture(kernel, arch):
    limit = shared_mem_limit(int("".join(filter(str.isdigit, arch))))
    for dtype, dim, mask in itertools.product(ELEMENTS, range(1, 513), MASKS):
        tile = tile_or_none(kernel, arch, dtype, dim, mask)
        if tile is not None:
            used = shared_mem_bytes(kernel, tile, dtype, dim, dim)
            assert used <= limit, (dtype, dim, mask, tile, used)


@pytest.mark.parametrize("dim_v", [8, 64, 128, 136, 192])
def test_tiles_of_narrower_values_fit_too(dim_v):
    for dtype, dim, mask in itertools.product(("float16", "bfloat16"), range(8, 257, 8), MASKS):
        tile = tile_or_none("forward_sm90", "sm_90a", dtype, max(dim, dim_v), mask, dim_v=dim_v)
        assert shared_mem_bytes("forward_sm90", tile, dtype, dim, dim_v) <= shared_mem_limit(90), (dtype, dim, mask)


def test_the_plain_kernel_has_a_tile_for_everything():
    for arch, dtype, dim, mask in itertools.product(ARCHS, ELEMENTS, range(1, 513), MASKS):
        assert tile_or_none("forward_simple", arch, dtype, dim, mask), (arch, dtype, dim, mask)


def test_each_row_of_the_table_is_reached():
    """By a head dim that the row ends at, or by one that leaves more shared memory."""
    dims = {
        row.kernel: sorted({64, 128, 192} | {each.head_dim for each in TILES if each.kernel == row.kernel})
        for row in TILES
    }
    flags = (True, False)
    queries = (
        query
        for kernel in dims
        for query in itertools.product([kernel], ARCHS, ELEMENTS, dims[kernel], MASKS, flags, LAYOUTS, flags, flags)
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


def test_doubles_of_long_rows_get_smaller_tiles():
    assert tile_for("forward_simple", "forward", "sm_86", "float64", 128, "full") == Tile(32, 32, 1, 4)
    assert tile_for("forward_simple", "forward", "sm_86", "float64", 129, "full") == Tile(16, 16, 1, 4)
    assert tile_for("forward_simple", "forward", "sm_86", "float32", 256, "full") == Tile(32, 32, 1, 4)


def test_a_problem_outside_the_table_is_refused():
    with pytest.raises(Unsupported) as refused:
        tile_for("forward_simple", "forward", "sm_80", "float16", 513, "full")
    assert (refused.value.field, refused.value.nearest) == ("head_dim", 512)
    with pytest.raises(Unsupported, match="backward"):
        tile_for("forward_simple", "backward", "sm_80", "float16", 64, "full")


@pytest.mark.parametrize(
    ("arch", "expected"),
    [
        ("sm_80", "sm_80"),
        ("sm_86", "sm_80"),
        ("sm_89", "sm_80"),
        ("sm_90a", "sm_90"),
        ("sm_100a", "sm_100"),
        ("sm_103a", "sm_100"),
        ("sm_120a", "sm_120"),
        ("sm_121a", "sm_120"),
    ],
)
def test_architectures_fall_into_generations(arch, expected):
    assert arch_class(arch) == expected


def test_an_arch_that_is_none_is_refused():
    with pytest.raises(InvalidRequest):
        arch_class("hopper")


@pytest.mark.parametrize(
    ("sm", "kib"),
    [(75, 64), (80, 163), (86, 99), (87, 163), (89, 99), (90, 227), (100, 227), (103, 227), (120, 99), (121, 99)],
)
def test_shared_memory_limits_are_the_documented_ones(sm, kib):
    assert shared_mem_limit(sm) == kib * KIB


def test_an_sm_older_than_the_limits_known_is_refused():
    with pytest.raises(Unsupported) as refused:
        shared_mem_limit(70)
    assert refused.value.nearest == 75


class TestFlashAttentionConfig:
    @pytest.mark.parametrize(
        ("head_dim", "blocks"),
        [(1, (128, 128)), (64, (128, 128)), (65, (128, 64)), (128, (128, 64)), (129, (64, 64)), (256, (64, 64))],
    )
    @pytest.mark.parametrize("sm", [80, 90, 100])
    def test_auto_picks_tiles_by_head_dim_and_warps_and_stages_by_architecture(self, head_dim, blocks, sm):
        config = FlashAttentionConfig.auto(head_dim, 1000, 2000, True, sm)
        assert (config.block_m, config.block_n) == blocks
        assert config.num_warps == (8 if sm >= 90 and blocks[0] >= 128 else 4)
        assert config.num_stages == (3 if sm >= 90 else 2)
        assert (config.head_dim, config.seq_q, config.seq_kv, config.causal, config.sm) == (
            head_dim,
            1000,
            2000,
            True,
            sm,
        )

    def test_tile_counts_follow_from_the_blocks(self):
        config = FlashAttentionConfig.auto(64, 512, 1025, False, 80)
        assert (config.num_q_tiles, config.num_kv_tiles) == (4, 9)
        sizes = (0, 1, 128, 129)
        counts = [dataclasses.replace(config, seq_q=size, seq_kv=size, block_n=64) for size in sizes]
        assert [(each.num_q_tiles, each.num_kv_tiles) for each in counts] == [(0, 0), (1, 1), (1, 2), (2, 3)]

    def test_shared_memory_holds_q_the_stages_of_k_and_v_and_a_float_a_row(self):
        config = FlashAttentionConfig.auto(128, 1, 1, False, 90)
        assert config.shared_mem_bytes == (128 + 2 * 3 * 64) * 128 * 2 + 128 * 4
        doubles = dataclasses.replace(config, dtype="float64")
        assert doubles.shared_mem_bytes == (128 + 2 * 3 * 64) * 128 * 8 + 128 * 4

    def test_stages_are_given_up_where_shared_memory_does_not_hold_them(self):
        # float32 of dim 128 would take 262,656 bytes with three stages; a Hopper block has 232,448.
        assert FlashAttentionConfig.auto(128, 1, 1, False, 90, dtype="float32").num_stages == 2
        assert FlashAttentionConfig.auto(128, 1, 1, False, 80, dtype="float32").num_stages == 1
        assert FlashAttentionConfig.auto(256, 1, 1, False, 86).num_stages == 1

    def test_tiles_that_fit_with_no_stage_are_refused_with_the_nearest_head_dim(self):
        with pytest.raises(Unsupported, match="shared memory") as refused:
            FlashAttentionConfig.auto(256, 1, 1, False, 80, dtype="float32")
        nearest = refused.value.nearest
        assert refused.value.field == "head_dim"
        assert FlashAttentionConfig.auto(nearest, 1, 1, False, 80, dtype="float32").head_dim == nearest
        with pytest.raises(Unsupported):
            FlashAttentionConfig.auto(nearest + 1, 1, 1, False, 80, dtype="float32")

    @pytest.mark.parametrize("sm", [75, 80, 86, 89, 90, 100, 120])
    @pytest.mark.parametrize("dtype", ELEMENTS)
    def test_what_auto_returns_always_fits(self, sm, dtype):
        for head_dim in (1, 63, 64, 65, 96, 127, 128, 129, 192, 255, 256, 512):
            try:
                config = FlashAttentionConfig.auto(head_dim, 1, 1, False, sm, dtype=dtype)
            except Unsupported:
                continue
            assert config.shared_mem_bytes <= shared_mem_limit(sm)

    def test_an_unknown_dtype_and_an_empty_head_are_refused(self):
        with pytest.raises(Unsupported, match="int8"):
            FlashAttentionConfig.auto(64, 1, 1, False, 80, dtype="int8")
        with pytest.raises(Unsupported, match="at least one"):
            FlashAttentionConfig.auto(0, 1, 1, False, 80)

    def test_a_tile_is_frozen(self):
        with pytest.raises(dataclasses.FrozenInstanceError):
            FlashAttentionConfig.auto(64, 1, 1, False, 80).block_m = 1


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn"])
def test_host_and_hopper_kernel_pad_head_dims_alike(dtype):
    """padded_dim of hopper/boxes.cuh: ``dim <= bound && !FP8 ? padded : .. : last``."""
    rule = re.search(r"padded_dim\(int dim\) \{\s*return (.*?);", asset_text("hopper/boxes.cuh"), re.S)
    assert rule is not None
    cases = re.findall(r"dim <= (\d+)( && !FP8)? \? (\d+)", rule[1])
    assert len(cases) == rule[1].count("?") == 4
    last = int(rule[1].rpartition(":")[2])
    for dim in range(1, last + 1):
        taken = (int(pad) for bound, no_fp8, pad in cases if dim <= int(bound) and not (no_fp8 and dtype != "bfloat16"))
        assert padded_head_dim(dim, dtype) == next(taken, last)
