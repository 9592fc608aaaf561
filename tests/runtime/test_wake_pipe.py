"""WakePipe: an actor sleeps on it until it is woken."""

from __future__ import annotations

import gc
import os
import threading

import pytest

from gpu_actors.runtime.waking import WakePipe


def test_a_ring_before_the_wait_is_not_lost() -> None:
    pipe = WakePipe()
    pipe.wake()
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
