"""What is read from machine code: steps of main loops, and the page that compares them with other libraries'."""

from __future__ import annotations

import collections
import dataclasses
import json
from pathlib import Path

import pytest
from inside.compiling import Compiler

from benchmarks import peer_sass
from benchmarks.counts import block_products, counts_of, loaded_bytes
from benchmarks.sass import Step, disassemble, find_disassembler, main_step, steps
from gpu_actors import KernelSource

ROOT = Path(__file__).resolve().parents[2]
ROLLED = """\
        /*0000*/                   MOV R1, c[0x0][0x28] ;
.L_x_1:
        /*0010*/                   LDSM.16.M88.4 R4, [R2] ;
.L_x_0:
        /*0020*/                   HMMA.16816.F32 R8, R4, R6, R8 ;
        /*0030*/                   HMMA.16816.F32 R8, R4, R6, R8 ;
        /*0038*/                   LDS.64 R6, [R3] ;
        /*0040*/              @!P0 BRA `(.L_x_0) ;
        /*0050*/                   MUFU.EX2 R9, R9 ;
        /*0060*/                   HMMA.16816.F32 R8, R4, R6, R8 ;
        /*0070*/               @P1 BRA `(.L_x_1) ;
        /*0080*/                   BRA `(.L_x_2) ;
.L_x_2:
        /*0090*/                   EXIT ;
"""
MMA = 16 * 8 * 16


def test_a_loop_inside_counts_with_as_many_rounds_as_its_products_take() -> None:
    (step,) = steps(ROLLED)
    assert (step.instructions, step.special, step.products) == (8, 1, 3 * MMA)
    assert step.shared == 512 + 256
    assert step.inner is not None
    assert (step.inner.instructions, step.inner.products) == (4, 2 * MMA)
    rolled = main_step(ROLLED, 9 * MMA)
    assert rolled is not None
    assert (rolled.instructions, rolled.products, rolled.special) == (8 + 3 * 4, 9 * MMA, 1)
    assert rolled.shared == step.shared + 3 * 256
    assert step.making(3 * MMA) == step
    assert main_step(ROLLED, 2 * MMA) is None
    assert steps("") == []


GROUPS = """\
.L_x_3:
        /*0010*/                   HGMMA.64x128x16.F32.BF16 R24, gdesc[UR4], RZ, !UPT ;
.L_x_7:
        /*0020*/                   HGMMA.64x64x16.F32.BF16 R88, R20, gdesc[UR8], R88, gsb0 ;
        /*0030*/                   WARPGROUP.DEPBAR.LE gsb0, 0x1 ;
        /*0040*/              @!P0 BRA `(.L_x_4) ;
%s.L_x_4:
        /*0140*/                   MUFU.EX2 R9, R24 ;
        /*0150*/                   FMNMX.FTZ R9, R24, R25, !PT ;
        /*0160*/               @P3 BRA `(.L_x_5) ;
        /*0170*/                   FADD R9, R9, R10 ;
.L_x_5:
        /*0180*/                   WARPGROUP.DEPBAR.LE gsb0, 0x0 ;
        /*0190*/                   MUFU.EX2 R9, R25 ;
        /*01a0*/                   STSM.16.M88.2 [R3], R4 ;
        /*01b0*/               @P2 BRA `(.L_x_3) ;
        /*01c0*/                   EXIT ;
.L_x_6:
        /*01d0*/                   SYNCS.PHASECHK.TRANS64 P1, [R0], R3 ;
        /*01e0*/                   BRA `(.L_x_7) ;
"""


def _masked(count: int) -> str:
    return GROUPS % "".join(
        f"        /*{0x50 + n:04x}*/                   FSEL R24, R24, -INF , P1 ;\n" for n in range(count)
    )


def test_a_mask_that_most_iterations_pass_by_is_counted_apart() -> None:
    (step,) = steps(_masked(12))
    assert (step.instructions, step.masks) == (12, 12)
    (short,) = steps(_masked(8))  # so few instructions are a wait
    assert (short.instructions, short.masks) == (20, 0)


def test_what_a_warpgroup_does_is_shared_by_its_four_warps() -> None:
    (step,) = steps(_masked(12))
    assert step.products == (64 * 128 * 16 + 64 * 64 * 16) / 4
    # B's columns, and A's rows if both operands are in shared memory. Then two matrices of 128 bytes.
    assert step.shared == 32 * (128 + 64 + 64) / 4 + 256
    assert (step.special, step.overlapped, step.half_rate) == (2, 1, 1)
    assert step.opcodes["HGMMA"] == 2


def test_a_wait_behind_the_end_that_jumps_back_makes_no_loop() -> None:
    text = _masked(12)
    assert len(steps(text)) == 1
    assert (
        len(steps(text.replace("                   EXIT ;", "                   NOP ;"))) == 2
    )  # without EXIT it does


