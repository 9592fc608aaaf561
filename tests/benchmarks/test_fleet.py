"""The simulated fleet: against closed forms, against a pool of real workers, and against its committed figures."""

from __future__ import annotations

import asyncio
import json
import math
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from support.service import REPOSITORY

import gpu_actors as ga
from benchmarks import fleet as suite
from benchmarks import fleet_plot as suite_plot
from benchmarks.fleet_costs import Costs, load_costs
from benchmarks.fleet_model import Fleet, Settings, changed, simulate
from gpu_actors.distributed import RetryBudget, open_pool
from gpu_actors.remote import InProcess

FORWARD = 0.01
FREE = Costs(25_000.0, 0.0, 0.0, FORWARD, 0, 0.0, 60.0, 0.0, {}, 0.0)
COMMITTED = json.loads((REPOSITORY / "docs/benchmarks/fleet.json").read_text(encoding="utf-8"))


def queue(load: float, seconds: float = 250.0, costs: Costs = FREE, **settings: Any) -> Fleet:
    """A run of stateless requests, on workers that are each busy for ``load`` of the time."""
    lanes = settings.setdefault("lanes", 1)
    rate = load * lanes / FORWARD
    defaults = {"work": "forwards", "policy": "random", "workers": 1, "stale": 0.0, "sessions": 1, "warm": 0.0}
    run = Fleet(Settings(**{**defaults, **settings}, rate=rate, seconds=seconds), costs)  # type: ignore[arg-type]
    run.run()
    return run


def mean_time(run: Fleet) -> float:
    return math.fsum(turn.ended - turn.began for turn in run.turns) / len(run.turns)


def mmc(load: float, servers: int) -> float:
    """The mean time of a request in an M/M/c queue, in service times (Erlang's C formula)."""
    offered = load * servers
    terms = [offered**k / math.factorial(k) for k in range(servers)]
    last = offered**servers / math.factorial(servers) / (1 - load)
    waits = last / (sum(terms) + last)
    return 1 + waits / (servers * (1 - load))


def of_two(load: float) -> float:
    """The mean time with two choices among very many servers, in service times (Mitzenmacher 1996)."""
    return sum(load ** (2**i - 2) for i in range(1, 12))


def closed_form(run: Fleet, servers: int) -> float:
    """`mmc` at the rate and the service time that this run drew, which removes most of the randomness."""
    (worker,) = run.cells[0].workers.values()
    service = worker.busy / len(run.turns)
    assert service == pytest.approx(FORWARD, rel=0.03)
    return service * mmc(worker.busy / run.env.now / servers, servers)


@pytest.mark.parametrize(("load", "servers"), [(0.6, 1), (0.7, 4)])
def test_a_worker_is_the_queue_of_the_textbooks(load: float, servers: int) -> None:
    run = queue(load, lanes=servers, seconds=125.0 / load / servers)
    assert len(run.turns) == run.made > 12_000
    assert mean_time(run) == pytest.approx(closed_form(run, servers), rel=0.05)
    # Little's law holds exactly in a run that ends empty: no request is counted twice or forgotten.
    assert run.area == pytest.approx(math.fsum(turn.ended - turn.began for turn in run.turns), rel=1e-9)


@pytest.mark.sweep
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("load", "servers"), [(0.5, 1), (0.8, 1), (0.9, 1), (0.9, 4), (0.9, 16)])
def test_a_long_run_is_within_a_hundredth_of_the_textbooks(load: float, servers: int) -> None:
    run = queue(load, lanes=servers, seconds=20_000.0 / load / servers / 4)
    assert mean_time(run) == pytest.approx(closed_form(run, servers), rel=0.015)


def test_prefills_of_one_length_are_half_the_wait_of_the_textbooks() -> None:
    """M/D/1: every turn begins a new session, and no cache has any of its tokens."""
    costs = FREE._replace(prefill_tokens_s=23_480.0)  # 2,348 tokens in 0.1 s
    settings = Settings(workers=1, rate=6.0, longest=0, answer=0, seconds=1200.0, warm=0.0, sessions=400)
    run = Fleet(settings, costs)
    run.run()
    (worker,) = run.cells[0].workers.values()
    load = worker.busy / run.env.now
    assert worker.busy == pytest.approx(0.1 * run.made)
    assert mean_time(run) == pytest.approx(0.1 * (1 + load / (2 * (1 - load))), rel=0.04)


