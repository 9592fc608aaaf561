"""Seeded faults: the two readings of the ISA differ, whichever of them is wrong.

Faults of the emulation are in copies of its headers that compare a number. All of them are in one module.
"""

from __future__ import annotations

import dataclasses
import re
import struct
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from isa import formats, fragments, matrices, mbarrier, sums, swizzle, tma, wgmma
from kernel_runs import KernelRun, launch_emulated, read_source
from second_reading import (
    ARRIVE,
    ARRIVE_EXPECT,
    BULK,
    COPIES,
    COPIES_FILE,
    COPIES_NOINC,
    EXPECT,
    FILE,
    ORDER,
    ROWS_BYTES,
    TENSOR,
    TENSORS_FILE,
    Case,
    Kind,
    Products,
    box_case,
    image_of_values,
    load_case,
    macros_of,
    mma_case,
    play,
    refusal,
    registers_of,
    store_case,
)
from support.service import KERNELS_CU

from gpu_actors.devices.emulation import EmulatedModule, EmulationFault, build_module

pytestmark = pytest.mark.timeout(300)  # the first test of a process builds the module of all

KINDS = (
    Kind("f16", False, False, 64),
    Kind("bf16", True, True, 40),
    Kind("f16", False, True, 96),
    Kind("e4m3", False, False, 64),
    Kind("e5m2", False, False, 64),
)
MACROS = macros_of(KINDS)

HEADERS = {  # header: number of the fault, and its place with «what is right¦what is wrong»
    "emulation/shared_memory.cuh": [(1, "address ^ (address >> «7¦8»"), (2, "swizzle == 2 ? «3¦1» :")],
    "emulation/wgmma.cuh": [
        (3, "mn / 8 * «d.stride¦d.leading» + byte / 16"),
        (4, "mn / 8 * «d.stride¦d.leading» + k / 8"),
        (5, "mn / columns * «d.leading¦d.stride» +"),
        (6, "uint32_t(bits >> 16 & «0x3FFF¦0x1F») << 4"),
        (7, "lane / 4 + 8 * («i / 2 % 2¦i % 2»)"),
        (8, "«warp % 4 * 16¦(3 - warp % 4) * 16», 16, a"),
        (9, "d[j] = «accumulate ? d[j] + sum[j] : sum[j]¦d[j] + sum[j]»;"),
    ],
    "emulation/formats.cuh": [
        (10, "rows[«(l / 4 + 8 * (w % 2)) * 8 + l % 4 + 4 * (w / 2)¦(l / 4 + 8 * (w / 2)) * 8 + l % 4 + 4 * (w % 2)»]"),
        (11, "float_of(magnitude) * «0x1p120f¦0x1p121f»"),
    ],
    "emulation/mma.cuh": [(12, "sum[(l / 4 + 8 * («r / 2¦r % 2»)) * 8")],
    "emulation/matrix.cuh": [
        (13, "uint32_t low = «transposed¦!transposed» ?"),
        (14, "generic_store(lane[«8 * i + k¦8 * i + 7 - k»]->row"),
    ],
    "emulation/tma.cuh": [
        (15, "at >= 0 && at < «static_cast<int64_t>(map.extent[d])¦static_cast<int64_t>(map.extent[d]) + 1»"),
        (16, "memset(data, «0¦0x7F», row_bytes)"),
        (22, "= «(bytes + 15) / 16 * 16¦bytes» - int64_t(coordinate)"),
        (23, "coordinate[d] < «0¦-1»"),
        (24, "if (first % «16¦8»)"),
    ],
    "emulation/delivery.cuh": [(17, "-int64_t(«load.bytes¦load.bytes - 16»)")],
    "emulation/mbarrier.cuh": [
        (18, "if («m.pending || m.bytes¦m.pending») return;"),
        (19, "return «(m.phase & 1) != (parity & 1)¦(m.phase & 1) == (parity & 1)»"),
    ],
    "emulation/truncated_sum.cuh": [
        (20, "+= int(a.value[x] * b.value[x * pitch + j] * «to_units[j]¦(to_units[j] + 0.5f * to_units[j])»)"),
        (21, "upper(int(magnitude >> 23), «least¦1»)"),
    ],
}
FAULTS = [(header, fault) for header, faults in HEADERS.items() for fault, _ in faults]
_PLACE = re.compile("«(.*?)¦(.*?)»")


def with_faults(name: str, text: str) -> str:
    """A header with its faults, each of which applies if its number is chosen."""
    if name == "emulation/core.cuh":
        return text.replace("namespace emulation {", "namespace emulation {\n\ninline int seeded_fault;\n", 1)
    for fault, place in HEADERS.get(name, []):
        right = _PLACE.sub(r"\1", place)
        assert text.count(right) == 1, (name, right)
        text = text.replace(right, _PLACE.sub(rf"(seeded_fault == {fault} ? (\2) : (\1))", place))
    return text


