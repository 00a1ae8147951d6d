"""DNA to classify: sequences and their labels from files and folders, in folds that share no near copies."""

from __future__ import annotations

import csv
import io
import random
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from titans.words import require_whole

LETTERS = "ACGTN"
AMBIGUOUS = "RYSWKMBDHV"  # IUPAC's letters for two or three possible nucleotides, which are read as N
COMPLEMENTS = str.maketrans(LETTERS + AMBIGUOUS, "TGCANYRSWMKVHDB")
UPPER = str.maketrans(AMBIGUOUS, "N" * len(AMBIGUOUS))
COLUMNS = {"sequence": ("sequence", "seq"), "label": ("label", "class"), "fold": ("fold",)}
TRAIN = -1  # the fold of sequences that are only trained on
WORD = 24  # nucleotides of the words that near copies share: long enough that two sequences rarely do by chance
SHARED = 0.1  # of the words of the shorter sequence: near copies share at least so many
REACH = 8  # how many of the sequences with a word are compared with each of them


@dataclass(frozen=True)
class DNASet:
    """Labelled sequences, and the fold that each is tested in.

    Attributes:
        name: of the data set.
        sequences: of the letters A, C, G, T and N.
        labels: the class number of each sequence.
        classes: the name of each class.
        folds: the fold of each sequence, from 0; ``TRAIN`` for those that are never tested.
        protocol: where the folds are from.
        copies: how many sequences have a near copy; None where nobody looked.
    """

    name: str
    sequences: tuple[str, ...]
    labels: tuple[int, ...]
    classes: tuple[str, ...]
    folds: tuple[int, ...]
    protocol: str
    copies: int | None = None


@dataclass(frozen=True)
class Labelled:
    """Sequences as they stand in a file: their letters checked, their labels as texts."""

    sequences: list[str]
    labels: list[str]
    folds: list[int] | None = None


def reverse_complement(sequence: str) -> str:
    """The other strand, read in its own direction; in upper case."""
    return sequence.upper().translate(COMPLEMENTS)[::-1]


def read_dna(path: str | Path, folds: int = 5, seed: int = 0, drop_shared: bool = False) -> list[DNASet]:
    """The data sets of a file or a folder; a ``ValueError`` says in a sentence what is wrong with one.

    A CSV file with the columns sequence and label is a data set, and so are NAME.txt with a sequence per line together
    with NAME.labels with a label per line, and a folder in the layout of the genomic-benchmarks package,
    NAME/train/CLASS/*.txt and NAME/test/CLASS/*.txt. A pair of files called NAME_train and NAME_test, or train_NAME and
    test_NAME, is one data set. A data set with both parts is trained on the one and tested on the other; a column fold
    is taken as it is; everything else is cut into folds such that near copies are in the same one.

    Args:
        path: a file, a folder with any number of data sets, or a name that the genomic-benchmarks package can load.
        folds: of data that does not come with any.
        seed: of the draw of these folds.
        drop_shared: leave out sequences that other folds also have, instead of refusing the data.
    """
    require_whole(least=2, folds=folds)
    parts = _find_parts(_load(path))
    if not parts:
        raise ValueError(
            f"{path} has no DNA data; expected CSV files with the columns sequence and label, NAME.txt with "
            "NAME.labels, or folders NAME/train/CLASS and NAME/test/CLASS"
        )
    return [_make_set(name, each, folds, seed, drop_shared) for name, each in parts.items()]


