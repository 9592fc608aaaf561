"""kernels_cu/common/defaults.cuh: every macro has a value, so that an editor can open any kernel alone."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from gates.rows import NVRTC
from gates.table import FAMILIES
from inside.compiling import asset_text
from inside.emulation import Toolchain
from support.gate import kernel_source
from support.service import KERNELS_CU

from gpu_actors import KernelSource
from gpu_actors.kernels.merge import example_merge, merge_gradient_variants, merge_variants
from gpu_actors.kernels.variants import kv_variants, standard_variants, usual_backward_keys

ROOT = Path(__file__).resolve().parents[2]
KERNELS = sorted(path for path in KERNELS_CU.glob("*/*.cu") if path.parent.name != "emulation")


def sources() -> list[KernelSource]:
    """Sources of every family: the gates' variants on two architectures, and the usual ones of append."""
    archs = ("sm_80", "sm_90a")
    families = ("forward", "forward_sm90", "backward", "backward_sm90", "decode", "decode_sm90")
    rows = [row for name in families for row in FAMILIES[name].rows if row.arch in archs and row.compiler == NVRTC]
    found = [row.plan().source for row in rows]
    keys = [*standard_variants("sm_90a"), *usual_backward_keys("sm_80")]
    found += [*map(kernel_source, keys), *map(kernel_source, kv_variants("sm_80"))]
    found += map(kernel_source, merge_variants("sm_80"))
    found += map(kernel_source, merge_gradient_variants(example_merge("float32", "float32", "float32"), "sm_80"))
    return found


def test_every_macro_that_a_family_gives_is_explained() -> None:
    explained = set(re.findall(r"^#define (\w+)", asset_text("common/defaults.cuh"), re.M))
    given = {name for source in sources() for name in source.macros}
    assert {"HEAD_DIM", "CAUSAL", "TREE", "O_DIRECT", "ROTARY_DIM", "DETERMINISTIC", "PART_BYTES"} <= given
    assert given - explained == set()


def editor_flags(kernel: Path) -> list[str]:
    """clangd's flags for a file: those of compile_flags.txt, and those that .clangd adds for its folder."""
    flags = (ROOT / "compile_flags.txt").read_text().split()
    found = re.findall(r"PathMatch: (.*)\nCompileFlags:\n  Add: \[(.*)\]", (ROOT / ".clangd").read_text())
    assert found
    added = [
        flag
        for pattern, more in found
        if re.fullmatch(pattern, str(kernel.relative_to(ROOT)))
        for flag in more.split(", ")
    ]
    return flags + added


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda path: path.name)
def test_a_kernel_parses_with_the_editors_flags(kernel: Path) -> None:
    command = [*Toolchain.find().command, "-fsyntax-only", *editor_flags(kernel), str(kernel)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