@pytest.fixture(scope="module")
def module(module_cache: Path) -> EmulatedModule:
    """The kernels of all checks on the headers with faults, none of which is chosen at first."""
    texts, headers = [], {}
    for file in (FILE, COPIES_FILE, TENSORS_FILE):
        text, found = read_source(file)
        texts.append(text)
        headers |= found
    texts.append('extern "C" __global__ void choose_fault(int fault) { emulation::seeded_fault = fault; }')
    for name in (*HEADERS, "emulation/core.cuh"):
        headers[name] = with_faults(name, (KERNELS_CU / name).read_text())
    return build_module("\n".join(texts), MACROS, headers, None, module_cache, name="seeded_faults.cu")


def choose(module: EmulatedModule, fault: int) -> None:
    run = KernelRun(FILE, "choose_fault", {}, lambda place: [struct.pack("<i", fault)], block=1)
    launch_emulated(module, run, ORDER)


# ---- what is compared: each raises AssertionError or EmulationFault if the readings differ

Check = Callable[[EmulatedModule], None]


def hold(module: EmulatedModule, case: Case) -> None:
    launch_emulated(module, case.run, ORDER).check(**case.expected)


def check_mma(module: EmulatedModule) -> None:
    for element in ("f16", "tf32", "e4m3"):
        hold(module, mma_case(element, 1))


