"""KernelSource, Cubin, architectures, include scanning and the shipped sources."""

from __future__ import annotations

import copy
import dataclasses
import pickle

import numpy as np
import pytest

from gpu_actors.compiling import assets
from gpu_actors.compiling.headers import include_closure, includes_of, toolkit_closure
from gpu_actors.compiling.source import Cubin, KernelResources, KernelSource, check_arch, exact_arch, parse_resources
from gpu_actors.compiling.variant import Variant
from gpu_actors.errors import CompileError, InvalidRequest, Unsupported

TEXT = 'extern "C" __global__ void k(int* p) {}'


def source(**changes):
    return KernelSource(**{"name": "k.cu", "source": TEXT, "entry_points": ("k",), **changes})


BAD = {
    "entry_points": ("k", (), ("a b",), ("k", "k"), None, 3),
    "headers": (
        *({name: ""} for name in ("/usr/include/x.h", "../x.h", "./x.h", "a//x.h", "", "a/../../x.h", 1, "\ud800")),
        *({"a": "", "a/x.h": ""}, None, ["x.h"]),
    ),
    "headers['x.h']": ({"x.h": b"bytes"}, {"x.h": "a\0b"}),
    "macros": ({"a-b": 1}, None, ["A"], {1: 2}),
    "macros['A']": tuple({"A": value} for value in (10**5000, "\ud800", float("nan"), "1\n2", None)),
    "source": ("a\0b", "\ud800", b"bytes"),
    "name": (None,),
    "arch": ("", 90, "90"),
    "options": (
        *("-G", None, (1,), ("-\ud800",), ("-I/usr/include",), ("--gpu-architecture=sm_80",), ("-DX=1",)),
        *(("--pre-include=x.h",), ("-dlto",), ("--time=times.csv",), ("-time=times.csv",), ("--pch-dir=.",)),
        *(("-fdevice-time-trace=trace",), ("--ptxas-options=-optf=file",), ("--ptxas-options=--options-file=file",)),
        *(("-Xptxas", "-optf=file"), ("-Xptxas=--output-file=file",), ("-Xptxas=--input-as-string=text",)),
        *((" -I/usr/include",), ("--maxrregcount", "64")),
    ),
}


class TestKernelSource:
    def test_equal_fields_are_equal_and_hash_alike_whatever_the_order_of_mappings(self):
        one = source(macros={"A": 1, "B": 2}, headers={"a.h": "x", "b.h": "y"})
        two = source(macros={"B": 2, "A": 1}, headers={"b.h": "y", "a.h": "x"})
        assert one == two
        assert hash(one) == hash(two)
        assert {one: 1}[two] == 1

    @pytest.mark.parametrize(
        "changes",
        [
            {"source": TEXT + " "},
            {"entry_points": ("k", "l")},
            {"macros": {"A": 2}},
            {"headers": {"a.h": "y"}},
            {"options": ("-G",)},
            {"arch": "sm_80"},
            {"name": "other.cu"},
        ],
    )
    def test_a_change_of_any_field_is_another_source(self, changes):
        base = source(macros={"A": 1}, headers={"a.h": "x"})
        assert dataclasses.replace(base, **changes) != base

    def test_nothing_in_it_can_be_changed(self):
        macros = {"A": 1}
        kernel_source = source(macros=macros)
        macros["A"] = 2
        assert kernel_source.macros["A"] == "1"
        with pytest.raises(TypeError):
            kernel_source.macros["A"] = "3"
        with pytest.raises(dataclasses.FrozenInstanceError):
            kernel_source.source = ""

    def test_it_survives_pickle_and_deepcopy(self):
        kernel_source = source(macros={"A": 1}, headers={"a.h": "x"}, options=("-G",), arch="sm_90a")
        assert pickle.loads(pickle.dumps(kernel_source)) == kernel_source
        assert copy.deepcopy(kernel_source) == kernel_source

    def test_macros_become_the_text_that_the_compiler_sees(self):
        macros = {"T": True, "F": False, "I": 3, "X": 0.1, "N": np.float64(0.25), "S": "float"}
        seen = {"T": "1", "F": "0", "I": "3", "X": "0.1", "N": "0.25", "S": "float"}
        assert dict(source(macros=macros).macros) == seen

    @pytest.mark.parametrize(("field", "value"), [(field, value) for field in BAD for value in BAD[field]])
    def test_bad_fields_are_named(self, field, value):
        name = field.partition("[")[0]
        with pytest.raises(InvalidRequest) as caught:
            source(**{name: value})
        assert caught.value.field == field

    def test_the_architecture_comes_from_the_call_or_the_source_and_never_from_both(self):
        assert source().resolve_arch("sm_80") == "sm_80"
        assert source(arch="sm_90a").resolve_arch() == "sm_90a"
        assert source(arch="sm_90a").resolve_arch("sm_90a") == "sm_90a"
        with pytest.raises(InvalidRequest, match="sm_90a alone"):
            source(arch="sm_90a").resolve_arch("sm_80")
        with pytest.raises(InvalidRequest, match="names no architecture"):
            source().resolve_arch()


