"""Text that `titans prepare` has tokenised: the folder, its documents, and their tokens end to end."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

FORMAT, VERSION = "titans.prepared", 1
TRAIN, VALIDATION = "train", "validation"
DESCRIPTION, TOKENIZER = "prepared.json", "tokenizer"
WORK, MANIFEST = ".partial", "manifest.json"


class Split(NamedTuple):
    """The size of a split."""

    documents: int
    tokens: int


@dataclass(frozen=True)
class Prepared:
    """A tokenised set on disk: a row of ``input_ids`` for each document, which ends with the tokenizer's eos.

    Attributes:
        folder: the folder of the set.
        tokenizer_folder: the folder of its tokenizer, for ``AutoTokenizer.from_pretrained``.
        vocab_size: how many tokens the tokenizer has.
        eos_token_id: what every document ends with.
        splits: ``train``, and ``validation`` if there is one.
        fingerprint: identifies the sources, the tokenizer and the options.
    """

    folder: Path
    tokenizer_folder: Path
    vocab_size: int
    eos_token_id: int
    splits: Mapping[str, Split]
    fingerprint: str

    def open(self, split: str = TRAIN) -> Any:
        """The documents of a split, mapped from disk."""
        if split not in self.splits:
            raise ValueError(f"{self.folder} has no split '{split}'; expected one of {', '.join(self.splits)}.")
        from datasets import load_from_disk

        try:
            rows = load_from_disk(str(self.folder / split))
        except Exception as error:  # a damaged file raises whatever the part that reads it raises
            raise ValueError(f"{self.folder / split} is missing or damaged; prepare the set again.") from error
        if len(rows) != self.splits[split].documents:
            raise ValueError(
                f"{self.folder / split} has {len(rows):,} documents; expected {self.splits[split].documents:,}."
            )
        return rows


def load_prepared(folder: str | Path) -> Prepared:
    """The set that `titans prepare` has written to a folder."""
    folder = Path(folder)
    path = folder / DESCRIPTION
    if not folder.is_dir():
        problem = "is a file" if folder.exists() else "is not there"
        raise ValueError(f"{folder} {problem}; expected a folder that `titans prepare` has written.")
    if not path.exists():
        if unfinished_work(folder) is not None:
            raise ValueError(f"{folder} is not finished; `titans prepare` with the same arguments finishes it.")
        raise ValueError(f"{folder} is not a prepared set: it has no {DESCRIPTION}; `titans prepare` makes one.")
    try:
        description = json.loads(path.read_bytes())
        if description["format"] != FORMAT or description["version"] != VERSION:
            raise ValueError(f"its format is {description['format']!r}, version {description['version']!r}")
        return Prepared(
            folder=folder,
            tokenizer_folder=folder / TOKENIZER,
            vocab_size=int(description["tokenizer"]["vocab_size"]),
            eos_token_id=int(description["tokenizer"]["eos_token_id"]),
            splits={k: Split(int(v["documents"]), int(v["tokens"])) for k, v in description["splits"].items()},
            fingerprint=str(description["fingerprint"]),
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        wrong = f"it has no {error}" if isinstance(error, KeyError) else str(error)
        raise ValueError(f"{path} is damaged ({wrong}); expected a {FORMAT} of version {VERSION}.") from error


def unfinished_work(out: Path) -> str | None:
    """Identifies what unfinished work in a folder was asked for; None if there is no such work."""
    try:
        return str(json.loads((out / WORK / MANIFEST).read_bytes())["request"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


class TokenStore:
    """The documents of a prepared set end to end, read from the memory-mapped Arrow file.

    Args:
        dataset: a ``datasets.Dataset`` with a column ``input_ids``, one row per document.
    """

    def __init__(self, dataset: Any) -> None:
        starts = [np.zeros(1, dtype=np.int64)]
        self._chunks: list[NDArray[np.int32]] = []
        self._chunk_starts = [0]
        for chunk in dataset.data.column("input_ids").chunks:
            offsets = chunk.offsets.to_numpy().astype(np.int64)
            values = chunk.values.to_numpy(zero_copy_only=True)[offsets[0] : offsets[-1]]
            starts.append(offsets[1:] - offsets[0] + self._chunk_starts[-1])
            self._chunks.append(values)
            self._chunk_starts.append(self._chunk_starts[-1] + len(values))
        self._dataset = dataset  # keeps the file mapped
        self.starts: NDArray[np.int64] = np.concatenate(starts)  # of each document, and the end of the last

    @property
    def tokens(self) -> int:
        """How many tokens there are."""
        return int(self.starts[-1])

    @property
    def documents(self) -> int:
        """How many documents there are."""
        return len(self.starts) - 1

    def read(self, start: int, stop: int) -> NDArray[np.int64]:
        """The tokens from ``start`` to ``stop``, counted over all documents."""
        parts = []
        chunk = int(np.searchsorted(self._chunk_starts, start, side="right")) - 1
        while start < stop:
            first = self._chunk_starts[chunk]
            end = min(stop, self._chunk_starts[chunk + 1])
            parts.append(self._chunks[chunk][start - first : end - first])
            start, chunk = end, chunk + 1
        return np.concatenate(parts).astype(np.int64) if parts else np.zeros(0, dtype=np.int64)
