"""A KvCache whose layers differ: a sequence has the same rows in all of them, each layer as in its own cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from support.kv_cache import outcome, wait
from support.layer_rows import FP8, HEADS_Q, LATENT, NARROW, OPTIONS, WIDE, LayerRows, together

import gpu_actors as ga

PAGE = 4
LAYERS = [WIDE, NARROW, LATENT, WIDE, FP8, NARROW]


class Mixed(LayerRows):
    """A cache whose layers differ, and a cache for each layer, with the same requests."""

    def __init__(self, cache: ga.KvCache, ones: list[ga.KvCache], layers: list[ga.KvLayer], dtype: str) -> None:
        super().__init__(layers, dtype)
        self.cache, self.ones = cache, ones
        self.twins: dict[ga.KvSequence, list[ga.KvSequence]] = {}

    def create(self, tokens: Any = None) -> ga.KvSequence:
        seq: ga.KvSequence = wait(self.cache.create(tokens))
        self.twins[seq] = [wait(one.create(tokens)) for one in self.ones]
        assert all(twin.cached == seq.cached for twin in self.twins[seq])
        return seq

    def fork(self, seq: ga.KvSequence) -> ga.KvSequence:
        child: ga.KvSequence = wait(self.cache.fork(seq))
        self.twins[child] = [wait(one.fork(twin)) for one, twin in zip(self.ones, self.twins[seq], strict=True)]
        return child

    def do(self, seq: ga.KvSequence, ask: Callable[..., ga.Reply[Any]]) -> None:
        wait(ask(self.cache, seq))
        for one, twin in zip(self.ones, self.twins[seq], strict=True):
            wait(ask(one, twin))

    def append(self, seqs: list[ga.KvSequence], *shape: int, **options: Any) -> Any:
        rows = [self.new(layer, *shape) for layer in range(len(self.layers))]
        lengths = wait(self.cache.append(seqs, **together(rows), **options))
        for layer, one in enumerate(self.ones):
            twins = [self.twins[seq][layer] for seq in seqs]
            assert wait(one.append(twins, **rows[layer], **options)) == lengths
        return lengths

    def step(self, seqs: list[ga.KvSequence], rows: int, order: list[int] | None = None, **options: Any) -> None:
        """One step over all layers, compared with the same on each layer's cache."""
        begun = self.cache.step(seqs, heads_q=HEADS_Q, rows=rows, dtype=self.dtype, **OPTIONS, **options)
        with wait(begun) as step:
            for layer in order or range(len(self.layers)):
                q, new = self.q(layer, len(seqs), rows), self.new(layer, len(seqs), rows)
                out = step.attend(layer, q, **new)
                twins = [self.twins[seq][layer] for seq in seqs]
                alone = wait(self.ones[layer].attend(q, twins, **new, **OPTIONS)).out
                assert out.tobytes() == alone.tobytes(), f"layer {layer}"

    def check(self) -> None:
        """Compare every sequence in every layer, bit by bit."""
        for seq, twins in self.twins.items():
            assert all(one.length(twin) == self.cache.length(seq) for one, twin in zip(self.ones, twins, strict=True))
            for layer, (one, twin) in enumerate(zip(self.ones, twins, strict=True)):
                if self.cache.length(seq):
                    q = self.q(layer, 1, 2)
                    out = wait(self.cache.attend(q, [seq], layer=layer, **OPTIONS)).out
                    assert out.tobytes() == wait(one.attend(q, [twin], **OPTIONS)).out.tobytes(), f"layer {layer}"


@contextmanager
def mixed(
    device: str = "mock", layers: list[ga.KvLayer] = LAYERS, dtype: str = "float32", **changes: Any
) -> Iterator[Mixed]:
    spec = {"num_blocks": 16, "page_size": PAGE, "dtype": dtype, **changes}
    options = None if device == "emulated" else ga.ContextOptions()
    with ga.open_context(device, options) as ctx, ctx.kv_cache(**spec, layers=layers) as cache, ExitStack() as entered:
        for group in cache._find().tables._groups[1::2]:
            group.pool._free.reverse()  # otherwise a sequence has pages of the same numbers in all groups
        ones = [entered.enter_context(ctx.kv_cache(**spec, layers=[layer])) for layer in layers]
        yield Mixed(cache, ones, layers, dtype)


