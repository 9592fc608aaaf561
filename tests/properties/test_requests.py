"""Whole random requests through every public door of a context.

On the mock device and on the emulated one, each is answered as the oracle answers its sequences, or it is refused by an
error that names the fault. Only its output is written.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import numbers
from collections.abc import Callable, Iterator
from types import NoneType
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from inside.attention import scalars_of
from properties.doors import BACKWARD, CACHED, FORWARD, Asked, answer_of, ask_of, check, check_unharmed, send, sender
from properties.problems import Spec, problem_of
from properties.strategies import ANY, Family, budget, specs

import gpu_actors as ga
from gpu_actors import BatchedDecode, FlashBackward, PagedForward

pytestmark = pytest.mark.timeout(300)  # on a crowded machine: they compile kernels

Opened = Callable[..., ga.GpuContext]

# Few kernel variants of each architecture answer most examples.
_FLASH = ("dense", "varlen", "padded")
FAMILIES: dict[str, tuple[Family, ...]] = {
    "sm_80": (
        Family(_FLASH, ("float16",), ((64, 64),), ("causal", "alibi_slopes", "sinks", "bias"), (("return_lse", True),)),
        Family(tuple(BACKWARD), ("float16",), ((64, 64),), ("causal", "mask", "softcap", "sinks", "bias")),
        Family(tuple(CACHED), ("float16",), ((64, 64),), ("window_size", "sinks"), (("return_lse", True),)),
    ),
    "sm_90a": (
        Family(tuple(FORWARD), ("bfloat16",), ((64, 64),), ("window_size", "mask", "sinks"), (("return_lse", True),)),
        Family(tuple(BACKWARD), ("float32",), ((16, 16),), ("window_size", "softcap", "alibi_slopes", "mask")),
        Family(tuple(CACHED), ("float32",), ((16, 8),), ("causal", "softcap", "bias"), (("return_lse", True),)),
    ),
}
ARCHES = ("sm_80", "sm_86", "sm_89", "sm_90a", "sm_120a")
TIMES = pytest.mark.parametrize("times", [1, pytest.param(10, marks=pytest.mark.sweep)])


def answered(ctx: ga.GpuContext, spec: Spec) -> None:
    asked = ask_of(spec, problem_of(spec, finite=spec.door in BACKWARD))
    result = send(ctx, asked)
    check(asked, answer_of(asked, result), kernels=ctx.info.runs_kernels)
    check_unharmed(asked)


def refusal(ask: Callable[[], object]) -> ga.GpuActorsError | None:
    """The error of a request that is refused, or None."""
    try:
        ask()
    except (ga.RequestError, ga.CacheFull) as error:
        return error
    return None


@st.composite
def anywhere(draw: st.DrawFn, family: Family = ANY) -> tuple[str, Spec]:
    arch = draw(st.sampled_from(ARCHES))
    return arch, draw(specs(family, arch))


@TIMES
def test_the_mock_device_answers_as_the_oracle_does(opened: Opened, times: int) -> None:
    @budget(times * 400)
    @given(where=anywhere())
    # NaN in padding's results must not reach the gradient of sinks.
    @example(where=("sm_90a", Spec(door="padded backward", rows=(0, 1), keys=(0, 1), options={"sinks": True})))
    def holds(where: tuple[str, Spec]) -> None:
        arch, spec = where
        answered(opened("mock", arch), spec)

    holds()


@TIMES
@pytest.mark.parametrize("arch", FAMILIES)
def test_kernels_answer_as_the_oracle_does(opened: Opened, arch: str, times: int) -> None:
    families = st.sampled_from(FAMILIES[arch])

    @budget(times * 60)
    @given(spec=families.flatmap(lambda family: specs(family, arch)))
    def holds(spec: Spec) -> None:
        answered(opened("emulated", arch), spec)

    holds()


_COPIES = Family(
    doors=("kv_cache",),
    dtypes=("float16", "bfloat16"),
    dims=((64, 64),),
    pool=("causal", "window_size", "softcap", "sinks"),
    plain=True,
)
_VOID_EDGE = Spec(door="kv_cache", dtype="float16", dims=(64, 64), options={"causal": True, "window_size": (-1, 0)})


@TIMES
def test_a_prefix_that_copies_share_is_read_as_each_has_it(opened: Opened, times: int) -> None:
    @budget(times * 40)
    @given(where=anywhere(_COPIES), page=st.sampled_from((1, 4, 16)))
    # The right edge of a window has no effect beside a causal mask, and must not hide keys of the prefix.
    @example(where=("sm_80", _VOID_EDGE), page=1)
    def holds(where: tuple[str, Spec], page: int) -> None:
        arch, spec = where
        keys = spec.keys[:1] * len(spec.keys)
        how = {"cascade": True, "page_size": page, "return_lse": True}
        answered(opened("mock", arch), dataclasses.replace(spec, shared="kv", keys=keys, how=how))

    holds()


@pytest.mark.sweep
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("arch", ARCHES)
def test_any_kernel_answers_as_the_oracle_does(opened: Opened, arch: str) -> None:
    @budget(300)
    @given(spec=specs(ANY, arch))
    def holds(spec: Spec) -> None:
        answered(opened("emulated", arch), spec)

    holds()


# Requests with one thing wrong

# Names that a refusal may use besides those of given arguments.
_NAMED = {
    *("v_cache", "block_table", "max_seqlen_q", "max_seqlen_k", "cu_seqlens_q", "dropout_first_head", "seqs", "cache"),
    *("head_dim", "head_dim_v", "page_size", "seqlen_q", "seqlen_k", "batch"),
}
_BACKWARD = tuple(f"{door} backward" for door in _FLASH)
_PLAIN = (*_FLASH, *_BACKWARD, *CACHED)
# Arrays that may have other rows and keys if the rest of a request is the same.
_OF_ANY_LENGTH = {
    *("q", "k", "v", "k_cache", "v_cache", "k_caches", "v_caches", "block_table", "bias", "tree_mask"),
    *("cu_seqlens_q", "cu_seqlens_k"),
}
_OPERANDS = {"q", "k", "v", "k_cache", "v_cache", "k_caches", "v_caches"}
_ODD: tuple[Any, ...] = (
    *(None, "odd", np.zeros(3), math.nan, math.inf, -1, -2.5, 0, 1, True, 1.5, 1 << 70, (), object(), np.float32(2.0)),
    *(np.bool_(True), np.array(1), (1.0, 2), (2, 1.0), (True, 2), (2, False), (np.float32(1.0), 2), (1, 2, 3), (-2, 0)),
)


def longer(array: np.ndarray, axis: int) -> np.ndarray:
    return np.concatenate([array, np.zeros_like(array, shape=(*array.shape[:axis], 1, *array.shape[axis + 1 :]))], axis)


def huge(array: np.ndarray, axis: int) -> np.ndarray:
    shape = list(array.shape)
    shape[axis] = 1 << 40
    return np.broadcast_to(np.zeros((), array.dtype), shape)


CORRUPTIONS: dict[str, Callable[[np.ndarray, int], Any]] = {
    "no array": lambda array, axis: object(),
    "list": lambda array, axis: [1.0],
    "complex": lambda array, axis: np.zeros(array.shape, np.complex64),
    "dates": lambda array, axis: np.zeros(array.shape, "M8[s]"),
    "one axis more": lambda array, axis: array[None],
    "one axis less": lambda array, axis: array.reshape(-1) if array.ndim > 1 else np.zeros((), array.dtype),
    "longer": longer,
    "shorter": lambda array, axis: array.take(range(array.shape[axis] - 1), axis) if array.size else array[None],
    "empty": lambda array, axis: array.take([], axis) if array.size else array[None],
    "swapped": lambda array, axis: np.ascontiguousarray(array.swapaxes(0, axis)),
    "huge": huge,
    "an end less": lambda array, axis: (
        array - (np.arange(array.size) == array.size - 1).astype(array.dtype)
        if array.dtype == np.int32 and array.ndim == 1
        else array
    ),
    "less": lambda array, axis: array - array.dtype.type(1) if array.dtype != np.bool_ else array,
    "more": lambda array, axis: array + array.dtype.type(100) if array.dtype != np.bool_ else array,
}
# Corruptions that are refused for any array, by its own name.
_ALWAYS = ("no array", "list", "complex", "dates", "one axis more")
_OF_AN_AXIS = ("longer", "shorter", "empty", "swapped", "huge")

# The types that each annotation of an option takes. A bool is no number; NumPy's numbers are numbers of their kind.
_KINDS: dict[str, Any] = {"int": numbers.Integral, "float": numbers.Real, "str": str, "None": NoneType}


def fits(annotation: str, value: Any) -> bool:
    """Whether a value has the type that an option's annotation names."""
    if annotation == "tuple[int, int]":
        return isinstance(value, tuple) and len(value) == 2 and all(fits("int", bound) for bound in value)
    if isinstance(value, bool):
        return "bool" in annotation.split(" | ")
    if isinstance(value, numbers.Real) and not math.isfinite(value):
        return False
    return isinstance(value, tuple(_KINDS[name] for name in annotation.split(" | ") if name in _KINDS))


