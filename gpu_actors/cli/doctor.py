"""``gpu-actors doctor``: what is installed here, what each device would run and why, and whether DEVICE answers."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import time
from pathlib import Path
from typing import Annotated

import typer

from gpu_actors.cli.output import (
    DeviceOption,
    JsonOption,
    chosen_device,
    error_sentence,
    write_json,
    write_note,
    write_table,
)
from gpu_actors.cli.probes import Check, DeviceVerdict, device_verdicts, run_probes
from gpu_actors.errors import InvalidRequest

__all__ = ["doctor"]

TRIAL_TIMEOUT = 120.0
"""Seconds; the emulated device may have to build its kernel first."""


def doctor(
    as_json: JsonOption = False,
    device: DeviceOption = "auto",
    launch: Annotated[
        bool, typer.Option("--launch", help="Prove and time the usual kernels on DEVICE instead (two minutes).")
    ] = False,
    bundle: Annotated[
        Path | None, typer.Option("--bundle", help="With --launch: write a zip file to report, without data of yours.")
    ] = None,
) -> None:
    """Look at this machine: what is installed, what each device would run, what to install.

    Ends with one small attention request on DEVICE; exits with 0 if it was answered, with 1 if not. With --launch it
    exits with 0 if the kernels work, with 1 if one is wrong or anything failed.
    """
    from gpu_actors.devices.select import check_device

    check_device(device)
    if bundle is not None and not launch:
        raise InvalidRequest("bundle", str(bundle), "needs --launch")
    if launch:
        raise typer.Exit(0 if _launch(device, as_json, bundle) else 1)
    checks = list(run_probes())
    verdicts = device_verdicts()
    trial = asyncio.run(_trial(device))
    usable = trial.state == "ok"
    if as_json:
        write_json(
            {
                "usable": usable,
                "device": device,
                "checks": [dataclasses.asdict(check) for check in (*checks, trial)],
                "devices": [dataclasses.asdict(verdict) for verdict in verdicts],
            }
        )
    else:
        _write_report((*checks, trial), verdicts)
    raise typer.Exit(0 if usable else 1)


def _launch(device: str, as_json: bool, bundle: Path | None) -> bool:
    """Examine a device and print the findings. Returns whether its kernels work."""
    from gpu_actors.cli.first_hour import examine, write_bundle, write_page
    from gpu_actors.options import ContextOptions

    device = chosen_device(device, as_json)
    # Each launch here takes less than a second on a GPU.
    hour = examine(device, ContextOptions(hang_timeout=10.0 if device.startswith("cuda") else None))
    if as_json:
        write_json(hour.record())
    else:
        write_page(hour)
    if bundle is not None:
        write_bundle(hour, bundle)
        write_note(f"{bundle}: {bundle.stat().st_size:,} bytes")
    return hour.works


async def _trial(device: str) -> Check:
    """Make one request from start to end, because a listed device may fail to answer."""
    name = f"trial on {device}"
    try:
        import numpy as np

        from gpu_actors.context import open_context
        from gpu_actors.devices.select import choose_device

        q = np.ones((1, 16, 2, 64), np.float16)
        async with open_context(choose_device(device)[0]) as context:
            start = time.perf_counter()
            output = await context.flash_attn.forward(q, q, q, timeout=TRIAL_TIMEOUT)
            milliseconds = (time.perf_counter() - start) * 1e3
            # All rows of v are equal, so their mean is that row for any weights.
            if not np.allclose(output.out.astype(np.float32), 1.0, atol=1e-2):
                return Check(name, "problem", f"{context.info.name} answered with wrong numbers")
            return Check(name, "ok", f"{context.info.name} answered in {milliseconds:.1f} ms")
    except Exception as error:
        return Check(name, "problem", error_sentence(error))


def _write_report(checks: tuple[Check, ...], verdicts: list[DeviceVerdict]) -> None:
    said: list[str] = []

    def once(hint: str) -> str:
        if not hint or hint in said:
            return ""
        said.append(hint)
        return f"\n-> {hint}"

    def why(verdict: DeviceVerdict) -> str:
        return functools.reduce(lambda text, hint: text.removesuffix(f": {hint}"), said, verdict.why)

    found = [(check.name, check.state, f"{check.detail}{once(check.hint)}") for check in checks]
    write_table(("what", "state", "found"), found)
    write_table(
        ("device", "usable", "would run", "because"),
        [(verdict.device, "yes" if verdict.usable else "no", verdict.runs, why(verdict)) for verdict in verdicts],
    )