def near_copies(sequences: Sequence[str]) -> NDArray[np.int64]:
    """A number for each sequence, equal for those that are near copies, on either strand, of each other.

    Near copies are sequences that share a tenth of their words, such as overlapping windows of one place in a genome,
    and those that are connected by others. Of a word that more than nine sequences have, as in repeats, each is only
    compared with the next eight.
    """
    words = [_words(sequence) for sequence in sequences]
    sizes = np.array([len(each) for each in words])
    owners, values = np.repeat(np.arange(len(words)), sizes), np.concatenate(words)
    order = np.argsort(values, kind="stable")
    owners, values = owners[order], values[order]
    pairs = []
    for distance in range(1, REACH + 1):
        same = values[distance:] == values[:-distance]
        pairs.append(owners[:-distance][same] * len(words) + owners[distance:][same])
    found, counts = np.unique(np.concatenate(pairs), return_counts=True)
    first, second = found // len(words), found % len(words)
    close = counts >= SHARED * np.minimum(sizes[first], sizes[second])
    # sequences shorter than a word are near copies of their equals only
    same_text: dict[str, int] = {}
    exact = [(same_text.setdefault(min(s, reverse_complement(s)), i), i) for i, s in enumerate(sequences)]
    return _connect(len(words), [*exact, *zip(first[close].tolist(), second[close].tolist(), strict=True)])


def make_folds(groups: Sequence[int], labels: Sequence[int], count: int, seed: int = 0) -> list[int]:
    """A fold for each sequence: groups stay together, and every fold has about as many sequences of every class."""
    members: dict[int, list[int]] = {}
    for index, group in enumerate(groups):
        members.setdefault(int(group), []).append(index)
    order = list(members.values())
    random.Random(seed).shuffle(order)
    order.sort(key=len, reverse=True)  # the large ones first, while there is room everywhere
    filled = np.zeros((count, max(labels) + 1), dtype=np.int64)
    folds = [0] * len(labels)
    for together in order:
        added = np.bincount([labels[index] for index in together], minlength=filled.shape[1])
        fold = int(np.lexsort((filled.sum(1), filled @ added))[0])
        filled[fold] += added
        for index in together:
            folds[index] = fold
    return folds


def check_dna(sequence: str, where: str) -> str:
    """The sequence in upper case, with N for IUPAC's other letters; a ``ValueError`` if it is empty or no DNA."""
    cleaned = "".join(sequence.split()).upper().translate(UPPER)
    if not cleaned:
        raise ValueError(f"{where} is an empty sequence; expected nucleotides")
    odd = re.search(f"[^{LETTERS}]", cleaned)
    if odd is not None:
        raise ValueError(
            f"{where} has the letter {odd[0]!r} at position {odd.start() + 1}; "
            f"expected A, C, G, T, N or IUPAC's {', '.join(AMBIGUOUS)}"
        )
    return cleaned


def _words(sequence: str) -> NDArray[np.uint64]:
    """The words of a sequence as numbers, each once; a word and its reverse complement are the same."""
    codes = np.array([LETTERS.index(letter) for letter in sequence], dtype=np.uint64)
    if len(codes) < WORD:
        return np.zeros(0, dtype=np.uint64)
    windows = np.lib.stride_tricks.sliding_window_view(codes, WORD)
    windows = windows[(windows < LETTERS.index("N")).all(1)]
    powers = np.uint64(4) ** np.arange(WORD, dtype=np.uint64)
    forward, backward = windows @ powers[::-1], (np.uint64(3) - windows) @ powers
    return np.unique(np.minimum(forward, backward))


def _connect(count: int, pairs: Iterable[tuple[int, int]]) -> NDArray[np.int64]:
    """The connected parts of a graph: a number for each node, the same within a part."""
    parents = list(range(count))

    def root(node: int) -> int:
        while parents[node] != node:
            parents[node] = parents[parents[node]]
            node = parents[node]
        return node

    for first, second in pairs:
        parents[root(first)] = root(second)
    return np.array([root(node) for node in range(count)], dtype=np.int64)


def _load(path: str | Path) -> Path:
    """The path, or the folder that the genomic-benchmarks package loads a data set of this name into."""
    if Path(path).exists():
        return Path(path)
    if find_spec("genomic_benchmarks") is not None:
        from genomic_benchmarks.data_check import list_datasets
        from genomic_benchmarks.loc2seq import download_dataset

        if str(path) in list_datasets():
            return Path(download_dataset(str(path)))
    raise ValueError(f"{path} does not exist; expected a file or folder with DNA data")


