"""A kernel that fails a small problem answers no request: the next family or none does, and events report it."""

from __future__ import annotations

import multiprocessing
import pickle
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from prometheus_client import CollectorRegistry, generate_latest
from support.service import eventually

import gpu_actors as ga
from gpu_actors.metrics import ContextCollector
from gpu_actors.qualification.experiment import Experiment
from gpu_actors.status import StatusBoard
from gpu_actors.testing import FaultPlan, check_output, replay

ARCH = "sm_80"
HALF = np.random.default_rng(5).standard_normal((1, 40, 2, 64)).astype(np.float16)
DOUBLE = HALF[..., :16].astype(np.float64)  # only forward_simple computes float64
pytestmark = [pytest.mark.timeout(180)]


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache folder with the kernels that these tests run, without verdicts."""
    folder = tmp_path_factory.mktemp("built")
    with opened(folder, qualify="off") as ctx:
        answer(ctx)
        answer(ctx, DOUBLE)
    with opened(folder, fault_plan=FaultPlan().wrong("forward_mma")) as ctx:
        answer(ctx)
    for file in [*folder.glob("*.verdict"), *folder.glob("*.npz")]:
        file.unlink()
    return folder


@pytest.fixture
def folder(built: Path, tmp_path: Path) -> Path:
    """A copy of the built cache folder."""
    return Path(shutil.copytree(built, tmp_path / "cache"))


class Seen:
    """The events of kernels that a context has emitted."""

    def __init__(self) -> None:
        self.events: list[Any] = []

    def __call__(self, event: Any) -> None:
        if event.name.startswith(("kernel.", "request.launched")):
            self.events.append(event)

    def of(self, name: str) -> list[tuple[str, bool]]:
        """(kernel, whether the verdict is an earlier one) of each event of this name."""
        return [(e.fields["kernel"], e.fields["kept"]) for e in self.events if e.name == name]

    @property
    def launched(self) -> list[str]:
        return [event.fields["kernel"] for event in self.events if event.name == "request.launched"]


def opened(folder: Path, seen: Seen | None = None, **options: Any) -> Any:
    given: dict[str, Any] = {"arch": ARCH, "qualify": "first-use", "cache_dir": folder, "on_event": seen, **options}
    return ga.open_context("emulated", ga.ContextOptions(**given))


def answer(ctx: ga.GpuContext, array: Any = HALF) -> None:
    """Make a request and check its answer."""
    result = ctx.flash_attn.forward(array, array, array, return_lse=True, timeout=120.0).result()
    check_output(result.out, result.lse, array, array, array)


def test_a_kernel_proves_itself_once_a_machine_and_its_verdict_is_one_file(folder: Path) -> None:
    first, second = Seen(), Seen()
    with opened(folder, first) as ctx:
        answer(ctx)
        answer(ctx)
        assert ctx.health().state == "ready"
    assert first.of("kernel.qualified") == [("forward_mma", False)]
    (verdict,) = folder.glob("*.verdict")
    before = verdict.read_bytes()
    with opened(folder, second) as ctx:
        answer(ctx)
    assert second.of("kernel.qualified") == [("forward_mma", True)]
    assert second.launched == ["forward_mma"]
    assert verdict.read_bytes() == before


def test_all_proves_again_in_each_context_and_off_proves_nothing(folder: Path) -> None:
    for qualify, proofs in (("first-use", [("forward_mma", False)]), ("all", [("forward_mma", False)]), ("off", [])):
        seen = Seen()
        with opened(folder, seen, qualify=qualify) as ctx:
            answer(ctx)
        assert seen.of("kernel.qualified") == proofs, qualify


def test_the_next_family_answers_for_a_kernel_that_is_wrong(folder: Path) -> None:
    seen = Seen()
    with opened(folder, seen, fault_plan=FaultPlan().wrong("forward_mma")) as ctx:
        for _ in range(3):
            answer(ctx)
        health, request = ctx.health(), ga.FlashForward(HALF, HALF, HALF, return_lse=True)
        explained = {verdict.family: verdict for verdict in ctx.flash_attn.explain(request).verdicts}
        assert ctx.flash_attn.inspect_key(request).kernel == "forward_wide"
    assert seen.launched == ["forward_wide"] * 3
    assert seen.of("kernel.quarantined") == [("forward_mma", False)]
    assert (health.state, health.ready, len(health.quarantined)) == ("degraded", True, 1)
    for told in ("forward_mma", "out is wrong in", "seqlen_q=137"):
        assert told in health.reason
        assert told in health.quarantined[0]
    assert "quarantined" in explained["forward_mma"].reason
    assert explained["forward_wide"].taken


def test_without_a_family_left_requests_get_a_typed_error(folder: Path) -> None:
    with opened(folder, fault_plan=FaultPlan().wrong("forward_simple", value=float("nan"))) as ctx:
        for _ in range(2):
            with pytest.raises(ga.Unqualified, match="forward_simple is quarantined") as caught:
                answer(ctx, DOUBLE)
        with pytest.raises(ga.Unqualified):
            ctx.flash_attn.inspect_key(ga.FlashForward(DOUBLE, DOUBLE, DOUBLE, return_lse=True))
        assert ctx.flash_attn.explain(ga.FlashForward(DOUBLE, DOUBLE, DOUBLE, return_lse=True)).key is None
        answer(ctx)  # other kernels are not affected
    error = pickle.loads(pickle.dumps(caught.value))
    assert (error.kernel, error.reason) == ("forward_simple", caught.value.reason)
    assert "nan" in error.reason
    assert error.problem.startswith("AttentionProblem(")
    assert Path(error.evidence).suffix == ".npz"


@pytest.mark.parametrize("kept", [True, False], ids=["kept", "lost"])
def test_a_negative_verdict_outlives_the_context(folder: Path, kept: bool) -> None:
    plan = FaultPlan().wrong("forward_mma", launch=1)  # the first launch alone; the next context has one too
    with opened(folder, fault_plan=plan) as ctx:
        answer(ctx)
    if not kept:
        for file in folder.glob("*.verdict"):
            file.unlink()
    seen = Seen()
    with opened(folder, seen, fault_plan=plan) as ctx:
        answer(ctx)
    assert seen.of("kernel.quarantined") == [("forward_mma", kept)]


def test_verdicts_of_faults_are_no_verdicts_of_the_machine(folder: Path) -> None:
    with opened(folder, fault_plan=FaultPlan().wrong("forward_mma")) as ctx:
        answer(ctx)
    seen = Seen()
    with opened(folder, seen) as ctx:
        answer(ctx)
    assert seen.of("kernel.qualified") == [("forward_mma", False)]


@pytest.mark.parametrize("damage", ["cut", "flipped", "another kind", "writable by others"])
def test_a_verdict_that_is_not_whole_is_proved_again(folder: Path, damage: str) -> None:
    with opened(folder) as ctx:
        answer(ctx)
    (file,) = folder.glob("*.verdict")
    whole = file.read_bytes()
    if damage == "writable by others":
        file.chmod(0o666)
    else:
        cut = {"cut": whole[:-9], "flipped": whole[:-9] + bytes([whole[-9] ^ 1]) + whole[-8:], "another kind": b"{}"}
        file.write_bytes(cut[damage])
    seen = Seen()
    with opened(folder, seen) as ctx:
        answer(ctx)
    assert seen.of("kernel.qualified") == [("forward_mma", False)]
    assert len(list(folder.glob("*.verdict"))) == 1
    assert len(list(folder.glob("*.verdict.corrupt"))) == 1


def test_a_hang_ends_by_the_limit_and_the_next_family_answers(folder: Path) -> None:
    seen = Seen()
    plan = FaultPlan().hang(kernel="forward_mma")
    with opened(folder, seen, fault_plan=plan, hang_timeout=3.0) as ctx:
        answer(ctx)
        assert "has not ended within 3 s" in ctx.health().reason
        assert ctx.health().generation == 1, "the context is not lost"
    assert seen.of("kernel.quarantined") == [("forward_mma", False)]
    assert seen.launched == ["forward_wide"]


def test_what_is_qualified_does_not_wait_for_a_proof(folder: Path) -> None:
    with opened(folder) as ctx:
        answer(ctx)
    # Another kernel hangs during its proof; the proved one is loaded and answers meanwhile.
    with opened(folder, fault_plan=FaultPlan().hang(kernel="forward_simple"), hang_timeout=8.0) as ctx:
        answer(ctx)
        slow = ctx.flash_attn.forward(DOUBLE, DOUBLE, DOUBLE, timeout=60.0)
        began = time.monotonic()
        for _ in range(5):
            answer(ctx)
        assert time.monotonic() - began < 4.0
        assert not slow.done()
        with pytest.raises(ga.Unqualified):
            slow.result()


def test_a_context_that_is_lost_in_a_proof_answers_typed_and_twice_in_a_row_quarantines(folder: Path) -> None:
    plan = FaultPlan().lose_context(kernel="forward_mma")
    for _ in range(2):
        with opened(folder, fault_plan=plan) as ctx:
            with pytest.raises(ga.ContextLost):
                answer(ctx)
            assert ctx.health().state == "failed"
    seen = Seen()
    with opened(folder, seen, fault_plan=plan) as ctx:
        answer(ctx)  # the kernel, which would lose the context, is not launched again
    assert seen.of("kernel.quarantined") == [("forward_mma", True)]


def test_bits_that_change_from_launch_to_launch_are_wrong(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launches = iter(range(100))
    launch = Experiment.launch

    def shaken(self: Experiment, *arguments: Any) -> dict[str, Any]:
        written = launch(self, *arguments)
        written["out"].reshape(-1).view(np.uint16)[0] ^= next(launches) % 2  # the lowest bit
        return written

    monkeypatch.setattr(Experiment, "launch", shaken)
    seen = Seen()
    with opened(folder, seen) as ctx, pytest.raises(ga.Unqualified):
        answer(ctx)
    assert all("other bits" in event.fields["reason"] for event in seen.events if event.name == "kernel.quarantined")


def test_the_evidence_replays_on_the_emulated_device(folder: Path) -> None:
    with opened(folder, fault_plan=FaultPlan().wrong("forward_mma").wrong("append")) as ctx:
        answer(ctx)
        with ctx.kv_cache(num_blocks=4, page_size=16, kv_heads=2, head_dim=64, dtype="float16") as cache:
            seq = cache.create().result()
            with pytest.raises(ga.Unqualified, match="append"):
                cache.append(seq, HALF[0], HALF[0], timeout=120.0).result()
    files = sorted(folder.glob("*.npz"))
    found = {replayed.kernel: replayed for replayed in map(replay, files)}
    assert found.keys() == {"forward_mma", "append"}
    for replayed in found.values():
        assert replayed.emulated == "", "the source is right, and only the fault was wrong"
        assert replayed.reason
        assert "agrees with the oracle" in str(replayed)
    np.savez(folder / "other.npz", a=np.zeros(1))
    with pytest.raises(ga.InvalidRequest, match="no evidence"):
        replay(folder / "other.npz")


def test_caches_and_gradients_have_next_families_too(folder: Path) -> None:
    plan = FaultPlan().wrong("decode_mma").wrong("backward_mma")
    seen = Seen()
    with opened(folder, seen, fault_plan=plan) as ctx:
        with ctx.kv_cache(num_blocks=8, page_size=16, kv_heads=2, head_dim=64, dtype="float16") as cache:
            seq = cache.create().result()
            for _ in range(2):
                out = cache.attend(HALF[:, :1], [seq], k=HALF[:, :20], v=HALF[:, :20], timeout=120.0).result().out
            keys = np.concatenate([HALF[:, :20]] * 2, axis=1)
        check_output(out, None, HALF[:, :1], keys, keys, causal=True)
        lengths = np.array([30], np.int32)
        paged = ctx.flash_attn.paged_forward(HALF[:, :1], HALF, HALF, cache_seqlens=lengths, timeout=120.0).result()
        check_output(paged.out, None, HALF[:, :1], HALF[:, :30], HALF[:, :30])
        forward = ctx.flash_attn.forward(HALF, HALF, HALF, return_lse=True, timeout=120.0).result()
        ctx.flash_attn.backward(HALF, HALF, HALF, HALF, forward.out, forward.lse, timeout=120.0).result()
    assert {kernel for kernel, _ in seen.of("kernel.quarantined")} == {"decode_mma", "backward_mma"}
    assert {"decode_simple", "append", "backward_simple"} <= {kernel for kernel, _ in seen.of("kernel.qualified")}


def test_requests_that_wait_for_one_proof_are_all_answered(folder: Path) -> None:
    with opened(folder, fault_plan=FaultPlan().wrong("forward_mma")) as ctx:
        replies = [ctx.flash_attn.forward(HALF, HALF, HALF, timeout=120.0) for _ in range(20)]
        outs = [reply.result().out for reply in replies]
    assert all(np.array_equal(outs[0], out) for out in outs)


def _prove(folder: str, plan: FaultPlan | None, barrier: Any, results: Any) -> None:
    seen = Seen()
    with opened(Path(folder), seen, fault_plan=plan) as ctx:
        barrier.wait(60.0)
        answer(ctx)
    results.put((seen.of("kernel.qualified"), seen.of("kernel.quarantined")))


@pytest.mark.parametrize("plan", [None, FaultPlan().wrong("forward_mma")], ids=["right", "wrong"])
def test_four_processes_at_once_prove_once(folder: Path, plan: FaultPlan | None) -> None:
    spawn = multiprocessing.get_context("spawn")
    barrier, results = spawn.Barrier(4), spawn.Queue()
    processes = [spawn.Process(target=_prove, args=(str(folder), plan, barrier, results)) for _ in range(4)]
    for process in processes:
        process.start()
    found = [results.get(timeout=150.0) for _ in processes]
    for process in processes:
        process.join(60.0)
    index, name = (0, "forward_mma") if plan is None else (1, "forward_mma")
    of_kernel = [kept for each in found for kernel, kept in each[index] if kernel == name]
    assert sorted(of_kernel) == [False, True, True, True]


def test_a_folder_that_cannot_be_written_costs_a_proof_a_context(folder: Path) -> None:
    folder.chmod(0o500)
    try:
        seen = Seen()
        with opened(folder, seen) as ctx:
            answer(ctx)
            answer(ctx)
    finally:
        folder.chmod(0o700)
    assert seen.of("kernel.qualified") == [("forward_mma", False)]


def test_the_mock_device_proves_what_it_compiles(folder: Path) -> None:
    """The mock device's oracle stands for the kernel, so that a program's tests can produce each outcome."""
    options: dict[str, Any] = {"arch": ARCH, "compile_on_mock": True, "qualify": "first-use", "cache_dir": folder}
    seen = Seen()
    plan = FaultPlan().wrong("forward_mma")
    with ga.open_context("mock", ga.ContextOptions(**options, fault_plan=plan, on_event=seen)) as ctx:
        result = ctx.flash_attn.forward(HALF, HALF, HALF, timeout=120.0).result()
        check_output(result.out, None, HALF, HALF, HALF)
    assert seen.of("kernel.quarantined") == [("forward_mma", False)]
    assert seen.of("kernel.qualified") == [("forward_wide", False)]


def test_health_metrics_and_the_page_say_so(folder: Path) -> None:
    board, registry = StatusBoard(), CollectorRegistry()
    with opened(folder, fault_plan=FaultPlan().wrong("forward_mma")) as ctx:
        board.watch(ctx)
        registry.register(ContextCollector(ctx))
        answer(ctx)
        text = generate_latest(registry).decode()
        eventually(lambda: any(item["name"] == "kernel.quarantined" for item in board.event_log.since(0).items))
        board.close()
    assert 'gpu_actors_quarantined_kernels{device="emulated"} 1.0' in text
    assert 'gpu_actors_kernel_proofs_total{outcome="qualified"} 1.0' in text
    assert 'gpu_actors_kernel_proofs_total{outcome="quarantined"} 1.0' in text
    assert "gpu_actors_proof_seconds_count 2.0" in text
    (item,) = [item for item in board.event_log.since(0).items if item["name"] == "kernel.quarantined"]
    assert item["level"] == "error"
    assert "out is wrong in" in item["fields"]["reason"]


def test_an_isolated_context_tells_what_its_process_has_found(folder: Path) -> None:
    options = ga.ContextOptions(
        arch=ARCH, qualify="first-use", cache_dir=folder, fault_plan=FaultPlan().wrong("forward_mma")
    )
    with ga.open_context("emulated", options, isolation="process") as ctx:
        answer(ctx)
        eventually(lambda: ctx.health().quarantined)
        health = ctx.health()
        assert (health.state, health.ready) == ("degraded", True)
        assert "forward_mma is quarantined" in health.reason
        assert ctx._children.cells["nvrtc"].shared.proofs.counts == {"qualified": 1, "quarantined": 1}


@pytest.mark.parametrize("value", ["yes", "First-use", 1, True])
def test_the_option_takes_three_words(value: Any) -> None:
    with pytest.raises(ga.InvalidRequest, match="qualify"):
        ga.ContextOptions(qualify=value)
    kinds = {kind: ga.ContextOptions().qualifies(kind) for kind in ("cuda", "emulated", "mock")}
    assert kinds == {"cuda": "first-use", "emulated": "off", "mock": "off"}


@pytest.mark.parametrize(
    "fault", [{"kernel": ""}, {"kernel": 3}, {"kernel": "a", "value": "b"}, {"kernel": "a", "value": True}]
)
def test_a_wrong_kernel_is_named_and_its_value_a_number(fault: dict[str, Any]) -> None:
    with pytest.raises(ga.InvalidRequest):
        FaultPlan().wrong(**fault)
