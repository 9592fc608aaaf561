"""What a variant's key covers, and what it must not cover."""

from __future__ import annotations

import dataclasses

import pytest
from support.cubins import ARCH, fake_toolchain, kernel

from gpu_actors.compiling.cubin_entry import entry_name
from gpu_actors.compiling.toolchain import Toolchain


def build(source, arch=ARCH, toolchain=None):
    return entry_name(source, arch, toolchain or fake_toolchain()).build


INCLUDING = '#include "a.cuh"\n#include <toolkit.h>\n'


class TestKeys:
    @pytest.fixture
    def toolkit(self, tmp_path):
        folder = tmp_path / "toolkit"
        folder.mkdir()
        (folder / "toolkit.h").write_text('#include "nested.h"\n')
        (folder / "nested.h").write_text("1")
        return Toolchain("13.4.92", (folder,))

    @pytest.mark.parametrize(
        "changed",
        [
            kernel(2),
            kernel(source="// x\n"),
            kernel(entry_points=("fill", "other")),
            kernel(options=("-G",)),
            kernel(macros={"VALUE": 1, "OTHER": ""}),
            kernel(macros={"VALU": "E1"}),
        ],
        ids=["macro", "source", "entries", "options", "more macros", "shifted macro"],
    )
    def test_every_stated_part_is_in_the_key(self, changed):
        assert build(changed) != build(kernel())

    def test_architecture_compiler_version_and_option_order_are_in_the_key(self):
        base = build(kernel())
        assert build(kernel(), "sm_80") != base
        assert build(kernel(), toolchain=Toolchain("13.4.93", ())) != base
        assert build(kernel(), toolchain=Toolchain("13.5.92", ())) != base
        assert build(kernel(options=("-G", "-w"))) != build(kernel(options=("-w", "-G")))

    def test_parts_cannot_run_into_each_other(self):
        one = kernel(headers={"a.h": "bc"}, source='#include "a.h"\n')
        two = kernel(headers={"a.h": "b"}, source='#include "a.h"\nc')
        assert build(one) != build(two)
        assert build(kernel(macros={"A": "B"})) != build(kernel(macros={"AB": ""}))
        assert build(kernel(entry_points=("ab", "c"))) != build(kernel(entry_points=("a", "bc")))

    def test_direct_and_nested_headers_are_in_the_key_by_their_contents(self):
        def key(a, b):
            return build(kernel(source=INCLUDING, headers={"a.cuh": f'#include "b.cuh"\n{a}', "b.cuh": b}))

        assert key("1", "1") == key("1", "1")
        assert len({key("1", "1"), key("2", "1"), key("1", "2")}) == 3

    def test_headers_that_are_not_included_are_not(self):
        headers = {"a.cuh": "", "unused.cuh": "1"}
        changed = {**headers, "unused.cuh": "2"}
        assert build(kernel(source=INCLUDING, headers=headers)) == build(kernel(source=INCLUDING, headers=changed))

    @pytest.mark.parametrize("name", ["toolkit.h", "nested.h"])
    def test_the_toolkits_headers_are_in_the_key_by_their_contents(self, tmp_path, toolkit, name):
        changed = tmp_path / "changed"
        changed.mkdir()
        for header in toolkit.include_dirs[0].iterdir():
            suffix = "// changed" if header.name == name else ""
            (changed / header.name).write_text(header.read_text() + suffix)
        source = kernel(source=INCLUDING, headers={"a.cuh": ""})
        other = toolkit._replace(include_dirs=(changed,))
        assert build(source, toolchain=other) != build(source, toolchain=toolkit)

    def test_no_path_is_in_the_key(self, tmp_path, toolkit):
        moved = tmp_path / "elsewhere" / "include"
        moved.mkdir(parents=True)
        for header in toolkit.include_dirs[0].iterdir():
            (moved / header.name).write_text(header.read_text())
        source = kernel(source=INCLUDING, headers={"a.cuh": ""})
        named = dataclasses.replace(source, name="/home/somebody/fill.cu")
        assert build(named, toolchain=toolkit._replace(include_dirs=(moved,))) == build(source, toolchain=toolkit)

    def test_the_variant_without_its_build_ignores_the_compiler_alone(self, toolkit):
        source = kernel(source=INCLUDING, headers={"a.cuh": ""})
        with_compiler = entry_name(source, ARCH, toolkit)
        without = entry_name(source, ARCH, None)
        assert without == (with_compiler.variant, None)
        assert entry_name(kernel(source=INCLUDING, headers={"a.cuh": "x"}), ARCH, None) != without
        assert entry_name(source, "sm_80", None) != without
