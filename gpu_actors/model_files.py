"""Files of models: a folder in Hugging Face's layout, or of an installed distribution that has the weights.

Such a distribution is located without importing it, because it would import other libraries for models.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from gpu_actors.errors import InvalidRequest, Unsupported
from gpu_actors.extras import missing

__all__ = ["FLOATS", "Tensors", "expect_entries", "installed_folder", "read_json"]

Kind = TypeVar("Kind", dict[str, Any], list[Any])

FLOATS = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
"""NumPy's and ml_dtypes' names of the dtypes of weights, by the names that files have for them."""


def installed_folder(
    name: str, version: str, folder: str, digests: Mapping[str, str], absent: str, advice: str
) -> Path:
    """The folder of an installed distribution that has a model's files.

    digests: sha256 of the files that are checked, by their paths in the folder.
    absent: the error's text if the distribution is missing. advice: the end of each error's text.
    Raises `InvalidRequest` if the distribution is missing or of another version, or if a file is not the model's.
    """
    try:
        distribution = metadata.distribution(name)
    except metadata.PackageNotFoundError:
        raise InvalidRequest("model", None, f"{absent}; {advice}") from None
    if distribution.version != version:
        raise InvalidRequest("model", f"{name} {distribution.version}", f"must be version {version}; {advice}")
    path = Path(str(distribution.locate_file(folder)))
    for file, expected in digests.items():
        try:
            with (path / file).open("rb") as opened:
                digest = hashlib.file_digest(opened, "sha256").hexdigest()
        except OSError as error:
            raise InvalidRequest("model", str(path / file), f"is not readable: {error}; {advice}") from error
        if digest != expected:
            reason = f"is not the model's: its sha256 is {digest} and must be {expected}; {advice}"
            raise InvalidRequest("model", str(path / file), reason)
    return path


def read_json(path: Path, kind: type[Kind]) -> Kind:
    """The contents of a file. Raises `InvalidRequest` unless it is JSON of this kind."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise InvalidRequest("model", str(path), f"is not readable JSON: {error}") from error
    if not isinstance(content, kind):
        raise InvalidRequest("model", str(path), f"must hold a JSON {'object' if kind is dict else 'list'}")
    return content


def expect_entries(config: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """Raise `Unsupported` if config.json has one of these entries with another value."""
    for name, value in expected.items():
        if config.get(name, value) != value:
            raise Unsupported(f"config.json {name}", config[name], "is not what is computed here", value)


class Tensors:
    """The tensors of safetensors files. Safe to use from several threads.

    extra: the extra of this package that installs safetensors.
    prefix: the beginning of the files' names that is removed.
    stored: the dtypes of the matrices that were taken so far.

    Raises `InvalidRequest` if safetensors is missing or a file is broken.
    """

    def __init__(self, paths: Sequence[Path], extra: str, prefix: str = "") -> None:
        self.stored: set[str] = set()
        self._folder = str(paths[0].parent)
        try:
            from safetensors import safe_open
        except ImportError as error:
            raise InvalidRequest("model", self._folder, missing(error, extra)) from error
        self._files: dict[str, tuple[str, Any]] = {}
        for path in paths:
            try:
                file: Any = safe_open(path, framework="np")
            except Exception as error:  # the error of safetensors derives from Exception alone
                raise InvalidRequest("model", str(path), f"is not a readable safetensors file: {error}") from error
            self._files |= {name.removeprefix(prefix): (name, file) for name in file.keys()}  # noqa: SIM118

    def take(self, name: str, shape: tuple[int | None, ...]) -> NDArray[np.float32]:
        """A tensor as float32. shape: the shape that config.json implies, with None for an axis of any length.

        Raises `InvalidRequest` if it is missing, of another shape, or not of floats.
        """
        if name not in self._files:
            raise InvalidRequest("model", self._folder, f"lacks the tensor {name} of shape {shape}")
        stored_name, file = self._files[name]
        tensor = file.get_slice(stored_name)
        found, dtype = tuple(tensor.get_shape()), tensor.get_dtype()
        if len(found) != len(shape) or any(size not in (None, own) for size, own in zip(shape, found, strict=True)):
            reason = f"the tensor {name} has shape {found} where config.json asks for {shape}"
            raise InvalidRequest("model", self._folder, reason)
        if dtype not in FLOATS:
            raise InvalidRequest(
                "model", self._folder, f"the tensor {name} is {dtype}, and must be {', '.join(FLOATS)}"
            )
        if len(shape) == 2:
            self.stored.add(FLOATS[dtype])
        return np.ascontiguousarray(file.get_tensor(stored_name), np.float32)
