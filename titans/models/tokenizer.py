"""Tokenizers: bytes as they are, byte-level BPE trained on a text, nucleotides, and those of others."""

from __future__ import annotations

import json
import logging
import os
import shutil
import threading
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from titans.files import may_be_on_hub, not_there

END_OF_TEXT = "<|endoftext|>"
BYTES = 256
NUCLEOTIDES = "ACGTN"  # in the order of their ids; N is any of them, or unknown
# What ends a text in tokenizer.json files that come without a tokenizer_config.json to say so.
END_TOKENS = (END_OF_TEXT, "</s>", "<|end_of_text|>", "<|im_end|>", "<eos>", "[EOS]")
EXPECTED = "expected 'bytes', a folder with a tokenizer, a tokenizer.json file or a name on the hub"

Encode = Callable[[Sequence[str]], list[NDArray[np.int32]]]


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """The tokenizer whose ids are the bytes of the UTF-8 text; 256 is ``<|endoftext|>``, which is bos, eos and pad."""
    return _with_specials(_byte_level(models.BPE(vocab=_byte_letters(), merges=[])))


def dna_tokenizer() -> PreTrainedTokenizerFast:
    """The tokenizer of DNA: one token per nucleotide, A, C, G, T or N, with the ids 0 to 4; 5 is the padding.

    Lower case is read as upper case, and what is not one of these letters as N; white space is left out.
    """
    vocabulary = {letter: index for index, letter in enumerate((*NUCLEOTIDES, "<pad>"))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="N"))
    upper = [normalizers.Replace(letter.lower(), letter) for letter in NUCLEOTIDES]
    tokenizer.normalizer = normalizers.Sequence([normalizers.Replace(Regex(r"\s"), ""), *upper])
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    # N is no special token: decoding without those must keep it
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],
    )  # fmt: skip


def train_tokenizer(texts: Iterable[str], vocab_size: int, min_frequency: int = 2) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer with GPT-2's way of cutting text into words.

    Every text can be encoded and comes back as it was: all 256 bytes are in the vocabulary.

    Args:
        texts: what to learn from; read once.
        vocab_size: tokens at most, the 256 bytes and ``<|endoftext|>`` (id 0: bos, eos and pad) among them. Few texts
            give fewer.
        min_frequency: how often a pair must occur to become a token.
    """
    if vocab_size <= BYTES:
        raise ValueError(f"vocab_size is {vocab_size}; expected at least {BYTES + 1}: all bytes and {END_OF_TEXT}.")
    tokenizer = _byte_level(models.BPE())
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=min_frequency,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return _with_specials(tokenizer)


def load_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """The tokenizer of that name.

    Args:
        name: ``bytes``, a folder that ``save_pretrained`` wrote, a ``tokenizer.json`` file, or a name on the hub. Where
            a ``tokenizer.json`` is all there is, the end of a text is a special token with one of the usual names.
    """
    if name == "bytes":
        return byte_tokenizer()
    path = Path(name).expanduser()
    if path.is_file():
        beside = (path.parent / "tokenizer_config.json").is_file() and path.name == "tokenizer.json"
        tokenizer = _read_tokenizer(str(path.parent)) if beside else _read_file(path)
    elif name and path.is_dir():
        tokenizer = _read_tokenizer(str(path))
    elif not may_be_on_hub(name):
        raise ValueError(f"the tokenizer {not_there(name)}; {EXPECTED}.")
    else:
        tokenizer = _read_tokenizer(name)
    return _with_known_end(tokenizer)


def check_new_folder(folder: Path) -> None:
    """Raises ValueError if :func:`save_tokenizer` could not write there; said before the work, not after it."""
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file; expected a folder, new or empty.")
    if folder.exists() and any(folder.iterdir()):
        raise ValueError(f"{folder} is not empty; expected a folder that is new or empty.")
    check_parent(folder)


def check_parent(folder: Path) -> None:
    """Raises ValueError if a folder is not there and cannot be made."""
    existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        raise ValueError(f"{folder} cannot be written: {existing} is not a folder to write in.")


def save_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Writes a tokenizer to a folder, new or empty, which has all of it or nothing."""
    check_new_folder(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = folder.with_name(f".{folder.name}.{uuid.uuid4().hex}.tmp")
    try:
        tokenizer.save_pretrained(str(temporary))
        temporary.replace(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def make_encoder(tokenizer: PreTrainedTokenizerBase) -> Encode:
    """A function from texts to their ids, without special tokens; it may be called from several threads at once.

    A text that spells out a special token, such as ``<|endoftext|>``, is text: it never becomes that token.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return lambda texts: [_ids(tokenizer.encode(t, add_special_tokens=False, **_AS_TEXT)) for t in texts]
    if is_byte_tokenizer(tokenizer):
        return lambda texts: [np.frombuffer(text.encode(), np.uint8).astype(np.int32) for text in texts]
    copies = _Copies(backend.to_str())

    def encode(texts: Sequence[str]) -> list[NDArray[np.int32]]:
        encodings = copies.tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [_ids(encoding.ids) for encoding in encodings]

    return encode


def is_byte_tokenizer(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether this is :func:`byte_tokenizer`, made here or read from a folder."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    return backend is not None and len(tokenizer) == BYTES + 1 and backend.to_str() == _byte_state()


def tokenizer_state(tokenizer: PreTrainedTokenizerBase) -> str:
    """All that decides which ids a text gets, as a string; equal for equal tokenizers."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        return str(backend.to_str())
    return json.dumps([type(tokenizer).__name__, sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])])


