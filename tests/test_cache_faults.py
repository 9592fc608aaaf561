"""What the cubin cache does when processes race or die, disks fail, bytes rot and folders are hostile."""

from __future__ import annotations

import errno
import json
import logging
import os
import random
import signal
import tempfile
import time
from pathlib import Path

import pytest
from cache_support import ARCH, CountingCompiler, entries, fake_toolchain, kernel, run_child, start_child

from gpu_actors.errors import InvalidRequest
from gpu_actors.kernels import cache_folder
from gpu_actors.kernels.compiler import Compiler
from gpu_actors.kernels.cubin_cache import CubinCache


def cache(folder, **options):
    return CubinCache(folder, **{"toolchain": fake_toolchain, **options})


@pytest.fixture
def stored(tmp_path):
    """(folder, the path of its one entry, the cubin in it)."""
    made = cache(tmp_path / "c").get_or_compile(kernel(), ARCH, CountingCompiler(size=200))
    return tmp_path / "c", entries(tmp_path / "c")[0], made


def assert_refused_once(folder, entry):
    """The damaged entry is a miss, is set aside, and its place can be filled again."""
    shared = cache(folder)
    assert shared.get(kernel(), ARCH) is None
    assert (shared.stats().corrupt, shared.stats().entries) == (1, 0)
    assert entry.with_name(entry.name + ".corrupt").exists()
    compile = CountingCompiler(size=200)
    assert shared.get_or_compile(kernel(), ARCH, compile) is not None
    assert len(compile.calls) == 1
    assert cache(folder).get(kernel(), ARCH) is not None


