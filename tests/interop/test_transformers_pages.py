"""Attention over the pages of Transformers' continuous batching: no page is copied; each step has its own tables."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import gpu_actors as ga

torch = pytest.importorskip("torch", reason="Transformers' models are torch's")
transformers = pytest.importorskip("transformers", reason="its continuous batching is what is tested")
bridge = pytest.importorskip("gpu_actors.interop.transformers")
pages = pytest.importorskip("gpu_actors.interop.transformers_pages")
batching = pytest.importorskip("transformers.generation.continuous_batching.cache", reason="it has the cache")
distributed = pytest.importorskip("transformers.generation.continuous_batching.distributed")
copies: Any = pytest.importorskip("support.torch_copies")

PAGE, WINDOW, HEADS, DIM = 4, 6, 2, 8
SIZES: dict[str, Any] = {
    "vocab_size": 60,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": HEADS,
    "max_position_embeddings": 128,
}


def config() -> Any:
    """Windows in layers 2 and 3, full attention in 0 and 1."""
    return transformers.Qwen2Config(**SIZES, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=2)


def new_cache(dtype: Any) -> Any:
    given = transformers.ContinuousBatchingConfig(
        num_blocks=32, page_size=PAGE, max_batch_tokens=32, max_memory_percent=0.5
    )
    alone = distributed.DistributedHelper(None, None)
    return batching.PagedAttentionCache(config(), given, "cpu", alone, dtype)


@pytest.fixture(scope="module")
def ctx() -> Iterator[ga.GpuContext]:
    with ga.open_context("mock") as ctx:
        yield ctx


class RereadingContext:
    """A context whose prepared requests read all their arrays in each run, as they do on a GPU."""

    def __init__(self, context: ga.GpuContext) -> None:
        self.context = context
        self.generation = 1
        self.prepared = 0
        self.flash_attn = SimpleNamespace(prepare=self.prepare)

    def prepare(self, request: Any) -> Any:
        self.prepared += 1
        names = ("k_cache", "v_cache") if isinstance(request, ga.PagedForward) else ("k", "v")

        def run(q: Any, k: Any, v: Any, *, out: Any, stream: Any) -> None:
            changed = dataclasses.replace(request, q=q, out=out, **dict(zip(names, (k, v), strict=True)))
            self.context.flash_attn.submit(changed).result()

        return SimpleNamespace(result=lambda: SimpleNamespace(run=run))


@pytest.fixture(params=["read when prepared", "read in each run"])
def served(request: pytest.FixtureRequest, ctx: ga.GpuContext, monkeypatch: pytest.MonkeyPatch) -> Any:
    if request.param == "read when prepared":
        return ctx
    monkeypatch.setattr(pages, "_read_each_run", lambda q: True)
    return RereadingContext(ctx)


class Batch:
    """Sequences of one cache, and the model's arguments of each forward pass, in storage that is reused."""

    def __init__(self, served: Any, dtype: str = "float32") -> None:
        self.dtype = getattr(torch, dtype)
        self.cache = new_cache(self.dtype)
        self.attention = pages.PagedAttention(served)
        self.keys: dict[tuple[str, int], Any] = {}
        self.storage = torch.zeros(2, 2, 256, dtype=torch.int64)
        self.random = torch.Generator().manual_seed(3)

    def rows(self, count: int, heads: int) -> Any:
        return torch.randn(count, heads, DIM, generator=self.random).to(self.dtype)

    def arguments(self, news: dict[str, int], pasts: dict[str, int]) -> dict[str, Any]:
        """The arguments of a pass with these numbers of new rows by sequence."""
        read: list[list[int]] = [[], []]
        write: list[list[int]] = [[], []]
        ends: dict[str, list[int]] = {name: [0] for name in self.cache.cache_allocators}
        for name, new in news.items():
            state = SimpleNamespace(request_id=name, current_len=lambda past=pasts[name]: past)
            assert self.cache.can_store_request_tokens(state, new)
            older = read if any(pasts.values()) else None
            self.cache.extend_read_and_write_indices(name, pasts[name], new, older, write)
            for kind, allocator in self.cache.cache_allocators.items():
                ends[kind].append(ends[kind][-1] + allocator.get_seqlen_k(pasts[name], new))
        for row, lists in enumerate((read, write)):
            for group, index in enumerate(lists):
                self.storage[row, group, : len(index)] = torch.tensor(index, dtype=torch.int64)
        return {
            "read_index": [self.storage[0, group, : len(index)] for group, index in enumerate(read)],
            "write_index": [self.storage[1, group, : len(index)] for group, index in enumerate(write)],
            "cu_seq_lens_q": torch.tensor([0, *np.cumsum(list(news.values()))], dtype=torch.int32),
            "cu_seq_lens_k": {kind: torch.tensor(each, dtype=torch.int32) for kind, each in ends.items()},
            "max_length_q": max(news.values()),
            "max_length_k": {kind: int(np.diff(each).max()) for kind, each in ends.items()},
        }

    def run(self, news: dict[str, int], given: dict[str, Any], sinks: Any = None) -> None:
        """Run a pass over all layers. Each sequence's rows must be those of attention over all of its keys."""
        for layer, allocator in sorted(self.cache.layer_to_allocator.items()):
            count = sum(news.values())
            q, k, v = self.rows(count, 2 * HEADS), self.rows(count, HEADS), self.rows(count, HEADS)
            kind = allocator.layer_type
            window = WINDOW if kind == "sliding_attention" else None
            options = {"softmax_scale": DIM**-0.5, "causal": True}
            if window is not None:
                options["window_size"] = (window - 1, 0)
            learned = None if sinks is None else sinks + layer
            out = self.attention.attend(allocator, layer, q, k, v, learned, options, given)
            tolerance = 1e-4 if self.dtype == torch.float32 else 5e-3
            first = 0
            for name, new in news.items():
                rows = slice(first, first + new)
                past = self.keys.get((name, layer), torch.zeros(2, 0, HEADS, DIM, dtype=self.dtype))
                self.keys[name, layer] = torch.cat([past, torch.stack([k[rows], v[rows]])], 1)
                wanted = attended(q[rows].float(), *self.keys[name, layer].float(), window, learned)
                torch.testing.assert_close(out[rows].float(), wanted, rtol=tolerance, atol=tolerance)
                first += new


