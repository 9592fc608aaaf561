"""Everything that needs a GPU, one part per command: python tests/gpu/run.py --out DIR --part doctor|kernels|...

The parts are doctor, kernels, service and benchmarks. The first is `gpu-actors doctor --launch`, as a user runs it: it
proves the usual kernels, and times a copy and five cases. A part takes 9 minutes at most (--minutes), the doctor three;
without --part all of them run, one after another. The most valuable steps come first, each in a process of its own, and
a failed step does not keep the rest from running.

DIR gets summary.json, results.tar.gz and the benchmarks' plots, and nothing else. The archive holds junit XML, the
benchmarks' JSON, the doctor's bundle and a log of each step. All are written anew after each step, so that they are
there if the command is killed. Exit code 0 says that every step ran and passed: a step that was cut off, had no time
left, or in which nothing was executed has not passed.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
import xml.etree.ElementTree as ElementTree
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

ROOT = Path(__file__).resolve().parents[2]
PATIENCE = 15.0  # seconds that a step has to write its results after it is told to stop
MOST_PROCESSES = 12  # that share the GPU: each takes half a gigabyte of its memory
MOST_LOG = 1 << 20  # the archive takes the last bytes of a step's log, up to this many

Status = Literal["passed", "failed", "cut off", "nothing ran", "not run"]


@dataclass(frozen=True)
class Step:
    """arguments: of pytest, ``gpu-actors bench`` or ``gpu-actors doctor``. seconds: at most.

    spread: whether its tests may share the GPU with each other. Most of their time is the compiler's.
    """

    name: str
    kind: Literal["doctor", "tests", "bench"]
    arguments: tuple[str, ...]
    seconds: float
    spread: bool = False


_DOCTOR = (Step("doctor", "doctor", ("--launch", "--device", "cuda"), 180),)
_KERNELS = (
    Step("conformance", "tests", ("tests/emulation",), 120, spread=True),
    Step("kernels", "tests", ("tests/gpu/test_kernels.py",), 120, spread=True),
    Step("forward", "tests", ("tests/gpu/test_forward.py", "tests/gpu/test_forward_sm90_on_gpu.py"), 130, spread=True),
    Step("decode", "tests", ("tests/gpu/test_decode.py",), 70, spread=True),
    Step("modifications", "tests", ("tests/gpu/test_modifications.py",), 60, spread=True),
    Step("invariance", "tests", ("tests/gpu/test_invariance_on_gpu.py",), 25),
)
_SERVICE = (
    Step("device", "tests", ("tests/gpu/test_cuda_hardware.py",), 90),
    Step("streams", "tests", ("tests/gpu/test_streams.py", "tests/gpu/test_service.py"), 80),
    Step("kv-cache", "tests", ("tests/gpu/test_kv_cache_on_gpu.py", "tests/gpu/test_kv_growth.py"), 80),
    Step("graphs", "tests", ("tests/gpu/test_graphs.py", "tests/gpu/test_captures_on_gpu.py"), 50),
    Step("torch", "tests", ("tests/gpu/test_torch_attention_on_gpu.py",), 60),
    Step("own-kernels", "tests", ("tests/gpu/test_own_kernels_on_gpu.py",), 40),
    Step("qualification", "tests", ("tests/gpu/test_qualification_on_gpu.py",), 35),
    Step("sanitizer", "tests", ("tests/gpu/test_sanitizer.py",), 90),
)
# Each begins with its most informative cases, and stops by itself with the results so far when its time is over.
_BENCHMARKS = (
    Step("bench-forward", "bench", ("forward",), 200),
    Step("bench-decode", "bench", ("decode",), 130),
    Step("bench-backward", "bench", ("backward",), 170),
)


def _others() -> tuple[Step, ...]:
    """A step of the test files that no other step names, so that a new file is run at once."""
    named = {argument for step in (*_KERNELS, *_SERVICE) for argument in step.arguments}
    files = sorted(f"tests/gpu/{path.name}" for path in Path(__file__).parent.glob("test_*.py"))
    left = tuple(name for name in files if name not in named)
    return (Step("others", "tests", left, 60),) if left else ()


Parts = Mapping[str, Sequence[Step]]
PARTS: Parts = {
    "doctor": _DOCTOR,
    "kernels": _KERNELS,
    "service": (*_SERVICE, *_others()),
    "benchmarks": _BENCHMARKS,
}


@dataclass
class Outcome:
    """executed: tests that ran, subjects that were timed, or findings. skipped: those that were not run."""

    name: str
    status: Status
    seconds: float = 0.0
    executed: int = 0
    failed: int = 0
    skipped: int = 0
    remark: str = ""
    failures: list[str] = field(default_factory=list)


class Report:
    """The outcomes so far, written to the output folder. Steps that have not ended are "not run".

    work: where the steps leave their files until they are archived.
    """

    def __init__(self, out: Path, work: Path, steps: Sequence[Step]) -> None:
        self.outcomes = {step.name: Outcome(step.name, "not run", remark="the command had ended") for step in steps}
        self._began = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
        self._out, self._work = out, work
        for old in (*out.glob("*.png"), out / "results.tar.gz"):  # of an earlier run
            old.unlink(missing_ok=True)
        self.write()

    @property
    def passed(self) -> bool:
        return all(outcome.status == "passed" for outcome in self.outcomes.values())

    def add(self, outcome: Outcome) -> None:
        self.outcomes[outcome.name] = outcome
        self.write()
        say(outcome)

    def write(self) -> None:
        steps = [asdict(outcome) for outcome in self.outcomes.values()]
        summary = json.dumps({"began": self._began, "passed": self.passed, "steps": steps}, indent=2) + "\n"
        self._put("summary.json", lambda path: path.write_text(summary))
        self._put("results.tar.gz", self._pack)
        for plot in self._work.glob("*.png"):
            self._put(plot.name, functools.partial(shutil.copyfile, plot))

    def _pack(self, path: Path) -> None:
        with tarfile.open(path, "w:gz") as archive:
            for found in sorted(self._work.iterdir()):
                if found.is_dir() or found.suffix == ".png":
                    continue
                if found.suffix == ".log":
                    shorten(found)
                archive.add(found, found.name)

    def _put(self, name: str, write: Callable[[Path], object]) -> None:
        """Write a file whole or not at all, even if the command is killed meanwhile."""
        partial = self._out / f".{name}"
        try:
            write(partial)
            partial.replace(self._out / name)
        finally:
            partial.unlink(missing_ok=True)


def shorten(log: Path) -> None:
    size = log.stat().st_size
    if size <= MOST_LOG:
        return
    with log.open("rb") as file:
        file.seek(size - MOST_LOG)
        last = file.read()
    log.write_bytes(b"(the first %d bytes are left out)\n" % (size - MOST_LOG) + last)


def run_steps(
    steps: Sequence[Step],
    work: Path,
    minutes: float,
    command: Callable[[Step, Path, float], list[str]],
    tell: Callable[[Outcome], None],
) -> None:
    """Run each step in turn within what is left of the minutes. command: gives a step's command for its seconds."""
    until = time.monotonic() + 60 * minutes
    for step in steps:
        seconds = min(step.seconds, until - time.monotonic() - PATIENCE)
        if seconds <= 0:
            outcome = Outcome(step.name, "not run", remark=f"the {minutes:g} minutes had passed")
        else:
            outcome = run_step(step, work, command(step, work, seconds), seconds)
        tell(outcome)