# The least values of numbers, and of each bound of a window.
_LEAST = {
    "window_size": -1,
    **dict.fromkeys(
        ("sink_tokens", "attention_chunk", "softcap", "dropout_p", "dropout_seed", "dropout_first_head"), 0
    ),
}


def too_little(name: str, value: Any) -> bool:
    """Whether a value of the right type is below its option's least value."""
    return name in _LEAST and any(bound < _LEAST[name] for bound in (value if isinstance(value, tuple) else (value,)))


# Fields of a message that the door's method does not have.
_ABSENT = {
    "backward": ("return_lse", "out_dtype", "lse_dtype", "pack_gqa"),
    "kv_cache": ("latent_dim", "chunk_index", "num_chunks"),
    "": ("deterministic",),
}


@dataclasses.dataclass(frozen=True)
class WrongArgument:
    """A request with one wrong argument: an array with a corrupted axis, or an odd value of another option.

    corruption: of an array. axis: the corrupted one.
    odd: the index of the odd value, because some values' repr is unclear.
    both: whether keys and values are corrupted together.
    """

    arch: str
    spec: Spec
    name: str
    corruption: str = ""
    axis: int = 0
    odd: int = 0
    both: bool = False

    def asked(self) -> Asked:
        return ask_of(self.spec, problem_of(self.spec, finite=True))


