"""Experiments of the kernels that compute no attention: appends to caches, copies of pages, merges of partials."""

from __future__ import annotations

import functools
import struct
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from gpu_actors.arrays.adopt import dtype_of
from gpu_actors.compiling.variant import Variant
from gpu_actors.devices.interface import Buffer, Kernels, Launch, LaunchGeometry, ScratchSpec, Step, StepPack
from gpu_actors.kernels.append import (
    AppendProblem,
    AppendTrial,
    append_geometry,
    append_trials,
    append_variant,
    pack_append,
)
from gpu_actors.kernels.copy_pages import pack_page_copy, page_copy_geometry, page_copy_variant
from gpu_actors.kernels.merge import MergeProblem, merge_gradient_variants, merge_trials, merge_variant
from gpu_actors.partial import MergeBackward, MergePartials, Partial
from gpu_actors.planning.partials import MergePlan, bind_merge, bind_merge_gradients, merge_gradients_of
from gpu_actors.qualification.experiment import Experiment, poisoned, random_of
from gpu_actors.reference.append import append_rows, appended_rows, copy_pages
from gpu_actors.reference.cache_tolerance import assert_rows_close, assert_same_bits
from gpu_actors.reference.merge_tolerance import assert_merge_close, assert_merge_gradients_close
from gpu_actors.reference.rope import apply_rope, rope_angles

__all__ = ["append_experiments", "copy_experiments", "merge_experiments"]

_LEAST_DESCALE = 0.01


def _step(geometry: LaunchGeometry, pack: StepPack) -> Callable[[Kernels], tuple[Step, ...]]:
    return lambda kernels: tuple(Step(kernel, geometry, pack) for kernel in kernels)


def _rng_of(problem: object) -> np.random.Generator:
    return np.random.default_rng(zlib.crc32(repr(problem).encode()))


# Appends


def append_experiments(variant: Variant) -> Iterator[Experiment]:
    assert isinstance(variant.example, AppendProblem)
    for trial in append_trials(variant.example):
        data = _Rows(trial)
        yield Experiment(
            problem=trial.problem,
            key=None,
            variants=(append_variant(trial.problem, variant.arch),),
            inputs=data.inputs,
            written=data.written,
            steps=_step(append_geometry(trial.problem), functools.partial(pack_append, trial.problem)),
            scratch=data.scratch,
            answer=data.answer,
            check=data.check,
        )


