"""Install hints name what exists: the clone, the wheel, or libraries that an index has."""

from __future__ import annotations

import json
import os
import shlex
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from support.service import REPOSITORY

from gpu_actors import __version__, extras


class Installed:
    """The metadata of an installed package."""

    def __init__(self, url: str | None) -> None:
        self.url = url

    def read_text(self, name: str) -> str | None:
        assert name == "direct_url.json"
        return None if self.url is None else self.url if self.url[0] == "{" else json.dumps({"url": self.url})


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The package lies in site-packages, away from its sources."""
    monkeypatch.setattr(extras, "_ROOT", tmp_path / "site-packages")
    return tmp_path


def come_from(monkeypatch: pytest.MonkeyPatch, url: str | None) -> None:
    monkeypatch.setattr(metadata, "distribution", lambda name: Installed(url))


def test_in_a_clone_the_hint_installs_the_clone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Also where there is no working directory."""
    monkeypatch.chdir(REPOSITORY)
    assert extras.install_hint("cuda13") == 'pip install -e ".[cuda13]"'
    assert extras.cuda_hint() == ('pip install -e ".[cuda13]" (for a CUDA 12 driver: pip install -e ".[cuda12]")')
    monkeypatch.chdir(tmp_path)
    assert extras.install_hint("cuda13") == f'pip install -e "{REPOSITORY}[cuda13]"'
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert extras.install_hint("otel") == f'pip install -e "{REPOSITORY}[otel]"'
    os.chdir(REPOSITORY)


def test_an_installed_wheel_is_named_while_it_exists(monkeypatch: pytest.MonkeyPatch, installed: Path) -> None:
    wheel = installed / "of mine" / "gpu_actors-0.1.0-py3-none-any.whl"
    wheel.parent.mkdir()
    wheel.touch()
    come_from(monkeypatch, wheel.as_uri())
    assert extras.install_hint("cuda12") == f'pip install "{wheel}[cuda12]"'
    wheel.unlink()
    monkeypatch.setattr(metadata, "requires", lambda name: ['cupy; extra == "cuda12"'])
    assert extras.install_hint("cuda12") == 'pip install "cupy"'


@pytest.mark.parametrize(
    "url", [None, "https://example.org/gpu_actors-0.1.0-py3-none-any.whl", "{}", "{broken", "file:///not/there.whl"]
)
@pytest.mark.usefixtures("installed")
def test_without_a_file_the_hint_names_the_libraries(monkeypatch: pytest.MonkeyPatch, url: str | None) -> None:
    come_from(monkeypatch, url)
    given = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    lines = [f"{name}; extra == '{extra}'" for extra, names in given.items() for name in names]
    monkeypatch.setattr(metadata, "requires", lambda name: ["numpy>=1.26", *lines])
    assert extras.install_hint("metrics") == 'pip install "prometheus-client>=0.20"'
    for extra in given:
        command = shlex.split(extras.install_hint(extra))
        assert len(command) > 2
        assert not any("gpu-actors" in part or ";" in part for part in command)
    assert set(shlex.split(extras.install_hint("demo"))) < set(shlex.split(extras.install_hint("test")))


@pytest.mark.usefixtures("installed")
def test_a_package_without_metadata_names_its_wheel(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> list[str]:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "distribution", missing)
    monkeypatch.setattr(metadata, "requires", missing)
    assert extras.install_hint("otel") == f'pip install "gpu_actors-{__version__}-py3-none-any.whl[otel]"'


@pytest.mark.usefixtures("installed")
def test_a_shell_takes_whatever_the_path_holds(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    odd = tmp_path / 'a "b" $HOME'
    odd.mkdir()
    come_from(monkeypatch, odd.as_uri())
    assert shlex.split(extras.install_hint("demo")) == ["pip", "install", f"{odd}[demo]"]
