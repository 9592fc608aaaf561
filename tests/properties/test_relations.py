"""Requests whose answers must agree: relations that need no oracle.

Each row of the table gives two answers to one drawn problem, on the mock device in float64, and on kernels.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from properties.doors import DOORS, FORMS, Answer, answer_of, ask, ask_of, check_unharmed, send
from properties.problems import Array, Problem, Spec, contiguous, interleaved, problem_of
from properties.strategies import Family, budget, specs

import gpu_actors as ga
from gpu_actors.partial import Partial
from gpu_actors.partial import merge as merge_on_host

pytestmark = pytest.mark.timeout(300)  # on a crowded machine: they compile kernels

Pairs = Iterator[tuple[Any, Any]]


@dataclass
class Case:
    """A problem on a device. rng: for a relation's further draws."""

    ctx: ga.GpuContext
    spec: Spec
    problem: Problem
    rng: np.random.Generator

    def ask(self, door: str, problem: Problem | None = None, **how: Any) -> Answer:
        """The answer of a door, with its LSE. how: further options of the request."""
        problem = self.problem if problem is None else problem
        lengths = problem.lengths
        spec = dataclasses.replace(
            self.spec,
            door=door,
            rows=tuple(rows for rows, _ in lengths),
            keys=tuple(keys for _, keys in lengths),
            dims=(problem.k[0].shape[-1], problem.v[0].shape[-1]),
            how={**self.spec.how, "return_lse": True, **how},
        )
        return ask(self.ctx, spec, problem)

    @property
    def reach(self) -> Array:
        """The distance (rows, keys) of each key before a row's own key, in a batch of equally long sequences."""
        ((rows, keys), *_) = self.problem.lengths
        return np.arange(rows)[:, None] + keys - rows - np.arange(keys)

    def narrow(self, array: Array) -> Array:
        return array.astype(self.problem.q[0].dtype)


def both(left: Answer, right: Answer) -> Pairs:
    yield left.out, right.out
    yield left.lse, right.lse


def as_bias(visible: Array) -> Array:
    """A mask (rows, keys) as a bias for every sequence and head."""
    return np.where(visible, 0.0, -np.inf).astype(np.float32)[None, None]


def placed(problem: Problem) -> Problem:
    """The problem with the positions that its rows and keys have by default. It has no more rows than keys."""
    first = np.array([keys - rows for rows, keys in problem.lengths])
    at = [np.stack([start, np.ones_like(start)], 1).astype(np.int32) for start in (first, np.zeros_like(first))]
    return problem.changed(q_positions=at[0], k_positions=at[1])


def shard(problem: Problem, rows: range, keys: range) -> Problem:
    """A problem that is `placed`, over some of its rows and keys."""
    q = [array[list(rows)] for array in problem.q]
    k, v = ([array[list(keys)] for array in arrays] for arrays in (problem.k, problem.v))
    places = {}
    for name, part in (("q_positions", rows), ("k_positions", keys)):
        first, step = problem.options[name].T
        places[name] = np.stack([first + part.start * step, step * part.step], 1).astype(np.int32)
    cut = dataclasses.replace(problem, q=q, k=k, v=v).without("sinks").changed(**places)
    bias = problem.options.get("bias")
    if bias is None:
        return cut
    return cut.changed(bias=bias[:, :, list(rows) if bias.shape[2] > 1 else [0]][..., list(keys)])


# Relations


def cut(case: Case, count: int) -> list[range]:
    parts = int(case.rng.integers(1, 5))
    return interleaved(count, parts) if case.rng.integers(2) else contiguous(count, parts)


def keys_in_parts(case: Case) -> Pairs:
    ((rows, keys), *_) = case.problem.lengths
    if rows > keys:  # rows before the first key have no position
        return
    door, problem = str(case.rng.choice(["varlen", "dense"])), placed(case.problem)
    sinks, cuts = problem.options.get("sinks"), cut(case, keys)
    whole = case.ask(door, problem)
    if "dropout_p" not in problem.options:  # dropout depends on positions
        yield from both(whole, case.ask(door))
    partials = [Partial(*case.ask(door, shard(problem, range(rows), part))[:2]) for part in cuts]
    yield from both(Answer(*merge_on_host(partials, sinks=sinks)), whole)
    yield from both(Answer(*case.ctx.flash_attn.merge(partials, sinks=sinks).result(60)), whole)
    middle = len(cuts) // 2
    if middle:
        halves = [merge_on_host(partials[:middle]), merge_on_host(partials[middle:])]
        yield from both(Answer(*merge_on_host(halves, sinks=sinks)), whole)


