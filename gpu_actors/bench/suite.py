"""A GPU suite: for each case, a check of the kernel, then its time and those of its peers.

    operands ──> request ──> recorded launch ──> poisoned outputs checked ──┬─> kernel: the launch alone, by events
     (several sets,                                (wrong: not timed)       ├─> peers: their calls, likewise, in turns
      rotated through)                                                      └─> service: awaited requests, host clock

This module does not depend on CUDA: a `Stage` has context, stream, clock and arrays, so tests can use other devices.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from gpu_actors.bench.arrays import Arrays, OperandSet, adopted, has_special, make_operands, submit
from gpu_actors.bench.cases import Case
from gpu_actors.bench.checks import Checked, check_backward, check_decode, check_forward
from gpu_actors.bench.peers import Peer, Refuses, agrees
from gpu_actors.bench.recorder import RecordingDevice, for_timing
from gpu_actors.bench.timing import Call, EventClock, Plan, Quantiles, Timing, measure_in_turns, quantiles
from gpu_actors.devices.interface import Event, Launch, Stream
from gpu_actors.errors import GpuActorsError, OutOfDeviceMemory, Unsupported
from gpu_actors.handles.gpu_context import GpuContext

__all__ = ["KERNEL", "SERVICE", "Row", "Settings", "Stage", "run_case", "run_cases"]

KERNEL, SERVICE = "gpu_actors kernel", "gpu_actors service"
_SLOW = 0.05  # a launch that takes more seconds is repeated only a few times
_FEW = Plan(warmup=1, repeats=6, turns=3)
_FEW_REQUESTS = 8
_E4M3_KERNELS = ("forward_sm90",)  # kernels that round the softmax weights of 8-bit inputs to e4m3


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Settings of a suite.

    plan: how often to call.
    rotate: bytes of operands to rotate through, several times the L2.
    most_sets: the most operand sets, even if they are small.
    requests: the number of requests that are awaited alone, and again with ``in_flight`` at a time.
    minutes: no further case begins after this time.
    """

    plan: Plan = field(default_factory=Plan)
    rotate: int = 256 << 20
    most_sets: int = 64
    requests: int = 50
    in_flight: int = 8
    minutes: float | None = None


@dataclass(slots=True)
class Stage:
    """The environment of a suite.

    stream: a stream of the recorder's inner device, the same as the clock's.
    handle: the stream's handle, for peers.
    settled: called after each turn, with the stream idle.
    """

    context: GpuContext
    recorder: RecordingDevice
    stream: Stream
    clock: EventClock
    arrays: Arrays
    handle: int = 0
    settled: Call = lambda: None


@dataclass(slots=True, kw_only=True)
class Row:
    """One subject in one case.

    status: "timed", "wrong" (not timed), "unsupported", "failed" or "not run".
    reason: a sentence if it is not timed.
    held: see `Timing`.
    requests_per_second: the rate with several requests in flight.
    """

    case: Case
    subject: str
    status: str
    reason: str | None = None
    times: Quantiles | None = None
    held: bool = True
    kernels: tuple[str, ...] = ()
    checked: Checked | None = None
    requests_per_second: float | None = None

    @property
    def tflops(self) -> float | None:
        return None if self.times is None else self.case.flops / self.times.median / 1e9

    @property
    def gbs(self) -> float | None:
        return None if self.times is None else self.case.bytes / self.times.median / 1e6


def run_cases(
    cases: Sequence[Case],
    stage: Stage,
    settings: Settings,
    peers: Sequence[Peer],
    keep: Callable[[list[Row]], None] = lambda rows: None,
) -> list[Row]:
    """Run every case, in order. A failure does not stop the others.

    keep: called with all rows before each case, with "not run" for the remaining cases, in case the run is interrupted.
    """
    rows: list[Row] = []
    start = time.monotonic()
    for number, case in enumerate(cases):
        keep(rows + _not_run(cases[number:], "the run ended before it"))
        if settings.minutes is not None and time.monotonic() - start > 60 * settings.minutes:
            rows += _not_run(cases[number:], f"the limit of {settings.minutes:g} minutes had passed")
            break
        rows += run_case(case, stage, settings, peers, seed=number)
        stage.arrays.trim()
    return rows


