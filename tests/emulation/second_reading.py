"""Runs of tests/emulation/kernels/second_reading.cu, and what the second reading of the ISA expects of them."""

from __future__ import annotations

import re
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import numpy.typing as npt
from isa import formats, fragments, matrices, mbarrier, tma, wgmma
from kernel_runs import KernelRun, Order, Place, TensorMapArgument, emulated_module, launch_emulated, pointer, pointers

from gpu_actors.devices.emulation import EmulatedModule, EmulationFault, Toolchain

FILE = "second_reading.cu"
ORDER: Order = ("late", "greedy", 0)
START = 1024
"""Where an image begins in the memory that the second reading sees: a boundary of every swizzle."""


class Kind(NamedTuple):
    """One wgmma. A macro lists those that are compiled into the module."""

    element: str
    trans_a: bool
    trans_b: bool
    n: int


KINDS = (
    *(Kind("f16", False, False, n) for n in range(8, 257, 8)),
    *(Kind("bf16", a, b, n) for n in (40, 192) for a in (False, True) for b in (False, True)),
    *(Kind("f16", False, True, n) for n in (64, 96, 128)),
    *(Kind(element, False, False, n) for element, ns in (("e4m3", (8, 64, 192)), ("e5m2", (64, 72, 256))) for n in ns),
)
"""Every size, element and transposition."""

MIXED = Kind("e4m3", False, False, 72)
"""With a B of e5m2, and A in registers: `products_mixed`."""


def macros_of(kinds: Sequence[Kind]) -> dict[str, str]:
    """The macro that compiles these kinds into the module."""
    calls = (
        f"CASE({i}, {k.element}, {str(k.trans_a).lower()}, {str(k.trans_b).lower()}, {k.n})"
        for i, k in enumerate(kinds)
    )
    return {"WGMMA_CASES": " ".join(calls)}


MACROS = macros_of(KINDS)


def module_of(cache: Path, toolchain: Toolchain | None = None) -> EmulatedModule:
    """The module of all kinds."""
    return emulated_module(FILE, MACROS, cache, toolchain)


class Products(NamedTuple):
    """Products of one kind on one image of shared memory.

    image: uint8 (bytes,). pairs: descriptors of A and B, whose addresses count from the image's start. a: uint32
    (products, 128, 4) or None, where A comes from shared memory. before: float32 (products, 128, n / 2).
    """

    kind: Kind
    image: npt.NDArray[np.uint8]
    pairs: Sequence[tuple[wgmma.Descriptor, wgmma.Descriptor]]
    a: npt.NDArray[np.uint32] | None
    before: npt.NDArray[np.float32]
    accumulate: bool = True

    def run(self, kinds: Sequence[Kind] = KINDS, macros: Mapping[str, str] = MACROS) -> KernelRun:
        """The launch that computes them."""
        arrays: dict[str, npt.NDArray[np.generic]] = {
            "image": self.image,
            "descriptors": np.array([[x.encoded() for x in pair] for pair in self.pairs], dtype=np.uint64),
            "a": np.zeros(1, np.uint32) if self.a is None else self.a,
            "d": self.before,
        }

        number = 0 if self.kind is MIXED else kinds.index(self.kind)

        def params(place: Place) -> list[bytes]:
            head = pointer(place, "image") + struct.pack(
                "<I3i", len(self.image), number, len(self.pairs), self.accumulate
            )
            return [head + b"".join(pointer(place, name) for name in ("descriptors", "a", "d"))]

        entry = "products_shared" if self.a is None else "products_registers"
        entry = "products_mixed" if self.kind is MIXED else entry
        return KernelRun(FILE, entry, arrays, params, block=128, shared_bytes=len(self.image), macros=macros)

    def case(self, kinds: Sequence[Kind] = KINDS, macros: Mapping[str, str] = MACROS) -> Case:
        """The launch, and the registers that it leaves by the second reading."""
        return Case(self.run(kinds, macros), {"d": self.expected()})

    def expected(self, truncated: bool = True) -> npt.NDArray[np.float32]:
        """float32 (products, 128, n / 2) by the second reading."""
        memory = np.concatenate([np.zeros(START, np.uint8), self.image])
        major: tuple[wgmma.Major, wgmma.Major] = ("k", "mn")
        results = []
        for i, (a, b) in enumerate(self.pairs):
            moved_a, moved_b = (x.moved(START) for x in (a, b))
            results.append(
                wgmma.multiplied(
                    memory,
                    moved_a if self.a is None else self.a[i],
                    moved_b,
                    self.before[i] if self.accumulate else None,
                    self.kind.n,
                    self.kind.element,
                    major[self.kind.trans_a],
                    major[self.kind.trans_b],
                    truncated=truncated and formats.FORMATS[self.kind.element].bits == 8,
                )
            )
        return np.array(results)


