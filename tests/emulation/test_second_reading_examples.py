"""The second reading of the PTX ISA (`tests/lib/isa`) against the examples and invariants that the ISA prints."""

from __future__ import annotations

import numpy as np
import pytest
from isa import formats, fragments, mbarrier, sums, swizzle, wgmma

K32 = 32


Modes = tuple[tuple[int, ...], tuple[int, ...]]


def crossed(shape: Modes, strides: Modes) -> np.ndarray:
    """Offsets of a CuTe layout ((rows...), (columns...)) : ((strides...), (strides...)), first modes fastest."""

    def walk(extents: tuple[int, ...], steps: tuple[int, ...]) -> np.ndarray:
        whole = np.zeros(1, dtype=np.int64)
        for extent, step in zip(extents, steps, strict=True):
            whole = (np.arange(extent)[:, None] * step + whole[None, :]).reshape(-1)
        return whole

    return walk(shape[0], strides[0])[:, None] + walk(shape[1], strides[1])[None, :]


@pytest.mark.parametrize(
    ("major", "size", "mode", "leading", "stride", "shape", "strides"),
    [
        ("k", 4, 0, 64 * 4, 32 * 4, ((8, 2), (4, 2)), ((4, 32), (1, 64))),
        ("k", 4, 32, 16, 64 * 4, ((8, 2), (4, 2)), ((8, 64), (1, 4))),
        ("mn", 2, 0, 128 * 2, 64 * 2, ((8, 1, 2), (8, 2)), ((1, 8, 64), (8, 128))),
        ("mn", 2, 32, 128 * 2, 256 * 2, ((8, 2, 2), (8, 2)), ((1, 8, 128), (16, 256))),
        ("mn", 2, 64, 256 * 2, 512 * 2, ((8, 4, 2), (8, 2)), ((1, 8, 256), (32, 512))),
    ],
)
def test_a_descriptor_gives_the_exact_layouts_of_the_isas_figures(
    major: wgmma.Major, size: int, mode: int, leading: int, stride: int, shape: Modes, strides: Modes
) -> None:
    """Figures 166 to 170; one instruction takes 32 bytes of K, so the tf32 examples are cut to K = 8."""
    offsets = crossed(shape, strides) * size
    start = 4096
    found = wgmma.Descriptor(start, leading, stride, mode).addresses(major, *offsets.shape, size)
    assert (found == swizzle.swizzled(start + offsets, mode)).all()


def test_encoded_offsets_are_those_of_the_isas_figures() -> None:
    """Figure 166: LBO 64 tf32 encodes as 16, SBO 32 tf32 as 8; figure 170: 32 and 64."""
    bits = wgmma.Descriptor(0, 64 * 4, 32 * 4, 0).encoded()
    assert (bits >> 16 & 0x3FFF, bits >> 32 & 0x3FFF) == (16, 8)
    bits = wgmma.Descriptor(0, 256 * 2, 512 * 2, 64).encoded()
    assert (bits >> 16 & 0x3FFF, bits >> 32 & 0x3FFF, bits >> 62) == (32, 64, 2)


def test_a_descriptor_survives_encoding_and_has_no_other_bits() -> None:
    for mode in (0, 32, 64, 128):
        made = wgmma.Descriptor(0x3FFF0, 0x1230, 0x400, mode, 5)
        assert wgmma.Descriptor.decoded(made.encoded()) == made
    for bit in (14, 15, 30, 31, 46, 48, 52, 61):
        with pytest.raises(ValueError, match="outside its fields"):
            wgmma.Descriptor.decoded(1 << bit)


@pytest.mark.parametrize("mode", [0, 32, 64, 128])
def test_swizzling_is_a_permutation_of_each_period_and_its_own_inverse(mode: int) -> None:
    addresses = np.arange(4 * swizzle.period(mode))
    moved = swizzle.swizzled(addresses, mode)
    assert (np.sort(moved.reshape(4, -1)) == addresses.reshape(4, -1)).all()
    assert (swizzle.swizzled(moved, mode) == addresses).all()


