"""The model and the counts of machine code that it is made from."""

from __future__ import annotations

import json

import pytest

from gpu_actors.bench import model
from gpu_actors.bench.cases import Case
from gpu_actors.bench.sass import find_disassembler
from gpu_actors.errors import Unsupported

CASE = Case(batch=2, rows=8192, keys=8192, heads=16, kv_heads=16, head_dim=128)
H200 = model.MACHINES["sm_90a"]


def test_a_case_takes_as_long_as_its_longest_part() -> None:
    found = model.estimate(CASE, H200)
    clocks = 132 * 1.83e9
    assert found["parts_ms"]["products"] == pytest.approx(CASE.flops / 4096 / clocks * 1e3)
    assert found["parts_ms"]["exponent"] == pytest.approx(2 * 8192**2 * 16 / 16 / clocks * 1e3)
    assert found["parts_ms"]["memory"] == pytest.approx(CASE.bytes / 4.8e12 * 1e3)
    assert found["parts_ms"]["issue"] is None
    assert (found["bound"], found["model_ms"]) == ("products", found["parts_ms"]["products"])
    plain = model.estimate(CASE, H200, "forward_simple")
    assert plain["model_ms"] == pytest.approx(16 * found["model_ms"])
    slow = model.estimate(CASE, H200, "kernel", 4096 / 128)
    assert slow["bound"] == "issue"
    assert slow["parts_ms"]["issue"] == pytest.approx(2 * 8192**2 * 16 * 32 / 4 / clocks * 1e3)
    decode = Case(kind="decode", batch=8, rows=1, keys=8192, heads=64, kv_heads=8, head_dim=128)
    assert model.estimate(decode, H200)["bound"] == "memory"


def test_a_suite_is_estimated_without_a_gpu_and_says_that_nothing_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = Case(batch=1, rows=64, keys=64, heads=1, kv_heads=1, head_dim=64)
    impossible = Case(batch=1, rows=64, keys=64, heads=1, kv_heads=1, head_dim=600)
    monkeypatch.setitem(model._CASES, "forward", lambda quick: [tiny, impossible])
    found = model.estimate_suite("forward", "sm_80")
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert found["kind"] == "model"
    assert "nothing was measured" in found["note"]
    assert found["rows"][0]["kernel"] == "forward_mma"
    assert (found["rows"][0]["instructions_a_pair"] is None) == (find_disassembler() is None)
    assert found["rows"][1]["kernel"] is None
    assert "head_dim" in found["rows"][1]["reason"]
    assert not {"times_ms", "tflops", "gbs", "ceilings"} & {name for row in found["rows"] for name in row}
    assert {len(row) for row in model.table(found)} == {len(model.COLUMNS)}


def test_a_machine_without_a_data_sheet_is_refused() -> None:
    with pytest.raises(Unsupported, match="sm_90a"):
        model.estimate_suite("forward", "sm_75")
