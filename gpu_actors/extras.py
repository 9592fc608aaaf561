"""How to install an extra of this package from the package's own origin, and which version is installed."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from urllib.parse import unquote, urlsplit

from gpu_actors._version import __version__

__all__ = ["cuda_hint", "install_hint", "missing", "version_of"]

DISTRIBUTION = "gpu-actors"
_ROOT = Path(__file__).parents[1]


def install_hint(extra: str) -> str:
    """The shell command that installs ``extra`` (a name such as "cuda13"). Never raises.

    No index holds this package, so its bare name would find nothing. The command names the clone that the package runs
    from, or the wheel or folder that it was installed from, or else the libraries of the extra. If the
    installation is unknown, it names the wheel.
    """
    return f"pip install {_requirement(extra)}"


def cuda_hint() -> str:
    """`install_hint` of the extra for CUDA 13, and of the one for CUDA 12."""
    return f"{install_hint('cuda13')} (for a CUDA 12 driver: {install_hint('cuda12')})"


def missing(error: ImportError, extra: str) -> str:
    """The message of a failed import for a user of ``extra``: the module, and the command that installs it."""
    package = (error.name or str(error)).partition(".")[0]
    return f"{package} is not installed: {install_hint(extra)}"


def version_of(distribution: str) -> str | None:
    """The version of an installed distribution. None if it is not installed."""
    from importlib import metadata

    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _requirement(extra: str) -> str:
    if _is_clone(_ROOT):
        return f"-e {_quoted(f'{_shown(_ROOT)}[{extra}]')}"
    origin = _origin()
    if origin is not None:
        return _quoted(f"{_shown(origin)}[{extra}]")
    libraries = _libraries(extra) or [f"gpu_actors-{__version__}-py3-none-any.whl[{extra}]"]
    return " ".join(map(_quoted, libraries))


def _is_clone(folder: Path) -> bool:
    return (folder / "pyproject.toml").is_file() and (folder / "kernels_cu").is_dir()


def _origin() -> Path | None:
    """The wheel or folder that this package was installed from (PEP 610). None if it is unknown or gone."""
    from importlib import metadata

    try:
        recorded = metadata.distribution(DISTRIBUTION).read_text("direct_url.json")
        url = urlsplit(json.loads(recorded or "")["url"])
    except (metadata.PackageNotFoundError, ValueError, KeyError, TypeError):
        return None
    path = Path(unquote(url.path))
    return path if url.scheme == "file" and path.exists() else None


def _shown(path: Path) -> str:
    try:
        return "." if path == Path.cwd() else str(path)
    except OSError:  # the working directory was deleted
        return str(path)


def _quoted(text: str) -> str:
    return shlex.quote(text) if re.search(r'["$`\\!]', text) else f'"{text}"'


def _libraries(extra: str) -> list[str]:
    """The requirements of an extra, with those of the extras that it includes."""
    from importlib import metadata

    try:
        required = metadata.requires(DISTRIBUTION) or []
    except metadata.PackageNotFoundError:
        required = []
    condition = re.compile(rf"""\s*;\s*extra\s*==\s*["']{re.escape(extra)}["']\s*\Z""")
    found: list[str] = []
    for line in required:
        name, fits = condition.subn("", line)
        if fits:
            included = re.fullmatch(rf"{DISTRIBUTION}\[([\w,-]+)\]", name)
            found += (
                [library for part in included[1].split(",") for library in _libraries(part)] if included else [name]
            )
    return found
