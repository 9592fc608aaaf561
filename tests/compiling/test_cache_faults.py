"""The cubin cache when processes race or die, and when the bytes of an entry are damaged."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import random
import signal
import struct
import time

import pytest
from support.cubins import ARCH, CountingCompiler, Fork, entries, fake_toolchain, variant
from support.service import eventually

from gpu_actors.compiling import cubin_folder as cache_folder
from gpu_actors.compiling.cubin_cache import CubinCache


def cache(folder, **options):
    return CubinCache(folder, **{"toolchain": fake_toolchain, **options})


@pytest.fixture
def stored(tmp_path):
    """(folder, the path of its one entry, the cubin in it)."""
    cubin = cache(tmp_path / "c").get_or_compile(variant(), CountingCompiler(size=200))
    return tmp_path / "c", entries(tmp_path / "c")[0], cubin


def assert_refused_once(folder, entry):
    """Assert that the damaged entry is a miss, is set aside, and can be stored again."""
    shared = cache(folder)
    assert shared.get(variant()) is None
    assert (shared.stats().corrupt, shared.stats().entries) == (1, 0)
    assert entry.with_name(entry.name + ".corrupt").exists()
    compile = CountingCompiler(size=200)
    assert shared.get_or_compile(variant(), compile) is not None
    assert len(compile.calls) == 1
    assert cache(folder).get(variant()) is not None


def about(**changes):
    """The JSON header of the entry of `kernel`, with ``changes``. A field that is None is left out."""
    whole = {"arch": ARCH, "entry_points": ["fill"], "log": "", "nvrtc": "13.4.92", "resources": {"fill": [8, 0, 0, 0]}}
    return json.dumps({name: value for name, value in {**whole, **changes}.items() if value is not None}).encode()


BAD_HEADERS = [
    b"",
    b"{",
    b"\xff",
    b"[" * 100_000,
    b"1" * 5_000,
    b"null",
    b"[]",
    *(about(**{name: None}) for name in ("arch", "entry_points", "log", "nvrtc", "resources")),
    about(arch="sm_80"),
    about(arch=90),
    about(entry_points=["other"]),
    about(entry_points=["fill", "other"]),
    about(entry_points=1),
    about(log=1),
    about(nvrtc=[]),
    about(resources=[]),
    about(resources={"fill": [8, 0, 0]}),
    about(resources={"fill": 8}),
    about(resources={"fill": [8, 0, 0, "0"]}),
    about(resources={"fill": [8, 0, 0, -1]}),
]


def reseal(entry, payload):
    """Give an entry another payload, with its length and its checksum."""
    magic_and_key = entry.read_bytes()[:40]
    entry.write_bytes(magic_and_key + struct.pack("<Q", len(payload)) + hashlib.sha256(payload).digest() + payload)


class TestDamagedEntries:
    HEADER = 8 + 32 + 8 + 32

    def test_every_truncation_and_a_byte_more_are_refused(self, stored, caplog):
        folder, entry, _ = stored
        whole = entry.read_bytes()
        edges = (8, 40, 48, self.HEADER, self.HEADER + 4)
        lengths = {0, 1, len(whole) // 2, len(whole) - 1, *(edge + off for edge in edges for off in (-1, 0, 1))}
        for length in sorted(lengths):
            entry.write_bytes(whole[:length])
            assert_refused_once(folder, entry)
        entry.write_bytes(whole + b"\0")
        assert_refused_once(folder, entry)
        assert "is refused" in caplog.text

    def test_a_flipped_bit_of_any_byte_of_the_header_and_of_a_sample_of_the_rest_is_refused(self, stored):
        folder, entry, _ = stored
        whole = entry.read_bytes()
        shared = cache(folder)
        drawn = random.Random(0)
        rest = drawn.sample(range(self.HEADER * 8, len(whole) * 8), 20)
        for number, bit in enumerate((*(8 * byte + drawn.randrange(8) for byte in range(self.HEADER)), *rest), start=1):
            flipped = bytearray(whole)
            flipped[bit // 8] ^= 1 << bit % 8
            entry.write_bytes(flipped)
            assert shared.get(variant()) is None, f"bit {bit} of byte {bit // 8}"
            assert shared.stats().corrupt == number
        entry.write_bytes(whole)
        assert shared.get(variant()) is not None

    def test_a_sound_entry_of_another_variant_is_refused(self, stored):
        folder, entry, _ = stored
        cache(folder).get_or_compile(variant(2), CountingCompiler())
        other = next(path for path in entries(folder) if path != entry)
        os.replace(other, entry)
        assert_refused_once(folder, entry)

    def test_what_a_good_checksum_covers_is_looked_at_all_the_same(self, stored):
        folder, entry, _ = stored
        cut_short = (b"", b"\0\0", struct.pack("<I", 1 << 30) + b"{}")
        for payload in (*cut_short, *(struct.pack("<I", len(bad)) + bad + b"cubin" for bad in BAD_HEADERS)):
            reseal(entry, payload)
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
        folder, entry, cubin = stored
        outside = tmp_path / "outside"
        os.replace(entry, outside)
        entry.symlink_to(outside)
        shared = cache(folder)
        assert shared.get(variant()) is None
        assert "cannot be read" in caplog.text
        shared.get_or_compile(variant(), CountingCompiler(size=200))
        assert not entry.is_symlink()
        assert cache(folder).get(variant()) == cubin

    def test_few_set_aside_entries_are_kept(self, stored):
        folder, _, _ = stored
        for value in range(12):
            cache(folder).get_or_compile(variant(value), CountingCompiler())
        for entry in entries(folder):
            entry.write_bytes(b"rotten")
        shared = cache(folder)
        for value in range(12):
            shared.get(variant(value))
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
        shared.get_or_compile(variant(), CountingCompiler())
        assert entry.read_bytes() == b"rotten"
        assert seen[0][0] == "cache.corrupt"
        assert seen[0][1]["path"] == str(entry)
        assert len(entries(tmp_path / "own")) == 1


def test_six_processes_on_a_cold_cache_compile_a_variant_once(tmp_path):
    shared = cache(tmp_path)

    def race(pipe):
        pipe.recv()
        compile = CountingCompiler()
        cubin = shared.get_or_compile(variant(), compile)
        pipe.send((len(compile.calls), cubin.data))

    racers = [Fork(race) for _ in range(6)]
    for racer in racers:
        racer.end.send("go")
    results = [racer.end.recv() for racer in racers if racer.end.poll(60)]
    assert [len(results), sum(compiles for compiles, _ in results), len({data for _, data in results})] == [6, 1, 1]
    for racer in racers:
        os.waitpid(racer.pid, 0)
    assert [path.suffix for path in tmp_path.iterdir()] == [".cubin"]


def holding(folder, build):
    """A process that holds the lock of a build. Its pipe says so."""

    def hold(pipe):
        with cache_folder.CacheFolder(folder, writable=True).locked(build, 0.0):
            pipe.send("held")
            signal.pause()

    return Fork(hold)


def test_a_process_that_waits_too_long_compiles_too_and_publishes_nothing(tmp_path, caplog):
    shared = cache(tmp_path, lock_timeout=0.1)
    with holding(tmp_path, shared.key(variant()).build) as pipe:
        assert pipe.recv() == "held"
        assert shared.get_or_compile(variant(), CountingCompiler()) is not None
        assert "is compiled elsewhere" in caplog.text
        assert entries(tmp_path) == []
        assert shared.peek(variant()) is not None
    # The lock of the dead holder is free again.
    cache(tmp_path, lock_timeout=0.1).get_or_compile(variant(), CountingCompiler())
    assert len(entries(tmp_path)) == 1


@pytest.mark.parametrize("call", ["write", "fsync", "replace"])
def test_a_writer_killed_before_the_rename_leaves_nothing_that_stays(tmp_path, call):
    def write(pipe):
        def stop(*arguments, **options):
            os.kill(os.getpid(), signal.SIGSTOP)

        setattr(os, call, stop)
        cache(tmp_path).get_or_compile(variant(), CountingCompiler())

    writer = Fork(write)
    os.waitpid(writer.pid, os.WUNTRACED)
    with writer:
        assert len(list(tmp_path.glob("*.tmp"))) == 1
        bystander = cache(tmp_path)
        assert len(list(tmp_path.glob("*.tmp"))) == 1, "a living writer's file was swept"
        assert bystander.get(variant()) is None
    after = cache(tmp_path)
    assert list(tmp_path.glob("*.tmp")) == []
    compile = CountingCompiler()
    assert after.get_or_compile(variant(), compile) is not None
    assert len(compile.calls) == 1
    assert cache(tmp_path).get(variant()) is not None


def test_a_file_swept_between_its_creation_and_its_lock_is_made_again(tmp_path, monkeypatch):
    flock = fcntl.flock
    swept = []

    def late(handle, how):
        if how == fcntl.LOCK_EX and not swept:
            swept.extend(tmp_path.glob("*.tmp"))
            swept[0].unlink()
        flock(handle, how)

    monkeypatch.setattr(cache_folder.fcntl, "flock", late)
    cubin = cache(tmp_path).get_or_compile(variant(), CountingCompiler())
    assert len(swept) == 1
    assert cache(tmp_path).get(variant()) == cubin


def test_a_writer_killed_at_any_moment_leaves_whole_entries_only(tmp_path):
    def write(pipe):
        shared = cache(tmp_path)
        pipe.send("ready")
        for value in range(100000):
            shared.get_or_compile(variant(value), CountingCompiler(size=200_000))

    moments = random.Random(1)
    for killed in range(4):
        with Fork(write) as pipe:
            assert pipe.recv() == "ready"
            if killed == 0:  # on a slow disk the later writers may store nothing
                eventually(lambda: entries(tmp_path))
            time.sleep(moments.uniform(0.0, 0.1))  # no event: any moment may come
    shared = cache(tmp_path)
    assert list(tmp_path.glob("*.tmp")) == []
    result = [shared.get(variant(value)) for value in range(len(entries(tmp_path)))]
    assert all(cubin is not None and len(cubin.data) == 200_000 for cubin in result)
    assert shared.stats().corrupt == 0


def test_old_locks_are_swept_and_held_ones_are_not(tmp_path):
    old, held, new = (tmp_path / f"gpu-actors-{digit * 64}.lock" for digit in "abc")
    for path in (old, new):
        path.touch()
    os.utime(old, (1, 1))
    with holding(tmp_path, "b" * 64) as pipe:
        assert pipe.recv() == "held"
        os.utime(held, (1, 1))
        cache(tmp_path)
        assert set(tmp_path.iterdir()) == {held, new}
    os.utime(held, (1, 1))
    cache(tmp_path)
    assert set(tmp_path.iterdir()) == {new}
