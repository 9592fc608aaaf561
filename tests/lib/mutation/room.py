"""Draws bugs from the Python of one room with cosmic-ray, and runs that room's tests on each.

    pip install cosmic-ray==8.7.0
    scripts/mutants room planning --drawn 30 --seed 7    up to a minute each; writes build/reports/drawn_planning_7.md

For validation, planning and reference it runs the properties too. It works on a clone of the last commit. A person
reads what survives, because some bugs change no answer.
"""

from __future__ import annotations

import argparse
import importlib
import os
import random
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from support.logs import write_log

__all__ = ["main"]

_ROOT = Path(__file__).resolve().parents[3]
# Other operators change annotations, which no test sees, or an operator into every other one.
_OPERATORS = re.compile(
    r"core/(NumberReplacer|AddNot|ZeroIterationForLoop|ExceptionReplacer|RemoveDecorator"
    r"|Replace(?!.*BitOr_)(AndWithOr|OrWithAnd|TrueWithFalse|FalseWithTrue|Break.*|Continue.*|Unary.*_Delete_Not"
    r"|ComparisonOperator_(Lt_LtE|LtE_Lt|Gt_GtE|GtE_Gt|Eq_NotEq|NotEq_Eq|Is_IsNot|IsNot_Is|In_NotIn|NotIn_In)"
    r"|BinaryOperator_(Add_Sub|Sub_Add|Mul_Add|FloorDiv_Mul|Mod_FloorDiv|Div_Mul)))"
)
_LIMIT_SECONDS = 300.0


def main(arguments: Sequence[str]) -> int:
    """Returns the exit code: 1 if a bug survived."""
    parser = argparse.ArgumentParser(prog="scripts/mutants room")
    parser.add_argument("room", help="a folder of gpu_actors and of tests")
    parser.add_argument("--drawn", type=int, default=30, metavar="COUNT")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(arguments)
    for folder in ("gpu_actors", "tests"):
        if not (_ROOT / folder / given.room).is_dir():
            parser.error(f"there is no folder {folder}/{given.room}")
    with tempfile.TemporaryDirectory(prefix="gpu-actors-mutants-") as folder:
        clone = Path(folder, "clone")
        subprocess.run(["git", "clone", "-q", str(_ROOT), str(clone)], check=True)
        found = _drawn(clone, given.room, given.drawn, given.seed)
    survivors = sum(line.endswith("| survived |") for line in found)
    said = f"{len(found) - survivors} of {len(found)} caught"
    write_log(f"drawn_{given.room}_{given.seed}", said, ("place", "operator", "line", "caught"), found)
    sys.stdout.write("\n".join((*found, said, "")))
    return 1 if survivors else 0


def _drawn(clone: Path, room: str, count: int, seed: int) -> list[str]:
    """A line of the table for each drawn bug. Raises CalledProcessError if the tests fail without a bug."""
    commands, database = importlib.import_module("cosmic_ray.commands"), importlib.import_module("cosmic_ray.work_db")
    pytest = [sys.executable, "-m", "pytest", "-x", "-q", "-n", "0", "-p", "no:cacheprovider"]
    pytest += [f"tests/{room}", *(["tests/properties"] if room in ("validation", "planning", "reference") else [])]
    os.chdir(clone)
    os.environ["PYTHONPATH"] = str(clone)  # of the processes that tests start
    subprocess.run(pytest, check=True)
    config = importlib.import_module("cosmic_ray.config").ConfigDict(
        {
            "timeout": _LIMIT_SECONDS,
            "test-command": shlex.join(pytest),
            "excluded-modules": [],
            "distributor": {"name": "local"},
        }
    )
    with database.use_db(str(clone.parent / "bugs.sqlite")) as bugs:
        commands.init(sorted(Path("gpu_actors", room).rglob("*.py")), bugs, {})
        chosen = _chosen(list(bugs.work_items), count, seed)
        bugs.clear()
        bugs.add_work_items(chosen)
        commands.execute(bugs, config)
        return [_line(item, result) for item, result in bugs.completed_work_items]


def _chosen(items: list[Any], count: int, seed: int) -> list[Any]:
    """Draw an operator first, then a place, so that numbers do not crowd out the others."""
    rng = random.Random(seed)
    by_operator: dict[str, list[Any]] = {}
    for item in sorted(items, key=lambda item: (str(item.mutations[0].module_path), item.mutations[0].start_pos)):
        if _OPERATORS.fullmatch(item.mutations[0].operator_name):
            by_operator.setdefault(item.mutations[0].operator_name, []).append(item)
    chosen = []
    while by_operator and len(chosen) < count:
        operator = rng.choice(sorted(by_operator))
        chosen.append(by_operator[operator].pop(rng.randrange(len(by_operator[operator]))))
        if not by_operator[operator]:
            del by_operator[operator]
    return chosen


def _line(item: Any, result: Any) -> str:
    (bug,) = item.mutations
    new = [line[1:].strip() for line in (result.diff or "").split("\n") if re.match(r"\+(?!\+\+)", line)]
    text = " ".join(new).replace("|", "\\|")
    outcome = {"killed": "yes", "survived": "survived"}.get(str(result.test_outcome and result.test_outcome.value), "?")
    return f"| {bug.module_path}:{bug.start_pos[0]} | {bug.operator_name} | `{text}` | {outcome} |"