def rows_and_keys_in_shards(case: Case) -> Pairs:
    """Over all shards of rows and keys, outputs merge and gradients add up."""
    ((rows, keys), *_), batch = case.problem.lengths, len(case.problem.q)
    if rows > keys:
        return
    problem = placed(case.problem)
    wide = {"lse_dtype": "float64"} if case.spec.dtype == "float64" else {}
    whole = case.ask("varlen", problem, **wide)
    dout = case.narrow(case.rng.integers(-2, 3, whole.out.shape))
    wanted = _gradients(case, problem, dout)
    totals = {name: np.zeros((batch, *array[0].shape)) for name in "qkv" if (array := getattr(problem, name))}
    for own in cut(case, rows):
        at = np.concatenate([np.arange(rows)[list(own)] + index * rows for index in range(batch)]).astype(int)
        partials = []
        for part in cut(case, keys):
            piece = shard(problem, own, part)
            partials.append(Partial(*case.ask("varlen", piece)[:2]))
            results = {"out": whole.out[at], "lse": whole.lse[:, at]}
            found = _gradients(case, piece, dout[at], results=results)
            for name, indices in (("q", own), ("k", part), ("v", part)):
                count = len(indices)
                totals[name][:, list(indices)] += found[name].reshape(batch, count, *found[name].shape[1:])
        merged = merge_on_host(partials, sinks=problem.options.get("sinks"))
        yield merged.out, whole.out[at]
        yield merged.lse, whole.lse[:, at]
    for name, total in totals.items():
        yield total.reshape(wanted[name].shape), wanted[name]


def cached_keys_in_parts(case: Case) -> Pairs:
    problem = case.problem
    if case.rng.integers(2):
        problem = dataclasses.replace(problem, q=[array[-1:] for array in problem.q])
        if "bias" in problem.options:
            problem = problem.changed(bias=problem.options["bias"][:, :, -1:])
    ((rows, keys), *_) = problem.lengths
    if rows > keys:
        return
    doors = ["paged", "cache", "kv_cache"]
    door = str(case.rng.choice(doors if rows > 1 else [*doors, "pointers"]))
    problem = problem.without("causal") if door == "pointers" else problem
    parts = [shard(placed(problem), range(rows), part) for part in cut(case, keys) if len(part)]
    partials = [Partial(*case.ask(door, part)[:2]) for part in parts]
    yield from both(Answer(*merge_on_host(partials, sinks=problem.options.get("sinks"))), case.ask(door, problem))


def every_cache(case: Case) -> Pairs:
    whole = case.ask("varlen")
    doors = ["paged", "cache", "kv_cache"]
    if all(rows == 1 for rows, _ in case.problem.lengths):
        doors.append("pointers")
    for door in doors:
        problem = case.problem.without("causal") if door == "pointers" else case.problem
        page = int(case.rng.choice([1, 3, 8, 16]))
        answer = case.ask(door, problem, page_size=page if not case.ctx.info.runs_kernels else 16)
        yield from both(answer, whole)


def one_row_over_caches(case: Case) -> Pairs:
    one = dataclasses.replace(case.problem, q=[q[-1:] for q in case.problem.q])
    if all(len(q) for q in case.problem.q):
        yield from every_cache(dataclasses.replace(case, problem=one))


def padding(case: Case) -> Pairs:
    yield from both(case.ask("padded"), case.ask("varlen"))
    if len(set(case.problem.lengths)) == 1 and not any(case.spec.how.get("spare", ())):
        yield from both(case.ask("dense"), case.ask("varlen"))


def each_alone(case: Case) -> Pairs:
    whole = case.ask("varlen")
    alone = [case.ask("dense", case.problem.alone(index)) for index in range(len(case.problem.q))]
    yield whole.out, np.concatenate([one.out for one in alone])
    yield whole.lse, np.concatenate([one.lse for one in alone], axis=1)


def another_order(case: Case) -> Pairs:
    order = case.rng.permutation(len(case.problem.q)).tolist()
    ends = case.problem.ends["cu_seqlens_q"]
    places = np.concatenate([np.arange(ends[index], ends[index + 1]) for index in order])
    for door in ("varlen", "paged"):
        problem = case.problem
        whole, other = case.ask(door, problem), case.ask(door, problem.taken(order))
        yield other.out, whole.out[places]
        yield other.lse, whole.lse[:, places]


