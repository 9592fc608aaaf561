"""Seeded problems are as documented: rebuilt from their repro line, of the stated spread, poisoned where hidden."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from cases.poison import POISON_PAGE, paginate, poison_unseen

from gpu_actors.testing.problems import cast, random_forward


@pytest.mark.parametrize("seed", range(4))
def test_a_repro_line_rebuilds_its_case(seed: int) -> None:
    choices: list[dict[str, Any]] = [
        {"seqlens": (30, 50)},
        {"seqlens": (30, 50), "dtype": "float8_e4m3fn", "always": ("causal",), "features": ("softcap",)},
    ]
    case = random_forward(seed, **choices[seed % 2])
    again = eval(case.repro, {"random_forward": random_forward})
    assert "\n" not in case.repro
    assert again.options.keys() == case.options.keys()
    for name in ("q", "k", "v"):
        assert getattr(again, name).tobytes() == getattr(case, name).tobytes()
    for name, value in case.options.items():
        assert np.array_equal(value, again.options[name])


def test_naming_one_choice_leaves_the_others_as_drawn() -> None:
    drawn = random_forward(8, varlen=False, seqlens=(16, 16))
    named = random_forward(8, varlen=False, seqlens=(16, 16), kind="gaussian", dtype="float16")
    assert drawn.options.keys() == named.options.keys()
    assert drawn.q.shape == named.q.shape


def test_varlen_batches_include_empty_sequences() -> None:
    lengths = [pair for seed in range(40) for pair in random_forward(seed, varlen=True, seqlens=(9, 9)).seqlens]
    assert {(0, "q"), (0, "k")} <= {(length, side) for pair in lengths for length, side in zip(pair, "qk", strict=True)}


@pytest.mark.parametrize(("kind", "lowest", "highest"), [("gaussian", 0.8, 1.2), ("peaked", 8, 12)])
def test_inputs_have_the_stated_spread_of_scores(kind: Any, lowest: float, highest: float) -> None:
    case = random_forward(0, dtype="float64", kind=kind, varlen=False, batch=1, seqlens=(200, 300), features=())
    scores = np.einsum("qd,kd->qk", case.q[0, :, 0], case.k[0, :, 0]) / np.sqrt(case.q.shape[-1])
    assert lowest < scores.std() < highest


def test_rising_scores_rise_and_an_outlier_stands_out() -> None:
    choices: dict[str, Any] = {"dtype": "float64", "varlen": False, "seqlens": (64, 90), "features": ()}
    rising = random_forward(0, kind="rising", **choices)
    scores = np.einsum("qd,kd->qk", rising.q[0, :, 0], rising.k[0, :, 0])
    assert np.all(np.diff(scores, axis=1) > 0)
    lengths = np.linalg.norm(random_forward(0, kind="outlier", **choices).k, axis=-1)
    ranked = np.sort(lengths, axis=1)
    assert np.all(ranked[:, -1] > 10 * ranked[:, -2])


def test_eight_bit_inputs_are_clipped_before_they_are_cast() -> None:
    assert cast(np.array([1e9, -1e9, 1.0]), "float8_e4m3fn").astype(float).tolist() == [448, -448, 1]
    assert cast(np.array([1e9]), "float8_e5m2").astype(float).tolist() == [448]


def test_a_paged_cache_holds_its_sequences_and_poison_everywhere_else() -> None:
    rng = np.random.default_rng(3)
    k = [rng.normal(size=(length, 2, 4)).astype(np.float32) for length in (5, 0, 16, 9)]
    v = [rng.normal(size=(length, 2, 4)).astype(np.float32) for length in (5, 0, 16, 9)]
    cache = paginate(rng, k, v, 8)
    assert cache.cache_seqlens.tolist() == [5, 0, 16, 9]
    assert np.all(cache.block_table[:, -1] == POISON_PAGE)
    for pool, sequences in ((cache.k, k), (cache.v, v)):
        for table, sequence in zip(cache.block_table, sequences, strict=True):
            pages = table[table != POISON_PAGE]
            gathered = pool[pages].reshape(-1, 2, 4)
            assert np.array_equal(gathered[: len(sequence)], sequence)
            assert np.isnan(gathered[len(sequence) :]).all()
        assert np.isfinite(pool).sum() == sum(sequence.size for sequence in sequences)


def test_an_unknown_feature_is_refused() -> None:
    with pytest.raises(ValueError, match="telepathy"):
        random_forward(0, always=("telepathy",))


def test_the_poison_cases_do_hold_poison() -> None:
    cases = (random_forward(seed, seqlens=(5, 14), head_dim=8, always=("window",)) for seed in range(20))
    assert sum(np.isnan(poison_unseen(case).k.astype(np.float32)).any() for case in cases) > 5
