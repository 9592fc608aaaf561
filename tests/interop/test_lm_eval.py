"""lm-evaluation-harness against a server of this package: its client of completions scores the tiny model, offline."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from support.openai_server import Serving

from gpu_actors.generation import Llama, plain_logits

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # lm_eval's imports warn
    pytest.importorskip("lm_eval")
    from lm_eval.api.instance import Instance
    from lm_eval.models.openai_completions import LocalCompletionsAPI

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(240)]

PAIRS = [("The capital of France is", " Paris"), ("The capital of France is", " Rome"), ("2 + 2 =", " 4"), ("", "once")]


@pytest.fixture(scope="module")
def serving() -> Iterator[Serving]:
    with Serving() as running:
        yield running
        running.until_idle()


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with a tokenizer of the tiny model, whose tokens are bytes; token 256 begins a text."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]  # the others are spelled by characters from 256 on
    others = {chr(256 + number): byte for number, byte in enumerate(sorted({*range(256)} - {*shown}))}
    made = Tokenizer(models.BPE(vocab={chr(byte): byte for byte in shown} | others, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    folder = tmp_path_factory.mktemp("tokenizer")
    PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token="</s>").save_pretrained(folder)
    return str(folder)


def client(serving: Serving, tokenizer: str, concurrent: int = 1) -> Any:
    return LocalCompletionsAPI(
        model="tiny",
        base_url=f"{serving.url}/v1/completions",
        tokenizer_backend="huggingface",
        tokenizer=tokenizer,
        num_concurrent=concurrent,
        max_retries=1,
    )


def model_of(serving: Serving) -> Llama:
    model: Llama = serving.engine._model
    return model


def scored(model: Llama, context: list[int], rest: list[int]) -> tuple[float, bool]:
    """By the plain model, the log probability of the rest after the context, and whether it is the likeliest."""
    logits = plain_logits(model, np.array([*context, *rest]), np.float16).astype(np.float64)
    logits = logits[len(context) - 1 : -1]
    scores = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    found = sum(float(row[token]) for row, token in zip(scores, rest, strict=True))
    return found, logits.argmax(axis=-1).tolist() == rest


@pytest.mark.parametrize("concurrent", [1, 4])
def test_it_scores_continuations_as_the_model_does(serving: Serving, tokenizer: str, concurrent: int) -> None:
    asked = [Instance("loglikelihood", {}, pair, number) for number, pair in enumerate(PAIRS)]
    answers = client(serving, tokenizer, concurrent).loglikelihood(asked)
    for (context, rest), answer in zip(PAIRS, answers, strict=True):
        before = [*context.encode()] or [256]  # the token that begins a text
        assert answer == pytest.approx(scored(model_of(serving), before, [*rest.encode()]), abs=5e-2)


def test_it_sees_which_continuation_is_the_likeliest(serving: Serving, tokenizer: str) -> None:
    model, context = model_of(serving), [*b"The likeliest"]
    rest: list[int] = []
    for _ in range(4):
        rest.append(int(plain_logits(model, np.array([*context, *rest]), np.float16)[-1].argmax()))
    other = [*rest[:-1], (rest[-1] + 1) % 256]
    found = client(serving, tokenizer)._loglikelihood_tokens([(None, context, each) for each in (rest, other)])
    assert [greedy for _, greedy in found] == [True, False]


def test_it_scores_whole_texts(serving: Serving, tokenizer: str) -> None:
    text = "A text of its own, longer than a page of the cache."
    (found,) = client(serving, tokenizer).loglikelihood_rolling([Instance("loglikelihood_rolling", {}, (text,), 0)])
    assert found == pytest.approx(scored(model_of(serving), [256], [*text.encode()])[0], abs=5e-2)


def test_it_generates(serving: Serving, tokenizer: str) -> None:
    asked = Instance("generate_until", {}, ("hello", {"until": ["\n\n"], "max_gen_toks": 8}), 0)
    (text,) = client(serving, tokenizer).generate_until([asked])
    assert text == serving.complete(prompt=[*b"hello"])["choices"][0]["text"]