def _find_parts(path: Path) -> dict[str, dict[str, Labelled]]:
    """By data set, its parts: train and test, or whole where there is only one."""
    if path.is_dir() and _has_layout(path):
        return {path.name: _read_layout(path)}
    parts: dict[str, dict[str, Labelled]] = {}
    for each in sorted(path.iterdir()) if path.is_dir() else [path]:
        if each.is_dir() and _has_layout(each):
            parts[each.name] = _read_layout(each)
            continue
        if each.suffix.lower() == ".csv":
            labelled = _read_csv(each)
        elif each.suffix == ".txt" and each.with_suffix(".labels").is_file():
            labelled = _read_lines(each, each.with_suffix(".labels"))
        else:
            continue
        name, part = _split_name(each.stem)
        others = parts.setdefault(name, {})
        if part in others:
            raise ValueError(f"{each} is another {part} part of the data set {name}; expected one")
        others[part] = labelled
    return parts


def _split_name(stem: str) -> tuple[str, str]:
    """The data set and the part that a file is called after."""
    for pattern in (r"(?P<part>train|test)[_-](?P<name>.+)", r"(?P<name>.+)[_-](?P<part>train|test)"):
        found = re.fullmatch(pattern, stem, re.IGNORECASE)
        if found:
            return found["name"], found["part"].lower()
    return stem, "whole"


def _has_layout(folder: Path) -> bool:
    return any((folder / part).is_dir() for part in ("train", "test"))


def _read_layout(folder: Path) -> dict[str, Labelled]:
    parts: dict[str, Labelled] = {}
    for part in ("train", "test"):
        files = sorted((folder / part).glob("*/*.txt"))
        if not files and (folder / part).is_dir():
            raise ValueError(f"{folder / part} has no sequences; expected CLASS/*.txt")
        if files:
            sequences = [check_dna(_read_text(file), str(file)) for file in files]
            parts[part] = Labelled(sequences, [file.parent.name for file in files])
    return parts


def _read_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is not UTF-8 from byte {error.start} on; expected a text in UTF-8") from None


def _read_csv(file: Path) -> Labelled:
    limit = csv.field_size_limit(2**31 - 1)  # sequences may be longer than the 131,072 letters of the default
    try:
        return _read_rows(file, csv.DictReader(io.StringIO(_read_text(file), newline="")))
    except csv.Error as error:
        raise ValueError(f"{file} is not readable as CSV, {error}; expected the columns sequence and label") from None
    finally:
        csv.field_size_limit(limit)


def _read_rows(file: Path, reader: csv.DictReader[str]) -> Labelled:
    header = {name.strip().lower(): name for name in reader.fieldnames or () if name}
    found = {kind: next((header[name] for name in names if name in header), None) for kind, names in COLUMNS.items()}
    for kind in ("sequence", "label"):
        if found[kind] is None:
            columns = ", ".join(header) or "none"
            raise ValueError(f"{file} has the columns {columns}; expected {' or '.join(COLUMNS[kind])}")
    sequences, labels, folds = [], [], []
    for row in reader:
        where = f"{file}, line {reader.line_num}"
        sequences.append(check_dna(row[found["sequence"]] or "", where))
        labels.append((row[found["label"]] or "").strip())
        if not labels[-1]:
            raise ValueError(f"{where} has no label; expected the name or number of a class")
        if found["fold"] is not None:
            folds.append(_fold_number(row[found["fold"]], where))
    if not sequences:
        raise ValueError(f"{file} has no rows; expected a sequence and a label in each")
    return Labelled(sequences, labels, folds or None)


def _fold_number(text: str | None, where: str) -> int:
    if text is None or not text.strip().isdecimal():
        raise ValueError(f"{where} has the fold {text!r}; expected a whole number from 0")
    return int(text)


