"""The Dockerfile has what a server needs; scripts/image builds it, or carries its steps out."""

from __future__ import annotations

import importlib.util
import json
import re
from importlib.machinery import SourceFileLoader
from types import ModuleType
from typing import Any

import pytest
from support.service import REPOSITORY

TEXT = (REPOSITORY / "Dockerfile").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def image() -> ModuleType:
    loader = SourceFileLoader("image", str(REPOSITORY / "scripts" / "image"))
    spec = importlib.util.spec_from_loader("image", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def found(image: ModuleType) -> list[Any]:
    steps: list[Any] = image.steps(TEXT)
    return steps


def test_a_step_may_go_over_several_lines(image: ModuleType) -> None:
    assert image.steps("# a comment\nFROM a:1\nRUN b \\\n    c\n\nUSER d\n") == [
        ("FROM", "a:1"),
        ("RUN", "b c"),
        ("USER", "d"),
    ]


def test_the_server_and_what_it_compiles_belong_to_a_user_of_their_own(image: ModuleType, found: list[Any]) -> None:
    words = [step.word for step in found]
    user = image.only(found, "USER")
    assert user not in ("root", "0")
    warm = next(at for at, step in enumerate(found) if "gpu-actors warm" in step.rest)
    assert words.index("USER") < warm < words.index("ENTRYPOINT")
    made = next(step.rest for step in found if step.rest.startswith("useradd"))
    assert made.split()[-1] == user
    folder = next(step.rest for step in found if step.rest.startswith("GPU_ACTORS_CACHE_DIR=")).split("=")[1]
    assert folder.startswith(f"/home/{user}/")


def test_the_base_image_has_a_fixed_version_of_the_cuda_that_is_installed(image: ModuleType, found: list[Any]) -> None:
    major = re.fullmatch(r"nvidia/cuda:(\d+)\.\d+\.\d+-base-\S+", image.only(found, "FROM"))
    assert major is not None
    assert f"cuda{major[1]}]" in TEXT


def test_health_is_readiness_on_the_port_that_is_exposed(image: ModuleType, found: list[Any]) -> None:
    assert f"http://127.0.0.1:{image.only(found, 'EXPOSE')}/readyz" in image.only(found, "HEALTHCHECK")
    assert json.loads(image.only(found, "ENTRYPOINT"))[:2] == ["gpu-actors", "serve"]


def test_the_context_has_what_the_wheel_is_built_of() -> None:
    seen = set(re.findall(r"^!(\S+)$", (REPOSITORY / ".dockerignore").read_text(encoding="utf-8"), re.M))
    assert [name for name in sorted(seen) if not (REPOSITORY / name).exists()] == []
    assert seen >= {"gpu_actors", "kernels_cu", "pyproject.toml", "hatch_build.py", "README.md", "LICENSE"}


def test_a_rehearsal_has_a_place_for_every_path_of_its_steps(image: ModuleType, found: list[Any]) -> None:
    ours = [
        step.rest for step in found if step.word in ("RUN", "ENV") and not step.rest.startswith(image.OF_THE_SYSTEM)
    ]
    paths = {path for rest in ours for path in re.findall(r"(?<![\w.])/[\w/.-]+", rest)}
    assert paths
    assert [path for path in sorted(paths) if not path.startswith(tuple(image.PLACES))] == []
