"""``gpu-actors doctor``: what is installed here, what would run where and why, and whether it really does."""

from __future__ import annotations

import asyncio
import dataclasses
import time

import typer

from gpu_actors.cli.output import DeviceOption, JsonOption, error_sentence, write_json, write_table
from gpu_actors.cli.probes import Check, DeviceVerdict, device_verdicts, run_probes

__all__ = ["doctor"]

TRIAL_TIMEOUT = 120.0
"""Seconds; the emulated device may have to build its kernel first."""


def doctor(as_json: JsonOption = False, device: DeviceOption = "auto") -> None:
    """Look at this machine: what is installed, what each device would run, what to install.

    Ends with one small attention request on DEVICE; exits with 0 if that was answered, with 1 if not.
    """
    from gpu_actors.devices.select import check_device

    check_device(device)
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


async def _trial(device: str) -> Check:
    """One request, start to end, because a device that is listed need not answer."""
    name = f"trial on {device}"
    try:
        import numpy as np

        from gpu_actors.context import open_context

        q = np.ones((1, 16, 2, 64), np.float16)
        async with open_context(device) as context:
            start = time.perf_counter()
            output = await context.flash_attn.forward(q, q, q, timeout=TRIAL_TIMEOUT)
            milliseconds = (time.perf_counter() - start) * 1e3
            # Equal rows of v: whatever the weights, their mean is that row.
            if not np.allclose(output.out.astype(np.float32), 1.0, atol=1e-2):
                return Check(name, "problem", f"{context.info.name} answered with wrong numbers")
            return Check(name, "ok", f"{context.info.name} answered in {milliseconds:.1f} ms")
    except Exception as error:
        return Check(name, "problem", error_sentence(error))


def _write_report(checks: tuple[Check, ...], verdicts: list[DeviceVerdict]) -> None:
    def detail(check: Check) -> str:
        return f"{check.detail}\n-> {check.hint}" if check.hint else check.detail

    write_table(("what", "state", "found"), [(check.name, check.state, detail(check)) for check in checks])
    write_table(
        ("device", "usable", "would run", "because"),
        [(verdict.device, "yes" if verdict.usable else "no", verdict.runs, verdict.why) for verdict in verdicts],
    )