def image_of_values(rng: np.random.Generator, element: str, nbytes: int) -> npt.NDArray[np.uint8]:
    """Bytes that are small integers of the type, whose sums of products are exact in float32."""
    values = rng.integers(-4, 5, nbytes // formats.FORMATS[element].size)
    return encoded(values.astype(np.float64), element).view(np.uint8)


def encoded(values: npt.NDArray[np.float64], element: str) -> npt.NDArray[np.unsignedinteger]:
    """Bits of values that the type holds exactly, found by decoding every pattern of its bits."""
    form = formats.FORMATS[element]
    if element == "tf32":
        return values.astype(np.float32).view(np.uint32)
    word: type[np.unsignedinteger] = np.uint8 if form.bits == 8 else np.uint16
    patterns = np.arange(1 << form.bits, dtype=word)
    known = formats.decoded(patterns, element)
    finite = np.isfinite(known)
    order = np.argsort(known[finite], kind="stable")
    sorted_values, sorted_patterns = known[finite][order], patterns[finite][order]
    at = np.searchsorted(sorted_values, values)
    found = sorted_patterns[np.minimum(at, len(sorted_patterns) - 1)]
    if not (formats.decoded(found, element) == values).all():
        raise ValueError(f"a value is no {element}")
    return found


def registers_of(rng: np.random.Generator, element: str, count: int) -> npt.NDArray[np.uint32]:
    """A in registers: uint32 (count, 128, 4), small integers of the type."""
    form = formats.FORMATS[element]
    values = rng.integers(-4, 5, (count, 64, form.k)).astype(np.float64)
    bits = encoded(values, element)
    return np.array([fragments.packed(fragments.wgmma_a(form.bits).taken(one)) for one in bits])


class Case(NamedTuple):
    """A launch, and the arrays that it leaves by the second reading."""

    run: KernelRun
    expected: Mapping[str, npt.NDArray[np.generic]]


COPIES_FILE = "conformance/copies.cu"
TENSORS_FILE = "conformance/tensors.cu"
ROWS_BYTES = 2048
"""The shared memory in which ldmatrix and stmatrix are tested."""

FORMS = tuple((count, transposed) for count in (1, 2, 4) for transposed in (False, True))
"""What load_rows writes, and what store_rows calls forms 0 to 5."""

SWIZZLES = {0: "none", 32: "32B", 64: "64B", 128: "128B"}
DTYPES = {1: "uint8", 2: "float16", 4: "float32"}
"""The dtype of elements of a size, where any dtype will do."""


def mma_case(element: str, seed: int) -> Case:
    """One mma of small integers, as raw registers."""
    rng = np.random.default_rng(seed)
    form = formats.FORMATS[element]
    a, b = (rng.integers(-4, 5, shape).astype(np.float64) for shape in ((16, form.k), (form.k, 8)))
    c = rng.integers(-50, 51, (16, 8)).astype(np.float32)
    bits = [encoded(x, element) for x in (a, b)]
    if element == "tf32":  # its low 13 bits are ignored
        bits = [x | rng.integers(0, 1 << 13, x.shape, dtype=np.uint32) for x in bits]
    arrays = {
        "a": fragments.packed(fragments.mma_a(form.k, form.bits).taken(bits[0])),
        "b": fragments.packed(fragments.mma_b(form.k, form.bits).taken(bits[1])),
        "c": fragments.mma_c().taken(c),
        "d": np.zeros((32, 4), np.float32),
    }
    run = KernelRun(COPIES_FILE, f"mma_{element}", arrays, pointers("a", "b", "c", "d"))
    return Case(run, {"d": fragments.mma_c().taken((a @ b + c).astype(np.float32))})


def bytes_of(seed: int, count: int) -> npt.NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, count, dtype=np.uint8)