def message_of(door: str) -> type:
    name = door.partition(" ")[0]
    return BatchedDecode if name == "pointers" else PagedForward if name in CACHED else FlashBackward


def options_of(door: str) -> dict[str, str]:
    """The options of a door that are not arrays, with their annotations."""
    name, _, backward = door.partition(" ")
    kind, absent = message_of(door), _ABSENT.get(backward or name, _ABSENT[""])
    annotations = {field.name: str(field.type) for field in dataclasses.fields(kind)}
    return {name: annotations[name] for name in scalars_of(kind) if name not in absent}


def arrays_of(asked: Asked) -> list[str]:
    """The arguments that are arrays, or lists of them."""
    first = {name: value[0] if isinstance(value, list) and value else value for name, value in asked.arguments.items()}
    return [name for name, value in first.items() if isinstance(value, np.ndarray)]


@st.composite
def wrong_arguments(draw: st.DrawFn) -> WrongArgument:
    arch, spec = draw(anywhere(Family(doors=_PLAIN)))
    backward = spec.door in BACKWARD
    others = list(options_of(spec.door))
    if not backward:
        spec.how.setdefault("out", "plain")
    arrays = arrays_of(WrongArgument(arch, spec, "").asked())
    beside = [name for name in arrays if name not in _OPERANDS]
    name = draw(
        st.one_of(*map(st.sampled_from, (arrays, beside or arrays, ["lse", "dout"] if backward else ["out"], others)))
    )
    if name in others:
        return WrongArgument(arch, spec, name, odd=draw(st.integers(0, len(_ODD) - 1)))
    corruption = draw(st.sampled_from([*CORRUPTIONS, "empty", "empty", "empty"]))
    return WrongArgument(
        arch, spec, name, corruption, draw(st.integers(0, 3)), both=corruption == "empty" or draw(st.booleans())
    )


