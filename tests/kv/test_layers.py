"""A KvCache of several layers: one page table and one length for all, and each layer answers as its own cache."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from emulated.memory import host_view
from inside.testing import cast
from support.kv_cache import DIM, HEADS, LATER, PAGE, in_flight, outcome, slow, spec, wait

import gpu_actors as ga
from gpu_actors.distributed import ShardedKvCache, open_pool
from gpu_actors.remote import InProcess
from gpu_actors.testing import FaultPlan

LAYERS, HEADS_Q = 3, 4
BF16 = np.dtype(ml_dtypes.bfloat16)
FACTORS = np.array([0.05, 0.02], np.float32)
# Options of the cache, columns of the rows by name, and options of attention.
KINDS: dict[str, tuple[dict[str, Any], dict[str, int], dict[str, Any]]] = {
    "float32": ({}, {"k": DIM, "v": DIM}, {}),
    "values of their own width": ({"head_dim_v": 8}, {"k": DIM, "v": 8}, {}),
    "fp8": ({"dtype": "float8_e4m3fn", "k_descale": FACTORS, "v_descale": FACTORS}, {"k": DIM, "v": DIM}, {}),
    "latent": ({"kv_heads": 1, "head_dim": 32, "latent_dim": 24}, {"c_kv": 24, "k_pe": 8}, {"softmax_scale": 0.2}),
    "latent fp8": (
        {"kv_heads": 1, "head_dim": 32, "latent_dim": 24, "dtype": "float8_e4m3fn", "k_descale": FACTORS[:1]},
        {"c_kv": 24, "k_pe": 8},
        {"softmax_scale": 0.2},
    ),
}
EACH_KIND = pytest.mark.parametrize("kind", KINDS)


class Layered:
    """A cache of three layers and three caches of one layer, with the same requests."""

    def __init__(self, ctx: ga.GpuContext, cache: ga.KvCache, ones: list[ga.KvCache], kind: str) -> None:
        self.ctx, self.cache, self.ones = ctx, cache, ones
        changes, self.dims, self.attention = KINDS[kind]
        self.heads = changes.get("kv_heads", HEADS)
        self.dtype = BF16 if "fp8" in kind else np.dtype(np.float32)
        self.rng = np.random.default_rng(1)
        self.twins: dict[ga.KvSequence, list[ga.KvSequence]] = {}

    def draw(self, *shape: int) -> np.ndarray:
        drawn: np.ndarray = cast(self.rng.standard_normal(shape), self.dtype.name)
        return drawn

    def new(self, *shape: int) -> dict[str, np.ndarray]:
        """New rows of all layers."""
        return {name: self.draw(LAYERS, *shape, self.heads, dim) for name, dim in self.dims.items()}

    def q(self, *shape: int) -> np.ndarray:
        return self.draw(*shape, HEADS_Q, 32 if "c_kv" in self.dims else DIM)

    def do(self, ask: Callable[..., ga.Reply[Any]], twin: Callable[..., ga.Reply[Any]]) -> Any:
        """Ask the cache, then each of the others by its layer's number."""
        result = wait(ask(self.cache))
        others = [wait(twin(layer, one)) for layer, one in enumerate(self.ones)]
        if isinstance(result, ga.KvSequence):
            assert all(other.cached == result.cached for other in others)
            self.twins[result] = others
        else:
            assert others == [result] * LAYERS
        return result

    def create(self, tokens: Any = None) -> ga.KvSequence:
        made: ga.KvSequence = self.do(lambda cache: cache.create(tokens), lambda _, one: one.create(tokens))
        return made

    def fork(self, seq: ga.KvSequence) -> ga.KvSequence:
        made: ga.KvSequence = self.do(lambda cache: cache.fork(seq), lambda n, one: one.fork(self.twins[seq][n]))
        return made

    def append(self, seqs: Any, new: dict[str, np.ndarray], **options: Any) -> Any:
        def twins(layer: int) -> Any:
            return [self.twins[seq][layer] for seq in seqs] if isinstance(seqs, list) else self.twins[seqs][layer]

        return self.do(
            lambda cache: cache.append(seqs, **new, **options),
            lambda n, one: one.append(twins(n), **{name: rows[n] for name, rows in new.items()}, **options),
        )

    def check(self) -> None:
        """Compare all sequences' attention by layer and contents, bit by bit, and that pages count once."""
        stats = self.cache.stats()
        assert all(one.stats() == stats for one in self.ones)
        state = self.cache._find()
        (group,) = state.groups
        for seq, twins in self.twins.items():
            table = state.table(seq)
            q = self.q(1, 2)
            for layer, (one, twin) in enumerate(zip(self.ones, twins, strict=True)):
                other = one._find()
                (alone,) = other.groups
                assert one.length(twin) == table.length
                for pool, single in ((group.k_pool, alone.k_pool), (group.v_pool, alone.v_pool)):
                    if pool is not None:
                        held, wanted = (
                            host_view(side)[where.groups[0].pages]
                            .reshape(-1, *side.shape[2:])[: table.length]
                            .view(np.uint8)
                            for side, where in ((pool[layer], table), (single, other.table(twin)))
                        )
                        np.testing.assert_array_equal(held, wanted)
                if table.length:
                    out = wait(self.cache.attend(q, [seq], layer=layer, **self.attention)).out
                    assert out.tobytes() == wait(one.attend(q, [twin], **self.attention)).out.tobytes()


