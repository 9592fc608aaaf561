"""Fits the weights of benchmarks.model on other libraries' published figures, and writes docs/reports/model.md.

python -m benchmarks.fit           fits, prints the weights for benchmarks/model.py, writes the page

It reads docs/reports/peers.json (published figures and their sources) and docs/reports/peers_sass.json (counts, from
benchmarks.peer_sass), and needs nothing else: neither a GPU, nor a compiler, nor the network.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import statistics
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.counts import Counts
from benchmarks.model import EDGE, FITS, MACHINES, Fit, busiest, dealt, estimate, terms
from gpu_actors.bench.cases import Case

__all__ = ["main"]

ROOT = Path(__file__).resolve().parent.parent
REPORTS = ROOT / "docs" / "reports"
PAGE = REPORTS / "model.md"
H200 = MACHINES["sm_90a"]
H100 = dataclasses.replace(H200, name="NVIDIA H100 SXM", bandwidth=3.35e12)
GPUS = {"H100": H100, "H200": H200}
SHORTEST = 1024  # fewest rows of a fitted figure: shorter sequences are mostly beginnings and ends
ROWS_OF_DECODE = 1  # cuDNN's kernel for more rows takes a multiple of the time, so its figures say nothing about memory
# The terms that each kind of case is fitted with.
TERMS = {
    "forward": ("products", "issue", "output", "edge"),
    "backward": ("products", "issue", "tiles"),
    "decode": ("launch", "cold", "memory"),
}


class Point(NamedTuple):
    """A published figure. clocks: its time in cycles of the GPU's clock."""

    library: str
    gpu: str
    case: Case
    published: float
    clocks: float

    @property
    def series(self) -> tuple[Any, ...]:
        """What the points of one line of a plot have in common."""
        case = self.case
        return (self.library, self.gpu, case.kind, case.dtype, case.head_dim, case.causal, case.deterministic)

    @property
    def unit(self) -> str:
        return "GB/s" if self.case.kind == "decode" else "TFLOP/s"


def read_points() -> list[Point]:
    """Every published figure."""
    found = []
    for row in json.loads((REPORTS / "peers.json").read_text(encoding="utf-8"))["points"]:
        fields = {field.name for field in dataclasses.fields(Case)}
        case = Case(**{name: value for name, value in row.items() if name in fields})
        published = row["gbs"] if case.kind == "decode" else row["tflops"]
        work = case.bytes / 1e9 if case.kind == "decode" else case.flops / 1e12
        found.append(Point(row["library"], row["gpu"], case, published, work / published * GPUS[row["gpu"]].clock))
    return found


def read_counts() -> dict[tuple[str, str], Counts]:
    """The counts, by case and library."""
    rows = json.loads((REPORTS / "peers_sass.json").read_text(encoding="utf-8"))["rows"]
    fields = [field.name for field in dataclasses.fields(Counts)]
    return {(row["case"], row["library"]): Counts(**{name: row[name] for name in fields}) for row in rows}


def counts_for(case: Case, library: str, known: dict[tuple[str, str], Counts]) -> Counts:
    """The counts of a library's kernel for a case. fp16 takes bf16's. A decode takes ours: its terms need no counts."""
    dtype = "bfloat16" if case.dtype == "float16" else case.dtype
    if case.kind == "decode":
        return known[f"decode sm_90a {dtype} d{case.head_dim} {case.rows} x {case.heads // case.kv_heads} rows", "ours"]
    name = f"{case.kind} sm_90a {dtype} d{case.head_dim} {'causal' if case.causal else 'full'}"
    return known[name, library + (" e4m3" if library == "FA3" and dtype.startswith("float8") else "")]


def row_of(point: Point, known: dict[tuple[str, str], Counts]) -> dict[str, float]:
    """The terms of a point."""
    return terms(point.case, counts_for(point.case, point.library, known), GPUS[point.gpu])


