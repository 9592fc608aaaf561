"""Hypothesis strategies that draw a whole request as a `Spec`. For tests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from inside.kernels import FIRST_FP8_CAPABILITY, capability
from properties.doors import BACKWARD, CACHED, DOORS, FORMS, FORWARD
from properties.problems import FP8, Spec

__all__ = ["ANY", "Family", "budget", "specs"]

_SMALL = st.integers(0, 6)
# Lengths around the edges of tiles, and a key beyond.
_LENGTHS = st.one_of(st.integers(0, 9), st.sampled_from((15, 16, 17, 33, 64, 65)))
_VALUES: dict[str, st.SearchStrategy[Any]] = {
    "causal": st.just(True),
    "alignment": st.just("top_left"),
    "window_size": st.sampled_from(
        [(left, right) for left in (-1, 0, 1, 3, 40, 1 << 40) for right in (-1, 0, 2, 1 << 31) if max(left, right) >= 0]
    ),
    "sink_tokens": st.integers(1, 5),
    "attention_chunk": st.integers(1, 9),
    "softmax_scale": st.sampled_from((0.05, 0.3, 1.0, -0.2, 0.0)),
    "softcap": st.sampled_from((0.5, 5.0, 30.0)),
    "alibi_slopes": st.sampled_from(("heads", "batch")),
    "alibi_signed": st.just(True),
    "dropout_p": st.sampled_from((0.1, 0.5)),
    "dropout_seed": st.integers(1, (1 << 64) - 1),
    "q_positions": st.sampled_from((1, 2)),
    "k_positions": st.sampled_from((1, 2)),
    "bias": st.tuples(st.sampled_from(("", "float32", "bool")), *[st.booleans()] * 4),
    "mask": st.one_of(
        st.just(("causal", 0)),
        st.tuples(st.sampled_from(("sliding_window", "causal_sliding_window")), st.integers(1, 5)),
    ),
}


@dataclass(frozen=True)
class Family:
    """Which requests may be drawn: with few ``options``, few kernels answer them.

    dtypes, dims: to choose from. options: of every request, as far as its door takes them; None: any of ``pool``, or if
    that is None of the door's. fixed: ``how`` of every request. plain: ``how`` has no other free choices. lengths: of
    sequences.
    """

    doors: tuple[str, ...] = tuple(DOORS)
    dtypes: tuple[str, ...] = ("float16", "bfloat16", "float32", "float64", *FP8)
    dims: tuple[tuple[int, int], ...] = ((8, 8), (16, 16), (5, 3), (40, 24), (64, 64), (96, 128), (256, 192))
    options: tuple[str, ...] | None = None
    fixed: tuple[tuple[str, Any], ...] = ()
    pool: tuple[str, ...] | None = None
    plain: bool = False
    lengths: st.SearchStrategy[int] = _LENGTHS


ANY = Family()


def budget(examples: int) -> settings:
    """Settings of so many examples. A failure is printed with code that repeats it."""
    return settings(max_examples=examples, deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow])


@st.composite
def specs(draw: st.DrawFn, family: Family = ANY, arch: str = "sm_90a") -> Spec:
    door = draw(st.sampled_from(family.doors))
    dtype = draw(st.sampled_from([dtype for dtype in family.dtypes if _takes(door, dtype, arch)]))
    batch = draw(st.integers(1, 4))
    alike = DOORS[door].alike
    rows, keys = _draw_lengths(draw, family.lengths, door, batch, alike)
    options = _draw_options(draw, family, door, dtype)
    if "tree_mask" in options:
        keys = tuple(map(max, rows, keys))
    heads_kv, ratio = draw(st.sampled_from([(1, 1), (2, 1), (2, 2), (1, 3), (3, 2)]))
    dims = draw(st.sampled_from(family.dims))
    how = _draw_how(draw, family, door, dtype, batch, options)
    if "bias" in options and door in CACHED:  # it has a key or more, and exactly q's rows unless they are packed
        rows_more, keys_more = how.get("spare", (0, 0))
        exact = len(set(rows)) == 1 and "packed_rows" not in how
        how["spare"] = 0 if exact else rows_more, max(keys_more, int(not max(keys)))
    if how.get("latent"):
        heads_kv, dims = 1, (dims[0] + 8, dims[0])
        options = {**options, "softmax_scale": 0.2}
        for name in ("v_descale", "q_descale"):
            options.pop(name, None)
    if "cudnn" in door or "graph" in door:
        dims = (dims[0], dims[0])
    shared = draw(st.sampled_from(("", "", "q", "k", "v", "kv"))) if door == "dense" and not family.plain else ""
    return Spec(
        door=door, dtype=dtype, rows=rows, keys=keys, heads=(heads_kv * ratio, heads_kv), dims=dims, shared=shared,
        seed=draw(st.integers(0, 1 << 16)), options=options, how=how,
    )  # fmt: skip


def _takes(door: str, dtype: str, arch: str) -> bool:
    if dtype not in FP8:
        return True
    return door not in (*BACKWARD, "kv_cache", "graph") and (door in CACHED or capability(arch) >= FIRST_FP8_CAPABILITY)


def _draw_lengths(
    draw: st.DrawFn, lengths: st.SearchStrategy[int], door: str, batch: int, alike: bool
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    if door == "pointers":
        rows: tuple[int, ...] = (1,) * batch
    elif alike or (door in CACHED and draw(st.booleans())):
        rows = (draw(lengths if door not in CACHED else _SMALL),) * batch
    else:
        rows = tuple(draw(_SMALL if door in CACHED else lengths) for _ in range(batch))
    keys = (draw(lengths),) * batch if alike else tuple(draw(lengths) for _ in range(batch))
    if "graph" in door:  # a graph's tensors must not be empty
        rows, keys = (tuple(max(1, length) for length in each) for each in (rows, keys))
    return rows, keys


def _draw_options(draw: st.DrawFn, family: Family, door: str, dtype: str) -> dict[str, Any]:
    known: Sequence[str] = DOORS[door].options
    if family.pool is not None:
        known = [name for name in family.pool if name in known]
    if family.options is None and known:
        names = draw(st.lists(st.sampled_from(known), unique=True, max_size=6))
    else:
        names = [name for name in family.options or () if name in known]
    if dtype in FP8:
        names = [name for name in names if name != "dropout_p"]
    else:
        names = [name for name in names if not name.endswith("descale")]
    options = {name: draw(_VALUES.get(name, st.just(True))) for name in names}
    if family.options is not None:  # values that one kernel takes
        if options.get("softmax_scale", 1.0) <= 0.0:
            options["softmax_scale"] = 0.7
        if "bias" in options:
            options["bias"] = ("float32", *options["bias"][1:])
    if options.keys() & {"q_positions", "k_positions"}:
        options.pop("alignment", None)
    if "tree_mask" in options:
        options.pop("causal", None)
    if "bias" in options and door == "graph backward":  # kernels give no gradient of a bias that rows share
        options["bias"] = (*options["bias"][:3], True, options["bias"][4])
    if "bias" in options and ((dtype in FP8 and not options["bias"][0]) or "graph" in door):  # graphs add numbers
        options["bias"] = ("float32", *options["bias"][1:])
    return options


def _draw_how(
    draw: st.DrawFn, family: Family, door: str, dtype: str, batch: int, options: dict[str, Any]
) -> dict[str, Any]:
    how: dict[str, Any] = dict(family.fixed)
    free = family.options is None
    name, _, backward = door.partition(" ")

    def may(field: str, values: st.SearchStrategy[Any]) -> None:
        if not family.plain and field not in how and draw(st.booleans()):
            how[field] = draw(values)

    form = st.sampled_from([form for form in FORMS if form != "columns" or name != "graph"])  # its rows are contiguous
    may("forms", st.tuples(form, form))
    if not backward:
        may("return_lse", st.just(True))
    if name in ("varlen", "padded") or door in CACHED:
        may("spare", st.tuples(st.integers(0, 3), st.integers(0, 3)))
    if "mask" in options:
        how["mask"] = options.pop("mask")
        options |= _mask(*how["mask"])
    if name in ("cudnn", "graph"):
        options.setdefault("alignment", draw(st.sampled_from(("top_left", "bottom_right"))))
    if (door in FORWARD and door not in ("cudnn", "graph")) or door in CACHED:
        # The sequences of a padded ``out`` follow each other without gaps.
        may("out", st.sampled_from(FORMS[:2] if name == "padded" else FORMS[:-1]))
        if free and dtype != "float64":
            may("out_dtype", st.just("float32"))
    if free and dtype == "float32" and name in ("dense", "varlen", "padded"):
        may("compute", st.sampled_from(("f32", "tf32", "f16", "bf16")))
    if free and dtype == "float64" and name in ("dense", "varlen", "padded") and (backward or how.get("return_lse")):
        may("lse_dtype", st.just("float64"))
    if door == "dense":
        may("pack_gqa", st.booleans())
    if backward:
        bias = options.get("bias")
        own_tiles = name in ("varlen", "padded") or options.keys() & {"q_positions", "k_positions"}
        if bias is None or (bias[3] and (bias[1] or not own_tiles)):
            may("deterministic", st.just(True))
    if door in CACHED:
        _draw_cached(draw, may, how, free, door, dtype, batch)
    if name == "dense":
        may("one", st.just(True))
    if name == "padded" and options.get("dropout_p") and backward and options.get("bias", ("", False))[1]:
        del options["dropout_p"]  # such a dbias has no place for the empty sequences that dropout counts
    return how


def _draw_cached(draw: st.DrawFn, may: Any, how: dict[str, Any], free: bool, door: str, dtype: str, batch: int) -> None:
    if door != "pointers":
        may("packed_rows", st.just(True))
    how.setdefault("page_size", draw(st.sampled_from((1, 3, 5, 8, 16, 64) if free else (16,))))
    if free:
        may("num_splits", st.integers(1, 4))
    if door == "kv_cache":
        may("new", st.just(True))
        may("forked", st.just(True))
        may("turned", st.just(True))
    if free and door in ("paged", "cache"):
        may("leftpad", st.lists(st.integers(0, 5), min_size=batch, max_size=batch))
        if dtype in ("float16", "bfloat16"):
            may("kv_dtype", st.sampled_from(FP8))
        may("latent", st.just(True))
        if "kv_dtype" in how:
            how.pop("latent", None)
    if free and door == "cache":
        may("places", st.permutations(range(batch)))
    if door == "pointers":
        may("own", st.just(True))
        if "own" not in how:
            may("one", st.just(True))


def _mask(kind: str, width: int) -> dict[str, Any]:
    """The options of flash_attn for cuDNN's mask of that kind and width."""
    window = {"sliding_window": (width - 1, width - 1), "causal_sliding_window": (width - 1, -1)}
    return {"causal": kind.startswith("causal"), "window_size": window.get(kind, (-1, -1))}
