"""The bell that an actor sleeps by."""

from __future__ import annotations

import gc
import os
import threading

import pytest

from gpu_actors.actors.bell import Bell


def test_a_ring_before_the_wait_is_not_lost() -> None:
    bell = Bell()
    bell.ring()
    bell.wait()


def test_a_ring_ends_the_wait_of_another_thread() -> None:
    bell, woken = Bell(), threading.Event()

    def sleep() -> None:
        bell.wait()
        woken.set()

    sleeper = threading.Thread(target=sleep)
    sleeper.start()
    assert not woken.wait(0.05)
    bell.ring()
    assert woken.wait(30.0)
    sleeper.join()


def test_its_descriptors_go_with_the_last_reference() -> None:
    bell = Bell()
    descriptors = bell._reader, bell._writer
    del bell
    gc.collect()
    for descriptor in descriptors:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(descriptor)
