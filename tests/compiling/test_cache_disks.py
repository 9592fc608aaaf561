"""The cubin cache on disks that refuse writes, and the folders that it refuses."""

from __future__ import annotations

import errno
import logging
import os
import resource
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.cubins import CountingCompiler, Fork, entries, fake_toolchain, kernel, variant

import gpu_actors as ga
from gpu_actors.compiling import cubin_folder as cache_folder
from gpu_actors.compiling.cubin_cache import CubinCache
from gpu_actors.errors import InvalidRequest


def cache(folder, **options):
    return CubinCache(folder, **{"toolchain": fake_toolchain, **options})


class TestDisksThatFail:
    """The kernel is used from memory, a warning says why, and no partial file stays."""

    def assert_memory_serves(self, shared, caplog, words):
        compile = CountingCompiler()
        cubin = shared.get_or_compile(variant(), compile)
        assert shared.get_or_compile(variant(), compile) is cubin
        assert len(compile.calls) == 1
        assert shared.get_or_compile(variant(2), compile) is not None
        records = [record for record in caplog.records if "cannot be written" in record.getMessage()]
        assert [record.levelno for record in records if record.levelno > logging.DEBUG] == [logging.WARNING]
        assert "fill.cu stays in memory" in records[0].getMessage()
        assert words in records[0].getMessage()

    @pytest.mark.parametrize("call", ["write", "fsync", "replace"])
    def test_a_full_disk_costs_no_answer(self, tmp_path, monkeypatch, caplog, call):
        def full(*arguments, **options):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        shared = cache(tmp_path)
        monkeypatch.setattr(cache_folder.os, call, full)
        self.assert_memory_serves(shared, caplog, "No space left")
        monkeypatch.undo()
        assert list(tmp_path.iterdir()) == []
        for value in (1, 2):
            assert cache(tmp_path).get_or_compile(variant(value), CountingCompiler()) is not None
        assert {path.suffix for path in tmp_path.iterdir()} == {".cubin"}

    def test_a_write_that_takes_a_part_at_a_time_is_finished(self, tmp_path, monkeypatch):
        write = os.write
        monkeypatch.setattr(cache_folder.os, "write", lambda handle, data: write(handle, data[:100]))
        cubin = cache(tmp_path).get_or_compile(variant(), CountingCompiler())
        assert cache(tmp_path).get(variant()) == cubin

    def test_a_real_limit_on_the_files_size(self, tmp_path, caplog):
        def store(pipe):
            shared = cache(tmp_path)
            resource.setrlimit(resource.RLIMIT_FSIZE, (500, 500))
            cubin = shared.get_or_compile(variant(), CountingCompiler())
            pipe.send((caplog.text, shared.peek(variant()) is cubin))

        with Fork(store) as pipe:
            warning, kept = pipe.recv()
        assert "File too large" in warning
        assert kept
        assert list(tmp_path.iterdir()) == []

    @pytest.mark.parametrize("place", ["c", "c/below"])
    def test_a_file_where_the_folder_should_be(self, tmp_path, caplog, place):
        (tmp_path / "c").write_text("in the way")
        with pytest.raises(InvalidRequest, match="not a folder") as caught:
            cache(tmp_path / place)
        assert caught.value.field == "cache_dir"
        self.assert_memory_serves(cache(tmp_path / place, explicit=False), caplog, "")
        assert (tmp_path / "c").read_text() == "in the way"

    def test_a_folder_that_this_user_may_read_and_not_write(self, caplog):
        def store(pipe):
            cache(folder).get_or_compile(variant(), CountingCompiler())
            folder.chmod(0o500)
            if os.getuid() == 0:
                os.chown(folder, 65534, -1)
                os.setuid(65534)
            shared = cache(folder)
            cubin = shared.get_or_compile(variant(2), CountingCompiler())
            pipe.send((caplog.text, shared.peek(variant(2)) is cubin, shared.stats().entries))

        with tempfile.TemporaryDirectory() as parent:  # not tmp_path: other users cannot enter it
            os.chmod(parent, 0o755)
            folder = Path(parent) / "c"
            with Fork(store) as pipe:
                warning, *result = pipe.recv()
            folder.chmod(0o700)
        assert "Permission denied" in warning
        assert result == [True, 1]

    def test_a_folder_that_goes_away_is_made_again(self, tmp_path):
        shared = cache(tmp_path / "c")
        shared.get_or_compile(variant(1), CountingCompiler())
        for path in (tmp_path / "c").iterdir():
            path.unlink()
        (tmp_path / "c").rmdir()
        shared.get_or_compile(variant(2), CountingCompiler())
        assert len(entries(tmp_path / "c")) == 1


