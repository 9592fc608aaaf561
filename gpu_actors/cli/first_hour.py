"""The first hour on a GPU: whether kernels compute correctly on it, how fast they are, and what to do if not.

requests ──> proofs of their kernels ──> a copy and five cases of attention ──> lines: verdict, finding, advice
"""

from __future__ import annotations

import contextlib
import dataclasses
import getpass
import json
import re
import time
import zipfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias

import ml_dtypes
import numpy as np

from gpu_actors.bench import environment
from gpu_actors.bench.cases import first_cases
from gpu_actors.bench.ceilings import REPEATS, Ceilings
from gpu_actors.bench.peers import peers_for
from gpu_actors.bench.report import figures
from gpu_actors.bench.stage import Opened, open_stage
from gpu_actors.bench.suite import KERNEL, Row, run_case
from gpu_actors.cli.output import error_sentence, write_note, write_table
from gpu_actors.devices.cuda import attention_obstacle
from gpu_actors.errors import ContextLost, GpuActorsError, OutOfDeviceMemory, Unqualified
from gpu_actors.handles.gpu_context import GpuContext
from gpu_actors.options import ContextOptions
from gpu_actors.tracing.events import TraceEvent

__all__ = ["Finding", "FirstHour", "examine", "judge_cases", "write_bundle", "write_page"]

Verdict: TypeAlias = Literal["works", "slow", "wrong", "failed", "not run"]

SLOWER = 1.5
"""A kernel is slow if it takes more than this many times as long as torch takes for the same case in the same run."""
LEAST_OF_COPY = 0.5
"""A decode is slow if it reads its cache at less than this share of the copy's bandwidth."""

_WRONG = (
    "another kernel answers in its place, or requests raise Unqualified; run this again with --bundle FILE and report "
    "the file, whose .npz files gpu_actors.testing.replay repeats without a GPU"
)
_LOST = (
    "look for Xid errors in dmesg, then run this again; if the device is lost again, restart the machine or use "
    "another GPU, and report the file of --bundle FILE"
)
_MEMORY = (
    "end other programs that use the GPU (nvidia-smi lists them) or use a larger GPU or MIG slice, and run this again"
)
_FAILED = "gpu-actors doctor says what is missing here; if nothing is, report the file of --bundle FILE"
_SLOW = (
    "see that no other program uses the GPU and that its clocks are not limited (nvidia-smi -q -d PERFORMANCE), and "
    "run this again; gpu-actors bench measures more cases"
)


@dataclass(frozen=True, slots=True)
class Finding:
    """A line of the page.

    advice: what to do, or empty if nothing needs it.
    """

    name: str
    verdict: Verdict
    found: str
    advice: str = ""


@dataclass(slots=True)
class FirstHour:
    """The findings of `examine`.

    gpu: the GPU's properties; empty if the device is the host, whose times say nothing about a GPU.
    kernels: an entry for each variant that was proved or quarantined. evidence: paths of files that `replay` takes.
    timings: as `gpu-actors bench --json` prints them.
    """

    device: str
    gpu: dict[str, Any] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    kernels: list[dict[str, Any]] = field(default_factory=list)
    timings: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def works(self) -> bool:
        """Whether nothing is wrong and nothing has failed. A slow kernel works."""
        return not any(finding.verdict in ("wrong", "failed") for finding in self.findings)

    @property
    def evidence(self) -> list[str]:
        return sorted({entry["evidence"] for entry in self.kernels if entry["evidence"]})

    def record(self) -> dict[str, Any]:
        return {"works": self.works, "environment": environment(), **dataclasses.asdict(self)}


def examine(device: str, options: ContextOptions) -> FirstHour:
    """Prove the usual kernels on a device and time it, on a GPU beside torch. Errors of the device become findings.

    device: "cuda", "cuda:N", "emulated" or "mock". options: the context's; ``qualify`` and ``on_event`` are replaced.
    """
    began, hour, events = time.monotonic(), FirstHour(device), list[TraceEvent]()
    options = dataclasses.replace(options, qualify="all", on_event=events.append)
    measured: list[Finding] = []
    lost = False
    try:
        if device.startswith("cuda") and (obstacle := attention_obstacle(int(device.partition(":")[2] or 0))):
            raise GpuActorsError(obstacle)
        with open_stage(device, options) as opened:
            hour.device, hour.gpu = opened.stage.context.info.name, opened.gpu
            measured.append(_copied(opened.ceilings))
            measured.extend(_failures(opened))
            rows = list(_rows(opened))
            hour.timings = figures("first hour", rows, opened.settings, opened.ceilings, opened.gpu)
            measured.extend(judge_cases(rows, opened.ceilings, bool(opened.gpu)))
            lost = _is_lost(opened)
    except Exception as error:  # of libraries too: on a lost device they may raise anything
        if not lost:
            measured.append(_failure("context", error))
    if lost:
        measured.append(Finding("the rest", "not run", "the device was lost before it"))
    hour.kernels = [_kernel(event) for event in events if event.name in ("kernel.qualified", "kernel.quarantined")]
    hour.findings = [*_proofs(hour.kernels), *measured]
    hour.seconds = round(time.monotonic() - began, 1)
    return hour


