"""The emulated device knows every asm statement of the wrappers, and each does what it tells the compiler."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from asm_statements import Judge, expanded, judge_in, wrapper_statements
from support.service import KERNELS_CU
from test_conformance_complete import wrappers

from gpu_actors.devices.emulation.assembly import AsmStatement, UnknownAsm, replace_asm, statements


@pytest.fixture(scope="module")
def judge(module_cache: Path) -> Judge:
    return judge_in(module_cache)


def statement(text: str) -> AsmStatement:
    (only,) = statements(f"void f() {{ {text}; }}")
    return only


# ---- the wrappers


def test_every_statement_of_a_wrapper_is_known_and_keeps_its_word(judge: Judge) -> None:
    found = wrapper_statements()
    assert len(found) > 300  # wgmma's sizes among them
    refused = {(s.file, s.line): (judge(s), s.template) for s in found if judge(s) is not None}
    assert refused == {}


def bodies(text: list[str], name: str) -> list[range]:
    """The lines of each function of this name that holds an asm statement or one of the headers' macros for them."""
    found = []
    for start, line in enumerate(text, 1):
        if f" {name}(" in line and line.startswith(("WRAPPER", "inline")):
            end = next(i for i, last in enumerate(text[start - 1 :], start) if last[:1] == "}" or last[-1:] == "}")
            if any(word in "".join(text[start - 1 : end]) for word in ("asm", "PTX_", "_sized")):
                found.append(range(start, end + 1))
    return found


def test_no_wrapper_is_missing_among_the_captured_statements() -> None:
    lines: dict[str, set[int]] = {}
    for s in wrapper_statements():
        lines.setdefault(s.file, set()).add(s.line)
    for name, file in wrappers().items():
        found = bodies((KERNELS_CU / "ptx" / file).read_text().splitlines(), name)
        assert found, name
        for body in found:
            assert lines[f"ptx/{file}"] & set(body), (name, body)


# ---- what a compiler is told

BROKEN = [
    ('asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "r"(x))', "operand takes .f32"),
    ('asm("ex2.approx.ftz.f32 %0, %0;" : "=f"(y))', "%0 is read before it is written"),
    ('asm("ex2.approx.ftz.f32 %0, %1;" : "+f"(y) : "f"(x))', "%0 is never read"),
    ('asm("ex2.approx.ftz.f32 %1, %0;" : "=f"(y) : "f"(x))', "%0 is an output"),
    ('asm("lg2.approx.f32 %0, %1;" : "=f"(y) : "f"(x), "f"(z))', "%2 is an input that no instruction reads"),
    ('asm("rcp.approx.f32 %0, %1; rcp.approx.f32 %0, %2;" : "=f"(y) : "f"(x), "f"(z))', "has no '&'"),
    ('asm("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(a) : "memory")', "not volatile"),
    ('asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(a))', 'does not clobber "memory"'),
    ('asm volatile("st.shared.u32 [%0], %1;" :: "r"(a), "h"(v) : "memory")', "value takes .u32"),
    ('asm volatile("" : "+f"(v))', "empty template"),
    ('asm("mov.b32 %0, {%1, %2};" : "=r"(v) : "h"(a), "r"(b))', "halves takes .b16"),
]


@pytest.mark.parametrize(("text", "reason"), BROKEN)
def test_a_statement_that_does_other_than_it_says_is_refused(judge: Judge, text: str, reason: str) -> None:
    assert reason in (judge(statement(text)) or "accepted")


KEPT = [
    'asm("rcp.approx.f32 %0, %1; rcp.approx.f32 %0, %2;" : "=&f"(y) : "f"(x), "f"(z))',
    'asm volatile("" : "+f"(v), "+r"(w) :: "memory")',
    'asm("{.reg .b16 t; cvt.rn.f16.f32 t, %1; cvt.f32.f16 %0, t;}" : "=f"(y) : "f"(x))',
    'asm volatile("{.reg .pred p; setp.eq.u32 p, %0, 3; @!p st.shared.u32 [%1], %0;}" :: "r"(v), "r"(a) : "memory")',
]


@pytest.mark.parametrize("text", KEPT)
def test_a_statement_that_keeps_its_word_is_taken(judge: Judge, text: str) -> None:
    assert judge(statement(text)) is None


# ---- templates