@pytest.mark.parametrize(("device", "dtype"), [("mock", "float32"), ("emulated", "bfloat16")])
def test_each_layer_is_what_a_cache_of_one_layer_is(device: str, dtype: str) -> None:
    layers = LAYERS if device == "emulated" else [layer for layer in LAYERS if layer is not FP8]
    with mixed(device, layers, dtype) as one:
        first, second = one.create(), one.create()
        assert one.append([first, second], 2, 5) == [5, 5]
        assert one.append([first, second], 7, cu_seqlens=np.array([0, 7, 7], np.int32)) == [12, 5]
        one.check()
        fork = one.fork(first)
        one.append([first], 1, 1)
        one.append([fork], 1, 2)
        one.step([fork, second], 1)
        one.step([fork, second], 1, list(reversed(range(len(layers)))))
        one.check()
        one.do(fork, lambda cache, seq: cache.truncate(seq, 3))
        one.step([fork, first], 2)
        one.check()
        for seq in one.twins:
            one.do(seq, lambda cache, seq: cache.free(seq))
        assert all(each.free_blocks == each.blocks for each in one.cache.group_stats())
        assert [each.blocks for each in one.cache.group_stats()][:3] == [16, 12, 9]


def test_equal_layers_are_one_group_of_the_usual_kind() -> None:
    """With a list of equal entries, rows may be one array or a list, and sequences may move."""
    with mixed(layers=[WIDE, ga.KvLayer(head_dim=16)], kv_heads=2) as one:
        seq = one.create()
        k, v = one.draw(2, 5, 2, 16), one.draw(2, 5, 2, 16)
        assert wait(one.cache.append(seq, k, v)) == 5
        assert wait(one.cache.append(seq, list(k), list(v))) == 10
        for layer, (cache, twin) in enumerate(zip(one.ones, one.twins[seq], strict=True)):
            for _ in range(2):
                wait(cache.append(twin, k[layer], v[layer]))
        one.check()
        moved = wait(one.cache.import_pages(wait(one.cache.export_pages(seq))))
        one.twins[moved] = one.twins[seq]
        one.check()
        assert len(one.cache.group_stats()) == 1


def test_layers_that_differ_in_pages_alone_take_one_array_too() -> None:
    with mixed(layers=[WIDE, ga.KvLayer(kv_heads=2, head_dim=16, num_blocks=5)]) as one:
        seq = one.create()
        k, v = one.draw(2, 5, 2, 16), one.draw(2, 5, 2, 16)
        assert wait(one.cache.append(seq, k, v)) == 5
        for layer, (cache, twin) in enumerate(zip(one.ones, one.twins[seq], strict=True)):
            wait(cache.append(twin, k[layer], v[layer]))
        one.check()
        assert [each.free_blocks for each in one.cache.group_stats()] == [14, 3]
        assert one.cache.stats()[:2] == (5, 3), "those of the fullest group"


def test_a_full_group_takes_nothing_from_the_others() -> None:
    with mixed(layers=[NARROW, WIDE], num_blocks=3) as one:
        seq = one.create()
        one.append([seq], 1, 9)
        fork = one.fork(seq)
        before = one.cache.stats()
        rows = one.of_all(1, 1)
        message = "1 pages are needed, and 0 of 3 are free in group 1"
        for refused in (one.cache.append([fork], **rows), one.cache.step([fork], heads_q=HEADS_Q)):
            with pytest.raises(ga.CacheFull, match=message):
                wait(refused)
        assert one.cache.stats() == before
        one.do(fork, lambda cache, seq: cache.free(seq))
        del one.twins[fork]
        one.append([seq], 1, 1)
        one.check()