@contextmanager
def quiet_logger(name: str) -> Iterator[None]:
    """While open, a library keeps its warnings and its advice to itself."""
    logger = logging.getLogger(name)
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


class _Copies(threading.local):
    """A tokenizer of its own for every thread: they share no lock and no cache, and the original keeps its settings."""

    def __init__(self, state: str) -> None:
        self.tokenizer = Tokenizer.from_str(state)
        self.tokenizer.encode_special_tokens = True  # as text, that is: they are not looked for
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()


_AS_TEXT = {"split_special_tokens": True, "truncation": False, "padding": False, "verbose": False}


@cache
def _byte_state() -> str:
    return tokenizer_state(byte_tokenizer())


def _ids(ids: Sequence[int]) -> NDArray[np.int32]:
    return np.array(ids, dtype=np.int32)


def _byte_letters() -> dict[str, int]:
    """The letter that stands for each byte in byte-level tokenizers: printable bytes are their own, others follow."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = (byte for byte in range(BYTES) if byte not in printable)
    letters = {chr(byte): byte for byte in printable} | {chr(BYTES + i): byte for i, byte in enumerate(others)}
    return dict(sorted(letters.items(), key=lambda item: item[1]))


def _byte_level(model: models.Model) -> Tokenizer:
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _with_specials(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        clean_up_tokenization_spaces=False,
    )


def _read_tokenizer(name: str) -> PreTrainedTokenizerBase:
    try:
        with quiet_logger("huggingface_hub"):
            return AutoTokenizer.from_pretrained(name)
    except Exception as error:  # damaged files raise whatever the part that reads them raises
        if Path(name).is_dir():
            expected = "expected a folder with a tokenizer that transformers can read"
        else:
            expected = EXPECTED
        raise ValueError(f"the tokenizer {name} cannot be loaded; {expected}{_reason(error)}.") from error


def _read_file(path: Path) -> PreTrainedTokenizerBase:
    try:
        return PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_file(str(path)))
    except Exception as error:  # the library raises plain Exception
        raise ValueError(
            f"{path} cannot be read as a tokenizer; expected a tokenizer.json file{_reason(error)}."
        ) from error


def _reason(error: Exception) -> str:
    """The first line of an error in brackets, if that says something by itself."""
    line = str(error).strip().partition("\n")[0].strip()
    return "" if not line or line.endswith(":") else f" ({line.rstrip('.')})"


def _with_known_end(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """The same, with one of the usual names as eos if it has no eos and knows such a special token."""
    if tokenizer.eos_token is None:
        special = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
        tokenizer.eos_token = next((token for token in END_TOKENS if token in special), None)
    return tokenizer
