"""Seeds bugs into the forward kernels, one at a time, and shows that the comparison with the oracle catches each.

    python tests/mutation.py                 every mutant, about five seconds each; writes docs/mutation.md
    python tests/mutation.py NAME...         only these, and writes nothing

A mutant replaces one piece of a kernel's text. It is caught when one of its probes (a problem, run under several
schedules and deliveries) differs from the oracle by more than the tolerance, or when the emulation finds fault with it.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import emulated_forward
import numpy as np
import pytest
from far_tensors import check_far

from gpu_actors.devices.emulation import EmulatedModule, EmulationFault, build_module
from gpu_actors.kernels.source import KernelSource
from gpu_actors.testing.problems import poison_unseen, random_forward

REPORT = Path(__file__).resolve().parent.parent / "docs" / "mutation.md"
LAUNCHES = (("late", "greedy", 0), ("eager", "greedy", 1), ("late", "lane", 1), ("random", "random", 2))

# Problems by name; "far" is `check_far`. Most have more key tiles than the ring has stages, and rows and keys that end
# inside a tile.
_SHAPE: dict[str, Any] = {"heads": (2, 1), "features": ()}
PROBES: dict[str, dict[str, Any]] = {
    "plain": {"dtype": "float16", "head_dim": 32, "seqlens": (150, 300), "varlen": False, "kind": "rising"},
    "batch": {
        "dtype": "float16",
        "head_dim": 32,
        "seqlens": (150, 300),
        "varlen": False,
        "batch": 2,
        "kind": "gaussian",
    },
    "causal": {"dtype": "bfloat16", "head_dim": 32, "seqlens": (137, 300), "varlen": False, "always": ("causal",)},
    "few": {"dtype": "float16", "head_dim": 32, "seqlens": (70, 21), "varlen": False, "always": ("causal",)},
    "varlen": {
        "dtype": "float16",
        "head_dim": 40,
        "seqlens": (150, 210),
        "varlen": True,
        "batch": 3,
        "always": ("causal",),
    },
    "window": {
        "dtype": "float16",
        "head_dim": 32,
        "seqlens": (210, 333),
        "varlen": False,
        "always": ("window", "sink_tokens"),
        "alignment": "top_left",
    },
    "options": {
        "dtype": "float16",
        "head_dim": 32,
        "seqlens": (70, 150),
        "varlen": False,
        "batch": 2,
        "always": ("dropout", "sinks", "bias", "alibi", "softcap"),
    },
    "gqa": {"dtype": "float16", "head_dim": 32, "seqlens": (70, 150), "varlen": False, "heads": (4, 2)},
    "sinks": {
        "dtype": "float16",
        "head_dim": 32,
        "seqlens": (70, 21),
        "varlen": False,
        "kind": "gaussian",
        "always": ("sinks",),
    },
    "special": {"dtype": "float16", "head_dim": 32, "seqlens": (150, 150), "varlen": False, "always": ("causal",)},
    "padded": {"dtype": "bfloat16", "head_dim": 40, "head_dim_v": 72, "seqlens": (70, 150), "varlen": False},
    "wide": {"dtype": "float16", "head_dim": 96, "seqlens": (40, 300), "varlen": False, "kind": "gaussian"},
    "float": {"dtype": "float32", "head_dim": 40, "seqlens": (70, 150), "varlen": False, "always": ("causal",)},
}


class Mutant(NamedTuple):
    """A bug. old: text of `file` that is replaced by `new`, wherever it occurs. probes: names, tried in order."""

    name: str
    kernel: str
    file: str
    old: str
    new: str
    probes: tuple[str, ...] = ("plain",)


def _mma(name: str, file: str, old: str, new: str, *probes: str) -> Mutant:
    return Mutant(name, "forward_mma", file, old, new, probes or ("plain",))


def _simple(name: str, old: str, new: str, *probes: str) -> Mutant:
    return Mutant(name, "forward_simple", "forward_simple.cu", old, new, probes or ("plain",))


_MMA, _TILE, _FRAGMENTS = "forward_mma.cu", "mma_tile.cuh", "mma_fragments.cuh"
_PLACE, _SOFTMAX, _SPECIAL, _MASK = "mma_place.cuh", "mma_softmax.cuh", "mma_special.cuh", "mask.cuh"

# Defects that published attention kernels have shipped with.
DEFECTS = (
    _mma(
        "the old maximum is read after it was overwritten",
        _SOFTMAX,
        "correction = ptx::ex2(m * to_log2 - base);\n    m = raised;",
        "m = raised;\n    correction = ptx::ex2(m * to_log2 - base);",
    ),
    _mma("the accumulator is never rescaled", _MMA, "o[b][c][i] *= correction[i / 2];", ";"),
    _mma("the sum is never rescaled", _SOFTMAX, "    l *= correction;\n", ""),
    _mma(
        "causal by tile only",
        _MASK,
        "if (CAUSAL && offset > 0) return false;",
        "if (CAUSAL && offset > BLOCK_N) return false;",
        "causal",
    ),
    _mma("keys past the end are seen", _MASK, "if (key >= seqlen_k) return false;", "", "batch"),
    _mma("the last tile of keys is skipped", _MASK, "(last + TILE - 1) / TILE : 0", "last / TILE : 0"),
    _mma(
        "a row that is no multiple of 16 is read past its end",
        _TILE,
        "(Tile::USED == Tile::CHUNKS || Mine::chunk() + chunks < Tile::USED)",
        "true",
        "padded",
    ),
    _mma("the maximum is a lane's, not the row's", _SOFTMAX, "max_of(m, max_over_quad(largest))", "max_of(m, largest)"),
    _mma("the sum is a lane's, not the row's", _SOFTMAX, "sum_over_quad(row.l)", "row.l"),
    _mma(
        "P is read from the wrong row",
        _FRAGMENTS,
        "pack(block[i % 2 * 2], block[i % 2 * 2 + 1])",
        "pack(block[2 - i % 2 * 2], block[3 - i % 2 * 2])",
    ),
)

MMA_MUTANTS = (
    # The ring
    _mma(
        "the barrier of a tile is dropped",
        _MMA,
        "    } else {\n      __syncthreads();\n    }",
        "    }",
        "wide",
        "plain",
    ),
    _mma("a tile is not waited for", _MMA, "ptx::cp_async_wait<STAGES - 2>();", "ptx::cp_async_wait<STAGES - 1>();"),
    _mma("tiles are not waited for at all", _MMA, "    ptx::cp_async_wait<STAGES - 2>();\n", ""),
    _mma("copies are not committed as a group", _MMA, "    ptx::cp_async_commit();\n", "", "wide", "plain"),
    _mma("a stage is refilled one tile early", _MMA, "fill(n + STAGES - 1)", "fill(n + STAGES)", "wide", "plain"),
    _mma("V has K's stage", _MMA, "k_tile(n).base + KTile::BYTES", "k_tile(n).base"),
    _mma("stages overlap by a row", _MMA, "(KTile::BYTES + VTile::BYTES)};", "(KTile::BYTES + VTile::BYTES - 64)};"),
    # Places in shared memory
    _mma(
        "writes and reads disagree on the swizzle",
        _TILE,
        "return row / (8 / FACTOR) % FACTOR;",
        "return row % 3;",
        "wide",
    ),
    _mma(
        "a lane's chunk is XORed with nothing",
        _TILE,
        "(uint32_t((chunks - whole) * 16) ^ spread)",
        "uint32_t((chunks - whole) * 16)",
    ),
    _mma(
        "whole factors of chunks are forgotten",
        _TILE,
        "(rows * Tile::PITCH + whole * 16)",
        "(rows * Tile::PITCH)",
        "wide",
    ),
    _mma(
        "Q's lanes 16 on read the first chunk",
        _FRAGMENTS,
        "tile.lane(first_row + lane_id() % 16, lane_id() / 16)",
        "tile.lane(first_row + lane_id() % 16, 0)",
    ),
    _mma("K's second eight keys are the first", _FRAGMENTS, "lane_id() % 8 + lane_id() / 16 * 8", "lane_id() % 8"),
    _mma("V's fragment is a step late", _FRAGMENTS, "(step * KEYS, 2 * pair)", "(step * 8, 2 * pair)"),
    _mma("V is not transposed", _FRAGMENTS, "ptx::ldmatrix_x4_trans(", "ptx::ldmatrix_x4("),
    _mma("the columns of V swap places", _MMA, "a[b], values[0], values[1]", "a[b], values[2], values[1]"),
    _mma("rows of Q repeat", _MMA, "q.at<QTile>(16 * b, 2 * step)", "q.at<QTile>(0, 2 * step)"),
    _mma(
        "warps share rows", _MMA, "int(threadIdx.x) / 32 * 16 * ROW_BLOCKS", "int(threadIdx.x) / 64 * 16 * ROW_BLOCKS"
    ),
    # Addresses in global memory
    _mma(
        "the row stride of K is V's",
        _MMA,
        "k.rows + first * k.stride, k.stride",
        "k.rows + first * k.stride, k.stride + 8",
    ),
    _mma("keys of every tile are the first tile's", _MMA, "v.rows + first * v.stride", "v.rows", "plain"),
    _mma(
        "offsets leave out the sequence", "forward_params.cuh", "sequence * strides.batch", "0 * strides.batch", "batch"
    ),
    _mma(
        "offsets are 32 bits wide",
        "forward_params.cuh",
        "sequence * strides.batch + row * strides.row + head * strides.head",
        "int32_t(sequence * strides.batch + row * strides.row + head * strides.head)",
        "far",
    ),
    _mma(
        "every query head has a KV head of its own",
        _PLACE,
        "at.head / (params.heads_q / params.heads_kv)",
        "at.head",
        "gqa",
    ),
    _mma(
        "query heads are dealt out to KV heads in turn",
        _PLACE,
        "at.head / (params.heads_q / params.heads_kv)",
        "at.head % params.heads_kv",
        "gqa",
    ),
    _mma(
        "packed keys start at the queries' start",
        _PLACE,
        "at.k_start = params.cu_seqlens_k[at.sequence];",
        "at.k_start = at.q_start;",
        "varlen",
    ),
    # Masks
    _mma("the diagonal is one key off", _MASK, "if (CAUSAL && offset > 0)", "if (CAUSAL && offset > 1)", "causal"),
    _mma(
        "the window's left bound is one key off", _MASK, "return (offset >= -left", "return (offset > -left", "window"
    ),
    _mma("sink tokens are forgotten", _MASK, "|| (SINK_TOKENS && key < sink_tokens)", "", "window"),
    _mma(
        "a tile on the diagonal passes as unmasked",
        _MASK,
        "key_end - 1 > row_begin + diagonal",
        "key_end - 1 > row_end + diagonal",
        "causal",
    ),
    _mma("special values stay in a tile with a mask", _SPECIAL, "words[w] &= ~special;", ";", "special"),
    _mma(
        "special values are never given to their rows",
        _MMA,
        "if (!unmasked(n)) add_special",
        "if (false) add_special",
        "special",
    ),
    _mma(
        "special values are given to all rows", _MMA, "!rows.mask.visible(row, key) ? HIDDEN : kept", "kept", "special"
    ),
    _mma("keys past the end are loaded", _PLACE, "key >= begin && key < end", "key >= begin", "plain"),
    _mma("rows past the end of Q are loaded", _MMA, "return at.row_begin + row < row_end;", "return true;"),
    _mma("rows past the end are stored", _MMA, "      if (row >= rows.end) continue;\n", ""),
    # Softmax and options
    _mma(
        "the scale is folded in without log2(e)",
        _MMA,
        "(SCALE_ONLY ? score.scale : 1.0f) * LOG2_E",
        "(SCALE_ONLY ? score.scale : 1.0f)",
    ),
    _mma(
        "rows that see nothing keep a maximum of -inf",
        _SOFTMAX,
        "raised == -INFINITY ? 0.0f : raised * to_log2",
        "raised * to_log2",
        "few",
    ),
    _mma("an empty sum is divided by", _SOFTMAX, "  if (l == 0.0f) return {0.0f, -INFINITY};\n", "", "few"),
    _mma("the LSE is in base 2", _SOFTMAX, " * (1.0f / LOG2_E)};", "};"),
    _mma(
        "the sink is not in the sum", _SOFTMAX, "l * correction + ptx::ex2(sink_base - top)", "l * correction", "sinks"
    ),
    _mma("the sum is not brought down to a large sink", _SOFTMAX, "l * correction + ptx::ex2", "l + ptx::ex2", "sinks"),
    _mma(
        "lanes exchange the wrong dropout words",
        _SOFTMAX,
        "odd ? word[0] : word[2], 1)",
        "odd ? word[2] : word[0], 1)",
        "options",
    ),
    _mma(
        "dropped weights leave the sum",
        _MMA,
        "      softmax.l += x;\n",
        "      if (!DROPOUT || x > 0.5f) softmax.l += x;\n",
        "options",
    ),
    _mma("what is kept is not scaled up", _MMA, "DROPOUT ? float(params.dropout_scale) : 1.0f", "1.0f", "options"),
    _mma(
        "floats are not rounded",
        _MMA,
        "constexpr bool ROUNDED = sizeof(ELEMENT) == 4;",
        "constexpr bool ROUNDED = false;",
        "float",
    ),
    _mma("tf32 weights keep their keys in order", _FRAGMENTS, "p[step][i % 2 * 2 + i / 2]", "p[step][i]", "float"),
    _mma(
        "V's word is spread like its neighbour's",
        _FRAGMENTS,
        "lane.spread ^ (i % 2 * (Tile::FACTOR == 8 ? 16 : 0))",
        "lane.spread ^ (i % 2 * 16)",
        "float",
    ),
)

SIMPLE_MUTANTS = (
    _simple(
        "K overwrites V that is still read",
        "    __syncthreads();  // all have read the previous V\n",
        "",
        "wide",
        "plain",
    ),
    _simple("K is read before it has come", "keys);\n    __syncthreads();\n    Real scores", "keys);\n    Real scores"),
    _simple(
        "V overwrites K that is still read",
        "    __syncthreads();  // all have read K and written P\n",
        "",
        "wide",
        "plain",
    ),
    _simple("V is read before it has come", "keys);\n    __syncthreads();\n    add_values", "keys);\n    add_values"),
    _simple("the accumulator is never rescaled", "rows.o", "rows.o", "plain")._replace(
        old="o[r][c] *= correction;", new=";"
    ),
    _simple("the sum is never rescaled", "    l[r] *= correction;\n", ""),
    _simple("the correction is always 1", "exp_of(m[r] - base)", "exp_of(base - base)"),
    _simple("the maximum is a lane's", "max_of(m[r], max_over_lanes(maximum))", "max_of(m[r], maximum)"),
    _simple("the sum is a lane's", "sum_over_lanes(rows.l[r])", "rows.l[r]"),
    _simple("P is read from the next row", "p_rows[r * BLOCK_N + key]", "p_rows[(r ^ 1) * BLOCK_N + key]"),
    _simple("hidden keys count as weights", "      if (p == HIDDEN) continue;\n", "", "causal"),
    _simple("the stride of V is K's of one tile", "v + key_begin * v_strides.row", "v + key_begin"),
    _simple("rows past the end are stored", "    if (row >= row_end) continue;\n", ""),
    _simple("keys past the end are loaded", "at_most(at.seqlen_k - key_begin, BLOCK_N)", "BLOCK_N"),
    _simple("a last column is left out", "if (column < HEAD_DIM_V) out", "if (column < HEAD_DIM_V - 1) out"),
    _simple("an empty row divides by 0", "l == 0 ? Real(0) : rows.o", "rows.o", "few"),
)

MUTANTS = (*DEFECTS, *MMA_MUTANTS, *SIMPLE_MUTANTS)


def mutated(source: KernelSource, mutant: Mutant) -> tuple[str, dict[str, str]]:
    """The kernel's text and headers with the bug. Raises LookupError where there is nothing to replace."""
    files = {f"{mutant.kernel}.cu": source.source, **source.headers}
    if mutant.old not in files[mutant.file]:
        raise LookupError(f"{mutant.name}: {mutant.file} has no {mutant.old!r}")
    files[mutant.file] = files[mutant.file].replace(mutant.old, mutant.new)
    return files.pop(f"{mutant.kernel}.cu"), files