class TestHostileFolders:
    def refuse(self, words, *arguments, **options):
        with pytest.raises(InvalidRequest, match=words) as caught:
            cache(*arguments, **options)
        assert caught.value.field == ("prewarmed" if options else "cache_dir")

    @pytest.mark.parametrize("mode", [0o770, 0o707, 0o1777])
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
        shared.get_or_compile(variant(1), CountingCompiler())
        tmp_path.chmod(0o777)
        assert shared.get(variant(1)) is not None  # from memory
        with pytest.raises(InvalidRequest, match="others can write"):
            shared.get_or_compile(variant(2), CountingCompiler())

    @pytest.mark.parametrize(("mode", "refused"), [(0o777, True), (0o770, True), (0o1777, False), (0o755, False)])
    def test_one_that_others_could_replace_is_refused(self, tmp_path, mode, refused):
        folder = tmp_path / "above" / "between" / "c"
        folder.mkdir(parents=True)
        for place in (folder, folder.parent):
            place.chmod(0o700)
        for place in (folder.parent, folder.parent.parent):
            os.chown(place, -1, 12345) if os.geteuid() == 0 else None
            place.chmod(mode)
            if refused:
                self.refuse(f"others can write to the folder above it, {place} ", folder)
                self.refuse("could replace it", None, readonly_paths=[folder])
                place.chmod(0o700)
            else:
                cache(folder, readonly_paths=[folder])

    def test_one_below_another_users_folder_is_refused(self, tmp_path, monkeypatch):
        if os.geteuid() == 0:
            (tmp_path / "c").mkdir(mode=0o700)
            os.chown(tmp_path, 12345, -1)
            self.refuse(f"user 12345 owns the folder above it, {tmp_path},", tmp_path / "c")
        else:
            monkeypatch.setattr(cache_folder.os, "geteuid", lambda: 0)
            self.refuse("owns", tmp_path)

    @pytest.mark.parametrize(
        ("uid_map", "nobody"),
        [
            ("         0          0 4294967295\n", None),
            ("      1000       1000          1\n", 65534),
            ("0 1000 1\n1 100000 65533\n", 65534),
            ("0 1000 1\n1 100000 65536\n", None),
            ("", 65534),
            ("nonsense", None),
        ],
    )
    def test_in_a_container_that_does_not_know_root_its_stand_in_may_own_what_lies_above(
        self, tmp_path, uid_map, nobody
    ):
        assert cache_folder._nobody_here(tmp_path) is None
        (tmp_path / "sys" / "kernel").mkdir(parents=True)
        (tmp_path / "sys" / "kernel" / "overflowuid").write_text("65534\n")
        (tmp_path / "self").mkdir()
        (tmp_path / "self" / "uid_map").write_text(uid_map)
        assert cache_folder._nobody_here(tmp_path) == nobody

    def test_the_stand_in_is_asked_for(self, tmp_path, monkeypatch):
        (tmp_path / "above" / "c").mkdir(mode=0o700, parents=True)
        owner = 12345 if os.geteuid() == 0 else os.geteuid()
        os.chown(tmp_path / "above", owner, -1)
        monkeypatch.setattr(cache_folder, "_nobody_here", lambda: owner)
        cache(tmp_path / "above" / "c")
        if os.geteuid() == 0:
            monkeypatch.setattr(cache_folder, "_nobody_here", lambda: None)
            self.refuse("user 12345 owns", tmp_path / "above" / "c")

    def test_one_reached_by_a_link_in_a_folder_of_others_is_refused(self, tmp_path):
        (tmp_path / "real" / "c").mkdir(parents=True, mode=0o700)
        (tmp_path / "open").mkdir()
        (tmp_path / "open" / "link").symlink_to(tmp_path / "real")
        cache(tmp_path / "open" / "link" / "c")
        (tmp_path / "open").chmod(0o777)
        self.refuse("others can write to the folder above it", tmp_path / "open" / "link" / "c")

    def test_a_group_of_the_user_alone_is_no_other(self, tmp_path, monkeypatch):
        (tmp_path / "c").mkdir(mode=0o700)
        tmp_path.chmod(0o770)
        me = SimpleNamespace(pw_name="me", pw_gid=tmp_path.stat().st_gid)
        group = SimpleNamespace(gr_name="me", gr_mem=[])
        monkeypatch.setattr(cache_folder.pwd, "getpwuid", lambda uid: me)
        monkeypatch.setattr(cache_folder.grp, "getgrgid", lambda gid: group)
        cache(tmp_path / "c")
        group.gr_mem = ["me", "other"]
        self.refuse("others can write to the folder above it", tmp_path / "c")

    def test_what_a_lax_umask_would_open_is_made_closed(self, tmp_path):
        before = os.umask(0)
        try:
            shared = cache(tmp_path / "a" / "b" / "c")
            shared.get_or_compile(variant(1), CountingCompiler())
        finally:
            os.umask(before)
        assert cache(tmp_path / "a" / "b" / "c").get(variant(1)) is not None

    def test_one_that_nobody_chose_is_refused_by_the_lookup(self, tmp_path):
        tmp_path.chmod(0o777)
        shared = cache(tmp_path, explicit=False)
        assert shared.stats().entries == 0
        for _ in range(2):
            with pytest.raises(InvalidRequest, match="others can write") as caught:
                shared.get_or_compile(variant(1), CountingCompiler())
            assert caught.value.field == "cache_dir"

    def test_a_prewarmed_folder_that_is_missing_is_told(self, tmp_path, caplog):
        cache(None, readonly_paths=[tmp_path / "absent"])
        assert f"prewarmed folder {tmp_path / 'absent'} does not exist" in caplog.text
        (tmp_path / "file").write_text("")
        self.refuse("not a folder", None, readonly_paths=[tmp_path / "file"])