@contextmanager
def layered(kind: str = "float32", device: str = "mock", **changes: Any) -> Iterator[Layered]:
    options = spec(**{**KINDS[kind][0], **changes})
    with ga.open_context(device) as ctx, ctx.kv_cache(**options, layers=LAYERS) as cache, ExitStack() as entered:
        ones = [entered.enter_context(ctx.kv_cache(**options)) for _ in range(LAYERS)]
        yield Layered(ctx, cache, ones, kind)


@EACH_KIND
def test_each_layer_is_what_a_cache_of_one_layer_is(kind: str) -> None:
    with layered(kind, num_blocks=16) as one:
        first, second = one.create(), one.create()
        assert one.append([first, second], one.new(2, 5)) == [5, 5]
        assert one.append([first, second], one.new(7), cu_seqlens=np.array([0, 7, 7], np.int32)) == [12, 5]
        assert one.append(second, one.new(PAGE)) == 5 + PAGE
        one.check()
        fork = one.fork(first)
        one.append(first, one.new(1))
        one.check()
        one.append(fork, one.new(6))
        one.do(lambda cache: cache.truncate(first, 3), lambda n, other: other.truncate(one.twins[first][n], 3))
        one.append(first, one.new(2))
        one.check()
        pages = wait(one.cache.export_pages(fork))
        own = [wait(other.export_pages(one.twins[fork][n])) for n, other in enumerate(one.ones)]
        assert (pages.layers, own[0].layers) == (LAYERS, 1)
        one.do(
            lambda cache: cache.import_pages(pickle.loads(pickle.dumps(pages))),
            lambda n, other: other.import_pages(own[n]),
        )
        one.do(lambda cache: cache.release(pages), lambda n, other: other.release(own[n]))
        one.do(lambda cache: cache.free(second), lambda n, other: other.free(one.twins[second][n]))
        del one.twins[second]
        one.check()
        for seq in list(one.twins):
            one.do(
                lambda cache, seq=seq: cache.free(seq),
                lambda n, other, seq=seq: other.free(one.twins[seq][n]),
            )
        assert one.cache.stats()[:4] == (16, 16, 0, 0)


def test_prompts_share_pages_of_all_layers() -> None:
    with layered() as one:
        tokens = list(range(2 * PAGE + 3))
        seq = one.create(tokens)
        one.append(seq, one.new(len(tokens)), tokens=tokens)
        again = one.create(tokens)
        assert again.cached == 2 * PAGE
        one.append(again, one.new(3), tokens=tokens[2 * PAGE :])
        assert (one.cache.stats().shared_blocks, one.cache.stats().prefix_hits) == (2, 2)
        one.check()


@pytest.mark.parametrize("kind", ["float32", "latent"])
def test_a_rope_rotates_the_rows_of_each_layer(kind: str) -> None:
    with layered(kind) as one:
        first, second = one.create(), one.create()
        rope = ga.Rope(dim=8, interleaved=True)
        one.append([first, second], one.new(2, 5), rope=rope)
        positions = np.array([4, 0, 9], np.int32)
        one.append(first, one.new(3), rope=rope, positions=positions)
        one.check()


@pytest.mark.parametrize("kind", ["float32", "fp8", "latent"])
def test_kernels_keep_the_layers_apart(kind: str) -> None:
    """Kernels append rows, run a step, copy, attend and move."""
    changes = {"page_size": 4, **({} if "fp8" in kind else {"dtype": "bfloat16"})}
    with layered(kind, "emulated", **changes) as one:
        one.dtype = BF16
        first = one.create()
        one.append(first, one.new(5))
        fork = one.fork(first)
        one.append(first, one.new(1))
        new, q = one.new(1, 2), one.q(1, 2)
        begun = one.cache.step([fork], heads_q=HEADS_Q, rows=2, dtype=BF16, **one.attention)
        with wait(begun) as step:
            outs = [
                step.attend(layer, q, **{name: rows[layer] for name, rows in new.items()})
                for layer in reversed(range(LAYERS))
            ]
        for layer, out in zip(reversed(range(LAYERS)), outs, strict=True):
            twin = [one.twins[fork][layer]]
            own = {name: rows[layer] for name, rows in new.items()}
            single = wait(one.ones[layer].attend(q, twin, **own, **one.attention)).out
            assert out.tobytes() == single.tobytes()
        pages = wait(one.cache.export_pages(fork))
        own_pages = [wait(other.export_pages(one.twins[fork][n])) for n, other in enumerate(one.ones)]
        one.do(lambda cache: cache.import_pages(pages), lambda n, other: other.import_pages(own_pages[n]))
        one.check()


