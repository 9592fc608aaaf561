"""Random programs over layers that differ: steps, captured or not, agree with attention in float64.

Between replays, sequences are forked, truncated, freed, and begun with pages of an earlier prompt, so that tables,
lengths, members and the pages behind a window change under the graph.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest
from emulated.caller_streams import ORDERS, CallerDevice, Program
from emulated.memory import host_view
from inside.cuda import HostOrder
from inside.emulation import EmulatedApi
from inside.handles import start_context
from support.layer_rows import FP8, HEADS_Q, LATENT, OPTIONS, WIDE, LayerRows, together
from support.service import eventually

import gpu_actors as ga
from gpu_actors.reference import attention_forward

PAGE, LONGEST, WINDOW = 4, 40, 6
LOCAL = ga.KvLayer(kv_heads=2, head_dim=16, window=WINDOW, slack=2, num_blocks=24)
LAYERS = [WIDE, LOCAL, replace(LATENT, num_blocks=32), WIDE, FP8, LOCAL]
PROMPTS = [np.arange(18), np.r_[np.arange(10), 30:36], np.r_[np.arange(5), 50:60]]
WHAT = (
    "append", "fork", "truncate", "free", "prefix", "step", "capture", "partial", "replay", "abort", "tokens", "copy"
)  # fmt: skip

counts = Counter[str]()


@dataclass(frozen=True)
class Held:
    """Rows of a sequence: each layer's arrays by name. tokens: those of the first rows, as far as they are known."""

    rows: list[dict[str, np.ndarray]]
    tokens: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.rows[0]["k"])


class Form(NamedTuple):
    """The rows of a step of two sequences, as `KvCache.step` takes them."""

    rows: int | list[int]
    append: bool

    @property
    def counts(self) -> list[int]:
        return self.rows if isinstance(self.rows, list) else [self.rows] * 2

    @property
    def leading(self) -> tuple[int, ...]:
        return (sum(self.rows),) if isinstance(self.rows, list) else (2, self.rows)

    def parts(self, array: Any) -> list[np.ndarray]:
        """The rows of each sequence."""
        return np.split(array, self.counts[:1]) if isinstance(self.rows, list) else list(array)


FORMS = [Form(1, True), Form(3, True), Form([1, 3], True), Form([2, 0], True), Form(2, False)]


class Answer(NamedTuple):
    """An output on the device, with its q and its sequences, which include the step's rows."""

    out: Any
    layer: int
    q: np.ndarray
    held: Sequence[Held]
    form: Form


class Captured(NamedTuple):
    """A graph of some layers, and the arrays that it reads and writes."""

    capture: ga.KvCapture
    graph: int
    arrays: list[dict[str, Any]]
    layers: tuple[int, ...]
    form: Form


