"""Steps, prepared requests and captured graphs beside a quarantined kernel: they are right or do not begin."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from emulated.caller_streams import HEADS_Q, LAYERS, Graphs, program
from emulated.memory import host_view

import gpu_actors as ga
from gpu_actors.qualification.experiment import Experiment
from gpu_actors.testing import FaultPlan, check_output

pytestmark = [pytest.mark.timeout(180)]
RNG = np.random.default_rng(7)
HEADS, DIM, PAGE = 2, 64, 16


def rows(*shape: int, dtype: str = "float16") -> Any:
    return RNG.standard_normal(shape).astype(dtype)


@contextmanager
def opened(folder: Path, plan: FaultPlan | None = None, **options: Any) -> Iterator[ga.GpuContext]:
    given: dict[str, Any] = {"arch": "sm_80", "qualify": "all", "cache_dir": folder, "fault_plan": plan, **options}
    with ga.open_context("emulated", ga.ContextOptions(**given)) as ctx:
        yield ctx


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache folder. Each context proves its kernels anew."""
    return tmp_path_factory.mktemp("built")


class Layers:
    """A cache of layers, a sequence in it, and the sequence's rows."""

    def __init__(self, cache: ga.KvCache, rows_before: int) -> None:
        self.cache = cache
        self.seq = self.cache.create().result(60)
        self.held = [rows(LAYERS, 0, HEADS, DIM)] * 2
        if rows_before:
            new = [rows(LAYERS, rows_before, HEADS, DIM) for _ in "kv"]
            self.cache.append(self.seq, *new, timeout=120.0).result()
            self.held = new

    def begin(self) -> ga.KvStep:
        return self.cache.step([self.seq], heads_q=2 * HEADS, timeout=120.0).result()

    def attend(self, step: ga.KvStep, layers: Any = range(LAYERS)) -> None:
        """Run layers of a step and check their outputs."""
        if len(step.lengths) and self.held[0].shape[1] < step.lengths[0]:
            new = [rows(LAYERS, 1, HEADS, DIM) for _ in "kv"]
            self.held = [np.concatenate(pair, axis=1) for pair in zip(self.held, new, strict=True)]
        for layer in layers:
            q, (k, v) = rows(1, 1, 2 * HEADS, DIM), (side[layer][None] for side in self.held)
            check_output(step.attend(layer, q, k[:, -1:], v[:, -1:]), None, q, k, v)


@contextmanager
def layers_of(ctx: ga.GpuContext, rows_before: int = 20) -> Iterator[Layers]:
    spec: dict[str, Any] = {"num_blocks": 8, "page_size": PAGE, "kv_heads": HEADS, "head_dim": DIM}
    with ctx.kv_cache(**spec, dtype="float16", layers=LAYERS) as cache:
        yield Layers(cache, rows_before)


def quarantined(ctx: ga.GpuContext) -> set[str]:
    return {sentence.split()[0] for sentence in ctx.health().quarantined}


def test_the_next_family_answers_the_layers_of_a_step(folder: Path) -> None:
    with opened(folder, FaultPlan().wrong("decode_mma")) as ctx, layers_of(ctx) as layers:
        for length in (21, 22):
            with layers.begin() as step:
                layers.attend(step)
            assert layers.cache.length(layers.seq) == length
        assert quarantined(ctx) == {"decode_mma"}


def test_a_step_that_no_kernel_answers_is_not_begun_and_leaves_no_trace(folder: Path) -> None:
    with opened(folder, FaultPlan().wrong("decode_mma").wrong("decode_simple")) as ctx, layers_of(ctx) as layers:
        free = layers.cache.stats().free_blocks
        for _ in range(2):
            with pytest.raises(ga.Unqualified):
                layers.begin()
        assert (layers.cache.length(layers.seq), layers.cache.stats().free_blocks) == (20, free)
        layers.cache.append(layers.seq, *(rows(LAYERS, 1, HEADS, DIM) for _ in "kv"), timeout=60.0).result()


def test_a_step_whose_rows_cannot_be_appended_is_not_begun(folder: Path) -> None:
    with opened(folder, FaultPlan().wrong("append")) as ctx, layers_of(ctx, rows_before=0) as layers:
        with pytest.raises(ga.Unqualified, match="append"):
            layers.begin()
        assert layers.cache.length(layers.seq) == 0


