"""Replay: repeats the experiment that put a kernel into quarantine, on the emulated device."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from gpu_actors.devices.cuda import CudaDevice
from gpu_actors.devices.emulation.emulated_api import EmulatedApi
from gpu_actors.devices.interface import Kernels
from gpu_actors.errors import InvalidRequest, LaunchError
from gpu_actors.options import ContextOptions, EmulationOptions
from gpu_actors.qualification.evidence import read_evidence
from gpu_actors.qualification.experiment import ProofFailed
from gpu_actors.qualification.experiments import experiments_of

__all__ = ["Replay", "replay"]


class Replay(NamedTuple):
    """The result of a replay.

    kernel, arch: the kernel's name and architecture. problem: the problem, as text. reason: how wrong the kernel was on
    its machine. emulated: how wrong the same source is on the emulated device, "" if it agrees with the oracle.
    """

    kernel: str
    arch: str
    problem: str
    reason: str
    emulated: str

    def __str__(self) -> str:
        here = f"it is wrong here too, {self.emulated}" if self.emulated else "here it agrees with the oracle"
        return f"{self.kernel} ({self.arch}) on {self.problem}\nthere: {self.reason}\non the emulated device {here}"


def replay(path: str | os.PathLike[str], emulation: EmulationOptions | None = None) -> Replay:
    """Repeat the experiment of a quarantined kernel's evidence, an .npz file, on the emulated device.

    If the kernel is wrong here too, its source is at fault; otherwise the compiler, the driver or the machine is.
    emulation: how the device behaves. Raises `InvalidRequest` for a file that is no evidence, or whose experiment does
    not exist in this version of the package; OSError; and `CompileError`.
    """
    try:
        evidence = read_evidence(Path(path))
    except ValueError as error:
        raise InvalidRequest("path", os.fspath(path), str(error)) from error
    variant, options = evidence.variant, ContextOptions()
    device = CudaDevice(0, options, EmulatedApi(variant.arch, emulation or EmulationOptions(), options))
    try:
        stream = device.open_stream("replay")
        for experiment in experiments_of(variant, device):
            if experiment.text != evidence.problem or not experiment.takes(evidence.inputs):
                continue
            kernels = Kernels(device.build(other.source, other.arch) for other in experiment.variants)
            emulated = ""
            try:
                experiment.prove(stream, kernels, options.hang_limit("emulated"))
            except ProofFailed as error:
                emulated = str(error)
            except LaunchError as error:
                emulated = f"its launch failed: {error}"
            return Replay(variant.kernel, variant.arch, evidence.problem, evidence.reason, emulated)
    finally:
        device.close()
    raise InvalidRequest("path", os.fspath(path), "is evidence of another version of this package")
