"""Stop strings and sampling, each alone."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_actors import InvalidRequest, LaunchError
from gpu_actors.generation import Sampling, StopStrings, TokenScores
from gpu_actors.generation.sampling import Sampler


def fed(stops: list[str], pieces: list[str]) -> tuple[str, bool]:
    stop = StopStrings(stops)
    text = "".join(stop.feed(piece) for piece in pieces)
    return text + ("" if stop.found else stop.end()), stop.found


class TestStopStrings:
    @pytest.mark.parametrize(
        ("stops", "pieces", "text", "found"),
        [
            ([], ["abc", "d"], "abcd", False),
            (["cd"], ["abc", "d", "e"], "ab", True),
            (["cd"], ["abc", "e"], "abce", False),
            (["aab"], ["a", "a", "a", "b"], "a", True),
            (["xyz"], ["wx", "y"], "wxy", False),
            (["b", "ab"], ["ab"], "", True),
            (["bc", "abcd"], ["abc", "d"], "a", True),
            (["\n\n"], ["one\n", "\ntwo"], "one", True),
        ],
    )
    def test_the_text_ends_before_the_first_that_is_complete(self, stops, pieces, text, found):
        assert fed(stops, pieces) == (text, found)

    def test_what_can_no_longer_be_a_stop_string_is_given_at_once(self):
        stop = StopStrings(["END"])
        assert [stop.feed(piece) for piece in ("aE", "N", "x", "EN", "D", "more")] == ["a", "", "ENx", "", "", ""]
        assert stop.found
        assert stop.end() == ""

    @given(st.text("ab", max_size=30), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3), st.data())
    def test_where_the_pieces_are_cut_changes_nothing(self, text, stops, data):
        cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
        pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        assert fed(stops, pieces) == fed(stops, list(text)) == fed(stops, [text])
        shown, result = fed(stops, pieces)
        assert text.startswith(shown)
        assert result == any(stop in text for stop in stops)
        assert not any(stop in shown for stop in stops)

    @pytest.mark.parametrize(
        ("stops", "pieces", "text", "found"),
        [
            ([], ["a", "<end>", "b"], "ab", False),
            (["<end>"], ["a", "<end>", "b"], "a", True),
            (["a<end>b"], ["xa", "<end>", "b"], "x", True),
            (["<end>b"], ["a", "<end>", "c"], "ac", False),
            (["d>\nb"], ["a", "<end>", "\n", "b"], "a", True),
            (["<end><end>"], ["a", "<end>", "b", "<end>", "<end>"], "ab", True),
            (["<end>z"], ["a", "<end>"], "a", False),
        ],
    )
    def test_what_is_not_shown_may_be_a_part_of_one(self, stops, pieces, text, found):
        stop = StopStrings(stops)
        output = "".join(stop.feed(piece, shown=piece != "<end>") for piece in pieces)
        assert (output + ("" if stop.found else stop.end()), stop.found) == (text, found)

    @given(
        st.lists(st.sampled_from(["a", "b", "<a>", "<b>"]), max_size=12),
        st.lists(st.text("ab<>", min_size=1), max_size=3),
    )
    def test_of_what_is_not_shown_nothing_is_given(self, pieces, stops):
        stop = StopStrings(stops)
        output = "".join(stop.feed(piece, shown=len(piece) == 1) for piece in pieces)
        output += "" if stop.found else stop.end()
        whole = "".join(pieces)
        ends = [(whole.find(each) + len(each), whole.find(each)) for each in stops if each in whole]
        start = min(ends)[1] if ends else len(whole)
        at, shown = 0, ""
        for piece in pieces:
            shown += piece[: max(0, start - at)] if len(piece) == 1 else ""
            at += len(piece)
        assert (output, stop.found) == (shown, bool(ends))


def logits(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


class TestSampling:
    def test_temperature_0_takes_the_likeliest(self):
        assert Sampler(Sampling()).draw(logits(0, 3, 1)) == (1, None)

    @pytest.mark.parametrize(("top_p", "kept"), [(1.0, {0, 1, 2, 3}), (0.9, {0, 1, 2}), (0.75, {0, 1}), (1e-9, {0})])
    def test_top_p_keeps_the_fewest_that_have_the_share(self, top_p, kept):
        shares = logits(*np.log([0.5, 0.3, 0.15, 0.05]))
        sampler = Sampler(Sampling(temperature=1.0, top_p=top_p, seed=1))
        assert {sampler.draw(shares)[0] for _ in range(400)} == kept

    def test_draws_have_the_shares_of_the_softmax(self):
        expected = np.array([0.1, 0.6, 0.3])
        sampler = Sampler(Sampling(temperature=2.0, seed=3))
        counts = np.bincount([sampler.draw(logits(*2 * np.log(expected)))[0] for _ in range(4000)])
        # Five standard deviations of a share of 4,000 draws.
        assert np.abs(counts / 4000 - expected).max() < 5 * 0.5 / math.sqrt(4000)

    def test_the_smallest_temperature_is_no_division_by_0(self):
        assert Sampler(Sampling(temperature=5e-324, seed=0)).draw(logits(1, 2, 1))[0] == 1
        assert Sampler(Sampling(temperature=1e300, seed=-1)).draw(logits(1, 2, 1))[0] in (0, 1, 2)

    def test_no_seed_draws_another_text_every_time(self):
        flat = np.zeros(1 << 12, np.float32)
        seen = {tuple(Sampler(Sampling(temperature=1.0, seed=None)).draw(flat)[0] for _ in range(1)) for _ in range(5)}
        assert len(seen) > 1

    def test_scores_are_those_of_the_model(self):
        _, scores = Sampler(Sampling(temperature=0.5, top_p=0.1, top_logprobs=2)).draw(logits(*np.log([0.2, 0.7, 0.1])))
        assert isinstance(scores, TokenScores)
        assert scores.chosen == pytest.approx(math.log(0.7), abs=1e-6)
        assert [token for token, _ in scores.top] == [1, 0]
        assert [score for _, score in scores.top] == pytest.approx([math.log(0.7), math.log(0.2)], abs=1e-6)

    @pytest.mark.parametrize("top", [0, 1, 3, 20])
    def test_the_likeliest_of_equal_ones_are_the_first(self, top: int):
        logits = np.random.default_rng(top).integers(0, 4, 300).astype(np.float32)
        scores = Sampler(Sampling(top_logprobs=top, score_prompt=True)).score(logits, 7)
        assert [token for token, _ in scores.top] == np.argsort(-logits, kind="stable")[:top].tolist()
        assert scores.chosen == pytest.approx(float(logits[7] - np.log(np.exp(logits).sum())), abs=1e-4)

    def test_logits_that_are_not_finite_are_an_error(self):
        for value, temperature in itertools.product((math.nan, math.inf, -math.inf), (0.0, 1.0)):
            with pytest.raises(LaunchError, match="not finite"):
                Sampler(Sampling(temperature=temperature)).draw(logits(0, value))

    def test_values_out_of_range_are_refused_by_name(self):
        wrong: dict[str, tuple[Any, ...]] = {
            "temperature": (-1, math.nan, math.inf, "1", True, None),
            "top_p": (0, -0.1, 1.1, math.nan, "1"),
            "seed": (1.0, True, 1 << 64, -(1 << 63) - 1),
            "top_logprobs": (-1, 21, 1.0, True),
            "score_prompt": (True, 1, None),
        }
        for field, values in wrong.items():
            for value in values:
                with pytest.raises(InvalidRequest) as caught:
                    Sampling(**{field: value})
                assert caught.value.field == field