def run_step(step: Step, work: Path, command: list[str], seconds: float) -> Outcome:
    suffix, count = _RESULTS[step.kind]
    result = work / f"{step.name}.{suffix}"
    began = time.monotonic()
    with (work / f"{step.name}.log").open("w") as log:
        log.write(" ".join(command) + "\n")
        log.flush()
        code = _within(command, log, seconds)
    outcome = Outcome(step.name, "passed", seconds=round(time.monotonic() - began, 1))
    try:
        count(result, outcome)
    except (OSError, ValueError, KeyError, ElementTree.ParseError, zipfile.BadZipFile) as error:
        outcome.remark = f"left no result that can be read: {error}"
    outcome.status = judge(outcome, code)
    return outcome


def judge(outcome: Outcome, code: int | None) -> Status:
    """code: the exit code; None: the step was cut off."""
    if code is None:
        return "cut off"
    if outcome.failed:
        return "failed"
    if not outcome.executed:
        # pytest exits with 5 if it found no test, and with 0 if it skipped them all.
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
    """From a benchmark's JSON. Only our own rows can fail; a missing kernel has run nothing."""
    for row in json.loads(result.read_text())["rows"]:
        ours = row["subject"].startswith("gpu_actors")
        if row["status"] == "timed":
            outcome.executed += ours
        elif ours and row["status"] in ("wrong", "failed"):
            outcome.failed += 1
            outcome.failures.append(f"{row['case']['name']}, {row['subject']}: {row['reason']}")
        else:
            outcome.skipped += 1


def count_findings(result: Path, outcome: Outcome) -> None:
    """From the doctor's bundle. A slow finding counts as working."""
    with zipfile.ZipFile(result) as bundle:
        findings = json.loads(bundle.read("report.json"))["findings"]
    for finding in findings:
        if finding["verdict"] == "not run":
            outcome.skipped += 1
            continue
        outcome.executed += 1
        if finding["verdict"] in ("wrong", "failed"):
            outcome.failed += 1
            outcome.failures.append(f"{finding['name']}: {finding['found']}")