def attended(q: Any, k: Any, v: Any, window: int | None, sinks: Any) -> Any:
    k, v = (x.repeat_interleave(2, 1) for x in (k, v))
    scores = torch.einsum("ihd,jhd->hij", q, k) * DIM**-0.5
    distance = torch.arange(len(k) - len(q), len(k))[:, None] - torch.arange(len(k))
    hidden = (distance < 0) | (distance >= (window or len(k)))
    scores = scores.masked_fill(hidden, float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks[:, None, None].expand(-1, len(q), 1)], -1)
    return torch.einsum("hij,jhd->ihd", scores.softmax(-1)[..., : len(k)], v)


def test_steps_of_equal_shapes_read_their_own_tables(served: Any) -> None:
    """Steps of the two pairs of sequences share storage and differ only in their tables."""
    batch = Batch(served)
    pairs = {"a": 9, "b": 5}, {"c": 9, "d": 5}
    for prompts in pairs:
        batch.run(prompts, batch.arguments(prompts, dict.fromkeys(prompts, 0)))
    for step in range(8):  # past the ends of pages and of the window
        for prompts in pairs:
            pasts = {name: length + step for name, length in prompts.items()}
            batch.run(dict.fromkeys(prompts, 1), batch.arguments(dict.fromkeys(prompts, 1), pasts))
    if isinstance(served, RereadingContext):
        assert served.prepared <= 2 + 2 * 4  # one for a prompt, and one for each group and number of pages


def test_a_pass_that_repeats_the_lists_of_another_reads_what_they_hold_now(served: Any) -> None:
    """A pass gets the arguments of the one before it, as when a CUDA graph is captured."""
    batch = Batch(served)
    given: dict[str, Any] = {}
    for name in ("a", "b"):
        batch.run({name: 5}, batch.arguments({name: 5}, {name: 0}))
    for name in ("a", "b"):
        now = batch.arguments({name: 1}, {name: 5})
        given = given or now
        batch.run({name: 1}, given)


