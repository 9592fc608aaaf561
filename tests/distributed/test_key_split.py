"""Which keys a worker has, and which requests it gets so that each row sees its keys: compared key by key."""

from __future__ import annotations

import itertools
import random

import numpy as np
from inside.attention import KeyMask

from gpu_actors.distributed import KeySplit


def test_keys_are_dealt_out_once_and_in_order() -> None:
    for workers, run, length in itertools.product((1, 2, 3, 7), (1, 2, 5, 16), (0, 1, 5, 33, 100)):
        split = KeySplit(workers, run)
        owners = split.owners(0, length)
        assert split.lengths(length) == [int((owners == worker).sum()) for worker in range(workers)]
        for worker in range(workers):
            places = np.flatnonzero(owners == worker)
            assert [split.position(worker, key) for key in range(len(places))] == places.tolist()
            steps = set(np.diff(places).tolist())
            step = split.step(length)
            assert not step or steps <= {step}
            cuts = np.arange(length + 1)
            assert split.before(worker, cuts).tolist() == [int((places < cut).sum()) for cut in cuts]


def test_rows_are_asked_for_the_keys_that_they_see() -> None:
    dice = random.Random(5)
    for _ in range(250):
        split = KeySplit(dice.randint(1, 4), dice.choice((1, 2, 3, 8)))
        length, count = dice.randint(0, 60), dice.randint(1, 12)
        begin = length if dice.random() < 0.6 else length - count
        mask = KeyMask(
            causal=dice.random() < 0.6,
            window_size=(dice.choice((-1, 0, 1, 5, 20)), dice.choice((-1, 0, 3))),
            sink_tokens=dice.choice((0, 0, 1, 4, 30)),
            attention_chunk=dice.choice((0, 0, 3, 16)),
        )
        positions = np.arange(begin, begin + count)
        seen = mask.visible_positions(positions[:, None], np.arange(length))
        seen = np.ones((count, length), bool) if seen is None else seen
        for worker in range(split.workers):
            expected = seen[:, split.owners(0, length) == worker]
            result = np.zeros_like(expected)
            for asked in split.asked(worker, positions, length, mask):
                rows = np.arange(count)[asked.rows]
                assert not result[rows].any()
                # The keys that a cache of ``asked.keys`` shows such a request (`KeyMask`, at the bottom right).
                there = KeyMask(window_size=(asked.reach, -1), sink_tokens=asked.sinks)
                own = (
                    np.full(len(rows), asked.keys - 1) if asked.apart else asked.keys - len(rows) + np.arange(len(rows))
                )
                keys = there.visible_positions(own[:, None], np.arange(asked.keys))
                result[rows, : asked.keys] = True if keys is None else keys
            np.testing.assert_array_equal(result, expected)


def test_rows_of_a_window_that_moves_within_a_run_share_a_request() -> None:
    mask = KeyMask(causal=True, window_size=(100, 0))
    requests = KeySplit(2, 16).asked(0, np.arange(640, 640 + 128), 640, mask)
    assert len(requests) <= 10
    assert KeySplit(2, 16).asked(0, np.arange(640, 768), 640, KeyMask(causal=True)) == [
        (slice(0, 128), 320, -1, 0, False)
    ]