def _is_lost(opened: Opened) -> bool:
    return opened.stage.context.health().state == "failed"


# Proofs


def _failures(opened: Opened) -> Iterator[Finding]:
    """Send a request of each kind, so that its kernels are proved. Yields a finding for each that fails."""
    context, small = opened.stage.context, not opened.gpu
    for dtype in ("float16",) if small else ("float16", "bfloat16"):
        for dim in (64,) if small else (64, 128):
            for name, request in (("prompts and gradients", _attend), ("appending and decoding", _decode)):
                try:
                    request(context, dtype, dim)
                except GpuActorsError as error:
                    yield _failure(f"{name}, {dtype}, head_dim {dim}", error)
                    if _is_lost(opened):
                        return


def _rows_of(dtype: str, dim: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(0).standard_normal((1, 70, 4, dim)).astype(getattr(ml_dtypes, dtype, dtype))


def _attend(context: GpuContext, dtype: str, dim: int) -> None:
    x = _rows_of(dtype, dim)
    result = context.flash_attn.forward(x, x, x, causal=True, return_lse=True).result()
    context.flash_attn.backward(x, x, x, x, result.out, result.lse, causal=True).result()


def _decode(context: GpuContext, dtype: str, dim: int) -> None:
    x = _rows_of(dtype, dim)
    with context.kv_cache(num_blocks=4, page_size=64, kv_heads=4, head_dim=dim, dtype=dtype) as cache:
        sequence = cache.create().result()
        cache.attend(x[:, :1], [sequence], k=x[:, :1], v=x[:, :1]).result()


def _kernel(event: TraceEvent) -> dict[str, Any]:
    names = ("kernel", "variant", "experiments", "seconds", "problem", "reason", "evidence")
    return {"qualified": event.name == "kernel.qualified"} | {name: event.fields.get(name) for name in names}


def _proofs(kernels: Sequence[dict[str, Any]]) -> Iterator[Finding]:
    if not kernels:
        yield Finding("kernels", "not run", "no kernel was proved")
    counts = Counter(entry["kernel"] for entry in kernels if entry["qualified"])
    for name, count in sorted(counts.items()):
        proofs = [entry for entry in kernels if entry["qualified"] and entry["kernel"] == name]
        found = (
            f"{sum(entry['experiments'] or 0 for entry in proofs)} small problems right, in {_count(count, 'variant')}"
        )
        yield Finding(name, "works", f"{found}, {sum(entry['seconds'] or 0.0 for entry in proofs):.1f} s")
    for entry in kernels:
        if not entry["qualified"]:
            problem = f" on {entry['problem']}" if entry["problem"] else ""
            yield Finding(entry["kernel"], "wrong", f"quarantined: {entry['reason']}{problem}", _WRONG)


def _failure(name: str, error: Exception) -> Finding:
    advice = _FAILED
    for kind, better in ((ContextLost, _LOST), (OutOfDeviceMemory, _MEMORY), (Unqualified, _WRONG)):
        if isinstance(error, kind):
            advice = better
    return Finding(name, "failed", f"{type(error).__name__}: {error_sentence(error)}", advice)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"


# Timings


def _copied(ceilings: Ceilings) -> Finding:
    if ceilings.copy is None:
        advice = _MEMORY if "out of memory" in ceilings.how.lower() else _FAILED
        return Finding("copy", "failed", f"it could not be timed: {ceilings.how}", advice)
    return Finding("copy", "works", f"{ceilings.copy:.0f} GB/s, read and written (median of {REPEATS})")


def _rows(opened: Opened) -> Iterator[Row]:
    """The rows of each case, until the device is lost."""
    for number, case in enumerate(first_cases(small=not opened.gpu)):
        if _is_lost(opened):
            return  # without freeing memory: a lost device may raise anything
        beside = [peer for peer in peers_for(case.kind) if peer.module == "torch"] if opened.gpu else []
        opened.stage.arrays.trim()
        rows = run_case(case, opened.stage, opened.settings, beside, seed=number)
        if _is_lost(opened):
            rows[0].status = "lost"
        yield from rows


def judge_cases(rows: Sequence[Row], ceilings: Ceilings, on_gpu: bool) -> Iterator[Finding]:
    """Yield a finding for each case. No case is slow on the host, or without another time of the same run."""
    for row in rows:
        if row.subject == KERNEL:
            yield _case(
                row, [one for one in rows if one.case == row.case and one.subject.startswith("torch")], ceilings, on_gpu
            )


def _case(row: Row, beside: Sequence[Row], ceilings: Ceilings, on_gpu: bool) -> Finding:
    name = f"{row.case.kind} {row.case.name}"
    if row.times is None:
        verdicts: dict[str, tuple[Verdict, str]] = {
            "wrong": ("wrong", _WRONG),
            "not run": ("failed", _MEMORY),
            "lost": ("failed", _LOST),
        }
        # A launch that finds no memory while it is timed leaves only the name of its error.
        memory = row.status == "failed" and (row.reason or "").startswith(OutOfDeviceMemory.__name__)
        verdict, advice = verdicts.get(row.status, ("failed", _MEMORY if memory else _FAILED))
        return Finding(name, verdict, row.reason or row.status, advice)
    if not on_gpu:
        return Finding(name, "works", _times(row))
    found, slow = f"{_times(row)}, {row.tflops:.1f} TFLOP/s, {row.gbs:.0f} GB/s", False
    if row.case.kind == "decode":
        if ceilings.copy and row.gbs is not None:
            share = row.gbs / ceilings.copy
            found, slow = f"{found}; {share:.0%} of the copy's bandwidth", share < LEAST_OF_COPY
    else:
        timed = [one for one in beside if one.times is not None]
        best = min(timed, key=lambda one: one.times.median if one.times else 0.0, default=None)
        if best is not None and best.times is not None:
            found, slow = f"{found}; {best.subject} {_times(best)}", row.times.median > SLOWER * best.times.median
        else:
            found = f"{found}; no torch here to compare it with"
    return Finding(name, "slow", found, _SLOW) if slow else Finding(name, "works", found)


def _times(row: Row) -> str:
    assert row.times is not None
    return f"{row.times.median:.4f} ms (median of {row.times.n})"


# Page and bundle


def write_page(hour: FirstHour) -> None:
    """Write a table to standard output, and to standard error the duration and a note if the times are not a GPU's."""
    said: set[str] = set()
    rows = []
    for finding in hour.findings:
        advice = "" if finding.advice in said or not finding.advice else f"\n-> {finding.advice}"
        said.add(finding.advice)
        rows.append((finding.name, finding.verdict, f"{finding.found}{advice}"))
    write_table(
        ("what", "verdict", "found"), rows, title=f"{hour.device}: {'works' if hour.works else 'does not work'}"
    )
    if not hour.gpu:
        write_note("this device is the CPU: its times say nothing of a GPU, so none is called slow")
    write_note(f"{hour.seconds:.0f} s")


def write_bundle(hour: FirstHour, path: Path) -> None:
    """Write a zip file with report.json and the evidence, whose arrays were drawn here. Raises OSError.

    It names neither the home folder nor the working folder nor the user.
    """
    record = hour.record()
    for entry in record["kernels"]:
        entry["evidence"] = entry["evidence"] and f"evidence/{Path(entry['evidence']).name}"
    text = json.dumps(_anonymous(record), indent=2, allow_nan=False)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as bundle:
        bundle.writestr("report.json", text)
        for file in hour.evidence:
            with contextlib.suppress(FileNotFoundError):  # the cache keeps only the latest evidence
                bundle.write(file, f"evidence/{Path(file).name}")


def _anonymous(value: Any) -> Any:
    """A value for JSON whose texts name neither the user nor the user's folders."""
    if isinstance(value, dict):
        return {name: _anonymous(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_anonymous(each) for each in value]
    if not isinstance(value, str):
        return value
    for folder, short in ((Path.home(), "~"), (Path.cwd(), ".")):
        if folder != folder.parent:  # the root folder is in every path
            value = value.replace(str(folder), short)
    names = "|".join(re.escape(name) for name in {Path.home().name, getpass.getuser()} if name)
    return re.sub(rf"(?<=[/\\])(?:{names})(?![\w.-])", "user", value) if names else value