def test_prompts_share_pages_of_all_groups() -> None:
    with mixed(layers=[WIDE, NARROW]) as one:
        tokens = list(range(2 * PAGE + 3))
        seq = one.create(tokens)
        one.append([seq], 1, len(tokens), tokens=[tokens])
        again = one.create(tokens)
        assert again.cached == 2 * PAGE
        one.append([again], 1, 3, tokens=[tokens[2 * PAGE :]])
        one.check()
        groups = one.cache.group_stats()
        assert [(each.shared_blocks, each.prefix_hits) for each in groups] == [(2, 2), (2, 2)]


def test_a_prompt_begins_with_the_pages_that_every_group_still_has() -> None:
    with mixed(layers=[WIDE, ga.KvLayer(kv_heads=1, head_dim=16, num_blocks=4)]) as one:
        tokens = list(range(3 * PAGE))
        seq = one.create(tokens)
        one.append([seq], 1, len(tokens), tokens=[tokens])
        one.do(seq, lambda cache, seq: cache.free(seq))
        del one.twins[seq]
        other = wait(one.cache.create())
        wait(one.cache.append([other], **one.of_all(1, 2 * PAGE)))
        assert [each.evicted for each in one.cache.group_stats()] == [0, 1], "the last page of the prompt"
        wait(one.cache.free(other))
        assert wait(one.cache.create([*tokens, 1])).cached == 2 * PAGE


def test_a_step_may_have_heads_and_layouts_for_each_layer() -> None:
    with mixed(layers=[WIDE, NARROW]) as one:
        seq = one.create()
        one.append([seq], 1, 3)
        heads = [6, 2]
        q = [one.draw(1, 1, 6, 16), one.draw(1, 2, 1, 32).swapaxes(1, 2)]
        new = [one.new(layer, 1, 1) for layer in range(2)]
        for like in (None, {1: {"q": q[1]}}):
            with wait(one.cache.step([seq], heads_q=heads, like=like)) as step:
                outs = [step.attend(layer, q[layer], **new[layer]) for layer in range(2)]
            for layer, out in enumerate(outs):
                twin = [one.twins[seq][layer]]
                alone = wait(one.ones[layer].attend(q[layer], twin, **new[layer])).out
                assert (out.shape[2], out.tobytes()) == (heads[layer], alone.tobytes())
        for changes, field in (
            ({"heads_q": [6]}, "heads_q"),
            ({"heads_q": [6, 0]}, "heads_q[1]"),
            ({"heads_q": heads, "like": {2: {}}}, "like"),
            ({"heads_q": heads, "like": {0: q}}, "like[0]"),
            ({"heads_q": heads, "like": {0: {"q": q[1]}}}, "like[0].q"),
        ):
            refusal = outcome(one.cache.step([seq], **changes))
            assert isinstance(refusal, ga.InvalidRequest)
            assert refusal.field == field


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"layers": []}, "layers"),
        ({"layers": [WIDE, 2]}, "layers[1]"),
        ({"layers": [WIDE, ga.KvLayer(kv_heads=0)]}, "layers[1].kv_heads"),
        ({"layers": [WIDE, ga.KvLayer(kv_heads=2)]}, "head_dim"),
        ({"layers": [WIDE, ga.KvLayer(kv_heads=2, head_dim=16, num_blocks=0)]}, "layers[1].num_blocks"),
        ({"layers": [ga.KvLayer(kv_heads=2, head_dim=16, dtype="int8")]}, "layers[0].dtype"),
        ({"layers": [FP8, ga.KvLayer(kv_heads=2, head_dim=16, k_descale=np.ones(2))]}, "layers[1].k_descale"),
        ({"layers": [WIDE], "page_size": 0}, "page_size"),
        ({"layers": 1}, "kv_heads"),
        ({"layers": 1, "kv_heads": 1}, "head_dim"),
    ],
)
def test_what_is_wrong_with_a_list_of_layers_is_refused_by_name(
    mock: ga.GpuContext, changes: dict[str, Any], field: str
) -> None:
    options = {"num_blocks": 4, "page_size": PAGE, "dtype": "float32", **changes}
    with pytest.raises((ga.InvalidRequest, ga.Unsupported)) as refused, mock.kv_cache(**options):
        pass
    assert refused.value.field == field


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"layers": [WIDE, ga.KvLayer(kv_heads=2)]}, "head_dim"),
        ({"layers": [WIDE, ga.KvLayer(kv_heads=2)], "head_dim": 100_000}, "head_dim"),
        ({"layers": [replace(FP8, k_descale=None), WIDE], "k_descale": FP8.k_descale}, "k_descale"),
    ],
)
def test_a_default_that_is_wrong_for_a_layer_names_the_layer(
    mock: ga.GpuContext, changes: dict[str, Any], field: str
) -> None:
    options = {"num_blocks": 4, "page_size": PAGE, "dtype": "float32", **changes}
    with pytest.raises((ga.InvalidRequest, ga.Unsupported), match=r"layers\[1\]") as refused:
        mock.kv_cache(**options).__enter__()
    assert refused.value.field == field


