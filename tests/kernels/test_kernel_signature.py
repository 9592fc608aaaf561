"""The parameters of a kernel, read from its declaration and from its cubin."""

from __future__ import annotations

import pytest
from inside.compiling import Compiler, kernel_signature, parameter_sizes

from gpu_actors import KernelSource
from gpu_actors.errors import InvalidRequest


def spelled(parameters: str) -> list[tuple[str, str, str | None, bool, bool]]:
    source = f'extern "C" __global__ void k({parameters}) {{}}'
    return [(p.name, p.type, p.dtype, p.pointer, p.written) for p in kernel_signature(source, "k")]


@pytest.mark.parametrize(
    ("text", "name", "type_", "dtype"),
    [
        ("int n", "n", "int", "int32"),
        ("unsigned n", "n", "unsigned int", "uint32"),
        ("const unsigned long int n", "n", "unsigned long", "uint64"),
        ("long long n", "n", "long long", "int64"),
        ("signed char c", "c", "signed char", "int8"),
        ("unsigned char c", "c", "unsigned char", "uint8"),
        ("short int s", "s", "short", "int16"),
        ("bool flag", "flag", "bool", "bool"),
        ("double", "", "double", "float64"),
        ("std::uint16_t n", "n", "uint16_t", "uint16"),
        ("size_t n", "n", "size_t", "uint64"),
        ("__half h", "h", "__half", "float16"),
        ("nv_bfloat16 h", "h", "nv_bfloat16", "bfloat16"),
        ("const __grid_constant__ Params p", "p", "Params", None),
        ("struct Params p", "p", "Params", None),
        ("my::Params<float, 3> p", "p", "my::Params", None),
        ("alignas(64) Params p", "p", "Params", None),
        ("Params", "", "Params", None),
    ],
)
def test_values_are_read_by_their_type(text: str, name: str, type_: str, dtype: str | None) -> None:
    assert spelled(text) == [(name, type_, dtype, False, False)]


@pytest.mark.parametrize(
    ("text", "name", "type_", "dtype", "written"),
    [
        ("float* x", "x", "float", "float32", True),
        ("float *__restrict__ x", "x", "float", "float32", True),
        ("const float* __restrict__ x", "x", "float", "float32", False),
        ("float const *x", "x", "float", "float32", False),
        ("float* const x", "x", "float", "float32", True),
        ("const float* const x", "x", "float", "float32", False),
        ("volatile unsigned int* flags", "flags", "unsigned int", "uint32", True),
        ("void*", "", "void", None, True),
        ("const void* x", "x", "void", None, False),
        ("float x[]", "x", "float", "float32", True),
        ("const int x[16]", "x", "int", "int32", False),
        ("float** rows", "rows", "float*", None, True),
        ("const float* const* rows", "rows", "float*", None, False),
        ("const float** rows", "rows", "float*", None, True),
        ("Params* p", "p", "Params", None, True),
        ("Pair<float*, int>* p", "p", "Pair", None, True),
    ],
)
def test_pointers_tell_what_they_point_to_and_whether_it_is_written(
    text: str, name: str, type_: str, dtype: str | None, written: bool
) -> None:
    assert spelled(text) == [(name, type_, dtype, True, written)]


def test_declarations_are_found_however_they_are_spelled() -> None:
    source = r"""
      // extern "C" __global__ void k(double wrong);
      const char* text = "__global__ void k(double wrong)";
      __global__ void other(double wrong) { k(1); }
      extern "C" {
      __global__ void
      __launch_bounds__(THREADS(2, (3)), 1) [[maybe_unused]] k(
          int n,      // how many, of x
          Pair<int, float*> pair, /* (and) */
          float* \
x) { if (n) return; }
      }
      extern "C" void __global__ before(int n);
      extern "C" __global__ void before(int) {}
      extern "C" __global__ __cluster_dims__(2, 1, 1) void none(void) {}
    """
    assert [(p.type, p.name) for p in kernel_signature(source, "k")] == [("int", "n"), ("Pair", "pair"), ("float", "x")]
    assert [p.name for p in kernel_signature(source, "before")] == ["n"]
    assert kernel_signature(source, "none") == ()


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("", "must declare"),
        ("KERNEL(k)(int n) {}", "must declare"),
        ('extern "C" __global__ void other(int n) {}', "must declare"),
        ("void k(int n) {}", "must declare"),
        ("#if A\n__global__ void k(int n) {}\n#else\n__global__ void k(float n) {}\n#endif", "more than one way"),
        ("__global__ void k(int (*f)(int)) {}", "neither a value nor a pointer"),
        ("__global__ void k(int& n) {}", "neither a value nor a pointer"),
        ("__global__ void k(int n, ...) {}", "neither a value nor a pointer"),
    ],
)
def test_what_cannot_be_read_is_refused(source: str, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words) as caught:
        kernel_signature(source, "k")
    assert caught.value.field == "source"


@pytest.mark.parametrize(
    "text", ["__global__ void k(", "__global__ void k(int", "__global__ (((", "__global__ void k(a<b"]
)
def test_text_that_ends_early_ends_the_reading(text: str) -> None:
    try:
        kernel_signature(text, "k")
    except InvalidRequest:
        pass


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_100a"])
def test_a_cubin_tells_the_size_of_every_parameter(arch: str) -> None:
    source = """
      struct P { float* a; int n; double d; char c[37]; };
      extern "C" __global__ void many(int n, float a, const float* x, float* y, P p, char c, bool b, short s) {
        y[0] = a * x[n] + p.c[3] + c + b + s;
      }
      struct Large { char c[4000]; };
      extern "C" __global__ void large(Large, int*, const __grid_constant__ P, int) {}
      extern "C" __global__ void none() {}
    """
    cubin = Compiler().compile(KernelSource("k.cu", source, ("many", "large", "none")), arch)
    assert parameter_sizes(cubin.data, "many") == (4, 4, 8, 8, 64, 1, 1, 2)
    assert parameter_sizes(cubin.data, "large") == (4000, 8, 64, 4)
    assert parameter_sizes(cubin.data, "none") == ()
    assert parameter_sizes(cubin.data, "absent") is None


@pytest.mark.parametrize("data", [b"", b"\x7fELF\x02", b"cubin" * 100, bytes(4096)])
def test_what_is_no_cubin_tells_nothing(data: bytes) -> None:
    assert parameter_sizes(data, "k") is None


def test_reading_takes_no_longer_than_the_text_is_long() -> None:
    """Reading to the end from each part of such a text would take minutes."""
    for text in ("/* " * 200_000, "__global__ " * 200_000):
        with pytest.raises(InvalidRequest):
            kernel_signature(text, "k")
