"""The public entries (doors) of a context: a problem as a request of each, its answer by packed rows. For tests."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from cases.cached_batches import Batch, tree_bits
from cases.decode_requests import request_of
from cases.poison import nan_filled
from emulated.decode import DecodeCase
from properties.mha_graphs import MhaUid, mha_backward_graph, mha_forward_graph
from properties.problems import ENDS, FP8, Array, Problem, Spec, has_sequences

import gpu_actors as ga
from gpu_actors.testing import check_gradients, check_output

__all__ = ["BACKWARD", "CACHED", "DOORS", "FORWARD", "Answer", "Asked", "ask", "check", "check_unharmed", "sender"]

_WAIT = 120.0
_MASK = ("causal", "window_size", "sink_tokens", "attention_chunk")
_SCORES = ("softmax_scale", "softcap", "alibi_slopes", "sinks", "bias")
_PLACES = ("q_positions", "k_positions")
_DESCALES = ("q_descale", "k_descale", "v_descale")
_FLASH = (*_MASK, "alignment", *_SCORES, "alibi_signed", *_PLACES, "dropout_p", "dropout_seed")
_CUDNN = ("mask", "alignment", "softmax_scale", "bias", "dropout_p", "dropout_seed")


class Door(NamedTuple):
    """method: the handle and its method. options: those of a problem that it takes.

    alike: whether sequences must be equally long.
    """

    method: str
    options: tuple[str, ...]
    alike: bool = False


FORWARD = {
    "dense": Door("flash_attn.forward", (*_FLASH, *_DESCALES), alike=True),
    "varlen": Door("flash_attn.forward", (*_FLASH, *_DESCALES)),
    "padded": Door("flash_attn.forward", (*_FLASH, *_DESCALES)),
    "cudnn": Door("cudnn.mha_forward", _CUDNN, alike=True),
    "graph": Door("cudnn.execute", _CUDNN, alike=True),
}
CACHED = {
    "paged": Door("flash_attn.paged_forward", (*_MASK, *_SCORES, *_PLACES, *_DESCALES, "tree_mask")),
    "cache": Door("flash_attn.paged_forward", (*_MASK, *_SCORES, *_PLACES, *_DESCALES, "tree_mask")),
    "pointers": Door("flash_attn.decode", (*_MASK[1:], *_SCORES, *_PLACES, *_DESCALES)),
    "kv_cache": Door("attend", (*_MASK, *_SCORES, *_PLACES, "tree_mask")),
}
BACKWARD = {
    "dense backward": Door("flash_attn.backward", _FLASH, alike=True),
    "varlen backward": Door("flash_attn.backward", _FLASH),
    "padded backward": Door("flash_attn.backward", _FLASH),
    "cudnn backward": Door("cudnn.mha_backward", _CUDNN, alike=True),
    "graph backward": Door("cudnn.execute", _CUDNN, alike=True),
}
DOORS = FORWARD | CACHED | BACKWARD


class Answer(NamedTuple):
    """By packed rows: out (total, heads, dim_v), lse (heads, total) or None; for backward the gradients."""

    out: Any = None
    lse: Any = None
    gradients: ga.AttentionGradients | None = None


@dataclass
class Asked:
    """A request: the arguments of its door's method, and the memory that must not change.

    before: the memory of each array and its bytes, with `FILL` in ``out``. incoming: see `ask_of`.
    """

    spec: Spec
    problem: Problem
    arguments: dict[str, Any]
    before: list[tuple[Array, bytes]] = dataclasses.field(default_factory=list)
    incoming: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def door(self) -> Door:
        return DOORS[self.spec.door]


# Arrays in other forms

FILL = 7


def _memory(shape: tuple[int, ...], like: Array, fill: Any) -> Array:
    return np.full(shape, fill, like.dtype)


def laid_out(array: Array, form: str, fill: Any = None) -> Array:
    """The same numbers in another memory layout. ``fill``, by default NaN or for integers `FILL`, is around a view."""
    if fill is None:
        fill = np.nan if array.dtype.kind in "fV" else FILL
    if array.ndim == 0 or form == "plain":
        return array
    if form == "columns":
        view = _memory((*array.shape, 2), array, fill)[..., 0]
    elif form == "margins":
        wide = _memory(tuple(extent + 3 for extent in array.shape), array, fill)
        view = wide[tuple(slice(1, extent + 1) for extent in array.shape)]
    elif form == "transposed":
        order = list(range(array.ndim))
        order[-3:] = [order[-2], order[-3], order[-1]] if array.ndim >= 3 else order[::-1]
        memory = _memory(tuple(array.shape[axis] for axis in order), array, fill)
        view = memory.transpose(np.argsort(order))
    elif form == "misaligned":
        view = np.frombuffer(bytearray(array.nbytes + 1), np.uint8)[1:].view(array.dtype).reshape(array.shape)
    elif form == "reversed":
        view = _memory(array.shape, array, fill)[::-1]
    else:
        assert form == "read only"
        view = array.copy()
    view[...] = array
    if form == "read only":
        view.flags.writeable = False
    return view


FORMS = ("plain", "columns", "margins", "transposed", "reversed", "misaligned", "read only")


def _base(array: Array) -> Array:
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array


# Requests


def ask_of(spec: Spec, problem: Problem, incoming: dict[str, Any] | None = None) -> Asked:
    """The request of a spec. Its arrays are its own, in the forms that ``how`` names.

    incoming: packed dout, out and lse of backward; by default a random one and the oracle's results.
    """
    name, _, backward = spec.door.partition(" ")
    incoming = dict(incoming or {})
    if backward and not incoming:
        rng = np.random.default_rng([spec.seed, 8])
        out, lse = problem.results
        incoming = {"dout": rng.standard_normal(out.shape).astype(out.dtype), "out": out, "lse": lse}
    if backward and spec.how.get("lse_dtype", "float32") == "float32":
        incoming["lse"] = incoming["lse"].astype(np.float32)
    made: Callable[..., dict[str, Any]] = _MAKERS.get(name, _cached)
    arguments = made(spec, problem, incoming)
    asked = Asked(spec, problem, arguments, incoming=incoming)
    forms = spec.how.get("forms", ("plain", "plain"))
    for field, value in arguments.items():
        form = forms[field not in ("q", "k", "v", "dout", "do", "o", "k_cache", "v_cache", "k_caches", "v_caches")]
        if isinstance(value, np.ndarray):
            arguments[field] = laid_out(value, form)
        elif isinstance(value, list) and value and isinstance(value[0], np.ndarray):
            arguments[field] = [laid_out(array, form) for array in value]
    for value in arguments.values():
        parts = value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else (value,)
        for array in parts:
            if isinstance(array, np.ndarray):
                asked.before.append((_base(array), _base(array).tobytes()))
    if "out" in spec.how and name in ("dense", "varlen", "padded", "paged", "cache", "pointers", "kv_cache"):
        given = _out_like(spec, arguments["q"], problem)
        arguments["out"] = laid_out(given, spec.how["out"], FILL)
        arguments["out"][...] = FILL
        asked.before.append((_base(arguments["out"]), _base(arguments["out"]).tobytes()))
    return asked


def _out_like(spec: Spec, q: Array, problem: Problem) -> Array:
    dtype = spec.how.get("out_dtype") or ("bfloat16" if spec.dtype in FP8 else spec.dtype)
    first = (len(problem.q),) if q.ndim == 4 else q.shape[:1]
    return nan_filled((*first, *q.shape[1:-1], problem.v[0].shape[-1]), dtype)


def _stack(arrays: list[Array], longest: int | None = None, right: bool = False) -> Array:
    """A batch of sequences, padded with rows of NaN behind them, or before them if ``right``."""
    longest = max(map(len, arrays)) if longest is None else longest
    batch = nan_filled((len(arrays), longest, *arrays[0].shape[1:]), arrays[0].dtype.name)
    for index, array in enumerate(arrays):
        first = longest - len(array) if right else 0
        batch[index, first : first + len(array)] = array
    return batch


def _batches(spec: Spec, problem: Problem, longest: tuple[int, int] | None = None) -> dict[str, Array]:
    found = {}
    for name in "qkv":
        arrays = getattr(problem, name)
        whole = _stack(arrays, longest and longest[name != "q"])
        if name in spec.shared:
            whole = whole[:1] if spec.how.get("one") else np.broadcast_to(whole[:1], whole.shape)
        found[name] = whole
    return found


_REQUEST = ("return_lse", "compute", "out_dtype", "lse_dtype", "deterministic", "num_splits", "pack_gqa")


def _said(spec: Spec, backward: bool) -> dict[str, Any]:
    """The arguments of a request that are not part of the problem."""
    names = ("compute", "deterministic") if backward else _REQUEST
    return {name: spec.how[name] for name in names if name in spec.how}


def _dense(spec: Spec, problem: Problem, incoming: dict[str, Any]) -> dict[str, Any]:
    batch, rows = len(problem.q), len(problem.q[0])
    given = {name: array.reshape(batch, rows, *array.shape[1:]) for name, array in incoming.items() if name != "lse"}
    if incoming:
        given["lse"] = incoming["lse"].reshape(problem.heads[0], batch, rows).swapaxes(0, 1)
    return {**_batches(spec, problem), **problem.options, **_said(spec, bool(incoming)), **given}


def _varlen(spec: Spec, problem: Problem, incoming: dict[str, Any]) -> dict[str, Any]:
    arguments = {**dict(zip("qkv", problem.packed, strict=True)), **problem.options, **problem.ends}
    if "spare" in spec.how and "bias" not in problem.options:
        for side, arrays, more in zip("qk", (problem.q, problem.k), spec.how["spare"], strict=True):
            arguments[f"max_seqlen_{side}"] = max(map(len, arrays)) + more
    return {**arguments, **_said(spec, bool(incoming)), **incoming}


def _padded(spec: Spec, problem: Problem, incoming: dict[str, Any]) -> dict[str, Any]:
    spare = spec.how.get("spare", (0, 0))
    longest = max(map(len, problem.q)) + spare[0], max(map(len, problem.k)) + spare[1]
    arguments = {**_batches(spec, problem, longest), **problem.options, **_said(spec, bool(incoming))}
    for side, arrays, most in (("q", problem.q, longest[0]), ("k", problem.k, longest[1])):
        lengths = [len(array) for array in arrays]
        if side == "q" or min(lengths) < most or spec.seed % 2:  # if all rows count, it may be left out
            arguments[f"seqused_{side}"] = np.array(lengths, np.int32)
    if incoming:
        cuts = problem.ends["cu_seqlens_q"][1:-1]
        for name in ("dout", "out"):
            arguments[name] = _stack(np.split(incoming[name], cuts), longest[0])
        lse = [part.T for part in np.split(incoming["lse"], cuts, axis=1)]
        arguments["lse"] = np.ascontiguousarray(_stack(lse, longest[0]).swapaxes(1, 2))
    return arguments


def _params(spec: Spec, problem: Problem) -> ga.AttentionParams:
    options = problem.options
    (heads, heads_kv), ((rows, keys), *_) = problem.heads, problem.lengths
    mask = spec.how.get("mask", ("none", 0))
    return ga.AttentionParams(
        len(problem.q), rows, keys, heads, heads_kv, spec.dims[0], mask=ga.Mask(*mask),
        scale=options.get("softmax_scale"), alignment=options.get("alignment", "bottom_right"),
        dropout_p=options.get("dropout_p", 0.0), dropout_seed=options.get("dropout_seed", 0),
    )  # fmt: skip


def _cudnn(spec: Spec, problem: Problem, incoming: dict[str, Any]) -> dict[str, Any]:
    dense = _dense(spec, problem, incoming)
    arguments = {name: dense[name].swapaxes(1, 2) for name in "qkv"}
    if not incoming:
        said: dict[str, Any] = {"return_stats": spec.how.get("return_lse", False)}
    else:
        said = {"deterministic": spec.how.get("deterministic", False), "stats": dense["lse"][..., None]}
        said |= {short: dense[name].swapaxes(1, 2) for short, name in (("o", "out"), ("do", "dout"))}
    return {"params": _params(spec, problem), **arguments, "bias": problem.options.get("bias"), **said}


def _graph(spec: Spec, problem: Problem, incoming: dict[str, Any]) -> dict[str, Any]:
    given = _cudnn(spec, problem, incoming)
    form = spec.how.get("forms", ("plain", "plain"))[0]
    names = {"q": "Q", "k": "K", "v": "V", "bias": "BIAS", "o": "OUT", "do": "DOUT", "stats": "STATS"}
    arrays = {MhaUid[uid]: laid_out(given[name], form) for name, uid in names.items() if given.get(name) is not None}
    if incoming:
        graph = mha_backward_graph(given["params"], arrays, deterministic=given["deterministic"])
    else:
        graph = mha_forward_graph(given["params"], arrays, return_stats=given["return_stats"])
    return {"graph": graph, "arrays": arrays}


def _cached(spec: Spec, problem: Problem, incoming: dict[str, Any]) -> dict[str, Any]:
    how, rows = spec.how, [len(array) for array in problem.q]
    alike = len(set(rows)) == 1 and not how.get("packed_rows")
    batch = Batch(_stack(problem.q, right=True), list(problem.k), list(problem.v))
    tree = None if problem.tree is None else _tree(problem)
    if spec.door == "kv_cache":
        return _attend(spec, problem, batch, tree, alike)
    case = DecodeCase(
        batch,
        spec.door,
        how.get("page_size", 16),
        None if alike else rows,
        tree,
        dict(problem.options),
        how.get("leftpad") if spec.door != "pointers" else None,
        how.get("places") if spec.door == "cache" else None,
        latent=bool(how.get("latent")),
    )
    request = request_of(case)
    given = {field.name: getattr(request, field.name) for field in dataclasses.fields(request)}
    arguments = {name: value for name, value in given.items() if value is not None}
    if how.get("latent"):
        arguments["latent_dim"] = spec.dims[1]
    if spec.door == "pointers" and "bias" in arguments:
        arguments["bias"] = arguments["bias"][:, :, 0]
    if spec.door == "pointers" and how.get("own"):
        for name in ("k_caches", "v_caches"):
            ends = [len(k) + index for index, k in enumerate(problem.k)]
            arguments[name] = [cache[:, : max(1, end)] for cache, end in zip(given[name], ends, strict=True)]
    if spec.door == "pointers" and how.get("one"):
        arguments |= {name: np.stack(arguments[name]) for name in ("k_caches", "v_caches")}
    return {**arguments, "return_lse": False, **_said(spec, False)}


def _tree(problem: Problem) -> Array:
    bits = np.zeros((len(problem.q), max(map(len, problem.q))), np.uint64)
    for row, tree in zip(bits, problem.tree or (), strict=True):
        row[len(row) - len(tree) :] = tree_bits(tree)
    return bits


def _attend(spec: Spec, problem: Problem, batch: Batch, tree: Any, alike: bool) -> dict[str, Any]:
    arguments = {"causal": False, **problem.options, **_said(spec, False)}
    arguments["q"] = batch.q if alike else np.concatenate(problem.q)
    if tree is not None:
        arguments["tree_mask"] = tree if alike else problem.oracle_options["tree_mask"]
    if not alike:
        arguments["cu_seqlens_q"] = problem.ends["cu_seqlens_q"]
        arguments["max_seqlen_q"] = max(map(len, problem.q))
    new = _new_rows(spec, problem)
    if any(new):
        k, v = (
            [array[len(array) - n :] for array, n in zip(arrays, new, strict=True)] for arrays in (problem.k, problem.v)
        )
        arguments |= {"k": _stack(k), "v": _stack(v)} if alike else {"k": np.concatenate(k), "v": np.concatenate(v)}
    return arguments


def _new_rows(spec: Spec, problem: Problem) -> list[int]:
    """How many keys of each sequence a request over a KvCache brings: one for each row, or none."""
    rows = [len(array) for array in problem.q]
    fits = all(count <= keys for count, (_, keys) in zip(rows, problem.lengths, strict=True))
    return rows if spec.how.get("new") and fits else [0] * len(rows)


_MAKERS: dict[str, Callable[..., dict[str, Any]]] = {
    "dense": _dense,
    "varlen": _varlen,
    "padded": _padded,
    "cudnn": _cudnn,
    "graph": _graph,
}


# Answers


@contextlib.contextmanager
def sender(ctx: Any, asked: Asked) -> Iterator[Callable[..., Any]]:
    """The method of the door. A KvCache first gets the keys that the request does not bring."""
    if asked.spec.door != "kv_cache":
        handle, method = asked.door.method.split(".")
        yield getattr(getattr(ctx, handle), method)
        return
    problem, page = asked.problem, asked.spec.how.get("page_size", 16)
    blocks = 2 * sum(-(-len(keys) // page) + 1 for keys in problem.k)  # each sequence may be forked
    sizes = {"num_blocks": blocks, "page_size": page, "kv_heads": problem.heads[1]}
    dims = {"head_dim": asked.spec.dims[0], "head_dim_v": asked.spec.dims[1]}
    cascade = asked.spec.how.get("cascade", "auto")
    with ctx.kv_cache(**sizes, **dims, dtype=problem.k[0].dtype, cascade=cascade) as cache:
        seqs = [cache.create().result(_WAIT) for _ in problem.k]
        if asked.spec.how.get("turned"):  # a batch need not have the sequences in the order of their creation
            seqs.reverse()

        def append(seq: ga.KvSequence, k: Array, v: Array) -> None:
            if len(k):
                cache.append(seq, k, v).result(_WAIT)

        for index, new in enumerate(_new_rows(asked.spec, problem)):
            if asked.spec.shared and index:  # all have the keys of the first sequence
                seqs[index] = cache.fork(seqs[0]).result(_WAIT)
                continue
            k, v = (arrays[index][: len(arrays[index]) - new] for arrays in (problem.k, problem.v))
            half = len(k) // 2 if asked.spec.how.get("forked") else 0
            append(seqs[index], k[:half], v[:half])
            pair = [seqs[index]]
            if half:  # either one continues, and new rows of the other must not matter
                pair.append(cache.fork(seqs[index]).result(_WAIT))
                seqs[index] = pair.pop(asked.spec.seed % 2)
            append(seqs[index], k[half:], v[half:])
            if half:
                append(pair[0], np.full_like(k[:1], 3), np.full_like(v[:1], 3))
        yield lambda **arguments: cache.attend(seqs=seqs, **arguments)


def send(ctx: Any, asked: Asked) -> Any:
    with sender(ctx, asked) as method:
        return method(**asked.arguments).result(_WAIT)


def answer_of(asked: Asked, result: Any) -> Answer:
    """The answer by packed rows. Checks the padding of results."""
    name, _, backward = asked.spec.door.partition(" ")
    if backward:
        return Answer(gradients=_packed_gradients(name, asked, result))
    if name in ("cudnn", "graph"):
        if name == "graph":
            result = ga.MhaOutput(result[MhaUid.OUT], result.get(MhaUid.STATS))
        stats = None if result.stats is None else result.stats[..., 0]
        result = ga.AttentionOutput(result.out.swapaxes(1, 2), stats)
    out, lse = result
    given = asked.arguments.get("out")
    assert given is None or out is given
    if name == "pointers":
        return Answer(out, None if lse is None else lse.T)
    if out.ndim == 3:
        return Answer(out, lse)
    rows = [len(array) for array in asked.problem.q]
    if name == "padded":
        nothing = asked.problem.options.get("sinks", np.full(asked.problem.heads[0], -np.inf))
        for index, count in enumerate(rows):
            assert (out[index, count:] == 0).all(), "padding"
            if lse is not None:
                left = lse[index, :, count:]
                np.testing.assert_allclose(left, np.broadcast_to(nothing[:, None], left.shape), atol=1e-6)
    out = np.concatenate([one[:count] for one, count in zip(out, rows, strict=True)])
    if lse is not None:
        lse = np.concatenate([one[:, :count] for one, count in zip(lse, rows, strict=True)], axis=1)
    return Answer(out, lse)


def _packed_gradients(name: str, asked: Asked, found: Any) -> ga.AttentionGradients:
    if name == "graph":
        found = ga.AttentionGradients(*(found.get(MhaUid[f"D{side}"]) for side in ("Q", "K", "V", "BIAS")))
    if name in ("cudnn", "graph"):
        found = found._replace(**{f"d{side}": getattr(found, f"d{side}").swapaxes(1, 2) for side in "qkv"})
    for side in "qkv":
        gradient, arrays = getattr(found, f"d{side}"), getattr(asked.problem, side)
        if gradient.ndim == 4 and side not in asked.spec.shared:
            for array, whole in zip(arrays, gradient, strict=True):
                assert (whole[len(array) :] == 0).all(), f"d{side} of padding"
            parts = [whole[: len(array)] for array, whole in zip(arrays, gradient, strict=True)]
            found = found._replace(**{f"d{side}": np.concatenate(parts)})
    return found


def ask(ctx: Any, spec: Spec, problem: Problem) -> Answer:
    """The answer of the door. Checks that its arrays have not changed."""
    asked = ask_of(spec, problem)
    answer = answer_of(asked, send(ctx, asked))
    answer = Answer(answer.out.copy(), answer.lse)  # `check_unharmed` overwrites ``out``
    check_unharmed(asked)
    return answer


def check(asked: Asked, answer: Answer, kernels: bool) -> None:
    """Check that the answer is the oracle's within tolerance.

    kernels: whether kernels answered, which round fp8 weights.
    """
    spec, problem = asked.spec, asked.problem
    options = problem.oracle_options
    if spec.door in CACHED and "k_positions" in options and "q_positions" not in options:
        rows, keys = (np.diff(problem.ends[f"cu_seqlens_{side}"]).astype(np.int64) for side in "qk")
        first, step = options["k_positions"].T if options["k_positions"].ndim == 2 else (options["k_positions"], 1)
        options["q_positions"] = np.stack(np.broadcast_arrays(first + (keys - rows) * step, step), axis=1)
    if spec.how.get("latent") and "k_descale" in options:
        options["v_descale"] = options["k_descale"]
    if spec.door.startswith("padded") and options.get("dropout_p"):
        options = _each_third(options)
    compute = spec.how.get("compute")
    compute = None if compute == "f32" else compute
    if answer.gradients is not None:
        inputs = (asked.incoming["dout"], *problem.packed)
        given = {name: asked.incoming[name] for name in ("out", "lse")}
        if spec.door == "graph backward" and not kernels:
            given = {}  # the oracle of graphs differentiates them, and reads no out and LSE
        check_gradients(answer.gradients, *inputs, **given, compute=compute, **options)
        return
    wanted = spec.how.get("out_dtype") or ("bfloat16" if spec.dtype in FP8 else spec.dtype)
    assert answer.out.dtype.name == wanted
    assert (answer.lse is None) == (not spec.how.get("return_lse", False))
    assert answer.lse is None or answer.lse.dtype.name == spec.how.get("lse_dtype", "float32")
    weights = spec.dtype if kernels and spec.dtype in FP8 else None
    check_output(answer.out, answer.lse, *problem.packed, compute=compute, weights_dtype=weights, **options)


def _each_third(options: dict[str, Any]) -> dict[str, Any]:
    """The options with two empty sequences behind each sequence, since dropout counts so in a padded batch."""
    found = dict(options)
    for name, value in options.items():
        if name in ENDS:
            found[name] = np.concatenate([value[:1], np.repeat(value[1:], 3)])
        elif has_sequences(name, value):
            found[name] = np.repeat(value, 3, axis=0)
    return found


def check_unharmed(asked: Asked) -> None:
    """Check that no array of the request has changed, nor the memory around ``out``. Overwrites ``out``."""
    if "out" in asked.arguments and not asked.incoming:
        asked.arguments["out"][...] = FILL
    for memory, before in asked.before:
        assert memory.tobytes() == before, "an input, or what lies beside out, has changed"
