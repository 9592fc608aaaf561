"""Counts the main loops of other attention libraries' kernels, from their published wheels, beside this project's.

python -m benchmarks.peer_sass                 downloads the wheels (0.7 GB), counts, writes the JSON file and the page
python -m benchmarks.peer_sass --ours          counts this project's kernels again and keeps the other rows
python -m benchmarks.peer_sass --ours KIND     only those of forward, backward or decode
python -m benchmarks.peer_sass --page          writes the page from the JSON file alone

The files are docs/reports/peers_sass.json and .md. --wheels FOLDER keeps the wheels there. Needs pip, c++filt, and the
wheels nvidia-cuda-cuobjdump and nvidia-cuda-nvdisasm, but no GPU. Only the counts are kept, not the machine code.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.counts import Counts, block_products, count_case, counts_of, key_of, loaded_bytes
from benchmarks.sass import find_disassembler, main_step
from gpu_actors.bench.cases import Case
from gpu_actors.context import open_context
from gpu_actors.options import ContextOptions

__all__ = ["main"]

ROOT = Path(__file__).resolve().parent.parent
DATA = ROOT / "docs" / "reports" / "peers_sass.json"
PAGE = DATA.with_suffix(".md")
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux2014_x86_64")
PYTHON = "3.12"


class Library(NamedTuple):
    """A wheel. member: the start of the path in it of the library with the kernels. cubins: part of their cubins'
    names.
    """

    name: str
    requirement: str
    member: str
    cubins: str


class Kernel(NamedTuple):
    """A kernel of a library. pattern: matches its demangled name. dims: of q and k, and of v. warps: that multiply."""

    library: str
    kind: str
    arch: str
    dtype: str
    dims: tuple[int, int]
    causal: bool
    tile: tuple[int, int]
    warps: int
    pattern: str

    @property
    def case(self) -> str:
        return case_name(self.kind, self.arch, self.dtype, self.dims, self.causal)


LIBRARIES = (
    Library("FA3", "xformers==0.0.32.post2", "xformers/flash_attn_3/_C.so", "sm_90a"),
    Library("FA3 e4m3", "flash-attn3-jax==0.2.3", "flash_attn3_jax_lib/flash_api", "e4m3_sm90"),
    Library("FA2", "torch==2.14.0", "torch/lib/libtorch_cuda.so", "sm_80"),
)


def case_name(kind: str, arch: str, dtype: str, dims: tuple[int, int], causal: bool) -> str:
    """A row's name: what is computed, for which architecture."""
    widths = str(dims[0]) if dims[0] == dims[1] else f"{dims[0]}/{dims[1]}"
    return f"{kind} {arch} {dtype} d{widths} {'causal' if causal else 'full'}"