def weights(rows: Sequence[dict[str, float]], clocks: Sequence[float], names: Sequence[str]) -> dict[str, float]:
    """Weights >= 0 with the least squares of relative errors, over all subsets of the terms."""
    times = np.array(clocks)
    matrix = np.array([[row[name] for name in names] for row in rows]) / times[:, None]
    wanted = 1 - np.array([row["passes"] for row in rows]) / times
    best, found = np.inf, np.zeros(len(names))
    for chosen in itertools.chain.from_iterable(itertools.combinations(range(len(names)), n) for n in range(1, 9)):
        solution = np.linalg.lstsq(matrix[:, chosen], wanted, rcond=None)[0]
        error = float(((matrix[:, chosen] @ solution - wanted) ** 2).sum())
        if (solution >= 0).all() and error < best - 1e-12:
            best, found = error, np.zeros(len(names))
            found[list(chosen)] = solution
    return dict(zip(names, map(float, found), strict=True))


def modelled(row: dict[str, float], by: dict[str, float]) -> float:
    """The clocks of the model."""
    return sum(weight * row[name] for name, weight in by.items()) + row["passes"]


def left_out(
    points: Sequence[Point], rows: Sequence[dict[str, float]], names: Sequence[str], alike: Callable[[Point], Any]
) -> list[float]:
    """Each point's error, model over published less 1, with the weights of the points that are not ``alike``."""
    errors = []
    for point, row in zip(points, rows, strict=True):
        others = [n for n, other in enumerate(points) if alike(other) != alike(point)]
        by = weights([rows[n] for n in others], [points[n].clocks for n in others], names)
        errors.append(modelled(row, by) / point.clocks - 1)
    return errors


def _chosen(kind: str, points: Sequence[Point]) -> list[Point]:
    if kind == "decode":
        return [one for one in points if one.case.kind == kind and one.case.rows == ROWS_OF_DECODE]
    same = [one for one in points if one.case.kind == kind and one.gpu == "H100" and one.case.rows >= SHORTEST]
    return [one for one in same if not one.case.dtype.startswith("float8")]


def fit(kind: str, points: Sequence[Point], known: dict[tuple[str, str], Counts]) -> Fit:
    """The weights of a kind of case, and their errors."""
    chosen, names = _chosen(kind, points), TERMS[kind]
    rows = [row_of(point, known) for point in chosen]
    by = weights(rows, [point.clocks for point in chosen], names)
    errors = [abs(each) for each in left_out(chosen, rows, names, lambda point: point)]
    several = len({point.series for point in chosen}) > 1
    series = [abs(each) for each in left_out(chosen, rows, names, lambda point: point.series)] if several else [0.0]
    return Fit(by, statistics.mean(errors), max(errors), statistics.mean(series), len(chosen))


def fits(points: Sequence[Point], known: dict[tuple[str, str], Counts]) -> dict[str, Fit]:
    """All fits. Products of 8 bits take the weights of 16 bits: none of their points is fitted."""
    found = {kind: fit(kind, points, known) for kind in TERMS}
    eights = [one for one in points if one.case.dtype.startswith("float8") and one.library == "FA3"]
    eights = [one for one in eights if one.case.rows >= SHORTEST]
    by = found["forward"].weights
    errors = [abs(modelled(row_of(one, known), by) / one.clocks - 1) for one in eights]
    found["float8"] = Fit(by, statistics.mean(errors), max(errors), statistics.mean(errors), 0)
    return {name: _rounded(found[name]) for name in FITS}


def _rounded(of: Fit) -> Fit:
    by = {name: float(f"{weight:.4g}") for name, weight in of.weights.items()}
    return Fit(by, round(of.error, 3), round(of.worst, 3), round(of.series, 3), of.points)


GOALS = {"forward d64": 1.03, "forward e4m3": 1.03}  # of ours over FlashAttention-3 at 8,192 rows; 1 elsewhere
BANDWIDTH = 0.6  # of the memory's, in a decode of 8 and 16 rows