class TestContexts:
    @pytest.mark.parametrize("device", ["mock", "emulated"])
    def test_a_folder_that_was_chosen_and_cannot_be_used_keeps_the_context_from_opening(self, tmp_path, device):
        (tmp_path / "file").write_text("")
        (tmp_path / "open").mkdir()
        (tmp_path / "open").chmod(0o777)
        for place in ("file", "file/below", "open"):
            for field, folders in (("cache_dir", tmp_path / place), ("prewarmed", (tmp_path / place,))):
                options = ga.ContextOptions(**{field: folders})
                with pytest.raises(InvalidRequest) as caught, ga.open_context(device, options):
                    pass
                assert caught.value.field == field

    def test_a_default_folder_that_cannot_be_used_is_refused_by_the_first_reply(self, tmp_path, monkeypatch):
        monkeypatch.setenv("GPU_ACTORS_CACHE_DIR", str(tmp_path))
        tmp_path.chmod(0o777)
        with ga.open_context("mock") as ctx:
            assert ctx.nvrtc.cache_stats().entries == 0
            with pytest.raises(InvalidRequest, match="others can write") as caught:
                ctx.nvrtc.compile(kernel()).result(30.0)
            assert caught.value.field == "cache_dir"
            assert ctx.health().ready

    def test_a_tilde_is_the_users_home(self, tmp_path, monkeypatch):
        monkeypatch.setenv("HOME", str(tmp_path))
        with ga.open_context("mock", ga.ContextOptions(cache_dir="~/cubins")) as ctx:
            ctx.nvrtc.compile(kernel()).result(30.0)
        assert len(entries(tmp_path / "cubins")) == 1
