"""NVRTC without a GPU: its options, its output, and the text of its errors. Every compile here is real."""

from __future__ import annotations

import pickle
import re
import resource
import subprocess
from concurrent.futures import ThreadPoolExecutor

import pytest
from inside.package import cuda_hint
from support.cubins import ARCH, fake_toolchain, kernel, run_child

from gpu_actors.compiling import toolchain
from gpu_actors.compiling.compiler import Compiler, compile_inputs, supported_archs
from gpu_actors.compiling.cubin_entry import entry_name
from gpu_actors.compiling.elf import whole_cubin
from gpu_actors.compiling.source import KernelSource
from gpu_actors.compiling.toolchain import Toolchain, find_toolchain, load_nvrtc
from gpu_actors.compiling.variant import Variant
from gpu_actors.errors import CompileError, InvalidRequest, Unsupported

BODY = 'extern "C" __global__ void k(int* p) { p[threadIdx.x] = 1; }\n'


def source(text=BODY, entry_points=("k",), **changes):
    return KernelSource("folder/k.cu", text, entry_points, **changes)


def compiled(text=BODY, arch=ARCH, **changes):
    return Compiler().compile(source(text, **changes), arch)


class TestCubins:
    def test_a_cubin_is_whole_made_for_the_exact_architecture_and_keeps_subnormals(self, tmp_path):
        cubin = compiled('extern "C" __global__ void k(float* p) { p[0] = p[1] * p[2]; }')
        assert cubin.arch == "sm_90a"
        path = tmp_path / "k.cubin"
        path.write_bytes(cubin.data)
        command = [
            find_toolchain().include_dirs[0].parent / "bin" / "cuobjdump",
            "-sass",
            path,
        ]  # refuses a cubin that lacks a byte
        shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        assert "sm_90a" in shown
        assert "Function : k" in shown
        assert "FMUL " in shown, "one with .FTZ flushes subnormals"

    def test_instructions_that_only_the_suffixed_architecture_has_compile(self):
        asm = 'asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");'
        text = f'extern "C" __global__ void __launch_bounds__(128, 1) k() {{ {asm} }}'
        assert compiled(text).entry_points == ("k",)

    def test_the_missing_byte_is_restored_only_where_it_is_missing(self):
        data = compiled().data
        assert whole_cubin(data) == data
        assert whole_cubin(data[:-1]) == data
        for broken in (data[:-2], data[: len(data) // 2], data[:10], b"", b"PTX" * 100):
            with pytest.raises(CompileError, match="NVRTC returned"):
                whole_cubin(broken)

    def test_every_supported_architecture_is_exact_and_compiles(self):
        archs = supported_archs()
        assert {"sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a"} <= set(archs)
        assert "sm_90" not in archs
        assert [compiled(arch=arch).arch for arch in archs] == list(archs)

    def test_resources_of_several_kernels_come_from_the_log(self):
        text = """
        extern "C" __global__ void shares(int* p) {
            __shared__ int s[128];
            s[threadIdx.x] = p[threadIdx.x];
            __syncthreads();
            *p = s[127 - threadIdx.x];
        }
        extern "C" __global__ void stacks(int* p) {
            volatile int a[64];
            for (int i = 0; i < *p; i++) a[i & 63] = i;
            *p = a[*p & 63];
        }
        """
        cubin = compiled(text, entry_points=("shares", "stacks"))
        assert set(cubin.resources) == {"shares", "stacks"}
        assert cubin.resources["shares"].shared_bytes == 512
        assert cubin.resources["shares"].stack_bytes == 0
        assert cubin.resources["stacks"].stack_bytes >= 256
        assert all(used.registers > 0 and used.spill_bytes == 0 for used in cubin.resources.values())
        assert cubin.notes == ()

    def test_spills_are_counted(self):
        text = """
        extern "C" __global__ void __launch_bounds__(1024) k(float* p) {
            float a[100];
            #pragma unroll
            for (int i = 0; i < 100; i++) a[i] = p[i * 32 + threadIdx.x];
            for (int j = 0; j < p[0]; j++)
                #pragma unroll
                for (int i = 0; i < 100; i++) a[i] = a[i] * a[(i * 7 + 3) % 100] + p[j];
            #pragma unroll
            for (int i = 0; i < 100; i++) p[i] = a[i];
        }
        """
        assert compiled(text).resources["k"].spill_bytes > 0

    def test_ignored_setmaxnreg_shows_up_in_the_notes(self):
        text = 'extern "C" __global__ void k() { asm volatile("setmaxnreg.dec.sync.aligned.u32 24;"); }'
        assert [note[:7] for note in compiled(text).notes] == ["(C7508)"]

    def test_two_threads_compile_at_once(self):
        texts = [BODY.replace("= 1", f"= {value}") for value in range(2)]
        with ThreadPoolExecutor(2) as pool:
            cubins = list(pool.map(compiled, texts))
        assert len({cubin.data for cubin in cubins}) == 2


class TestOptions:
    def test_the_options_are_the_ones_picked_here_and_nothing_flushes_denormals(self):
        options = compile_inputs(source(), ARCH, find_toolchain()).options
        assert options[0] == "-arch=sm_90a"
        assert {"-std=c++17", "--ptxas-options=-v", "-default-device", "--no-source-include"} < set(options)
        assert not [option for option in options if "ftz" in option or "fast" in option]

    def test_the_sources_own_options_follow_and_may_choose_another_dialect(self):
        options = compile_inputs(
            source(options=("-std=c++20", "-G", "-default-device")), ARCH, find_toolchain()
        ).options
        assert "-std=c++17" not in options
        assert options[-2:] == ("-std=c++20", "-G")
        assert options.count("-default-device") == 1
        assert compiled("static_assert(__cplusplus >= 202002L);" + BODY, options=("-std=c++20",))

    def test_older_compilers_are_spared_an_option_that_they_do_not_know(self):
        assert "--no-cache" in compile_inputs(source(), ARCH, Toolchain("12.9.86", ())).options
        assert "--no-cache" not in compile_inputs(source(), ARCH, Toolchain("12.8.93", ())).options

    def test_macros_reach_the_source(self):
        text = "static_assert(A == 3 && B == 1 && C == 0);\n" + BODY
        assert compiled(text, macros={"A": 3, "B": True, "C": False})

    def test_line_information_names_the_file_without_the_callers_path_to_it(self):
        cubin = compiled(options=("-lineinfo",))
        assert b"k.cu" in cubin.data
        assert b"folder" not in cubin.data

    @pytest.mark.parametrize("name", ["-include", "a/--time=times.csv", 'two\nlines of "quo'])
    def test_a_name_is_never_read_as_an_option(self, name):
        assert Compiler().compile(KernelSource(name, BODY, ("k",)), ARCH)

    def test_the_stack_limit_of_the_process_stays_as_it_is_during_a_compile(self):
        text = "#include <cuda_fp16.h>\n" + BODY
        before = resource.getrlimit(resource.RLIMIT_STACK)
        lower = (1 << 23, before[1])
        resource.setrlimit(resource.RLIMIT_STACK, lower)
        try:
            with ThreadPoolExecutor(1) as pool:
                compiling = pool.submit(compiled, text)
                seen = {resource.getrlimit(resource.RLIMIT_STACK)}
                while not compiling.done():
                    seen.add(resource.getrlimit(resource.RLIMIT_STACK))
        finally:
            resource.setrlimit(resource.RLIMIT_STACK, before)
        assert compiling.result()
        assert seen == {lower}


class TestHeaders:
    @pytest.mark.parametrize(
        ("header", "use"),
        [
            ("cuda_fp16.h", "__half x = __float2half(p[0]); p[1] = __half2float(x);"),
            ("cuda_bf16.h", "__nv_bfloat16 x = __float2bfloat16(p[0]); p[1] = __bfloat162float(x);"),
            ("cuda_fp8.h", "__nv_fp8_e4m3 x(p[0]); p[1] = float(x);"),
        ],
    )
    def test_the_toolkits_number_formats_are_found_and_given_in_memory(self, header, use):
        text = f'#include <{header}>\nextern "C" __global__ void k(float* p) {{ {use} }}\n'
        assert compiled(text).resources["k"].registers > 0
        inputs = compile_inputs(source(text), ARCH, find_toolchain())
        assert header in inputs.headers
        assert header not in inputs.own_headers
        assert not [option for option in inputs.options if option.startswith(("-I", "--include-path"))]

    def test_own_headers_are_found_by_their_full_name_and_nested(self):
        headers = {"ptx/a.cuh": '#include "ptx/b.cuh"\n', "ptx/b.cuh": "constexpr int one() { return 1; }\n"}
        text = '#include "ptx/a.cuh"\n' + BODY.replace("= 1", "= one()")
        assert compiled(text, headers=headers)

    def test_a_missing_header_is_named_with_its_line(self):
        with pytest.raises(CompileError, match=r'header "no/such\.cuh" is missing') as caught:
            compiled('// a comment\n#include "no/such.cuh"\n' + BODY)
        assert caught.value.source_line == '#include "no/such.cuh"'
        assert "k.cu, line 2" in str(caught.value)

    def test_a_header_spelled_by_half_its_name_is_suggested_in_full(self):
        with pytest.raises(CompileError, match=r'did you mean "ptx/a\.cuh"'):
            compiled('#include "a.cuh"\n' + BODY, headers={"ptx/a.cuh": ""})

    def test_without_headers_of_nvrtcs_cuda_it_says_what_to_install(self, monkeypatch):
        """For example, NVRTC is of CUDA 13 and the toolkit of CUDA 12."""
        monkeypatch.setattr("gpu_actors.compiling.compiler.find_toolchain", lambda: Toolchain("13.4", ()))
        with pytest.raises(CompileError, match=r'"cuda_fp16\.h" is missing: no headers of CUDA 13 are') as caught:
            compiled("#include <cuda_fp16.h>\n" + BODY)
        assert cuda_hint() in str(caught.value)

    def test_a_missing_header_in_a_branch_not_taken_is_no_error(self):
        assert compiled('#ifndef __CUDACC_RTC__\n#include "host_only.h"\n#endif\n' + BODY)

    def test_nothing_is_read_from_the_working_directory(self, tmp_path, monkeypatch):
        (tmp_path / "leak.h").write_text("")
        monkeypatch.chdir(tmp_path)
        with pytest.raises(CompileError, match=r'"leak\.h" is missing'):
            compiled('#include "leak.h"\n' + BODY)


class TestRefusals:
    def test_an_error_gives_message_log_and_the_offending_line(self):
        with pytest.raises(CompileError, match=r'identifier "zz" is undefined \(k\.cu, line 2\)') as caught:
            compiled('extern "C" __global__ void k(int* p) {\n    *p = zz;\n}\n')
        assert caught.value.source_line == "    *p = zz;"
        assert "1 error detected" in caught.value.log

    def test_an_error_in_a_header_gives_the_headers_line(self):
        with pytest.raises(CompileError, match=r"\(h/e\.cuh, line 3\)") as caught:
            compiled('#include "h/e.cuh"\n' + BODY, headers={"h/e.cuh": "\n\nint f() { return undefined_name; }\n"})
        assert caught.value.source_line == "int f() { return undefined_name; }"

    def test_an_assembler_error_is_quoted(self):
        with pytest.raises(CompileError, match=r"does not compile for sm_90a: ptxas .* error .*bar") as caught:
            compiled('extern "C" __global__ void k() { asm volatile("foo.bar;"); }')
        assert caught.value.source_line is None
        assert "ptxas" in caught.value.log

    def test_an_entry_point_that_is_not_there_or_mangled_is_refused(self):
        with pytest.raises(CompileError, match=r"no entry point other.*holds k"):
            compiled(entry_points=("k", "other"))
        with pytest.raises(CompileError, match=r'extern "C"'):
            compiled("__global__ void k() {}")

    def test_an_unknown_option_is_refused_with_the_compilers_words(self):
        with pytest.raises(CompileError, match="unrecognized option --nope"):
            compiled(options=("--nope",))

    def test_architectures_are_refused_with_the_nearest_that_works(self):
        with pytest.raises(Unsupported) as caught:
            compiled(arch="sm_61")
        assert caught.value.nearest == "sm_75"
        with pytest.raises(InvalidRequest, match="is written for sm_80 alone"):
            Compiler().compile(source(arch="sm_80"), "sm_90a")


class TestToolchain:
    def test_a_new_process_knows_the_version_before_it_loads_the_compiler_and_imports_no_more(self):
        """It imports no library that only a lookup needs, either. Entries have the same names in every process, and an
        unpickled variant has the hash of one that is made in the new process."""
        pickled = pickle.dumps(Variant.of(source(macros={"A": 1}, headers={"a.h": "x"}, options=("-G",)), "sm_90a"))
        code = (
            "import pickle, sys; from support.cubins import ARCH, fake_toolchain, kernel\n"
            "import gpu_actors.compiling.cubin_cache, gpu_actors.compiling.assets\n"
            "from gpu_actors.compiling.compiler import Compiler; from gpu_actors.compiling.source import KernelSource\n"
            "from gpu_actors.compiling.cubin_entry import entry_name; from gpu_actors.errors import CompileError\n"
            "from gpu_actors.compiling.toolchain import find_toolchain, load_nvrtc\n"
            "print([m for m in sys.modules if m.startswith(('cupy', 'platformdirs'))])\n"
            "print(*entry_name(kernel(), ARCH, fake_toolchain()))\n"
            "s = pickle.loads(bytes.fromhex(sys.argv[1]))\n"
            "new = type(s)(s.kernel, s.arch, s.macros, s.headers, s.own)\n"
            "print(s == new, hash(s) == hash(new))\n"
            "found = find_toolchain(); early = [m for m in sys.modules if m.startswith('cupy')]\n"
            "sys.modules['cupy_backends'] = None\n"
            "try: Compiler().compile(KernelSource('k.cu', 'x', ('k',)), 'sm_80')\n"
            "except CompileError as error: print(error)\n"
            "del sys.modules['cupy_backends']\n"
            "print(early, found.release == tuple(load_nvrtc().getVersion()))\n"
        )
        imported, key, alike, refusal, version = run_child(code, pickled.hex()).splitlines()
        assert imported == "[]"
        assert key.split() == list(entry_name(kernel(), ARCH, fake_toolchain()))
        assert [len(part) for part in key.split()] == [64, 64]
        assert alike == "True True"
        assert cuda_hint() in refusal
        assert version == "[] True"

    def test_the_compiler_that_is_loaded_is_taken_in_place_of_the_installed_one(self, monkeypatch, caplog):
        monkeypatch.setattr(toolchain, "_loaded", None)
        monkeypatch.setattr(toolchain, "installed_toolchain", lambda: Toolchain("12.1.0", ()))
        assert find_toolchain().version == "12.1.0"
        with caplog.at_level("WARNING", "gpu_actors"):
            nvrtc = load_nvrtc.__wrapped__()
        adopted = find_toolchain()
        assert adopted.release == tuple(nvrtc.getVersion())
        assert (adopted.include_dirs[0] / "cuda_fp16.h").is_file()
        (record,) = caplog.records
        assert re.search(r"by NVRTC 13\.\d+: CuPy loads it, and not 12\.1\.0, which is installed", record.getMessage())
        assert compiled().data

    def test_a_compiler_that_does_not_load_is_told_with_what_to_install(self, monkeypatch):
        def absent():
            raise ImportError("libnvrtc.so.12: cannot open shared object file: No such file or directory")

        monkeypatch.setattr(toolchain, "_import_nvrtc", absent)
        with pytest.raises(CompileError, match=r"does not load \(libnvrtc\.so\.12: cannot open") as caught:
            load_nvrtc.__wrapped__()
        assert cuda_hint() in str(caught.value)

    def test_headers_of_another_major_version_are_not_used(self, tmp_path, monkeypatch):
        for name, version in (("cu13", 13040), ("cuda_runtime", 12040)):
            (tmp_path / name / "include").mkdir(parents=True)
            (tmp_path / name / "include" / "cuda_runtime_api.h").write_text(f"#define CUDART_VERSION  {version}\n")
        (tmp_path / "cuda_cccl" / "include").mkdir(parents=True)
        for variable in ("CUDA_PATH", "CUDA_HOME"):
            monkeypatch.delenv(variable, raising=False)

        class Spec:
            submodule_search_locations = [str(tmp_path)]

        monkeypatch.setattr(toolchain.importlib.util, "find_spec", lambda name: Spec)
        assert toolchain._include_dirs((13, 4))[0] == tmp_path / "cu13" / "include"
        libraries = (tmp_path / "cuda_runtime" / "include", tmp_path / "cuda_cccl" / "include")
        assert toolchain._include_dirs((12, 4)) == libraries
        monkeypatch.setenv("CUDA_PATH", str(tmp_path / "cuda_runtime"))
        assert toolchain._include_dirs((11, 8)) == ()
        toolkit = tmp_path / "toolkit" / "include"
        toolkit.mkdir(parents=True)
        (toolkit / "cuda_runtime_api.h").write_text("#define CUDART_VERSION  13020\n")
        monkeypatch.setenv("CUDA_PATH", str(toolkit.parent))
        assert toolchain._include_dirs((13, 2))[0] == toolkit
        assert toolchain._include_dirs((13, 3))[0] == tmp_path / "cu13" / "include"

    def test_an_absolute_include_never_reaches_the_compiler(self, tmp_path):
        (tmp_path / "leak.h").write_text("")
        with pytest.raises(CompileError, match=r"without '\.\.'"):
            compiled(f'#include "{tmp_path}/leak.h"\n' + BODY)