def test_two_choices_are_as_good_as_their_asymptotics() -> None:
    """Within 2% with a hundred workers. With random choice each worker is a queue of its own."""
    run = queue(0.7, workers=100, policy="two", seconds=2.0)
    assert mean_time(run) / FORWARD == pytest.approx(of_two(0.7), rel=0.02)
    by_lot = queue(0.7, workers=100, seconds=1.0)
    assert mean_time(by_lot) / FORWARD > 1.7 * of_two(0.7)


@pytest.mark.sweep
def test_two_choices_under_heavy_load_are_as_good_as_their_asymptotics() -> None:
    run = queue(0.95, workers=400, policy="two", seconds=8.0)
    late = [turn.ended - turn.began for turn in run.turns if turn.began > 4.0]
    assert math.fsum(late) / len(late) / FORWARD == pytest.approx(of_two(0.95), rel=0.03)


def test_old_loads_make_two_choices_worse() -> None:
    """Routers that see the same old loads send to the same workers (Mitzenmacher 2000)."""
    given = {"workers": 40, "policy": "two", "routers": 8, "seconds": 3.0}
    times = [mean_time(queue(0.8, stale=stale, **given)) / FORWARD for stale in (0.0, 0.02, 1.0)]
    assert times[0] < 0.9 * times[1] < 0.6 * times[2]
    assert times[0] == pytest.approx(of_two(0.8), rel=0.1)
    # Each router counts what it sent itself, so it stays better than random choice.
    assert times[2] < 0.8 * mmc(0.8, 1)


# Turns of sessions

SMALL = Settings(workers=4, seconds=40.0, warm=10.0)


def test_the_same_seed_gives_the_same_figures_and_another_one_others() -> None:
    assert simulate(SMALL) == simulate(SMALL)
    again = simulate(Settings(workers=4, seconds=40.0, warm=10.0, seed=2))
    assert again != simulate(SMALL)
    assert changed(SMALL) == {"workers": 4, "seconds": 40.0, "warm": 10.0}


def test_a_home_saves_what_others_prefill_again() -> None:
    given: dict[str, Any] = {"workers": 16, "seconds": 40.0, "warm": 20.0, "prompts": 4, "slots": 8}
    found = {policy: simulate(Settings(policy=policy, **given)) for policy in ("random", "two", "ring", "home")}
    assert found["home"]["hit"] > 0.6 > 0.5 > found["ring"]["hit"] > 0.3 > found["two"]["hit"]
    assert found["home"]["recomputed_a_turn"] < 0.5 * found["two"]["recomputed_a_turn"]
    assert found["two"]["worker_busy"]["most"] < found["random"]["worker_busy"]["most"]
    small = simulate(Settings(directory=2048, **given))
    assert small["hit"] < found["home"]["hit"] - 0.2
    assert small["directory"] == 2048
    # If every session has a prefix of its own, the ring alone finds its worker again.
    given |= {"prompts": 10_000, "zipf": 0.0}
    assert simulate(Settings(policy="ring", **given))["hit"] > 0.6
    even, bursts = simulate(Settings(**given)), simulate(Settings(burst=5.0, **given))
    assert bursts["whole_ms"]["p99"] > even["whole_ms"]["p99"]
    assert bursts["requests"] == even["requests"]


def test_a_router_with_more_choices_than_its_cpu_makes_is_where_requests_wait() -> None:
    slow = load_costs()._replace(router_us={1: 50_000.0}, router_look_us=0.0)
    one, four = (simulate(Settings(workers=16, routers=routers, seconds=20.0, warm=5.0), slow) for routers in (1, 4))
    assert one["router_busy"] > 0.7
    assert one["first_ms"]["p50"] > 1000 > 2 * four["first_ms"]["p50"]
    assert load_costs().choice(500) > load_costs().choice(100) > load_costs().choice(8) > 0


def test_a_death_costs_repetitions_and_tokens_but_no_answer_within_the_budget() -> None:
    killing = {"workers": 8, "kill": 2, "kill_at": 20.0, "seconds": 40.0, "warm": 15.0}
    run = Fleet(Settings(**killing), load_costs())  # type: ignore[arg-type]
    run.run()
    found, calm = run.figures(), simulate(Settings(workers=8, seconds=40.0, warm=15.0))
    assert len(run.turns) == run.made
    assert found["lost"] == 0 < found["interrupted"] <= found["repeated"] < found["interrupted"] + 5
    assert found["answer_tokens_lost"] > 0
    assert found["recomputed_a_turn"] > calm["recomputed_a_turn"]
    assert found["late_first_ms"]["p50"] > 2 * calm["first_ms"]["p50"]
    assert all(not load for load in run.cells[0].loads.values())
    spent = Fleet(Settings(**killing, repeat=0.0, burst_repeat=1.0), load_costs())  # type: ignore[arg-type]
    spent.run()
    assert len(spent.lost) + len(spent.turns) == spent.made
    assert spent.figures()["repeated"] == 1
    assert len(spent.lost) >= spent.figures()["interrupted"] - 1 > 0


