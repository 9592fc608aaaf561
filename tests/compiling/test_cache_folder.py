"""A cache folder beside other programs' files, its locks, and its place when the usual one is not available."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from inside.emulation import ModuleCache, module_cache
from support.cubins import CountingCompiler, fake_toolchain, variant

from gpu_actors import InvalidRequest, open_context
from gpu_actors.compiling import cubin_folder, toolchain
from gpu_actors.compiling.cubin_cache import CubinCache, default_cache_dir
from gpu_actors.compiling.cubin_folder import CacheFolder

A, B, C = "a" * 64, "b" * 64, "c" * 64

# What users keep in folders of their own: locks, temporary files and content-addressed stores.
USERS_FILES = (
    *("poetry.lock", "uv.lock", "thesis.tmp", "kernel_v1.cubin", "libmine.so", "main.o", "disk.img.corrupt"),
    *(f"{A}.{suffix}" for suffix in ("lock", "cubin", "so", "o", "tmp", "corrupt")),
    *(f"{A}-{B}.cubin.bak", f"{A}-{B}.cubin.1.tmp", f"x{A}-{B}.cubin", f"{A}-{B}.cubin\n", f"{A}-{B}.CUBIN"),
    *(f"{A[:40]}-{B[:40]}.cubin", f"{A}-{B}.cubin".upper(), f"gpu-actors-{A}.lock.old", f"gpu-actors-{A}.tmp"),
    *(f"disk{number}.img.corrupt" for number in range(10)),
)


def fill(folder: Path) -> None:
    folder.mkdir(exist_ok=True, mode=0o700)
    for name in USERS_FILES:
        (folder / name).write_text("precious")
        os.utime(folder / name, (1, 1))


@pytest.mark.parametrize("suffix", [".cubin", ".so", ".o"])
def test_files_of_other_programs_are_neither_counted_nor_removed(tmp_path: Path, suffix: str) -> None:
    fill(tmp_path)
    folder = CacheFolder(tmp_path, writable=True, suffix=suffix)
    for stem in (f"gpu-actors-{C}", f"{A}-{C}"):
        folder.publish(stem + suffix, b"entry")
    assert len(folder.names("")) == 2
    assert folder.usage() == (2, 10)
    assert folder.prune(max_bytes=0) == 2
    with folder.locked(C, 0.0):
        pass
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == dict.fromkeys(USERS_FILES, "precious")


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_costs_the_cache_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, number: int
) -> None:
    def flock(handle: int, how: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(cubin_folder.fcntl, "flock", flock)
    shared = CubinCache(tmp_path, toolchain=fake_toolchain)
    cubin = shared.get_or_compile(variant(), CountingCompiler())
    assert shared.peek(variant()) is cubin
    assert "fill.cu stays in memory" in caplog.text
    built = ModuleCache(tmp_path / "emulated").build(C, lambda kept: (b"object", 0.0))
    assert built.content() == b"object"


def test_a_lock_has_one_holder_at_a_time(tmp_path: Path) -> None:
    folder = CacheFolder(tmp_path, writable=True)
    holders: list[int] = []
    seen: set[int] = set()

    def hold(number: int) -> None:
        with folder.locked(A, 30.0):
            holders.append(number)
            time.sleep(0.001)  # so that a second holder would get in
            seen.add(len(holders))
            holders.pop()

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(hold, range(40)))
    assert seen == {1}
    assert list(tmp_path.iterdir()) == []


def test_a_lock_that_is_held_for_longer_than_the_timeout(tmp_path: Path) -> None:
    folder = CacheFolder(tmp_path, writable=True)
    with folder.locked(A, 0.0), pytest.raises(TimeoutError), folder.locked(A, 0.05):
        pass
    with folder.locked(A, 0.0), folder.locked(B, 0.0):
        pass


def test_a_forked_child_neither_frees_nor_keeps_the_lock_of_its_parent(tmp_path: Path) -> None:
    folder = CacheFolder(tmp_path, writable=True)
    lock = folder.locked(A, 0.0)
    lock.__enter__()
    child = os.fork()
    if child == 0:
        lock.__exit__(None, None, None)
        signal.pause()
    try:
        with pytest.raises(TimeoutError), folder.locked(A, 0.2):
            pass
        lock.__exit__(None, None, None)
        with folder.locked(A, 0.0):
            pass
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


@pytest.fixture
def homeless(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The folder for temporary files of a user without a home and without an entry in passwd."""
    for name in ("HOME", "XDG_CACHE_HOME", "GPU_ACTORS_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)

    def unknown(uid: int) -> None:
        raise KeyError(f"getpwuid(): uid not found: {uid}")

    monkeypatch.setattr("pwd.getpwuid", unknown)
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    return tmp_path / f"gpu-actors-{os.geteuid()}"


def test_caches_of_a_user_without_a_home_are_temporary(homeless: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert default_cache_dir() == homeless / "cubins"
    with open_context("mock") as ctx:
        assert ctx.nvrtc.cache_stats().entries == 0
    ModuleCache().build(C, lambda kept: (b"object", 0.0))
    assert [path.suffix for path in (homeless / "emulated").iterdir()] == [".so"]
    monkeypatch.setenv("GPU_ACTORS_CACHE_DIR", "~/cubins")
    with pytest.raises(InvalidRequest, match=r"GPU_ACTORS_CACHE_DIR='~/cubins': must name a folder: .*home"):
        default_cache_dir()


def test_nvrtc_loads_where_cupy_cannot_make_its_own_cache(tmp_path: Path) -> None:
    code = (
        "import os, pwd\n"
        "def unknown(uid): raise KeyError(uid)\n"
        "pwd.getpwuid = unknown\n"
        "make = os.makedirs\n"
        "def makedirs(path, *more, **options):\n"
        "    if 'gpu-actors-cupy' not in str(path): raise PermissionError(13, 'Permission denied', path)\n"
        "    make(path, *more, **options)\n"
        "os.makedirs = makedirs\n"
        "from gpu_actors.compiling.toolchain import load_nvrtc\n"
        "print(load_nvrtc().getVersion()[0] >= 12, 'CUPY_CACHE_DIR' in os.environ, os.listdir('.'))\n"
    )
    environment = {name: value for name, value in os.environ.items() if name not in ("HOME", "CUPY_CACHE_DIR")}
    command = [sys.executable, "-c", code]
    done = subprocess.run(
        command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout) == (0, "True False []\n"), done.stderr


@pytest.mark.parametrize(
    ("home", "can"), [("nowhere/home", False), ("file", False), ("sealed", False), ("new/home", True), ("", True)]
)
def test_whether_cupy_can_make_its_own_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, home: str, can: bool
) -> None:
    (tmp_path / "file").touch(mode=0o700)
    for sealed in ("nowhere", "sealed"):
        (tmp_path / sealed).mkdir(mode=0o500)
    real = os.access  # root may write anywhere, so answer as for another user
    monkeypatch.setattr(os, "access", lambda path, mode: bool(os.stat(path).st_mode & 0o200) and real(path, mode))
    monkeypatch.delenv("CUPY_CACHE_DIR", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / home))
    assert toolchain._cupy_cache_can_be_made() is can
    monkeypatch.setenv("CUPY_CACHE_DIR", "/nowhere/at/all")  # what the user names is left to CuPy
    assert toolchain._cupy_cache_can_be_made()


class TestNoexec:
    """Folders on file systems from which nothing may be run. They are faked, because only root can mount them."""

    @pytest.fixture
    def sealed(self, monkeypatch: pytest.MonkeyPatch) -> set[Path]:
        folders: set[Path] = set()
        monkeypatch.setattr(module_cache, "_is_noexec", folders.__contains__)
        return folders

    def test_modules_go_to_a_temporary_folder(
        self, tmp_path: Path, sealed: set[Path], caplog: pytest.LogCaptureFixture
    ) -> None:
        sealed.add(tmp_path)
        cache = ModuleCache(tmp_path)
        library = cache.build(C, lambda kept: (b"object", 0.0)).library
        assert library.parent != tmp_path
        assert cache.load(C) is not None
        assert "noexec" in caplog.text

    def test_a_temporary_folder_of_the_same_kind_is_refused(self, tmp_path: Path, sealed: set[Path]) -> None:
        sealed.update((tmp_path, module_cache.process_folder("emulated")))
        with pytest.raises(InvalidRequest, match="set TMPDIR or name another folder") as caught:
            ModuleCache(tmp_path)
        assert caught.value.field == "cache_dir"
