"""Packs what a GPU machine without a network lacks: python tests/gpu/pack.py --out DIR [--python 3.12] [--add NAME ...]

DIR gets this package's own wheel, the wheels named below for that Python on x86-64 Linux, and install.sh, which puts
them into a folder beside it and needs only python3 and pip. The machine is assumed to have CUDA, CuPy, torch and the
usual test tools (PRESENT). If a wheel needs anything else, packing stops and names it.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterable, Sequence
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]
LACKING = ("pykka", "pytest-asyncio", "platformdirs")
_TOOLS = ("hypothesis", "psutil", "pytest", "pytest-timeout")
_CUDA = ("cupy-cuda13x", "nvidia-cuda-nvrtc", "nvidia-cuda-runtime", "torch")
_PYTHON = ("anyio", "ml-dtypes", "numpy", "packaging", "rich", "typer", "typing-extensions")
PRESENT = frozenset((*_TOOLS, *_CUDA, *_PYTHON))
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_27_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")

INSTALL = """\
#!/usr/bin/env bash
# Installs the wheels beside this file into ./site. Then: export PYTHONPATH=<this folder>/site
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
found=$(python3 -c 'import sys; print("%d.%d" % sys.version_info[:2])')
[ "$found" = "@PYTHON@" ] || { echo "these wheels are for Python @PYTHON@, python3 is $found" >&2; exit 1; }
python3 -m pip install --quiet --no-index --no-deps --no-compile --upgrade --target "$here/site" "$here"/*.whl
export PYTHONPATH="$here/site${PYTHONPATH:+:$PYTHONPATH}"
python3 -c 'import gpu_actors; print("gpu_actors", gpu_actors.__version__, "from", gpu_actors.__path__[0])'
echo "export PYTHONPATH=$here/site"
"""


def pack(out: Path, python: str, names: Sequence[str], present: frozenset[str] = PRESENT) -> list[Path]:
    """Return the wheels. Raises SystemExit with a sentence if one is not available or needs a missing package."""
    out.mkdir(parents=True, exist_ok=True)
    for old in out.glob("*.whl"):
        old.unlink()
    _pip("wheel", "--no-deps", "--wheel-dir", str(out), str(ROOT))
    platforms = [option for platform in PLATFORMS for option in ("--platform", platform)]
    choice = ["--only-binary=:all:", "--python-version", python, "--implementation", "cp", *platforms]
    _pip("download", "--no-deps", "--dest", str(out), *choice, *names)
    wheels = sorted(out.glob("*.whl"))
    lacking = unmet(wheels, python, present)
    if lacking:
        needs = "; ".join(f"{wheel} needs {', '.join(sorted(what))}" for wheel, what in sorted(lacking.items()))
        raise SystemExit(f"{needs}: --add them, or name them with --present if the machine has them")
    script = out / "install.sh"
    script.write_text(INSTALL.replace("@PYTHON@", python))
    script.chmod(0o755)
    return wheels


def unmet(wheels: Iterable[Path], python: str, present: frozenset[str] = PRESENT) -> dict[str, set[str]]:
    """By wheel, the requirements that are neither among the wheels nor present, without those of extras."""
    needs = {name_of(wheel): set(requirements(wheel, python)) for wheel in wheels}
    there = present | set(needs)
    return {name: what - there for name, what in needs.items() if what - there}


def requirements(wheel: Path, python: str) -> Iterable[str]:
    """The packages that a wheel requires on that Python, without extras."""
    with zipfile.ZipFile(wheel) as archive:
        metadata = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        text = archive.read(metadata).decode()
    for line in text.split("\n\n")[0].splitlines():
        if line.startswith("Requires-Dist:"):
            requirement = Requirement(line.partition(":")[2])
            if requirement.marker is None or requirement.marker.evaluate({"python_version": python, "extra": ""}):
                yield normal(requirement.name)


def name_of(wheel: Path) -> str:
    return normal(wheel.name.split("-")[0])


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _pip(*arguments: str) -> None:
    command = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"pip {arguments[0]} failed: {done.stderr.strip()[-2000:]}")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for the wheels")
    parser.add_argument("--python", default="3.12", help="the machine's (default: %(default)s)")
    parser.add_argument("--add", nargs="+", default=[], metavar="NAME", help="further packages, NAME or NAME==VERSION")
    parser.add_argument("--present", nargs="+", default=[], metavar="NAME", help="what the machine has, too")
    options = parser.parse_args(arguments)
    present = PRESENT | {normal(name) for name in options.present}
    wheels = pack(options.out.resolve(), options.python, [*LACKING, *options.add], present)
    size = sum(wheel.stat().st_size for wheel in wheels)
    for wheel in wheels:
        sys.stdout.write(f"{wheel.name}\n")
    sys.stdout.write(f"{len(wheels)} wheels, {size / 1e6:.1f} MB; run {options.out / 'install.sh'} over there\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
