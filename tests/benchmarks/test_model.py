"""The model: the terms of a case, and how their weights are fitted to published figures."""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path

import pytest
from inside.bench import Case

from benchmarks import fit, model
from benchmarks.counts import Counts
from benchmarks.sass import find_disassembler
from gpu_actors.errors import Unsupported

CASE = Case(batch=2, rows=8192, keys=8192, heads=16, kv_heads=16, head_dim=128)
H200 = model.MACHINES["sm_90a"]
CLOCKS = 132 * 1.83e9
COUNTS = Counts("forward_sm90", 128, 128, 8, 128 * 128 * 256, 65_536, 500, 64, 64, 100, 20_480, 0, 168, {})


def test_a_case_without_counts_takes_as_long_as_its_longest_part() -> None:
    found = model.estimate(CASE, H200)
    assert found["parts_ms"]["products"] == pytest.approx(CASE.flops / 4096 / CLOCKS * 1e3)
    assert found["parts_ms"]["exponent"] == pytest.approx(2 * 8192**2 * 16 / 16 / CLOCKS * 1e3)
    assert found["parts_ms"]["memory"] == pytest.approx(CASE.bytes / 4.8e12 * 1e3)
    assert found["parts_ms"]["issue"] is found["parts_ms"]["shared"] is None
    assert (found["bound"], found["model_ms"]) == ("products", found["parts_ms"]["products"])
    assert found["error"] is found["worst_error"] is None
    plain = model.estimate(CASE, H200, "forward_simple")
    assert plain["model_ms"] == pytest.approx(16 * found["model_ms"])
    decode = Case(kind="decode", batch=8, rows=1, keys=8192, heads=64, kv_heads=8, head_dim=128)
    assert model.estimate(decode, H200)["bound"] == "memory"


def test_a_multiprocessors_clocks_follow_from_the_counts_of_a_step() -> None:
    # 2,048 tiles of 64 steps, 16 rounds of 132 multiprocessors
    found = model.terms(CASE, COUNTS, H200)
    steps = 16 * 64
    assert found["products"] == steps * 128 * 128 * 256 / 2048
    assert found["exponent"] == steps * 8 * 64 * 32 / 16
    assert found["issue"] == steps * 8 * 500 / 4
    assert found["shared"] == steps * (8 * 20_480 + 65_536) / 128
    assert found["memory"] == pytest.approx(CASE.bytes / 4.8e12 * 1.83e9)
    assert (found["tiles"], found["edge"], found["output"], found["passes"]) == (16, 0, 16 * 128 * 128, 0)
    eight = dataclasses.replace(CASE, dtype="float8_e4m3fn")
    assert model.terms(eight, COUNTS, H200)["products"] == found["products"] / 2
    assert model.terms(eight, COUNTS, H200)["passes"] == 0


def test_a_kernel_that_was_fitted_has_an_error_and_is_no_faster_than_its_longest_part() -> None:
    fit = model.FITS["forward"]
    terms = model.terms(CASE, COUNTS, H200)
    found = model.estimate(CASE, H200, "forward_sm90", COUNTS)
    clocks = sum(weight * terms[name] for name, weight in fit.weights.items())
    assert found["model_ms"] == pytest.approx(clocks / 1.83e9 * 1e3)
    assert (found["error"], found["worst_error"]) == (fit.error, fit.worst)
    other = model.estimate(CASE, H200, "forward_mma", COUNTS)
    assert other["error"] is None
    assert other["model_ms"] == pytest.approx(terms["products"] / 1.83e9 * 1e3)
    a100 = model.estimate(CASE, model.MACHINES["sm_80"], "decode_mma", COUNTS)
    assert a100["error"] is None, "no figure of that GPU was fitted"
    slow = dataclasses.replace(COUNTS, shared=1_000_000)
    bound = model.estimate(CASE, H200, "forward_sm90", slow)
    assert (bound["bound"], bound["model_ms"]) == ("shared", bound["parts_ms"]["shared"])


@pytest.mark.parametrize(
    ("case", "steps"),
    [
        (Case(batch=1, rows=512, keys=512, heads=1, kv_heads=1, head_dim=64), [4, 4, 4, 4]),
        (Case(batch=1, rows=512, keys=512, heads=1, kv_heads=1, head_dim=64, causal=True), [1, 2, 3, 4]),
        (Case(batch=1, rows=256, keys=512, heads=1, kv_heads=1, head_dim=64, causal=True), [3, 4]),
        (Case(batch=1, rows=512, keys=512, heads=1, kv_heads=1, head_dim=64, causal=True, window=127), [1, 2, 2, 2]),
        (
            Case(kind="backward", batch=1, rows=512, keys=512, heads=1, kv_heads=1, head_dim=64, causal=True),
            [4, 3, 2, 1],
        ),
    ],
)
def test_a_tile_takes_a_step_for_each_tile_that_it_sees(case: Case, steps: list[int]) -> None:
    assert model._steps(case, COUNTS) == steps


def test_tiles_go_in_their_order_to_whoever_is_free() -> None:
    assert model.busiest([4] * 6, 4) == (2, 8)
    assert model.busiest([3, 2, 1], 1) == (3, 6)
    assert model.busiest([3, 2, 1], 2) == (2, 3)
    assert model.busiest([1, 2, 3], 2) == (2, 4)


def test_another_librarys_longest_tiles_go_first() -> None:
    case = Case(batch=1, rows=384, keys=384, heads=2, kv_heads=2, head_dim=64, causal=True)
    peer = dataclasses.replace(COUNTS, kernel="FA3")
    assert list(model.dealt(case, peer)) == [3, 3, 2, 2, 1, 1]
    assert list(model.dealt(dataclasses.replace(case, kind="backward"), peer)) == [3, 3, 2, 2, 1, 1]


