"""The parameter struct: one layout in Python, NVRTC and the host compiler, and its packing."""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Mapping

import numpy as np
import pytest
from inside.compiling import Compiler
from inside.devices import Buffer, Kernel, Kernels, LaunchGeometry
from inside.emulation import build_module
from support.gate import kernel_source
from support.structs import fields_of

from gpu_actors.errors import CompileError, InvalidRequest
from gpu_actors.kernels.dispatch import dispatch_key
from gpu_actors.kernels.params import UNBOUNDED, forward_layout, forward_packer, parse_layout
from gpu_actors.kernels.program import NO_VALUES, Part, Program, Values
from gpu_actors.kernels.support import example_problem

DENSE = example_problem(
    "float16",
    8,
    batch=2,
    seqlen_q=3,
    seqlen_k=5,
    total_q=6,
    total_k=10,
    heads_q=4,
    heads_kv=2,
    head_dim_v=16,
    softmax_scale=0.25,
)
DENSE_SHAPES = {"q": (2, 3, 4, 8), "k": (2, 5, 2, 8), "v": (2, 5, 2, 16), "out": (2, 3, 4, 16)}


def contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(int(np.prod(shape[axis + 1 :])) for axis in range(len(shape)))


def buffers(shapes: dict[str, tuple[int, ...]]) -> dict[str, Buffer]:
    return {
        name: Buffer(4096 * (n + 1), shape, contiguous(shape), "float16")
        for n, (name, shape) in enumerate(shapes.items())
    }


def unpack(data: bytes) -> dict[str, int | float]:
    row = fields_of(data, forward_layout())
    return {name: row[name].item() for name in row.dtype.names or ()}


def assertions(offset: int = 0) -> str:
    """Static assertions of the struct's size and of each field's place, the last one off by ``offset``."""
    layout = forward_layout()
    lines = [f'static_assert(sizeof(Params) == {layout.size}, "size");']
    for field in layout.fields:
        place = field.offset + (offset if field is layout.fields[-1] else 0)
        size = struct.calcsize(field.code)
        member = f"static_cast<Params*>(nullptr)->{field.name}"
        lines.append(f'static_assert(__builtin_offsetof(Params, {field.name}) == {place}, "{field.name}");')
        lines.append(f'static_assert(sizeof({member}) == {size}, "{field.name}");')
    return "\n".join(lines)


def compile_both(offset: int = 0) -> None:
    source = kernel_source(dispatch_key(DENSE, "sm_80"))
    text = (
        f'#include "common/params.cuh"\n{assertions(offset)}\n'
        'extern "C" __global__ void probe(const __grid_constant__ Params params) {\n'
        "  *static_cast<float*>(params.lse) = params.softcap;\n}\n"
    )
    probe = dataclasses.replace(source, name="probe.cu", source=text, entry_points=("probe",))
    errors = []
    for build in (Compiler().compile, lambda source: build_module(source.source, dict(source.macros))):
        try:
            build(probe)
        except CompileError as error:
            errors.append(error)
    if errors:
        raise ExceptionGroup("the struct differs", errors)


class TestLayout:
    def test_nvrtc_and_the_host_compiler_lay_the_struct_out_as_python_packs_it(self):
        compile_both()

    def test_a_field_in_another_place_fails_to_compile_on_both(self):
        with pytest.raises(ExceptionGroup) as failed:
            compile_both(offset=4)
        assert len(failed.value.exceptions) == 2

    def test_a_packed_struct_has_the_layouts_size_and_reads_back(self):
        layout = forward_layout()
        numbers = list(range(1, len(layout.fields) + 1))
        data = layout.pack(numbers)
        assert len(data) == layout.size
        assert list(unpack(data).values()) == numbers

    def test_padding_goes_where_c_puts_it(self):
        layout = parse_layout(
            "struct Pair {\n  double a;\n  double b;\n};\n"
            "struct Mixed {  // a comment\n  int32_t x;\n  const void* p;  // another\n  Pair pair;\n  float y;\n};\n",
            "Mixed",
        )
        assert [(field.name, field.offset) for field in layout.fields] == [
            ("x", 0),
            ("p", 8),
            ("pair.a", 16),
            ("pair.b", 24),
            ("y", 32),
        ]
        assert layout.size == 40

    @pytest.mark.parametrize("line", ["int32_t a, b;", "int32_t a[3];", "half_t x;", "", "// only a comment"])
    def test_a_line_that_is_no_known_member_is_refused(self, line):
        with pytest.raises(ValueError, match="Odd"):
            parse_layout(f"struct Odd {{\n  float ok;\n  {line}\n}};\n", "Odd")


