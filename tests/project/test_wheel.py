"""The wheel has all that an installation needs: its kernels are found and compile."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import zipfile
from email import message_from_bytes
from email.message import Message
from pathlib import Path

import pytest
from support.service import KERNELS_CU, REPOSITORY

# Any small kernel will do.
_COMPILE = """
import hashlib

from gpu_actors.compiling.assets import asset_root
from gpu_actors.compiling.compiler import Compiler
from gpu_actors.compiling.variant import Variant

source = Variant("copy_pages", "sm_80", {"WARPS": 4, "PART_BYTES": 16384}).source
print(asset_root(), hashlib.sha256(Compiler().compile(source).data).hexdigest())
"""


HOME = "https://example.org/owner/gpu_actors"


def build(folder: Path, home: str = "") -> Path:
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(REPOSITORY)]
    environment = os.environ | {"GPU_ACTORS_HOME": home}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return next(folder.glob("*.whl"))


def metadata_of(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        return message_from_bytes(archive.read(name))


def sources_of(wheel: Path) -> dict[str, str]:
    """The texts of the kernels' sources in a wheel, by name."""
    with (
        zipfile.ZipFile(wheel) as archive,
        archive.open("gpu_actors/kernels_cu.zip") as inner,
        zipfile.ZipFile(inner) as sources,
    ):
        return {name: sources.read(name).decode() for name in sources.namelist()}


def targets(page: str) -> list[str]:
    return re.findall(r"\]\(([^)\s]+)\)", page)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("wheel"))


def test_an_index_page_links_to_no_file_that_it_has_not(wheel: Path) -> None:
    found = metadata_of(wheel)
    page = str(found.get_payload())
    assert found["Description-Content-Type"] == "text/markdown"
    assert found.get_all("Project-URL") is None
    assert page.startswith("# gpu_actors\n")
    assert "Serving (docs/serving.md)" in page
    assert all(target.startswith("https://") for target in targets(page))


def test_an_index_page_links_to_the_published_files_where_they_are_known(tmp_path: Path) -> None:
    found = metadata_of(build(tmp_path, f"{HOME}/"))
    urls = dict(line.split(", ") for line in found.get_all("Project-URL"))
    assert urls["Homepage"] == HOME
    paths = [url.removeprefix(f"{HOME}/blob/HEAD/") for url in [*targets(str(found.get_payload())), *urls.values()]]
    files = {path.partition("#")[0] for path in paths if not path.startswith("https://")}
    assert {"docs/serving.md", "CHANGELOG.md", "README.md"} <= files
    assert all((REPOSITORY / file).is_file() for file in files)


def test_the_wheel_holds_every_source_and_header_and_the_typing_marker(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    written = {path.relative_to(KERNELS_CU).as_posix(): path.read_text() for path in KERNELS_CU.rglob("*.cu*")}
    assert sources_of(wheel) == written
    assert "gpu_actors/py.typed" in names
    assert {f"gpu_actors/server/status/page/{name}" for name in ("index.html", "page.css", "page.mjs")} <= names
    assert {name.partition("/")[0] for name in names if ".dist-info/" not in name} == {"gpu_actors"}


def test_the_wheel_holds_no_kernel_that_only_tests_launch(wheel: Path) -> None:
    kernels = [Path(name) for name in sources_of(wheel) if name.endswith(".cu")]
    host = "".join(path.read_text() for path in (REPOSITORY / "gpu_actors" / "kernels").glob("*.py"))
    assert kernels
    assert [path for path in kernels if f'"{path.stem}"' not in host] == []
    of_tests = {path.name for path in (REPOSITORY / "tests").rglob("*.cu")}
    assert {"wgmma.cu", "seeded_bugs.cu"} <= of_tests
    assert not of_tests & {path.name for path in kernels}


def test_a_wheel_compiles_the_same_machine_code_as_the_repository(
    wheel: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    command = [sys.executable, "-c", _COMPILE]
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stderr
    exec(_COMPILE, {})
    digest = capsys.readouterr().out.removeprefix(f"{KERNELS_CU} ")
    assert done.stdout == f"{tmp_path / 'gpu_actors' / 'kernels_cu.zip'} {digest}"