_RESULTS: Mapping[str, tuple[str, Callable[[Path, Outcome], None]]] = {
    "doctor": ("zip", count_findings),
    "tests": ("xml", count_tests),
    "bench": ("json", count_rows),
}


def _within(command: list[str], log: Any, seconds: float) -> int | None:
    """The exit code, or None if it had to be stopped. SIGINT comes first, so that pytest writes its results."""
    # In the background of a shell, SIGINT is ignored, and a child would inherit that.
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


def real_command(step: Step, work: Path, seconds: float) -> list[str]:
    if step.kind == "doctor":
        bundle = str(work / f"{step.name}.zip")
        return [sys.executable, "-m", "gpu_actors.cli", "doctor", *step.arguments, "--bundle", bundle]
    if step.kind == "bench":
        # The benchmark stops by itself a little earlier and keeps every measured case.
        minutes = max(0.5, (seconds - 30) / 60)
        arguments = [*step.arguments, "--minutes", f"{minutes:.2f}", "--json", "--out", str(work / f"{step.name}.json")]
        if importlib.util.find_spec("matplotlib") is not None:
            arguments += ["--plot", str(work / f"{step.name}.png")]
        return [sys.executable, "-m", "gpu_actors.cli", "bench", *arguments]
    junit = f"--junitxml={work / f'{step.name}.xml'}"
    # The project's own options ask for pytest-xdist, which may be missing here.
    options = ["-o", "addopts=--strict-markers", "--durations=10"]
    if step.spread and importlib.util.find_spec("xdist") is not None:
        options += ["-n", str(max(1, min(MOST_PROCESSES, len(os.sched_getaffinity(0)) - 2)))]
    # Warnings of the installed torch are no failures of ours.
    return [sys.executable, "-m", "pytest", "-q", *options, "-W", "default", "-m", "gpu", junit, *step.arguments]


def obstacle() -> str | None:
    """Why nothing can run here, or None."""
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
    parts: Parts = PARTS,
    command: Callable[[Step, Path, float], list[str]] = real_command,
    find_obstacle: Callable[[], str | None] = obstacle,
) -> int:
    options, chosen = _options(arguments, parts)
    out = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    every = [step for steps in chosen.values() for step in steps]
    with tempfile.TemporaryDirectory(prefix="gpu-actors-run-") as folder:
        work = Path(folder)
        os.environ.setdefault("GPU_ACTORS_TEST_CACHE_DIR", str(_private(work / "cubins")))
        os.environ.setdefault("GPU_ACTORS_CACHE_DIR", os.environ["GPU_ACTORS_TEST_CACHE_DIR"])
        report = Report(out, work, every)
        why = find_obstacle()
        if why is not None:
            sys.stdout.write(f"there is no GPU to be used here, so nothing was run: {why}\n")
            report.outcomes = {step.name: Outcome(step.name, "not run", remark=why) for step in every}
            report.write()
        for steps in () if why is not None else chosen.values():
            run_steps(steps, work, options.minutes, command, report.add)
    found = [outcome.status for outcome in report.outcomes.values()]
    counts = {status: found.count(status) for status in sorted(set(found))}
    sys.stdout.write(f"{'passed' if report.passed else 'NOT PASSED'}: {counts}; see {out / 'summary.json'}\n")
    return 0 if report.passed else 1


def _options(arguments: Sequence[str] | None, parts: Parts) -> tuple[argparse.Namespace, Parts]:
    """The options, and the steps to run of each part."""
    names = [step.name for steps in parts.values() for step in steps]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for what is found")
    parser.add_argument("--part", choices=list(parts), help="only this part (default: all, one after another)")
    parser.add_argument("--minutes", type=float, default=9.0, help="for a part (default: %(default)s)")
    parser.add_argument("--only", nargs="+", metavar="STEP", help=f"of {', '.join(names)}")
    options = parser.parse_args(arguments)
    taken = {part: steps for part, steps in parts.items() if options.part in (None, part)}
    there = {step.name for steps in taken.values() for step in steps}
    if unknown := set(options.only or ()) - there:
        where = f" in part {options.part}" if options.part else ""
        parser.error(f"no step{where} is called {', '.join(sorted(unknown))}")
    wanted = set(options.only or there)
    return options, {part: [step for step in steps if step.name in wanted] for part, steps in taken.items()}


def _private(folder: Path) -> Path:
    # Code is loaded from there, so the cache refuses a folder that others can write to.
    folder.mkdir(mode=0o700, exist_ok=True)
    folder.chmod(0o700)
    return folder


if __name__ == "__main__":
    raise SystemExit(main())