def heads_repeated(case: Case) -> Pairs:
    ratio = case.spec.heads[0] // case.spec.heads[1]
    k, v = ([np.repeat(array, ratio, axis=1) for array in arrays] for arrays in (case.problem.k, case.problem.v))
    repeated = dataclasses.replace(case.problem, k=k, v=v)
    for door in ("varlen", "paged"):
        yield from both(
            case.ask(door, repeated.without("alignment")), case.ask(door, case.problem.without("alignment"))
        )


def heads_apart(case: Case) -> Pairs:
    """A head alone keeps its own slope, sink and bias."""
    head = int(case.rng.integers(case.spec.heads[0]))
    of = head // (case.spec.heads[0] // case.spec.heads[1])
    q, k, v = (
        [array[:, one : one + 1] for array in arrays]
        for arrays, one in ((case.problem.q, head), (case.problem.k, of), (case.problem.v, of))
    )
    options = dict(case.problem.options)
    for name in ("alibi_slopes", "sinks"):
        if name in options:
            options[name] = options[name][..., head : head + 1]
    if "bias" in options and options["bias"].shape[1] > 1:
        options["bias"] = options["bias"][:, head : head + 1]
    alone, whole = case.ask("varlen", Problem(q, k, v, options)), case.ask("varlen")
    yield alone.out[:, 0], whole.out[:, head]
    yield alone.lse[0], whole.lse[head]


def boundless_window(case: Case) -> Pairs:
    bound = (200, 1 << 31, 1 << 70)[case.rng.integers(3)]
    for door in ("varlen", "paged"):
        problem = case.problem.without("alignment") if door == "paged" else case.problem
        yield from both(case.ask(door, problem.changed(window_size=(bound, bound))), case.ask(door, problem))


def masks_as_biases(case: Case) -> Pairs:
    reach, left, right, first = case.reach, *case.rng.integers(0, 6, 2), int(case.rng.integers(1, 4))
    ((rows, keys), *_) = case.problem.lengths
    window = (reach <= left) & (reach >= -right)
    top_left = reach + rows - keys
    said: dict[str, tuple[dict[str, Any], Array]] = {
        "causal": ({"causal": True}, reach >= 0),
        "top left": ({"causal": True, "alignment": "top_left"}, top_left >= 0),
        "window": ({"window_size": (int(left), int(right))}, window),
        "causal window": ({"causal": True, "window_size": (int(left), -1)}, (reach >= 0) & (reach <= left)),
        "sink tokens": (
            {"window_size": (int(left), int(right)), "sink_tokens": first},
            window | (np.arange(keys) < first),
        ),
        "causal sink tokens": (
            {"causal": True, "window_size": (int(left), -1), "sink_tokens": first},
            ((reach <= left) | (np.arange(keys) < first)) & (reach >= 0),
        ),
    }
    name = str(case.rng.choice(list(said)))
    options, visible = said[name]
    door = str(case.rng.choice(["varlen", "dense", "padded"]))
    alignment = {"alignment": "top_left"} if name == "top left" else {}  # slopes follow the alignment
    added, masked = (case.problem.changed(bias=bias, **alignment) for bias in (as_bias(visible), visible[None, None]))
    yield from both(case.ask(door, case.problem.changed(**options)), case.ask(door, added))
    yield from both(case.ask(door, masked), case.ask(door, added))
    if name != "top left":
        yield from both(case.ask("paged", case.problem.changed(**options)), case.ask("paged", added))


