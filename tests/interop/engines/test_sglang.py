"""The door for SGLang against a stand-in for its interface: batches over pages, compared with torch's attention."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from fakes import sglang

import gpu_actors as ga

torch = pytest.importorskip("torch", reason="an engine's tensors are torch's")
engines = pytest.importorskip("support.engines")

HEADS, KV_HEADS, DIM, SLOTS = 4, 2, 16, 96


@pytest.fixture(scope="module")
def door() -> Iterator[Any]:
    with sglang.installed():
        yield importlib.import_module("gpu_actors.interop.sglang")


class Engine:
    """One layer of SGLang: its pool, the slots of its requests, and its calls for each batch."""

    def __init__(self, page_size: int = 1, dtype: Any = None, **options: Any) -> None:
        dtype = dtype or torch.float32
        # A page more than SLOTS: the first page takes rows that belong to no request.
        rows = [torch.full((SLOTS + page_size, KV_HEADS, DIM), torch.nan, dtype=dtype) for _ in range(2)]
        self.pool = sglang.MHATokenToKVPool([rows[0]], [rows[1]])
        self.page_size = page_size
        self.requests = torch.zeros(8, 40, dtype=torch.int32)
        self.runner = SimpleNamespace(
            token_to_kv_pool=self.pool,
            req_to_token_pool=SimpleNamespace(req_to_token=self.requests),
            use_mla_backend=False,
            dtype=dtype,
            page_size=page_size,
        )
        self.layer = sglang.RadixAttention(HEADS, DIM, KV_HEADS, scaling=0.3, **options)
        self.backend: Any = None

    def run(self, batch: Any, mode: Any, *, sinks: Any = None, **fields: Any) -> Any:
        """The output of a batch, (rows, heads, dim)."""
        if self.backend is None:
            self.backend = sglang.ATTENTION_BACKENDS["gpu_actors"](self.runner)
        # A request's row in the table differs from its number.
        places = torch.tensor([6, 1, 3])
        table = batch.block_table(engines.interleaved(SLOTS // self.page_size + 1), self.page_size)
        for request, blocks, length in zip(places, table, batch.seq_lens, strict=True):
            for place in range(int(length)):
                slot = blocks[place // self.page_size] * self.page_size + place % self.page_size
                self.requests[request, place] = slot
        described = {
            "forward_mode": mode,
            "req_pool_indices": places,
            "seq_lens": batch.seq_lens.long(),
            "seq_lens_cpu": batch.seq_lens.long(),
            "out_cache_loc": torch.tensor(batch.slots(table, self.page_size)),
            "extend_seq_lens": torch.tensor(batch.rows, dtype=torch.int32),
            "extend_seq_lens_cpu": batch.rows,
            "encoder_lens": None,
            "spec_info": None,
        }
        if mode == sglang.ForwardMode.DECODE:
            described |= {"extend_seq_lens": None, "extend_seq_lens_cpu": None}
        forward_batch = SimpleNamespace(**described | fields)
        self.backend.init_forward_metadata(forward_batch)
        options = {} if sinks is None else {"sinks": sinks}
        q = batch.q.reshape(len(batch.q), -1)  # the shape in which SGLang's models pass it
        out = self.backend.forward(q, batch.k, batch.v, self.layer, forward_batch, **options)
        assert out.shape == q.shape
        return out.reshape(batch.q.shape)


def batches(dtype: Any = None) -> list[tuple[Any, Any]]:
    """Prompts, then a token of each request, then a chunk beside two tokens; each with its mode."""
    rows = ((5, 9, 2), (1, 1, 1), (1, 4, 1))
    modes = (sglang.ForwardMode.EXTEND, sglang.ForwardMode.DECODE, sglang.ForwardMode.MIXED)
    made = engines.Batch.successive(rows, HEADS, KV_HEADS, DIM, dtype or torch.float32)
    return list(zip(made, modes, strict=True))


@pytest.mark.parametrize("page_size", [1, 4])
def test_prompts_and_tokens_get_the_attention_of_torch(ctx: ga.GpuContext, page_size: int) -> None:
    engine = Engine(page_size, torch.float16)
    before = ctx.stats()["flash_attn"].completed
    for batch, mode in batches(torch.float16):
        found = engine.run(batch, mode)
        torch.testing.assert_close(found.double(), engines.expected(batch, 0.3), rtol=4e-3, atol=4e-3)
    assert ctx.stats()["flash_attn"].completed == before + 3


OPTIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "window": ({"sliding_window_size": 2}, {"reach": 2}),
    "softcap": ({"logit_cap": 2.0}, {"softcap": 2.0}),
    "sinks": ({}, {"sinks": [0.5, -1.0, 2.0, 0.0]}),
}


@pytest.mark.parametrize("option", OPTIONS)
def test_options_of_a_layer(mock: ga.GpuContext, option: str) -> None:
    given, meant = OPTIONS[option]
    engine = Engine(**given)
    sinks = torch.tensor(meant["sinks"]) if option == "sinks" else None
    for batch, mode in batches():
        found = engine.run(batch, mode, sinks=sinks)
        torch.testing.assert_close(found.double(), engines.expected(batch, 0.3, **meant), rtol=1e-5, atol=1e-5)


def test_the_engines_own_call_leaves_the_context_that_a_program_gave(mock: ga.GpuContext, door: Any) -> None:
    door.register()
    Engine().run(*batches()[0])
    assert mock.stats()["flash_attn"].completed == 1


def test_keys_without_values_are_not_left_out(mock: ga.GpuContext) -> None:
    engine = Engine()
    (batch, mode), *_ = batches()
    engine.run(batch, mode)
    batch.v = None
    with pytest.raises((TypeError, RuntimeError)):
        engine.run(batch, mode)


def test_an_idle_worker_gathers_nothing(mock: ga.GpuContext) -> None:
    backend = sglang.ATTENTION_BACKENDS["gpu_actors"](Engine().runner)
    backend.init_forward_metadata(SimpleNamespace(forward_mode=sglang.ForwardMode.IDLE))
    assert backend.forward_metadata is None


def test_the_name_is_a_choice_of_the_command(door: Any) -> None:
    assert [door.register(), door.register()] == ["gpu_actors"] * 2
    assert sglang.ATTENTION_BACKEND_CHOICES.count("gpu_actors") == 1


@pytest.mark.parametrize(
    ("where", "name", "value"),
    [
        ("runner", "use_mla_backend", True),
        ("runner", "dtype", "torch.bfloat16"),
        ("runner", "token_to_kv_pool", SimpleNamespace()),
        ("pool", "kv_cache_layout", "hnd"),
        ("pool", "is_quantized_kv_cache", True),
        ("pool", "requires_physical_write_loc", True),
    ],
)
def test_a_runner_that_no_request_states_is_refused(door: Any, where: str, name: str, value: Any) -> None:
    engine = Engine()
    setattr(getattr(engine, where), name, value)
    with pytest.raises(ga.Unsupported):
        door.SglangBackend(engine.runner)


@pytest.mark.parametrize(
    ("layer", "fields", "field"),
    [
        ({"is_cross_attention": True}, {}, "attn_type"),
        ({"attn_type": sglang.AttentionType.ENCODER_ONLY}, {}, "attn_type"),
        ({"use_irope": True}, {}, "use_irope"),
        ({"xai_temperature_len": 8}, {}, "xai_temperature_len"),
        ({"pos_encoding_mode": "ALIBI"}, {}, "pos_encoding_mode"),
        ({"logit_cap": 1.0, "logit_capping_method": "clip"}, {}, "logit_capping_method"),
        ({}, {"encoder_lens": [1, 1, 1]}, "encoder_lens"),
        ({}, {"spec_info": "drafts"}, "forward_mode"),
        ({}, {"forward_mode": sglang.ForwardMode.TARGET_VERIFY}, "forward_mode"),
    ],
    ids=str,
)
def test_what_no_request_states_is_refused(
    mock: ga.GpuContext, layer: dict[str, Any], fields: dict[str, Any], field: str
) -> None:
    engine = Engine(**layer)
    with pytest.raises(ga.Unsupported) as refused:
        engine.run(*batches()[0], **fields)
    assert refused.value.field == field
    assert mock.stats()["flash_attn"].submitted == 0


def test_options_of_a_call_that_no_request_states_are_refused(mock: ga.GpuContext) -> None:
    engine = Engine()
    batch, mode = batches()[0]
    engine.run(batch, mode)
    for name in ("k_rope", "return_lse"):
        with pytest.raises(ga.Unsupported, match=name):
            engine.backend.forward(
                batch.q, batch.k, batch.v, engine.layer, SimpleNamespace(forward_mode=mode), **{name: True}
            )


def test_a_captured_graph_is_refused(mock: ga.GpuContext) -> None:
    backend = sglang.ATTENTION_BACKENDS["gpu_actors"](Engine().runner)
    for capture in (
        lambda: backend.init_cuda_graph_state(8, 8),
        lambda: backend.init_forward_metadata_out_graph(
            SimpleNamespace(forward_mode=sglang.ForwardMode.DECODE), in_capture=True
        ),
    ):
        with pytest.raises(ga.Unsupported, match="cuda-graph-backend-decode disabled"):
            capture()