def corrupt(asked: Asked, wrong: WrongArgument) -> tuple[bool, bool]:
    """Change the argument; return whether it must be refused, and whether by its name."""
    name = wrong.name
    if not wrong.corruption:
        value = asked.arguments[name] = _ODD[wrong.odd]
        fitting = not isinstance(value, str) and fits(options_of(asked.spec.door)[name], value)
        return not fitting or too_little(name, value), False
    array = asked.arguments[name]
    other = name.translate(str.maketrans("kv", "vk"))
    if wrong.both and name in _OPERANDS and isinstance(asked.arguments.get(other), np.ndarray | list):
        asked.arguments[other] = corrupted(asked.arguments[other], wrong)
    found = asked.arguments[name] = corrupted(array, wrong)
    if wrong.corruption == "an end less":  # a sequence may be shorter, but packed rows must belong to one
        return name.startswith("cu_seqlens"), False
    if isinstance(found, np.ndarray) and (found.shape, found.dtype) == (array.shape, array.dtype):
        return False, False
    # Slopes may have an axis of sequences.
    exact = wrong.corruption in _ALWAYS and (name, wrong.corruption) != ("alibi_slopes", "one axis more")
    return exact or name not in {*_OF_ANY_LENGTH, "alibi_slopes"}, exact


def corrupted(array: Any, wrong: WrongArgument) -> Any:
    """The corrupted array, or list of corrupted arrays."""
    if isinstance(array, list):
        return [corrupted(one, wrong) for one in array]
    return CORRUPTIONS[wrong.corruption](array, wrong.axis % max(1, array.ndim))


def check_refused(method: Callable[..., Any], asked: Asked, wrong: WrongArgument) -> None:
    """Corrupt the request and send it: a refusal must use a name that the caller knows."""
    known = {*asked.arguments, *_NAMED}
    must, exact = corrupt(asked, wrong)
    error = refusal(lambda: method(**asked.arguments).result(60))
    assert error or not must, f"{wrong} is taken"
    said = getattr(error, "field", wrong.name).partition("[")[0]
    exact = exact and not wrong.both
    assert said == wrong.name or (said in known and not exact), (wrong, error)


@TIMES
def test_a_wrong_argument_is_refused_by_name(opened: Opened, times: int) -> None:
    @budget(times * 600)
    @given(wrong=wrong_arguments())
    # An array given for an option that is checked with another option is refused by name too.
    @example(wrong=WrongArgument("sm_90a", Spec(options={"q_positions": 1}), "alignment", odd=2))
    def holds(wrong: WrongArgument) -> None:
        asked = wrong.asked()
        with sender(opened("mock", wrong.arch), asked) as method:
            check_refused(method, asked, wrong)

    holds()


def many_arrays(door: str) -> Spec:
    """A request with most of the arrays that a door takes."""
    options: dict[str, Any] = {"alibi_slopes": "batch", "sinks": True, "bias": ("float32", *[True] * 3, False)}
    options |= {"q_positions": 2, "k_positions": 2}
    how: dict[str, Any] = {} if door in BACKWARD else {"out": "plain", "return_lse": True}
    rows = (1, 1) if door == "pointers" else (3, 3)
    if door in CACHED and door != "pointers":
        options["tree_mask"] = True
    if door in ("paged", "cache"):
        how |= {"leftpad": [1, 2], "places": [1, 0]}
    return Spec(door=door, rows=rows, seed=1, options=options, how=how)


def every_corruption(asked: Asked) -> Iterator[WrongArgument]:
    """Each corruption of each axis of each array, and each odd value of each other option."""
    for name in arrays_of(asked):
        array = asked.arguments[name]
        axes = (array[0] if isinstance(array, list) else array).ndim
        for corruption in CORRUPTIONS:
            for axis in range(axes if corruption in _OF_AN_AXIS else 1):
                for both in (False, True) if name in _OPERANDS and corruption in _OF_AN_AXIS else (False,):
                    yield WrongArgument("sm_90a", asked.spec, name, corruption, axis, both=both)
    for name in options_of(asked.spec.door):
        for odd in range(len(_ODD)):
            yield WrongArgument("sm_90a", asked.spec, name, odd=odd)


