"""Everything that wants a GPU, in one command: python tests/gpu/run.py --out DIR [--minutes 20]

Conformance of each PTX wrapper, the GPU tests, the benchmarks; the most valuable first, one process a step. What fails
does not keep the rest from running. DIR gets junit XML, the benchmarks' JSON and plots, a log of each step, and
summary.json. Exit code 0 says that every step ran and passed: a step that was cut off, had no time left, or in which
nothing was executed has not passed.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

ROOT = Path(__file__).resolve().parents[2]
PATIENCE = 15.0  # seconds that a step has to write what it found, once it was told to stop

Status = Literal["passed", "failed", "cut off", "nothing ran", "not run"]


@dataclass(frozen=True)
class Step:
    """arguments: of pytest, or of ``gpu-actors bench``. seconds: at most. spread: over several processes, where there
    are the cores and pytest-xdist."""

    name: str
    kind: Literal["tests", "bench"]
    arguments: tuple[str, ...]
    seconds: float
    spread: bool = False


_NAMED = (
    Step("conformance", "tests", ("tests/emulation",), 180, spread=True),
    Step("kernels", "tests", ("tests/gpu/test_kernels.py",), 180, spread=True),
    Step("device", "tests", ("tests/gpu/test_cuda_hardware.py",), 120),
    Step("streams", "tests", ("tests/gpu/test_streams.py", "tests/gpu/test_service.py"), 150),
    Step("bench-forward-quick", "bench", ("forward", "--quick"), 150),
    Step("bench-decode-quick", "bench", ("decode", "--quick"), 120),
    Step("bench-backward-quick", "bench", ("backward", "--quick"), 150),
    Step("kv-cache", "tests", ("tests/gpu/test_kv_cache_on_gpu.py", "tests/gpu/test_kv_growth.py"), 150),
    Step("decode", "tests", ("tests/gpu/test_decode.py",), 150, spread=True),
    Step("graphs", "tests", ("tests/gpu/test_graphs.py",), 120),
    Step("torch", "tests", ("tests/gpu/test_torch_attention_on_gpu.py",), 120),
    Step("modifications", "tests", ("tests/gpu/test_modifications.py",), 120, spread=True),
    Step("forward", "tests", ("tests/gpu/test_forward.py", "tests/gpu/test_forward_sm90_on_gpu.py"), 300, spread=True),
    Step("sanitizer", "tests", ("tests/gpu/test_sanitizer.py",), 300),
    Step("bench-forward", "bench", ("forward",), 400),
    Step("bench-backward", "bench", ("backward",), 300),
    Step("bench-decode", "bench", ("decode",), 300),
)


def _others() -> tuple[Step, ...]:
    """The files of tests that no step names, so that a new one is run at once."""
    named = {argument for step in _NAMED for argument in step.arguments}
    files = sorted(f"tests/gpu/{path.name}" for path in Path(__file__).parent.glob("test_*.py"))
    left = tuple(name for name in files if name not in named)
    return (Step("others", "tests", left, 180),) if left else ()


_WHOLE = tuple(step for step in _NAMED if step.kind == "bench" and "--quick" not in step.arguments)
STEPS = (*(step for step in _NAMED if step not in _WHOLE), *_others(), *_WHOLE)


@dataclass
class Outcome:
    """executed: tests that ran, or subjects that were timed. skipped: tests, or subjects that were not."""

    name: str
    status: Status
    seconds: float = 0.0
    executed: int = 0
    failed: int = 0
    skipped: int = 0
    remark: str = ""
    failures: list[str] = field(default_factory=list)


def run_steps(
    steps: Sequence[Step], out: Path, minutes: float, command: Callable[[Step, Path, float], list[str]]
) -> list[Outcome]:
    """Each step in its turn, with what is left of the minutes. command: what to execute for it within the seconds."""
    outcomes: list[Outcome] = []
    until = time.monotonic() + 60 * minutes
    for step in steps:
        seconds = min(step.seconds, until - time.monotonic() - PATIENCE)
        if seconds <= 0:
            outcome = Outcome(step.name, "not run", remark=f"the {minutes:g} minutes had passed")
        else:
            outcome = run_step(step, out, command(step, out, seconds), seconds)
        outcomes.append(outcome)
        say(outcome)
    return outcomes


def run_step(step: Step, out: Path, command: list[str], seconds: float) -> Outcome:
    result = out / f"{step.name}.{'xml' if step.kind == 'tests' else 'json'}"
    result.unlink(missing_ok=True)  # an earlier run's says nothing of this one
    began = time.monotonic()
    with (out / f"{step.name}.log").open("w") as log:
        log.write(" ".join(command) + "\n")
        log.flush()
        code = _within(command, log, seconds)
    outcome = Outcome(step.name, "passed", seconds=round(time.monotonic() - began, 1))
    try:
        (count_tests if step.kind == "tests" else count_rows)(result, outcome)
    except (OSError, ValueError, KeyError, ElementTree.ParseError) as error:
        outcome.remark = f"left no result that can be read: {error}"
    outcome.status = judge(outcome, code)
    return outcome


def judge(outcome: Outcome, code: int | None) -> Status:
    """code: the exit code, None for a step that was cut off."""
    if code is None:
        return "cut off"
    if outcome.failed:
        return "failed"
    if not outcome.executed:
        # pytest exits with 5 where it found no test, and with 0 where it skipped them all.
        return "failed" if code not in (0, 5) else "nothing ran"
    return "passed" if code == 0 else "failed"


def count_tests(result: Path, outcome: Outcome) -> None:
    """From junit XML."""
    for suite in ElementTree.parse(result).getroot().iter("testsuite"):
        total, failed = int(suite.get("tests", 0)), int(suite.get("failures", 0)) + int(suite.get("errors", 0))
        skipped = int(suite.get("skipped", 0))
        outcome.executed += total - skipped
        outcome.failed += failed
        outcome.skipped += skipped
        for case in suite.iter("testcase"):
            if case.find("failure") is not None or case.find("error") is not None:
                outcome.failures.append(f"{case.get('classname')}::{case.get('name')}")


def count_rows(result: Path, outcome: Outcome) -> None:
    """From a benchmark's JSON. Only our own rows can fail; a kernel that is not there yet has run nothing."""
    for row in json.loads(result.read_text())["rows"]:
        ours = row["subject"].startswith("gpu_actors")
        if row["status"] == "timed":
            outcome.executed += ours
        elif ours and row["status"] in ("wrong", "failed"):
            outcome.failed += 1
            outcome.failures.append(f"{row['case']['name']}, {row['subject']}: {row['reason']}")
        else:
            outcome.skipped += 1


