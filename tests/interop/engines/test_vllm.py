"""The door for vLLM against a stand-in for its interface: batches over pages, compared with torch's attention."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from fakes import vllm
from support.service import REPOSITORY

import gpu_actors as ga

torch = pytest.importorskip("torch", reason="an engine's tensors are torch's")
engines = pytest.importorskip("support.engines")

HEADS, KV_HEADS, DIM, BLOCK, BLOCKS = 4, 2, 16, 4, 24
H100 = (9, 0)
# Physical orders of (blocks, heads, rows, content), as in vLLM's KVCacheLayout.
LAYOUTS = {"LBHNC": (0, 1, 2, 3), "LBNHC": (0, 2, 1, 3)}


@pytest.fixture(scope="module")
def door() -> Iterator[Any]:
    with vllm.installed():
        yield importlib.import_module("gpu_actors.interop.vllm")


class Engine:
    """One layer of vLLM: its pages, and its calls for each batch."""

    def __init__(self, door: Any, layout: str = "LBNHC", dtype: Any = None, **options: Any) -> None:
        backend = door.VllmBackend
        self.dtype = dtype or torch.float32
        self.impl = backend.get_impl_cls()(HEADS, DIM, 0.3, KV_HEADS, **options)
        self.builder = backend.get_builder_cls()(None, ["layer"], None, torch.device("cpu"))
        order = LAYOUTS[layout]
        shape = (BLOCKS, KV_HEADS, BLOCK, 2 * DIM)
        physical = torch.full([shape[axis] for axis in order], torch.nan, dtype=self.dtype)
        self.kv_cache = physical.permute(*(order.index(axis) for axis in range(4)))
        self.blocks = engines.interleaved(BLOCKS)

    def run(self, batch: Any, padding: int = 0, **common: Any) -> Any:
        """Write a batch's keys, then return its output. padding: the number of rows that belong to no sequence."""
        table = batch.block_table(self.blocks, BLOCK)
        slots = torch.tensor(batch.slots(table, BLOCK) + [-1] * padding)
        described = vllm.CommonAttentionMetadata(
            query_start_loc=batch.cu_seqlens_q,
            query_start_loc_cpu=batch.cu_seqlens_q,
            seq_lens=batch.seq_lens,
            num_reqs=len(batch.rows),
            num_actual_tokens=len(slots),
            max_query_len=max(batch.rows),
            max_seq_len=int(batch.seq_lens.max()),
            block_table_tensor=table,
            slot_mapping=slots,
            **common,
        )
        q, k, v = (torch.nn.functional.pad(x, (0, 0, 0, 0, 0, padding)) for x in (batch.q, batch.k, batch.v))
        out = torch.full_like(q, 7.0)
        metadata = self.builder.build(0, described)
        self.impl.do_kv_cache_update(None, k, v, self.kv_cache, slots)
        found = self.impl.forward(None, q, k, v, self.kv_cache, metadata, out)
        assert found is out
        assert (out[len(out) - padding :] == 7).all()
        return out[: len(out) - padding]


def batches(dtype: Any, rows: Sequence[Sequence[int]] = ((5, 9, 2), (1, 1, 1), (1, 4, 1))) -> list[Any]:
    """Prompts, then a token of each sequence, then a chunk beside two tokens."""
    made: list[Any] = engines.Batch.successive(rows, HEADS, KV_HEADS, DIM, dtype)
    return made


def compare(engine: Engine, dtype: Any, **options: Any) -> None:
    for batch in batches(dtype):
        tolerance = 1e-5 if dtype == torch.float32 else 4e-3
        found = engine.run(batch, padding=2)
        torch.testing.assert_close(
            found.double(), engines.expected(batch, 0.3, **options), rtol=tolerance, atol=tolerance
        )


@pytest.mark.parametrize("layout", LAYOUTS)
def test_prompts_and_tokens_get_the_attention_of_torch(ctx: ga.GpuContext, door: Any, layout: str) -> None:
    before = ctx.stats()["flash_attn"].completed
    compare(Engine(door, layout, torch.float16), torch.float16)
    assert ctx.stats()["flash_attn"].completed == before + 3


OPTIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "window": ({"sliding_window": 3}, {"reach": 2}),
    "softcap": ({"logits_soft_cap": 2.0}, {"softcap": 2.0}),
    "alibi": ({"alibi_slopes": [0.5, 0.25, 0.1, 0.0]}, {"slopes": [0.5, 0.25, 0.1, 0.0]}),
    "sinks": ({"sinks": [0.5, -1.0, 2.0, 0.0]}, {"sinks": [0.5, -1.0, 2.0, 0.0]}),
}


