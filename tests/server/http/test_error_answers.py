"""Every error of the package has its status, and an answer shows only what the client may know."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

import gpu_actors as ga
from gpu_actors import errors
from gpu_actors.serving import BodyTooLarge, BodyTooSlow, TooManyBodies, problem

STATUS = {
    "ActorFailed": 500, "ActorStopped": 503, "AsyncioNeeded": 500, "CacheFull": 503, "CompileError": 500,
    "ContextLost": 503, "DeadlineExceeded": 504, "GpuActorsError": 500, "InvalidRequest": 400, "LaunchError": 500,
    "MockModeError": 501, "NotCopyable": 500, "OutOfDeviceMemory": 503, "Overloaded": 429, "RequestCancelled": 503,
    "RequestError": 400, "StaleBuffer": 409, "Unqualified": 500, "Unsupported": 400, "WorkerLost": 503,
    "WouldBlock": 500,
}  # fmt: skip


def made(name: str) -> BaseException:
    kind = getattr(errors, name)
    fields: tuple[Any, ...] = ("q", 3, "must be an array") if issubclass(kind, ga.RequestError) else ("what happened",)
    error: BaseException = kind(*fields)
    return error


def refuse(constant: str) -> Any:
    raise AssertionError(f"{constant} is no JSON")


def content(error: BaseException) -> Any:
    return json.loads(problem(error).body(), parse_constant=refuse)


@pytest.mark.parametrize("name", sorted(STATUS))
def test_an_error_has_its_status_its_name_and_its_words(name: str) -> None:
    error = made(name)
    shown = content(error)
    assert (problem(error).status, shown["status"]) == (STATUS[name], STATUS[name])
    assert shown["type"] == f"urn:gpu-actors:error:{name}"
    assert shown["title"].replace(" ", "").lower() == name.lower()
    assert " " in shown["title"] or name in ("Unqualified", "Unsupported", "Overloaded")
    hidden = STATUS[name] == 500 or name == "ActorStopped"
    assert (shown["detail"] == str(error)) is not hidden
    assert problem(error).headers["Content-Type"] == "application/problem+json"


@pytest.mark.parametrize(
    ("error", "status"), [(BodyTooLarge("big"), 413), (BodyTooSlow("slow"), 408), (TooManyBodies("many"), 429)]
)
def test_an_error_of_a_body_has_its_status(error: ga.GpuActorsError, status: int) -> None:
    assert (problem(error).status, problem(error).detail) == (status, str(error))


def test_retry_after_is_told_where_a_retry_may_help_in_whole_seconds_from_1_up() -> None:
    times = {0.0: "1", 0.2: "1", 1.0: "1", 2.1: "3", float("inf"): "1", float("nan"): "1"}
    for seconds, told_to in times.items():
        assert problem(ga.Overloaded("full", seconds)).headers["Retry-After"] == told_to
    assert STATUS.keys() == set(errors.__all__)
    told = {name for name in STATUS if "Retry-After" in problem(made(name)).headers}
    busy = {"CacheFull", "OutOfDeviceMemory", "Overloaded", "RequestCancelled"}
    assert told == busy | {"ContextLost", "WorkerLost", "ActorStopped"}


def test_a_request_at_fault_is_told_field_value_and_what_is_accepted() -> None:
    shown = content(ga.Unsupported("head_dim", 300, "is too wide", 256))
    wanted = {"field": "head_dim", "value": 300, "accepted": "is too wide", "nearest": 256}
    assert {name: shown[name] for name in wanted} == wanted
    assert "nearest" not in content(ga.Unsupported("head_dim", 300, "is too wide"))


def test_a_value_of_any_kind_is_json_and_short() -> None:
    for value, shown in (
        (np.zeros((2, 3), np.float32), "ndarray float32[2, 3]"),
        (float("nan"), "nan"),
        (float("-inf"), "-inf"),
        (1 << 60, str(1 << 60)),
        *((same, same) for same in (True, None, 2.5)),
        ("x" * 1000, "x" * 317 + "..."),
        (b"\xff", "b'\\xff'"),
        (object, "<class 'object'>"),
    ):
        assert content(ga.InvalidRequest("q", value, "must be another"))["value"] == shown


def test_long_words_are_cut() -> None:
    assert len(content(ga.InvalidRequest("q", 1, "x" * 5000))["accepted"]) == 320
    assert len(content(ga.Overloaded("x" * 5000))["detail"]) == 320
    shown = content(ga.InvalidRequest("k" * 100_000, 1, "must be left out"))
    assert len(shown["field"]) < 400
    assert len(json.dumps(shown)) < 2000


def test_what_only_the_log_may_know_is_not_shown() -> None:
    for error in (
        KeyError("a secret"),
        ga.ActorFailed("flash_attn failed while it handled the request: KeyError('a secret')"),
        ga.ActorStopped("the context has failed: flash_attn failed, last with KeyError('a secret')"),
        ga.CompileError("a secret", "a secret", "a secret"),
        ExceptionGroup("a secret", [ga.Overloaded("full"), KeyError("a secret")]),
    ):
        assert problem(error).status >= 500
        assert b"secret" not in problem(error).body()


def test_a_group_of_errors_is_answered_as_its_gravest() -> None:
    inner = ExceptionGroup("tasks", [ga.InvalidRequest("q", 1, "must be 2"), ga.DeadlineExceeded("late")])
    assert content(ExceptionGroup("tasks", [ga.Overloaded("full"), inner]))["type"].endswith(":DeadlineExceeded")


def test_members_of_ones_own_are_added() -> None:
    shown = json.loads(problem(ga.Overloaded("full")).body(instance="/embed#1", request_id="1"))
    assert (shown["instance"], shown["request_id"], shown["title"]) == ("/embed#1", "1", "Overloaded")