def test_layers_from_an_iterator_are_refused_by_name_beside_another_process_too() -> None:
    with ga.open_context("mock", isolation="process") as ctx:
        cache = ctx.kv_cache(num_blocks=4, page_size=PAGE, layers=iter([WIDE]))  # type: ignore[arg-type]
        with pytest.raises(ga.InvalidRequest, match="list or tuple of KvLayer") as refused:
            cache.__enter__()
    assert refused.value.field == "layers"


def test_what_is_wrong_with_an_append_of_layers_is_refused_by_name() -> None:
    with mixed(layers=[WIDE, NARROW, LATENT]) as one:
        seq = one.create()
        good: dict[str, Any] = one.of_all(5)
        k, v = good["k"], good["v"]
        for changes, field in (
            ({"k": k[:2]}, "k"),
            ({"k": k[0]}, "k"),
            ({"k": None}, "k[0]"),
            ({"v": [v[0], None, None]}, "v[1]"),
            ({"k": [k[0], k[0], None]}, "k[1]"),
            ({"k": k, "v": [*v[:2], v[0]]}, "v[2]"),
            ({"k": [k[0], k[1][:4], None], "v": [v[0], v[1][:4], None]}, "k[1]"),
            ({"k": [k[0], "rows", None]}, "k[1]"),
            ({"tokens": [1]}, "tokens"),
            ({"expect_length": 1}, "expect_length"),
        ):
            refusal = outcome(one.cache.append(seq, **{**good, **changes}))
            assert isinstance(refusal, ga.InvalidRequest), (changes, refusal)
            assert refusal.field == field
        assert one.cache.length(seq) == 0
        assert wait(one.cache.append(seq, **good)) == 5


def test_layers_that_differ_cross_to_another_process() -> None:
    with (
        ga.open_context("mock", isolation="process") as ctx,
        ctx.kv_cache(num_blocks=8, page_size=PAGE, dtype="bfloat16", layers=[WIDE, FP8]) as cache,
    ):
        seq = wait(cache.create())
        k = np.ones((2, 3, 2, 16), ml_dtypes.bfloat16)
        assert wait(cache.append(seq, list(k), list(k))) == 3
        q = np.ones((1, 1, HEADS_Q, 16), ml_dtypes.bfloat16)
        with wait(cache.step([seq], heads_q=HEADS_Q, dtype="bfloat16")) as step:
            outs = [step.attend(layer, q, k[:1, :1], k[:1, :1]) for layer in range(2)]
        assert [out.shape for out in outs] == [q.shape] * 2
        assert (cache.length(seq), len(cache.group_stats())) == (4, 2)