def test_a_death_takes_the_cache_along() -> None:
    worker = Fleet(Settings(workers=3), load_costs()).cells[0].workers["0-0"]
    worker.keep([b"one", b"two"])
    assert worker.known([b"one", b"two", b"three"]) == 2
    worker.die()
    assert worker.known([b"one"]) == 0


def test_a_router_repeats_nothing_on_the_worker_that_failed_where_another_is_up() -> None:
    run = Fleet(Settings(workers=3), load_costs())
    (router,) = run.cells[0].routers
    assert list(router.candidates({"0-1"})) == ["0-0", "0-2"]
    assert list(router.candidates({"0-0", "0-1", "0-2"})) == ["0-0", "0-1", "0-2"]


def test_without_a_worker_requests_wait_for_it_and_other_cells_take_over() -> None:
    alone = simulate(Settings(workers=1, kill=1, kill_at=20.0, seconds=40.0, warm=0.0))
    assert alone["lost"] == 0
    assert 55_000 < alone["late_first_ms"]["p99"] < 75_000
    cells = Settings(workers=8, cells=2, kill=4, kill_at=20.0, seconds=40.0, warm=0.0)
    assert simulate(cells)["late_first_ms"]["p99"] < 10_000
    dying = simulate(Settings(workers=8, deaths=60.0, seconds=40.0, warm=0.0))
    assert dying["interrupted"] > 1


# Beside a pool

HELD = 48


async def pool_of_four(budget: RetryBudget) -> tuple[list[int], list[int], int, int]:
    """Loads of a real pool's workers before and after the death of the first, and counts of repetitions and errors."""
    gate = threading.Event()

    async def held(_: ga.GpuContext) -> None:
        while not gate.is_set():  # noqa: ASYNC110
            await asyncio.sleep(0.01)

    # A long pause before the restart, so that the worker is not chosen again.
    options = ga.ContextOptions(restart=ga.RestartPolicy(backoff=120.0, backoff_max=120.0))
    async with open_pool("mock", workers=4, options=options, workplace=InProcess, budget=budget, seed=11) as pool:

        def loads() -> list[int]:
            return [worker.outstanding for worker in pool.stats().workers.values()]

        asking = [
            asyncio.create_task(pool.ask(lambda ctx: ctx.run(held), repeatable=True))  # type: ignore[attr-defined]
            for _ in range(HELD)
        ]
        while sum(loads()) < HELD:  # noqa: ASYNC110
            await asyncio.sleep(0)
        before = loads()
        connection = pool.workers["worker-1"]._generations.connection  # type: ignore[attr-defined]
        connection.kill()
        while loads()[0] or pool.stats().repeated + sum(task.done() for task in asking) < before[0]:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        after = loads()
        gate.set()
        found = await asyncio.gather(*asking, return_exceptions=True)
        assert all(one is None or isinstance(one, ga.WorkerLost) for one in found)
        return before, after, pool.stats().repeated, sum(one is not None for one in found)


@pytest.mark.parametrize("burst", [256.0, 5.0])
async def test_a_pool_of_real_workers_does_what_the_simulated_one_does(burst: float) -> None:
    """The same loads, worker for worker, before and after a death, and the same repetitions."""
    before, after, repeated, errors = await pool_of_four(RetryBudget(0.0, burst))
    settings = Settings(work="forwards", policy="two", workers=4, lanes=HELD, repeat=0.0, burst_repeat=burst)
    run = Fleet(settings, FREE._replace(forward_s=1e6, notice_s=0.01))
    (cell,) = run.cells
    cell.routers[0].dice.seed(11)
    for _ in range(HELD):
        run._count(1)
        run.env.process(run._turn().__await__())
    run.env.run(until=1.0)
    assert list(cell.loads.values()) == before
    run.env.process(run._death(cell, cell.workers["0-0"]))
    run.env.run(until=2.0)
    assert list(cell.loads.values()) == after
    assert (run.hit, cell.routers[0]._repeated) == (before[0], repeated)
    assert len(run.lost) == errors == max(0, before[0] - burst)


