"""CubinCache on sound disks: keys, layers, one compile for many, size bound, offline, events."""

from __future__ import annotations

import logging
import os
import sysconfig
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
from support.cubins import ARCH, CountingCompiler, entries, fake_toolchain, kernel, run_child, variant
from support.service import eventually
from support.timing import below, median_seconds, yardsticks

from gpu_actors.compiling import cubin_cache
from gpu_actors.compiling import cubin_folder as cache_folder
from gpu_actors.compiling.compiler import Compiler
from gpu_actors.compiling.cubin_cache import CacheStats, CubinCache, default_cache_dir
from gpu_actors.compiling.toolchain import Toolchain
from gpu_actors.compiling.variant import Variant
from gpu_actors.errors import CompileError, InvalidRequest


def cache(folder, **options):
    return CubinCache(folder, **{"toolchain": fake_toolchain, **options})


class TestLayers:
    def test_a_variant_is_compiled_once_and_then_found_in_memory_and_on_disk(self, tmp_path):
        compile = CountingCompiler()
        first = cache(tmp_path / "c")
        assert first.get(variant()) is None
        cubin = first.get_or_compile(variant(), compile)
        assert first.get(variant()) is cubin
        assert first.get_or_compile(variant(), compile) is cubin
        second = cache(tmp_path / "c")
        assert second.get(variant()) == cubin
        assert len(compile.calls) == 1
        size = entries(tmp_path / "c")[0].stat().st_size
        assert first.stats() == CacheStats(hits=2, misses=2, compiles=1, entries=1, bytes=size)
        assert second.stats() == CacheStats(hits=1, entries=1, bytes=size)

    def test_what_is_stored_comes_back_whole(self, tmp_path):
        cubin = cache(tmp_path).get_or_compile(variant(), Compiler().compile)
        result = cache(tmp_path).get(variant())
        assert result == cubin
        assert result.resources["fill"].registers > 0
        assert result.log == cubin.log

    def test_equal_sources_under_other_names_share_an_entry(self, tmp_path):
        compile = CountingCompiler()
        shared = cache(tmp_path)
        shared.get_or_compile(variant(), compile)
        shared.get_or_compile(variant(name="/elsewhere/fill.cu"), compile)
        assert len(compile.calls) == 1

    def test_the_sources_own_architecture_counts(self, tmp_path):
        compile = CountingCompiler()
        cubin = cache(tmp_path).get_or_compile(Variant.of(kernel(arch=ARCH), None), compile)
        assert cubin.arch == ARCH
        with pytest.raises(InvalidRequest, match="is written for"):
            Variant.of(kernel(arch=ARCH), "sm_80")

    def test_without_a_folder_memory_serves(self):
        compile = CountingCompiler()
        memory = cache(None)
        memory.get_or_compile(variant(), compile)
        memory.get_or_compile(variant(), compile)
        assert memory.stats() == CacheStats(hits=1, misses=1, compiles=1, entries=1, bytes=1000)

    def test_memory_is_bounded_and_lets_the_longest_unused_go(self, tmp_path):
        compile = CountingCompiler(size=1000)
        memory = cache(None, max_memory_bytes=2500)
        for value in (1, 2):
            memory.get_or_compile(variant(value), compile)
        memory.get(variant(1))
        memory.get_or_compile(variant(3), compile)
        assert [memory.get(variant(value)) is not None for value in (1, 2, 3)] == [True, False, True]

    def test_peek_looks_at_memory_alone(self, tmp_path):
        cache(tmp_path).get_or_compile(variant(), CountingCompiler())
        shared = cache(tmp_path)
        assert shared.peek(variant()) is None
        result = shared.get(variant())
        assert shared.peek(variant()) is result
        assert shared.stats().misses == 0

    def test_readonly_folders_come_first_and_are_never_written(self, tmp_path):
        warmed, own = tmp_path / "warmed", tmp_path / "own"
        cache(warmed).get_or_compile(variant(1), CountingCompiler())
        before = {path.name: path.stat().st_ctime_ns for path in warmed.iterdir()}
        compile = CountingCompiler()
        shared = cache(own, readonly_paths=[tmp_path / "absent", warmed])
        shared.get_or_compile(variant(1), compile)
        shared.get_or_compile(variant(2), compile)
        assert [source.macros["VALUE"] for source in compile.calls] == ["2"]
        assert {path.name: path.stat().st_ctime_ns for path in warmed.iterdir()} == before
        assert len(entries(own)) == 1

    def test_the_default_folder_follows_the_environment(self, monkeypatch, tmp_path):
        monkeypatch.setenv("GPU_ACTORS_CACHE_DIR", str(tmp_path / "c"))
        assert default_cache_dir() == tmp_path / "c"
        monkeypatch.delenv("GPU_ACTORS_CACHE_DIR")
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
        assert default_cache_dir() == tmp_path / "xdg" / "gpu-actors" / "cubins"

    def test_a_new_folder_is_its_owners_alone(self, tmp_path):
        cache(tmp_path / "a" / "b").get_or_compile(variant(), CountingCompiler())
        assert (tmp_path / "a" / "b").stat().st_mode & 0o777 == 0o700
        assert entries(tmp_path / "a" / "b")[0].stat().st_mode & 0o777 == 0o600

    def test_a_bound_that_holds_nothing_is_refused(self, tmp_path):
        with pytest.raises(InvalidRequest) as caught:
            cache(tmp_path, max_bytes=0)
        assert caught.value.field == "max_bytes"