@pytest.mark.parametrize("door", _PLAIN)
def test_every_argument_of_a_door_is_looked_at(opened: Opened, door: str) -> None:
    """All faults that `wrong_arguments` draws from, on one request, because it draws each one rarely."""
    asked = ask_of(many_arrays(door), problem_of(many_arrays(door), finite=True))
    with sender(opened("mock", "sm_90a"), asked) as method:
        method(**asked.arguments).result(60)
        for wrong in every_corruption(asked):
            check_refused(method, dataclasses.replace(asked, arguments=dict(asked.arguments)), wrong)


_ROOM = Family(doors=("padded", "padded backward", "paged", "cache", "pointers", "pointers"))  # whose caches may differ


def room_of(arguments: dict[str, Any], name: str, sequence: int) -> int:
    """The largest number of rows or keys that the argument may give for a sequence."""
    if name.startswith("seqused"):
        return int(arguments[name[-1]].shape[1])
    if name == "seq_lens":
        return int(arguments["k_caches"][sequence].shape[1])
    rows, table = arguments["k_cache"].shape[1], arguments.get("block_table")
    return int(rows if table is None else rows * table.shape[1])


@TIMES
def test_sequences_fill_their_room_and_no_more(opened: Opened, times: int) -> None:
    @budget(times * 40)
    @given(where=anywhere(_ROOM))
    def holds(where: tuple[str, Spec]) -> None:
        arch, spec = where
        asked = ask_of(spec, problem_of(spec, finite=True))
        lengths_of = asked.arguments.keys() & {"seqused_q", "seqused_k", "cache_seqlens", "seq_lens"}
        for name, sequence, more in itertools.product(sorted(lengths_of), range(len(spec.rows)), (0, 1)):
            lengths = asked.arguments[name].copy()
            lengths[sequence] = room_of(asked.arguments, name, sequence) + more
            longer = dataclasses.replace(asked, arguments={**asked.arguments, name: lengths})
            error = refusal(lambda longer=longer: send(opened("mock", arch), longer))
            # The longer sequence may also lack pages or columns of a bias.
            assert (getattr(error, "field", None) == name) == (more > 0), error

    holds()


@TIMES
def test_no_result_is_written_over_an_operand(opened: Opened, times: int) -> None:
    @budget(times * 40)
    @given(where=anywhere(Family(doors=(*_FLASH, "paged", "cache", "pointers"), pool=("sinks",))))
    def holds(where: tuple[str, Spec]) -> None:
        arch, spec = where
        asked = ask_of(spec, problem_of(spec, finite=True))
        with sender(opened("mock", arch), asked) as method:
            out = method(**asked.arguments).result(60)
            out = getattr(out, "out", out)
            for name in arrays_of(asked):
                value = asked.arguments[name]
                memory = value[-1] if isinstance(value, list) else value
                if (
                    name == "out"
                    or memory.dtype != out.dtype
                    or not memory.flags.c_contiguous
                    or memory.size < out.size
                ):
                    continue
                inside = memory.reshape(-1)[memory.size - out.size :].reshape(out.shape)
                if out.size:
                    error = refusal(lambda inside=inside: method(**{**asked.arguments, "out": inside}).result(60))
                    assert error is not None, f"out lies in {name}"
                    assert getattr(error, "field", None) == "out", error

    holds()


_PLACED = Family(doors=(*_FLASH, *_BACKWARD), options=("q_positions", "k_positions"))
_POSITIONS = 1 << 30


@TIMES
def test_positions_end_below_their_limit(opened: Opened, times: int) -> None:
    @budget(times * 40)
    @given(where=anywhere(_PLACED))
    def holds(where: tuple[str, Spec]) -> None:
        arch, spec = where
        asked = ask_of(spec, problem_of(spec, finite=True))
        for name, lengths in (("q_positions", spec.rows), ("k_positions", spec.keys)):
            array = asked.arguments.get(name)
            for sequence, more in itertools.product(range(0 if array is None else len(array)), (0, 1)):
                steps = array[sequence, 1] if array.ndim == 2 else 1
                last = max(lengths if len(array) < len(lengths) else lengths[sequence : sequence + 1]) - 1
                moved = array.copy()
                moved.reshape(len(array), -1)[sequence, 0] = _POSITIONS - 1 - max(0, last) * steps + more
                further = dataclasses.replace(asked, arguments={**asked.arguments, name: moved})
                error = refusal(lambda further=further: send(opened("mock", arch), further))
                assert (getattr(error, "field", None) == name) == (more > 0), error

    holds()