# What is reported


def test_every_cost_says_where_it_is_from() -> None:
    text = (REPOSITORY / "benchmarks/fleet_costs.json").read_text(encoding="utf-8")
    given = json.loads(text)
    assert load_costs(text) == load_costs()
    for missing in ("kind", "source", "value"):
        broken = {**given, "step_s": {name: one for name, one in given["step_s"].items() if name != missing}}
        with pytest.raises(ga.InvalidRequest, match="step_s"):
            load_costs(json.dumps(broken))
    with pytest.raises(ga.InvalidRequest, match="notice_s"):
        load_costs(json.dumps({**given, "notice_s": {"value": 1, "kind": "guessed", "source": "nowhere"}}))
    with pytest.raises(ga.InvalidRequest, match="cells"):
        Settings(workers=8, cells=3)
    with pytest.raises(ga.InvalidRequest, match="workers"):
        Settings(workers=0)


def page_rows(found: Mapping[str, Any]) -> Iterator[str]:
    """The rows of the page's tables."""
    for row in found["rows"]:
        first, busy = row["first_ms"], row["worker_busy"]
        cells = [shown(row["settings"]), f"{first['p50']:.4g}", f"{first['p99']:.4g}", f"{row['hit']:.3f}"]
        cells += [f"{busy['mean']:.2f}", f"{busy['most']:.2f}", f"{row['router_busy']:.3f}"]
        if "kill" in row["settings"]:
            late = row["late_first_ms"]
            cells = [
                shown(row["settings"]),
                row["interrupted"],
                row["repeated"],
                row["lost"],
                row["answer_tokens_lost"],
            ]
            cells += [f"{row['recomputed_a_turn']:.4g}", f"{late['p50']:.4g}", f"{late['p99']:.4g}"]
        yield f"| {' | '.join(map(str, cells))} |"


def shown(settings: Mapping[str, Any]) -> str:
    hidden = ("work", "rate", "seconds", "warm", "kill_at")
    return ", ".join(f"{name} {value}" for name, value in settings.items() if name not in hidden)


def committed(least: int, most: int) -> list[Mapping[str, Any]]:
    return [row for row in COMMITTED["rows"] if least <= row["settings"]["workers"] <= most]


def rerun(row: Mapping[str, Any]) -> Mapping[str, Any]:
    run = Fleet(Settings(**row["settings"]), load_costs())
    run.run()
    more = {"timeline": run.timeline()} if "kill" in row["settings"] else {}
    again: Mapping[str, Any] = json.loads(
        json.dumps({"group": row["group"], "settings": row["settings"]} | run.figures() | more)
    )
    return again


@pytest.mark.sweep
@pytest.mark.timeout(3600)
def test_every_row_of_the_committed_figures_comes_out_again() -> None:
    assert [row["settings"] for row in COMMITTED["rows"]] == [
        json.loads(json.dumps(one)) for runs in suite.STUDY.values() for one in runs
    ]
    for row in committed(1, 1000):
        assert rerun(row) == row


def test_the_command_labels_its_figures_as_simulated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "fleet.json"
    with pytest.raises(ga.GpuActorsError, match="quick study"):
        suite.main(["--quick", "--out", str(out), "--plot", str(tmp_path / "none.svg")])
    assert "SIMULATED" in capsys.readouterr().out
    figures = json.loads(out.read_text(encoding="utf-8"))
    assert (figures["kind"], figures["rows"]) == ("simulation", committed(1, 8))
    suite_plot.draw(COMMITTED, tmp_path / "fleet.svg")
    assert "SIMULATED" in (tmp_path / "fleet.svg").read_text(encoding="utf-8")


def test_one_run_is_printed_by_the_module(capsys: pytest.CaptureFixture[str]) -> None:
    suite.main(["--workers", "2", "--seconds", "20", "--warm", "5", "--sticky", "no"])
    found = json.loads(capsys.readouterr().out)
    assert (found["kind"], found["settings"]["sticky"]) == ("simulation", False)
    assert found["requests"] > 10


def test_a_router_is_measured_on_real_choices() -> None:
    found = suite.measure(sizes=(1, 64), choices=30)
    assert 0 < found["router_us"]["1"] < found["router_us"]["64"]
    assert found["router_look_us"] > 0


def test_the_page_shows_the_committed_figures() -> None:
    page = (REPOSITORY / "docs/scale.md").read_text(encoding="utf-8")
    for line in page_rows(COMMITTED):
        assert line in page, line
