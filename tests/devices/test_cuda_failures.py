"""What becomes of requests when CUDA fails, hangs or ends."""

from __future__ import annotations

import gc
import re
import time
from typing import Any

import numpy as np
import pytest
from fakes.bench import IMAGE, KERNELS, Bench, floats, in_thread, losses, on_device
from fakes.cuda import FakeCuda, Order
from inside.compiling import find_toolchain
from support.service import AT_ONCE, eventually

from gpu_actors.devices.cuda.errors import STICKY
from gpu_actors.devices.interface import Launch
from gpu_actors.errors import ActorStopped, ContextLost, LaunchError, OutOfDeviceMemory
from gpu_actors.testing import MockClock


@pytest.fixture
def bench() -> Bench:
    return Bench()


# Memory that runs out


def test_unused_blocks_of_the_pool_are_released_before_memory_is_said_to_be_out(bench: Bench) -> None:
    bench.cuda.idle_bytes = bench.cuda.total
    np.testing.assert_array_equal(bench.run(np.float32([1, 2])), [2, 4])


def test_running_out_of_device_memory_fails_that_launch_alone() -> None:
    bench = Bench(FakeCuda(dict(KERNELS), memory=1 << 20))
    with pytest.raises(OutOfDeviceMemory, match="524288000 bytes"):
        bench.device.memory.empty((1000, 1024, 128), "float32")
    with pytest.raises(OutOfDeviceMemory):
        bench.launch(np.zeros((1 << 20,), np.float32))
    assert "launch_kernel" not in bench.cuda.calls
    np.testing.assert_array_equal(bench.run(np.float32([1, 2])), [2, 4])
    bench.device.close()
    assert bench.cuda.leaks() == {}


def test_running_out_of_page_locked_memory_releases_idle_staging_first(bench: Bench) -> None:
    bench.run(floats(4))
    idle = bench.cuda.leaks()["pinned"]
    bench.cuda.fail("allocate_pinned", 2)
    x = floats(5000)
    np.testing.assert_array_equal(bench.run(x), 2 * x)
    assert bench.cuda.calls.count("free_pinned") == idle
    bench.cuda.fail("allocate_pinned", 2, 2)
    with pytest.raises(OutOfDeviceMemory, match="page-locked"):
        bench.launch(floats(100_000))
    np.testing.assert_array_equal(bench.run(np.float32([1, 2])), [2, 4])
    bench.device.close()
    assert bench.cuda.leaks() == {}


# Errors


CYCLE = (
    "allocate",
    "allocate_pinned",
    "create_event",
    "copy_to_device",
    "launch_kernel",
    "copy_to_host",
    "record_event",
    "synchronize_event",
    "allow_shared_memory",
)


@pytest.mark.parametrize("call", CYCLE)
def test_a_sticky_error_in_any_call_loses_the_context_for_good(call: str) -> None:
    bench = Bench()
    waiting = bench.launch(floats(4))
    bench.cuda.fail(call, 700)
    with pytest.raises(ContextLost, match=call):
        bench.run(floats(50_000), shared_bytes=64 << 10)
    bench.cuda.calls.clear()
    assert waiting.done()
    for use in (
        waiting.wait,
        lambda: bench.stream.launch(Launch(None, {}, {}, lambda inputs: {})),
        lambda: bench.device.load(IMAGE, "scale"),
        lambda: bench.device.open_stream("late"),
        bench.device.probe,
        bench.device.bind_thread,
    ):
        with pytest.raises(ContextLost, match=call):
            use()
    bench.device.close()
    assert bench.cuda.calls == [], "a lost device is not called any more"


@pytest.mark.parametrize("call", ["destroy_event", "destroy_stream"])
def test_a_sticky_error_at_the_end_leaves_the_rest_alone(call: str) -> None:
    bench = Bench()
    bench.run(floats(4))
    bench.cuda.fail(call, 700)
    bench.device.close()
    assert bench.device.lost is not None
    assert bench.cuda.calls[-1] == call


def statuses_of_the_toolkit() -> dict[int, tuple[str, str]]:
    """(name, comment in the header) of each cudaError_t of the installed CUDA toolkit."""
    toolchain = find_toolchain()
    assert toolchain is not None
    text = (toolchain.include_dirs[0] / "driver_types.h").read_text(encoding="utf-8", errors="replace")
    result = re.findall(r"/\*\*((?:(?!\*/).)*)\*/\s*(cudaError\w+)\s*=\s*(\d+)", text, re.S)
    return {int(status): (name, " ".join(said.replace("*", " ").split())) for said, name, status in result}


def test_the_sticky_statuses_are_those_after_which_a_process_must_end() -> None:
    """The header does not say so of a destroyed context (709), broken memory or links (214, 220), or 999, unknown."""
    stated = statuses_of_the_toolkit()
    must_end = {status for status, (_, said) in stated.items() if "process must be terminated and relaunched" in said}
    assert must_end >= {700, 719}
    assert set(STICKY) == must_end | {709} | {214, 220} | {999}
    assert {status: stated[status][0] for status in STICKY} == STICKY


