"""Experiments of attention and of its gradients, made from the trials of each family."""

from __future__ import annotations

import dataclasses
import functools
import zlib
from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np

from gpu_actors.arrays.adopt import dtype_of
from gpu_actors.attention.key_mask import MASK_OPTIONS
from gpu_actors.attention.problem import AttentionProblem, DispatchKey
from gpu_actors.compiling.variant import Variant
from gpu_actors.devices.interface import Device
from gpu_actors.kernels.decode_mma import PLAN
from gpu_actors.kernels.decode_sm90 import DECODE_SM90
from gpu_actors.kernels.decode_tiles import decode_tile
from gpu_actors.kernels.dispatch import dispatch_key, family_of, program_of
from gpu_actors.kernels.family import KernelFamily
from gpu_actors.kernels.program import Target, Values
from gpu_actors.kernels.support import ELEMENTS
from gpu_actors.kernels.trials import BROKEN, Trial, crowded_trials
from gpu_actors.kernels.variants import variants_of
from gpu_actors.qualification.experiment import Experiment, poisoned, random_of
from gpu_actors.reference import ReferenceGradients, attention_backward, attention_forward
from gpu_actors.reference.gradient_tolerance import (
    GRADIENTS,
    GradientBounds,
    assert_gradients_close,
    gradient_bounds,
)
from gpu_actors.reference.tolerance import assert_output_close, forward_bounds, round_inputs

__all__ = ["attention_experiments", "proves_alone"]

MULTIPROCESSORS = 4
"""The multiprocessors for which a trial's work is split on every machine: a few ranges show every way of splitting."""

_SEED = 0x5EED_0DD5
_LARGE = 1024.0  # if dO and V are multiplied by it, dS exceeds float16, over up to 4000 keys
_RISE = 20.0  # of the scores from the first key to the last, so that every tile has a new maximum
# Slopes of ALiBi that exceed float32 when they are divided by a scale: the first times a distance, the second alone.
_STEEP, _STEEPEST = 1e36, 3e38
_FAINT = -200.0  # a bias by which a key's weight is above 0 in float64, but not in float32
_WEIGHTS = {"float8_e4m3fn": "float8_e4m3fn", "float8_e5m2": "float8_e4m3fn"}
_ROUNDED = ("tf32", "f16", "bf16")


def proves_alone(key: DispatchKey) -> bool:
    """Whether the kernel of a key has experiments.

    A kernel that is launched beside another is proved together with each kernel that it serves. The kernel that splits
    work on the device is not in all of these launches, so it has its own experiments. A kernel with a graph's score
    modification has none, because the oracle cannot read the modification's text.
    """
    return key.score_mod is None and key.kernel in (family_of(key).name, PLAN)


def attention_experiments(variant: Variant, device: Device) -> Iterator[Experiment]:
    """Yield the experiments that prove a variant: launches that include it. `proves_alone` must hold for its key."""
    key = variant.example
    assert isinstance(key, DispatchKey)
    own, found = family_of(key), False
    for family in (own, DECODE_SM90) if key.kernel == PLAN else (own,):
        main = dataclasses.replace(key, kernel=family.name)
        if key.row_tile not in family.row_tiles:
            continue
        trials = list(family.trials(main))
        if key.kernel == PLAN and family.row_tile is not None:
            trials += crowded_trials(main, decode_tile(main).tile, family.row_tile)
        for trial in trials:
            own_trial = trial._replace(lengths_on_host=key.kernel != PLAN)
            experiment = (
                None if family.refusal(trial.problem, key.arch) else _experiment(own_trial, family, device, key)
            )
            if experiment is not None and variant in experiment.variants:
                found = True
                yield experiment
        if found:
            return  # one of the kernels that it serves is enough, so no other has to be compiled