class TestSingleFlight:
    def test_many_threads_share_one_compile(self, tmp_path):
        asking = []
        compile = CountingCompiler(wait=lambda: eventually(lambda: len(asking) == 16))
        shared = cache(tmp_path)

        def ask(number):
            asking.append(number)
            return shared.get_or_compile(variant(), compile)

        with ThreadPoolExecutor(16) as pool:
            result = list(pool.map(ask, range(16)))
        assert len(compile.calls) == 1
        assert all(cubin is result[0] for cubin in result)
        stats = shared.stats()
        assert (stats.hits + stats.misses, stats.compiles) == (16, 1)

    def test_different_variants_do_not_wait_for_each_other(self, tmp_path):
        barrier = threading.Barrier(2, timeout=30)
        compile = CountingCompiler()

        def meeting(source, arch):
            barrier.wait()
            return compile(source, arch)

        shared = cache(tmp_path)
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(lambda value: shared.get_or_compile(variant(value), meeting), (1, 2)))
        assert len(compile.calls) == 2

    def test_a_refusal_reaches_every_waiter_and_the_next_caller_tries_again(self, tmp_path, monkeypatch):
        calls, joined = [], []

        class Flight(Future):
            def result(self, timeout=None):
                joined.append(1)
                return super().result(timeout)

        def refuse(source, arch):
            calls.append(1)
            eventually(lambda: len(joined) == 3)
            raise CompileError("no", log="the log")

        monkeypatch.setattr(cubin_cache, "Future", Flight)
        shared = cache(tmp_path)

        def ask(_):
            with pytest.raises(CompileError) as caught:
                shared.get_or_compile(variant(), refuse)
            return caught.value.log

        with ThreadPoolExecutor(4) as pool:
            assert list(pool.map(ask, range(4))) == ["the log"] * 4
        assert len(calls) == 1
        assert shared.get_or_compile(variant(), CountingCompiler()) is not None
        assert shared.stats().misses == 5

    def test_a_waiter_takes_over_from_a_leader_that_is_interrupted(self, tmp_path):
        shared, leading = cache(tmp_path), threading.Event()
        key, compile = shared.key(variant()), CountingCompiler()

        def interrupted(source, arch):
            leading.set()
            eventually(lambda: shared._flights[key]._condition._waiters)  # type: ignore[attr-defined]
            raise KeyboardInterrupt

        def lead():
            with pytest.raises(KeyboardInterrupt):
                shared.get_or_compile(variant(), interrupted)

        def follow():
            leading.wait(10)
            return shared.get_or_compile(variant(), compile)

        with ThreadPoolExecutor(2) as pool:
            leader, follower = pool.submit(lead), pool.submit(follow)
            assert follower.result(timeout=30) == shared.get(variant())
            leader.result(timeout=30)
        assert len(compile.calls) == 1