@pytest.mark.parametrize("kernel", ["forward_mma", "forward_sm90", "forward_wide", "backward_mma", "backward_sm90"])
def test_no_multiprocessor_is_left_with_a_long_tile(kernel: str) -> None:
    """Within 2% of the longest first, of any head. Head by head it is up to 59% more."""
    kind = "backward" if kernel.startswith("backward") else "forward"
    for heads, length in itertools.product(((32, 8), (64, 8), (16, 16)), (1024, 2048, 4096, 8192, 16384)):
        case = Case(
            kind=kind, batch=1, rows=length, keys=length, heads=heads[0], kv_heads=heads[1], head_dim=128, causal=True
        )
        work = list(model.dealt(case, dataclasses.replace(COUNTS, kernel=kernel)))
        for processors in (108, 132):
            best = model.busiest(sorted(work, reverse=True), processors)[1]
            assert model.busiest(work, processors)[1] <= 1.02 * best, (case, processors)


def test_a_suite_is_estimated_without_a_gpu_and_says_that_nothing_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = Case(batch=1, rows=64, keys=64, heads=1, kv_heads=1, head_dim=64)
    impossible = Case(batch=1, rows=64, keys=64, heads=1, kv_heads=1, head_dim=600)
    monkeypatch.setitem(model._CASES, "forward", lambda quick: [tiny, impossible])
    counted = []
    count_case = model.count_case
    monkeypatch.setattr(model, "count_case", lambda key, kind: counted.append(key) or count_case(key, kind))
    found = model.estimate_suite("forward", "sm_80")
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert found["kind"] == "model"
    assert "nothing was measured" in found["note"]
    assert found["rows"][0]["kernel"] == "forward_mma"
    assert (found["rows"][0]["parts_ms"]["issue"] is None) == (find_disassembler() is None)
    assert found["rows"][0]["error"] is None
    assert found["rows"][1]["kernel"] is None
    assert "head_dim" in found["rows"][1]["reason"]
    assert not {"times_ms", "tflops", "gbs", "ceilings"} & {name for row in found["rows"] for name in row}
    assert len(counted) == (find_disassembler() is not None)
    cells = list(model.table(found))
    assert {len(row) for row in cells} == {len(model.COLUMNS)}
    assert cells[0][-2].startswith("at most ")
    assert cells[0][-1] == "not fitted"


def test_the_command_labels_its_figures_as_a_models(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(model, "find_disassembler", lambda: None)  # a disassembler would have kernels compiled
    model.main(["backward", "--quick", "--out", str(tmp_path / "model.json")])
    assert json.loads((tmp_path / "model.json").read_text(encoding="utf-8"))["kind"] == "model"
    assert "MODEL of backward" in capsys.readouterr().out


def test_an_estimate_shows_its_error_in_the_table() -> None:
    rows = [model.estimate(CASE, H200, "forward_sm90", COUNTS)]
    (cells,) = model.table({"rows": rows})
    assert cells[-2] == f"{rows[0]['model_tflops']:.0f} TFLOP/s"
    assert cells[-1] == f"{model.FITS['forward'].error:.1%}, {model.FITS['forward'].worst:.0%}"


def test_a_machine_without_a_data_sheet_is_refused() -> None:
    with pytest.raises(Unsupported, match="sm_90a"):
        model.estimate_suite("forward", "sm_75")


def test_weights_are_those_that_the_figures_were_made_with() -> None:
    rows = [{"products": 10.0 * n, "issue": 5.0 + n * n, "output": 7.0, "passes": 2.0} for n in range(1, 6)]
    clocks = [1.5 * row["products"] + 0.5 * row["issue"] + 2.0 for row in rows]
    found = fit.weights(rows, clocks, ("products", "issue", "output"))
    assert found == pytest.approx({"products": 1.5, "issue": 0.5, "output": 0}, abs=1e-9)
    slower = [each - 3 * row["output"] for each, row in zip(clocks, rows, strict=True)]
    assert fit.weights(rows, slower, ("products", "issue", "output"))["output"] == 0  # none is below 0


def test_the_packages_weights_are_what_the_published_figures_give() -> None:
    assert fit.fits(fit.read_points(), fit.read_counts()) == model.FITS


def test_the_page_is_the_one_of_the_figures_and_the_counts() -> None:
    assert fit.PAGE.read_text(encoding="utf-8") == fit.page(fit.read_points(), fit.read_counts())
    goals = {fit.goal_of(fit.usual("forward", *each, True, 8192)) for each in (("float16", 64), ("float16", 128))}
    assert goals == {1.03, 1.0}
    assert fit.goal_of(fit.usual("backward", "float16", 64, True, 8192)) == 1


def test_every_published_figure_names_a_source() -> None:
    data = json.loads((fit.REPORTS / "peers.json").read_text(encoding="utf-8"))
    assert all(one["url"].startswith("https://") for one in data["sources"].values())
    assert {point["source"] for point in data["points"]} == set(data["sources"])
    assert {("gbs" if point["kind"] == "decode" else "tflops") in point for point in data["points"]} == {True}
    points = fit.read_points()
    assert len({(point.library, point.gpu, point.case) for point in points}) == len(points)
    for point in points:  # no figure is above what the machine can do
        whole = fit.GPUS[point.gpu]
        eight = 2 if point.case.dtype.startswith("float8") else 1
        peak = whole.bandwidth / 1e9 if point.case.kind == "decode" else CLOCKS * 4096 * eight / 1e12
        assert 0 < point.published < peak