def check_matrices(module: EmulatedModule) -> None:
    rows = 16 * np.random.default_rng(2).permutation(ROWS_BYTES // 16)[:32]
    hold(module, load_case(3, list(rows)))
    for number in range(6):
        hold(module, store_case(4, list(rows), number))


def check_products(module: EmulatedModule) -> None:
    rng = np.random.default_rng(5)
    wide = [wgmma.Descriptor(1024 * (1 + i), 8192 + 16 * i, 1024, mode) for i, mode in enumerate((0, 32, 64, 128))]
    pairs = [*zip(wide, [wide[3], *wide[1:]], strict=True), (wide[3], wgmma.Descriptor(0, 4096, 512, 0))]
    for kind in KINDS:
        image = image_of_values(rng, kind.element, 1 << 16)
        before = rng.integers(-99, 100, (len(pairs), 128, kind.n // 2)).astype(np.float32)
        made = Products(kind, image, pairs, None, before)
        hold(module, made.case(KINDS, MACROS))
        if kind.element == "f16":
            hold(module, made._replace(accumulate=False).case(KINDS, MACROS))
        if not kind.trans_a:
            registers = registers_of(rng, kind.element, len(pairs))
            hold(module, Products(kind, image, pairs, registers, before).case(KINDS, MACROS))


def check_sums(module: EmulatedModule) -> None:
    """A of any finite numbers, and of subnormal ones. Accumulators are large and small."""
    rng = np.random.default_rng(6)
    pairs = [(wgmma.Descriptor(0, 16, 1024, 128), wgmma.Descriptor(8192, 16, 1024, 128))] * 2
    for element, top, subnormal in (("e4m3", 0x7E, 7), ("e5m2", 0x7B, 3)):
        image = (rng.integers(0, top + 1, 1 << 15) | rng.integers(0, 2, 1 << 15) << 7).astype(np.uint8)
        tiny = image.copy()
        tiny[:8192] = rng.integers(0, subnormal + 1, 8192)
        for bits, scale in ((image, 1.0), (tiny, 2.0**-20)):
            before = (scale * rng.standard_normal((2, 128, 32))).astype(np.float32)
            hold(module, Products(Kind(element, False, False, 64), bits, pairs, None, before).case(KINDS, MACROS))


def check_boxes(module: EmulatedModule) -> None:
    for mode, box in ((128, (32, 9)), (64, (16, 12)), (32, (8, 20)), (0, (12, 5))):
        made = tma.TensorMap(4, (40, 13), (176,), box, mode)
        for add in (False, True):
            hold(module, box_case(made, (-4, -1), (20, 6), add, 7))
            hold(module, box_case(made, (12, 9), (32, 11), add, 8))
    made = tma.TensorMap(2, (64, 6, 3, 2), (128, 800, 2400), (64, 4, 2, 1), 128)
    hold(module, box_case(made, (0, 3, -1, 1), (8, 4, 2, 0), False, 9))


def check_ends_of_rows(module: EmulatedModule) -> None:
    """Rows that end within 16 bytes: what is stored and added behind them."""
    made = tma.TensorMap(4, (37, 5), (176,), (16, 3), 0)
    for add in (False, True):
        hold(module, box_case(made, (8, 0), (32, 1), add, 10))
    hold(module, box_case(tma.TensorMap(1, (41, 4), (64,), (32, 3), 32), (16, 0), (32, 2), False, 11))


def check_refusals(module: EmulatedModule) -> None:
    made = tma.TensorMap(4, (40, 6), (176,), (8, 3), 0)
    for place in ((0, -1), (-4, 0), (2, 1), (4, 1), (40, 6)):
        refusal(module, made, place, (0, 0), False)
        for add in (False, True):
            refusal(module, made, (0, 0), place, add)


def check_barriers(module: EmulatedModule) -> None:
    play(module, 2, [(ARRIVE_EXPECT, 112), (BULK, 48), (ARRIVE, 0), (TENSOR, -8), (ARRIVE, 0)])
    play(module, 1, [(BULK, 16), (EXPECT, 32), (COPIES, 0), (ARRIVE, 0), (BULK, 16), (COPIES_NOINC, 0), (EXPECT, 64)])
    play(module, 1, [(EXPECT, 64), (TENSOR, 36), (ARRIVE, 0), (ARRIVE, 0)])


CHECKS = (
    check_mma,
    check_matrices,
    check_products,
    check_sums,
    check_boxes,
    check_ends_of_rows,
    check_refusals,
    check_barriers,
)
SEEN_BY: dict[str, tuple[Check, ...]] = {  # the checks that see the faults of a header
    "shared_memory": (check_boxes, check_products),
    "wgmma": (check_products,),
    "formats": (check_mma, check_sums),
    "mma": (check_mma,),
    "matrix": (check_matrices,),
    "tma": (check_boxes, check_ends_of_rows, check_refusals),
    "delivery": (check_boxes, check_barriers),
    "mbarrier": (check_barriers,),
    "truncated_sum": (check_sums,),
}


def differ(module: EmulatedModule, checks: Sequence[Check]) -> bool:
    try:
        for check in checks:
            check(module)
    except (AssertionError, EmulationFault):
        return True
    return False


def test_without_a_fault_the_readings_agree(module: EmulatedModule) -> None:
    choose(module, 0)
    for check in CHECKS:
        check(module)


@pytest.mark.parametrize(("header", "fault"), FAULTS)
def test_a_fault_of_the_emulation_shows(module: EmulatedModule, header: str, fault: int) -> None:
    choose(module, fault)
    try:
        assert differ(module, SEEN_BY[Path(header).stem])
    finally:
        choose(module, 0)


# ---- faults of the second reading


def _addresses_exchanged(self: wgmma.Descriptor, *arguments: Any) -> Any:
    return _ADDRESSES(dataclasses.replace(self, leading=self.stride, stride=self.leading), *arguments)


_ADDRESSES, _PASSES = wgmma.Descriptor.addresses, mbarrier.Barrier.passes
_LOADED, _DECODED, _PIECES = matrices.loaded, formats.decoded, tma.TensorMap.pieces
_FIRST, *_REST = swizzle.TABLES[128]

SECOND: list[tuple[Check, Any, str, Any]] = [  # the check that sees it, the attribute, and the faulty value
    (check_products, swizzle, "TABLES", {**swizzle.TABLES, 128: (*_REST, _FIRST)}),
    (check_products, wgmma.Descriptor, "addresses", _addresses_exchanged),
    (check_mma, fragments, "_c", lambda lane, i: (lane // 4 + 8 * (i % 2), lane % 4 * 2 + i // 2)),
    (check_mma, formats, "decoded", lambda bits, name: _DECODED(bits, name) * (0.5 if name == "e4m3" else 1)),
    (check_matrices, matrices, "loaded", lambda memory, rows, count, transposed=False: _LOADED(memory, rows, count)),
    (check_boxes, tma.TensorMap, "pieces", lambda self, at: _PIECES(self, tuple(reversed(at)))),
    (check_ends_of_rows, tma.TensorMap, "written", lambda self: self),
    (check_refusals, tma, "UNIT", 8),
    (check_barriers, mbarrier.Barrier, "passes", lambda self, parity: not _PASSES(self, parity)),
    (check_sums, sums, "FRACTION_BITS", 12),
]


@pytest.fixture
def fresh_fragments() -> Iterator[None]:
    """No layout that is made with a fault outlives its test."""

    def clear() -> None:
        for made in (fragments.mma_a, fragments.mma_b, fragments.mma_c, fragments.wgmma_a, fragments.wgmma_d):
            made.cache_clear()

    clear()
    yield
    clear()


@pytest.mark.usefixtures("fresh_fragments")
@pytest.mark.parametrize(("check", "place", "attribute", "wrong"), SECOND)
def test_a_fault_of_the_second_reading_shows(
    module: EmulatedModule, monkeypatch: pytest.MonkeyPatch, check: Check, place: Any, attribute: str, wrong: Any
) -> None:
    choose(module, 0)
    monkeypatch.setattr(place, attribute, wrong)
    assert differ(module, [check])
