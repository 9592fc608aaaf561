"""tests/gpu/pack.py: what a wheel needs, what the folder lacks, and that the script installs what was packed."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from support.modules import module_at

PATH = Path(__file__).parents[1] / "gpu" / "pack.py"


@pytest.fixture(scope="module")
def pack() -> Any:
    return module_at(PATH)


def wheel(folder: Path, name: str, *requirements: str) -> Path:
    path = folder / f"{name}-1.0-py3-none-any.whl"
    info = f"{name}-1.0.dist-info"
    lines = [
        "Metadata-Version: 2.1",
        f"Name: {name}",
        "Version: 1.0",
        *(f"Requires-Dist: {one}" for one in requirements),
    ]
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{name}/__init__.py", "__version__ = '1.0'\n")
        archive.writestr(f"{info}/METADATA", "\n".join(lines) + "\n\nRequires-Dist: nothing of the description's\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return path


def test_what_is_neither_packed_nor_there_is_named(pack: Any, tmp_path: Path) -> None:
    wheels = [
        wheel(tmp_path, "first_one", "numpy>=1.26", "Second.One (>=2)", "missing[extra]>=1", "rich ; extra == 'x'"),
        wheel(
            tmp_path,
            "second_one",
            "old ; python_version < '3.11'",
            "new ; python_version >= '3.12'",
            "absent; extra=='a'",
        ),
    ]
    assert pack.unmet(wheels, "3.12") == {"first-one": {"missing"}, "second-one": {"new"}}
    assert pack.unmet(wheels, "3.10") == {"first-one": {"missing"}, "second-one": {"old"}}


def test_a_wheel_with_unmet_needs_stops_the_packing(pack: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pack, "_pip", lambda *arguments: wheel(tmp_path, "needy", "missing"))
    with pytest.raises(SystemExit, match="needy needs missing"):
        pack.pack(tmp_path, "3.12", [])
    assert not (tmp_path / "install.sh").exists()
    assert pack.main(["--out", str(tmp_path), "--present", "Missing"]) == 0


def test_the_script_installs_what_was_packed_into_its_own_folder(
    pack: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    version = "{}.{}".format(*sys.version_info)
    monkeypatch.setattr(pack, "_pip", lambda *arguments: wheel(tmp_path, "gpu_actors"))
    pack.pack(tmp_path, version, [])
    here = f"{Path(sys.executable).parent}:/usr/bin:/bin"
    done = subprocess.run(
        [tmp_path / "install.sh"], capture_output=True, text=True, env={"PATH": here}, cwd="/", check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == f"export PYTHONPATH={tmp_path}/site"
    assert f"gpu_actors 1.0 from {tmp_path}/site/gpu_actors" in done.stdout


def test_the_script_refuses_another_python(pack: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pack, "_pip", lambda *arguments: wheel(tmp_path, "gpu_actors"))
    pack.pack(tmp_path, "3.99", [])
    done = subprocess.run([tmp_path / "install.sh"], capture_output=True, text=True, check=False)
    assert (done.returncode, (tmp_path / "site").exists()) == (1, False)
    assert "these wheels are for Python 3.99" in done.stderr


def test_what_this_package_needs_is_packed_or_there(pack: Any) -> None:
    from importlib.metadata import requires

    found = [Requirement(one) for one in requires("gpu-actors") or ()]
    own = {pack.normal(one.name) for one in found if "extra" not in str(one.marker)}
    assert "pykka" in own
    assert own <= pack.PRESENT | {pack.normal(name) for name in pack.LACKING}
