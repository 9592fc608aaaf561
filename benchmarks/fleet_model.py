"""The fleet that `benchmarks.fleet` simulates: routers, cells, workers and their deaths, on SimPy.

The code of `gpu_actors.distributed` itself decides who gets a request, and what is repeated within which budget. The
workers are modelled:

    turn ──> router's CPU ──> choice ──> prefill, one after the other ──> decode, slower the more run
                                 ^           │ the worker dies
                                 └───────────┘ told after ``notice_s``, repeated within the budget

A turn's prompt is the history of its session. The pages of it that the chosen worker still has are not prefilled. A
request without state ("forwards") takes one of the worker's lanes for an exponentially distributed time, so one worker
is an M/M/c queue.
"""

from __future__ import annotations

import heapq
import math
import random
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Collection, Generator, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import accumulate
from typing import Any, Literal, NamedTuple, TypeAlias, cast

import simpy

from benchmarks.fleet_costs import Costs, load_costs
from gpu_actors.distributed.budget import RetryBudget
from gpu_actors.distributed.member import Member
from gpu_actors.distributed.routing import Directory, Homes, Ring, less_loaded_of_two
from gpu_actors.distributed.worker_pool import WorkerPool
from gpu_actors.errors import GpuActorsError, InvalidRequest, WorkerLost

__all__ = ["Fleet", "Policy", "Settings", "changed", "simulate"]