def test_memory_of_a_lost_device_is_never_handed_back_to_it(bench: Bench) -> None:
    array = bench.device.memory.empty((4,), "float32")
    bench.cuda.fail("allocate", 700)
    with pytest.raises(ContextLost):
        bench.launch(floats(4))
    before = bench.cuda.leaks()
    del array
    gc.collect()
    assert bench.cuda.leaks() == before


@pytest.mark.parametrize("status", STICKY)
def test_each_sticky_status_loses_the_context(status: int) -> None:
    bench = Bench()
    event = bench.launch(floats(4))
    bench.cuda.fail_kernel(status)
    with pytest.raises(ContextLost):
        event.wait()
    assert bench.device.lost is not None


@pytest.mark.parametrize(("order", "seed"), [("late", 0), *(("random", seed) for seed in range(6))])
def test_whichever_call_meets_a_kernels_error_first_the_context_is_lost_for_good(order: Order, seed: int) -> None:
    """tests/gpu runs the same scenario on a real device."""
    bench = Bench(FakeCuda(dict(KERNELS), order, seed))
    bench.cuda.fail_kernel(700)
    x = floats(4)
    lost = losses(lambda: bench.launch(x), lambda: bench.launch(x), bench.device.probe)
    assert set(lost) == {"stray", "behind", "launch", "probe"}
    assert all("IllegalAddress" in words for words in lost.values())
    bench.device.close()


@pytest.mark.parametrize("call", ["copy_to_device", "launch_kernel", "copy_to_host", "record_event", "wait_event"])
def test_another_error_fails_that_launch_alone(call: str) -> None:
    bench = Bench()
    stream = bench.cuda.new_stream()
    bench.cuda.fail(call, 701)
    launch = bench.of(floats(4))
    launch.inputs = {"x": launch.inputs["x"], "y": on_device(bench, floats(1), stream)}
    with pytest.raises(LaunchError, match=call):
        bench.stream.launch(launch)
    np.testing.assert_array_equal(bench.run(np.float32([1, 2])), [2, 4])
    assert bench.device.lost is None


@pytest.mark.parametrize("order", ["late", "random"])
def test_a_kernel_whose_failure_is_its_launchs_own_fails_no_other(order: Order) -> None:
    bench = Bench(FakeCuda(dict(KERNELS), order, seed=2))
    x, finding, out = floats(4), LaunchError("a finding"), np.zeros(4, np.float32)
    bench.cuda.fail_kernel(0, finding, 0, finding, 0)
    events = [bench.launch(x), bench.launch(x, into=out), bench.launch(x)]
    bench.launch(x, into=out)  # its failure is seen though nothing refers to its event
    events.append(bench.launch(x))
    for failed, event in zip((False, True, False, False), events, strict=True):
        for _ in range(2):
            if failed:
                with pytest.raises(LaunchError) as caught:
                    event.wait()
                assert event.done()
                assert event.failure() is caught.value is finding
                assert event.outputs == {}
            else:
                event.wait()
                np.testing.assert_array_equal(event.outputs["out"], 2 * x)
    assert not out.any(), "a failed launch writes nothing"
    bench.device.probe()
    bench.device.close()
    assert bench.cuda.leaks() == {}


def test_an_aborted_launch_keeps_its_staging_until_its_copy_has_happened(bench: Bench) -> None:
    seen: list[np.ndarray[Any, Any]] = []
    x, y = floats(16), floats(16)
    bench.cuda.fail("launch_kernel", 701)
    copied = bench.cuda.memory.at

    with pytest.raises(LaunchError):
        bench.launch(x)
    gc.collect()
    event = bench.launch(y)
    first = next(block for block in bench.cuda.memory.blocks if block.live)
    assert bench.cuda.step(bench.handle())
    seen.append(copied(first.address, x.nbytes).view(np.float32).copy())
    np.testing.assert_array_equal(seen[0], x)
    event.wait()
    np.testing.assert_array_equal(event.outputs["out"], 2 * y)
    bench.device.close()
    assert bench.cuda.leaks() == {}


# Streams that hang, and the end


def test_a_hung_stream_holds_up_no_other(bench: Bench) -> None:
    other = bench.device.open_stream("other")
    bench.cuda.hang(bench.handle())
    hung = bench.launch(floats(4))
    x = floats(4)
    event = bench.launch(x, other)
    event.wait()
    np.testing.assert_array_equal(event.outputs["out"], 2 * x)
    bench.device.probe()
    assert not hung.done()


