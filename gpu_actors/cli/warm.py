"""``gpu-actors warm``: compiles the standard kernel variants ahead of time, and reports on each."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gpu_actors.attention.problem import DispatchKey
from gpu_actors.cli.output import (
    DeviceOption,
    JsonOption,
    progress_bar,
    write_json,
    write_note,
    write_table,
)

if TYPE_CHECKING:
    from gpu_actors.actors.nvrtc import WarmedVariant
    from gpu_actors.compiling.variant import Variant

__all__ = ["warm"]

DRAIN_TIMEOUT = 0.1
"""Seconds. An interrupted command finishes the compilations that have begun, and starts no others."""


def warm(
    arch: Annotated[
        str | None, typer.Option(help="Exact architecture, such as sm_90a. Default: the device's own.")
    ] = None,
    cache_dir: Annotated[Path | None, typer.Option(help="Folder of the cubins. Default: the user's own.")] = None,
    backward: Annotated[bool, typer.Option("--backward", help="The kernels of gradients, too.")] = False,
    report: Annotated[bool, typer.Option("--report", help="Show every variant, not only a summary.")] = False,
    as_json: JsonOption = False,
    device: DeviceOption = "auto",
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress bar and no summary.")] = False,
) -> None:
    """Compile the kernels that requests will need, so that none waits for a compiler. Needs no GPU.

    With --json it prints a list of variants with key, label, arch, compile_seconds, registers, spill_bytes,
    stack_bytes, shared_bytes (static and dynamic), threads, blocks_per_sm, occupancy and notes (ptxas's C75xx
    remarks).
    """
    rows = [_row(variant) for variant in asyncio.run(_warm(arch, cache_dir, device, backward, quiet))]
    if as_json:
        write_json(rows)
    elif report:
        _write_report(rows)
    if not quiet:
        _write_summary(rows)


async def _warm(
    arch: str | None, cache_dir: Path | None, device: str, backward: bool, quiet: bool
) -> list[WarmedVariant]:
    from gpu_actors.context import open_context
    from gpu_actors.devices.select import choose_device
    from gpu_actors.kernels import variants
    from gpu_actors.kernels.merge import merge_variants
    from gpu_actors.options import ContextOptions

    options = ContextOptions(arch=arch, cache_dir=cache_dir, drain_timeout=DRAIN_TIMEOUT)
    async with open_context(choose_device(device)[0], options) as context:
        wanted = arch or context.info.arch
        keys: list[DispatchKey | Variant] = [*variants.standard_variants(wanted), *variants.kv_variants(wanted)]
        keys += merge_variants(wanted)
        if backward:
            keys += variants.usual_backward_keys(wanted)
        with progress_bar(quiet=quiet) as bar:
            task = bar.add_task("compiling", total=len(keys), rate="")

            def advance(done: int, total: int, key: DispatchKey | Variant) -> None:
                bar.update(task, completed=done, total=total, rate=key.kernel)

            try:
                return await context.nvrtc.warm(keys, progress=advance)
            except asyncio.CancelledError:
                # The user has interrupted the command, and needs no warning that the rest is cancelled.
                logging.getLogger("gpu_actors").setLevel(logging.ERROR)
                raise


def _row(variant: WarmedVariant) -> dict[str, Any]:
    from gpu_actors.kernels.occupancy import occupancy
    from gpu_actors.kernels.variants import block_threads, variant_of

    cubin = variant.cubin
    # A variant has one entry point, whose resources a launch takes.
    resources = cubin.resources[cubin.entry_points[0]]
    macros = variant_of(variant.key).macros
    resources = resources._replace(shared_bytes=resources.shared_bytes + int(macros.get("SHARED_BYTES", 0)))
    threads = block_threads(variant.key)
    fits = occupancy(cubin.arch, resources.registers, resources.shared_bytes, threads)
    return {
        "key": str(variant.key),
        "label": _label(variant.key),
        "arch": cubin.arch,
        "compile_seconds": round(variant.seconds, 4),
        **resources._asdict(),
        "threads": threads,
        "blocks_per_sm": fits.blocks,
        "occupancy": round(fits.warps, 3),
        "notes": list(cubin.notes),
    }


def _label(key: DispatchKey | Variant) -> str:
    """The fields in which a key differs from its kernel's plainest key."""
    if not isinstance(key, DispatchKey):
        return " ".join((key.kernel, *(f"{name}={value}" for name, value in key.macros.items())))
    plain = {"direction": "forward", "alignment": "bottom_right", "gqa_ratio": 1, "num_splits": 1, "page_size": 0}
    always = ("kernel", "layout", "dtype", "head_dim", "mask")
    parts = [str(getattr(key, name)) for name in always]
    # These follow from the dtype and the head_dim unless they differ.
    implied = {"kv_dtype": key.dtype, "head_dim_v": key.head_dim}
    for field in dataclasses.fields(key):
        value = getattr(key, field.name)
        if field.name in (*always, "arch", "out_dtype", "compute"):
            continue
        if value == (plain | implied).get(field.name, False) or value in (None, ""):
            continue
        parts.append(field.name if value is True else f"{field.name}={value}")
    return " ".join(parts)


def _write_report(rows: list[dict[str, Any]]) -> None:
    shown = ("compile_seconds", "registers", "spill_bytes", "stack_bytes", "shared_bytes", "blocks_per_sm", "label")
    write_table(
        ("seconds", "registers", "spills", "stack", "shared", "blocks/SM", "variant", "notes"),
        [[*(row[name] for name in shown), "\n".join(row["notes"]) or "-"] for row in rows],
    )


def _write_summary(rows: list[dict[str, Any]]) -> None:
    spilling = sum(row["spill_bytes"] > 0 for row in rows)
    noted = sum(bool(row["notes"]) for row in rows)
    seconds = sum(row["compile_seconds"] for row in rows)
    write_note(
        f"{len(rows)} variants in the cache; {seconds:.1f} s of compiling and loading in all, "
        f"{spilling} spill registers, {noted} have C75xx notes"
    )