Policy: TypeAlias = Literal["random", "two", "ring", "home"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """One run. ``rate`` and ``sessions`` are for each worker.

    cells: how many a front divides the workers into, each with its own ``routers``. stale: seconds after which a router
    learns again what other routers do to the workers; 0: it always knows. rate: turns or forwards a second. burst:
    seconds for which they come at twice the rate, and then as long not at all (0: never). sessions: that take turns.
    sticky: whether a session keeps its router. prompts, zipf: how many beginnings sessions share, and how unequal their
    popularity is (0: equal). shared, begin, turn, answer: tokens of the shared beginning, of the session's own, and of
    each turn's question and answer. longest: tokens after which a session ends and another begins. kill_at, kill: the
    second at which the first ``kill`` workers die. deaths: further ones, for each worker and hour. repeat,
    burst_repeat, retries: of each router's budget. directory: digests that a router keeps. lanes: forwards that a
    worker carries out at once.
    """

    work: Literal["turns", "forwards"] = "turns"
    policy: Policy = "home"
    workers: int = 8
    cells: int = 1
    routers: int = 1
    seconds: float = 100.0
    warm: float = 40.0
    rate: float = 1.5
    burst: float = 0.0
    sessions: int = 20
    prompts: int = 100
    zipf: float = 1.0
    shared: int = 1024
    begin: int = 1024
    turn: int = 300
    answer: int = 400
    longest: int = 16000
    page: int = 128
    lanes: int = 1
    stale: float = 0.1
    sticky: bool = True
    slots: int = 64
    bound: float = 1.25
    directory: int = 1 << 16
    repeat: float = 0.1
    burst_repeat: float = 256.0
    retries: int = 2
    kill_at: float = -1.0
    kill: int = 0
    deaths: float = 0.0
    seed: int = 1

    def __post_init__(self) -> None:
        for name, least in (("workers", 1), ("cells", 1), ("routers", 1), ("sessions", 1), ("prompts", 1), ("page", 1)):
            if getattr(self, name) < least:
                raise InvalidRequest(name, getattr(self, name), f"must be >= {least}")
        if self.workers % self.cells:
            raise InvalidRequest("cells", self.cells, f"must divide the {self.workers} workers")


class _Session:
    """The text of a session so far. pages: digests of its full pages. known: tokens that any worker has computed."""

    def __init__(self, number: int, prompt: int, own: int, settings: Settings) -> None:
        self.number = number
        self.prompt = prompt
        self.busy = False
        self.place = 0
        self.tokens = settings.shared + own
        self.known = settings.shared
        self.pages: list[bytes] = []
        self._shared = settings.shared // settings.page
        self.grow(0, settings.page)

    def grow(self, tokens: int, page: int) -> None:
        self.tokens += tokens
        for at in range(len(self.pages), self.tokens // page):
            own = b"s%d/%d" % (self.number, at)
            self.pages.append(b"p%d/%d" % (self.prompt, at) if at < self._shared else own)


class _Worker:
    """One GPU. free: when each lane is next free. running: its attempts."""

    def __init__(self, name: str, lanes: int, pages: int) -> None:
        self.name = name
        self.up = True
        self.generation = 1
        self.told = self.back = 0.0
        self.lanes = lanes
        self.free = [0.0] * lanes
        self.busy = 0.0
        self.decoding = 0
        self.running: dict[Any, None] = {}
        self._pages: OrderedDict[bytes, None] = OrderedDict()
        self._most = pages

    def book(self, now: float, seconds: float) -> float:
        """Book a job that comes now, and return when it ends. The lanes take jobs in their order."""
        end = max(now, heapq.heappop(self.free)) + seconds
        heapq.heappush(self.free, end)
        self.busy += seconds
        return end

    def known(self, pages: Sequence[bytes]) -> int:
        """How many leading pages of ``pages`` it has."""
        return next((at for at, page in enumerate(pages) if page not in self._pages), len(pages))

    def keep(self, pages: Sequence[bytes]) -> None:
        for page in reversed(pages):  # so that the last page of a prompt is evicted first
            self._pages[page] = None
            self._pages.move_to_end(page)
        while len(self._pages) > self._most:
            self._pages.popitem(last=False)

    def die(self) -> None:
        self.up = False
        self.generation += 1
        self.free = [0.0] * self.lanes
        self.decoding = 0
        self._pages.clear()


class _Cell:
    """Workers and their true state. alive: those that routers may choose."""

    def __init__(self, name: str, workers: Sequence[_Worker]) -> None:
        self.name = name
        self.workers = {worker.name: worker for worker in workers}
        self.members = {name: Member(name, cast("Any", None), False) for name in self.workers}
        self.alive = dict(self.members)
        self.loads = dict.fromkeys(self.workers, 0.0)
        self.routers: list[_Router] = []
        self.outstanding = 0

    def see(self) -> None:
        self.alive = {name: one for name, one in self.members.items() if self.workers[name].up}


class _Router(WorkerPool):
    """A pool of the package over simulated workers. loads: the workers' loads as the router believes them to be."""

    def __init__(self, cell: _Cell, settings: Settings, seed: str, ring: Ring) -> None:
        budget = RetryBudget(settings.repeat, settings.burst_repeat)
        super().__init__(retries=settings.retries, budget=budget, slots=settings.slots, bound=settings.bound)
        self.cell = cell
        self.policy = settings.policy
        self.dice = random.Random(seed)
        self.homes = Homes(self.dice, settings.bound, settings.slots)
        self.homes.ring = ring
        self.homes.directory = Directory(settings.directory if settings.policy == "home" else 0)
        alone = settings.routers == 1 or not settings.stale
        self.loads: dict[str, float] = cell.loads if alone else dict(cell.loads)
        self.free = self.busy = 0.0
        self._generations = dict.fromkeys(cell.workers, 1)

    def candidates(self, tried: Collection[str] = ()) -> dict[str, Member]:
        """Chosen by health as in `WorkerPool.candidates`: workers that are up, untried ones first, else all."""
        alive = self.cell.alive or self.cell.members
        rest = {name: member for name, member in alive.items() if name not in tried} if tried else alive
        return rest or alive

    def pick(self, members: Mapping[str, Member], pages: Sequence[bytes]) -> Member:
        if self.policy == "random":
            return self.dice.choice(list(members.values()))
        loads = self.loads
        if len(members) < len(loads):
            loads = {name: loads[name] for name in members}
        if self.policy == "two" or not pages:
            return members[less_loaded_of_two(loads, self.dice)]
        return members[self.homes.choose(pages, loads)]

    def count(self, worker: _Worker, change: int) -> None:
        name = worker.name
        self.cell.loads[name] += change
        self.cell.outstanding += change
        if self.loads is not self.cell.loads:
            self.loads[name] += change
        if self._generations[name] != worker.generation and worker.up:
            self._generations[name] = worker.generation
            self.homes.forget(name)


class _Wait:
    """Makes a coroutine wait for an event of SimPy."""

    def __init__(self, event: Any) -> None:
        self._event = event

    def __await__(self) -> Generator[Any, Any, Any]:
        return (yield self._event)


class _Turn(NamedTuple):
    """An answered request: when it was made, when its first token came, and when it ended."""

    began: float
    first: float
    ended: float


class Fleet:
    """One run: `run` it, and read what became of every request. All randomness comes from the seed."""

    def __init__(self, settings: Settings, costs: Costs) -> None:
        s = self.settings = settings
        self.costs = costs
        self.env = simpy.Environment()
        self.turns: list[_Turn] = []
        self.lost: list[float] = []  # when the requests that ended in an error were made
        self.made = self.repeated = self.reused = self.prefilled = self.recomputed = self.lost_tokens = 0
        self.hit = 0  # attempts that a death interrupted
        self.area = 0.0
        self._since = 0.0
        self._open = 0
        self._none_open: Any = None
        # Separate, so that every policy meets the same arrivals and deaths.
        self._times, self._arrivals, self._sizes, self._fates = (
            random.Random(f"{s.seed}/{name}") for name in ("times", "arrivals", "sizes", "fates")
        )
        most = costs.cache_tokens // s.page
        size = s.workers // s.cells
        self.cells = []
        for number in range(s.cells):
            names = (f"{number}-{at}" for at in range(size))
            cell = _Cell(f"cell-{number}", [_Worker(name, s.lanes, most) for name in names])
            ring = Ring()
            for name in cell.workers:
                ring.add(name)
            cell.routers = [_Router(cell, s, f"{s.seed}/{number}/{at}", ring) for at in range(s.routers)]
            self.cells.append(cell)
        self._by_name = {cell.name: cell for cell in self.cells}
        self._front = Homes(random.Random(f"{s.seed}/front"), s.bound, s.slots * size)
        self._front.directory = Directory(0)
        for cell in self.cells:
            self._front.ring.add(cell.name)
        weights = [(rank + 1) ** -s.zipf for rank in range(s.prompts)]
        self._popular = list(accumulate(weights))
        self._numbers = 0
        # Sessions have random ages when the run begins.
        most_own = max(s.begin, s.longest - s.shared)
        self._sessions = [self._session(self._sizes.randint(s.begin, most_own)) for _ in range(s.sessions * s.workers)]
        for place, session in enumerate(self._sessions):
            session.place, session.known = place, session.tokens
        self._choice_s = costs.choice(size)

    def run(self) -> None:
        """Simulate until every request made within ``seconds`` is answered."""
        s, env = self.settings, self.env
        for cell in self.cells:
            for router in cell.routers:
                if router.loads is not cell.loads:
                    env.process(self._reports(router))
        workers = [(cell, worker) for cell in self.cells for worker in cell.workers.values()]
        if s.kill:
            env.process(self._kill(workers[: s.kill]))
        if s.deaths:
            env.process(self._deaths(workers))
        env.run(until=env.process(self._arrive()))

    # Arrivals, reports and deaths

    def _arrive(self) -> Generator[Any, Any, None]:
        s, now, dice = self.settings, 0.0, self._times
        rate = s.rate * s.workers * (2 if s.burst else 1)
        while True:
            now += dice.expovariate(rate)
            at = now + (now // s.burst) * s.burst if s.burst else now
            if at >= s.seconds:
                break
            yield self.env.timeout(at - self.env.now)
            self._count(1)
            self.made += 1
            self.env.process(self._turn().__await__())
        if self._open:
            self._none_open = self.env.event()
            yield self._none_open

    def _reports(self, router: _Router) -> Generator[Any, Any, None]:
        yield self.env.timeout(self._fates.random() * self.settings.stale)
        while True:
            router.loads.update(router.cell.loads)
            yield self.env.timeout(self.settings.stale)

    def _kill(self, victims: Sequence[tuple[_Cell, _Worker]]) -> Generator[Any, Any, None]:
        yield self.env.timeout(self.settings.kill_at)
        for cell, worker in victims:
            self.env.process(self._death(cell, worker))

    def _deaths(self, workers: Sequence[tuple[_Cell, _Worker]]) -> Generator[Any, Any, None]:
        while True:
            yield self.env.timeout(self._fates.expovariate(self.settings.deaths * len(workers) / 3600))
            self.env.process(self._death(*self._fates.choice(workers)))

    def _death(self, cell: _Cell, worker: _Worker) -> Generator[Any, Any, None]:
        if not worker.up:
            return
        worker.die()
        worker.told, worker.back = self.env.now + self.costs.notice_s, self.env.now + self.costs.restart_s
        running, worker.running = list(worker.running), {}
        for process in running:
            process.interrupt()
        yield self.env.timeout(self.costs.notice_s)
        cell.see()
        yield self.env.timeout(self.costs.restart_s - self.costs.notice_s)
        worker.up = True
        cell.see()

    # A request

    async def _turn(self) -> None:
        s, began = self.settings, self.env.now
        session = self._idle() if s.work == "turns" else None
        if session is None:
            cell = self._arrivals.choice(self.cells)
        else:
            session.busy = True
            session.grow(s.turn, s.page)
            cell = self._cell_of(session)
        router = self._arrivals.choice(cell.routers)
        if session is not None and s.sticky:
            router = cell.routers[session.number % s.routers]
        await self._decide(router)
        pages = () if session is None else tuple(session.pages)
        first = 0.0

        async def make(member: Member) -> None:
            nonlocal first
            worker = cell.workers[member.name]
            router.count(worker, 1)
            try:
                first = await self._serve(worker, session)
            finally:
                router.count(worker, -1)

        try:
            await router._attempt(lambda members: router.pick(members, pages), make, _always)
        except WorkerLost:
            self.lost.append(began)
        else:
            self.turns.append(_Turn(began, first, self.env.now))
        if session is not None:
            self._took_its_turn(session)
        self._count(-1)
        if not self._open and self._none_open is not None:
            self._none_open.succeed()

    def _cell_of(self, session: _Session) -> _Cell:
        """The front's choice: a ring with bounded loads, over the cells with a live worker."""
        if len(self.cells) == 1:
            return self.cells[0]
        cells = [cell for cell in self.cells if cell.alive] or self.cells
        loads = {cell.name: float(cell.outstanding) for cell in cells}
        return self._by_name[self._front.choose([b"%d" % session.number], loads)]

    async def _decide(self, router: _Router) -> None:
        """The router's CPU, which makes one choice after the other."""
        if self._choice_s:
            router.free = max(router.free, self.env.now) + self._choice_s
            router.busy += self._choice_s
            await _Wait(self.env.timeout(router.free - self.env.now))

    async def _serve(self, worker: _Worker, session: _Session | None) -> float:
        """One attempt. Returns the time of its first token. Raises `WorkerLost` if the worker dies."""
        env = self.env
        if not worker.up:
            if env.now < worker.told:
                await _Wait(env.timeout(worker.told - env.now))
                raise WorkerLost("it has died", worker.generation, worker.name, "no")
            # No worker is up, so the request waits for this one, as it would for a context that restarts.
            while not worker.up:
                await _Wait(env.timeout(max(worker.back - env.now, 1e-6)))
        process, generation = env.active_process, worker.generation
        worker.running[process] = None
        first = 0.0
        try:
            if session is None:
                await self._until(worker.book(env.now, self._sizes.expovariate(1.0 / self.costs.forward_s)))
                return float(env.now)
            await self._until(self._prefill(worker, session))
            first = float(env.now)
            worker.keep(session.pages)
            worker.decoding += 1
            step = self.costs.step_s + self.costs.step_each_s * worker.decoding
            await self._until(first + self.settings.answer * step)
            worker.decoding -= 1
            return first
        except simpy.Interrupt:
            self.hit += 1
            if first:
                self.lost_tokens += int((env.now - first) / step)
            await _Wait(env.timeout(self.costs.notice_s))
            raise WorkerLost("it has died", generation, worker.name) from None
        finally:
            worker.running.pop(process, None)

    async def _until(self, when: float) -> None:
        await _Wait(self.env.timeout(when - self.env.now))

    def _prefill(self, worker: _Worker, session: _Session) -> float:
        """Book the tokens that the worker does not have. Returns when they are done."""
        cached = worker.known(session.pages) * self.settings.page
        fresh = max(session.tokens - cached, 1)
        if self.env.now >= self.settings.warm:
            self.reused += session.tokens - fresh
            self.prefilled += fresh
            self.recomputed += max(0, fresh - (session.tokens - session.known))
        session.known = session.tokens
        return worker.book(self.env.now, fresh / self.costs.prefill_tokens_s)

    # Sessions

    def _session(self, own: int | None = None) -> _Session:
        self._numbers += 1
        prompt = bisect_left(self._popular, self._sizes.random() * self._popular[-1])
        return _Session(self._numbers, prompt, self.settings.begin if own is None else own, self.settings)

    def _idle(self) -> _Session:
        for _ in range(32):
            session = self._arrivals.choice(self._sessions)
            if not session.busy:
                return session
        session = self._session()
        session.place = len(self._sessions)
        self._sessions.append(session)
        return session

    def _took_its_turn(self, session: _Session) -> None:
        s = self.settings
        session.busy = False
        session.grow(s.answer, s.page)
        session.known = session.tokens
        if session.tokens > s.longest:
            self._sessions[session.place] = self._session()
            self._sessions[session.place].place = session.place

    def _count(self, change: int) -> None:
        self.area += self._open * (self.env.now - self._since)
        self._since = self.env.now
        self._open += change

    # Figures

    def figures(self) -> dict[str, Any]:
        """Figures of the requests that were made after ``warm``; times in milliseconds. Rounded to four digits.

        hit: share of the prompts' tokens that a cache had. late_first_ms: of the requests that were made within 10 s
        after ``kill_at``.
        """
        s, now = self.settings, self.env.now
        counted = [turn for turn in self.turns if turn.began >= s.warm]
        after = [turn for turn in self.turns if s.kill and s.kill_at <= turn.began < s.kill_at + 10.0]
        firsts, wholes = [turn.first - turn.began for turn in counted], [turn.ended - turn.began for turn in counted]
        routers = [router for cell in self.cells for router in cell.routers]
        workers = [worker for cell in self.cells for worker in cell.workers.values()]
        found = {
            "requests": len(counted),
            "lost": sum(began >= s.warm for began in self.lost),
            "first_ms": _quantiles(firsts),
            "whole_ms": _quantiles(wholes),
            "hit": self.reused / max(1, self.reused + self.prefilled),
            "prefilled_a_turn": self.prefilled / max(1, len(counted)),
            "recomputed_a_turn": self.recomputed / max(1, len(counted)),
            "worker_busy": {
                "mean": sum(worker.busy for worker in workers) / len(workers) / now,
                "most": max(worker.busy for worker in workers) / now,
            },
            "router_busy": max(router.busy for router in routers) / now,
            "directory": max(len(router.homes.directory) for router in routers),
        }
        if s.kill or s.deaths:
            found |= {
                "interrupted": self.hit,
                "repeated": sum(router._repeated for router in routers),
                "answer_tokens_lost": self.lost_tokens,
                "late_first_ms": _quantiles([turn.first - turn.began for turn in after]),
            }
        rounded: dict[str, Any] = _rounded(found)
        return rounded

    def timeline(self, width: float = 2.0) -> list[tuple[float, float]]:
        """(second, the 99th percentile of the first tokens of requests made in the next ``width`` seconds, in ms)."""
        bins: dict[int, list[float]] = {}
        for turn in self.turns:
            bins.setdefault(int(turn.began // width), []).append(turn.first - turn.began)
        return [(at * width, _rounded(_at(sorted(bins[at]), 0.99) * 1e3)) for at in sorted(bins)]


def simulate(settings: Settings, costs: Costs | None = None) -> dict[str, Any]:
    """The figures of one run, which are the same for the same settings and costs."""
    fleet = Fleet(settings, load_costs() if costs is None else costs)
    fleet.run()
    return fleet.figures()


def changed(settings: Settings) -> dict[str, Any]:
    """The settings that differ from the defaults, for JSON."""
    default = Settings()
    pairs = ((field.name, getattr(settings, field.name)) for field in fields(Settings))
    return {name: value for name, value in pairs if value != getattr(default, name)}


def _always(_: GpuActorsError, __: Member) -> bool:
    return True


def _quantiles(values: Sequence[float]) -> dict[str, float] | None:
    if not values:
        return None
    ordered = sorted(values)
    shares = {"p50": 0.5, "p99": 0.99, "p999": 0.999}
    found = {name: _at(ordered, share) * 1e3 for name, share in shares.items()}
    return {"mean": math.fsum(ordered) / len(ordered) * 1e3, **found}


def _at(ordered: Sequence[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _rounded(one) for name, one in value.items()}
    return float(f"{value:.4g}") if isinstance(value, float) else value