def _not_run(cases: Sequence[Case], reason: str) -> list[Row]:
    return [Row(case=case, subject=KERNEL, status="not run", reason=reason) for case in cases]


def run_case(case: Case, stage: Stage, settings: Settings, peers: Sequence[Peer], seed: int = 0) -> list[Row]:
    """The rows of a case, the kernel's first. If the kernel is wrong, refused or failing, its row is the only one."""
    try:
        measured = _Measured(case, stage, settings, seed)
    except Unsupported as error:
        return [Row(case=case, subject=KERNEL, status="unsupported", reason=str(error))]
    except AssertionError as error:
        return [Row(case=case, subject=KERNEL, status="wrong", reason=str(error))]
    except (OutOfDeviceMemory, MemoryError) as error:
        return [Row(case=case, subject=KERNEL, status="not run", reason=f"it does not fit into memory: {error}")]
    except Exception as error:  # by a lost device or a library; the next case may succeed
        return [Row(case=case, subject=KERNEL, status="failed", reason=f"{type(error).__name__}: {error}")]
    return measured.rows(peers)


class _Measured:
    """A case whose kernel has passed its check."""

    def __init__(self, case: Case, stage: Stage, settings: Settings, seed: int) -> None:
        self._case, self._stage, self._settings = case, stage, settings
        count = min(settings.most_sets, max(2, -(-settings.rotate // case.bytes)))
        self._sets = [make_operands(case, stage.arrays, stage.context, seed) for _ in range(count)]
        recorded = [self._recorded(one) for one in self._sets]
        self._launches = [launch for launch, _ in recorded]
        self._pending: list[Event] = []
        self.kernels = tuple(step.kernel.entry for step in self._launches[0].steps)
        self.checked = self._check([outputs for _, outputs in recorded], seed)

    def rows(self, peers: Sequence[Peer]) -> list[Row]:
        case, stage = self._case, self._stage
        ours: list[Call] = [functools.partial(self._enqueue, launch) for launch in self._launches]
        subjects: dict[str, Sequence[Call]] = {KERNEL: ours}
        refused: list[Row] = []
        for peer in peers:
            status, reason, theirs = self._prepare(peer)
            if theirs:
                subjects[peer.name] = theirs
            else:
                refused.append(Row(case=case, subject=peer.name, status=status, reason=reason))
        plan = _FEW if self._slow else self._settings.plan
        timings = measure_in_turns(subjects, stage.clock, plan, self._settle)
        rows = [self._row(name, timing) for name, timing in timings.items()]
        return [*rows, *refused, self._service()]

    def _recorded(self, one: OperandSet) -> tuple[Launch, dict[str, Any]]:
        """The service's launch for the request with these operands, and the poisoned arrays for its outputs."""
        stage = self._stage
        with stage.recorder.recording() as launches:
            submit(self._case, stage.context, one).result()
        if len(launches) != 1:
            raise GpuActorsError(f"one request became {len(launches)} launches")
        outputs: dict[str, Any] = {}

        def output(name: str, shape: tuple[int, ...], dtype: str) -> Any:
            outputs[name] = stage.arrays.poisoned(shape, dtype)
            return adopted(outputs[name])

        return for_timing(launches[0], output), outputs

    def _enqueue(self, launch: Launch) -> None:
        self._pending.append(self._stage.stream.launch(launch))

    def _settle(self) -> None:
        pending, self._pending = self._pending, []
        for event in pending:
            event.wait()
        self._stage.settled()

    # Checking

    def _check(self, all_outputs: Sequence[dict[str, Any]], seed: int) -> Checked:
        """Launch every set into poisoned arrays. All answers must be finite, and the oracle checks the first one."""
        host = self._stage.arrays.host
        self._stage.arrays.ready()
        start = time.perf_counter()
        for launch in self._launches:
            self._enqueue(launch)
        self._settle()
        self._slow = (time.perf_counter() - start) / len(self._launches) > _SLOW
        for number, outputs in enumerate(all_outputs):
            answer = {name: host(array) for name, array in outputs.items()}
            if number == 0:
                self._answer = answer
            for name, array in answer.items():
                if has_special(array):
                    raise AssertionError(f"{self._case.name}: {name} of set {number} holds NaN or infinities")
        if self._case.deterministic:
            self._check_repeated(all_outputs[0])
        return self._compare(self._sets[0], self._answer, seed)

    def _check_repeated(self, outputs: Mapping[str, Any]) -> None:
        """Repeat the first launch. Its answer must be bit-identical."""
        self._enqueue(self._launches[0])
        self._settle()
        for name, array in outputs.items():
            if self._stage.arrays.host(array).tobytes() != self._answer[name].tobytes():
                raise AssertionError(f"{self._case.name}: {name} is another one the second time")

    def _compare(self, one: OperandSet, outputs: Mapping[str, np.ndarray[Any, Any]], seed: int) -> Checked:
        case, host = self._case, self._stage.arrays.host
        if case.kind == "decode":
            caches = functools.partial(_cached, case, one, host)
            return check_decode(case, host(one["q"]), caches, outputs["out"], seed=seed)
        if case.kind == "backward":
            operands = {name: host(one[name]) for name in ("q", "k", "v", "dout", "out", "lse")}
            return check_backward(case, operands, outputs, seed=seed)
        q, k, v = (host(one[name]) for name in ("q", "k", "v"))
        low = "float8_e4m3fn" if case.dtype.startswith("float8") and _E4M3_KERNELS[0] in self.kernels else None
        return check_forward(case, q, k, v, outputs["out"], weights_dtype=low, seed=seed)

    # Timing

    def _prepare(self, peer: Peer) -> tuple[str, str | None, Sequence[Call]]:
        """(status, reason, calls) of a peer. No calls if it cannot be timed."""
        obstacle = peer.obstacle()
        if obstacle is not None:
            return "not run", obstacle, ()
        try:
            prepared = peer.prepare(self._case, self._sets, self._stage.handle)
            outputs = prepared.outputs()
        except Refuses as refusal:
            return "unsupported", str(refusal), ()
        except Exception as error:  # a library may raise anything
            return "failed", f"{type(error).__name__}: {error}", ()
        for name, theirs in outputs.items():
            if not agrees(self._case, self._answer[name], theirs):
                return "wrong", f"its {name} is not ours, which was checked", ()
        return "timed", None, prepared.calls

    def _row(self, name: str, timing: Timing) -> Row:
        row = Row(case=self._case, subject=name, status="timed", times=timing.times, held=timing.held)
        if timing.error is not None:
            row.status, row.reason = "failed", timing.error
        if name == KERNEL:
            row.kernels, row.checked = self.kernels, self.checked
        return row

    def _service(self) -> Row:
        settings = self._settings
        row = Row(case=self._case, subject=SERVICE, status="timed", kernels=self.kernels, checked=self.checked)
        try:
            requests = min(_FEW_REQUESTS, settings.requests) if self._slow else settings.requests
            alone, rate = asyncio.run(self._awaited(requests, settings.in_flight))
        except Exception as error:
            row.status, row.reason = "failed", f"{type(error).__name__}: {error}"
        else:
            row.times, row.requests_per_second = quantiles(alone), rate
        return row

    async def _awaited(self, requests: int, in_flight: int) -> tuple[list[float], float]:
        """The milliseconds of each request awaited alone, and the requests per second with several in flight."""
        case, context = self._case, self._stage.context
        rotated = itertools.cycle(self._sets)
        for one in self._sets:
            await submit(case, context, one)
        alone: list[float] = []
        for _ in range(requests):
            start = time.perf_counter()
            await submit(case, context, next(rotated))
            alone.append((time.perf_counter() - start) * 1e3)
        rounds = -(-requests // in_flight)

        async def one_after_another() -> None:
            for _ in range(rounds):
                await submit(case, context, next(rotated))

        start = time.perf_counter()
        await asyncio.gather(*(one_after_another() for _ in range(in_flight)))
        return alone, rounds * in_flight / (time.perf_counter() - start)


def _cached(case: Case, one: OperandSet, host: Callable[[Any], Any], number: int) -> tuple[Any, Any]:
    """k and v of one sequence of a decode, gathered from its pages."""
    k, v = (
        np.concatenate([host(one[name][int(page)]) for page in one["pages"][number]])[: case.keys]
        for name in ("k_cache", "v_cache")
    )
    return k, v