@contextmanager
def seeded(mutant: Mutant | None, cache: Path) -> Iterator[None]:
    """Have `emulated_forward` build kernels with the bug."""

    def build(source: KernelSource) -> EmulatedModule:
        text, headers = (source.source, dict(source.headers)) if mutant is None else mutated(source, mutant)
        return build_module(text, dict(source.macros), headers, cache_dir=cache, entries=source.entry_points)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(emulated_forward, "module_of", build)
        yield


def run_probes(mutant: Mutant, cache: Path, *, bug: bool = True) -> None:
    """Run a mutant's probes, or with ``bug=False`` those of the kernel as it is.

    Raises AssertionError or EmulationFault from the first that shows a difference.
    """
    with seeded(mutant if bug else None, cache):
        for name in mutant.probes:
            if name == "far":
                for axis in range(3):
                    check_far(mutant.kernel, axis)
                continue
            case = poison_unseen(random_forward(len(name), **{**_SHAPE, **PROBES[name]}))
            if name == "special":
                case.v[0, 100, :, 3] = np.nan
            for delivery, schedule, seed in LAUNCHES:
                emulated_forward.check_case(
                    case,
                    compute="tf32" if name == "float" else None,
                    kernel=mutant.kernel,
                    arch="sm_86",
                    delivery=delivery,
                    schedule=schedule,
                    seed=seed,
                    limit_seconds=20.0,
                )


