"""The emulation reports each seeded bug by its kind, or gives a wrong number in some order."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kernel_runs import emulated_module

from gpu_actors.devices.emulation import EmulatedBuffer, EmulatedModule, EmulationFault
from gpu_actors.errors import LaunchError

GEOMETRY = {  # entry: threads, bytes of shared memory, floats of in, floats of out
    "accesses": (64, 512, 64, 64),
    "deep": (32, 0, 64, 32),
    "spins": (32, 0, 32, 32),
    "exchanges": (128, 512, 128, 128),
    "passes": (64, 0, 64, 65),
    "lanes": (32, 1048, 32, 32),
    "copies": (32, 256, 256, 32),
    "loads": (64, 288, 192, 32),
    "stores": (64, 512, 64, 64),
    "proxies": (64, 1040, 64, 320),
    "products": (128, 4352, 1, 4096),
    "late_blocks": (64, 1024, 64, 640),
    "rows": (32, 512, 32, 32),
    "smashed": (32, 0, 32, 32),
}
ORDERS = [
    (d, s, seed)
    for d in ("late", "eager", "random")
    for s in ("round_robin", "greedy", "random", "lane")
    for seed in (0, 1, 2)
]


@pytest.fixture(scope="module")
def module(module_cache: Path) -> EmulatedModule:
    return emulated_module("seeded_bugs.cu", {}, module_cache)


def launch(
    module: EmulatedModule, entry: str, bug: int, order: tuple[Any, Any, int] = ("late", "greedy", 0), **how: Any
) -> np.ndarray:
    threads, shared, n_in, n_out = GEOMETRY[entry]
    values = EmulatedBuffer.of(np.arange(n_in, dtype=np.float32), "in")
    out = EmulatedBuffer(4 * n_out, "out")
    delivery, schedule, seed = order
    params = [struct.pack("<Q", values.address), struct.pack("<Q", out.address), struct.pack("<i", bug)]
    grid = how.pop("grid", 1)
    module.launch(
        entry, grid, threads, shared, params, [values, out], delivery=delivery, schedule=schedule, seed=seed, **how
    )
    return out.view(np.float32).copy()


@pytest.mark.parametrize("entry", [e for e in GEOMETRY if e != "late_blocks"])
def test_the_kernels_without_a_bug_give_one_answer_in_every_order(module: EmulatedModule, entry: str) -> None:
    first = launch(module, entry, 0)
    assert np.isfinite(first).all()
    for order in ORDERS:
        np.testing.assert_array_equal(launch(module, entry, 0, order), first, err_msg=str(order))


REPORTED = [  # entry, bug, kind, what the text says, buffer
    ("accesses", 1, "out_of_bounds", "at byte 256 of buffer 'out' (256 bytes)", "out"),
    ("accesses", 2, "out_of_bounds", "at byte -16388 of buffer 'in'", "in"),
    ("accesses", 3, "out_of_bounds", "at byte 4194304 of buffer 'out'", "out"),
    ("accesses", 4, "out_of_bounds", "wrote to buffer 'out' before its first byte", "out"),
    ("accesses", 5, "out_of_bounds", "past the last byte of the 512 bytes of dynamic shared memory", None),
    ("accesses", 6, "out_of_bounds", "byte 65536 of 512 bytes of dynamic shared memory", None),
    ("accesses", 7, "out_of_bounds", "st.shared: 4 bytes at shared address 0x600", None),
    ("accesses", 8, "misaligned", "st.shared: shared address 0x402 is not 4-byte aligned", None),
    ("accesses", 9, "misaligned", "cp.async: 16 bytes at byte 248 of buffer 'in'", "in"),
    ("accesses", 10, "misaligned", "cp.async: 16 bytes at byte 4 of buffer 'in'", "in"),
    ("accesses", 15, "misaligned", "plain access: 16 bytes at byte 20 of buffer 'out'", "out"),
    ("accesses", 16, "misaligned", "plain access: shared address 0x424 is not 8-byte aligned", None),
    ("accesses", 11, "out_of_bounds", "address 0x10, near no buffer", None),
    ("accesses", 12, "trap", "__trap()", None),
    ("accesses", 13, "trap", "division by zero", None),
    ("accesses", 14, "argument", "not into shared memory", None),
    ("deep", 1, "stack_overflow", "262144 bytes", None),
    ("exchanges", 4, "deadlock", "32 threads from thread 0 on: barrier 0 (32 of 128 threads arrived); 96", None),
    ("exchanges", 5, "deadlock", "32 threads from thread 32 on: barrier 3 (32 of 64 threads arrived)", None),
    ("exchanges", 6, "divergence", "the warp diverged: this lane is at", None),
    ("exchanges", 7, "divergence", "which is not in mask", None),
    ("exchanges", 8, "barrier", "threads, earlier arrivals expected", None),
    ("exchanges", 9, "leftover", "32 arrivals pending at barrier 5", None),
    ("exchanges", 10, "barrier", "barriers 0 to 15", None),
    ("exchanges", 11, "barrier", "100 threads is no multiple of 32", None),
    ("exchanges", 12, "deadlock", "Exited: 4", None),
    ("exchanges", 13, "divergence", "this lane is at bar.arrive while other lanes of mask 0xffffffff wait at", None),
    ("passes", 1, "race", "ld.acquire reads 1, which was stored in this launch by no release", None),
    ("lanes", 1, "race", "ldmatrix.x4 at shared address 0x400, which lane 0 of the warp wrote", None),
    ("lanes", 2, "race", "ld.shared at shared address 0x620, which all lanes of the warp wrote", None),
    ("lanes", 3, "race", "ld.shared at shared address 0x7f0, which lane 31 of the warp wrote", None),
    ("lanes", 4, "race", "ld.shared at shared address 0x650, which lane 5 of the warp wrote", None),
    ("lanes", 5, "race", "stmatrix.x4 at shared address 0x610, which lane 30 of the warp read", None),
    ("lanes", 6, "race", "bulk load over shared address 0x400, which thread 31 reads", None),
    ("lanes", 7, "race", "st.shared at shared address 0x680, which all lanes of the warp wrote", None),
    ("lanes", 8, "race", "which lane 20 of the warp read: no __syncwarp or barrier orders the two", None),
    ("lanes", 9, "race", "which lane 16 of the warp wrote: no __syncwarp or barrier orders the two", None),
    ("copies", 3, "leftover", "cp.async that it has not waited for, to shared address 0x4c0", None),
    ("copies", 5, "leftover", "cp.async that it has not waited for", None),
    ("loads", 1, "mbarrier", "holds no live mbarrier", None),
    ("loads", 2, "deadlock", "1 of 2 arrivals pending", None),
    ("loads", 3, "mbarrier", "holds an mbarrier already", None),
    ("loads", 4, "unfenced", "mbarrier.init is not followed", None),
    ("loads", 6, "deadlock", "mbarrier.try_wait parity 0 of 0x510 (phase 0, 1 of 1 arrivals pending, 0 bytes", None),
    ("loads", 8, "deadlock", "-64 bytes pending", None),
    ("loads", 9, "mbarrier", "more arrivals than the 1 of its phase", None),
    ("loads", 10, "deadlock", "0 of 1 arrivals pending, 128 bytes pending", None),
    ("loads", 11, "leftover", "1 loads on their way", None),
    ("loads", 14, "mbarrier", "overwritten", None),
    ("stores", 1, "unfenced", "bulk store reads shared address 0x400", None),
    ("stores", 2, "unfenced", "bulk store reads shared address", None),
    ("stores", 4, "misaligned", "264 bytes is no positive multiple of 16", None),
    ("stores", 5, "out_of_bounds", "bulk store: 512 bytes at byte 0 of buffer 'out' (256 bytes)", "out"),
    ("stores", 6, "leftover", "not committed", None),
    ("stores", 7, "race", "changed while a bulk or tensor store was reading it", None),
    ("stores", 8, "leftover", "may still read shared address 0x400", None),
    ("proxies", 1, "unfenced", "thread 0 stored without fence.proxy.async: 16 bytes at byte 0 of buffer", "out"),
    ("proxies", 2, "unfenced", "bulk load of what thread 1 stored without fence.proxy.async: 16 bytes", "out"),
    ("proxies", 4, "unfenced", "bulk reduction of what thread 0 stored without fence.proxy.async: 4 bytes", "out"),
    ("products", 1, "unfenced", "wgmma", None),
    ("products", 2, "divergence", "different operands", None),
    ("products", 3, "race", "without wgmma_fence", None),
    ("products", 4, "descriptor", "bits set", None),
    ("products", 5, "divergence", "lanes 0 and 9", None),
    ("products", 6, "leftover", "wgmma of warp 0 not waited for", None),
    ("products", 7, "race", "accumulator register 3 of lane 0 was written while in flight", None),
    ("products", 8, "race", "A registers of lane 0 changed", None),
    ("products", 9, "race", "operand in shared memory changed while in flight", None),
    ("products", 16, "divergence", "warps 0 and 2 of a warpgroup have 255 and 64 registers a thread", None),
    ("products", 11, "leftover", "wgmma of warp 0 not waited for", None),
    ("products", 12, "race", "without wgmma_fence", None),
    ("products", 13, "race", "accumulator registers were written after the last wgmma.fence", None),
    ("products", 17, "race", "accumulator registers were written after the last wgmma.fence", None),
    ("products", 18, "race", "A operand registers were written after the last wgmma.fence", None),
    ("products", 14, "leftover", "wgmma of warp 0 not waited for", None),
    ("products", 15, "divergence", "warps 0 and 3 of a warpgroup issued 3 and 0 wgmma", None),
]

# The start of the kernel's line that the fault names, the wrapper's file, and the line of the earlier instruction.
LINES: dict[tuple[str, int], tuple[str, ...]] = {
    ("accesses", 1): ("if (bug == 1) out[64]",),
    ("accesses", 2): ("if (bug == 2) mine[t]",),
    ("accesses", 6): ("if (bug == 6) mine[1 << 14]",),
    ("accesses", 7): ("if (bug == 7) ptx::store_shared(base + 512", "ptx/memory.cuh"),
    ("accesses", 8): ("if (bug == 8) ptx::store_shared(base + 2", "ptx/memory.cuh"),
    ("accesses", 9): ("if (bug == 9) ptx::cp_async<16>", "ptx/copy_async.cuh"),
    ("accesses", 12): ("if (bug == 12) __trap()",),
    ("accesses", 13): ("if (bug == 13) mine[t]",),
    ("accesses", 14): ("if (bug == 14) ptx::shared_address", "ptx/memory.cuh"),
    ("exchanges", 5): ("if (bug == 5 && warp == 1) ptx::barrier_sync", "ptx/barrier.cuh"),
    ("exchanges", 7): ("if (bug == 7) sum = __shfl_sync",),
    ("copies", 3): ("if (i < 8) ptx::cp_async<4>", "ptx/copy_async.cuh"),
    ("copies", 5): ("if (bug == 5) ptx::cp_async<4>", "ptx/copy_async.cuh"),
    ("loads", 1): ("if (bug != 12) ptx::mbarrier_wait(full", "ptx/mbarrier.cuh"),
    ("loads", 4): ("ptx::bulk_load(base + 128 * s, in", "ptx/bulk.cuh"),
    ("loads", 11): ("ptx::bulk_load(base, in, 128", "ptx/bulk.cuh"),
    ("stores", 1): ("ptx::bulk_store(out, base", "ptx/bulk.cuh"),
    ("stores", 6): ("ptx::bulk_store(out, base", "ptx/bulk.cuh"),
    ("stores", 7): ("if (bug != 8) ptx::bulk_wait_read", "ptx/bulk.cuh", "ptx::bulk_store(out, base"),
    ("products", 1): ("ptx::wgmma_rs<64, Element::f16>(d, registers", "ptx/wgmma.cuh"),
    ("products", 4): ("ptx::wgmma_ss<64, Element::f16>(d, bug == 4", "ptx/wgmma.cuh"),
    ("products", 7): ("ptx::wgmma_wait<0>();", "ptx/wgmma.cuh", "ptx::wgmma_ss<64, Element::f16>(d, bug == 4"),
    ("products", 8): ("ptx::wgmma_wait<0>();", "ptx/wgmma.cuh", "ptx::wgmma_rs<64, Element::f16>(d, registers"),
    ("products", 14): ("ptx::wgmma_ss<64, Element::f16>(d, a, b, true)", "ptx/wgmma.cuh"),
}
TEXT = (Path(__file__).parent / "kernels" / "seeded_bugs.cu").read_text().splitlines()


def line_of(text: str) -> str:
    (number,) = (i for i, line in enumerate(TEXT, 1) if line.strip().startswith(text))
    return f"seeded_bugs.cu:{number}"


@pytest.mark.parametrize(("entry", "bug", "kind", "text", "buffer"), REPORTED)
def test_the_bug_is_reported_by_its_kind_and_line(
    module: EmulatedModule, entry: str, bug: int, kind: str, text: str, buffer: str | None
) -> None:
    with pytest.raises(EmulationFault) as caught:
        launch(module, entry, bug)
    fault = caught.value
    assert (fault.kind, fault.buffer, fault.entry) == (kind, buffer, entry), fault
    assert text in fault.text
    assert isinstance(fault, LaunchError)
    line, wrapper, issued = (*LINES.get((entry, bug), ()), "", "", "")[:3]
    if line:
        assert fault.lines[0] == line_of(line), fault
        assert [at.split(":")[0] for at in fault.lines[1:2]] == ([wrapper] if wrapper else []), fault
        assert f"(warp {fault.thread // 32} lane {fault.thread % 32}) at {fault.lines[0]}" in str(fault)
    if issued:
        assert fault.issued[0] == line_of(issued), fault


@pytest.mark.parametrize("thread", [3, 17])
def test_a_fault_that_another_thread_finds_names_the_thread_that_caused_it(module: EmulatedModule, thread: int) -> None:
    with pytest.raises(EmulationFault) as caught:
        launch(module, "rows", thread)
    assert caught.value.thread == thread, caught.value
    assert caught.value.lines[0] == line_of("ptx::ldmatrix_x4(r"), caught.value
    assert caught.value.lines[1].startswith("ptx/matrix.cuh:"), caught.value


def test_a_stack_that_the_kernel_has_overwritten_is_no_harm(module: EmulatedModule) -> None:
    with pytest.raises(EmulationFault) as caught:
        launch(module, "smashed", 1)
    assert "at byte 4194304 of buffer 'out'" in caught.value.text
    assert caught.value.lines[0] == line_of("out[count > 4")
    launch(module, "smashed", 0)


@pytest.mark.parametrize("way", [2, 3])
def test_a_flag_may_be_passed_on_by_an_atomic_or_behind_a_fence(module: EmulatedModule, way: int) -> None:
    for order in ORDERS:
        np.testing.assert_array_equal(launch(module, "passes", way, order), launch(module, "passes", 0))


WRONG = {  # bugs of an entry that show as wrong numbers (or as a fault) in some orders only
    "exchanges": (1, 2, 3),
    "copies": (1, 2, 4),
    "loads": (5, 7, 12, 13),
    "stores": (3, 9),
    "proxies": (3,),
    "products": (10,),
}


@pytest.mark.parametrize(("entry", "bug"), [(entry, bug) for entry, bugs in WRONG.items() for bug in bugs])
def test_the_bug_shows_in_some_order(module: EmulatedModule, entry: str, bug: int) -> None:
    right = launch(module, entry, 0)

    def is_wrong(order: tuple[Any, Any, int]) -> bool:
        try:
            return not np.array_equal(launch(module, entry, bug, order), right)
        except EmulationFault:
            return True

    assert any(map(is_wrong, ORDERS))


def test_a_missing_syncwarp_shows_when_lanes_drift(module: EmulatedModule) -> None:
    assert not np.array_equal(launch(module, "exchanges", 3, ("late", "lane", 2)), launch(module, "exchanges", 0))


def test_a_missing_wait_reads_nan(module: EmulatedModule) -> None:
    assert np.isnan(launch(module, "copies", 2)).all()


@pytest.mark.parametrize("bug", [1, 2])
def test_a_loop_without_an_end_stops_at_the_time_limit(module: EmulatedModule, bug: int) -> None:
    with pytest.raises(EmulationFault) as caught:
        launch(module, "spins", bug, limit_seconds=0.2)
    assert caught.value.kind == "time_limit"
    assert np.array_equal(launch(module, "spins", 0), np.arange(32))  # the next launch is right


def test_a_grid_that_is_too_long_is_never_taken_for_done(module: EmulatedModule) -> None:
    with pytest.raises(EmulationFault) as caught:
        launch(module, "spins", 0, limit_seconds=0.05, grid=1_000_000)
    assert caught.value.kind == "time_limit"


@pytest.mark.parametrize("seed", range(5))
def test_of_the_failing_blocks_the_first_to_start_is_reported(module: EmulatedModule, seed: int) -> None:
    found = set()
    for threads in (1, 2, 4) * 2:
        with pytest.raises(EmulationFault) as caught:
            launch(module, "late_blocks", 1, ("random", "random", seed), threads=threads, grid=10)
        number, thread = caught.value.block[0], caught.value.thread
        assert thread == number
        assert f"block ({number}, 0, 0) thread {thread} (warp 0 lane {thread})" in str(caught.value)
        found.add(number)
    assert len(found) == 1
    assert found <= {0: {5}, 1: {9}}.get(seed, {5, 6, 7, 8, 9})