TEMPLATE = """# Ours beside other libraries, by a model

Every figure of ours here is a model's. An H100 [has measured](../benchmarks/README.md#on-an-h100) some of these cases
since: forward in 16 bits 2 to 16% faster than here, in e4m3 14 to 19% slower. `python -m benchmarks.fit` writes this
page from published figures of other libraries (`peers.json`, with their sources) and from [counts of machine
code](peers_sass.md). It is for writers of kernels: the package makes no choice by this model, but by published rules
([design](../design.md#kernels)).

## The model

The time of a launch is a weighted sum of terms, in clocks of the multiprocessor with the most work. Tiles go to
whichever is free, in the order in which the kernel's blocks start; other libraries' longest tiles go first. The
weights are none below 0, and fit published figures with the least squares of relative errors. `python -m
benchmarks.model` uses them.

{weights}

- products: multiply-adds at the tensor cores' full rate; issue: instructions of the warps that multiply, four a
  clock;
- output: elements of a block's output tiles; edge: tiles that a mask cuts; tiles: tiles of keys;
- launch: one; cold: clocks of as many bytes as the L2 cache holds; memory: clocks of all operands, each once;
- error: the mean and the largest difference from a figure that was left out of the fit. Series: the mean where all
  lengths of a head dim and mask are left out together. float8 takes forward's weights, and all its figures are left
  out;
- backward has figures of two kernels only. One kernel's figures cannot tell products from issue, so its series'
  error is large.

The fit finds that instructions cost FlashAttention-3 nearly as much as if they ran alone: with a weight near 1,
issue and products are hardly overlapped. Exponentials and shared memory add nothing to it that issue does not
explain. It knows of no difference in how well two kernels overlap. `scripts/gate forward_sm90` shows that ours has
more exponentials beside its own products than FlashAttention-3; what that gains is not in the model.

Sources of the published figures:

{sources}

## H100, against FlashAttention-3

16,384 tokens, heads times head_dim 2,048, fp16 or e4m3. The ratio is of two estimates, ours over
FlashAttention-3's, so what the model gets wrong in both cancels. The error is of one estimate. A ratio nearer to 1
than the error says that the model cannot tell which is faster. Goals are for 8,192 rows.

{h100}

{short}

## H200, against the best published figure

bf16, batch 2, 64 query heads and 8 of keys, head_dim 128. The weights are an H100's, at the clock of the data
sheet's peak rate. An H200's clock is up to 8% higher where its power allows, so a ratio may be as much too low.
FlashAttention-4's machine code, which is compiled at run time, and cuDNN's are not counted.

{h200}

## H200, decode

bf16, 64 query heads and 8 of keys, head_dim 128; GB/s of each operand read once, of 4,800. The weights are those of
cuDNN's figures with one new row. The model takes from them that splitting and merging cost ours as much as they
cost cuDNN, so with one row it says only that nothing on the chip is in the way. Shared and on chip are the times of
shared memory, and of products and issue together, over that of memory. The estimate has each run beside the others;
the last column is the share of the bandwidth if memory and the chip took turns.

{decode}

{bandwidth}

## The order of blocks

Steps of the multiprocessor that is done last, over an even share of all steps; bf16, head_dim 128, causal. The last
blocks to start are short where the longest of all heads start first (`common/block_order.cuh`). Head by head the last
head's longest starts when the other multiprocessors are nearly done. The model has one block a multiprocessor, and
blocks of deterministic gradients wait for none. Backward of b1 h32/8 2k has 128 blocks: their order matters little.

{order}
"""


def published(points: Sequence[Point], case: Case, gpu: str) -> Point | None:
    """The best published figure of a case on a GPU."""
    same = [point for point in points if point.gpu == gpu and point.case == case]
    return max(same, key=lambda point: point.published, default=None)


