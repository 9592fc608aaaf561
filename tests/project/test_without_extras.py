"""What a program meets where only the core's six packages are installed: everything else is blocked from importing."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from inside.package import install_hint
from support.service import REPOSITORY

PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
OPTIONAL = (
    "rich", "typer", "click", "cupy", "cupy_backends", "nvidia", "gguf", "safetensors", "tokenizers", "threadpoolctl",
    "starlette", "fastapi", "uvicorn", "uvloop", "matplotlib", "opentelemetry", "prometheus_client", "ziglang",
    "psutil", "torch", "transformers", "jax", "ray", "httpx", "pytest", "pydantic", "jinja2", "openai",
)  # fmt: skip

EXAMPLES = {
    "generate.py": "serve",
    "inference_server.py": "demo",
    "ray_cluster.py": "ray",
    "train_char_model.py": "demo",
}

FORWARD = """
import asyncio, numpy as np, gpu_actors as ga

async def main():
    q = np.ones((1, 16, 2, 64), np.float32)
    async with ga.open_context("mock") as context:
        print((await context.flash_attn.forward(q, q, q)).out.shape)

asyncio.run(main())
"""


def run_bare(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run code in an interpreter that finds none of the extras' libraries."""
    blocked = f"import sys\nsys.modules.update(dict.fromkeys({OPTIONAL!r}))\n"
    command = [sys.executable, "-c", blocked + code, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=200, check=False, cwd=REPOSITORY)


def test_the_core_requires_five_packages() -> None:
    names = {re.match(r"[\w-]+", line)[0] for line in PROJECT["dependencies"]}  # type: ignore[index]
    assert names == {"numpy", "ml_dtypes", "pykka", "anyio", "platformdirs"}


def test_a_request_is_answered_with_the_core_alone() -> None:
    done = run_bare(FORWARD)
    assert (done.returncode, done.stdout) == (0, "(1, 16, 2, 64)\n"), done.stderr


@pytest.mark.parametrize("module", ["rich", "typer"])
@pytest.mark.parametrize("arguments", [(), ("--help",), ("doctor",), ("warm", "--arch", "sm_80")])
def test_the_command_says_what_it_needs(module: str, arguments: tuple[str, ...]) -> None:
    code = f"import sys; sys.modules[{module!r}] = None\nfrom gpu_actors.cli import main; main()"
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False, cwd=REPOSITORY)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == f"gpu-actors: {module} is not installed: {install_hint('cli')}\n".replace(
        f"{REPOSITORY}[", ".["
    )


@pytest.mark.parametrize("example", EXAMPLES)
def test_an_example_without_its_extra_ends_in_a_sentence(example: str) -> None:
    code = f"import runpy; sys.path.insert(0, 'examples'); runpy.run_path('examples/{example}', run_name='__main__')"
    done = run_bare(code)
    assert (done.returncode, done.stdout) == (1, "")
    expected = rf'\w+ is not installed: pip install -e "\.\[{EXAMPLES[example]}\]"\n'
    assert re.fullmatch(expected, done.stderr), done.stderr


def test_an_application_without_starlette_is_told_the_extra() -> None:
    done = run_bare("import gpu_actors.serving\nimport gpu_actors.asgi")
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last == 'ModuleNotFoundError: starlette is not installed: pip install -e ".[asgi]"'


def test_every_example_that_can_be_run_is_tried_without_its_extra() -> None:
    runnable = [path.name for path in sorted((REPOSITORY / "examples").glob("*.py")) if runs(path)]
    assert runnable == sorted([*EXAMPLES, "serving_load.py"])  # which starts the server and shows what that says


def runs(path: Path) -> bool:
    return '__name__ == "__main__"' in path.read_text(encoding="utf-8")


def test_the_demo_and_the_tests_bring_the_command() -> None:
    extras = PROJECT["optional-dependencies"]
    assert "gpu-actors[cli,asgi]" in extras["demo"]
    assert any("demo" in line for line in extras["test"] if line.startswith("gpu-actors["))