class Walk(LayerRows):
    """A cache on an emulated device, and the rows that it must hold."""

    def __init__(self, device: CallerDevice, ctx: ga.GpuContext, cache: ga.KvCache, seed: int) -> None:
        super().__init__(LAYERS, "float16", seed)
        self.device, self.cache = device, cache
        self.api: Any = device.driver.api
        self.made = Program.__new__(Program)  # for its arrays on streams
        self.made.device, self.made.api = device, self.api  # type: ignore[misc]
        self.streams = self.made.streams = [self.api.create_stream() for _ in range(2)]
        self.latest = self.streams[0]
        self.held: dict[ga.KvSequence, Held] = {}
        self.captures: list[Captured] = []
        self.answers: list[Answer] = []
        self.kept: list[Any] = []
        for group in cache._find().tables._groups[1::2]:
            group.pool._free.reverse()  # otherwise a sequence has pages of the same numbers in all groups
        for _ in range(2):
            self.append(self.create(()), 5)
            self.prompt()

    def create(self, tokens: Sequence[int]) -> ga.KvSequence:
        seq = self.cache.create(tokens if len(tokens) else None).result(20)
        counts["prefix"] += seq.cached > 0
        rows = [self.named(layer, tokens, 0, seq.cached) for layer in range(len(LAYERS))]
        self.held[seq] = Held(rows, tuple(tokens[: seq.cached]))
        return seq

    def named(self, layer: int, tokens: Sequence[int], begin: int, end: int) -> dict[str, np.ndarray]:
        """Rows that depend on the tokens up to their own."""
        parts = [LayerRows(LAYERS, self.dtype, hash(tuple(tokens[: row + 1])) % 2**32) for row in range(begin, end)]
        empty = [self.new(layer, 0)]
        new = empty + [[part.new(each, 1) for each in range(layer + 1)][layer] for part in parts]
        return {name: np.concatenate([each[name] for each in new]) for name in new[0]}

    def more(self, held: Held, new: Sequence[dict[str, np.ndarray]], tokens: Sequence[int] = ()) -> Held:
        rows = [
            {name: np.concatenate([own[name], more[name]]) for name in own}
            for own, more in zip(held.rows, new, strict=True)
        ]
        return Held(rows, (*held.tokens, *tokens))

    def pick(self, count: int) -> list[ga.KvSequence]:
        """Some sequences that have room for more rows."""
        free = [seq for seq, held in self.held.items() if 3 < len(held) < 30]
        self.rng.shuffle(free)  # type: ignore[arg-type]
        return free[:count]

    # Requests

    def append(self, seq: ga.KvSequence, count: int, tokens: Sequence[int] = ()) -> None:
        held = self.held[seq]
        begin = len(held)
        every = range(len(LAYERS))
        if len(tokens):
            new = [self.named(layer, tokens, begin, begin + count) for layer in every]
        else:
            new = [self.new(layer, count) for layer in every]
        names = tuple(tokens[begin : begin + count])
        options = {"tokens": np.array(names)} if names else {}
        assert self.cache.append(seq, **together(new), **options).result(20) == begin + count
        self.held[seq] = self.more(held, new, names)
        counts["append"] += 1

    def prompt(self) -> None:
        tokens = PROMPTS[self.rng.integers(len(PROMPTS))].tolist()
        if len(self.held) < 6:
            seq = self.create(tokens)
            self.append(seq, int(self.rng.integers(1, 1 + len(tokens) - seq.cached)), tokens)

    def fork(self) -> None:
        for seq in self.pick(1) if len(self.held) < 8 else ():
            self.held[self.cache.fork(seq).result(20)] = self.held[seq]
            counts["fork"] += 1

    def truncate(self) -> None:
        for seq in self.pick(1):
            held = self.held[seq]
            length = max(0, len(held) - int(self.rng.integers(1, 3)))
            try:
                self.cache.truncate(seq, length).result(20)
            except ga.InvalidRequest:
                return  # the window has freed these rows
            rows = [{name: one[:length] for name, one in own.items()} for own in held.rows]
            self.held[seq] = Held(rows, held.tokens[:length])
            counts["truncate"] += 1

    def free(self) -> None:
        if len(self.held) > 4:
            seq = list(self.held)[self.rng.integers(len(self.held))]
            self.cache.free(seq).result(20)
            del self.held[seq]
            counts["free"] += 1

    # Steps

    def values(self, form: Form) -> list[dict[str, np.ndarray]]:
        """The inputs of each layer in a step."""
        each = range(len(LAYERS))
        return [
            {"q": self.q(layer, *form.leading), **(self.new(layer, *form.leading) if form.append else {})}
            for layer in each
        ]

    def arrays(self, form: Form) -> list[dict[str, Any]]:
        """Arrays of each layer for a step, at fixed addresses."""
        made = []
        for spec, new in zip(LAYERS, self.values(form), strict=True):
            wide = spec.latent_dim or spec.head_dim_v or spec.head_dim or 0
            own = {name: self.device.memory.empty(one.shape, one.dtype.name) for name, one in new.items()}
            made.append(own | {"out": self.device.memory.empty((*form.leading, HEADS_Q, wide), self.dtype)})
        return made

    def write(self, arrays: list[dict[str, Any]], values: list[dict[str, np.ndarray]], handle: int) -> None:
        """Enqueue copies of the values to the arrays on a stream."""
        for own, new in zip(arrays, values, strict=True):
            for name, value in new.items():
                produced = self.made.produced(value, handle)
                self.kept.append(produced)
                self.api.copy_on_device(own[name].address, produced.address, produced.nbytes, handle)

    def attend(self, step: ga.KvStep, arrays: list[dict[str, Any]], layers: Sequence[int], handle: int) -> None:
        for layer in layers:
            step.attend(layer, **arrays[layer], stream=handle)

    def two(self) -> list[ga.KvSequence]:
        seqs = self.pick(len(self.held))
        if self.rng.random() < 0.4:  # sequences whose rows all have tokens come first
            seqs.sort(key=lambda seq: len(self.held[seq].tokens) < len(self.held[seq]))
        return seqs[:2] if len(seqs) >= 2 else []

    def run(
        self,
        form: Form,
        seqs: list[ga.KvSequence],
        arrays: list[dict[str, Any]],
        handle: int,
        begin: Callable[..., ga.Reply[ga.KvStep]],
        launch: Callable[[ga.KvStep], None],
    ) -> ga.KvStep | None:
        """Run a step that ``launch`` launches, and commit or abort it."""
        if handle != self.latest:  # the latest stream may still use the arrays of a graph
            self.made.finish()
            self.latest = handle
        held, values = [self.held[seq] for seq in seqs], self.values(form)
        options: dict[str, Any] = {}
        names = [(), ()]
        named = form.append and all(len(each.tokens) == len(each) for each in held)
        if named and self.rng.random() < 0.7:
            names = [tuple(self.rng.integers(60, 62, count).tolist()) for count in form.counts]
            options["tokens"] = np.concatenate(names).reshape(form.leading)
            for layer, own in enumerate(values):
                parts = [
                    self.named(layer, (*each.tokens, *more), len(each), len(each) + len(more))
                    for each, more in zip(held, names, strict=True)
                ]
                own |= {
                    name: np.concatenate([part[name] for part in parts]).reshape(own[name].shape) for name in parts[0]
                }
            counts["tokens"] += 1
        self.write(arrays, values, handle)
        before = {page for seq in seqs for page in self.cache._find().table(seq).groups[0].pages[-1:]}
        try:
            step = begin(seqs, **options).result(20)
        except ga.CacheFull:
            return None
        counts["copy"] += not before <= {p for s in seqs for p in self.cache._find().table(s).groups[0].pages}
        launch(step)
        outs = [self.made.consumed(own["out"], handle) for own in arrays]
        if form.append:
            new = [{name: form.parts(one) for name, one in own.items() if name != "q"} for own in values]
            held = [
                self.more(each, [{part: one[index] for part, one in own.items()} for own in new], name)
                for index, (each, name) in enumerate(zip(held, names, strict=True))
            ]
        self.answers += [Answer(out, layer, values[layer]["q"], held, form) for layer, out in enumerate(outs)]
        if self.rng.random() < 0.25:
            step.abort().result(20)
            counts["abort"] += 1
        else:
            assert step.commit().result(20) == [len(each) for each in held]
            self.held |= zip(seqs, held, strict=True)
        return step

    def step(self) -> None:
        form = FORMS[self.rng.integers(len(FORMS))]
        handle, arrays = self.streams[self.rng.integers(2)], self.arrays(form)
        self.kept.append(arrays)

        def begin(seqs: Any, **options: Any) -> ga.Reply[ga.KvStep]:
            return self.cache.step(seqs, heads_q=HEADS_Q, dtype=self.dtype, **form._asdict(), **OPTIONS, **options)

        if seqs := self.two():
            every = range(len(LAYERS))
            self.run(form, seqs, arrays, handle, begin, lambda step: self.attend(step, arrays, every, handle))
            counts["step"] += 1

    def capture(self) -> None:
        if len(self.captures) == 3:
            return
        # The first capture has one row per sequence.
        form = FORMS[self.rng.integers(len(FORMS)) if self.captures else 0]
        arrays, (warm, recorded) = self.arrays(form), self.streams
        some = tuple(sorted(self.rng.permutation(len(LAYERS))[: self.rng.integers(2, 6)].tolist()))
        layers = some if len(self.captures) == 1 else tuple(range(len(LAYERS)))
        graph = 0

        def begin(seqs: Any, **options: Any) -> ga.Reply[ga.KvStep]:
            options |= {"max_length": LONGEST, **form._asdict(), **OPTIONS}
            return self.cache.step(seqs, heads_q=HEADS_Q, dtype=self.dtype, **options)

        def launch(step: ga.KvStep) -> None:
            nonlocal graph
            self.attend(step, arrays, range(len(LAYERS)), warm)
            self.api.begin_capture(recorded)
            self.attend(step, arrays, layers, recorded)
            graph = self.api.end_capture(recorded)

        if seqs := self.two():
            step = self.run(form, seqs, arrays, warm, begin, launch)
            if step is not None and step.captured is not None:
                self.captures.append(Captured(step.captured, graph, arrays, layers, form))
                counts["capture"] += 1

    def replay(self) -> None:
        if not self.captures:
            return
        one, handle = self.captures[self.rng.integers(len(self.captures))], self.streams[self.rng.integers(2)]
        others = [layer for layer in range(len(LAYERS)) if layer not in one.layers]

        def launch(step: ga.KvStep) -> None:
            if self.rng.random() < 0.5:
                self.attend(step, one.arrays, others, handle)
            step.replay(lambda: self.api.launch_graph(one.graph, handle), stream=handle)
            self.attend(step, one.arrays, others, handle)

        if seqs := self.two():
            self.run(one.form, seqs, one.arrays, handle, one.capture.step, launch)
            counts["partial" if others else "replay"] += 1

    # What must hold

    def compare(self, answer: Answer) -> None:
        layer, spec = answer.layer, LAYERS[answer.layer]
        seen = {"window_size": (spec.window, 0)} if spec.window is not None else {}
        outs = answer.form.parts(host_view(answer.out))
        for held, of_q, out in zip(answer.held, answer.form.parts(answer.q), outs, strict=False):
            k, v = keys_of(spec, held.rows[layer])
            q = of_q.astype(np.float64)
            right = attention_forward(q[None], k[None], v[None], causal=True, **OPTIONS, **seen).out[0]
            np.testing.assert_allclose(out.astype(np.float64), right, rtol=2e-3, atol=2e-3, err_msg=f"layer {layer}")

    def check(self) -> None:
        self.made.finish()
        for answer in self.answers:
            self.compare(answer)
        self.answers.clear()
        for seq, held in self.held.items():
            assert self.cache.length(seq) == len(held)
            for layer in range(len(LAYERS)) if len(held) else ():
                q = self.q(layer, 1, 1)
                out = self.cache.attend(q, [seq], layer=layer, **OPTIONS).result(20).out
                self.compare(Answer(out, layer, q, [held], Form(1, False)))
        opened = self.cache._find()
        eventually(lambda: not opened._in_flight and not opened.stepping)
        stats, tables = self.cache.group_stats(), opened.tables
        for group in opened.groups:
            owned = [table.groups[group.number].pages for table in tables._tables.values()]
            held_pages = Counter(page for pages in owned for page in pages)
            pool = tables._groups[group.number].pool
            assert all(pool.references(page) == held_pages[page] for page in range(group.pool.num_blocks))
            assert stats[group.number].free_blocks == group.pool.num_blocks - len(held_pages)