def _experiment(trial: Trial, family: KernelFamily, device: Device, example: DispatchKey) -> Experiment:
    problem = trial.problem
    key = dispatch_key(problem, example.arch, (family,))
    target = Target(MULTIPROCESSORS, device.encode_tensor_map, trial.lengths_on_host)
    program = program_of(problem, key, target)
    data = _Data(problem, trial.lengths, family.name == "forward_sm90")
    inputs = dict(data.operands)
    if program.split is not None:
        inputs |= program.split({**inputs, "cache_seqlens": data.counted})
    weights = _WEIGHTS.get(problem.dtype) if family.name == "forward_sm90" else None
    answer = _Gradients(data) if problem.direction == "backward" else _Outputs(data, weights)
    values = Values(data.seed)
    return Experiment(
        problem=problem,
        key=key,
        variants=variants_of(program),
        inputs=inputs | answer.more_inputs,
        written=answer.written,
        steps=lambda kernels: program.steps(kernels, values),
        scratch=program.scratch,
        answer=lambda: answer.answer,
        check=answer.check,
        repeatable=problem.direction == "forward" or problem.deterministic,
    )


class _Data:
    """The arrays of a trial, for the oracle and for the kernels. The kernels' have poison where nothing may be read.

    q, k, v: as the oracle takes them, dense for dense batches and packed for all others. options: the oracle's.
    operands: the launch's, by name. infinities: whether the kernel, like the oracle, keeps an infinite value of any
    weight above 0. Other kernels first round the weight to 0, and 0 times infinity is NaN.
    """

    def __init__(self, problem: AttentionProblem, lengths: tuple[tuple[int, int], ...], infinities: bool) -> None:
        self.problem = p = problem
        self.broken = [keys == BROKEN for _, keys in lengths]
        self.lengths = lengths = tuple((rows, max(0, keys)) for rows, keys in lengths)
        # Every process draws the same numbers, because the text of a problem contains no address.
        self.rng = rng = np.random.default_rng(zlib.crc32(p.repro().encode()))
        self.seed: int = _SEED if p.dropout_p else 0
        self.packed: bool = p.layout != "dense"
        rows, keys = (sum(column) for column in zip(*lengths, strict=True))
        q = rng.standard_normal((rows, p.heads_q, p.head_dim))
        k = rng.standard_normal((keys, p.heads_kv, p.head_dim))
        q, k = self._rising(q, k)
        self.q: Any = _cast(q, p.dtype)
        self.k: Any = _cast(k, p.kv_dtype)
        self.v: Any = self.k[..., : p.head_dim_v]
        if not p.latent:
            self.v = random_of(rng, (keys, p.heads_kv, p.head_dim_v), p.kv_dtype)
        self.ends_q, self.ends_k = (
            np.concatenate([[0], np.cumsum(column)]).astype(np.int32) for column in zip(*lengths, strict=True)
        )
        self._add_nan()
        self.large = self._enlarge()
        self.options: dict[str, Any] = self._options()
        if infinities:
            self._add_infinity()
        self.unseen, self.blind = self._unseen()
        self.operands: dict[str, Any] = {name: self.options[name] for name in _ARRAYS if name in self.options}
        if p.decoding:
            self._place_in_cache()
        else:
            self._place_in_batch()
        if not self.packed:
            self.q, self.k, self.v = (x.reshape(len(lengths), -1, *x.shape[1:]) for x in (self.q, self.k, self.v))
        else:
            self.options |= {"cu_seqlens_q": self.ends_q, "cu_seqlens_k": self.ends_k}

    @functools.cached_property
    def compute(self) -> str | None:
        """The precision to which float32 operands are rounded, for the tolerance rule; None if they are not rounded."""
        p = self.problem
        return p.compute if p.dtype == "float32" and p.compute in _ROUNDED else None

    @functools.cached_property
    def rounded(self) -> tuple[Any, Any, Any]:
        return (self.q, self.k, self.v) if self.compute is None else round_inputs(self.q, self.k, self.v, self.compute)

    @functools.cached_property
    def counted(self) -> Any:
        """The keys of each sequence that its rows see, int32."""
        return np.array([keys for _, keys in self.lengths], np.int32)

    def broken_rows(self) -> Iterator[slice]:
        """The packed rows of each sequence whose length contradicts the cache."""
        for index in np.flatnonzero(self.broken):
            yield slice(*self.ends_q[index : index + 2])

    def _add_nan(self) -> None:
        """Make two values of one sequence and head NaN: kernels compute rows with non-finite results separately.

        NaN stays NaN with even the smallest weight.
        """
        p, index = self.problem, 0 if self.packed else 1
        if p.direction == "backward" or p.latent or p.num_splits or ELEMENTS[p.kv_dtype].fp8:
            return
        own = self.v[self.ends_k[index] : self.ends_k[index + 1], 0]
        own[len(own) // 2, min(3, p.head_dim_v - 1)] = np.nan
        own[-2:-1, -1] = np.nan  # in the last tile, which a mask cuts

    def _add_infinity(self) -> None:
        """Make a value infinite, for a key of little weight, in the sequence and head that `_add_nan` takes."""
        p, index = self.problem, 0 if self.packed else 1
        if p.bias is None or p.bias[0] == "bool" or ELEMENTS[p.kv_dtype].fp8:
            return
        own = self.v[self.ends_k[index] : self.ends_k[index + 1], 0]
        key = min(8, len(own) - 1)
        own[key, 0] = np.inf
        self.options["bias"][..., key] = _FAINT

    def _enlarge(self) -> list[tuple[slice, slice]]:
        """Make dS exceed float16 in one KV head of each of two sequences. Return the rows and heads that need large dO.

        V is large there. Q and K are small, so that only dS exceeds float16. Excluded are float16 biases, whose
        gradient is dS, and ALiBi: its dS is nearly 0 for far keys, and float16 cannot hold that beside large numbers.
        """
        p = self.problem
        of_bias = p.dbias and p.bias is not None and p.bias[0] == p.dtype
        if p.direction == "forward" or p.dtype != "float16" or of_bias or p.alibi is not None:
            return []
        usual = [index for index, (rows, keys) in enumerate(self.lengths) if rows and keys > 1]
        group, found = p.gqa_ratio, []
        for index, head in ((usual[0], p.heads_kv - 1), (usual[-1], 0)):
            rows = slice(*self.ends_q[index : index + 2]), slice(head * group, (head + 1) * group)
            keys = slice(*self.ends_k[index : index + 2]), head
            self.q[rows] *= np.float16(1 / _LARGE)
            self.k[keys] *= np.float16(1 / _LARGE)
            self.v[keys] *= np.float16(_LARGE)
            found.append(rows)
        return found

    def _rising(self, q: Any, k: Any) -> tuple[Any, Any]:
        """Make the scores of every second sequence rise with the key, so that each tile has a new maximum."""
        p, rng = self.problem, self.rng
        signs = rng.choice([-1.0, 1.0], (p.heads_kv, p.head_dim))
        amount, start_q, start_k = np.sqrt(_RISE), 0, 0
        for index, (rows, keys) in enumerate(self.lengths):
            if index % 2 == 0 and keys:
                towards = np.repeat(signs, p.gqa_ratio, axis=0)
                q[start_q : start_q + rows] += towards * amount / np.sqrt(p.head_dim)
                ramp = np.arange(1, keys + 1) / keys
                k[start_k : start_k + keys] += ramp[:, None, None] * signs * amount
            start_q, start_k = start_q + rows, start_k + keys
        return q, k

    def _options(self) -> dict[str, Any]:
        p, rng, batch = self.problem, self.rng, len(self.lengths)
        options: dict[str, Any] = {name: getattr(p, name) for name in MASK_OPTIONS}
        options["softmax_scale"] = p.softmax_scale
        if p.softcap:
            options["softcap"] = p.softcap
        if p.alibi is not None:
            shape: tuple[int, ...] = (batch, p.heads_q) if p.alibi == "batch" else (p.heads_q,)
            options["alibi_slopes"] = rng.uniform(0.01, 0.3, shape).astype(np.float32)
            if p.direction == "forward" and not p.positions:  # the distances of positions are too long
                at_its_own = p.mask == "causal" and p.alignment == "bottom_right"  # each row sees a key at distance 0
                options["alibi_slopes"].flat[-1] = _STEEPEST if at_its_own else _STEEP
            options["alibi_signed"] = p.alibi_signed
        if p.sinks:
            options["sinks"] = rng.standard_normal(p.heads_q).astype(np.float32)
        if p.bias is not None:
            of_bias = p.bias_shape
            options["bias"] = rng.random(of_bias) < 0.8 if p.bias[0] == "bool" else random_of(rng, of_bias, p.bias[0])
        if p.dropout_p:
            options |= {"dropout_p": p.dropout_p, "dropout_seed": self.seed}
        if p.descales:
            names = ("q", "k", "v") if ELEMENTS[p.dtype].fp8 else ("k", "v")
            for name in names:
                options[f"{name}_descale"] = rng.uniform(0.5, 1.5, (batch, p.heads_kv)).astype(np.float32)
            if p.latent:
                options["v_descale"] = options["k_descale"]
        for name, steps, last in (("q_positions", p.q_positions, 60), ("k_positions", p.k_positions, 20)):
            if steps:
                first = rng.integers(0, last, batch)
                places = first if steps == 1 else np.stack([first, rng.integers(1, 4, batch)], axis=1)
                options[name] = places.astype(np.int32)
        if p.tree_mask:
            most = np.uint64(1) << np.arange(p.seqlen_q, dtype=np.uint64)
            drawn = [rng.random((rows, len(most))) < 0.5 for rows, _ in self.lengths]
            options["tree_mask"] = np.concatenate([np.where(one, most, np.uint64(0)).sum(axis=1) for one in drawn])
            options["tree_mask"] = options["tree_mask"].astype(np.uint64)
        return options

    def _unseen(self) -> tuple[Any, Any]:
        """Return which packed keys no row of their sequence sees by the mask, and which packed rows see no key: bool.

        With positions or a tree mask this is not known, and all are False.
        """
        p = self.problem
        unseen, blind = np.zeros(len(self.k), bool), np.zeros(len(self.q), bool)
        if p.positions or p.tree_mask:
            return unseen, blind
        for index, (rows, keys) in enumerate(self.lengths):
            visible = p.visible_keys(np.arange(rows), rows, keys)
            if visible is None:
                visible = np.ones((rows, keys), bool)
            unseen[self.ends_k[index] : self.ends_k[index + 1]] = ~visible.any(axis=0)
            if not p.sinks:  # every row sees its sink
                blind[self.ends_q[index] : self.ends_q[index + 1]] = ~visible.any(axis=1)
        return unseen, blind

    def _place_in_batch(self) -> None:
        p = self.problem
        q, k, v = self.q, self.k.copy(), self.v.copy()
        k[self.unseen], v[self.unseen] = np.nan, np.nan
        if p.direction == "backward":
            q = q.copy()
            q[self.blind] = np.nan
        if p.layout == "varlen":
            q, k, v = (_behind(x, total) for x, total in ((q, p.total_q), (k, p.total_k), (v, p.total_k)))
            self.operands |= {"cu_seqlens_q": self.ends_q, "cu_seqlens_k": self.ends_k}
        else:
            q, k, v = (x.reshape(len(self.lengths), -1, *x.shape[1:]) for x in (q, k, v))
        self.operands |= {"q": q, "k": k, "v": v}
        for name in p.summed:
            # An operand that sequences share lies in memory once.
            self.operands[name] = np.broadcast_to(self.operands[name][:1], self.operands[name].shape)
            whole = getattr(self, name).reshape(self.operands[name].shape)
            setattr(self, name, np.repeat(whole[:1], p.batch, axis=0).reshape(getattr(self, name).shape))

    def _place_in_cache(self) -> None:
        p, batch = self.problem, len(self.lengths)
        q = self.q
        if p.varlen_q:
            self.operands["cu_seqlens_q"] = self.ends_q
        else:
            q = q.reshape(batch, p.seqlen_q, *q.shape[1:])
            if p.tree_mask:
                self.operands["tree_mask"] = self.options["tree_mask"].reshape(batch, p.seqlen_q)
        padding = (3 * np.arange(batch) % 14 if p.cache_leftpad else np.zeros(batch)).astype(np.int32)
        lengths = self.counted
        # A broken length is negative if the kernel decides the splits, and above the capacity if they are pinned.
        told = np.where(self.broken, p.seqlen_k + 1 if p.num_splits else -1, lengths + padding)
        self.operands |= {"q": q, "cache_seqlens": told.astype(np.int32)}
        if p.cache_leftpad:
            self.operands["cache_leftpad"] = padding
        sides = {"k": self.k} if p.latent else {"k": self.k, "v": self.v}
        places = np.arange(batch)
        if p.cache_batch_idx:
            places = self.rng.permutation(p.total_k // p.seqlen_k)[:batch]
            self.operands["cache_batch_idx"] = places.astype(np.int32)
        if p.layout == "paged":
            table = self.rng.permutation(p.total_k // p.page_size)[: batch * (p.seqlen_k // p.page_size)]
            self.operands["block_table"] = table.reshape(batch, -1).astype(np.int32)
        for side, rows in sides.items():
            rows = rows.copy()
            rows[self.unseen] = np.nan
            caches = poisoned(
                (p.total_k // p.seqlen_k if p.layout != "paged" else batch, p.seqlen_k, *rows.shape[1:]), p.kv_dtype
            )
            for index, place in enumerate(places if p.layout != "paged" else range(batch)):
                caches[place, padding[index] : padding[index] + lengths[index]] = rows[
                    self.ends_k[index] : self.ends_k[index + 1]
                ]
            if p.layout == "paged":
                pool = poisoned((p.total_k // p.page_size, p.page_size, *rows.shape[1:]), p.kv_dtype)
                pool[table] = caches.reshape(-1, p.page_size, *rows.shape[1:])
                self.operands[f"{side}_cache"] = pool
            elif p.layout == "pointers":
                for index in range(batch):
                    self.operands[f"{side}_cache.{index}"] = np.ascontiguousarray(caches[index].swapaxes(0, 1))
            else:
                self.operands[f"{side}_cache"] = caches


_ARRAYS = (
    "alibi_slopes", "sinks", "bias", "q_descale", "k_descale", "v_descale", "q_positions", "k_positions", "tree_mask",
)  # fmt: skip


class _Outputs:
    more_inputs: ClassVar[dict[str, Any]] = {}

    def __init__(self, data: _Data, weights: str | None) -> None:
        self._data = data
        self._weights = weights
        p, q = data.problem, data.operands["q"]
        self.written: dict[str, Any] = {"out": poisoned((*q.shape[:-1], p.head_dim_v), p.out_dtype)}
        if p.return_lse:
            self.written["lse"] = poisoned(p.lse_shape, p.lse_dtype)
        for name in ("score_max", "score_sum_exp"):
            if getattr(p, name):
                self.written[name] = poisoned(p.lse_shape, "float32")

    @functools.cached_property
    def _reference(self) -> Any:
        found = attention_forward(*self._data.rounded, with_magnitude=True, **self._data.options)
        for rows in self._data.broken_rows():
            found.out[rows], found.lse[:, rows] = np.nan, np.nan
        return found

    @property
    def answer(self) -> Mapping[str, Any]:
        """The expected outputs, in the layout of ``written``."""
        found = {"out": _laid_out(self._reference.out, self.written["out"].shape)}
        if "lse" in self.written:
            found["lse"] = self._lse_as(self._reference.lse, self.written["lse"].shape)
        return found

    def check(self, outputs: Mapping[str, Any]) -> None:
        data, p = self._data, self._data.problem
        out, lse = outputs["out"], outputs.get("lse")
        bounds = forward_bounds(
            *data.rounded, reference=self._reference, compute=data.compute, weights_dtype=self._weights, **data.options
        )
        if data.packed:
            count = len(data.q)
            out = out.reshape(-1, *out.shape[-2:])
            _check_untouched("out", out[count:])
            out = out[:count]
            if lse is not None:
                lse = lse if lse.ndim == 2 else lse.swapaxes(0, 1).reshape(lse.shape[1], -1)
                lse = lse[:, :count]
            for rows in data.broken_rows():
                _check_written("out", out[rows])
                if lse is not None:
                    _check_written("lse", lse[:, rows])
        assert_output_close(out, lse, self._reference, bounds)
        if p.score_max and p.score_sum_exp and not p.sinks and not data.packed:
            with np.errstate(divide="ignore", invalid="ignore"):
                total = outputs["score_max"] + np.log(outputs["score_sum_exp"])
            total = np.where(np.isfinite(self._reference.lse), total, self._reference.lse)
            assert np.allclose(total, self._reference.lse, atol=1e-3, equal_nan=True), (
                "row statistics are not the LSE's"
            )

    @staticmethod
    def _lse_as(lse: Any, shape: tuple[int, ...]) -> Any:
        if lse.shape == shape or len(shape) == 2:
            return _laid_out(lse.swapaxes(0, 1), shape[::-1]).swapaxes(0, 1) if len(shape) == 2 else lse
        batch, heads, rows = shape
        return lse.reshape(heads, batch, rows).swapaxes(0, 1)


class _Gradients:
    def __init__(self, data: _Data) -> None:
        self._data = data
        p = data.problem
        result = attention_forward(*data.rounded, **data.options)
        self._out = _cast(result.out, p.out_dtype)
        self._lse = result.lse.astype(p.lse_dtype)
        self._dout = random_of(data.rng, self._out.shape, p.out_dtype)
        self._enlarge()
        out, dout, lse = self._out.copy(), self._dout.copy(), self._lse
        for array in (out, dout):
            array[data.blind.reshape(array.shape[:-2])] = np.nan
        if data.packed:
            out, dout = _behind(out, p.total_q), _behind(dout, p.total_q)
            lse = _behind(lse.swapaxes(0, 1), p.total_q).swapaxes(0, 1)
        self.more_inputs: dict[str, Any] = {"out": out, "dout": dout, "lse": np.ascontiguousarray(lse)}
        self.written: dict[str, Any] = {}
        for name in GRADIENTS:
            of = data.operands.get(name[1:])
            if of is not None and (name != "dbias" or p.dbias):
                shape = (1, *of.shape[1:]) if name[1:] in p.summed else of.shape
                self.written[name] = poisoned(shape, of.dtype.name)

    def _enlarge(self) -> None:
        """Make dO large where V is large. One row there is NaN: it must not affect the scale of its neighbours' dS."""
        for rows, heads in self._data.large:
            packed = self._dout.reshape(-1, *self._dout.shape[-2:])
            packed[rows, heads] *= np.float16(_LARGE)
        if self._data.large:
            packed[(rows.start + rows.stop) // 2, heads.start] = np.nan

    @functools.cached_property
    def _expected(self) -> tuple[Any, Any]:
        data, p = self._data, self._data.problem
        dout = self._dout
        if data.compute is not None:
            dout = round_inputs(dout, dout, dout, data.compute)[0]
        given = {"out": self._out, "lse": self._lse, **data.options}
        reference = attention_backward(dout, *data.rounded, **given)
        bounds = gradient_bounds(dout, *data.rounded, reference=reference, compute=data.compute, **given)
        names = [f"d{name}" for name in p.summed]

        def summed(each: Any, kind: Any) -> Any:
            found = {name: getattr(each, name) for name in GRADIENTS}
            for name in names:
                found[name] = np.broadcast_to(found[name], getattr(reference, name).shape).sum(axis=0, keepdims=True)
            if not p.dbias:
                found["dbias"] = None
            return kind(*(found[name] for name in GRADIENTS))

        return summed(reference, ReferenceGradients), summed(bounds, GradientBounds)

    @property
    def answer(self) -> Mapping[str, Any]:
        """The expected gradients, in the layout of ``written``."""
        return {name: _laid_out(getattr(self._expected[0], name), array.shape) for name, array in self.written.items()}

    def check(self, outputs: Mapping[str, Any]) -> None:
        found: dict[str, Any] = {name: outputs.get(name) for name in GRADIENTS}
        if self._data.packed:
            for name, rows in (("dq", self._data.q), ("dk", self._data.k), ("dv", self._data.v)):
                found[name] = found[name][: len(rows)]
        assert_gradients_close(SimpleNamespace(**found), *self._expected)


def _cast(array: Any, dtype: str) -> Any:
    if dtype.startswith("float8"):
        array = np.clip(array, -240.0, 240.0)
    return array.astype(dtype_of(dtype))


def _behind(array: Any, total: int) -> Any:
    """A packed array of ``total`` rows. The rows after the last sequence are NaN."""
    return np.concatenate([array, poisoned((total - len(array), *array.shape[1:]), array.dtype.name)])


def _laid_out(array: Any, shape: tuple[int, ...]) -> Any:
    """Packed rows in an array of this shape, followed by NaN."""
    if array.size == np.prod(shape):
        return array.reshape(shape)
    return np.concatenate([array, np.full((shape[0] - len(array), *array.shape[1:]), np.nan)])


def _check_untouched(name: str, rows: Any) -> None:
    bits = np.ascontiguousarray(rows).reshape(-1).view(np.uint8)
    assert (bits == 0xFF).all(), f"{name} was written behind the last row of the last sequence"


def _check_written(name: str, rows: Any) -> None:
    """Check that a kernel wrote these rows of NaN. An element that no kernel wrote has all bits set."""
    bits = np.ascontiguousarray(rows)[..., None].view(np.uint8)
    assert not (bits == 0xFF).all(axis=-1).any(), f"{name} was not written where a length contradicts the cache"