class TestPacking:
    """Rows of the matrix, and `far` ones, check addresses, strides and seeds by the kernels' answers."""

    def test_bounds_that_are_unbounded_or_huge_stay_addable(self):
        for window, expected in [((-1, 7), (UNBOUNDED, 7)), ((1 << 40, -1), (UNBOUNDED, UNBOUNDED)), ((0, 0), (0, 0))]:
            problem = dataclasses.replace(DENSE, window_size=window, sink_tokens=1 << 40)
            packed = unpack(forward_packer(problem)(buffers(DENSE_SHAPES), NO_VALUES))
            assert (packed["window_left"], packed["window_right"]) == expected
            assert packed["sink_tokens"] == UNBOUNDED

    def test_dropout_packs_all_of_its_seed_with_threshold_and_scale(self):
        seed = (1 << 64) - 3
        problem = dataclasses.replace(DENSE, dropout_p=0.25)
        packed = unpack(forward_packer(problem)(buffers(DENSE_SHAPES), Values(seed)))
        names = ("dropout_seed", "dropout_threshold", "dropout_scale")
        assert [packed[name] for name in names] == [seed, 1 << 30, 1 / 0.75]

    @pytest.mark.parametrize("seed", [-1, 1 << 64])
    def test_a_seed_outside_64_bits_is_refused(self, seed):
        with pytest.raises(InvalidRequest, match="dropout_seed"):
            forward_packer(dataclasses.replace(DENSE, dropout_p=0.5))(buffers(DENSE_SHAPES), Values(seed))

    def test_a_missing_operand_is_refused(self):
        given = buffers(DENSE_SHAPES)
        del given["k"]
        with pytest.raises(InvalidRequest) as refused:
            forward_packer(DENSE)(given, NO_VALUES)
        assert refused.value.field == "k"

    @pytest.mark.parametrize(
        ("changes", "words"),
        [
            ({"shape": (2, 3, 4, 9)}, r"shape \(2, 3, 4, 8\)"),
            ({"dtype": "bfloat16"}, "float16"),
            ({"strides": (96, 32, 8, 2)}, "contiguous"),
            ({"address": 4097}, "multiple of 2"),
        ],
    )
    def test_an_operand_that_is_not_as_the_problem_says_is_refused(self, changes, words):
        given = buffers(DENSE_SHAPES)
        given["q"] = given["q"]._replace(**changes)
        with pytest.raises(InvalidRequest, match=words) as refused:
            forward_packer(DENSE)(given, NO_VALUES)
        assert refused.value.field == "q"

    def test_an_axis_of_extent_1_may_have_any_stride(self):
        problem = dataclasses.replace(DENSE, head_dim=1)
        given = buffers({**DENSE_SHAPES, "q": (2, 3, 4, 1), "k": (2, 5, 2, 1)})
        given["q"] = given["q"]._replace(strides=(12, 4, 1, 99))
        assert unpack(forward_packer(problem)(given, NO_VALUES))["q_strides.head"] == 1


def test_launches_of_the_same_kernels_have_the_same_steps() -> None:
    """Except steps that pass values: -0.0 equals 0.0 but is passed too."""
    made: list[Values] = []

    def pack(given: Mapping[str, Buffer], values: Values) -> bytes:
        made.append(values)
        return b""

    key = dispatch_key(DENSE, "sm_80")
    programs = [Program((Part(key, LaunchGeometry((1, 1, 1), (32, 1, 1), 0), pack),)) for _ in range(2)]
    kernels, others = (Kernels([Kernel("forward_mma", None)]) for _ in range(2))
    first = programs[0].steps(kernels, NO_VALUES)
    assert programs[0].steps(kernels, NO_VALUES) is first
    assert programs[0].steps(others, NO_VALUES) is not first
    assert programs[1].steps(kernels, NO_VALUES) is not first
    for values in (Values(dropout_seed=3), Values(score_scalars=(0.0,)), Values(score_scalars=(-0.0,))):
        (step,) = programs[0].steps(kernels, values)
        step.pack(buffers(DENSE_SHAPES))
        assert str(made[-1]) == str(values)


def test_what_is_bound_to_kernels_is_bounded() -> None:
    kernels = Kernels([Kernel("forward_mma", None)])
    for purpose in range(3 * kernels.MOST):
        kernels.remember(purpose, purpose)
        assert kernels.memo[purpose] == purpose
        assert len(kernels.memo) <= kernels.MOST
