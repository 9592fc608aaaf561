"""The model and the counts of machine code that it is made from."""

from __future__ import annotations

import json

import pytest

from gpu_actors.bench import model
from gpu_actors.bench.cases import Case
from gpu_actors.bench.sass import find_disassembler, loops, main_loop
from gpu_actors.compiling.compiler import Compiler
from gpu_actors.compiling.source import KernelSource
from gpu_actors.errors import Unsupported

CASE = Case(batch=2, rows=8192, keys=8192, heads=16, kv_heads=16, head_dim=128)
H200 = model.MACHINES["sm_90a"]

LOOPS = """\
        /*0000*/                   MOV R1, c[0x0][0x28] ;
.L_x_1:
        /*0010*/                   LDSM.16.M88.4 R4, [R2] ;
.L_x_0:
        /*0020*/                   HMMA.16816.F32 R8, R4, R6, R8 ;
        /*0030*/                   HMMA.16816.F32 R8, R4, R6, R8 ;
        /*0040*/              @!P0 BRA `(.L_x_0) ;
        /*0050*/                   MUFU.EX2 R9, R9 ;
        /*0060*/                   HMMA.16816.F32 R8, R4, R6, R8 ;
        /*0070*/               @P1 BRA `(.L_x_1) ;
        /*0080*/                   BRA `(.L_x_2) ;
.L_x_2:
        /*0090*/                   EXIT ;
"""


def test_loops_are_counted_from_their_label_to_the_branch_back() -> None:
    inner, outer = loops(LOOPS)
    assert inner[:3] == (3, 2, 0)
    assert outer[:3] == (7, 3, 1)
    assert outer.inner == inner
    assert outer.executed(3) == 7
    assert outer.executed(9) == 7 + 3 * 3
    assert loops("") == []


MASKED = """\
.L_x_3:
        /*0010*/                   HGMMA.64x128x16.F32.BF16 R24, gdesc[UR4], R24, gsb0 ;
        /*0020*/              @!P0 BRA `(.L_x_4) ;
        /*0030*/                   FSEL R24, R24, -INF , P1 ;
        /*0040*/                   FSEL R25, R25, -INF , P2 ;
.L_x_4:
        /*0050*/                   MUFU.EX2 R9, R24 ;
        /*0060*/               @P3 BRA `(.L_x_5) ;
        /*0070*/                   MUFU.EX2 R9, R25 ;
        /*0080*/                   FADD R9, R9, R10 ;
        /*0090*/                   FADD R9, R9, R10 ;
.L_x_5:
        /*00a0*/               @P2 BRA `(.L_x_3) ;
"""


def test_a_mask_that_most_iterations_pass_by_is_not_counted_in_them() -> None:
    (loop,) = loops(MASKED)
    assert (loop.instructions, loop.skipped, loop.unmasked) == (10, 2, 8)
    assert loop.executed(1) == 8


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
    loop = main_loop(Compiler().compile(source, "sm_90a").data)
    assert loop is not None
    assert loop.tensor == loop.special
    assert loop.instructions > 2 * loop.tensor


def test_a_case_takes_as_long_as_its_longest_part() -> None:
    found = model.estimate(CASE, H200)
    clocks = 132 * 1.83e9
    assert found["parts_ms"]["products"] == pytest.approx(CASE.flops / 4096 / clocks * 1e3)
    assert found["parts_ms"]["exponent"] == pytest.approx(2 * 8192**2 * 16 / 16 / clocks * 1e3)
    assert found["parts_ms"]["memory"] == pytest.approx(CASE.bytes / 4.8e12 * 1e3)
    assert found["parts_ms"]["issue"] is None
    assert (found["bound"], found["model_ms"]) == ("products", found["parts_ms"]["products"])
    plain = model.estimate(CASE, H200, "forward_simple")
    assert plain["model_ms"] == pytest.approx(16 * found["model_ms"])
    slow = model.estimate(CASE, H200, "kernel", 4096 / 128)
    assert slow["bound"] == "issue"
    assert slow["parts_ms"]["issue"] == pytest.approx(2 * 8192**2 * 16 * 32 / 4 / clocks * 1e3)
    decode = Case(kind="decode", batch=8, rows=1, keys=8192, heads=64, kv_heads=8, head_dim=128)
    assert model.estimate(decode, H200)["bound"] == "memory"


def test_a_suite_is_estimated_without_a_gpu_and_says_that_nothing_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = Case(batch=1, rows=64, keys=64, heads=1, kv_heads=1, head_dim=64)
    impossible = Case(batch=1, rows=64, keys=64, heads=1, kv_heads=1, head_dim=600)
    monkeypatch.setitem(model._CASES, "forward", lambda quick: [tiny, impossible])
    found = model.estimate_suite("forward", "sm_80")
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert found["kind"] == "model"
    assert "nothing was measured" in found["note"]
    assert found["rows"][0]["kernel"] == "forward_mma"
    assert (found["rows"][0]["instructions_a_pair"] is None) == (find_disassembler() is None)
    assert found["rows"][1]["kernel"] is None
    assert "head_dim" in found["rows"][1]["reason"]
    assert not {"times_ms", "tflops", "gbs", "ceilings"} & {name for row in found["rows"] for name in row}
    assert {len(row) for row in model.table(found)} == {len(model.COLUMNS)}


def test_a_machine_without_a_data_sheet_is_refused() -> None:
    with pytest.raises(Unsupported, match="sm_90a"):
        model.estimate_suite("forward", "sm_75")
