"""The emulated device builds and loads only what was asked for, wherever other users can write."""

from __future__ import annotations

import dataclasses
import logging
import shutil
import sys
import tempfile
from pathlib import Path

import pytest
from inside.compiling import cubin_folder as cache_folder
from support.service import run_python

import gpu_actors.devices.emulation.module_cache as module_cache_module
from gpu_actors.devices.emulation import Toolchain, build_module
from gpu_actors.errors import CompileError, InvalidRequest

KERNEL = '#include "ptx/types.cuh"\nextern "C" __global__ void one(int* out) { *out = 1; }\n'


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache with `KERNEL` in it."""
    folder = tmp_path_factory.mktemp("hostile") / "cache"
    build_module(KERNEL, cache_dir=folder)
    return folder


@pytest.fixture
def cache(built: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(built, tmp_path / "cache"))


def test_a_folder_that_others_can_write_to_is_refused(cache: Path) -> None:
    """As for cubins: tests/compiling/test_cache_disks.py has the other cases of a folder that is not the user's own."""
    cache.chmod(0o777)
    with pytest.raises(InvalidRequest, match="others can write to it") as caught:
        build_module(KERNEL, cache_dir=cache)
    assert caught.value.field == "cache_dir"


@pytest.mark.parametrize("plant", ["link", "others can write"])
def test_a_module_that_another_user_could_have_made_is_built_anew(
    cache: Path, tmp_path: Path, plant: str, caplog: pytest.LogCaptureFixture
) -> None:
    (library,) = cache.glob("*.so")
    planted = library
    if plant == "link":
        planted = Path(shutil.move(library, tmp_path / "planted.so"))
        library.symlink_to(planted)
    else:
        library.chmod(0o666)
    before = planted.stat().st_ino
    with caplog.at_level(logging.WARNING):
        module = build_module(KERNEL, cache_dir=cache)
    assert "built anew" in caplog.text
    assert module.path == library
    assert not library.is_symlink()
    assert library.stat().st_ino != before
    assert library.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("name", ['x.cu"\n#error injected\n#line 1 "y.cu', "back\\slash"])
def test_the_name_of_a_source_is_no_part_of_what_is_compiled(cache: Path, name: str) -> None:
    known = build_module(KERNEL, cache_dir=cache)
    named = build_module(KERNEL + "// another variant\n", cache_dir=cache, name=name)
    assert named.path != known.path
    assert build_module(KERNEL, cache_dir=cache, name=name).path == known.path


def test_an_include_of_an_absolute_path_touches_no_file(cache: Path, tmp_path: Path) -> None:
    mine = tmp_path / "mine.h"
    mine.write_text("int mine;\r\n", newline="")
    stamp = (mine.stat().st_ino, mine.stat().st_mtime_ns)
    with pytest.raises(CompileError, match="headers="):
        build_module(f'#include "{mine}"\n' + KERNEL, cache_dir=cache)
    assert (mine.stat().st_ino, mine.stat().st_mtime_ns) == stamp


@pytest.mark.parametrize("name", ["../../outside.h", "sub/../../../outside.h"])
def test_no_header_is_written_outside_of_the_build(
    cache: Path, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(CompileError, match="by a relative name"):
        build_module(f'#include "{name}"\n' + KERNEL, None, {name: "int x;"}, cache_dir=cache)
    assert list(tmp_path.rglob("outside.h")) == []


def test_headers_of_the_environment_are_not_read(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "planted.h").write_text("")
    for variable in ("CPATH", "CPLUS_INCLUDE_PATH"):
        monkeypatch.setenv(variable, str(tmp_path))
        with pytest.raises(CompileError, match=r"planted\.h"):
            build_module('#include "planted.h"\n' + KERNEL, cache_dir=cache)


def test_a_disk_that_fills_up_costs_the_cache_and_not_the_kernel(
    cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real = cache_folder.CacheFolder.publish

    def publish(folder: cache_folder.CacheFolder, name: str, data: bytes) -> None:
        if folder.path == cache:
            raise OSError(28, "No space left on device")
        real(folder, name, data)

    monkeypatch.setattr(module_cache_module.CacheFolder, "publish", publish)
    with caplog.at_level(logging.WARNING):
        module = build_module(KERNEL + "// not known yet\n", cache_dir=cache)
    assert "for this process only" in caplog.text
    assert module.path.parent != cache


def test_nothing_of_the_working_directory_is_run_to_find_a_compiler(tmp_path: Path) -> None:
    (tmp_path / "ziglang.py").write_text("open('planted', 'w')\n")
    (tmp_path / "zig").write_text("#!/bin/sh\ntouch planted\n")
    (tmp_path / "zig").chmod(0o755)
    script = (
        "import os, sys; os.chdir(sys.argv[1]); "
        "from gpu_actors.devices.emulation import Toolchain; print(Toolchain.find('zig').version)"
    )
    assert Toolchain.find("zig").version in run_python(script, str(tmp_path)).stdout
    assert not (tmp_path / "planted").exists()


def test_a_compiler_that_a_signal_ends_is_named_with_the_signal(tmp_path: Path) -> None:
    (compiler := tmp_path / "g++").write_text("#!/bin/sh\nkill -KILL $$\n")
    compiler.chmod(0o700)
    toolchain = dataclasses.replace(Toolchain.find(), command=(str(compiler),))
    with pytest.raises(CompileError, match=r"g\+\+ was ended by signal 9 \(Killed\)"):
        build_module(KERNEL, cache_dir=tmp_path / "cache", toolchain=toolchain)


def test_what_is_no_string_in_the_path_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = Toolchain.find("zig")
    monkeypatch.setattr("sys.path", [None, 3, Path("/"), *sys.path])
    assert Toolchain.find("zig") == expected