def usual(kind: Any, dtype: str, dim: int, causal: bool, length: int) -> Case:
    """A case of FlashAttention-3's plots."""
    more: dict[str, Any] = {"kind": kind, "dtype": dtype, "head_dim": dim, "causal": causal}
    heads = 2048 // dim
    return Case(batch=16_384 // length, rows=length, keys=length, heads=heads, kv_heads=heads, **more)


def speed_of(case: Case, library: str, gpu: str, known: dict[tuple[str, str], Counts]) -> dict[str, Any]:
    """The model's estimate of a library's kernel."""
    counts = counts_for(case, library, known)
    names = {"forward": "forward_sm90", "backward": "backward_sm90", "decode": "decode_mma"}
    return estimate(case, GPUS[gpu], names[case.kind], counts)


def _table(head: Sequence[str], lines: Sequence[Sequence[object]]) -> str:
    rows = [head, ["---"] * len(head), *lines]
    return "\n".join(f"| {' | '.join(map(str, row))} |" for row in rows)


def _shares(case: Case, gpu: str, library: str, known: dict[tuple[str, str], Counts]) -> str:
    """What the estimate consists of."""
    row = terms(case, counts_for(case, library, known), GPUS[gpu])
    by = FITS["float8" if case.dtype.startswith("float8") else case.kind].weights
    whole = modelled(row, by)
    parts = {name: weight * row[name] / whole for name, weight in by.items()} | {"passes": row["passes"] / whole}
    return ", ".join(f"{name} {share:.0%}" for name, share in parts.items() if share >= 0.005)


def h100_rows(
    points: Sequence[Point], known: dict[tuple[str, str], Counts]
) -> Iterator[tuple[Case, float, list[object]]]:
    """(case, ratio, cells) of each kernel of FlashAttention-3 that is counted."""
    kernels = [("forward", "float16", dim, causal) for dim in (64, 128, 256) for causal in (False, True)]
    kernels += [("forward", "float8_e4m3fn", 128, causal) for causal in (False, True)]
    kernels += [("backward", "float16", dim, causal) for dim in (64, 128) for causal in (False, True)]
    for kind, dtype, dim, causal in kernels:
        for length in (2048, 8192, 16_384):
            case = usual(kind, dtype, dim, causal, length)
            ours, theirs = (speed_of(case, library, "H100", known) for library in ("ours", "FA3"))
            figure = published(points, case, "H100")
            ratio = ours["model_tflops"] / theirs["model_tflops"]
            cells = [_name(case), figure.published if figure else "-", round(theirs["model_tflops"])]
            cells += [round(ours["model_tflops"]), f"{ratio:.2f}", _error(case), _shares(case, "H100", "ours", known)]
            yield case, ratio, cells


def _name(case: Case) -> str:
    return f"backward {case.name}" if case.kind == "backward" else case.name


def _error(case: Case) -> str:
    found = FITS["float8" if case.dtype.startswith("float8") else case.kind]
    return f"{found.error:.1%}, worst {found.worst:.0%}"


def goal_of(case: Case) -> float:
    """The goal for our speed over FlashAttention-3's."""
    narrow = GOALS["forward e4m3"] if case.dtype.startswith("float8") else GOALS["forward d64"]
    return narrow if case.kind == "forward" and (case.head_dim == 64 or case.dtype.startswith("float8")) else 1.0


def _short_of(rows: Sequence[tuple[Case, float, list[object]]]) -> str:
    lines = []
    for case, ratio, _ in rows:
        if case.rows == 8192:
            verdict = "reached" if round(ratio, 2) >= goal_of(case) else "**short**"
            lines.append([_name(case), f"{goal_of(case):.2f}", f"{ratio:.2f}", verdict])
    return _table(("case", "goal", "ratio", "verdict"), lines)


def resources(known: dict[tuple[str, str], Counts]) -> str:
    """Sentences that say what binds, with the counts in them."""

    def part(kind: str, dtype: str, dim: int, name: str, library: str = "ours") -> str:
        case = usual(kind, dtype, dim, False, 8192)
        found = terms(case, counts_for(case, library, known), H100)
        return f"{found[name] / found['products']:.0%}"

    def instructions(dtype: str, dim: int, library: str) -> str:
        return f"{counts_for(usual('forward', dtype, dim, False, 8192), library, known).a_thousand:.0f}"

    return RESOURCES.format(
        exponent=part("forward", "float16", 64, "exponent"),
        issue=part("forward", "float16", 64, "issue"),
        ours64=instructions("float16", 64, "ours"),
        theirs64=instructions("float16", 64, "FA3"),
        ours8=instructions("float8_e4m3fn", 128, "ours"),
        theirs8=instructions("float8_e4m3fn", 128, "FA3"),
        shared128=part("forward", "float16", 128, "shared"),
        shared256=part("forward", "float16", 256, "shared"),
        ours_back=part("backward", "float16", 128, "shared"),
        theirs_back=part("backward", "float16", 128, "shared", "FA3"),
    )


RESOURCES = """What binds, over the tensor cores' clocks:

- d64: exponentials take {exponent} of them and issue {issue}. Ours executes {ours64} instructions for 1,000 pairs,
  FlashAttention-3 {theirs64}. By this fit a kernel gets ahead with fewer instructions alone. Exponentials as
  polynomials are more instructions, so they would lose; whether they gain where special functions bind, figures of
  such a kernel have to show.
- e4m3: issue. With tiles of 256 keys, without a mask, ours takes {ours8} instructions for 1,000 pairs,
  FlashAttention-3 with 224 keys {theirs8}. Ours sums each tile's P V apart for exactness ([Hopper](../hopper.md)).
  Under a mask it has no registers for more than 128 keys beside those sums. Both transpose V in the kernel.
  The warps that do are neither in these counts nor in the estimates, which they lower by 5% at most
  ([attempts](hopper_attempts.md)).
- d128 and d256: products. Shared memory is at {shared128} and {shared256}.
- backward: products, then shared memory, which the fit gives no weight of its own: {ours_back} at d128,
  FlashAttention-3's 80 rows a step {theirs_back}."""


def page(points: Sequence[Point], known: dict[tuple[str, str], Counts]) -> str:
    """The page, from the `FITS` that benchmarks.model has."""
    lines = [
        [
            *(name, ", ".join(f"{term} {weight:g}" for term, weight in of.weights.items()), of.points or "-"),
            *(f"{of.error:.1%}", f"{of.worst:.0%}", f"{of.series:.1%}" if of.series else "-"),
        ]
        for name, of in FITS.items()
    ]
    sources = json.loads((REPORTS / "peers.json").read_text(encoding="utf-8"))["sources"]
    h100 = list(h100_rows(points, known))
    head = ("case", "FA3 published", "FA3 model", "ours, model", "ours / FA3", "error", "ours is made of")
    return TEMPLATE.format(
        weights=_table(("fit", "weights", "points", "error", "worst", "series"), lines),
        sources=_table(("source", "what"), [(f"[{name}]({one['url']})", one["what"]) for name, one in sources.items()]),
        h100=_table(head, [cells for _, _, cells in h100]),
        short=_short_of(h100) + "\n\n" + resources(known),
        h200=_h200(points, known),
        decode=_table(
            ("case", "cuDNN published", "ours, model", "of bandwidth", "error", "shared", "on chip", "in turns"),
            [cells for _, cells in decode_rows(points, known)],
        ),
        bandwidth=_bandwidth(decode_rows(points, known)),
        order=_table(("case", "kernel", "GPU", "head by head", "as it is"), list(order_rows(known))),
    )


def order_rows(known: dict[tuple[str, str], Counts]) -> Iterator[list[object]]:
    """Cells of each case: the time with blocks head by head, and in the kernel's own order."""
    of_heads = [(2, 64, 8, length) for length in (2048, 4096, 8192)] + [(1, 32, 8, 2048), (1, 32, 8, 4096)]
    for kind, arch in (("backward", "sm_90a"), ("backward", "sm_80"), ("forward", "sm_80")):
        for batch, heads, kv_heads, length in of_heads:
            more: dict[str, Any] = {"kind": kind, "rows": length, "keys": length, "causal": True}
            case = Case(batch=batch, heads=heads, kv_heads=kv_heads, head_dim=128, **more)
            counts = known[f"{kind} {arch} bfloat16 d128 causal", "ours"]
            machine = MACHINES[arch]
            share = sum(steps + EDGE for steps in dealt(case, counts)) / machine.multiprocessors
            cells: list[object] = [_name(case), counts.kernel, machine.name]
            for section in (1, None):
                tiles, steps = busiest(dealt(case, counts, section), machine.multiprocessors)
                cells.append(f"{(steps + EDGE * tiles) / share:.2f}")
            yield cells


def _h200(points: Sequence[Point], known: dict[tuple[str, str], Counts]) -> str:
    cases = dict.fromkeys(
        point.case
        for point in points
        if point.gpu == "H200" and point.case.kind != "decode" and not point.case.deterministic
    )
    lines = []
    for case in cases:
        best = published(points, case, "H200")
        ours = speed_of(case, "ours", "H200", known)
        if best is not None:
            ratio = ours["model_tflops"] / best.published
            speed = round(ours["model_tflops"])
            lines.append([_name(case), f"{best.published} ({best.library})", speed, f"{ratio:.2f}", _error(case)])
    return _table(("case", "best published", "ours, model", "ours / best", "error"), lines)


def decode_rows(
    points: Sequence[Point], known: dict[tuple[str, str], Counts]
) -> Iterator[tuple[tuple[Case, float, float], list[object]]]:
    """((case, share of the bandwidth, that share if memory and shared memory took turns), cells)."""
    for point in points:
        if point.case.kind == "decode":
            found = speed_of(point.case, "ours", "H200", known)
            parts = found["parts_ms"]
            share = found["model_gbs"] * 1e9 / H200.bandwidth
            shared, chip = parts["shared"], parts["products"] + parts["issue"]
            turns = share * found["model_ms"] / (found["model_ms"] + max(shared, chip))
            of = [f"{part / parts['memory']:.0%}" for part in (shared, chip)]
            cells = [point.case.name, point.published, round(found["model_gbs"]), f"{share:.0%}", _error(point.case)]
            yield (point.case, share, turns), [*cells, *of, f"{turns:.0%}"]


def _bandwidth(rows: Iterator[tuple[tuple[Case, float, float], list[object]]]) -> str:
    several = [(case, share, turns) for (case, share, turns), _ in rows if case.rows > 1 and case.batch > 1]
    shares, turns = [share for _, share, _ in several], [each for _, _, each in several]
    return BOUND.format(
        goal=f"{BANDWIDTH:.0%}",
        least=f"{min(shares):.0%}",
        most=f"{max(shares):.0%}",
        least_in_turns=f"{min(turns):.0%}",
        most_in_turns=f"{max(turns):.0%}",
    )


BOUND = """The goal for 8 and 16 new rows is {goal} of the bandwidth. The model puts them at {least} to {most} from
batch 8 on, and at {least_in_turns} to {most_in_turns} if nothing overlapped. Which is nearer is not known: no figure of
such a kernel was fitted. With one new row `decode_mma` answers, whose mma.sync does not reach the tensor cores' full
rate on Hopper, so the time on the chip is a lower bound. With 8 and 16 it is `decode_sm90`: each warpgroup of 64 rows
reads all keys and values once. At 16 rows, which take two, the tensor cores have most to do on the chip."""


def main() -> None:
    points, known = read_points(), read_counts()
    for name, each in fits(points, known).items():
        print(f'    "{name}": {each},')
        if each != FITS[name]:
            print(f"    is not what benchmarks/model.py has: {FITS[name]}")
    PAGE.write_text(page(points, known), encoding="utf-8")


if __name__ == "__main__":
    main()