def load_case(seed: int, rows: Sequence[int]) -> Case:
    """Every form of ldmatrix on rows at any multiples of 16 below `ROWS_BYTES`."""
    memory = bytes_of(seed, ROWS_BYTES)
    arrays = {"in": memory, "rows": np.array(rows, np.uint32), "out": np.zeros((6, 4, 32), np.uint32)}
    expected = np.zeros((6, 4, 32), np.uint32)
    for number, (count, transposed) in enumerate(FORMS):
        expected[number, :count] = matrices.loaded(memory, rows, count, transposed).T
    run = KernelRun(
        FILE,
        "load_rows",
        arrays,
        lambda place: [*pointers(*arrays)(place), struct.pack("<I", ROWS_BYTES)],
        shared_bytes=ROWS_BYTES,
        macros=MACROS,
    )
    return Case(run, {"out": expected})


def store_case(seed: int, rows: Sequence[int], number: int) -> Case:
    """One form of stmatrix on rows that do not overlap, because the ISA does not say which lane would win."""
    count, transposed = FORMS[number]
    memory = bytes_of(seed, ROWS_BYTES)
    words = np.random.default_rng(seed + 1).integers(0, 1 << 32, (4, 32), dtype=np.uint32)
    arrays = {"memory": memory, "rows": np.array(rows, np.uint32), "words": words}
    run = KernelRun(
        FILE,
        "store_rows",
        arrays,
        lambda place: [*pointers(*arrays)(place), struct.pack("<I", ROWS_BYTES), struct.pack("<i", number)],
        shared_bytes=ROWS_BYTES,
        macros=MACROS,
    )
    return Case(run, {"memory": matrices.stored(memory, rows, words[:count].T, transposed)})


