from __future__ import annotations

import http.client
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.models.cases import model as titans_model
from tests.text.endpoint import KEY, Endpoint, closed_port, serve
from titans.models import build
from titans.models.tokenizer import byte_tokenizer
from titans.text.llm import (
    LLM,
    LLMError,
    LocalLLM,
    NoLLM,
    OpenAILLM,
    TransformersLLM,
    estimate_tokens,
    idle_cores,
    make_llm,
)
from titans.text.prompt import PLAIN, SMALL, render

ROOT = Path(__file__).parents[2]
HELLO = [{"role": "system", "content": "Answer in one word."}, {"role": "user", "content": "Say hello."}]
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def local() -> Iterator[LocalLLM]:
    """The packaged model, loaded once."""
    llm = LocalLLM()
    yield llm
    llm.close()


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    with serve("Hel", "lo", " there.") as made:
        yield made


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tiny models with random weights: one of transformers with a chat template, one of ours without."""
    folder = tmp_path_factory.mktemp("models")
    torch.manual_seed(0)
    size: dict[str, Any] = {"num_hidden_layers": 1, "intermediate_size": 64, "max_position_embeddings": 400}
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>", "]~b]"]})
    tokenizer.chat_template = CHATML
    for name in ("llama", "strict", "failing"):
        build("transformer++", "1m", vocab_size=260, **size).save_pretrained(folder / name)
        if name != "llama":
            wrong = "messages[0]['role'] == 'system'" if name == "strict" else "true"
            tokenizer.chat_template = "{% if " + wrong + " %}{{ raise_exception('No system.') }}{% endif %}" + CHATML
        tokenizer.save_pretrained(folder / name)
    titans_model("mac", vocab_size=257).save_pretrained(folder / "titans")
    byte_tokenizer().save_pretrained(folder / "titans")
    (folder / "empty").mkdir()
    return folder


def ask(llm: LLM, *, max_tokens: int = 12, **options: Any) -> str:
    return "".join(llm.stream(HELLO, max_tokens, **options))


def test_a_name_that_is_none_is_refused_in_one_sentence() -> None:
    for spec in ("", "gpt-4", "openai", "openai:", "hf:", "none:x"):
        with pytest.raises(LLMError, match=rf"^the language model is '{spec}'; expected local, .* or hf:FOLDER$"):
            make_llm(spec)
    with pytest.raises(LLMError, match=r"^a base URL is given and the model is 'local'; expected openai:MODEL"):
        make_llm("local", base_url="http://localhost")


def test_no_model_shows_the_prompt() -> None:
    llm = make_llm("none")
    assert isinstance(llm, NoLLM) and not llm.answers
    assert ask(llm) == render(HELLO)


# The local model


def test_the_local_model_streams_the_same_answer_to_the_same_prompt(local: LocalLLM) -> None:
    assert local.name.startswith("SmolLM2-135M") and local.layout is SMALL and local.context == 2048
    pieces = list(local.stream(HELLO, 8))
    assert len(pieces) > 1
    assert ask(local, max_tokens=8, temperature=3.0, seed=1) != "".join(pieces)
    assert list(local.stream(HELLO, 8)) == pieces


def test_an_answer_of_the_local_model_can_be_stopped(local: LocalLLM) -> None:
    stream = local.stream([{"role": "user", "content": "Write a very long story."}], 1000)
    next(stream)
    start = time.monotonic()
    for _ in range(5):
        next(stream)
    five = time.monotonic() - start
    start = time.monotonic()
    stream.close()
    assert time.monotonic() - start < 0.5  # nobody waits for the token that is being made
    assert ask(local, max_tokens=2)
    assert time.monotonic() - start < max(60 * five, 0.5)  # all of them would have taken 200 times as long


def test_the_local_model_counts_tokens_and_refuses_a_prompt_that_is_too_long(local: LocalLLM) -> None:
    assert local.count_tokens("") == 0
    assert local.count_tokens("Hello world, hello world.") == 6
    with pytest.raises(LLMError, match=r"^SmolLM2.* refuses the prompt: request \(\d+ tokens\) exceeds"):
        list(local.stream([{"role": "user", "content": "word " * 3000}]))


def test_nobody_else_on_the_machine_can_use_the_local_model(local: LocalLLM) -> None:
    address = local._server.listening_address.removeprefix("http://")
    assert address.startswith("127.0.0.1:")
    for path in ("/tokenize", "/v1/chat/completions", "/completion"):
        connection = http.client.HTTPConnection(address)
        connection.request("POST", path, '{"content": "x", "prompt": "x", "messages": []}')
        assert connection.getresponse().status == 401
        connection.close()


def test_the_local_model_writes_nothing_to_the_terminal() -> None:
    code = (
        "from titans.text.llm import LocalLLM\n"
        "llm = LocalLLM()\n"
        "assert list(llm.stream([{'role': 'user', 'content': 'Hi.'}], 3))\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, env=environment, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


def test_a_file_that_is_no_model_is_refused_in_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(LLMError, match=r"none\.gguf is not there; expected a GGUF file$"):
        make_llm(f"local:{tmp_path / 'none.gguf'}")
    for name, data, words in (("text", b"hello", "is not a GGUF file"), ("damaged", b"GGUF" + bytes(99), "cannot be")):
        (tmp_path / name).write_bytes(data)
        with pytest.raises(LLMError, match=words):
            LocalLLM(tmp_path / name)


def test_there_is_a_core_for_the_local_model() -> None:
    assert 1 <= idle_cores() <= (os.cpu_count() or 1)


# Endpoints


def test_an_endpoint_is_sent_the_prompt_and_its_answer_comes_in_pieces(endpoint: Endpoint) -> None:
    llm = make_llm("openai:words", endpoint.url, KEY)
    assert llm.layout is PLAIN
    assert list(llm.stream(HELLO, 7)) == ["Hel", "lo", " there."]
    assert endpoint.requests == [{"model": "words", "messages": HELLO, "max_tokens": 7, "stream": True}]
    assert ask(llm, temperature=0.0) == "Hello there."
    assert endpoint.requests[1]["temperature"] == 0.0
    llm.close()


def test_the_base_url_and_the_key_come_from_the_environment(
    endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_BASE_URL", endpoint.url)
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    assert ask(make_llm("openai:words")) == "Hello there."


def test_a_model_that_wants_the_newer_name_of_a_limit_gets_it(endpoint: Endpoint) -> None:
    assert ask(OpenAILLM("new", endpoint.url, KEY), max_tokens=9) == "Hello there."
    assert endpoint.requests[-1]["max_completion_tokens"] == 9


def test_an_answer_of_an_endpoint_can_be_stopped(endpoint: Endpoint) -> None:
    stream = OpenAILLM("slow", endpoint.url, KEY).stream(HELLO)
    assert next(stream) == "Hel"
    stream.close()
    assert list(stream) == []


@pytest.mark.parametrize(
    ("model", "key", "words"),
    [
        ("words", "wrong", r"/v1/ refuses the key; expected a valid one in OPENAI_API_KEY$"),
        ("gone", KEY, r"/v1/ answers 404: .*The model gone does not exist"),
        ("late", KEY, r"/v1/ does not answer within 0.2 seconds$"),
        ("broken", KEY, r"/v1/ cannot be reached: "),
        ("garbage", KEY, r"/v1/ answers with what cannot be read: "),
    ],
)
def test_what_is_wrong_with_an_endpoint_is_said_in_one_sentence(
    endpoint: Endpoint, model: str, key: str, words: str
) -> None:
    with pytest.raises(LLMError, match=words) as caught:
        ask(OpenAILLM(model, endpoint.url, key, timeout=0.2))
    assert "\n" not in str(caught.value) and KEY not in str(caught.value)


def test_an_endpoint_that_is_not_there_is_named_in_one_sentence() -> None:
    url = f"http://127.0.0.1:{closed_port()}/v1"
    with pytest.raises(LLMError, match=rf"^{url}/ cannot be reached: .*refused"):
        ask(OpenAILLM("words", url, KEY))


def test_an_endpoint_without_key_or_with_a_wrong_url_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
    with pytest.raises(LLMError, match=r"^there is no key; expected OPENAI_API_KEY, or the base URL of a server"):
        make_llm("openai:words")
    with pytest.raises(LLMError, match=r"^the base URL is 'localhost:80'; expected one that begins with http"):
        make_llm("openai:words", "localhost:80")


def test_the_estimate_of_tokens_is_rather_too_high(local: LocalLLM) -> None:
    for text in ("My dog is called Bruno, and he is three years old.", "for i in range(10): print(i)", "Привет, мир!"):
        assert local.count_tokens(text) <= estimate_tokens(text)
    assert estimate_tokens("") == 0


# Transformers


def test_a_model_of_transformers_answers_with_its_chat_template(folder: Path) -> None:
    llm = make_llm(f"hf:{folder / 'llama'}")
    assert isinstance(llm, TransformersLLM)
    text, stops = llm._prompt(HELLO)
    assert text == "<|im_start|>system\nAnswer in one word.<|im_end|>\n<|im_start|>user\nSay hello.<|im_end|>\n" + (
        "<|im_start|>assistant\n"
    )
    assert stops == []
    answer = ask(llm)
    assert answer == ask(llm) and len(answer) > 1
    assert ask(llm, temperature=1.0, seed=1) != ask(llm, temperature=1.0, seed=2)
    assert llm.count_tokens("<|im_end|>") == 1 and llm.count_tokens("hello") == 5
    assert {"<|im_start|>", "<|im_end|>", "]~b]"} <= set(llm.specials)
    assert llm.context == 400
    with pytest.raises(LLMError, match=r"the text is too long for the model; expected at most 400 tokens"):
        list(llm.stream([{"role": "user", "content": "word " * 100}]))


def test_a_template_without_a_place_for_the_system_gets_its_text_in_the_first_message(folder: Path) -> None:
    text, _ = TransformersLLM(str(folder / "strict"))._prompt(HELLO)
    assert text.startswith("<|im_start|>user\nAnswer in one word.\n\nSay hello.<|im_end|>\n")
    with pytest.raises(LLMError, match=r"^the chat template of .* fails: No system"):
        ask(TransformersLLM(str(folder / "failing")))


def test_one_of_our_models_goes_on_with_a_dialogue_in_plain_text(folder: Path) -> None:
    llm = make_llm(f"hf:{folder / 'titans'}")
    assert isinstance(llm, TransformersLLM)
    assert llm._prompt(HELLO) == ("Answer in one word.\n\nUser: Say hello.\n\nAssistant:", ["\nUser:"])
    pieces = list(llm.stream(HELLO, 12))
    assert len(pieces) > 1 and "".join(pieces) == ask(llm)


def test_a_folder_without_a_model_is_refused_in_one_sentence(folder: Path) -> None:
    for name in ("empty", "none"):
        with pytest.raises(LLMError, match="is not there"):
            make_llm(f"hf:{folder / name}")