def test_requests_on_several_layers_that_wait_together_are_not_mixed() -> None:
    clock, options = slow(FaultPlan(), 2, max_in_flight=1)
    rng = np.random.default_rng(3)
    with ga.open_context("mock", options) as ctx, ctx.kv_cache(**spec(layers=LAYERS)) as cache:
        seqs = [wait(cache.create()) for _ in range(3)]
        k, v = rng.standard_normal((2, LAYERS, 3, 5, HEADS, DIM)).astype(np.float32)
        wait(cache.append(seqs, k, v))
        q = rng.standard_normal((1, 1, HEADS_Q, DIM)).astype(np.float32)
        busy = cache.attend(q, [seqs[0]])
        in_flight(ctx, 1)
        asked = [
            (layer, n, cache.attend(q, [seqs[n]], layer=layer, return_lse=True))
            for n in range(3)
            for layer in (2, 0, 1, 2)
        ]
        clock.advance(LATER)
        wait(busy)
        together = [(layer, n, wait(reply)) for layer, n, reply in asked]
        assert ctx.stats()["kv_cache"].launched < 2 + len(asked), "those of one layer share launches"
        for layer, n, result in together:
            alone = wait(cache.attend(q, [seqs[n]], layer=layer, return_lse=True))
            assert (result.out.tobytes(), result.lse.tobytes()) == (alone.out.tobytes(), alone.lse.tobytes())


@pytest.mark.parametrize("layers", [0, -1, True, 1.0, "2", None])
def test_a_number_of_layers_that_is_none_is_refused(mock: ga.GpuContext, layers: Any) -> None:
    with pytest.raises(ga.InvalidRequest) as refused, mock.kv_cache(**spec(layers=layers)):
        pass
    assert (refused.value.field, refused.value.value) == ("layers", layers)


def test_more_layers_than_can_be_addressed_do_not_fit(mock: ga.GpuContext) -> None:
    with pytest.raises(ga.OutOfDeviceMemory), mock.kv_cache(**spec(layers=1 << 60)):
        pass


def test_what_is_wrong_with_a_request_is_refused_by_name(mock: ga.GpuContext) -> None:
    rng = np.random.default_rng(4)

    def draw(*shape: int) -> Any:
        return rng.standard_normal((*shape, DIM)).astype(np.float32)

    with mock.kv_cache(**spec(layers=LAYERS)) as cache, mock.kv_cache(**spec()) as single:
        seq, one = wait(cache.create(), single.create())
        k, q = draw(LAYERS, 2, HEADS), draw(1, 1, HEADS_Q)
        wait(cache.append(seq, k, k))
        wait(single.append(one, k[0], k[0]))
        new = draw(1, 1, HEADS)
        for reply, field, value in (
            (cache.append(seq, k[0], k[0]), "k", f"float32[2, {HEADS}, {DIM}]"),
            (cache.append(seq, k, k[:2]), "v", f"float32[2, 2, {HEADS}, {DIM}]"),
            (cache.append([seq], k, k), "k", None),
            (cache.append(seq, k, k[:, :1]), "v", None),
            (cache.append(seq, k, k, tokens=[1]), "tokens", "[1]"),
            (cache.append(seq, k, k, expect_length=0), "expect_length", [0]),
            (cache.attend(q, [seq], k=new, v=new), "k", f"float32[1, 1, {HEADS}, {DIM}]"),
            (cache.attend(q, [seq], v=new), "v", f"float32[1, 1, {HEADS}, {DIM}]"),
            (cache.attend(q, [seq], layer=LAYERS), "layer", LAYERS),
            (cache.attend(q, [seq], layer=-1), "layer", -1),
            (cache.attend(q, [seq], layer=True), "layer", True),
            (cache.attend(q, [seq], layer="0"), "layer", "0"),  # type: ignore[arg-type]
            (single.attend(q, [one], layer=1), "layer", 1),
        ):
            refusal = outcome(reply)
            assert isinstance(refusal, ga.InvalidRequest | ga.Unsupported)
            assert refusal.field == field
            assert value is None or refusal.value == value
        assert (cache.length(seq), single.length(one)) == (2, 2)


def test_pages_of_another_number_of_layers_are_refused(mock: ga.GpuContext) -> None:
    k = np.ones((LAYERS, 5, HEADS, DIM), np.float32)
    with mock.kv_cache(**spec(layers=LAYERS)) as cache:
        seq = wait(cache.create())
        wait(cache.append(seq, k, k))
        pages = wait(cache.export_pages(seq))
        for layers in (1, 2, LAYERS + 1):
            with mock.kv_cache(**spec(layers=layers)) as other:
                refusal = outcome(other.import_pages(pages))
                assert isinstance(refusal, ga.InvalidRequest)
                assert (refusal.field, refusal.value) == ("layers", str(LAYERS))
                assert other.stats()[:3] == (8, 8, 0)


async def test_a_sharded_cache_refuses_layers_that_differ() -> None:
    async with open_pool("mock", workers=2, workplace=InProcess, seed=0) as pool:
        with pytest.raises(ga.Unsupported) as refused:
            ShardedKvCache(pool, **spec(layers=[ga.KvLayer(), ga.KvLayer(head_dim=8)]))
        assert (refused.value.field, refused.value.nearest) == ("layers", 2)