@pytest.mark.parametrize("option", OPTIONS)
def test_options_of_a_layer(mock: ga.GpuContext, door: Any, option: str) -> None:
    given, meant = OPTIONS[option]
    if "sinks" in given:
        given = {"sinks": torch.tensor(given["sinks"])}
    compare(Engine(door, **given), torch.float32, **meant)


def test_the_engines_own_call_leaves_the_context_that_a_program_gave(mock: ga.GpuContext, door: Any) -> None:
    door.register()
    Engine(door).run(batches(torch.float32)[0])
    assert mock.stats()["flash_attn"].completed == 1


def test_memory_is_measured_without_pages(door: Any) -> None:
    engine = Engine(door)
    out = torch.full((3, HEADS, DIM), 7.0)
    assert not engine.impl.forward(None, out, out, out, torch.empty(0), None, out.clone()).any()


def test_vllm_finds_the_backend_by_its_name(door: Any) -> None:
    door.register()
    path = vllm.OVERRIDES[vllm.AttentionBackendEnum.CUSTOM]
    module, _, name = path.rpartition(".")
    backend = getattr(importlib.import_module(module), name)
    assert backend is door.VllmBackend
    assert vllm.AttentionBackendEnum[backend.get_name()] is vllm.AttentionBackendEnum.CUSTOM


@pytest.mark.parametrize("group", ["vllm.general_plugins", "sglang.srt.plugins"])
def test_the_package_names_its_entry_point(group: str) -> None:
    import tomllib

    project = tomllib.loads(Path(REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    module, function = project["entry-points"][group]["gpu_actors"].split(":")
    assert (Path(REPOSITORY) / f"{module.replace('.', '/')}.py").is_file()
    assert function == "register"


def test_a_configuration_is_judged_in_the_words_of_the_kernels(door: Any) -> None:
    def reasons(**changed: Any) -> list[str]:
        usual = {"head_size": 128, "dtype": torch.bfloat16, "device_capability": H100}
        found: list[str] = door.VllmBackend.validate_configuration(**usual | changed)
        return found

    assert reasons() == reasons(has_sink=True) == reasons(has_sliding_window=True, head_size=80) == []
    assert reasons(device_capability=(8, 0), dtype=torch.float16, block_size=48, head_size=512) == []
    assert reasons(use_mla=True) == ["MLA not supported"]
    assert reasons(kv_cache_dtype="fp8")[0] == "kv_cache_dtype not supported"
    assert "holds q's dtype (bfloat16)" in reasons(kv_cache_dtype="float16")[0]
    assert "head dims from 1 to 512" in reasons(head_size=576)[1]
    assert "compute capability 8.0 (Ampere) and newer" in reasons(device_capability=(7, 5))[0]


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"attn_type": vllm.AttentionType.ENCODER_DECODER}, "attn_type"),
        ({"kv_cache_dtype": "fp8_e4m3"}, "kv_cache_dtype"),
        ({"use_alibi_sqrt": True}, "use_alibi_sqrt"),
        ({"chunk_lookback": 2}, "chunk_lookback"),
        ({"chunk_lookback": 0}, "chunk_lookback"),
        ({"scores_mask": torch.ones(2)}, "scores_mask"),
    ],
    ids=str,
)
def test_a_layer_that_no_request_states_is_refused(door: Any, options: dict[str, Any], field: str) -> None:
    with pytest.raises(ga.Unsupported) as refused:
        Engine(door, **options)
    assert refused.value.field == field


def test_options_that_are_not_used_are_taken(door: Any) -> None:
    Engine(door, use_alibi_sqrt=False, chunk_lookback=-1)


def test_batches_and_outputs_that_no_request_states_are_refused(mock: ga.GpuContext, door: Any) -> None:
    engine, batch = Engine(door), batches(torch.float32)[0]
    with pytest.raises(ga.Unsupported, match="causal"):
        engine.run(batch, causal=False)
    with pytest.raises(ga.Unsupported, match="output_scale"):
        engine.impl.forward(None, batch.q, batch.k, batch.v, engine.kv_cache, None, batch.q, torch.ones(1))


def test_tensors_on_the_host_need_a_given_context(door: Any) -> None:
    with pytest.raises(ga.Unsupported, match=r"device='cpu'.*register\(\)"):
        Engine(door).run(batches(torch.float32)[0])
    with pytest.raises(ga.InvalidRequest, match="context"):
        door.register("mock")


async def test_the_loop_of_a_program_is_not_blocked(mock: ga.GpuContext, door: Any) -> None:
    before = mock.stats()["flash_attn"].submitted
    with pytest.raises(ga.WouldBlock, match="another thread"):
        Engine(door).run(batches(torch.float32)[0])
    assert mock.stats()["flash_attn"].submitted == before
