"""Texts: one sequence of rows, keys and values, whose rows are requested in many ways. For tests.

An invariant context gives a row the same bits in all of them.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from properties.doors import DOORS, ask
from properties.problems import Array, Problem, Spec, has_sequences, problem_of
from properties.strategies import budget

import gpu_actors as ga

__all__ = [
    "CACHED",
    "CACHES",
    "FORMS",
    "FORWARD",
    "KINDS",
    "RICH",
    "SERVINGS",
    "SPEC",
    "VARIANTS",
    "Serving",
    "bits",
    "differing",
    "hold",
    "served",
]

RICH = {"window_size": (70, -1), "sink_tokens": 3, "softcap": 5.0, "alibi_slopes": "heads", "sinks": True}
# Each form compiles kernels of its own, so the default run has few.
FORMS: dict[str, dict[str, Any]] = {
    # Scores of a wide spread, so that the maxima of some rows rise from tile to tile and others' do not.
    "float16": {"dtype": "float16", "dims": (64, 64), "options": {"softmax_scale": 0.75}},
    "bfloat16, options": {"dtype": "bfloat16", "dims": (40, 24), "options": RICH},
    "float32": {"dtype": "float32", "dims": (5, 3)},
}
E4M3 = "float8_e4m3fn"
CACHES: dict[str, dict[str, Any]] = {
    "a cache in 8 bits": {
        "dtype": "float16",
        "dims": (64, 64),
        "how": {"kv_dtype": E4M3},
        "options": {"k_descale": True, "v_descale": True},
    },
    "8 bits": {
        "dtype": E4M3,
        "dims": (64, 64),
        "how": {"kv_dtype": E4M3},
        "options": {"q_descale": True, "k_descale": True, "v_descale": True},
    },
    "latents": {"dtype": "bfloat16", "dims": (320, 256), "how": {"latent": True}, "options": {"softmax_scale": 0.2}},
}
# Forms for other variants of the kernels: wider heads, heads that no tensor core takes, and caches.
VARIANTS: dict[str, dict[str, Any]] = {
    "128 columns": {"dtype": "float16", "dims": (128, 128), "options": {"softmax_scale": 0.3}},
    "256 columns": {"dtype": "bfloat16", "dims": (256, 256), "options": {"softmax_scale": 0.2}},
    "512 columns": {"dtype": "bfloat16", "dims": (320, 512), "options": {"softmax_scale": 0.2}},
    "20 columns": {"dtype": "float16", "dims": (20, 20), "options": {"softmax_scale": 0.1}},
    **CACHES,
}
ANY = {
    "dtype": ("float16", "bfloat16", "float32", "float64"),
    "dims": ((64, 64), (40, 24), (5, 3), (128, 96), (256, 192), (320, 512)),
    "window_size": ((0, -1), (63, -1), (70, 0)),
    "sink_tokens": (1, 3, 65),
    "attention_chunk": (7, 64, 90),
    "softmax_scale": (0.05, 1.0),
    "softcap": (0.5, 30.0),
    "alibi_slopes": ("heads", "batch"),
    "sinks": (True,),
}
HEADS = ((1, 1), (2, 2), (1, 8), (1, 17))  # KV heads, and query heads for each
FORWARD, CACHED = ("dense", "varlen", "padded"), ("paged", "cache", "pointers", "kv_cache")
MASKED = ("cudnn", "graph")  # these name each kind of mask

SPEC = Spec(dtype="float16", rows=(150,), keys=(150,), heads=(4, 1), dims=(64, 64), options={"causal": True})


@dataclass(frozen=True)
class Serving:
    """How rows of a text are requested. first, last: the range of rows. neighbours: rows and keys of other sequences.

    place: of the text among the sequences.
    """

    door: str
    first: int
    last: int
    neighbours: tuple[tuple[int, int], ...] = ()
    place: int = 0
    how: tuple[tuple[str, Any], ...] = ()


@st.composite
def servings(draw: st.DrawFn, length: int, doors: tuple[str, ...], free: bool = False) -> Serving:
    """free: also with leftpad, which needs variants of its own."""
    door = draw(st.sampled_from(doors))
    last = draw(st.integers(1, length))
    rows = 1 if door == "pointers" else draw(st.integers(1, last))
    beside = draw(st.lists(st.tuples(st.integers(1, 40), st.integers(1, 150)), max_size=3))
    if DOORS[door].alike:
        beside = [(rows, last)] * len(beside)
    elif door in CACHED:
        alike = door == "pointers" or draw(st.booleans())
        beside = [(rows, max(rows, keys)) if alike else (min(more, keys), keys) for more, keys in beside]
    how: dict[str, Any] = {"page_size": draw(st.sampled_from((1, 3, 8, 16, 48, 64)))}
    if door == "kv_cache":
        how |= {name: draw(st.booleans()) for name in ("new", "forked", "turned")}
    if free and door in ("paged", "cache") and draw(st.booleans()):
        how["leftpad"] = [draw(st.integers(0, 70)) for _ in range(len(beside) + 1)]
    return Serving(door, last - rows, last, tuple(beside), draw(st.integers(0, len(beside))), tuple(how.items()))


@st.composite
def texts(draw: st.DrawFn, given: dict[str, Any] | None) -> Spec:
    """given: dtype, dims, options and how of the text; None: any."""
    if given is None:
        names = draw(st.lists(st.sampled_from(sorted(ANY.keys() - {"dtype", "dims"})), unique=True))
        drawn: dict[str, Any] = {name: draw(st.sampled_from(ANY[name])) for name in (*names, "dtype", "dims")}
        given = {"dtype": drawn.pop("dtype"), "dims": drawn.pop("dims"), "options": drawn}
    length = draw(st.integers(1, 150))
    heads_kv, ratio = (1, 4) if "latent" in given.get("how", {}) else draw(st.sampled_from(HEADS))
    heads = (heads_kv * ratio, heads_kv)
    options = {"causal": True, **given.get("options", {})}
    seed = draw(st.integers(0, 999))
    return Spec(rows=(length,), keys=(length,), heads=heads, seed=seed, **{**given, "options": options})


def served(ctx: ga.GpuContext, spec: Spec, text: Problem, serving: Serving) -> tuple[Array, Array]:
    """Out (rows, heads, dim) and LSE (rows, heads) of the rows of a serving."""
    mine, known = slice(serving.first, serving.last), DOORS[serving.door].options
    lengths = [(serving.last - serving.first, serving.last), *serving.neighbours]
    rows, keys = zip(*lengths, strict=True)
    others = problem_of(dataclasses.replace(spec, rows=rows, keys=keys, seed=spec.seed + 1))
    q = [text.q[0][mine], *others.q[1:]]
    k, v = ([own[0][: serving.last], *more[1:]] for own, more in ((text.k, others.k), (text.v, others.v)))
    options = {}
    for name, value in text.options.items():
        if name in known or (serving.door in MASKED and name == "softmax_scale"):
            options[name] = others.options[name].copy() if has_sequences(name, value) or name == "bias" else value
            if name == "bias":
                options[name][:1, :, : rows[0], : keys[0]] = value[:, :, mine, : serving.last]
            elif has_sequences(name, value):
                options[name][:1] = value
    how = {**spec.how, **dict(serving.how), "return_lse": True}
    if serving.door in MASKED:
        how["mask"], options["alignment"] = ("causal", 0), "bottom_right"
    order = [*range(1, serving.place + 1), 0, *range(serving.place + 1, len(rows))]
    problem = Problem(q, k, v, options).taken(order)
    lengths = problem.lengths
    rows, keys = zip(*lengths, strict=True)
    answer = ask(ctx, dataclasses.replace(spec, door=serving.door, rows=rows, keys=keys, how=how), problem)
    begin = sum(rows[: serving.place])
    part = slice(begin, begin + rows[serving.place])
    return answer.out[part], answer.lse.T[part]


def bits(array: Array) -> Array:
    return np.ascontiguousarray(array).view(np.uint8)


def differing(ctx: ga.GpuContext, spec: Spec, asked: list[Serving], door: str = "dense") -> list[Serving]:
    """The servings whose rows have other bits than the whole text requested at ``door``."""
    text = problem_of(spec)
    out, lse = served(ctx, spec, text, Serving(door, 0, spec.rows[0]))
    found = []
    for serving in asked:
        mine, sums = served(ctx, spec, text, serving)
        rows = slice(serving.first, serving.last)
        if not (np.array_equal(bits(mine), bits(out[rows])) and np.array_equal(bits(sums), bits(lse[rows]))):
            found.append(serving)
    return found


# One for each kind of variant that a form has: pages of several keys and of one, a cache, arrays, packed sequences.
KINDS = [
    Serving("paged", 149, 150, ((1, 40), (1, 150)), 1, (("page_size", 64),)),
    Serving("paged", 60, 150, ((37, 140),), 1, (("page_size", 48),)),
    Serving("paged", 100, 101, ((1, 140),), 0, (("page_size", 1),)),
    Serving("cache", 30, 90, (), 0, (("leftpad", [13]),)),
    Serving("pointers", 100, 101),
    Serving("varlen", 20, 90, ((7, 30),), 1),
]
SERVINGS = [
    Serving("dense", 149, 150),
    Serving("dense", 60, 150),
    Serving("paged", 149, 150, ((1, 40), (1, 150))),
    Serving("paged", 100, 101, ((37, 140),), 1),
    Serving("varlen", 20, 90, ((7, 30),), 1),
    Serving("kv_cache", 120, 150, how=(("new", True), ("page_size", 16))),
]


def hold(ctx: ga.GpuContext, examples: int, given_text: dict[str, Any] | None, doors: tuple[str, ...]) -> None:
    @budget(examples)
    @given(st.data())
    def check(data: st.DataObject) -> None:
        spec = data.draw(texts(given_text))
        free = given_text is None or "how" in given_text
        asked = data.draw(st.lists(servings(spec.rows[0], doors, free), min_size=3, max_size=5))
        assert not differing(ctx, spec, asked, doors[0])

    check()