def _read_lines(file: Path, label_file: Path) -> Labelled:
    lines = _read_text(file).splitlines()
    labels = _read_text(label_file).split()
    if len(lines) != len(labels):
        raise ValueError(
            f"{label_file} has {len(labels)} labels and {file} has {len(lines)} sequences; expected as many"
        )
    return Labelled([check_dna(line, f"{file}, line {n}") for n, line in enumerate(lines, 1)], labels)


def _make_set(name: str, parts: dict[str, Labelled], count: int, seed: int, drop_shared: bool) -> DNASet:
    if len(parts) > 1:
        if set(parts) != {"train", "test"}:
            raise ValueError(f"{name} has the parts {', '.join(parts)}; expected train and test, or one of them")
        train, test = parts["train"], parts["test"]
        both = Labelled(train.sequences + test.sequences, train.labels + test.labels)
        folds = [TRAIN] * len(train.labels) + [0] * len(test.labels)
        made = _named(name, both, folds, "trained on the train split, tested on the test split")
        return _without_shared(made, ("test", "train"), drop_shared)
    ((part, whole),) = parts.items()
    if whole.folds is not None:
        made = _named(name, whole, whole.folds, "the folds that the data comes with")
        return _without_shared(made, ("fold 0", "fold 1"), drop_shared)
    inside = "the data" if part == "whole" else f"the {part} split, the only one there is"
    made = _named(name, whole, [0] * len(whole.labels), f"{count}-fold cross-validation inside {inside}")
    if len(whole.sequences) < count:
        raise ValueError(f"{name} has {len(whole.sequences)} sequences; expected at least {count}, one for each fold")
    groups = near_copies(whole.sequences)
    distinct, sizes = np.unique(groups, return_counts=True)
    if len(distinct) < count:
        raise ValueError(
            f"{name} has too few groups of near copies, {len(distinct)}; expected at least {count}, one for each fold"
        )
    folds = make_folds(groups.tolist(), made.labels, count, seed)
    return replace(made, folds=tuple(folds), copies=int(sizes[sizes > 1].sum()))


def _named(name: str, data: Labelled, folds: list[int], protocol: str) -> DNASet:
    classes = sorted(set(data.labels), key=lambda label: (len(label), label) if label.isdigit() else (0, label))
    if len(classes) < 2:
        raise ValueError(f"{name} has only the class {classes[0]}; expected at least two")
    numbers = {label: number for number, label in enumerate(classes)}
    labels = tuple(numbers[label] for label in data.labels)
    return DNASet(name, tuple(data.sequences), labels, tuple(classes), tuple(folds), protocol)


def _without_shared(data: DNASet, words: tuple[str, str], drop: bool) -> DNASet:
    """The data, of which no two folds share a sequence or its reverse complement."""
    where: dict[str, int] = {}
    shared = []
    # test before train, so that it is the training part that loses a sequence
    for index in sorted(range(len(data.folds)), key=lambda index: (data.folds[index] == TRAIN, index)):
        sequence = data.sequences[index]
        key = min(sequence, reverse_complement(sequence))
        if where.setdefault(key, data.folds[index]) != data.folds[index]:
            shared.append(index)
    if shared and not drop:
        raise ValueError(
            f"{data.name} has sequences in more than one of its parts, on either strand: {len(shared)} of "
            f"{len(data.sequences)}; expected parts such as {words[0]} and {words[1]} that share none, or --drop-shared"
        )
    kept = sorted(set(range(len(data.folds))) - set(shared))
    if len({data.folds[index] for index in kept}) < 2:
        raise ValueError(f"{data.name} has only one part; expected at least two, such as {words[0]} and {words[1]}")
    return replace(
        data,
        sequences=tuple(data.sequences[index] for index in kept),
        labels=tuple(data.labels[index] for index in kept),
        folds=tuple(data.folds[index] for index in kept),
    )
