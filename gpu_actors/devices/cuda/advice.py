"""What to do on a machine where CUDA does not start or does not load a kernel."""

from __future__ import annotations

import glob
import os
import platform

from gpu_actors.extras import cuda_hint

__all__ = ["NO_DEVICE", "advice", "driver_advice"]

NO_DEVICE = 100
_DENIED = (3, NO_DEVICE, 304, 999)
"""Statuses that the driver may return because the user may not open its files."""
_FILES = ("/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia[0-9]*")

_ADVICE: dict[int, str] = {
    2: "end other programs on this GPU (nvidia-smi lists them), or use a larger GPU or MIG slice",
    3: "look at dmesg for the NVIDIA driver's errors, and restart the machine",
    34: "LD_LIBRARY_PATH has the toolkit's folder of stubs, whose libcuda.so is no driver: take it out",
    36: "install a newer driver",
    46: (
        "another program has the GPU to itself: end it (nvidia-smi lists the programs), choose another GPU by "
        "CUDA_VISIBLE_DEVICES, or let programs share this one by nvidia-smi -c DEFAULT"
    ),
    200: "the driver may be older than NVRTC: install a newer driver",
    209: "the cubin is of another architecture than the GPU: leave out ContextOptions(arch=...)",
    218: "the driver may be older than NVRTC: install a newer driver",
    222: "the driver is older than NVRTC: install a newer driver",
    304: "look at dmesg for the NVIDIA driver's errors",
    802: "start NVIDIA's Fabric Manager, which GPUs with NVSwitch need: systemctl start nvidia-fabricmanager",
    803: (
        "the driver's library and its kernel module are of different versions: restart the machine; in a container, "
        "take the image's own libcuda.so.1 off LD_LIBRARY_PATH"
    ),
    804: (
        "LD_LIBRARY_PATH has NVIDIA's cuda-compat, which works on data center GPUs alone: take it out, and install a "
        "newer driver"
    ),
    999: "look at dmesg for the NVIDIA driver's errors, and restart the machine",
}


def advice(status: int | None) -> str:
    """What to do about a CUDA status, as the end of a sentence. "" if nothing is known."""
    if status in _DENIED and (denied := _denied()):
        return f"this user may not open {denied}: start as a user who may, or join the group that owns it"
    if status == NO_DEVICE:
        return _no_device()
    if status == 35:
        return f"the driver is older than CuPy's CUDA: install a newer driver, or uninstall CuPy and {cuda_hint()}"
    return _ADVICE.get(status or 0, "")


def driver_advice() -> str:
    """What to do if the driver's library is missing."""
    if "microsoft" in platform.release().lower():
        return "install NVIDIA's driver on Windows, and none in WSL"
    return _container_advice() or "install the one for this machine's GPU"


def _no_device() -> str:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return f"CUDA_VISIBLE_DEVICES is {visible!r}, and shows none: set it to a GPU's number, or unset it"
    return _container_advice() or "see whether nvidia-smi shows a GPU, and dmesg an error of the NVIDIA driver"


def _container_advice() -> str:
    if os.path.exists("/.dockerenv") or os.path.exists("/run/.containerenv"):
        return "start the container with its GPU (docker run --gpus all), which needs the NVIDIA Container Toolkit"
    return ""


def _denied() -> str | None:
    """A file of the driver that this user may not open, or None."""
    files = (file for pattern in _FILES for file in sorted(glob.glob(pattern)))
    return next((file for file in files if not os.access(file, os.R_OK | os.W_OK)), None)