def chunks_as_biases(case: Case) -> Pairs:
    """Sink tokens are visible outside of a chunk, as outside of a window, but causal hides them."""
    size, first, causal = int(case.rng.integers(1, 6)), int(case.rng.integers(0, 6)), bool(case.rng.integers(2))
    ((rows, keys), *_) = case.problem.lengths
    if rows > keys:
        return
    own, key = (np.arange(rows) + keys - rows)[:, None], np.arange(keys)
    visible = (own // size == key // size) | (key < first)
    if causal:
        visible &= key <= own
    chunked = case.problem.changed(attention_chunk=size, sink_tokens=first, causal=causal)
    yield from both(case.ask("varlen", chunked), case.ask("varlen", case.problem.changed(bias=as_bias(visible))))


def slopes_as_biases(case: Case) -> Pairs:
    signed = bool(case.rng.integers(2))
    slopes = case.rng.uniform(0.01, 0.5, case.spec.heads[0]).astype(np.float32)
    distance = case.reach if signed else np.abs(case.reach)
    bias = (-slopes[:, None, None] * distance)[None].astype(np.float32)
    with_slopes = case.problem.changed(alibi_slopes=slopes, alibi_signed=signed)
    yield from both(case.ask("varlen", with_slopes), case.ask("varlen", case.problem.changed(bias=bias)))
    if not signed:
        with_slopes = case.problem.changed(alibi_slopes=slopes)
        yield from both(case.ask("paged", with_slopes), case.ask("paged", case.problem.changed(bias=bias)))


def sinks_as_keys(case: Case) -> Pairs:
    """A sink acts as a key whose scores are the sinks and whose value is 0."""
    problem, (heads, _) = case.problem, case.spec.heads
    sinks = case.rng.standard_normal(heads).astype(np.float32)
    ((rows, keys), *_) = problem.lengths
    bias = np.zeros((1, heads, rows, keys + 1), np.float32)
    bias[0, :, :, -1] = sinks[:, None]
    k, v = (
        [np.concatenate([a, np.zeros_like(a, shape=(1, *a.shape[1:]))]) for a in arrays]
        for arrays in (problem.k, problem.v)
    )
    extra = dataclasses.replace(problem, k=k, v=v).changed(bias=bias)
    for door in ("varlen", "dense", "paged"):
        yield from both(case.ask(door, problem.changed(sinks=sinks)), case.ask(door, extra))


def raised_scores(case: Case) -> Pairs:
    """A constant added to every score changes only the LSE."""
    ((rows, keys), *_) = case.problem.lengths
    amount = np.float32(case.rng.uniform(-300, 300))
    raised = case.ask("varlen", case.problem.changed(bias=np.full((1, 1, rows, keys), amount)))
    plain = case.ask("varlen")
    yield raised.out, plain.out
    yield raised.lse, plain.lse + amount


def scale_in_q(case: Case) -> Pairs:
    scale, factor = 0.25, float(case.rng.choice([0.5, 2.0, 4.0]))
    scaled = dataclasses.replace(case.problem, q=[case.narrow(array * factor) for array in case.problem.q])
    for door in ("varlen", "paged"):
        problem, other = (one.without("alignment") if door == "paged" else one for one in (case.problem, scaled))
        yield from both(
            case.ask(door, problem.changed(softmax_scale=scale)),
            case.ask(door, other.changed(softmax_scale=scale / factor)),
        )


def default_scale(case: Case) -> Pairs:
    said = case.problem.changed(softmax_scale=case.spec.dims[0] ** -0.5)
    doors = ["varlen", "paged", "kv_cache"]
    door = str(case.rng.choice(doors))
    yield from both(case.ask(door, said), case.ask(door))


def keys_in_any_order(case: Case) -> Pairs:
    orders = [case.rng.permutation(keys) for _, keys in case.problem.lengths]
    k, v = (
        [array[order] for array, order in zip(arrays, orders, strict=True)]
        for arrays in (case.problem.k, case.problem.v)
    )
    yield from both(case.ask("varlen", dataclasses.replace(case.problem, k=k, v=v)), case.ask("varlen"))


def unseen_keys(case: Case) -> Pairs:
    """Rows and keys that do not count may have any values."""
    left = int(case.rng.integers(0, 4))
    windowed = case.problem.changed(causal=True, window_size=(left, 0))
    ruined = dataclasses.replace(windowed, k=[a.copy() for a in windowed.k], v=[a.copy() for a in windowed.v])
    for (rows, keys), k, v in zip(windowed.lengths, ruined.k, ruined.v, strict=True):
        hidden = keys if not rows else max(0, keys - rows - left)
        k[:hidden] = v[:hidden] = np.nan
    for door in ("varlen", "padded", "paged"):
        yield from both(case.ask(door, ruined), case.ask(door, windowed))


def views(case: Case) -> Pairs:
    for door in ("dense", "paged", "cudnn"):
        form = str(case.rng.choice(FORMS[1:]))
        problem = case.problem if door != "cudnn" else Problem(case.problem.q, case.problem.k, case.problem.v, {})
        how = {"forms": (form, form), "out": form if form != "read only" and door != "cudnn" else "plain"}
        yield from both(case.ask(door, problem, **how), case.ask(door, problem))


def rows_in_chunks(case: Case) -> Pairs:
    problem = case.problem.changed(causal=True)
    for door in ("paged", "varlen"):
        whole = [case.ask(door, problem.alone(index)) for index in range(len(problem.q))]
        for index, ((rows, keys), answer) in enumerate(zip(problem.lengths, whole, strict=True)):
            cut = int(case.rng.integers(0, rows + 1))
            last = max(0, keys - rows + cut)
            alone = problem.alone(index)
            first = dataclasses.replace(alone, q=[alone.q[0][:cut]], k=[alone.k[0][:last]], v=[alone.v[0][:last]])
            second = dataclasses.replace(alone, q=[alone.q[0][cut:]])
            if rows > keys or not 0 < cut < rows:
                continue
            parts = [case.ask(door, part) for part in (first, second)]
            yield np.concatenate([part.out for part in parts]), answer.out
            yield np.concatenate([part.lse for part in parts], axis=1), answer.lse


def forked_caches(case: Case) -> Pairs:
    plain = case.ask("kv_cache", page_size=16)
    yield from both(case.ask("kv_cache", forked=True, page_size=16), plain)
    yield from both(case.ask("kv_cache", new=True, forked=True, page_size=16), plain)
    yield from both(case.ask("kv_cache", new=True, packed_rows=True, page_size=16), plain)


def split_keys(case: Case) -> Pairs:
    plain = case.ask("paged", num_splits=1)
    yield from both(case.ask("paged", num_splits=int(case.rng.integers(2, 6))), plain)
    pads = case.rng.integers(0, 4, len(case.problem.q)).tolist()
    yield from both(case.ask("paged", leftpad=pads), plain)
    places = case.rng.permutation(len(case.problem.q)).tolist()
    yield from both(case.ask("cache", places=places), plain)


def cudnn_and_graph(case: Case) -> Pairs:
    kind = str(case.rng.choice(["none", "causal", "sliding_window", "causal_sliding_window"]))
    width = int(case.rng.integers(1, 5)) if "window" in kind else 0
    options = {"causal": kind.startswith("causal"), "alignment": str(case.rng.choice(["top_left", "bottom_right"]))}
    if width:
        options["window_size"] = (width - 1, -1 if options["causal"] else width - 1)
    problem = case.problem.changed(**options)
    dense = case.ask("dense", problem)
    yield from both(case.ask("cudnn", problem, mask=(kind, width)), dense)
    if "bias" not in problem.options or problem.options["bias"].dtype != np.bool_:  # graphs cannot add a bool bias
        yield from both(case.ask("graph", problem, mask=(kind, width)), dense)


def options_as_score_modifications(case: Case) -> Pairs:
    """A softcap and ALiBi as nodes of a graph."""
    problem = case.problem
    (heads, heads_kv), ((rows, keys), *_) = problem.heads, problem.lengths
    cap = float(case.rng.choice([0.5, 5.0]))
    slopes = case.rng.uniform(0.01, 0.5, heads).astype(np.float32)
    dtype, batch, dim = case.spec.dtype, len(problem.q), case.spec.dims[0]
    graph = ga.OperationGraph()
    q = graph.tensor(uid=1, dims=(batch, heads, rows, dim), dtype=dtype)
    k, v = (graph.tensor(uid=uid, dims=(batch, heads_kv, keys, dim), dtype=dtype) for uid in (2, 3))
    slope = graph.tensor(uid=4, dims=(1, heads, 1, 1), dtype="float32")
    scores = graph.matmul(q, graph.transpose(k)) * 0.25
    distance = abs(graph.index(scores, 2) + (keys - rows) - graph.index(scores, 3))
    scores = graph.tanh(scores / cap) * cap - slope * distance
    graph.output(graph.matmul(graph.softmax(scores), v), uid=5, dtype=dtype)
    arrays = {
        uid: np.ascontiguousarray(np.stack(part).swapaxes(1, 2))
        for uid, part in ((1, problem.q), (2, problem.k), (3, problem.v))
    }
    result = case.ctx.cudnn.execute(graph, {**arrays, 4: slopes[None, :, None, None]}).result(60)[5]
    said = case.ask("dense", problem.changed(softcap=cap, alibi_slopes=slopes, softmax_scale=0.25))
    yield result.swapaxes(1, 2).reshape(said.out.shape), said.out


# Gradients

_LEARNT = ("q", "k", "v", "bias", "sinks")


def _gradients(
    case: Case, problem: Problem, dout: Any = None, door: str = "varlen backward", results: Any = None
) -> dict[str, Any]:
    """Packed gradients by name, and their ``dout``: small numbers, whose sums every dtype holds.

    results: the out and the LSE for backward; by default forward's own.
    """
    wide = {"lse_dtype": "float64"} if case.spec.dtype == "float64" else {}
    if results is None:
        forward = case.ask("varlen", problem, **wide)
        results = {"out": forward.out, "lse": forward.lse}
    if dout is None:
        dout = case.narrow(case.rng.integers(-2, 3, results["out"].shape))
    rows, keys = zip(*problem.lengths, strict=True)
    spec = dataclasses.replace(case.spec, door=door, rows=rows, keys=keys, how={**case.spec.how, **wide})
    asked = ask_of(spec, problem, {"dout": dout, **results})
    found = answer_of(asked, send(case.ctx, asked)).gradients
    check_unharmed(asked)
    return {"dout": dout, **{name: getattr(found, f"d{name}") for name in _LEARNT}}


def finite_differences(case: Case) -> Pairs:
    found = _gradients(case, case.problem)

    def loss(**changed: Array) -> float:
        cuts = {name: np.cumsum([len(a) for a in getattr(case.problem, name)])[:-1] for name in "qkv"}
        packed = dict(zip("qkv", case.problem.packed, strict=True)) | changed
        parts = {name: np.split(packed[name], cuts[name]) for name in "qkv"}
        options = {name: array for name, array in changed.items() if name not in "qkv"}
        moved = dataclasses.replace(case.problem, **parts).changed(**options)
        return float((case.ask("varlen", moved).out * found["dout"]).sum())

    at = dict(zip("qkv", case.problem.packed, strict=True)) | case.problem.options
    for name in _LEARNT:
        if found[name] is None:
            continue
        towards = case.rng.standard_normal(at[name].shape)
        step, values = 1e-3, at[name].astype(np.float64)
        far, near = (
            loss(**{name: values + steps * step * towards}) - loss(**{name: values - steps * step * towards})
            for steps in (2, 1)
        )
        slope = (8 * near - far) / (12 * step)
        yield (found[name].astype(np.float64) * towards).sum(), slope


def sums_of_gradients(case: Case) -> Pairs:
    one, other = (_gradients(case, case.problem) for _ in range(2))
    both = _gradients(case, case.problem, one["dout"] + other["dout"])
    for name in _LEARNT:
        if one[name] is not None:
            yield one[name].astype(np.float64) + other[name], both[name]


def gradients_of_layouts(case: Case) -> Pairs:
    packed = _gradients(case, case.problem)
    doors = ["padded backward"] + ["dense backward"] * (
        len(set(case.problem.lengths)) == 1 and "spare" not in case.spec.how
    )
    for door in doors:
        found = _gradients(case, case.problem, packed["dout"], door)
        for name in _LEARNT:
            if packed[name] is not None:
                yield found[name], packed[name]


def gradients_alone(case: Case) -> Pairs:
    whole = _gradients(case, case.problem)
    ends = case.problem.ends
    for index in range(len(case.problem.q)):
        rows, keys = (slice(*ends[f"cu_seqlens_{side}"][index : index + 2]) for side in "qk")
        alone = _gradients(case, case.problem.alone(index), whole["dout"][rows])
        for name, part in (("q", rows), ("k", keys), ("v", keys)):
            yield alone[name], whole[name][part]


def gradients_of_shared_keys(case: Case) -> Pairs:
    """Keys that sequences share have the sum of their gradients."""
    (keys, values), batch = (case.problem.k[0], case.problem.v[0]), len(case.problem.q)
    shared = dataclasses.replace(case.problem, k=[keys] * batch, v=[values] * batch)
    each = _gradients(case, shared, door="dense backward")
    one = dataclasses.replace(
        case, spec=dataclasses.replace(case.spec, shared="kv", how={**case.spec.how, "one": True})
    )
    found = _gradients(one, shared, each["dout"], "dense backward")
    for name in "kv":
        yield (
            found[name][0],
            each[name].reshape(batch, *keys.shape[:1], *each[name].shape[1:]).astype(np.float64).sum(0),
        )
    yield found["q"], each["q"]


# The table

_MASKS = ("causal", "alignment", "window_size", "sink_tokens", "attention_chunk")
_SCORES = ("softmax_scale", "softcap", "alibi_slopes", "sinks", "bias")
_CACHED_MASKS = ("causal", "window_size", "sink_tokens", "attention_chunk")
_FLASH = (*_MASKS, *_SCORES, "alibi_signed", "q_positions", "k_positions")
_HEADS = ("causal", "window_size", "alignment", "softmax_scale", "softcap", "alibi_slopes", "sinks", "bias")
_SMOOTH = ("causal", "window_size", "softmax_scale", "softcap", "alibi_slopes", "sinks", "bias", "k_positions")


@dataclass(frozen=True)
class Relation:
    """pairs: arrays that must agree. options: further options of problems. alike: sequences are equally long.

    kernels: the options of problems on kernels, or None if these are not asked. square: q, k and v have one
    head_dim, as cuDNN's. hides: a bias may hide keys by large numbers. sampled: kernels are asked in the default run.
    """

    pairs: Callable[[Case], Pairs]
    options: tuple[str, ...] = ()
    alike: bool = False
    kernels: tuple[str, ...] | None = ()
    square: bool = False
    hides: bool = True
    sampled: bool = False

    def cases(self, device: str) -> st.SearchStrategy[Spec]:
        dtype, dims, _ = DEVICES[device]
        square = tuple((dim, dim) for dim, _ in dims)
        family = Family(
            doors=("dense" if self.alike else "varlen",),
            dtypes=(dtype,),
            dims=square if self.square else dims,
            options=None if device == "mock" else self.kernels,
            pool=self.options,
            plain=True,
            lengths=st.one_of(st.integers(int(self.alike), 9), st.sampled_from((17, 33))),
        )
        return specs(family)


RELATIONS = {
    "keys in parts merge into the whole": Relation(
        keys_in_parts, (*_CACHED_MASKS, *_SCORES), alike=True, hides=False, sampled=True
    ),
    "rows and keys in shards add up": Relation(
        rows_and_keys_in_shards, (*_CACHED_MASKS, *_SCORES[:-1], "dropout_p"), alike=True, hides=False
    ),
    "cached keys in parts merge into the whole": Relation(
        cached_keys_in_parts, (*_CACHED_MASKS, *_SCORES), alike=True, hides=False
    ),
    "caches are packed keys": Relation(every_cache, (*_CACHED_MASKS, *_SCORES), kernels=("causal",)),
    "caches of one row are packed keys": Relation(one_row_over_caches, (*_CACHED_MASKS, *_SCORES[:-1])),
    "padded and dense are packed": Relation(padding, _FLASH, kernels=("causal",), sampled=True),
    "a batch is its sequences": Relation(each_alone, _FLASH, kernels=("sinks",), sampled=True),
    "the order of a batch is immaterial": Relation(another_order, (*_CACHED_MASKS, *_SCORES)),
    "grouped heads are repeated heads": Relation(heads_repeated, (*_CACHED_MASKS, *_SCORES), sampled=True),
    "a head has its own slope, sink and bias": Relation(heads_apart, _FLASH, kernels=("alibi_slopes", "sinks")),
    "a boundless window is none": Relation(boundless_window, ("causal", "alignment", *_SCORES)),
    "masks are biases": Relation(masks_as_biases, ("softmax_scale", "softcap", "alibi_slopes", "sinks"), alike=True),
    "chunks of keys are biases": Relation(chunks_as_biases, ("softmax_scale", "softcap", "sinks"), alike=True),
    "slopes are biases": Relation(slopes_as_biases, (*_CACHED_MASKS, "softcap", "sinks"), alike=True),
    "sinks are keys": Relation(sinks_as_keys, ("softmax_scale",), alike=True),
    "equal scores more move the LSE": Relation(raised_scores, (*_MASKS, "softcap", "alibi_slopes"), alike=True),
    "the scale may be q's": Relation(scale_in_q, (*_CACHED_MASKS, "softcap", "alibi_slopes", "sinks", "bias")),
    "the scale follows from the head": Relation(default_scale, (*_CACHED_MASKS, "softcap", "sinks")),
    "the order of keys is immaterial": Relation(keys_in_any_order, ("softmax_scale", "softcap", "sinks")),
    "unseen keys are not read": Relation(unseen_keys, ("softcap", "alibi_slopes", "sinks")),
    "views are copies": Relation(views, (*_CACHED_MASKS, *_SCORES), alike=True, square=True),
    "rows in chunks are the whole": Relation(rows_in_chunks, ("window_size", *_SCORES[:-1])),
    "forked caches are copies": Relation(forked_caches, (*_CACHED_MASKS, *_SCORES), sampled=True),
    "split keys and padded caches are the whole": Relation(split_keys, (*_CACHED_MASKS, *_SCORES)),
    "cuDNN's messages and graphs are forward": Relation(
        cudnn_and_graph, ("softmax_scale", "bias"), alike=True, square=True
    ),
    "a softcap and slopes are score modifications": Relation(options_as_score_modifications, alike=True, square=True),
    "gradients are finite differences": Relation(finite_differences, _SMOOTH, kernels=None, hides=False),
    "gradients of a sum are sums": Relation(sums_of_gradients, _FLASH, sampled=True),
    "gradients of every layout are alike": Relation(gradients_of_layouts, _FLASH),
    "gradients of a batch are its sequences'": Relation(
        gradients_alone, tuple(o for o in _FLASH if o not in ("bias", "sinks"))
    ),
    "shared keys have the sum of gradients": Relation(gradients_of_shared_keys, _HEADS, alike=True),
}

# dtype, dims, tolerance
DEVICES = {
    "mock": ("float64", ((5, 3), (8, 8)), 1e-6),
    "sm_80": ("float32", ((16, 16),), 2e-5),
    "sm_90a": ("float16", ((64, 64),), 8e-3),
}


def agree(left: Any, right: Any, tolerance: float) -> None:
    """Equal infinities; the rest within the tolerance times the element, or the array's largest from 1 to 100."""
    left, right = (np.asarray(array).astype(np.float64) for array in (left, right))
    assert left.shape == right.shape
    finite = np.isfinite(left) & np.isfinite(right)
    np.testing.assert_array_equal(left[~finite], right[~finite])
    left, right = left[finite], right[finite]
    size = np.maximum(np.abs(right), min(max(1.0, np.abs(right).max(initial=0.0)), 100.0))
    assert (np.abs(left - right) <= tolerance * size).all(), np.abs((left - right) / size).max()


def hold(ctx: ga.GpuContext, name: str, spec: Spec, tolerance: float) -> None:
    relation = RELATIONS[name]
    if not relation.hides and "bias" in spec.options:
        spec = dataclasses.replace(spec, options={**spec.options, "bias": (*spec.options["bias"][:4], False)})
    if "bias" in spec.options and not DOORS[spec.door].alike:  # over a cache it has at least a row and a key
        least = int(not max(spec.rows)), int(not max(spec.keys))
        spare = tuple(map(max, spec.how.get("spare", (0, 0)), least))
        spec = dataclasses.replace(spec, how={**spec.how, "spare": spare})
    problem = problem_of(spec, finite="gradients" in name)
    for left, right in relation.pairs(Case(ctx, spec, problem, np.random.default_rng([spec.seed, 9]))):
        agree(left, right, tolerance)


def _runs() -> Iterator[Any]:
    """(device, relation, times as many examples). The default run has few on kernels, which have tests of their own."""
    for device, (name, relation) in itertools.product(DEVICES, RELATIONS.items()):
        if device == "mock" or relation.kernels is not None:
            sampled = device == "mock" or (device == "sm_80" and relation.sampled)
            for times in (1, 10) if sampled else (10,):
                marks = [pytest.mark.sweep] * (times > 1)
                yield pytest.param(device, name, times, marks=marks, id=f"{device}-{name}-{times}")


@pytest.mark.parametrize(("device", "name", "times"), list(_runs()))
def test_both_sides_of_a_relation_agree(opened: Any, device: str, name: str, times: int) -> None:
    mock = device == "mock"

    @budget(times * (20 if mock else 5))
    @given(spec=RELATIONS[name].cases(device))
    def holds(spec: Spec) -> None:
        ctx = opened("mock", "sm_90a") if mock else opened("emulated", device)
        hold(ctx, name, spec, DEVICES[device][2])

    holds()