class TestArch:
    def test_capabilities_map_to_the_exact_architecture(self):
        exact = ["sm_75", "sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_120a"]
        assert [exact_arch(c) for c in (75, 80, 86, 89, 90, 100, 120)] == exact

    @pytest.mark.parametrize(("given", "nearest"), [("sm_90", "sm_90a"), ("sm_100f", "sm_100a"), ("sm_80a", "sm_80")])
    def test_an_inexact_one_is_refused_and_the_exact_one_named(self, given, nearest):
        with pytest.raises(Unsupported) as caught:
            check_arch(given)
        assert caught.value.nearest == nearest

    @pytest.mark.parametrize("given", ["90a", "compute_90a", "sm_", "sm_9", "sm_90a ", None, 90])
    def test_what_is_no_architecture_is_invalid(self, given):
        with pytest.raises(InvalidRequest):
            check_arch(given)


SEVERAL = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'spills' for 'sm_90a'
ptxas info    : Function properties for spills
ptxas         .     944 bytes stack frame, 1628 bytes spill stores, 1824 bytes spill loads
ptxas info    : Used 64 registers, used 0 barriers, 944 bytes cumulative stack size
ptxas info    : Compile time = 115.194 ms
ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized in 'spills'
ptxas info    : Compiling entry function 'shares' for 'sm_90a'
ptxas info    : Function properties for shares
ptxas         .     16 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 12 registers, used 1 barriers, 256 bytes cumulative stack size, 512 bytes smem
"""
CALLED = """\
ptxas info    : Function properties for _Z1fiPi
ptxas         .     8 bytes stack frame, 4 bytes spill stores, 6 bytes spill loads
"""


class TestResources:
    def test_each_kernel_gets_its_own_registers_spills_stack_and_shared_memory(self):
        assert parse_resources(SEVERAL) == {
            "spills": KernelResources(64, 1628 + 1824, 944, 0),
            "shares": KernelResources(12, 0, 256, 512),
        }

    def test_spills_of_a_called_function_are_charged_to_every_kernel(self):
        result = parse_resources(SEVERAL + CALLED)
        assert result["shares"] == KernelResources(12, 10, 256, 512)
        assert result["spills"].spill_bytes == 1628 + 1824 + 10

    def test_logs_without_a_report_name_no_kernel(self):
        assert parse_resources("") == {}
        assert parse_resources("k.cu(1): warning #177-D: Used 3 registers\n") == {}

    def test_notes_are_the_c75xx_lines_without_their_prefix(self):
        cubin = Cubin(b"", "sm_90a", ("spills",), SEVERAL, parse_resources(SEVERAL))
        assert cubin.notes == (
            "(C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized in 'spills'",
        )
        assert Cubin(b"", "sm_90a", ("k",), CALLED, {}).notes == ()

    def test_a_cubin_is_hashable_and_keeps_its_own_resources(self):
        resources = {"k": KernelResources(1, 2, 3, 4)}
        cubin = Cubin(b"x", "sm_80", ("k",), "", resources)
        resources.clear()
        assert cubin.resources["k"].shared_bytes == 4
        assert hash(cubin) == hash(dataclasses.replace(cubin))


class TestIncludes:
    def test_every_spelling_of_an_include_is_seen(self):
        text = (
            '#include "a.h"\n  #  include <b.h>\n/* x */ #include "c.h"\n%: include <d.h>\n#inc\\\nlude "e.h"\n'
            'end of comment */ #include "f.h"\n#include /* why */ "g.h" // x\n#if __has_include(<h.h>)\n'
        )
        assert includes_of(text).names == ("a.h", "b.h", "c.h", "d.h", "e.h", "f.h", "g.h", "h.h")

    def test_what_is_no_include_is_not(self):
        assert includes_of('// #include "a.h"\nint included;\n#define X "b.h"\n#ifdef __has_include\n') == ((), ())

    def test_all_branches_are_followed_and_only_what_is_reached_is_used(self):
        headers = {"a.h": '#ifdef X\n#include "b.h"\n#else\n#include "c.h"\n#endif', "b.h": "", "c.h": "", "d.h": ""}
        used, missing = include_closure('#include "a.h"\n#include <cuda_fp16.h>', headers.get)
        assert set(used) == {"a.h", "b.h", "c.h"}
        assert missing == ("cuda_fp16.h",)

    def test_headers_that_include_each_other_end(self):
        used, _ = include_closure('#include "a.h"', {"a.h": '#include "b.h"', "b.h": '#include "a.h"'}.get)
        assert set(used) == {"a.h", "b.h"}

    @pytest.mark.parametrize("line", ["#include HEADER", "#if __has_include(HEADER)"])
    def test_an_include_that_names_a_macro_is_refused(self, line):
        with pytest.raises(CompileError, match="must spell its header's name") as caught:
            include_closure(f"{line}\n", {}.get)
        assert "HEADER" in caught.value.source_line

    @pytest.mark.parametrize("path", ["/etc/passwd", "../x.h", "sub/../../x.h"])
    def test_a_path_out_of_the_closure_is_refused_also_inside_a_header(self, path):
        with pytest.raises(CompileError, match=f"the path '{path}'"):
            include_closure('#include "a.h"', {"a.h": f"#include <{path}>"}.get)

    def test_toolkit_headers_include_each_other_by_their_own_folder(self, tmp_path):
        (tmp_path / "sub").mkdir()
        (tmp_path / "top.h").write_text('#include "sub/in.h"\n#include <cstring>\n')
        (tmp_path / "sub" / "in.h").write_text('#include "beside.h"\n#include "../other.h"\n')
        (tmp_path / "sub" / "beside.h").write_text("1")
        (tmp_path / "other.h").write_text("2")
        result = toolkit_closure(("top.h", "not.there"), (tmp_path,))
        assert set(result) == {"top.h", "sub/in.h", "beside.h", "../other.h"}
        assert result["beside.h"] == "1"


class TestAssets:
    def test_a_shipped_kernel_comes_with_the_headers_it_reaches(self):
        kernel_source = Variant("copy_pages", "sm_80", {"A": 1}).source
        assert {"ptx/memory.cuh", "ptx/types.cuh"} <= set(kernel_source.headers)
        assert "ptx/wgmma.cuh" not in kernel_source.headers
        assert (kernel_source.entry_points, kernel_source.arch, dict(kernel_source.macros)) == (
            ("copy_pages",),
            "sm_80",
            {"A": "1"},
        )

    def test_the_sources_of_this_checkout_are_found(self):
        assert assets.asset_root().name == "kernels_cu"

    @pytest.mark.parametrize("name", ["nothing.cu", "../pyproject.toml", "ptx"])
    def test_a_name_outside_the_sources_is_refused(self, name):
        with pytest.raises(InvalidRequest) as caught:
            assets.asset_text(name)
        assert caught.value.field == "name"