UNKNOWN = [
    ("ex3.approx.f32 %0, %1;", "the instruction 'ex3.approx.f32' is not known"),
    ("ex2.approx.fzt.f32 %0, %1;", "'.fzt.f32' is not known where .f32 stands"),
    ("ex2.f32 %0, %1;", "'.f32' is not known where .approx stands"),
    ("ex2.approx.f32.rn %0, %1;", "'.rn' is not known here"),
    ("ex2.approx.f32 %0, %1, %1;", "1 operands more"),
    ("ex2.approx.f32 %0;", "the operand is missing"),
    ("ex2.approx.f32 %0, %2;", "%2 is named, and the statement has 2 operands"),
    ("ex2.approx.f32 %0, x;", "the operand is no plain register"),
    ("ex2.approx.f32 %0, [%1];", "the operand is no plain register"),
    ("ex2.approx.f32 %0, %1", "';' is expected"),
    ("{ex2.approx.f32 %0, %1;", "'{' is not closed"),
    ("ex2.approx.f32 %0, %1;}", "'}' closes nothing"),
    ("ex2.approx.f32 %0, %%tid.x;", "is no operand"),
    ("bra NOWHERE;", "there is no label 'NOWHERE'"),
    (".reg .f33 t; ex2.approx.f32 %0, %1;", "is no type that is known"),
    (".reg .f32 t; ex2.approx.f32 %0, t;", "register 't' is read before it is written"),
    ("mma.sync.aligned.m16n8k16.col.row.f32.f16.f16.f32 {%0, %0, %0, %0}, {%1};", "'.col.row"),
]


@pytest.mark.parametrize(("template", "reason"), UNKNOWN)
def test_what_a_template_holds_beyond_what_is_known_is_named(judge: Judge, template: str, reason: str) -> None:
    given = dataclasses.replace(statement('asm("" : "=f"(y) : "f"(x))'), literal=f'"{template}"')
    assert reason in (judge(given) or "accepted")


# ---- the capture

WHOLE = """
# 7 "ptx/pair.cuh"
inline void pair(float& a, S* s) {
  const char* asm_text = "asm(no)";
  asm volatile("first %0, "
               "second\\n%1;" : "+f"(a) : "l"(s->at<(1 > 0)>::of(a ? b : c)),
               "n"(sizeof(x) + 1) : "memory");
  if (a) asm("third;");
  else __asm__("host" : "+m"(a));
}
"""


def test_a_statement_is_captured_whole_with_its_place() -> None:
    first, second = statements(WHOLE)
    assert (first.file, first.line, first.volatile) == ("ptx/pair.cuh", 9, True)
    assert first.template == "first %0, second\n%1;"
    assert [(o.constraint, o.expression) for o in first.outputs] == [("+f", "a")]
    wanted = [("l", "s->at<(1 > 0)>::of(a ? b : c)"), ("n", "sizeof(x) + 1")]
    assert [(o.constraint, o.expression) for o in first.inputs] == wanted
    assert first.clobbers == ("memory",)
    assert (second.template, second.volatile, second.line) == ("third;", False, 12)
    assert (second.outputs, second.inputs, second.clobbers) == ((), (), ())


def test_what_is_no_statement_stays_and_lines_keep_their_numbers() -> None:
    text = replace_asm(WHOLE)
    assert text.count("\n") == WHOLE.count("\n")
    assert '"asm(no)"' in text
    assert '__asm__("host" : "+m"(a));' in text.splitlines()[8]
    assert text.count("emulation::execute(") == 2


@pytest.mark.parametrize(
    "text",
    [
        'asm goto("bra %l0;" :::: there);',
        'asm("x %[name];" : [name] "=r"(a));',
        'asm("x;" : "=q"(a));',
        'asm("x;" :: "m"(a));',
        'asm("x;" :: "0"(a));',
        "asm(text);",
        'asm("x;" : "=r"(a)',
    ],
)
def test_a_statement_of_an_unknown_form_is_refused_with_its_place(text: str) -> None:
    with pytest.raises(UnknownAsm, match=r"^k\.cu:3: an asm statement that the emulated device does not know"):
        replace_asm(f'# 3 "k.cu"\n{text}\n')


def test_macros_are_expanded_before_the_capture() -> None:
    text = '#define MOVE(T) asm("ex2.approx." T ".f32 %0, %1;" : "=f"(y) : "f"(x))\nvoid f() { MOVE("ftz"); }\n'
    (only,) = statements(expanded(text))
    assert only.template == "ex2.approx.ftz.f32 %0, %1;"