class TestSizeBound:
    def test_the_longest_unused_entries_go_and_the_bound_holds(self, tmp_path):
        compile = CountingCompiler(size=1000)
        cache(tmp_path).get_or_compile(variant(0), compile)
        entry_size = entries(tmp_path)[0].stat().st_size
        bounded = cache(tmp_path, max_bytes=3 * entry_size + 10)
        for value in (1, 2):
            bounded.get_or_compile(variant(value), compile)
        hour = 3600 * 10**9
        for age, value in ((3, 0), (2, 1), (1, 2)):  # read at different times, long after they were written
            path = tmp_path / bounded.key(variant(value)).file_name
            os.utime(path, ns=(time.time_ns() - age * hour, time.time_ns() - 9 * hour))
        assert cache(tmp_path).get(variant(0)) is not None  # used again: 1 is now the oldest
        bounded.get_or_compile(variant(3), compile)
        fresh = cache(tmp_path)
        assert [fresh.get(variant(value)) is not None for value in range(4)] == [True, False, True, True]
        assert bounded.stats().evicted == 1
        assert fresh.stats().bytes <= 3 * entry_size + 10
        assert cache(tmp_path, max_bytes=2 * entry_size).stats().entries == 2  # enforced as it opens

    def test_a_reading_is_dated_by_hand_since_disks_may_keep_no_access_times(self, tmp_path, monkeypatch):
        cache(tmp_path).get_or_compile(variant(), CountingCompiler())
        utime = os.utime
        dated = []

        def note(handle, *, ns):
            dated.append(ns[0])
            utime(handle, ns=(10**9, ns[1]))

        monkeypatch.setattr(cache_folder.os, "utime", note)
        before = time.time_ns()
        cache(tmp_path).get(variant())
        assert len(dated) == 1
        assert before <= dated[0] <= time.time_ns()
        assert entries(tmp_path)[0].stat().st_atime == 1

    def test_the_entry_just_made_stays_even_if_clocks_disagree(self, tmp_path):
        compile = CountingCompiler(size=1000)
        cache(tmp_path).get_or_compile(variant(0), compile)
        ahead = entries(tmp_path)[0]
        os.utime(ahead, (time.time() + 1000, time.time() + 1000))
        cache(tmp_path, max_bytes=ahead.stat().st_size + 10).get_or_compile(variant(1), compile)
        fresh = cache(tmp_path)
        assert [fresh.get(variant(value)) is not None for value in (0, 1)] == [False, True]

    def test_an_entry_larger_than_the_bound_stays_in_memory(self, tmp_path, caplog):
        bounded = cache(tmp_path, max_bytes=500)
        cubin = bounded.get_or_compile(variant(), CountingCompiler(size=1000))
        assert bounded.get(variant()) is cubin
        assert bounded.stats().entries == 0
        assert "more than the whole cubin cache may hold" in caplog.text

    def test_readers_and_evicting_writers_do_not_disturb_each_other(self, tmp_path):
        compile = CountingCompiler(size=2000)
        stop = time.monotonic() + 0.3

        def churn(worker):
            rounds = 0
            while rounds < 20 or time.monotonic() < stop:
                value = (worker + rounds) % 6
                result = cache(tmp_path, max_bytes=8000).get_or_compile(variant(value), compile)
                assert result.data.startswith(repr(({"VALUE": str(value)}, ARCH)).encode())
                rounds += 1

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(churn, range(4)))
        fresh = cache(tmp_path, max_bytes=8000)
        assert fresh.stats().bytes <= 8000
        assert list(tmp_path.glob("*.corrupt")) == []