def _values_in(rng: np.random.Generator, made: tma.TensorMap, dtype: np.dtype[Any]) -> npt.NDArray[np.uint8]:
    """Integers of the tensor's type, also in the gaps: none of them is NaN."""
    last = sum((extent - 1) * stride for extent, stride in zip(made.dims[1:], made.strides, strict=True))
    nbytes = -(-(last + made.dims[0] * made.size) // 16) * 16
    return rng.integers(1, 100, nbytes // made.size).astype(dtype).view(np.uint8)


def _words_of(made: tma.TensorMap, dtype: str | None) -> np.dtype[Any]:
    name = dtype or DTYPES[made.size]
    return np.dtype(getattr(ml_dtypes, name, name))


def box_run(
    made: tma.TensorMap, load: tuple[int, ...], store: tuple[int, ...], add: bool, seed: int, dtype: str | None = None
) -> KernelRun:
    """A box passes through shared memory: it is loaded from one tensor, and stored or added to another."""
    rng = np.random.default_rng(seed)
    words = _words_of(made, dtype)
    source, target = _values_in(rng, made, words), _values_in(rng, made, words)
    rank = len(made.dims)

    def params(place: Place) -> list[bytes]:
        maps = [
            place.tensor_map(
                TensorMapArgument(name, words.name, made.dims, made.strides, made.box, SWIZZLES[made.mode])
            )
            for name in ("source", "target")
        ]
        numbers = [*load, *[0] * (5 - rank), *store, *[0] * (5 - rank)]
        return [*maps, pointer(place, "image"), struct.pack("<10iIi", *numbers, made.bytes, add)]

    arrays = {"source": source, "target": target, "image": np.zeros(made.bytes, np.uint8)}
    return KernelRun(TENSORS_FILE, f"move_{rank}", arrays, params, block=64, shared_bytes=-(-made.bytes // 8) * 8 + 8)


def box_case(
    made: tma.TensorMap, load: tuple[int, ...], store: tuple[int, ...], add: bool, seed: int, dtype: str | None = None
) -> Case:
    """As `box_run`, with the arrays that it leaves. Raises ValueError if the second reading refuses a place."""
    run = box_run(made, load, store, add, seed, dtype)
    words = _words_of(made, dtype)
    source, target = run.arrays["source"], run.arrays["target"]
    image = made.loaded(source, load, np.zeros(made.bytes, np.uint8), 0)
    after = made.stored(np.zeros_like(target) if add else target, store, image, 0)
    if add:
        after = (target.view(words) + after.view(words)).view(np.uint8)
    return Case(run, {"image": image, "target": after})


def refusal(
    module: EmulatedModule, made: tma.TensorMap, load: tuple[int, ...], store: tuple[int, ...], add: bool
) -> tuple[str, str]:
    """Kind and text of the emulated device's fault at a load, or at a store or sum, "" if there is none.

    Raises AssertionError if only one of the two readings refuses one of them.
    """
    kind = text = ""
    try:
        launch_emulated(module, box_run(made, load, store, add, 0), ORDER)
    except EmulationFault as fault:
        kind, text = fault.kind, fault.text
    try:
        box_case(made, load, store, add, 0)
        refused = False
    except ValueError:
        refused = True
    assert refused == bool(kind), (load, store, kind, text)
    return kind, text


# ---- mbarriers

ARRIVE, EXPECT, ARRIVE_EXPECT, BULK, TENSOR, WAIT, COPIES_NOINC, COPIES = range(8)
"""The operations of barrier_steps. WAIT takes a parity."""

Step = tuple[int, int]
BARRIER_MAP = tma.TensorMap(4, (40,), (), (16,))
_STATE = re.compile(r"\(phase (\d+), (\d+) of (\d+) arrivals pending, (-?\d+) bytes pending\)")


def taken(barrier: mbarrier.Barrier, step: Step) -> None:
    """One step by the second reading. Copies complete at once, and a thread without copies has none to wait for."""
    what, number = step
    if what == ARRIVE:
        barrier.arrive()
    elif what == EXPECT:
        barrier.expect_tx(number)
    elif what == ARRIVE_EXPECT:
        barrier.arrive_expect_tx(number)
    elif what == BULK:
        barrier.complete_tx(number)
    elif what == TENSOR:
        barrier.complete_tx(BARRIER_MAP.bytes)
    else:
        barrier.arrive_after_copies(noinc=what == COPIES_NOINC)


def _fault_of(module: EmulatedModule, expected: int, sequence: Sequence[Step]) -> tuple[str, str]:
    """Runs the steps. Returns kind and text of the fault at the last one, "" if there is none."""
    source = np.ones(40, np.float32)

    def params(place: Place) -> list[bytes]:
        wanted = TensorMapArgument("source", "float32", BARRIER_MAP.dims, BARRIER_MAP.strides, BARRIER_MAP.box)
        tail = struct.pack("<2i", len(sequence), expected)
        return [place.tensor_map(wanted), pointer(place, "steps") + pointer(place, "source") + tail]

    arrays = {"steps": np.array(sequence, np.int32).reshape(-1, 2), "source": source}
    run = KernelRun(FILE, "barrier_steps", arrays, params, block=1, shared_bytes=4104, macros=MACROS)
    try:
        launch_emulated(module, run, ("eager", "greedy", 0))
    except EmulationFault as fault:
        return fault.kind, fault.text
    return "", ""


def play(module: EmulatedModule, expected: int, wanted: Sequence[Step]) -> None:
    """Takes every step, and after each waits for the phase that is over. At the end, waits for the one that is not.

    That last wait is a deadlock, whose report has the emulated mbarrier's state. Raises AssertionError if the state is
    not the second reading's, or if one of the two takes a step that the other refuses.
    """
    barrier = mbarrier.Barrier(expected)
    sequence: list[Step] = []
    for step in wanted:
        try:
            taken(barrier, step)
        except ValueError:
            kind, text = _fault_of(module, expected, [*sequence, step])
            assert kind == "mbarrier", (step, kind, text)
            return
        over = 1 - barrier.phase % 2
        assert barrier.passes(over)
        assert not barrier.passes(1 - over)
        sequence += [step, (WAIT, over)]
    kind, text = _fault_of(module, expected, [*sequence, (WAIT, barrier.phase % 2)])
    state = _STATE.search(text)
    assert kind == "deadlock", (kind, text)
    assert state is not None, text
    assert tuple(map(int, state.groups())) == (barrier.phase, barrier.pending, expected, barrier.transactions)
