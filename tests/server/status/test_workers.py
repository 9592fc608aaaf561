"""The state of a pool for viewers and probes: each worker's state, and the readiness of all."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from inside.server import Readiness, readiness_of_workers
from support.page import kill, pool_application, reading, service_of, worker_of
from support.served import Served
from support.service import NO_COMPUTE, ask, eventually, no_threads_left

import gpu_actors as ga
from gpu_actors.status import StatusBoard, report


@pytest.fixture(autouse=True)
def _every_thread_ends() -> Iterator[None]:
    with no_threads_left():
        yield


WELL = Readiness(True, "ready", "")
SHAKY = Readiness(True, "degraded", "kernels has stopped")
REPLACED = Readiness(False, "degraded", "its process is being replaced")
STALLED = Readiness(False, "stalled", "a launch has not finished")
FAILED = Readiness(False, "failed", "the context is lost")
DRAINING = Readiness(False, "draining", "the context is draining")


def test_the_verdict_on_a_pool() -> None:
    for workers, ready, state in (
        ([WELL, WELL], True, "ready"),
        *(([WELL, other], True, "degraded") for other in (SHAKY, REPLACED, FAILED, STALLED)),
        ([SHAKY], True, "degraded"),
        ([REPLACED, REPLACED], False, "degraded"),
        ([REPLACED, FAILED], False, "degraded"),
        ([STALLED, FAILED], False, "stalled"),
        ([FAILED, FAILED], False, "failed"),
        ([DRAINING, DRAINING], False, "draining"),
    ):
        found = readiness_of_workers({f"worker-{number}": one for number, one in enumerate(workers)})
        assert (found.ready, found.state) == (ready, state)
        for number, one in enumerate(workers):
            assert (f"worker-{number}: {one.reason}" in found.reason) == (one != WELL)


def test_a_board_shows_each_worker_by_its_name() -> None:
    options = ga.ContextOptions(mock=ga.MockOptions(dtype="float32"))
    with ga.open_context("mock", options) as one, ga.open_context("mock", options) as two:
        board = StatusBoard()
        with pytest.raises(ga.InvalidRequest, match="worker"):
            board.watch({})
        with pytest.raises(ga.InvalidRequest, match="worker"):
            board.watch({"": one})
        board.watch({"one": one, "two": two})
        ask(two).result(30)
        with pytest.raises(ga.InvalidRequest):
            two.flash_attn.forward(1, 2, 3).result(30)  # type: ignore[arg-type]
        found = json.loads(json.dumps(board.snapshot()))
        board.close()
    assert found["verdict"] == {"ready": True, "state": "ready", "reason": ""}
    assert "actors" not in found
    assert [worker["name"] for worker in found["workers"]] == ["one", "two"]
    completed = [
        next(actor["completed"] for actor in worker["actors"] if actor["name"] == "flash_attn")
        for worker in found["workers"]
    ]
    assert completed == [0, 1]
    assert found["workers"][1]["history"]["windows"]["60"]["actors"]["flash_attn"]
    assert found["workers"][0]["history"]["windows"]["60"]["actors"] == {}
    (event,) = found["events"]
    assert event["fields"] == {"worker": "two", "actor": "flash_attn", "error": "InvalidRequest", "count": "1"}


def test_a_worker_that_is_killed_returns_as_the_next_generation() -> None:
    app = pool_application()
    with Served(app) as served, reading(served) as reader:
        reader.until(lambda event, data: event == "state" and data["verdict"]["state"] == "ready")
        before = worker_of(app, "worker-1").pid
        kill(worker_of(app, "worker-1"))
        items: list[dict[str, object]] = []

        def back(event: str, data: dict[str, list[dict[str, object]]]) -> bool:
            if event == "happened":
                items.extend(data["items"])
                return False
            worker = data["workers"][0]
            return worker["generation"] == 2 and worker["verdict"]["state"] == "ready"  # type: ignore[index]

        found = reader.until(back)
        service_of(app).board.end_streams()
        one, two = found["workers"]
        assert (one["restarts"], one["pid"] not in (None, before), two["restarts"]) == (1, True, 0)
        lost = [item["fields"] for item in items if item["name"] == "context.lost"]
        assert [fields["worker"] for fields in lost] == ["worker-1"]  # type: ignore[index]
        board = service_of(app).board
        eventually(lambda: any(_says(item, "worker-1", "ready") for item in board.event_log.since(0).items))
        eventually(lambda: served.ask("/readyz").json["state"] == "ready")
        workers = served.ask("/readyz").json["workers"]
        assert workers["worker-1"] == {"ready": True, "state": "ready", "reason": "", "generation": 2}
        assert workers["worker-2"]["generation"] == 1


def _says(item: dict[str, dict[str, str]], worker: str, state: str) -> bool:
    return (item["name"], item["fields"].get("worker"), item["fields"].get("state")) == ("state.changed", worker, state)


def test_a_dead_worker_degrades_the_pool_and_no_worker_fails_it() -> None:
    app = pool_application(max_restarts=0)
    with Served(app) as served:
        kill(worker_of(app, "worker-1"))
        eventually(lambda: served.ask("/readyz").json["workers"]["worker-1"]["state"] == "failed")
        answered = served.ask("/readyz")
        assert (answered.status, answered.json["state"]) == (200, "degraded")
        assert "worker-1: the context is lost" in answered.json["reason"]
        assert "worker-2" not in answered.json["reason"]
        assert served.ask("/livez").status == 200
        found = served.ask("/status.json").json
        assert found["verdict"]["state"] == "degraded"
        assert [worker["verdict"]["state"] for worker in found["workers"]] == ["failed", "ready"]
        assert (found["workers"][0]["caches"], found["workers"][0]["kernels"]) == (None, None)
        metrics = served.ask("/metrics")
        assert metrics.status == 200, "the first scrape there is: the dead worker has never said what its caches did"
        text = metrics.body.decode()
        for name, ready in (("worker-1", 0.0), ("worker-2", 1.0)):
            assert f'gpu_actors_ready{{device="mock",worker="{name}"}} {ready}' in text
        kill(worker_of(app, "worker-2"))
        eventually(lambda: served.ask("/readyz").json["state"] == "failed")
        answered = served.ask("/readyz")
        assert (answered.status, served.ask("/livez").status) == (503, 503)
        assert "worker-1: " in answered.json["reason"]
        assert "worker-2: " in answered.json["reason"]


def test_a_worker_that_does_not_answer_costs_one_question_and_a_report_of_a_pool_is_a_page(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with ga.open_context("mock", ga.ContextOptions(mock=NO_COMPUTE)) as one:
        board = StatusBoard()
        board.watch({"one": one})
        asked = []

        def silent() -> None:
            asked.append(1)
            raise ga.DeadlineExceeded("the context's process did not answer within 1 s")

        monkeypatch.setattr(one._children.cells["nvrtc"].shared, "uses", silent)
        for _ in range(3):
            snapshot = board.snapshot()
            (worker,) = snapshot["workers"]
            assert (worker["kernels"], worker["caches"]) == (None, None)
        assert len(asked) == 1
        board.close()
    assert '"name":"one"' in report(snapshot)
    del snapshot["workers"]
    with pytest.raises(ga.InvalidRequest, match="snapshot"):
        report(snapshot)