# Requests that no kernel computes

_LATENT: dict[str, Any] = {"how": {"latent": True}, "options": {"softmax_scale": 0.2}}
# The doors of each, and its changes to a request. A change of rows excludes other draws.
BEYOND: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "a tiny scale": (_PLAIN, {"options": {"softmax_scale": 1e-40}}),
    "a huge scale": (_PLAIN, {"options": {"softmax_scale": -1e38}}),
    "a tiny cap": (_PLAIN, {"options": {"softcap": 1e-39}}),
    "a wide head": (_PLAIN, {"dims": (520, 8)}),
    "wide values": (_PLAIN, {"dims": (8, 600)}),
    "wide latents": (("paged", "cache"), {"heads": (2, 1), "dims": (600, 512), **_LATENT}),
    "wide values of latents": (("paged", "cache"), {"heads": (2, 1), "dims": (560, 552), **_LATENT}),
    "a tall tree": (("paged", "cache"), {"rows": (64, 64), "keys": (70, 70), "options": {"tree_mask": True}}),
    "integers": (("varlen",), {"dtype": "int32"}),
    "long doubles": (_FLASH, {"dtype": "longdouble"}),
    "fp8": ((*_FLASH, *_BACKWARD), {"dtype": "float8_e4m3fn"}),
    "fp8 and dropout": (_FLASH, {"dtype": "float8_e5m2", "options": {"dropout_p": 0.5}}),
    "fp8 keys": (("paged", "cache", "pointers"), {"dtype": "float32", "how": {"kv_dtype": "float8_e4m3fn"}}),
    "a wide lse": (_FLASH, {"how": {"return_lse": True, "lse_dtype": "float64"}}),
    "a row's bias": (
        _BACKWARD,
        {"options": {"bias": ("float32", True, True, False, False)}, "how": {"deterministic": True}},
    ),
}
# Fields whose nearest value is a dtype of the spec.
_DTYPES = ("q", "k", "dtype")


def nearer(spec: Spec, error: ga.Unsupported) -> Spec:
    """The spec with the nearest value that the error gives."""
    field, nearest = error.field, error.nearest
    if field in ("head_dim", "head_dim_v"):
        dims = list(spec.dims)
        dims[field == "head_dim_v"] = nearest
        return dataclasses.replace(spec, dims=tuple(dims))
    if field in _DTYPES:
        return dataclasses.replace(spec, dtype=nearest)
    if field in ("k_cache", "k_caches"):
        return dataclasses.replace(spec, how={**spec.how, "kv_dtype": nearest})
    place = "options" if field in spec.options else "how"
    assert field in getattr(spec, place), error
    return dataclasses.replace(spec, **{place: {**getattr(spec, place), field: nearest}})


@st.composite
def beyond(draw: st.DrawFn) -> tuple[str, Spec]:
    doors, changes = BEYOND[draw(st.sampled_from(list(BEYOND)))]
    family = Family(doors=doors, dtypes=("float32", "bfloat16"))
    arch, spec = draw(anywhere(family))
    # These depend on the changes.
    options = {name: value for name, value in spec.options.items() if name not in ("bias", "dropout_p")}
    dependent = ("latent", "compute", "kv_dtype", "out", "out_dtype")
    how = {name: value for name, value in spec.how.items() if name not in dependent}
    if "rows" in changes:
        options, how = {}, {}
    merged = {"options": options | changes.get("options", {}), "how": how | changes.get("how", {})}
    return arch, dataclasses.replace(spec, **{**changes, **merged})


@TIMES
def test_what_an_error_says_is_nearest_is_answered(opened: Opened, times: int) -> None:
    @budget(times * 100)
    @given(where=beyond())
    def holds(where: tuple[str, Spec]) -> None:
        arch, spec = where
        for _ in range(4):
            error = refusal(lambda spec=spec: answered(opened("mock", arch), spec))
            if error is None:
                return
            assert isinstance(error, ga.Unsupported), error
            spec = nearer(spec, error)
        raise AssertionError(f"refused four times, at last {spec}")

    holds()