def _within(command: list[str], log: Any, seconds: float) -> int | None:
    """The exit code, or None where it had to be stopped. Interrupted first, so that pytest writes what it has."""
    # Where this runs in the background of a shell, interrupts are ignored, and a child would ignore them, too.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, cwd=ROOT, start_new_session=True)
    finally:
        signal.signal(signal.SIGINT, before)
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        for number in (signal.SIGINT, signal.SIGKILL):
            try:
                os.killpg(process.pid, number)
                process.wait(PATIENCE)
            except (ProcessLookupError, subprocess.TimeoutExpired):
                continue
            break
        return None


def real_command(step: Step, out: Path, seconds: float) -> list[str]:
    if step.kind == "bench":
        # It stops by itself a little earlier, with every case that it has measured.
        minutes = max(0.5, (seconds - 30) / 60)
        arguments = [*step.arguments, "--minutes", f"{minutes:.2f}", "--json", "--out", str(out / f"{step.name}.json")]
        if importlib.util.find_spec("matplotlib") is not None:
            arguments += ["--plot", str(out / f"{step.name}.png")]
        return [sys.executable, "-m", "gpu_actors.cli", "bench", *arguments]
    workers = min(6, (os.cpu_count() or 1) // 2)
    spread = step.spread and workers > 1 and importlib.util.find_spec("xdist") is not None
    junit = f"--junitxml={out / f'{step.name}.xml'}"
    distributed = ("-n", str(workers)) if spread else ()
    # Warnings of whatever torch is there are no failures of ours.
    return [sys.executable, "-m", "pytest", "-q", "-W", "default", "-m", "gpu", junit, *distributed, *step.arguments]


def obstacle() -> str | None:
    """Why nothing can be run here."""
    sys.path.insert(0, str(ROOT))
    from gpu_actors.devices.cuda import cuda_usable

    return cuda_usable()


def say(outcome: Outcome) -> None:
    counts = f"{outcome.executed} executed, {outcome.failed} failed, {outcome.skipped} skipped"
    remark = f" ({outcome.remark})" if outcome.remark else ""
    sys.stdout.write(f"{outcome.status:12}{outcome.name:24}{outcome.seconds:8.1f} s   {counts}{remark}\n")
    for failure in outcome.failures:
        sys.stdout.write(f"{'':12}{failure.splitlines()[0][:200]}\n")
    sys.stdout.flush()


def main(
    arguments: Sequence[str] | None = None,
    steps: Sequence[Step] = STEPS,
    command: Callable[[Step, Path, float], list[str]] = real_command,
    find_obstacle: Callable[[], str | None] = obstacle,
) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for what is found")
    parser.add_argument("--minutes", type=float, default=20.0, help="in all (default: %(default)s)")
    parser.add_argument("--only", nargs="+", metavar="STEP", help=f"of {', '.join(step.name for step in steps)}")
    options = parser.parse_args(arguments)
    if unknown := set(options.only or ()) - {step.name for step in steps}:
        parser.error(f"no step is called {', '.join(sorted(unknown))}")
    chosen = [step for step in steps if not options.only or step.name in options.only]
    out = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("GPU_ACTORS_TEST_CACHE_DIR", str(_private(out / "cubins")))
    os.environ.setdefault("GPU_ACTORS_CACHE_DIR", os.environ["GPU_ACTORS_TEST_CACHE_DIR"])
    why = find_obstacle()
    began = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
    if why is not None:
        sys.stdout.write(f"there is no GPU to be used here, so nothing was run: {why}\n")
        outcomes = [Outcome(step.name, "not run", remark=why) for step in chosen]
    else:
        outcomes = run_steps(chosen, out, options.minutes, command)
    passed = all(outcome.status == "passed" for outcome in outcomes)
    found = {"began": began, "passed": passed, "steps": [asdict(outcome) for outcome in outcomes]}
    (out / "summary.json").write_text(json.dumps(found, indent=2) + "\n")
    counts = {status: sum(o.status == status for o in outcomes) for status in sorted({o.status for o in outcomes})}
    sys.stdout.write(f"{'passed' if passed else 'NOT PASSED'}: {counts}; see {out / 'summary.json'}\n")
    return 0 if passed else 1


def _private(folder: Path) -> Path:
    # Code is loaded from there: the cache refuses a folder that others can write to.
    folder.mkdir(mode=0o700, exist_ok=True)
    folder.chmod(0o700)
    return folder


if __name__ == "__main__":
    raise SystemExit(main())