def verdict(mutant: Mutant, cache: Path) -> str:
    """How the mutant was caught, or "survived"."""
    try:
        run_probes(mutant, cache)
    except EmulationFault as fault:
        return f"emulation: {fault.kind}"
    except AssertionError as error:
        return str(error).split(" ", 1)[0] + " differs"
    return "survived"


def main(names: list[str]) -> int:
    chosen = [mutant for mutant in MUTANTS if not names or mutant.name in names]
    lines, survivors, start = [], [], time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        for kernel in {mutant.kernel for mutant in chosen}:
            probes = tuple({name: None for mutant in chosen if mutant.kernel == kernel for name in mutant.probes})
            run_probes(Mutant("none", kernel, f"{kernel}.cu", "", "", probes), Path(folder), bug=False)
        for mutant in chosen:
            found = verdict(mutant, Path(folder))
            sys.stdout.write(f"{mutant.kernel}  {mutant.name}: {found}\n")
            sys.stdout.flush()
            lines.append(f"| {mutant.kernel} | {mutant.name} | {', '.join(mutant.probes)} | {found} |")
            survivors += [mutant.name] * (found == "survived")
    caught = f"{len(chosen) - len(survivors)} of {len(chosen)} caught in {time.monotonic() - start:.0f} s"
    sys.stdout.write(caught + "\n")
    if not names:
        REPORT.write_text(_REPORT.format(caught=caught, rows="\n".join(lines)), encoding="utf-8")
    return 1 if survivors else 0


_REPORT = """# Mutation run of the forward kernels

`python tests/mutation.py` seeds each of these bugs into a kernel and compares the emulated result with the oracle under
several schedules and deliveries. {caught}.

| kernel | bug | probes | caught by |
|---|---|---|---|
{rows}
"""

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
