"""The conformance suites of remote and isolated contexts, over a Ray channel."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from fakes.fault_injector import FailingActor, FaultInjector
from support.adopting import adopt

import gpu_actors as ga
from gpu_actors.remote import RemoteContext, Workplace

pytest.importorskip("ray")

from gpu_actors.interop.ray import RayActor, start_worker

FIXTURES = {"remote", "workplace", "isolated"}
OF_A_CHILD_PROCESS = ["test_a_cancelled_forward_is_answered_at_once_and_an_append_has_a_true_answer"]  # opens its own


adopt("test_remote_conformance", FIXTURES, globals())
adopt("test_isolation_conformance", FIXTURES, globals(), OF_A_CHILD_PROCESS)


@pytest.fixture
def workplace(cluster: Any) -> Workplace:
    return RayActor({})


@pytest.fixture(scope="module")
def remote(cluster: Any) -> Iterator[RemoteContext]:
    with start_worker("mock", num_cpus=0, name="here") as ctx:
        yield ctx


@pytest.fixture(scope="module")
def isolated(cluster: Any) -> Iterator[ga.GpuContext]:
    with start_worker("mock", ga.ContextOptions(actors=(FaultInjector, FailingActor)), num_cpus=0) as ctx:
        yield ctx


@pytest.fixture(scope="module")
def direct() -> Iterator[ga.GpuContext]:
    with ga.open_context("mock", ga.ContextOptions(actors=(FaultInjector, FailingActor))) as ctx:
        yield ctx


def test_both_suites_are_run() -> None:
    adopted = {name for name in globals() if name.startswith("test_")}
    assert {"test_an_out_is_the_callers_own_array", "test_equal_errors", "test_draining_waits_for_functions"} <= adopted
    assert len(adopted) >= 19
