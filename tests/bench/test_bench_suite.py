"""The GPU suites on the mock device, with a clock that tests advance."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from inside.devices import Device, FaultyDevice, ForwardingDevice
from support.bench import PLAN, FakeClock, peer, stage

from gpu_actors import ContextOptions, MockOptions
from gpu_actors.bench.cases import Case, backward_cases, decode_cases, forward_cases
from gpu_actors.bench.ceilings import Ceilings
from gpu_actors.bench.peers import PEERS, Peer, Prepared, Refuses
from gpu_actors.bench.recorder import RecordingContext, RecordingDevice
from gpu_actors.bench.report import COLUMNS, figures, table
from gpu_actors.bench.suite import KERNEL, SERVICE, Row, Settings, run_case, run_cases
from gpu_actors.bench.timing import Plan
from gpu_actors.errors import GpuActorsError, OutOfDeviceMemory
from gpu_actors.reference import attention_forward
from gpu_actors.testing import FaultPlan

SMALL = Case(batch=2, rows=80, keys=96, heads=4, kv_heads=2, head_dim=32, causal=True)
SETTINGS = Settings(plan=PLAN, rotate=3 * SMALL.bytes, requests=3, in_flight=2)


def by_subject(rows: list[Row]) -> dict[str, Row]:
    assert len({row.subject for row in rows}) == len(rows)
    return {row.subject: row for row in rows}


@pytest.mark.parametrize(
    "case",
    [
        SMALL,
        Case(batch=1, rows=40, keys=40, heads=2, kv_heads=2, head_dim=64, dtype="float8_e4m3fn"),
        Case(batch=1, rows=200, keys=200, heads=2, kv_heads=1, head_dim=32, causal=True, window=20, dtype="float16"),
        Case(kind="decode", batch=3, rows=1, keys=100, heads=4, kv_heads=2, head_dim=64, page_size=16, causal=True),
        Case(kind="decode", batch=2, rows=5, keys=96, heads=4, kv_heads=2, head_dim=64, page_size=32, causal=True),
        Case(kind="backward", batch=2, rows=130, keys=130, heads=4, kv_heads=2, head_dim=32, causal=True),
        Case(kind="backward", batch=1, rows=70, keys=70, heads=2, kv_heads=1, head_dim=32, deterministic=True),
    ],
    ids=lambda case: case.name,
)
def test_a_right_kernel_is_checked_and_timed(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpu_actors.bench.suite._SLOW", math.inf)  # the machine may be busy while a launch is timed
    clock = FakeClock()
    with stage(clock) as where:
        rows = by_subject(run_case(case, where, SETTINGS, []))
    kernel, service = rows[KERNEL], rows[SERVICE]
    assert (kernel.status, service.status) == ("timed", "timed")
    assert kernel.checked is not None
    assert kernel.checked.slices >= 2
    assert 0 < kernel.checked.worst < 1
    assert kernel.times is not None
    assert kernel.times.n == PLAN.repeats
    assert service.times is not None
    assert service.times.n == SETTINGS.requests
    assert service.requests_per_second


def test_the_launches_that_prove_a_kernel_are_not_recorded() -> None:
    opening = RecordingContext("emulated", ContextOptions(arch="sm_80", qualify="all"))
    x = np.ones((1, 16, 2, 64), np.float16)
    with opening as context, opening.recorder.recording() as launches:
        context.flash_attn.forward(x, x, x).result()
    assert len(launches) == 1


def shift_one(outputs: Any) -> None:
    outputs["out"][0, -1, 0, 3] += 0.5


def leave_one(outputs: Any) -> None:
    outputs["out"][-1, 5, -1, 0] = np.nan


@pytest.mark.parametrize(("corrupt", "reason"), [(shift_one, "out is wrong in 1 of"), (leave_one, "holds NaN")])
def test_a_wrong_kernel_is_not_timed_and_the_json_says_so(corrupt: Any, reason: str) -> None:
    clock = FakeClock()
    with stage(clock, corrupt) as where:
        rows = run_case(SMALL, where, SETTINGS, [peer(unreachable)])
    assert [(row.subject, row.status, row.times) for row in rows] == [(KERNEL, "wrong", None)]
    assert "hold" not in clock.calls
    result = figures("forward", rows, SETTINGS, Ceilings(), {"name": "mock"})
    (record,) = result["rows"]
    assert record["times_ms"] is None
    assert reason in record["reason"]
    assert result["counts"] == {"wrong": 1}


def test_what_a_later_set_leaves_unwritten_is_found_too() -> None:
    launches: list[int] = []

    def leave(outputs: Any) -> None:
        launches.append(1)
        if len(launches) == 4:  # two sets are recorded, then checked
            outputs["out"][0, 3, 0, 0] = np.nan

    with stage(corrupt=leave) as where:
        (row,) = run_case(SMALL, where, replace(SETTINGS, most_sets=2), [])
    assert row.status == "wrong"
    assert "out of set 1 holds NaN" in str(row.reason)


def unreachable(*_: Any) -> Prepared:
    raise AssertionError("a peer was prepared beside a kernel that is not timed")


def right(case: Case, sets: Any, handle: int) -> Prepared:
    one = sets[0]
    reference = attention_forward(one["q"], one["k"], one["v"], **case.options())
    return Prepared([lambda: None] * len(sets), lambda: {"out": reference.out.astype(np.float32)})


def wrong(case: Case, sets: Any, handle: int) -> Prepared:
    prepared = right(case, sets, handle)
    return Prepared(prepared.calls, lambda: {"out": prepared.outputs()["out"][::-1]})


def refusing(*_: Any) -> Prepared:
    raise Refuses("it has no window")


def raising(*_: Any) -> Prepared:
    raise ImportError("libcudnn.so.9: cannot open shared object file")


def raising_later(case: Case, sets: Any, handle: int) -> Prepared:
    def call() -> None:
        raise RuntimeError("CUDA error: invalid configuration")

    return Prepared([call], right(case, sets, handle).outputs)


def test_peers_are_timed_in_turns_and_what_they_raise_is_reported() -> None:
    peers = [
        peer(right, "right"),
        peer(wrong, "wrong"),
        peer(refusing, "refusing"),
        peer(raising, "raising"),
        peer(raising_later, "raising later"),
        peer(unreachable, "absent", "no_such_module.anywhere"),
    ]
    with stage() as where:
        rows = by_subject(run_case(SMALL, where, SETTINGS, peers))
    said = {name: (row.status, row.reason) for name, row in rows.items() if row.subject not in (KERNEL, SERVICE)}
    assert said == {
        "right": ("timed", None),
        "wrong": ("wrong", "its out is not ours, which was checked"),
        "refusing": ("unsupported", "it has no window"),
        "raising": ("failed", "ImportError: libcudnn.so.9: cannot open shared object file"),
        "raising later": ("failed", "RuntimeError: CUDA error: invalid configuration"),
        "absent": ("not run", "no_such_module.anywhere is not installed"),
    }
    assert rows[KERNEL].status == rows[SERVICE].status == "timed"


def test_gradients_that_change_are_not_deterministic() -> None:
    case = Case(kind="backward", batch=1, rows=70, keys=70, heads=2, kv_heads=1, head_dim=32, deterministic=True)
    launches: list[int] = []

    def change(outputs: Any) -> None:
        if "dq" in outputs:
            launches.append(1)
            # Every answer stays right. Two sets are recorded, then checked, and the fifth launch is the repetition.
            outputs["dq"].view(np.uint16)[0, 0, 0, 0] ^= len(launches) == 5

    with stage(corrupt=change) as where:
        (row,) = run_case(case, where, replace(SETTINGS, most_sets=2), [])
    assert row.status == "wrong"
    assert "dq is another one the second time" in str(row.reason)


def test_a_case_that_fails_leaves_the_others() -> None:
    plan = FaultPlan().fail(launch=1)
    with stage(fault_plan=plan) as where:
        rows = run_cases([SMALL, SMALL], where, SETTINGS, [])
    assert [row.status for row in rows] == ["failed", "timed", "timed"]
    assert "LaunchError" in str(rows[0].reason)


def test_a_case_that_does_not_fit_is_not_said_to_be_wrong() -> None:
    plan = FaultPlan().fail(launch=1, error=OutOfDeviceMemory("no room for 8 GiB"))
    with stage(fault_plan=plan) as where:
        (row,) = run_case(SMALL, where, SETTINGS, [])
    assert (row.status, row.reason) == ("not run", "it does not fit into memory: no room for 8 GiB")


def test_what_no_kernel_does_is_reported_as_such() -> None:
    case = Case(batch=1, rows=8, keys=8, heads=1, kv_heads=1, head_dim=600)
    with stage() as where:
        (row,) = run_case(case, where, SETTINGS, [])
    assert row.status == "unsupported"
    assert "head_dim" in str(row.reason)


def test_a_slow_kernel_is_called_a_few_times_only() -> None:
    settings = replace(SETTINGS, plan=Plan(warmup=1, repeats=30, turns=3), requests=20)
    with stage(mock=MockOptions(latency=0.06)) as where:
        rows = by_subject(run_case(SMALL, where, settings, []))
    kernel, service = rows[KERNEL].times, rows[SERVICE].times
    assert kernel is not None
    assert service is not None
    assert (kernel.n, service.n) == (6, 8)


def test_cases_past_the_limit_are_not_said_to_have_run() -> None:
    with stage() as where:
        rows = run_cases([SMALL, SMALL], where, Settings(plan=PLAN, minutes=0.0), [])
    assert [row.status for row in rows] == ["not run"] * 2
    assert rows[0].reason == "the limit of 0 minutes had passed"


def test_what_a_run_has_found_is_kept_before_each_case() -> None:
    kept: list[list[str]] = []
    with stage() as where:
        rows = run_cases([SMALL, SMALL], where, SETTINGS, [], lambda rows: kept.append([row.status for row in rows]))
    assert [row.status for row in rows] == ["timed"] * 4
    assert kept == [["not run"] * 2, ["timed", "timed", "not run"]]


def test_inputs_are_rotated_through_more_than_the_limit_given() -> None:
    sizes = []

    def count(case: Case, sets: Any, handle: int) -> Prepared:
        sizes.append(len(sets))
        assert not any(np.shares_memory(sets[0]["q"], other["q"]) for other in sets[1:])
        assert not np.array_equal(sets[0]["q"], sets[1]["q"])
        raise Refuses("counted")

    with stage() as where:
        run_case(SMALL, where, SETTINGS, [peer(count)])
    assert sizes == [3]


# Cases and the report


@pytest.mark.parametrize("cases", [forward_cases, backward_cases, decode_cases])
def test_every_case_has_a_name_of_its_own_and_quick_ones_come_first(cases: Any) -> None:
    every, quick = cases(), cases(quick=True)
    assert every[: len(quick)] == quick
    assert len({case.name for case in every}) == len(every)


def test_work_and_traffic_are_counted_as_the_field_does() -> None:
    case = Case(batch=2, rows=8192, keys=8192, heads=16, kv_heads=16, head_dim=128)
    assert case.flops == 4 * 2 * 8192 * 8192 * 16 * 128
    assert Case(**{**spelled(case), "causal": True}).flops == case.flops / 2
    assert Case(**{**spelled(case), "kind": "backward"}).flops == case.flops * 2.5
    assert case.bytes == 4 * 2 * 8192 * 16 * 128 * 2
    decode = Case(kind="decode", batch=8, rows=1, keys=8192, heads=64, kv_heads=8, head_dim=128, causal=True)
    assert decode.bytes == 2 * (2 * 8 * 8192 * 8 * 128 + 2 * 8 * 64 * 128)
    assert decode.flops == 4 * 8 * 8192 * 64 * 128


def spelled(case: Case) -> dict[str, Any]:
    record = case.record()
    return {name: record[name] for name in case.__slots__}


def test_the_report_is_json_a_table_with_shares_of_the_runs_ceilings_and_a_plot(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from gpu_actors.bench.report import draw

    clock = FakeClock()
    with stage(clock) as where:
        launch = where.stream.launch
        where.stream.launch = lambda one: (clock.work(2.0), launch(one))[1]  # type: ignore[method-assign]
        rows = run_case(SMALL, where, SETTINGS, [peer(raising, "raising")])
    result = figures("forward", rows, SETTINGS, Ceilings(800.0, 4000.0, "by hand"), {"name": "mock"})
    assert json.loads(json.dumps(result, allow_nan=False))["kind"] == "measurement"
    assert result["git"] is None or len(result["git"].rstrip("+")) == 40
    kernel = result["rows"][0]
    assert kernel["times_ms"]["median"] == pytest.approx(2.0)
    assert kernel["tflops"] == pytest.approx(SMALL.flops / 2e-3 / 1e12)
    assert kernel["of_ceiling"] == pytest.approx(kernel["tflops"] / 800.0)
    shown = list(table(result))
    assert {len(row) for row in shown} == {len(COLUMNS)}
    assert shown[0][:3] == (SMALL.name, KERNEL, "2.0000")
    assert "failed: ImportError" in next(row for row in shown if row[1] == "raising")[-1]
    draw(figures("forward", rows, SETTINGS, Ceilings(1e-3, None), {"name": "mock"}), tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(GpuActorsError, match="nothing to draw"):
        draw({**result, "rows": []}, tmp_path / "none.png")


@pytest.mark.parametrize("wrapper", [ForwardingDevice, RecordingDevice, FaultyDevice])
def test_what_wraps_a_device_passes_every_call_on(wrapper: type[Device]) -> None:
    asked = {name for name, value in vars(Device).items() if callable(value) and not name.startswith("_")}
    assert issubclass(wrapper, ForwardingDevice)
    assert asked <= set(vars(wrapper)) | set(vars(ForwardingDevice)), "the device has a method that is not passed on"


def test_peers_that_are_named_have_a_module_to_look_for() -> None:
    assert len({one.name for one in PEERS}) == len(PEERS)
    for one in PEERS:
        assert isinstance(one, Peer)
        obstacle = one.obstacle()
        assert obstacle is None or "not installed" in obstacle
