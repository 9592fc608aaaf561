"""gpu-actors serve with the torch engine: the same API over real sockets, and the choice of the engine."""

from __future__ import annotations

import contextlib
import json
import logging
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from support.cli import Run
from support.generation import write_scripted, write_tokenizer
from support.openai_server import MOCK, STREAM, Serving, events_of
from support.serve_process import Process
from support.service import eventually
from support.smollm2 import prompts
from support.streams import asking

import gpu_actors as ga
from gpu_actors import StreamedTrace
from gpu_actors.openai_api import ServeSettings
from gpu_actors.testing import FaultPlan

torch = pytest.importorskip("torch", reason="the engine runs models of torch")
transformers = pytest.importorskip("transformers", reason="it runs them by Transformers")
models: Any = pytest.importorskip("support.torch_models")
openai: Any = pytest.importorskip("openai")

pytestmark = pytest.mark.timeout(300)

COMPLETIONS = "/v1/completions"
ASKED = {"model": "m", "prompt": [5, 6, 7], "max_tokens": 12, "temperature": 0}


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose texts end by length alone, because its logit of token 257 is 0."""

    def build() -> Any:
        model = models.FAMILIES["qwen3"]()
        with torch.no_grad():
            model.lm_head.weight[257] = 0
        return model

    folder: Path = models.save(tmp_path_factory.mktemp("qwen"), build)
    return folder


@pytest.fixture(scope="module")
def serving(qwen: Path) -> Iterator[Serving]:
    with Serving(models=(f"m={qwen}",), engine="torch", max_running=64) as running:
        yield running
        running.until_idle()


@pytest.fixture
def client(serving: Serving) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{serving.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def bytes_text(tokens: list[int], folder: Path) -> str:
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    return str(tokenizer.decode([token for token in tokens if token < 258], skip_special_tokens=True))


def test_the_openai_client_streams_what_eager_attention_generates(client: Any, serving: Serving, qwen: Path) -> None:
    wanted = models.eager(qwen, [ASKED["prompt"]], 12)[0]
    chunks = list(client.completions.create(**ASKED, stream=True, stream_options={"include_usage": True}))
    text = "".join(choice.text for chunk in chunks for choice in chunk.choices)
    assert text == bytes_text(wanted, qwen)
    assert chunks[-1].usage.completion_tokens == 12
    whole = client.completions.create(**ASKED, logprobs=2)
    assert whole.choices[0].text == text
    assert len(whole.choices[0].logprobs.token_logprobs) == 12
    assert client.models.list().data[0].model_dump()["dtype"] == "float32"


def test_a_stop_string_ends_a_text_and_usage_counts_what_was_cached(client: Any, serving: Serving) -> None:
    asked = {**ASKED, "prompt": list(range(40))}
    first = client.completions.create(**asked)
    again = client.completions.create(**asked)
    assert again.usage.prompt_tokens_details.cached_tokens == 32, "whole pages"
    text = first.choices[0].text
    assert again.choices[0].text == text
    stopped = client.completions.create(**asked, stop=text[4:6])
    at = text.index(text[4:6])
    assert (stopped.choices[0].text, stopped.choices[0].finish_reason) == (text[:at], "stop")
    serving.until_idle()
    assert serving.engine.stats.ended["stop"] >= 1


def test_a_conversation_with_a_seed_is_repeated(client: Any) -> None:
    said = [{"role": "user", "content": "hello"}]
    asked = {"model": "m", "messages": said, "max_tokens": 12, "seed": 5, "temperature": 0.7, "top_p": 0.9}
    whole = client.chat.completions.create(**asked, logprobs=True, top_logprobs=2)
    chunks = list(client.chat.completions.create(**asked, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.choices[0].message.content
    assert len(whole.choices[0].logprobs.content) == whole.usage.completion_tokens


def test_64_clients_at_once_get_their_own_texts(serving: Serving, qwen: Path) -> None:
    bodies = [{**ASKED, "prompt": [number, 1, *range(number)]} for number in range(64)]
    wanted = models.eager(qwen, [body["prompt"] for body in bodies], 12)

    def asked(number: int) -> str:
        if number % 2:
            answered = serving.post(COMPLETIONS, bodies[number])
            assert answered.status == 200, answered.body
            return str(answered.json["choices"][0]["text"])
        events = serving.stream(COMPLETIONS, bodies[number])
        return "".join(choice["text"] for event in events for choice in event["choices"])

    with ThreadPoolExecutor(64) as pool:
        found = list(pool.map(asked, range(64)))
    assert found == [bytes_text(tokens, qwen) for tokens in wanted]
    assert serving.engine.stats.most_texts > 8
    serving.until_idle()


def test_a_client_that_leaves_frees_its_pages(client: Any, serving: Serving) -> None:
    before = serving.engine.stats.ended.get("cancelled", 0)
    stream = client.completions.create(**{**ASKED, "max_tokens": 240}, stream=True)
    next(iter(stream))
    stream.close()
    eventually(lambda: serving.engine.stats.ended.get("cancelled", 0) == before + 1)
    serving.until_idle()


def test_metrics_and_the_page_show_the_engine(serving: Serving) -> None:
    serving.post(COMPLETIONS, ASKED)
    metrics = serving.ask("/metrics").body.decode()
    for name in ('gpu_actors_texts{state="running"} 0.0', "gpu_actors_text_steps_total", "gpu_actors_kv_pages{"):
        assert name in metrics
    assert serving.ask("/status.json").status == 200


def test_a_launch_that_fails_costs_its_texts_and_a_lost_context_the_server(qwen: Path) -> None:
    plan = FaultPlan().fail(launch=9).lose_context(launch=60)  # the first answers take 33 launches
    options = ga.ContextOptions(mock=MOCK.mock, fault_plan=plan)
    with Serving(models=(f"m={qwen}",), engine="torch", options=options) as serving:
        failed = serving.post(COMPLETIONS, ASKED)
        assert (failed.status, failed.json["error"]["code"]) == (500, "LaunchError")
        assert serving.post(COMPLETIONS, ASKED).status == 200
        serving.until_idle()
        events = serving.stream(COMPLETIONS, {**ASKED, "max_tokens": 200})
        assert events[-1]["error"]["code"] == "ContextLost"
        assert serving.post(COMPLETIONS, ASKED).status == 503
        assert (serving.ask("/readyz").status, serving.ask("/livez").status) == (503, 503)


def test_a_trace_shows_texts_steps_and_launches(qwen: Path, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    with StreamedTrace(path) as trace:
        options = ga.ContextOptions(mock=MOCK.mock, on_event=trace)
        with Serving(models=(f"m={qwen}",), engine="torch", options=options) as serving:
            assert serving.post(COMPLETIONS, ASKED).status == 200
    names = path.read_text()
    for name in ('"text"', '"step"', '"prefill"', '"decode"', '"tokenise"'):
        assert name in names, name


def test_scores_of_prompts_are_refused_by_the_engine_that_has_them(serving: Serving) -> None:
    answered = serving.post(COMPLETIONS, {**ASKED, "echo": True, "logprobs": 1})
    error = answered.json["error"]
    assert (answered.status, error["code"], error["param"]) == (400, "Unsupported", "echo")
    assert "the numpy engine does" in error["message"]
    # Without logprobs, echo only puts the prompt before the text.
    assert serving.post(COMPLETIONS, {**ASKED, "echo": True, "prompt": "ab"}).json["choices"][0]["text"][:2] == "ab"


@pytest.mark.parametrize(
    ("engine", "model", "said"),
    [
        ("auto", "llama", "by the numpy engine: it computes this model, and --engine does not name torch"),
        ("numpy", "llama", "by the numpy engine: --engine names it"),
        ("torch", "llama", "by the torch engine, in float32 on cpu: --engine names it"),
        ("auto", "qwen", "by the torch engine, in float32 on cpu: the numpy engine does not compute this model: "),
    ],
)
def test_the_log_says_which_engine_generates_and_why(
    qwen: Path, tmp_path: Path, engine: str, model: str, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    if model == "llama":
        write_scripted(tmp_path, {97: 98, 98: 99}, vocab=320)
        write_tokenizer(tmp_path)
    source = qwen if model == "qwen" else tmp_path
    with caplog.at_level(logging.INFO, "gpu_actors"), Serving(models=(f"m={source}",), engine=engine) as serving:
        answered = serving.post(COMPLETIONS, {**ASKED, "prompt": [97], "max_tokens": 3})
        assert answered.status == 200
        if model == "llama":
            assert answered.json["choices"][0]["text"] == bytes_text([98, 99, 99], tmp_path)
    assert said in caplog.text


def test_what_no_engine_serves_ends_with_one_sentence_and_2(run: Run, qwen: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "abacus"}')
    for options, said in (
        (("--model", qwen, "--engine", "numpy"), "model_type"),
        (("--model", qwen, "--engine", "abacus"), "must be auto, numpy, torch"),
        (("--model", "tiny", "--engine", "torch"), "the numpy engine has smollm2, tiny and GGUF files"),
        (("--model", qwen, "--engine", "torch", "--workers", "1"), "--workers must be 0"),
        (("--model", qwen, "--cache-dtype", "float8_e5m2"), "cache_dtype"),
        (("--model", tmp_path, "--engine", "torch"), "must hold a tokenizer"),
    ):
        code, _, err = run("serve", "--device", "mock", "--port", "0", *map(str, options))
        assert (code, said in err.splitlines()[-1]) == (2, True), err


def test_streams_end_in_a_complete_event_after_sigterm(qwen: Path) -> None:
    content = {"model": "m", "prompt": [1, 2, 3], "max_tokens": 240, "temperature": 0, **STREAM}
    options = ("--model", f"m={qwen}", "--leave-seconds", "0.2", "--drain-seconds", "0", "--timeout", "600")
    with Process(*options) as server, contextlib.ExitStack() as stack:
        asked = [asking(server.port, COMPLETIONS, {**content, "seed": number}, begun=False) for number in range(24)]
        clients = [stack.enter_context(one) for one in asked]
        for client in clients:
            client.begin()
            assert client.read.startswith(b"HTTP/1.1 200 "), client.read
        server.process.send_signal(signal.SIGTERM)
        answers = [client.answer() for client in clients]
        assert server.process.wait(60) == 0
    ends = [event[-1].get("error", {}).get("code", "whole") for event in (events_of(body) for _, body in answers)]
    assert set(ends) <= {"ActorStopped", "whole"}
    assert "ActorStopped" in ends
    lines = [json.loads(line) for line in server.log]  # no progress bar is printed between them
    assert [line for line in lines if line["level"] not in ("INFO", "WARNING")] == []


def test_texts_go_on_while_the_server_drains(qwen: Path) -> None:
    content = {"model": "m", "prompt": [1, 2, 3], "max_tokens": 120, "temperature": 0, **STREAM}
    options = ("--model", f"m={qwen}", "--leave-seconds", "0.2", "--drain-seconds", "60")
    with Process(*options) as server, asking(server.port, COMPLETIONS, content) as client:
        server.process.send_signal(signal.SIGTERM)
        code, body = client.answer()
        assert server.process.wait(60) == 0
    assert (code, events_of(body)[-2]["choices"][0]["finish_reason"]) == (200, "length")


def test_the_engine_is_one_of_three() -> None:
    with pytest.raises(ValueError, match="must be auto, numpy, torch"):
        ServeSettings(engine="jax")


def test_smollm2_answers_the_same_through_both_engines(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")  # Transformers reads GGUF with it
    from inside.generation import installed

    path = installed()
    read = transformers.AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    whole = transformers.LlamaForCausalLM(read.config)  # a model that was never quantized can be saved
    whole.load_state_dict(read.state_dict())
    whole.save_pretrained(tmp_path)
    transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name).save_pretrained(tmp_path)
    given = [prompt for prompt in prompts() if len(prompt) < 60][:3]
    texts: list[list[str]] = []
    for engine in ("numpy", "torch"):
        source = "smollm2" if engine == "numpy" else str(tmp_path)
        with Serving(models=(f"m={source}",), engine=engine) as serving:
            bodies = [{"model": "m", "prompt": prompt, "max_tokens": 16, "temperature": 0} for prompt in given]
            texts.append([serving.post(COMPLETIONS, body).json["choices"][0]["text"] for body in bodies])
    assert texts[0] == texts[1]
    assert all(text.strip() for text in texts[0])