def keys_of(spec: ga.KvLayer, rows: dict[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Keys and values of a layer as its pool has them, in float64."""
    if spec.latent_dim:
        c_kv, k_pe = (rows[name].astype(np.float64) for name in ("c_kv", "k_pe"))
        return np.concatenate([c_kv, k_pe], axis=-1), c_kv
    if spec.dtype is None:
        return rows["k"].astype(np.float64), rows["v"].astype(np.float64)
    found = []
    for name, descale in (("k", spec.k_descale), ("v", spec.v_descale)):
        factors = np.asarray(descale, np.float32)[:, None]
        scaled = np.clip(rows[name].astype(np.float32) * (np.float32(1) / factors), -448, 448)
        found.append(scaled.astype(ml_dtypes.float8_e4m3fn).astype(np.float64) * factors)
    return found[0], found[1]


def walk(order: HostOrder, seed: int, operations: int) -> None:
    options = ga.ContextOptions()

    def open_device() -> CallerDevice:
        return CallerDevice(0, options, EmulatedApi("sm_80", ga.EmulationOptions(seed=seed), options, order))

    with closing(start_context(open_device, options)) as ctx:
        spec: dict[str, Any] = {"num_blocks": 40, "page_size": PAGE, "dtype": "float16", "layers": LAYERS}
        with ctx.kv_cache(**spec) as cache:
            device: Any = ctx._children.device
            made = Walk(device, ctx, cache, seed)
            made.capture()
            actions = [
                lambda: [made.append(seq, int(made.rng.integers(1, 4))) for seq in made.pick(1)],
                made.prompt, made.prompt, made.fork, made.fork, made.truncate, made.free, made.free, made.step,
                made.capture, made.replay, made.replay, made.replay, made.replay,
            ]  # fmt: skip
            for number in range(operations):
                try:
                    actions[made.rng.integers(len(actions))]()
                except ga.CacheFull:
                    counts["full"] += 1
                if number % 12 == 11:
                    made.check()
            made.check()
            for seq in made.held:
                cache.free(seq).result(20)
            assert all(group.free_blocks == group.blocks for group in cache.group_stats())


@pytest.mark.parametrize("order", ORDERS)
def test_random_replays_over_layers_that_differ_are_right(order: HostOrder) -> None:
    counts.clear()
    for seed in range(3):
        walk(order, seed, 36)
    assert not {name for name in WHAT if not counts[name]}, counts


@pytest.mark.sweep
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("order", ORDERS)
def test_50_random_programs_of_replays_are_right(order: HostOrder) -> None:
    for seed in range(100, 150):
        walk(order, seed, 60)
