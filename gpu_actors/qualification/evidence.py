"""Evidence: the arrays on which a kernel was wrong, in a file that can be replayed elsewhere."""

from __future__ import annotations

import dataclasses
import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from gpu_actors.arrays.adopt import dtype_of
from gpu_actors.attention.problem import DispatchKey
from gpu_actors.compiling.variant import Variant
from gpu_actors.kernels.append import AppendProblem, Rope
from gpu_actors.kernels.merge import MergeProblem
from gpu_actors.qualification.experiment import Experiment

__all__ = ["Evidence", "evidence_of", "read_evidence"]

_EXAMPLES: dict[str, type] = {kind.__name__: kind for kind in (DispatchKey, AppendProblem, MergeProblem)}


class Evidence(NamedTuple):
    """The contents of an evidence file.

    variant: the kernel's. problem: as text. reason: how wrong the kernel was. inputs, outputs: arrays by name; outputs
    is empty if the launch returned none.
    """

    variant: Variant
    problem: str
    reason: str
    inputs: Mapping[str, Any]
    outputs: Mapping[str, Any]


def evidence_of(experiment: Experiment, variant: Variant, outputs: Mapping[str, object], reason: str) -> bytes:
    """Return the contents of an .npz file: arrays as bytes, and a JSON text that describes them."""
    example: Any = variant.example
    arrays, described = {}, {}
    for role, each in (("in", {**experiment.inputs, **experiment.written}), ("out", outputs)):
        for name, array in each.items():
            whole = np.ascontiguousarray(array)
            arrays[f"{role}.{name}"] = whole.reshape(-1).view(np.uint8)
            described[f"{role}.{name}"] = [whole.dtype.name, list(whole.shape)]
    about = {
        "kernel": variant.kernel,
        "arch": variant.arch,
        "macros": dict(variant.macros),
        "example": [type(example).__name__, None if example is None else dataclasses.asdict(example)],
        "problem": experiment.text,
        "reason": reason,
        "arrays": described,
    }
    file = io.BytesIO()
    np.savez_compressed(file, about=np.frombuffer(json.dumps(about).encode(), np.uint8), **arrays)  # type: ignore[arg-type]
    return file.getvalue()


def read_evidence(path: str | Path) -> Evidence:
    """Read an evidence file. Raises ValueError for a file that no quarantine has written, and OSError."""
    with np.load(path, allow_pickle=False) as file:
        try:
            about = json.loads(file["about"].tobytes())
            kind, fields = about["example"]
            if kind == AppendProblem.__name__ and fields["rope"] is not None:
                fields["rope"] = Rope(**fields["rope"])
            example = None if fields is None else _EXAMPLES[kind](**fields)
            variant = Variant(about["kernel"], about["arch"], about["macros"], example=example)
            arrays = {
                name: file[name].view(dtype_of(dtype)).reshape(shape)
                for name, (dtype, shape) in about["arrays"].items()
            }
            found = {
                role: {
                    name.removeprefix(f"{role}."): each for name, each in arrays.items() if name.startswith(f"{role}.")
                }
                for role in ("in", "out")
            }
            return Evidence(variant, about["problem"], about["reason"], found["in"], found["out"])
        except (KeyError, TypeError) as error:
            raise ValueError(f"{path} is no evidence of a quarantined kernel: {error!r}") from error