def _fa3_forward(
    dims: tuple[int, int], causal: bool, tile: tuple[int, int], dtype: str = "bfloat16", library: str = "FA3"
) -> Kernel:
    one = r"tuple<C<1>, C<1>, C<1> ?>"
    shape = rf"tuple<C<{tile[0]}>, C<{tile[1]}>, C<{dims[0]}> ?>, {dims[1]}"
    element = {"bfloat16": "bfloat16_t", "float8_e4m3fn": "float_e4m3_t"}[dtype]
    # causal, local, softcap, varlen, pages, appended keys, a second Q; three of the schedule, a split, V's layout
    flags = rf"{str(causal).lower()}(?:, false){{6}}, (?:true|false), true, false, false, (?:true|false)>"
    name = rf"FlashAttnFwdSm90<\w*CollectiveMainloopFwdSm90<\d, {one}, {shape}, {element}, float, arch::Sm90, {flags}"
    return Kernel(library, "forward", "sm_90a", dtype, dims, causal, tile, tile[0] // 16, name)


def _fa3_backward(dim: int, causal: bool, tile: tuple[int, int]) -> Kernel:
    shape = rf"tuple<C<{tile[0]}>, C<{tile[1]}>, C<{dim}> ?>"
    flags = rf"{str(causal).lower()}(?:, false){{4}},"
    name = rf"CollectiveMainloopBwdSm90<[\d, ]+tuple<[C<>\d, ]+>, {shape}, bfloat16_t, float, arch::Sm90, {flags}"
    ends = r".*CollectiveEpilogueBwd<.*SingleTile"
    return Kernel("FA3", "backward", "sm_90a", "bfloat16", (dim, dim), causal, tile, 8, name + ends)


def _fa2(kind: str, dim: int, causal: bool, tile: tuple[int, int], warps: int) -> Kernel:
    mask = str(causal).lower()
    traits = rf"_kernel_traits<{dim}, {tile[0]}, {tile[1]}, {warps}, [^>]*bfloat16_t.*?> >, false, {mask}, false, false"
    if kind == "forward":
        name = rf"flash_fwd_kernel<Flash_fwd{traits}, \w+, true, false, false>"
    else:
        name = rf"flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<Flash_bwd{traits}, \w+, true, false>"
    return Kernel("FA2", kind, "sm_80", "bfloat16", (dim, dim), causal, tile, warps, name)


KERNELS = (
    _fa3_forward((64, 64), False, (192, 192)),
    _fa3_forward((64, 64), True, (192, 128)),
    _fa3_forward((128, 128), False, (128, 176)),
    _fa3_forward((128, 128), True, (128, 128)),
    _fa3_forward((256, 256), False, (128, 80)),
    _fa3_forward((256, 256), True, (128, 80)),
    _fa3_forward((192, 128), False, (128, 128)),
    _fa3_forward((192, 128), True, (128, 128)),
    _fa3_forward((128, 128), False, (128, 224), "float8_e4m3fn", "FA3 e4m3"),
    _fa3_forward((128, 128), True, (128, 224), "float8_e4m3fn", "FA3 e4m3"),
    _fa3_backward(64, False, (128, 128)),
    _fa3_backward(64, True, (128, 128)),
    _fa3_backward(128, False, (80, 128)),
    _fa3_backward(128, True, (64, 128)),
    _fa2("forward", 64, False, (128, 128), 4),
    _fa2("forward", 64, True, (128, 128), 4),
    _fa2("forward", 128, False, (128, 64), 4),
    _fa2("forward", 128, True, (128, 64), 4),
    _fa2("backward", 64, False, (128, 128), 8),
    _fa2("backward", 64, True, (128, 128), 8),
    _fa2("backward", 128, False, (64, 128), 8),
    _fa2("backward", 128, True, (64, 128), 8),
)


# This project's cases: those of FA3 and FA2, and more of fp8. Decode (`ROWS`) has no peer in the wheels.
OURS = (
    *dict.fromkeys((k.kind, k.arch, k.dtype, k.dims, k.causal) for k in KERNELS),
    ("forward", "sm_90a", "float8_e4m3fn", (64, 64), False),
    ("forward", "sm_90a", "float8_e4m3fn", (64, 64), True),
    ("forward", "sm_90a", "float8_e4m3fn", (256, 256), True),
)
ROWS = (1, 8, 16)  # new rows of a decode


def symbols(cubin: bytes) -> dict[str, int]:
    """The functions of a cubin (a 64-bit ELF file), and their indices in its symbol table."""
    (offset,) = struct.unpack_from("<Q", cubin, 40)
    size, count, _ = struct.unpack_from("<HHH", cubin, 58)
    headers = [struct.unpack_from("<IIQQQQIIQQ", cubin, offset + n * size) for n in range(count)]
    found: dict[str, int] = {}
    for _, kind, _, _, start, length, link, _, _, entry in headers:
        if kind != 2:  # SHT_SYMTAB
            continue
        text = headers[link][4]
        for index in range(length // entry):
            name, info = struct.unpack_from("<IB", cubin, start + index * entry)
            if info & 15 == 2:  # STT_FUNC
                found[cubin[text + name : cubin.index(b"\0", text + name)].decode()] = index
    return found


def demangled(names: Sequence[str]) -> list[str]:
    """Readable C++ names, without the namespaces of CUTLASS, CuTe and FlashAttention."""
    done = subprocess.run(["c++filt"], input="\n".join(names), capture_output=True, text=True, check=True)
    return [re.sub(r"\b(?:cute|cutlass|flash|pytorch_flash)::", "", line) for line in done.stdout.splitlines()]


def tool(name: str) -> str:
    """The path of a program: beside nvdisasm, or on PATH."""
    beside = (find_disassembler() or Path()).parent / name
    found = str(beside) if beside.is_file() else shutil.which(name)
    if found is None:
        sys.exit(f"{name} is missing: install nvidia-cuda-cuobjdump and nvidia-cuda-nvdisasm")
    return found


def download(library: Library, wheels: Path) -> Path:
    """The library's wheel, downloaded by pip if it is not there."""
    start = library.requirement.partition("==")[0].replace("-", "_") + "-"
    if not (found := sorted(wheels.glob(f"{start}*.whl"))):
        platforms = [part for platform in PLATFORMS for part in ("--platform", platform)]
        options = ["--no-deps", "--only-binary", ":all:", *platforms, "--python-version", PYTHON, "-d", str(wheels)]
        subprocess.run([sys.executable, "-m", "pip", "download", *options, library.requirement], check=True)
        found = sorted(wheels.glob(f"{start}*.whl"))
    return found[0]


def cubins(library: Library, wheel: Path, folder: Path) -> list[Path]:
    """The library's cubins, extracted into a folder."""
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.startswith(library.member))
        shared = Path(archive.extract(name, folder))
    subprocess.run(
        [tool("cuobjdump"), "-xelf", library.cubins, shared], cwd=folder, check=True, stdout=subprocess.DEVNULL
    )
    return sorted(folder.glob("*.cubin"))


def registers(cubin: Path, function: str) -> int:
    """Registers of a thread at launch."""
    done = subprocess.run([tool("cuobjdump"), "-res-usage", cubin], capture_output=True, text=True, check=True)
    found = re.search(rf"Function {re.escape(function)}:\s*REG:(\d+)", done.stdout)
    return int(found[1]) if found else 0


def counted(kernel: Kernel, cubin: Path, function: str) -> Counts:
    """Count a kernel. Raises SystemExit if no loop makes as many products as the tile has: the tile or loop is wrong
    then.
    """
    index = symbols(cubin.read_bytes())[function]
    command = [tool("nvdisasm"), "-c", "-fun", str(index), str(cubin)]
    wanted = block_products(kernel.kind, kernel.tile, kernel.dims) / kernel.warps
    step = main_step(subprocess.run(command, capture_output=True, text=True, check=True).stdout, wanted)
    if step is None or step.products != wanted:
        sys.exit(f"{kernel.case} of {kernel.library}: {step and step.products} products of a warp, not {wanted}")
    item = 1 if kernel.dtype.startswith("float8") else 2
    loaded = loaded_bytes(kernel.kind, kernel.tile, kernel.dims, item, bulk=kernel.arch == "sm_90a")
    return counts_of(kernel.library, kernel.tile, kernel.warps, loaded, step, registers(cubin, function))


def peer_rows(library: Library, wheels: Path) -> Iterator[dict[str, Any]]:
    """A row for each kernel of a library."""
    with tempfile.TemporaryDirectory() as folder:
        found = [
            (name, cubin, function)
            for cubin in cubins(library, download(library, wheels), Path(folder))
            if (functions := list(symbols(cubin.read_bytes())))
            for name, function in zip(demangled(functions), functions, strict=True)
        ]
        for kernel in (kernel for kernel in KERNELS if kernel.library == library.name):
            of_it = [(cubin, function) for name, cubin, function in found if re.search(kernel.pattern, name)]
            if not of_it:
                sys.exit(f"no kernel of {library.requirement} is {kernel.case} with tiles of {kernel.tile}")
            print(f"{kernel.case}: {library.name}", flush=True)
            yield row(kernel.case, library.name, counted(kernel, *of_it[0]))


def our_rows(only: str) -> Iterator[dict[str, Any]]:
    """A row for each of this project's kernels. only: of this kind, or "" for all."""
    for kind, arch, dtype, dims, causal in OURS:
        if only in ("", kind):
            yield from _ours(
                arch, case_name(kind, arch, dtype, dims, causal), our_case(kind, dtype, dims, causal), dims
            )
    for rows in ROWS if only in ("", "decode") else ():
        case = Case(kind="decode", batch=1, rows=rows, keys=4096, heads=64, kv_heads=8, head_dim=128, causal=True)
        yield from _ours("sm_90a", f"decode sm_90a bfloat16 d128 {rows} x 8 rows", case)


def our_case(kind: Any, dtype: str, dims: tuple[int, int], causal: bool) -> Case:
    """A case. Its lengths do not matter: a variant is the same for all."""
    more: dict[str, Any] = {"kind": kind, "dtype": dtype, "head_dim": dims[0], "causal": causal}
    return Case(batch=1, rows=256, keys=256, heads=2, kv_heads=2, **more)


def _ours(arch: str, name: str, case: Case, dims: tuple[int, int] = (128, 128)) -> Iterator[dict[str, Any]]:
    with open_context("mock", ContextOptions(arch=arch)) as context:
        key = dataclasses.replace(key_of(case, context), head_dim_v=dims[1])
    found = count_case(key, case.kind)
    if found is None:
        sys.exit(f"{name}: {key.kernel} has no main loop")
    print(f"{name}: ours", flush=True)
    yield row(name, "ours", found)


def row(case: str, library: str, counts: Counts) -> dict[str, Any]:
    """A row of the JSON file."""
    fields = {name: getattr(counts, name) for name in counts.__slots__}
    return {"case": case, "library": library, **fields}


def shares(found: dict[str, Any]) -> dict[str, float]:
    """Clocks of a step on a multiprocessor's tensor cores, and those of each other resource divided by them.

    A clock has 2,048 multiply-adds of 16 bits (1,024 before sm_90a, 4,096 of 8 bits), 16 exponentials, 4 issue slots
    and 128 bytes of shared memory.
    """
    rate = 1024 if "sm_80" in found["case"] else 4096 if "float8" in found["case"] else 2048
    tensor, warps = found["products"] / rate, found["warps"]
    return {
        "tensor": tensor,
        "exponent": warps * found["special"] * 2 / tensor,
        "issue": warps * found["instructions"] / 4 / tensor,
        "shared": (warps * found["shared"] + found["loaded"]) / 128 / tensor,
    }


COLUMNS: tuple[tuple[str, Callable[[dict[str, Any], dict[str, float]], object]], ...] = (
    ("case", lambda r, s: " ".join(r["case"].split()[2:])),
    ("library", lambda r, s: r["library"] if r["library"] != "ours" else f"**ours**, {r['kernel']}"),
    ("tile", lambda r, s: f"{r['rows']} x {r['keys']}"),
    ("warps", lambda r, s: r["warps"]),
    ("instructions", lambda r, s: f"{r['instructions']} + {r['masks']}"),
    ("a 1,000 pairs", lambda r, s: round(1000 * r["instructions"] * r["warps"] / (r["rows"] * r["keys"]))),
    ("products", lambda r, s: sum(r["opcodes"].get(name, 0) for name in ("HMMA", "HGMMA", "QGMMA"))),
    ("MUFU", lambda r, s: f"{r['overlapped']} of {r['special']}" if "sm_90a" in r["case"] else r["special"]),
    ("LDSM", lambda r, s: r["opcodes"].get("LDSM", 0)),
    ("LDS, STS", lambda r, s: sum(r["opcodes"].get(name, 0) for name in ("LDS", "STS", "STSM"))),
    ("BAR", lambda r, s: r["opcodes"].get("BAR", 0)),
    ("shared KiB", lambda r, s: round((r["warps"] * r["shared"] + r["loaded"]) / 1024)),
    ("tensor clocks", lambda r, s: round(s["tensor"])),
    ("exponent", lambda r, s: f"{s['exponent']:.0%}"),
    ("issue", lambda r, s: f"{s['issue']:.0%}"),
    ("shared", lambda r, s: f"{s['shared']:.0%}"),
    ("registers", lambda r, s: r["registers"]),
    ("local", lambda r, s: sum(r["opcodes"].get(name, 0) for name in ("LDL", "STL"))),
)

TEMPLATE = """# Other libraries' machine code beside ours

`python -m benchmarks.peer_sass` downloads the wheels below, disassembles their kernels and counts what their main
loops do. The rows in bold are this project's kernels, compiled by NVRTC. Nothing here was timed; [the
model](model.md) estimates times from it. Counted on {date} with nvdisasm {nvdisasm} and NVRTC {nvrtc}:

{wheels}

A row is one step of the loop, a tile of rows times a tile of keys, where nothing is masked:

- instructions: of one warp, and how many a mask adds, which a branch passes by; FA2 and FA3 mask in loops of their own;
- a 1,000 pairs: instructions of all warps for 1,000 pairs of a row and a key;
- products: HMMA, HGMMA or QGMMA;
- MUFU: special functions. On sm_90a, how many of them run between the wait for the first products and that for all,
  beside the same warpgroup's products; products of other warpgroups may run beside the others;
- LDSM, LDS and STS, BAR: loads of matrices, other accesses to shared memory, barriers;
- shared KiB: what the block moves into and out of shared memory, copies and the operands of wgmma included;
- tensor clocks of a multiprocessor at full rate, and over these the clocks of exponentials (16 a clock), issue slots
  (4) and shared memory (128 bytes). A share above 100% says that the tensor cores wait;
- rolled loops inside a step count with as many rounds as the tile's products take. That is exact but for
  `backward_mma`, whose loops lie in one another;
- registers of a thread at launch; local: accesses to local memory in the loop, which are spills.

{tables}
"""


def page(data: dict[str, Any]) -> str:
    """The text of the page."""
    tables = []
    for kind, arch in dict.fromkeys(tuple(one["case"].split()[:2]) for one in data["rows"]):
        rows = [one for one in data["rows"] if one["case"].startswith(f"{kind} {arch} ")]
        lines = [[str(cell(one, shares(one))) for _, cell in COLUMNS] for one in rows]
        head = [name for name, _ in COLUMNS]
        text = "\n".join(f"| {' | '.join(line)} |" for line in [head, ["---"] * len(head), *lines])
        tables.append(f"## {kind.capitalize()}, {arch}\n\n{text}")
    wheels = "\n".join(f"- {name}: {wheel}" for name, wheel in data["wheels"].items())
    facts = {name: data[name] for name in ("date", "nvdisasm", "nvrtc")}
    return TEMPLATE.format(**facts, wheels=wheels, tables="\n\n".join(tables))


def ordered(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Sort by case, ours last."""
    cases = list(dict.fromkeys(one["case"] for one in [*(r for r in rows if r["library"] != "ours"), *rows]))
    return sorted(rows, key=lambda one: (cases.index(one["case"]), one["library"] == "ours"))


def version_of(name: str) -> str:
    """The version of an installed distribution."""
    from importlib.metadata import version

    return version(name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ours", nargs="?", const="", choices=("", "forward", "backward", "decode"))
    parser.add_argument("--page", action="store_true")
    parser.add_argument("--wheels", type=Path)
    given = parser.parse_args()
    data = (
        json.loads(DATA.read_text(encoding="utf-8"))
        if given.ours is not None or given.page
        else {"rows": [], "wheels": {}}
    )
    if not given.page:
        only = given.ours or ""
        rows = [one for one in data["rows"] if one["library"] != "ours" or not one["case"].startswith(only)]
        if given.ours is None:
            with tempfile.TemporaryDirectory() as folder:
                wheels = given.wheels or Path(folder)
                wheels.mkdir(parents=True, exist_ok=True)
                for library in LIBRARIES:
                    rows += peer_rows(library, wheels)
                    data["wheels"][library.name] = download(library, wheels).name
        data["rows"] = ordered([*rows, *our_rows(only)])
        data["date"] = datetime.datetime.now(datetime.UTC).date().isoformat()
        data["nvdisasm"], data["nvrtc"] = (version_of(f"nvidia-cuda-{name}") for name in ("nvdisasm", "nvrtc"))
        DATA.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    PAGE.write_text(page(data), encoding="utf-8")


if __name__ == "__main__":
    main()