class _Rows:
    """The arrays of an append. Caches begin with random bits, so that a row in a wrong place is found."""

    def __init__(self, trial: AppendTrial) -> None:
        self.problem = p = trial.problem
        rng = self._rng = _rng_of(p)
        batch = p.batch
        self.ends = np.concatenate([[0], np.cumsum(trial.new)]).astype(np.int32)
        self.lengths = (np.array(trial.before) + np.array(trial.new)).astype(np.int32)
        self.inputs: dict[str, Any] = {
            "k": random_of(rng, (p.total, p.heads_kv, p.head_dim), p.dtype),
            "v": random_of(rng, (p.total, p.heads_kv, p.head_dim_v), p.dtype),
            "cache_seqlens": self.lengths,
            "cu_seqlens_q": self.ends,
        }
        places = np.zeros(p.total, np.int32)
        for row, _, place in appended_rows(self.ends, self.lengths):
            places[row] = place
        self.positions = places
        if p.positions:
            most = p.rope.table_rows if p.rope is not None and p.rope.table_rows else 3000
            self.positions = self.inputs["positions"] = rng.integers(0, most, p.total).astype(np.int32)
        if p.rope is not None and p.rope.table_rows:
            angles = rng.uniform(-3.0, 3.0, (p.rope.table_rows, p.rope.dim // 2))
            self.inputs["rope_cos"] = (1.25 * np.cos(angles)).astype(np.float32)
            self.inputs["rope_sin"] = (1.25 * np.sin(angles)).astype(np.float32)
        for name in ("k_descale", "v_descale") if p.descales else ():
            if name == "k_descale" or not p.latent:
                self.inputs[name] = rng.uniform(_LEAST_DESCALE, 3.0, (batch, p.heads_kv)).astype(np.float32)
        self.table: Any = None
        if p.layout == "paged":
            pages = -(-self.lengths // p.page_size)
            table = rng.permutation(p.num_blocks)[: batch * p.max_blocks].reshape(batch, p.max_blocks)
            self.table = np.where(np.arange(p.max_blocks) < pages[:, None], table, -1).astype(np.int32)
            self.inputs["block_table"] = self.table
        self.written: dict[str, Any] = {}
        self.scratch: dict[str, ScratchSpec] = {}
        for side, dim in p.sides.items():
            self._add_cache(side, dim)
        if p.heads_q:
            self.inputs["q"] = random_of(rng, (p.total, p.heads_q, p.head_dim), p.dtype)
            self.written["q_rotated"] = poisoned((p.total, p.heads_q, p.head_dim), p.dtype)

    def _add_cache(self, side: str, dim: int) -> None:
        p, kind = self.problem, dtype_of(self.problem.cache_dtype)
        name = f"{side}_cache"

        def bits(shape: tuple[int, ...]) -> Any:
            drawn = self._rng.integers(0, 256, (*shape, dim * kind.itemsize), np.uint8)
            return drawn.view(kind)

        if p.layout == "pointers":
            caches = {f"{name}.{index}": bits((p.heads_kv, p.max_seq)) for index in range(p.batch)}
            self.written |= caches
            self.scratch[f"{side}_pointers"] = ScratchSpec(
                (p.batch,), "uint64", contents=functools.partial(_addresses, list(caches))
            )
            return
        outer = (p.num_blocks, p.page_size) if p.layout == "paged" else (p.batch, p.max_seq)
        self.written[name] = bits((*outer, p.heads_kv))

    def _appended(self, k: Any, v: Any, wide: bool, **factors: Any) -> dict[str, Any]:
        """The caches after an append of k and v. wide: in float64; k and v then come from `_factored`."""
        p = self.problem
        with np.errstate(invalid="ignore"):
            caches = {
                name: array.astype(np.float64) if wide else array.copy()
                for name, array in self.written.items()
                if name != "q_rotated"
            }
        k_cache, v_cache = self._sides(caches)
        append_rows(
            k,
            v,
            k_cache,
            v_cache,
            self.ends,
            self.lengths,
            block_table=self.table,
            rope=self.angles,
            interleaved=p.rope is not None and p.rope.interleaved,
            **factors,
        )
        return caches

    @functools.cached_property
    def angles(self) -> tuple[Any, Any] | None:
        """The cosines and sines of the new rows, None if they are not rotated."""
        rope = self.problem.rope
        if rope is None:
            return None
        if rope.table_rows:
            return self.inputs["rope_cos"][self.positions], self.inputs["rope_sin"][self.positions]
        radians = rope_angles(self.positions, np.array(rope.frequencies))
        return np.cos(radians), np.sin(radians)

    def _descales(self) -> dict[str, Any]:
        k = self.inputs.get("k_descale")
        return {"k_descale": k, "v_descale": k if self.problem.latent else self.inputs.get("v_descale")}

    def answer(self) -> Mapping[str, Any]:
        return self.expected

    @functools.cached_property
    def expected(self) -> dict[str, Any]:
        """The arrays of ``written`` after the oracle's append."""
        found = self._appended(self.inputs["k"], self.inputs["v"], False, **self._descales())
        if "q_rotated" in self.written:
            found["q_rotated"] = self._rotated_q()
        return found

    def _rotated_q(self) -> Any:
        rope, angles = self.problem.rope, self.angles
        assert rope is not None
        assert angles is not None
        return apply_rope(self.inputs["q"], *angles, interleaved=rope.interleaved)

    def check(self, outputs: Mapping[str, Any]) -> None:
        """Compare bits if nothing is rotated, and where no rotated row goes; rotated rows within one rounding."""
        p, exact = self.problem, self.expected
        if p.rope is None:
            for name, array in outputs.items():
                assert_same_bits(name, array, exact[name])
            return
        ones = [np.ones((p.total, p.heads_kv, dim)) for dim in (p.head_dim, p.head_dim_v)]
        unscaled = self._factored()
        marks = self._marks(*ones)
        wide = self._appended(*unscaled, True)
        largest = float(np.abs(self.inputs["k"].astype(float)).max(initial=0.0))
        least = _LEAST_DESCALE if p.descales else 1.0
        for name, array in outputs.items():
            if name == "q_rotated":
                assert_rows_close(name, array, self._rotated_q(), float(np.abs(self.inputs["q"].astype(float)).max()))
                continue
            touched = marks[name]
            assert_same_bits(name, np.where(touched, exact[name], array), exact[name])
            assert_rows_close(name, array[touched], wide[name][touched], largest, least)

    def _factored(self) -> tuple[Any, Any]:
        """The new rows in float64, divided by their descales."""
        rows = []
        counts = np.diff(self.ends)
        for side, factors in zip("kv", self._descales().values(), strict=True):
            array = self.inputs[side].astype(np.float64)
            if factors is not None:
                array = array / np.repeat(factors.astype(np.float64), counts, axis=0)[:, :, None]
            rows.append(array)
        return rows[0], rows[1]

    def _sides(self, caches: Mapping[str, Any]) -> tuple[Any, Any]:
        """The caches of K and of V, as the oracle takes them."""
        p = self.problem
        if p.layout == "pointers":
            k_cache, v_cache = ([caches[f"{side}_cache.{index}"] for index in range(p.batch)] for side in "kv")
            return k_cache, v_cache
        if p.latent:
            return caches["k_cache"][..., p.head_dim_v :], caches["k_cache"][..., : p.head_dim_v]
        return caches["k_cache"], caches["v_cache"]

    def _marks(self, ones_k: Any, ones_v: Any) -> dict[str, Any]:
        """Where the new rows of K go. These are the rotated ones."""
        zeros = {name: np.zeros(array.shape) for name, array in self.written.items() if name != "q_rotated"}
        k_cache, v_cache = self._sides(zeros)
        append_rows(ones_k, 0 * ones_v, k_cache, v_cache, self.ends, self.lengths, block_table=self.table)
        return {name: array != 0 for name, array in zeros.items()}


def _addresses(names: list[str], buffers: Mapping[str, Buffer]) -> bytes:
    return struct.pack(f"<{len(names)}Q", *(buffers[name].address for name in names))


# Copies of pages

_POOL = AppendProblem(
    layout="paged", batch=1, total=1, heads_kv=3, head_dim=40, head_dim_v=24, dtype="float16", cache_dtype="float16",
    page_size=64, num_blocks=7,
)  # fmt: skip
_PAIRS = np.array([(0, 5), (2, 1), (6, 4)], np.int32)


def copy_experiments(variant: Variant) -> Iterator[Experiment]:
    """Yield one experiment: copies of pages that have several parts each."""
    rng, pool = _rng_of(_POOL), _POOL
    caches = {
        f"{side}_cache": rng.integers(0, 256, (pool.num_blocks, pool.page_size, pool.heads_kv, 2 * dim), np.uint8).view(
            np.float16
        )
        for side, dim in pool.sides.items()
    }
    copied = {name: cache.copy() for name, cache in caches.items()}
    copy_pages(list(copied.values()), _PAIRS)

    def check(outputs: Mapping[str, Any]) -> None:
        for name, array in outputs.items():
            assert_same_bits(name, array, copied[name])

    yield Experiment(
        problem=pool,
        key=None,
        variants=(page_copy_variant(variant.arch),),
        inputs={"page_pairs": _PAIRS},
        written=caches,
        steps=_step(page_copy_geometry(len(_PAIRS), pool), functools.partial(pack_page_copy, len(_PAIRS), pool)),
        answer=lambda: copied,
        check=check,
    )


# Merges


def merge_experiments(variant: Variant) -> Iterator[Experiment]:
    assert isinstance(variant.example, MergeProblem)
    make = _merge if variant.kernel == "merge" else _merge_gradients
    for problem in merge_trials(variant.example):
        yield make(problem, variant.arch)


class _Partials:
    """Partials. Some of their rows have no keys and hold NaN."""

    def __init__(self, p: MergeProblem) -> None:
        rng = self.rng = _rng_of(p)
        outer = (p.batch,) if p.batch else ()
        self.shape = (*outer, p.rows, p.heads, p.columns)
        self.lse_shape = (*outer, p.heads, p.rows)
        self.partials = []
        for index in range(p.count):
            lse = (3.0 * rng.standard_normal(self.lse_shape)).astype(p.lse_dtype)
            lse[..., (0, 3), 1] = -np.inf
            lse[..., index % p.heads, 2] = -np.inf
            if index == 1:
                lse[...] = -np.inf
            out = random_of(rng, self.shape, p.dtype)
            out[np.isneginf(np.swapaxes(lse, -1, -2))] = np.nan
            self.partials.append(Partial(out, lse))
        self.sinks = None if p.sinks is None else np.array([0.5, -3.0, 2.0, -np.inf]).astype(dtype_of(p.sinks))


def _merge(p: MergeProblem, arch: str) -> Experiment:
    data, plan = _Partials(p), MergePlan(p, (merge_variant(p, arch),))
    message = MergePartials(data.partials, data.sinks, p.out_dtype)

    def check(outputs: Mapping[str, Any]) -> None:
        assert_merge_close(Partial(outputs["out"], outputs["lse"]), data.partials, data.sinks)

    return _merging(plan, functools.partial(bind_merge, plan, message), check)


def _merge_gradients(p: MergeProblem, arch: str) -> Experiment:
    data, plan = _Partials(p), MergePlan(p, merge_gradient_variants(p, arch))
    dout = random_of(data.rng, data.shape, p.out_dtype)
    dlse = data.rng.standard_normal(data.lse_shape).astype(p.out_lse_dtype)
    message = MergeBackward(data.partials, dout, dlse, data.sinks)

    def check(outputs: Mapping[str, Any]) -> None:
        gradients = merge_gradients_of(p.count, outputs)
        assert_merge_gradients_close(gradients, data.partials, dout, dlse, data.sinks)

    return _merging(plan, functools.partial(bind_merge_gradients, plan, message), check)


def _merging(
    plan: MergePlan, bind: Callable[[Kernels], Launch], check: Callable[[Mapping[str, Any]], None]
) -> Experiment:
    launch = bind(Kernels(()))
    return Experiment(
        problem=plan.problem,
        key=None,
        variants=plan.variants,
        inputs=launch.inputs,
        written={name: poisoned(spec.shape, spec.dtype) for name, spec in launch.outputs.items()},
        steps=lambda kernels: bind(kernels).steps,
        scratch=launch.scratch,
        answer=lambda: launch.oracle(launch.inputs),
        check=check,
    )