def test_a_quarantine_between_two_layers_leaves_the_step_as_it_is(folder: Path) -> None:
    with opened(folder, FaultPlan().wrong("decode_plan")) as ctx, layers_of(ctx) as layers:
        with layers.begin() as step:
            layers.attend(step, [0])
            assert quarantined(ctx) == set()
            q, k, lengths = rows(1, 1, 4, DIM), rows(1, 40, HEADS, DIM), np.array([30], np.int32)
            padded = {"cache_seqlens": lengths, "cache_leftpad": np.array([4], np.int32)}
            out = ctx.flash_attn.paged_forward(q, k, k, **padded, timeout=120.0).result().out
            check_output(out, None, q, k[:, 4:30], k[:, 4:30])
            assert quarantined(ctx) == {"decode_plan", "decode_mma"}, "those that split padded rows"
            layers.attend(step, range(1, LAYERS))
        assert layers.cache.length(layers.seq) == 21
        with layers.begin() as step:
            layers.attend(step)
        assert layers.cache.length(layers.seq) == 22


def test_the_next_family_answers_a_prepared_request(folder: Path) -> None:
    q = k = rows(1, 40, HEADS, DIM)
    with opened(folder, FaultPlan().wrong("forward_mma")) as ctx:
        prepared = ctx.flash_attn.prepare(ga.FlashForward(q, k, k), timeout=120.0).result()
        assert "forward_mma" not in repr(prepared)
        for _ in range(2):
            check_output(prepared.run(q, k, k).out, None, q, k, k)
        assert quarantined(ctx) == {"forward_mma"}


def test_a_request_that_no_kernel_answers_is_not_prepared(folder: Path) -> None:
    double = rows(1, 40, 2, 16, dtype="float64")
    with opened(folder, FaultPlan().wrong("forward_simple")) as ctx:
        for _ in range(2):
            with pytest.raises(ga.Unqualified, match="forward_simple"):
                ctx.flash_attn.prepare(ga.FlashForward(double, double, double), timeout=120.0).result()


def test_a_quarantine_between_prepare_and_run_leaves_what_was_prepared_as_it_is(folder: Path) -> None:
    q, k = rows(2, 1, 4, DIM), rows(2, 40, HEADS, DIM)
    lengths = np.array([20, 30], np.int32)
    request = ga.PagedForward(q=q, k_cache=k, v_cache=k, cache_seqlens=lengths)
    with opened(folder, FaultPlan().wrong("decode_plan").wrong("forward_mma")) as ctx:
        prepared = ctx.flash_attn.prepare(request, timeout=120.0).result()
        dense = rows(1, 40, HEADS, DIM)
        out = ctx.flash_attn.forward(dense, dense, dense, timeout=120.0).result().out
        check_output(out, None, dense, dense, dense)
        padded = {"cache_seqlens": lengths, "cache_leftpad": np.array([3, 5], np.int32)}
        ctx.flash_attn.paged_forward(q, k, k, **padded, timeout=120.0).result()
        assert quarantined(ctx) == {"decode_plan", "decode_mma", "forward_mma"}
        answer = prepared.run(q, k, k).out
        for index, length in enumerate(lengths):
            keys = k[index : index + 1, :length]
            check_output(answer[index : index + 1], None, q[index : index + 1], keys, keys)


def test_a_captured_graph_has_the_next_family_and_outlives_later_quarantines(monkeypatch: pytest.MonkeyPatch) -> None:
    launch, wrong = Experiment.launch, {"decode_mma"}

    def launched(self: Experiment, *arguments: Any) -> dict[str, Any]:
        written = launch(self, *arguments)
        if self.variants[-1].kernel in wrong or (self.key is not None and self.key.kernel in wrong):
            next(iter(written.values()))[...] = 0
        return written

    monkeypatch.setattr(Experiment, "launch", launched)
    with program("late", 3, ga.ContextOptions(qualify="all")) as made:
        graphs = Graphs(made)
        captured, *answer = graphs.capture()
        answers = [answer, list(graphs.replay(captured, made.seqs, made.twins, made.streams[0]))]
        assert quarantined(made.context) == {"decode_mma"}
        wrong.add("forward_mma")
        dense = rows(1, 8, HEADS_Q, DIM)
        made.context.flash_attn.forward(dense, dense, dense, timeout=120.0).result()
        assert quarantined(made.context) == {"decode_mma", "forward_mma"}
        answers.append(list(graphs.replay(captured, made.seqs, made.twins, made.streams[1])))
        made.finish()
        for outs, wanted in answers:
            for out, want in zip(outs, wanted, strict=True):
                np.testing.assert_array_equal(host_view(out), want)