class TestWithoutACompiler:
    def test_offline_finds_what_is_there_and_names_what_is_not(self, tmp_path):
        cache(tmp_path).get_or_compile(variant(1), CountingCompiler())
        offline = cache(tmp_path, offline=True)
        compile = CountingCompiler()
        assert offline.get_or_compile(variant(1), compile)
        with pytest.raises(CompileError, match=rf"'fill\.cu' for sm_90a \(macros VALUE=2\).*{tmp_path}"):
            offline.get_or_compile(variant(2), compile)
        assert compile.calls == []

    def test_offline_says_when_the_variant_is_there_from_another_compiler(self, tmp_path):
        other = cache(tmp_path, toolchain=lambda load=False: Toolchain("13.0.88", ()))
        other.get_or_compile(variant(), CountingCompiler())
        with pytest.raises(CompileError, match=r"built by NVRTC 13\.0\.88, not the one installed"):
            cache(tmp_path, offline=True).get_or_compile(variant(), CountingCompiler())

    def test_a_cubin_is_kept_under_the_version_of_the_compiler_that_was_loaded(self, tmp_path):
        """Packages promise 13.4.92, and CuPy loads 13.2."""

        class Promised:
            loads = 0

            def __call__(self, *, load=False):
                self.loads += load
                return Toolchain("13.2" if self.loads else "13.4.92", ())

        compile = CountingCompiler()
        for _ in range(2):  # the second stands for the next process
            shared = cache(tmp_path, toolchain=Promised())
            assert shared.get_or_compile(variant(1), compile)
            assert shared.peek(variant(1)) is None, "its new key was not asked for yet"
            assert shared.get(variant(1)) == shared.peek(variant(1))
        assert len(compile.calls) == 1
        loaded = cache(tmp_path, toolchain=lambda load=False: Toolchain("13.2", ()))
        promised = cache(tmp_path, toolchain=lambda load=False: Toolchain("13.4.92", ()))
        assert loaded.get(variant(1)) is not None
        assert promised.get(variant(1)) is None

    def test_a_warm_start_works_where_no_cupy_and_no_toolkit_are_installed(self, tmp_path):
        warmed = tmp_path / "warmed"
        source = "#include <cuda_fp16.h>\n" + kernel().source
        CubinCache(warmed).get_or_compile(variant(source=source), Compiler().compile)
        site = tmp_path / "site"
        site.mkdir()
        for package in Path(sysconfig.get_path("purelib")).iterdir():
            if not package.name.lower().startswith(("cupy", "nvidia", "cuda", "gpu_actors")):
                (site / package.name).symlink_to(package)
        code = (
            "import sys; sys.path.append(sys.argv[2])\n"
            "from support import cubins as s; from gpu_actors.compiling.cubin_cache import CubinCache\n"
            "from gpu_actors.compiling.compiler import Compiler; from gpu_actors.errors import CompileError\n"
            "from gpu_actors.compiling.toolchain import find_toolchain\n"
            "shared = CubinCache(None, readonly_paths=[sys.argv[1]])\n"
            "text = '#include <cuda_fp16.h>\\n' + s.KERNEL\n"
            "found = shared.get_or_compile(s.variant(source=text), None)\n"
            "print(find_toolchain(), len(found.data) > 1000, found.resources['fill'].registers > 0)\n"
            "try: shared.get_or_compile(s.variant(7, source=text), Compiler().compile)\n"
            "except CompileError as error: print('pip install' in str(error))\n"
        )
        assert run_child(code, warmed, site, flags=("-S",)).split() == ["None", "True", "True", "True"]


class TestEvents:
    def test_a_listener_sees_misses_compiles_and_hits_in_order(self, tmp_path):
        seen = []
        shared = cache(tmp_path, on_event=lambda name, fields: seen.append((name, fields)))
        shared.get_or_compile(variant(), CountingCompiler())
        shared.get(variant())
        assert [name for name, _ in seen] == ["cache.miss", "compile.started", "compile.completed", "cache.hit"]
        assert {fields["variant"] for _, fields in seen} == {f"fill.cu:{shared.key(variant()).build[:12]}"}
        assert seen[2][1]["error"] is None
        assert seen[2][1]["seconds"] >= 0
        assert seen[3][1]["layer"] == "memory"

        def refuse(source, arch):
            raise CompileError("no such thing")

        with pytest.raises(CompileError):
            shared.get_or_compile(variant(2), refuse)
        assert (seen[-1][0], seen[-1][1]["error"]) == ("compile.completed", "no such thing")

    def test_a_listener_that_raises_costs_no_kernel(self, tmp_path, caplog):
        def broken(name, fields):
            raise RuntimeError(name)

        assert cache(tmp_path, on_event=broken).get_or_compile(variant(), CountingCompiler())
        assert "on_event raised at compile.started" in caplog.text

    def test_by_default_a_log_line_stands_before_and_after_a_compile(self, tmp_path, caplog):
        with caplog.at_level(logging.INFO, "gpu_actors"):
            cache(tmp_path).get_or_compile(variant(), CountingCompiler())
        assert [record.event for record in caplog.records] == ["compile.started", "compile.completed"]
        assert caplog.records[1].fields["seconds"] >= 0


@pytest.mark.perf
def test_a_warm_lookup_takes_less_than_its_budget(tmp_path):
    """0.22 yardsticks (50 us) from memory and, once the key is known, 0.9 (0.2 ms) from disk."""
    wanted = variant(source="#include <cuda_bf16.h>\n" + kernel().source)
    shared = CubinCache(tmp_path)
    cubin = shared.get_or_compile(wanted, Compiler().compile)

    def from_disk():
        shared._memory.clear()
        return shared.get(wanted)

    def from_memory():
        return shared.get(wanted)

    for limit, look in ((0.22, from_memory), (0.9, from_disk)):
        assert look() == cubin
        below(limit, lambda look=look: yardsticks(median_seconds(look)))