def test_the_shortest_of_the_loops_with_the_tiles_products_is_the_main_one() -> None:
    def loop(label: str, products: int, more: int) -> str:
        lines = ["HMMA.16816.F32 R8, R4, R6, R8"] * products + ["MUFU.EX2 R9, R9"] + ["FADD R9, R9, R9"] * more
        code = "".join(f"        /*0010*/                   {line} ;\n" for line in lines)
        return f".L_{label}:\n{code}        /*0020*/              @!P0 BRA `(.L_{label}) ;\n"

    text = loop("masked", 4, 30) + loop("main", 4, 10) + loop("first", 2, 0) + loop("both", 8, 0)
    found = main_step(text, 4 * MMA)
    assert found is not None
    assert (found.products, found.instructions) == (4 * MMA, 4 + 1 + 10 + 1)


def test_the_products_and_bytes_of_a_tile_follow_from_its_shape() -> None:
    assert block_products("forward", (128, 176), (128, 128)) == 128 * 176 * 256
    assert block_products("backward", (64, 128), (192, 128)) == 64 * 128 * (3 * 192 + 2 * 128)
    assert loaded_bytes("forward", (128, 176), (192, 128), 2, bulk=True) == 176 * 320 * 2
    assert loaded_bytes("forward", (128, 256), (192, 128), 1, bulk=True) == 256 * (320 + 2 * 128)
    assert loaded_bytes("backward", (64, 128), (128, 128), 2, bulk=False) == 64 * (512 + 8)
    assert loaded_bytes("backward", (64, 128), (128, 128), 2, bulk=True) == 64 * (512 + 8 + 512)


def test_counts_of_a_block_are_those_of_its_warps() -> None:
    (step,) = steps(_masked(12))
    found = counts_of("kernel", (128, 64), 8, 100, step, 168)
    assert found.products == 8 * step.products
    assert found.a_thousand == pytest.approx(1000 * 12 * 8 / (128 * 64))
    assert found.opcodes == {"HGMMA": 2, "STSM": 1}


@pytest.mark.skipif(find_disassembler() is None, reason="nvdisasm is not installed")
def test_the_main_loop_is_found_in_a_real_cubin() -> None:
    registers = ",".join(f'"+f"(x[{n}])' for n in range(4)), ",".join(['"r"(n)'] * 6)
    product = "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
    code = (
        "__global__ void __launch_bounds__(32) f(float* x, int n) {\n  for (int i = 0; i < n; i++) {\n"
        f'    asm volatile("{product}" : {registers[0]} : {registers[1]});\n'
        '    asm volatile("ex2.approx.ftz.f32 %0, %0;" : "+f"(x[4]));\n  }\n}\n'
    )
    source = KernelSource("loop.cu", 'extern "C" ' + code, ("f",), options=("--maxrregcount=64",))
    cubin = Compiler().compile(source, "sm_90a").data
    found = steps(disassemble(cubin))
    assert found
    assert all(step.products == step.special * MMA for step in found)
    index = peer_sass.symbols(cubin)["f"]
    assert disassemble(cubin, "-fun", str(index)).count("HMMA") == disassemble(cubin).count("HMMA")


def test_the_page_is_the_one_of_the_counts() -> None:
    data = json.loads(peer_sass.DATA.read_text(encoding="utf-8"))
    assert peer_sass.PAGE.read_text(encoding="utf-8") == peer_sass.page(data)
    named = {(kernel.case, kernel.library) for kernel in peer_sass.KERNELS}
    cases = {one["case"] for one in data["rows"]}
    assert named | {(case, "ours") for case in cases} == {(one["case"], one["library"]) for one in data["rows"]}
    assert set(data["wheels"]) == {library.name for library in peer_sass.LIBRARIES}


def test_shares_are_of_the_tensor_cores_clocks() -> None:
    step = Step(opcodes=collections.Counter(MUFU=64, FADD=936), products=262144, shared=16384, half_rate=0)
    counts = counts_of("k", (128, 128), 8, 131072, step, 168)
    row = peer_sass.row("forward sm_90a bfloat16 d128 full", "FA3", counts)
    assert row | dataclasses.asdict(counts) == row
    assert peer_sass.shares(row) == {"tensor": 1024, "exponent": 1, "issue": 2000 / 1024, "shared": 2}
    assert peer_sass.shares(row | {"case": "forward sm_80 x"})["tensor"] == 2048
    assert peer_sass.shares(row | {"case": "forward sm_90a float8_e4m3fn"})["tensor"] == 512


@pytest.mark.sweep
@pytest.mark.skipif(find_disassembler() is None, reason="nvdisasm is not installed")
def test_our_counts_are_those_of_todays_kernels() -> None:
    data = json.loads(peer_sass.DATA.read_text(encoding="utf-8"))
    if data["nvrtc"] != peer_sass.version_of("nvidia-cuda-nvrtc"):
        pytest.skip("counted with another NVRTC")
    kept = [one for one in data["rows"] if one["library"] == "ours"]
    assert sorted(peer_sass.our_rows(), key=lambda one: one["case"]) == sorted(kept, key=lambda one: one["case"])