def test_a_base_offset_turns_the_pattern_by_lines() -> None:
    addresses = np.arange(2048)
    for base_offset in range(8):
        shift = 128 * base_offset
        assert (swizzle.swizzled(addresses + shift, 128, base_offset) == swizzle.swizzled(addresses, 128) + shift).all()


LAYOUTS = [
    *(layout(k, bits) for layout in (fragments.mma_a, fragments.mma_b) for k, bits in [(16, 16), (8, 32), (32, 8)]),
    fragments.mma_c(),
    *(fragments.wgmma_a(bits) for bits in (8, 16, 32)),
    *(fragments.wgmma_d(n) for n in (8, 80, 256)),
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: f"{layout.rows}x{layout.columns}")
def test_each_element_of_a_fragment_has_one_owner(layout: fragments.Fragment) -> None:
    matrix = np.arange(layout.rows * layout.columns, dtype=np.uint16).reshape(layout.rows, layout.columns)
    held = layout.taken(matrix)
    assert (np.sort(held, axis=None) == matrix.reshape(-1)).all()
    assert (layout.given(held) == matrix).all()


def test_formats_have_their_extremes() -> None:
    """Largest and smallest values: 448 and 2**-9 for e4m3, 57344 and 2**-16 for e5m2, 65504 and 2**-24 for f16."""
    for name, word, largest, smallest in [
        ("e4m3", np.uint8, (0x7E, 448.0), (0x01, 2.0**-9)),
        ("e5m2", np.uint8, (0x7B, 57344.0), (0x01, 2.0**-16)),
        ("f16", np.uint16, (0x7BFF, 65504.0), (0x0001, 2.0**-24)),
        ("bf16", np.uint16, (0x3F80, 1.0), (0x0080, 2.0**-126)),
        ("tf32", np.uint32, (0x3F801FFF, 1.0), (0x3FC00000, 1.5)),
    ]:
        for bits, value in (largest, smallest):
            assert formats.decoded(np.array([bits], dtype=word), name)[0] == value
    assert np.isnan(formats.decoded(np.array([0x7F, 0xFF], dtype=np.uint8), "e4m3")).all()
    assert formats.decoded(np.array([0xFC], dtype=np.uint8), "e5m2")[0] == -np.inf
    every = np.arange(65536, dtype=np.uint16)
    assert np.array_equal(formats.decoded(every, "f16"), every.view(np.float16).astype(np.float64), equal_nan=True)


def test_a_barrier_ends_a_phase_only_without_arrivals_and_bytes_to_wait_for() -> None:
    barrier = mbarrier.Barrier(2)
    assert barrier.passes(1)
    assert not barrier.passes(0)
    barrier.arrive_expect_tx(96)
    barrier.arrive()
    assert not barrier.passes(0)
    barrier.complete_tx(64)
    assert not barrier.passes(0)
    barrier.complete_tx(32)
    assert barrier.passes(0)
    assert (barrier.phase, barrier.pending, barrier.transactions) == (1, 2, 0)
    barrier.complete_tx(16)
    assert barrier.transactions == -16


def test_a_long_sum_of_8_bit_products_stops_growing_at_13_fraction_bits() -> None:
    form = formats.FORMATS["e4m3"]
    a = np.zeros((1, K32))
    b = np.ones((1, K32))
    a[0, 0] = 1.0
    at = lambda c: float(sums.hopper_fp8(a, b, np.array([[c]], dtype=np.float32), form)[0, 0])  # noqa: E731
    assert at(2.0**13) == 2.0**13 + 1
    assert at(2.0**14) == 2.0**14
    assert at(-(2.0**14)) == -(2.0**14)
    a[0, :] = 2.0**-3
    assert at(2.0**13) == 2.0**13  # each term is cut off alone, so 32 eighths add nothing
