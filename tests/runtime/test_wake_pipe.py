"""WakePipe: an actor sleeps on it until it is woken."""

from __future__ import annotations

import gc
import os
import threading

import pytest

from gpu_actors.runtime.waking import WakePipe


@pytest.fixture(params=["eventfd", "pipe"], autouse=True)
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The mechanism of wake-ups: systems without eventfd use pipes."""
    if request.param == "pipe":
        monkeypatch.delattr(os, "eventfd", raising=False)
    elif not hasattr(os, "eventfd"):
        pytest.skip("this system has no eventfd")
    kind: str = request.param
    return kind


def test_it_takes_one_descriptor_where_there_is_an_eventfd(kind: str) -> None:
    pipe = WakePipe()
    assert (pipe._reader == pipe._writer) is (kind == "eventfd")


def test_wake_ups_before_the_wait_end_one_wait_alone() -> None:
    pipe = WakePipe()
    for _ in range(3):
        pipe.wake()
    pipe.wait()
    os.set_blocking(pipe._reader, False)
    with pytest.raises(BlockingIOError):
        pipe.wait()


def test_a_ring_ends_the_wait_of_another_thread() -> None:
    pipe, woken = WakePipe(), threading.Event()

    def sleep() -> None:
        pipe.wait()
        woken.set()

    sleeper = threading.Thread(target=sleep)
    sleeper.start()
    assert not woken.wait(0.05)
    pipe.wake()
    assert woken.wait(30.0)
    sleeper.join()


def test_its_descriptors_go_with_the_last_reference() -> None:
    pipe = WakePipe()
    descriptors = pipe._reader, pipe._writer
    del pipe
    gc.collect()
    for descriptor in descriptors:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(descriptor)