def test_chunks_behind_older_keys_and_sinks_of_each_layer(served: Any) -> None:
    batch = Batch(served)
    sinks = torch.tensor([0.5, -1.0, 2.0, 0.0])
    past = {"a": 0, "b": 0}
    for news in ({"a": 3, "b": 2}, {"a": 2, "b": 1}, {"a": 1, "b": 4}, {"a": 7, "b": 9}, {"a": 1, "b": 1}):
        batch.run(news, batch.arguments(news, past), sinks)
        past = {name: past[name] + new for name, new in news.items()}
        sinks = sinks + 0.25  # stands for changed weights


def test_kernels_read_pages_of_keys_and_pages_of_one_key() -> None:
    with ga.open_context("emulated") as emulated:
        batch = Batch(emulated, "float16")
        batch.run({"a": 9, "b": 2}, batch.arguments({"a": 9, "b": 2}, {"a": 0, "b": 0}))
        batch.run({"a": 1, "b": 1}, batch.arguments({"a": 1, "b": 1}, {"a": 9, "b": 2}))
        batch.run({"a": 3, "b": 1}, batch.arguments({"a": 3, "b": 1}, {"a": 10, "b": 3}))


def test_no_layer_copies_keys_of_the_cache(ctx: ga.GpuContext) -> None:
    batch = Batch(ctx)
    past = {"a": 0, "b": 0}
    counts = []
    with copies.Copies() as mode:
        mode.watch(batch.cache.cache_tensor)
        # A prompt, then a token each until windows overflow, then a chunk, for which each layer copies its window once.
        for news in ({"a": 5, "b": 2}, *[{"a": 1, "b": 1}] * 8, {"a": 3, "b": 1}):
            mode.copies.clear()
            batch.run(news, batch.arguments(news, past))
            past = {name: past[name] + new for name, new in news.items()}
            counts.append(sorted(mode.copies))
    assert counts[:-1] == [[]] * 9
    assert counts[-1] == ["aten.index_select.default"] * 4  # keys and values of layers 2 and 3


def test_a_models_passes_read_the_pages(ctx: ga.GpuContext, monkeypatch: pytest.MonkeyPatch) -> None:
    """In `generate_batch` no layer of full attention gathers, and requests read the cache's memory."""
    gathered: list[str] = []
    paged = 0
    prepare = pages.PagedAttention._prepare

    def prepare_and_look(self: Any, step: Any, q: Any, k: Any, v: Any, fields: Any) -> Any:
        nonlocal paged
        if "block_table" in fields:
            paged += 1
            assert k.untyped_storage().data_ptr() == v.untyped_storage().data_ptr()
            assert k.untyped_storage().nbytes() > k.nbytes
        return prepare(self, step, q, k, v, fields)

    select = torch.index_select
    monkeypatch.setattr(pages.PagedAttention, "_prepare", prepare_and_look)
    monkeypatch.setattr(torch, "index_select", lambda *given: gathered.append("keys") or select(*given))
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)).eval()
    with bridge.continuous_batching(ctx, model):
        found = model.generate_batch(
            [[5, 6, 7, 8, 9], [11, 12], list(range(20))],
            generation_config=transformers.GenerationConfig(
                max_new_tokens=6, do_sample=False, eos_token_id=-1, pad_token_id=0
            ),
            continuous_batching_config=transformers.ContinuousBatchingConfig(
                num_blocks=16, page_size=8, max_batch_tokens=16
            ),
            progress_bar=False,
        )
    assert all(result.error is None for result in found.values())
    assert paged >= 5
    assert gathered == []


def test_plans_are_bounded(ctx: ga.GpuContext, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "_MOST_PLANS", 3)
    batch = Batch(ctx)
    for count in range(1, 6):
        news = {f"{count}": count}
        batch.run(news, batch.arguments(news, {f"{count}": 0}))
    assert len(batch.attention._plans) == 3
