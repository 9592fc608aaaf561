"""Trace files of work that takes many awaits. Without a listener it costs nothing."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from support.service import ask

import gpu_actors as ga
from gpu_actors.tracing.work import Work, begin_work, caller, under, working


def records_of(path: Path) -> list[dict[str, Any]]:
    result: list[dict[str, Any]] = json.loads(path.read_text())["traceEvents"]
    return result


def test_a_file_in_one_piece_has_work_its_parts_and_what_lies_under_it(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    with ga.ChromeTrace(path) as file:
        request = begin_work("requests", "POST", label="mine", started=1.0, fields={"colour": "red", "none": None})
        assert request is not None
        with under(request), ga.open_context("mock", ga.ContextOptions(on_event=file)) as ctx:
            text = begin_work("texts", "text", started=1.5)
            assert text is not None
            ask(ctx).result(30.0)
        text.part("queue", 1.5, 2.25)
        with working("step", links=[text], fields={"rows": 3}):
            pass
        text.end({"tokens": 4}, error="deadline")
        request.end(name="POST /v1")
    records = records_of(path)
    names = {(one["pid"], one["tid"]): one["args"]["name"] for one in records if one["name"] == "thread_name"}
    begun = {one["name"]: one for one in records if one["ph"] == "b"}
    assert [names[3, begun[name]["tid"]] for name in ("POST /v1", "text", "queue", "step")] == [
        "requests",
        "texts",
        "texts",
        "steps",
    ]
    assert begun["POST /v1"]["args"] == {"label": "mine", "colour": "red"}
    label = begun["text"]["args"]["label"]
    assert begun["text"]["args"] == {"label": label, "under": "mine", "tokens": "4", "error": "deadline"}
    assert (begun["queue"]["ts"], begun["queue"]["args"]) == (1.5e6, {"under": label})
    (end,) = (one for one in records if one["ph"] == "e" and one["id"] == begun["queue"]["id"])
    assert end["ts"] == 2.25e6
    assert (begun["step"]["args"]["links"], begun["step"]["args"]["under"]) == (label, label)
    assert begun["FlashForward"]["args"]["under"] == "mine"


def test_a_step_that_fails_says_so(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    with ga.ChromeTrace(path):
        text = begin_work("texts", "text")
        assert text is not None
        with pytest.raises(ZeroDivisionError), working("step", links=[text], fields={}):
            raise ZeroDivisionError
    (step,) = (one for one in records_of(path) if one["ph"] == "b")
    assert step["args"]["error"] == "ZeroDivisionError"


async def test_work_is_current_in_its_own_task_alone(tmp_path: Path) -> None:
    async with ga.ChromeTrace(tmp_path / "trace.json"):
        works = [begin_work("requests", "GET", label=name) for name in ("one", "two")]

        async def seen(work: Work | None) -> Any:
            with under(work):
                await asyncio.sleep(0.01)
                return caller(False)["under"]

        assert await asyncio.gather(*(seen(work) for work in works)) == ["one", "two"]
        assert caller(False)["under"] is None


def test_where_nobody_looks_there_is_no_work() -> None:
    assert begin_work("texts", "text") is None
    with under(None), working("step", links=[], fields={}):
        assert caller(False) == {"context": None, "under": None}