def test_closing_returns_at_once_over_a_hung_launch_and_frees_nothing_it_uses(bench: Bench) -> None:
    handle = bench.handle()
    bench.cuda.hang(handle)
    waited, unwaited = bench.launch(floats(4)), bench.launch(floats(4))
    thread, ended = in_thread(waited.wait)
    eventually(lambda bench=bench: bench.cuda.calls[-1] == "synchronize_event")
    before = bench.cuda.leaks()
    bench.cuda.calls.clear()
    start = time.monotonic()
    bench.device.close()
    assert time.monotonic() - start < AT_ONCE
    assert unwaited.done()
    with pytest.raises(ActorStopped):
        unwaited.wait()
    assert bench.cuda.leaks() == before
    assert not {"trim", "free_pinned", "destroy_stream", "close", "unload_module"} & set(bench.cuda.calls)
    # If the GPU goes on after all, the wait inside the driver ends in order.
    bench.cuda.resume(handle)
    thread.join(10)
    assert ended == [None]


def test_a_device_closed_in_order_has_given_everything_back(bench: Bench) -> None:
    bench.device.probe()
    event = bench.launch(floats(4))
    bench.device.open_stream("idle")
    event.wait()
    bench.device.close()
    bench.device.close()
    assert bench.cuda.leaks() == {}
    assert bench.cuda.calls.count("close") == 1


def test_a_finished_launch_can_still_be_waited_for_after_the_device_is_closed(bench: Bench) -> None:
    x = floats(4)
    event = bench.launch(x)
    bench.cuda.run_all()
    bench.device.close()
    assert bench.cuda.leaks() == {}
    event.wait()
    np.testing.assert_array_equal(event.outputs["out"], 2 * x)


def test_nothing_starts_after_the_end(bench: Bench) -> None:
    launch = bench.of(floats(4))
    bench.stream.close()
    with pytest.raises(ActorStopped, match="test"):
        bench.stream.launch(launch)
    bench.device.close()
    for use in (lambda: bench.stream.launch(launch), bench.device.probe, lambda: bench.device.open_stream("late")):
        with pytest.raises(ActorStopped):
            use()


def test_a_closed_streams_unfinished_launch_is_stopped_and_released_later() -> None:
    bench = Bench(FakeCuda(dict(KERNELS), order="manual"))
    finished, unfinished = bench.launch(floats(4)), bench.launch(floats(4))
    while not finished.done():
        assert bench.cuda.step()
    bench.stream.close()
    finished.wait()
    assert unfinished.done()
    with pytest.raises(ActorStopped, match="before the launch had finished"):
        unfinished.wait()
    bench.cuda.run_all()
    bench.device.close()
    assert bench.cuda.leaks() == {}


def test_closing_while_someone_waits_leaves_both_with_what_they_asked_for() -> None:
    for _ in range(5):
        bench = Bench(FakeCuda(dict(KERNELS), order="manual"))
        x = floats(4)
        event = bench.launch(x)
        thread, ended = in_thread(event.wait)
        eventually(lambda bench=bench: bench.cuda.calls[-1] == "synchronize_event")
        stepper, _ = in_thread(bench.cuda.run_all)
        bench.device.close()
        stepper.join(10)
        thread.join(10)
        assert ended == [None]
        np.testing.assert_array_equal(event.outputs["out"], 2 * x)


# Probing


def test_a_probe_does_work_on_the_device() -> None:
    bench = Bench(FakeCuda(order="random"))
    for _ in range(260):
        bench.device.probe()
        bench.cuda.calls.clear()
    bench.device.probe()
    assert bench.cuda.calls[:4] == ["create_event", "fill", "copy_to_host", "record_event"]


def test_a_probe_without_progress_loses_the_context_after_the_hang_timeout(bench: Bench) -> None:
    clock = MockClock()
    bench = Bench(hang_timeout=8.0, clock=clock)
    bench.device.probe()
    bench.cuda.hang(max(bench.cuda.open_streams))
    passing, _ = in_thread(lambda: eventually(lambda: clock.advance(1.0) or bench.device.lost))
    with pytest.raises(ContextLost, match="no progress in 8 s"):
        bench.device.probe()
    passing.join(30)
    with pytest.raises(ContextLost):
        bench.launch(floats(4))
    bench.device.close()


def test_a_process_that_stood_still_while_it_probed_does_not_lose_the_context(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock is read long after the device answered that it still works on the probe."""
    clock = MockClock()
    bench = Bench(hang_timeout=8.0, clock=clock)
    event_done = bench.cuda.event_done
    asked: list[int] = []

    def stand_still(event: int) -> bool:
        asked.append(event)
        if len(asked) > 1:
            while not event_done(event):
                bench.cuda.step()
            return True
        clock.advance(100.0)
        return False

    monkeypatch.setattr(bench.cuda, "event_done", stand_still)
    bench.device.probe()
    assert len(asked) > 1
    assert bench.device.lost is None


def test_a_probe_that_reads_back_something_else_loses_the_context(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.device.probe()
    monkeypatch.setattr(bench.cuda, "fill", lambda *args: None)
    with pytest.raises(ContextLost, match="does not hold"):
        bench.device.probe()