class TestDamagedEntries:
    HEADER = 8 + 32 + 8 + 32

    def test_every_truncation_is_refused(self, stored, caplog):
        folder, entry, _ = stored
        whole = entry.read_bytes()
        edges = (8, 40, 48, self.HEADER, self.HEADER + 4)
        lengths = {0, 1, len(whole) // 2, len(whole) - 1, *(edge + off for edge in edges for off in (-1, 0, 1))}
        for length in sorted(lengths):
            entry.write_bytes(whole[:length])
            assert_refused_once(folder, entry)
        assert "is refused" in caplog.text

    def test_every_flipped_bit_of_the_header_and_of_a_sample_of_the_rest_is_refused(self, stored):
        folder, entry, _ = stored
        whole = entry.read_bytes()
        shared = cache(folder)
        rest = random.Random(0).sample(range(self.HEADER * 8, len(whole) * 8), 100)
        for number, bit in enumerate((*range(self.HEADER * 8), *rest), start=1):
            flipped = bytearray(whole)
            flipped[bit // 8] ^= 1 << bit % 8
            entry.write_bytes(flipped)
            assert shared.get(kernel(), ARCH) is None, f"bit {bit} of byte {bit // 8}"
            assert shared.stats().corrupt == number
        entry.write_bytes(whole)
        assert shared.get(kernel(), ARCH) is not None

    def test_appended_bytes_are_refused(self, stored):
        folder, entry, _ = stored
        entry.write_bytes(entry.read_bytes() + b"\0")
        assert_refused_once(folder, entry)

    def test_a_sound_entry_of_another_variant_is_refused(self, stored):
        folder, entry, _ = stored
        cache(folder).get_or_compile(kernel(2), ARCH, CountingCompiler())
        other = next(path for path in entries(folder) if path != entry)
        os.replace(other, entry)
        assert_refused_once(folder, entry)

    @pytest.mark.parametrize("kind", ["fifo", "folder", "others can write"])
    def test_what_is_no_private_file_is_refused(self, stored, kind):
        folder, entry, _ = stored
        if kind == "others can write":
            entry.chmod(0o666)
        else:
            entry.unlink()
            os.mkfifo(entry) if kind == "fifo" else entry.mkdir()
        assert_refused_once(folder, entry)

    def test_a_link_in_an_entrys_place_is_not_followed(self, stored, tmp_path, caplog):
        folder, entry, made = stored
        outside = tmp_path / "outside"
        os.replace(entry, outside)
        entry.symlink_to(outside)
        shared = cache(folder)
        assert shared.get(kernel(), ARCH) is None
        assert "cannot be read" in caplog.text
        shared.get_or_compile(kernel(), ARCH, CountingCompiler(size=200))
        assert not entry.is_symlink()
        assert cache(folder).get(kernel(), ARCH) == made

    def test_few_set_aside_entries_are_kept(self, stored):
        folder, _, _ = stored
        for value in range(12):
            cache(folder).get_or_compile(kernel(value), ARCH, CountingCompiler())
        for entry in entries(folder):
            entry.write_bytes(b"rotten")
        shared = cache(folder)
        for value in range(12):
            shared.get(kernel(value), ARCH)
        assert shared.stats().corrupt == 12
        cache(folder)
        assert len(list(folder.glob("*.corrupt"))) == 8

    def test_a_damaged_entry_of_a_readonly_folder_is_passed_over_and_left_there(self, stored, tmp_path):
        folder, entry, _ = stored
        entry.write_bytes(b"rotten")
        seen = []
        shared = cache(
            tmp_path / "own", readonly_paths=[folder], on_event=lambda name, fields: seen.append((name, fields))
        )
        shared.get_or_compile(kernel(), ARCH, CountingCompiler())
        assert entry.read_bytes() == b"rotten"
        assert seen[0][0] == "cache.corrupt"
        assert seen[0][1]["path"] == str(entry)
        assert len(entries(tmp_path / "own")) == 1


RACE = """
import json, sys, time, cache_support as s
from gpu_actors.kernels.compiler import Compiler
from gpu_actors.kernels.cubin_cache import CubinCache
shared = CubinCache(sys.argv[1])
key = shared.key(s.kernel(), s.ARCH)
print("ready", flush=True)
sys.stdin.readline()
cubin = shared.get_or_compile(s.kernel(), s.ARCH, Compiler().compile)
stats = shared.stats()
print(json.dumps([stats.compiles, len(cubin.data), stats.hits + stats.misses]))
"""


def test_eight_processes_on_a_cold_cache_compile_a_variant_once(tmp_path):
    children = [start_child(RACE, tmp_path / "c") for _ in range(8)]
    for child in children:
        assert child.stdout.readline() == "ready\n"
    for child in children:
        child.stdin.write("go\n")
        child.stdin.flush()
    results = []
    for child in children:
        output, errors = child.communicate(timeout=60)
        assert child.returncode == 0, errors
        results.append(json.loads(output))
    assert sum(compiles for compiles, _, _ in results) == 1
    assert len({size for _, size, _ in results}) == 1
    assert [path.suffix for path in (tmp_path / "c").iterdir()] == [".cubin"]


HOLDER = """
import filelock, sys
with filelock.FileLock(sys.argv[1]):
    print("held", flush=True)
    sys.stdin.readline()
"""


def test_a_process_that_waits_too_long_compiles_too_and_publishes_nothing(tmp_path, caplog):
    shared = cache(tmp_path, lock_timeout=0.1)
    key = shared.key(kernel(), ARCH)
    holder = start_child(
        HOLDER,
        tmp_path / f"{key.build}.lock",
    )
    assert holder.stdout.readline() == "held\n"
    try:
        assert shared.get_or_compile(kernel(), ARCH, CountingCompiler()) is not None
        assert "is compiled elsewhere" in caplog.text
        assert entries(tmp_path) == []
        assert shared.peek(kernel(), ARCH) is not None
    finally:
        holder.kill()
        holder.communicate()
    # The dead holder's lock is free again.
    compile = CountingCompiler()
    cache(tmp_path, lock_timeout=0.1).get_or_compile(kernel(), ARCH, compile)
    assert len(entries(tmp_path)) == 1


STOPPED = """
import os, sys, time, cache_support as s
from gpu_actors.kernels.cubin_cache import CubinCache
def stop(*arguments, **options):
    print("stopped", flush=True)
    time.sleep(60)
setattr(os, sys.argv[2], stop)
CubinCache(sys.argv[1], toolchain=s.fake_toolchain).get_or_compile(s.kernel(), s.ARCH, s.CountingCompiler())
"""


@pytest.mark.parametrize("call", ["write", "fsync", "replace"])
def test_a_writer_killed_before_the_rename_leaves_nothing_that_stays(tmp_path, call):
    writer = start_child(STOPPED, tmp_path, call)
    assert writer.stdout.readline() == "stopped\n"
    assert len(list(tmp_path.glob("*.tmp"))) == 1
    bystander = cache(tmp_path)
    assert len(list(tmp_path.glob("*.tmp"))) == 1, "a living writer's file was swept"
    assert bystander.get(kernel(), ARCH) is None
    writer.send_signal(signal.SIGKILL)
    writer.communicate()
    after = cache(tmp_path)
    assert list(tmp_path.glob("*.tmp")) == []
    compile = CountingCompiler()
    assert after.get_or_compile(kernel(), ARCH, compile) is not None
    assert len(compile.calls) == 1
    assert cache(tmp_path).get(kernel(), ARCH) is not None


BUSY = """
import sys, cache_support as s
from gpu_actors.kernels.cubin_cache import CubinCache
shared = CubinCache(sys.argv[1], toolchain=s.fake_toolchain)
print("ready", flush=True)
for value in range(100000):
    shared.get_or_compile(s.kernel(value), s.ARCH, s.CountingCompiler(size=200_000))
"""


def test_a_writer_killed_at_any_moment_leaves_whole_entries_only(tmp_path):
    moments = random.Random(1)
    for _ in range(6):
        writer = start_child(BUSY, tmp_path)
        assert writer.stdout.readline() == "ready\n"
        time.sleep(moments.uniform(0.0, 0.15))
        writer.kill()
        writer.communicate()
    shared = cache(tmp_path)
    assert list(tmp_path.glob("*.tmp")) == []
    stored = len(entries(tmp_path))
    assert stored > 0
    found = [shared.get(kernel(value), ARCH) for value in range(stored)]
    assert all(cubin is not None and len(cubin.data) == 200_000 for cubin in found)
    assert shared.stats().corrupt == 0


class TestDisksThatFail:
    """The kernel is used from memory, a warning says why, and nothing half written stays."""

    def assert_memory_serves(self, shared, caplog, words):
        compile = CountingCompiler()
        made = shared.get_or_compile(kernel(), ARCH, compile)
        assert shared.get_or_compile(kernel(), ARCH, compile) is made
        assert len(compile.calls) == 1
        assert shared.get_or_compile(kernel(2), ARCH, compile) is not None
        records = [record for record in caplog.records if "cannot be written" in record.getMessage()]
        assert [record.levelno for record in records if record.levelno > logging.DEBUG] == [logging.WARNING]
        assert "fill.cu stays in memory" in records[0].getMessage()
        assert words in records[0].getMessage()

    @pytest.mark.parametrize("call", ["write", "fsync", "replace"])
    def test_a_full_disk(self, tmp_path, monkeypatch, caplog, call):
        def full(*arguments, **options):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        shared = cache(tmp_path)
        monkeypatch.setattr(cache_folder.os, call, full)
        self.assert_memory_serves(shared, caplog, "No space left")
        monkeypatch.undo()
        assert {path.suffix for path in tmp_path.iterdir()} == {".lock"}
        for value in (1, 2):
            assert cache(tmp_path).get_or_compile(kernel(value), ARCH, CountingCompiler()) is not None
        assert {path.suffix for path in tmp_path.iterdir()} == {".cubin"}

    def test_a_write_that_takes_a_part_at_a_time_is_finished(self, tmp_path, monkeypatch):
        write = os.write
        monkeypatch.setattr(cache_folder.os, "write", lambda handle, data: write(handle, data[:100]))
        made = cache(tmp_path).get_or_compile(kernel(), ARCH, CountingCompiler())
        assert cache(tmp_path).get(kernel(), ARCH) == made

    def test_a_real_limit_on_the_files_size(self, tmp_path):
        code = (
            "import logging, resource, sys, cache_support as s; from gpu_actors.kernels.cubin_cache import CubinCache\n"
            "logging.basicConfig(stream=sys.stdout, format='%(message)s')\n"
            "shared = CubinCache(sys.argv[1], toolchain=s.fake_toolchain)\n"
            "resource.setrlimit(resource.RLIMIT_FSIZE, (500, 500))\n"
            "shared.get_or_compile(s.kernel(), s.ARCH, s.CountingCompiler())\n"
            "print(shared.peek(s.kernel(), s.ARCH) is not None)\n"
        )
        warning, kept = run_child(code, tmp_path).splitlines()
        assert "File too large" in warning
        assert kept == "True"
        assert [path.suffix for path in tmp_path.iterdir()] == [".lock"]

    @pytest.mark.parametrize("place", ["c", "c/below"])
    def test_a_file_where_the_folder_should_be(self, tmp_path, caplog, place):
        (tmp_path / "c").write_text("in the way")
        self.assert_memory_serves(cache(tmp_path / place), caplog, "")
        assert (tmp_path / "c").read_text() == "in the way"

    def test_a_folder_that_this_user_may_read_and_not_write(self):
        code = (
            "import logging, os, sys, cache_support as s; from gpu_actors.kernels.cubin_cache import CubinCache\n"
            "import filelock, platformdirs\n"
            "logging.basicConfig(stream=sys.stdout, format='%(message)s')\n"
            "shared = CubinCache(sys.argv[1], toolchain=s.fake_toolchain)\n"
            "shared.get_or_compile(s.kernel(), s.ARCH, s.CountingCompiler())\n"
            "os.chmod(sys.argv[1], 0o500)\n"
            "if os.getuid() == 0: os.chown(sys.argv[1], 65534, -1); os.setuid(65534)\n"
            "shared = CubinCache(sys.argv[1], toolchain=s.fake_toolchain)\n"
            "shared.get_or_compile(s.kernel(2), s.ARCH, s.CountingCompiler())\n"
            "print(shared.peek(s.kernel(2), s.ARCH) is not None, shared.stats().entries)\n"
        )
        with tempfile.TemporaryDirectory() as parent:  # not tmp_path: other users cannot enter it
            os.chmod(parent, 0o755)
            warning, kept = run_child(code, Path(parent) / "c").splitlines()
            os.chmod(Path(parent) / "c", 0o700)
        assert "Permission denied" in warning
        assert kept == "True 1"

    def test_a_folder_that_goes_away_is_made_again(self, tmp_path):
        shared = cache(tmp_path / "c")
        shared.get_or_compile(kernel(1), ARCH, CountingCompiler())
        for path in (tmp_path / "c").iterdir():
            path.unlink()
        (tmp_path / "c").rmdir()
        shared.get_or_compile(kernel(2), ARCH, CountingCompiler())
        assert len(entries(tmp_path / "c")) == 1

    def test_without_any_folder_the_compile_itself_still_works(self, tmp_path):
        (tmp_path / "c").write_text("")
        assert CubinCache(tmp_path / "c").get_or_compile(kernel(), ARCH, Compiler().compile).data[:4] == b"\x7fELF"


class TestHostileFolders:
    def refuse(self, words, *arguments, **options):
        with pytest.raises(InvalidRequest, match=words) as caught:
            cache(*arguments, **options)
        assert caught.value.field == "cache_dir"

    @pytest.mark.parametrize("mode", [0o777, 0o770, 0o707, 0o1777])
    def test_one_that_others_can_write_is_refused(self, tmp_path, mode):
        tmp_path.chmod(mode)
        self.refuse("others can write to it", tmp_path)
        self.refuse("others can write to it", None, readonly_paths=[tmp_path])
        tmp_path.chmod(0o700)
        cache(tmp_path)

    def test_a_link_is_refused_also_to_a_sound_folder(self, tmp_path):
        (tmp_path / "real").mkdir(mode=0o700)
        (tmp_path / "link").symlink_to(tmp_path / "real")
        self.refuse("symbolic link", tmp_path / "link")
        self.refuse("symbolic link", None, readonly_paths=[tmp_path / "link"])

    def test_another_users_folder_is_refused(self, tmp_path):
        if os.geteuid() == 0:
            os.chown(tmp_path, 12345, -1)
            folder = tmp_path
        else:
            folder = Path("/usr")
        self.refuse("owns it", folder)

    def test_roots_folder_serves_others_as_a_readonly_one_alone(self, monkeypatch):
        monkeypatch.setattr(cache_folder.os, "geteuid", lambda: 12345)
        cache(None, readonly_paths=["/usr"])
        self.refuse("user 0 owns it", "/usr")

    def test_one_that_turns_hostile_later_is_refused_then(self, tmp_path):
        shared = cache(tmp_path)
        shared.get_or_compile(kernel(1), ARCH, CountingCompiler())
        tmp_path.chmod(0o777)
        assert shared.get(kernel(1), ARCH) is not None  # from memory
        with pytest.raises(InvalidRequest, match="others can write"):
            shared.get_or_compile(kernel(2), ARCH, CountingCompiler())


def test_old_locks_are_swept_and_held_ones_are_not(tmp_path):
    old, held = tmp_path / "old.lock", tmp_path / "held.lock"
    for path in (old, held, tmp_path / "new.lock"):
        path.touch()
    os.utime(old, (1, 1))
    holder = start_child(
        HOLDER,
        held,
    )
    assert holder.stdout.readline() == "held\n"
    os.utime(held, (1, 1))
    cache(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"held.lock", "new.lock"}
    holder.kill()
    holder.communicate()
    os.utime(held, (1, 1))
    cache(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"new.lock"}
