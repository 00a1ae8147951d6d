"""From text to a tokenised set on disk that `titans train` reads: in parallel, in shards, and resumable."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from titans.files import content, locked, write_json
from titans.models.tokenizer import check_parent, load_tokenizer, make_encoder, tokenizer_state
from titans.tasks.prepared import (
    DESCRIPTION,
    FORMAT,
    MANIFEST,
    TOKENIZER,
    TRAIN,
    VALIDATION,
    VERSION,
    WORK,
    Prepared,
    load_prepared,
    unfinished_work,
)
from titans.training.shards import (
    Choice,
    Group,
    choose_validation,
    divide,
    measure,
    read_groups,
    split_writer,
    write_documents,
    write_shard,
    write_splits,
)
from titans.training.sources import (
    BLOCK_BYTES,
    Part,
    Reading,
    Source,
    find_sources,
    naming,
    plan_shards,
    read_shard,
)

SET = "set"
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
KEPT = "what is done is kept; run the same command again to go on"


class Statistics(NamedTuple):
    """How many documents a split has, and how many tokens: all of them, the median document, and the longest."""

    documents: int
    tokens: int
    median: float
    longest: int


@dataclass(frozen=True)
class Report:
    """What :func:`prepare` did.

    Attributes:
        prepared: the set.
        fresh: whether it was made now; if not, it was there already, and the rest is empty.
        splits: what is in each split.
        blank: documents that were left out because they are nothing but white space.
        skipped: bad lines that were left out.
        bytes_per_token: bytes of text per token, ends of documents not counted.
    """

    prepared: Prepared
    fresh: bool
    splits: Mapping[str, Statistics]
    blank: int = 0
    skipped: int = 0
    bytes_per_token: float = 0.0


class Progress(NamedTuple):
    """How far the work is.

    Attributes:
        stage: "tokenising", then "writing".
        documents: how many documents this call has processed at this stage.
        tokens: how many tokens they have.
        done: how much of ``total`` is done, earlier calls included: bytes of the sources, then tokens.
        total: how much there is.
    """

    stage: str
    documents: int
    tokens: int
    done: int
    total: int


def prepare(
    names: str | Sequence[str],
    out: str | Path,
    tokenizer: str = "bytes",
    *,
    validation: float | Sequence[str] | None = None,
    reading: Reading | None = None,
    seed: int = 0,
    workers: int = 1,
    overwrite: bool = False,
    on_progress: Callable[[Progress], None] | None = None,
) -> Report:
    """Tokenises sources into a set on disk.

    The work is done in shards, by threads: the tokenizer is Rust and runs beside the interpreter. Finished shards are
    kept in a folder inside ``out``, and a call that was stopped, or that met bad input, is finished by another one with
    the same arguments; only sources that have changed meanwhile are tokenised again. The set is the same, row for row,
    for any number of workers and stops. While it is made, it takes twice its room on disk.

    A document of up to a MiB (or ``shard_bytes``, if that is less) is tokenised whole. A longer one is cut into blocks
    where byte-level BPE gives the same tokens as without the cut (:func:`titans.training.sources.find_cut`); with other
    tokenizers, and in texts that have no white space for a long way, a token or two at a cut may differ. Its tokens are
    one row all the same, up to a GiB of text: what is longer becomes several documents.

    Args:
        names: files, folders and hub datasets; see :func:`titans.training.sources.find_sources`.
        out: a folder that is new or empty, or that holds a set to replace.
        tokenizer: see :func:`titans.models.tokenizer.load_tokenizer`.
        validation: the sources of the validation split, which are left out of the others; or the part of the documents
            that it gets, chosen by a hash of their number and of ``seed``; of fewer than 20, the last part of their
            tokens.
        reading: how sources become documents.
        workers: how many threads work.
        overwrite: replace a prepared set, finished or not. Anything else is never replaced.
        on_progress: is told how far the work is, from any thread.
    """
    out = Path(out)
    names = [names] if isinstance(names, str) else names
    validation = [validation] if isinstance(validation, str) else validation
    if workers < 1:
        raise ValueError(f"workers is {workers}; expected at least 1.")
    check_parent(out)
    job = _make_job(names, out, tokenizer, validation, reading or Reading(), seed)
    if (existing := _check_out(out, job, overwrite)) is not None:
        return Report(existing, False, {})
    plan = {split: plan_shards(found, job.reading) for split, found in job.sources.items()}
    with locked(out, "titans prepare"):
        if (existing := _check_out(out, job, overwrite)) is not None:  # by a process that had the folder until now
            return Report(existing, False, {})
        with _work_folder(out / WORK, job.request) as work:
            paths = _tokenise(job, plan, work, workers, on_progress)
            made = _put_together(job, paths, work / SET, on_progress)
            prepared = _publish(job, made, work, out)
    return Report(prepared, True, made.splits, made.blank, made.skipped, made.bytes_per_token)


@dataclass(frozen=True)
class _Job:
    """What is to be done.

    Attributes:
        names: of the sources of each split, as they were given.
        sources: of each split.
        identities: of the sources when the work began.
        fraction: of the documents that become the validation split; None: it has sources of its own, or is not wanted.
    """

    names: Mapping[str, Sequence[str]]
    tokenizer_name: str
    tokenizer: PreTrainedTokenizerBase
    sources: Mapping[str, list[Source]]
    identities: Mapping[str, list[Any]]
    fraction: float | None
    seed: int
    reading: Reading

    @property
    def eos(self) -> int:
        return int(self.tokenizer.eos_token_id)

    @cached_property
    def fingerprint(self) -> str:
        """Identifies the set: all that decides the tokens in it."""
        return _digest(self._encoding, self.identities, asdict(self.reading), self.fraction, self.seed)

    @cached_property
    def request(self) -> str:
        """Identifies what was asked for, whatever the sources hold by now."""
        names = {split: [_absolute(name) for name in some] for split, some in self.names.items()}
        return _digest(self._encoding, names, self._strict, self.fraction, self.seed)

    def shard(self, parts: Sequence[Part]) -> str:
        """Identifies a shard without bad lines, which is the same whether or not such lines are skipped."""
        bounds = [[self._known[part.source.key()], part.start, part.stop, part.ends] for part in parts]
        return _digest(self._encoding, bounds, self._strict)

    @cached_property
    def _encoding(self) -> str:
        return _digest(tokenizer_state(self.tokenizer), self.eos, len(self.tokenizer), BLOCK_BYTES)

    @cached_property
    def _known(self) -> dict[object, Any]:
        pairs = [zip(self.sources[split], self.identities[split], strict=True) for split in self.sources]
        return {source.key(): identity for some in pairs for source, identity in some}

    @property
    def _strict(self) -> dict[str, Any]:
        return asdict(replace(self.reading, skip_bad=False))


def _digest(*values: Any) -> str:
    return hashlib.sha256(json.dumps([FORMAT, VERSION, *values]).encode()).hexdigest()[:32]


def _absolute(name: str) -> str:
    """A name of a source that does not depend on the current folder."""
    path = Path(name).expanduser()
    return str(path.resolve()) if path.exists() else name


def _make_job(
    names: Sequence[str],
    out: Path,
    tokenizer: str,
    validation: float | Sequence[str] | None,
    reading: Reading,
    seed: int,
) -> _Job:
    """Finds the sources and the tokenizer; raises ValueError for what cannot be done."""
    fraction = float(validation) if isinstance(validation, int | float) else None
    if fraction is not None and not 0 < fraction < 1:
        raise ValueError(f"validation is {fraction:g}; expected a part between 0 and 1, or files.")
    loaded = load_tokenizer(tokenizer)
    if loaded.eos_token_id is None:
        raise ValueError(f"the tokenizer {tokenizer} has no eos token; expected one to put behind every document.")
    given = {TRAIN: names}
    found: dict[str, list[Source]] = {TRAIN: []}  # the first split, though it is looked for last
    if isinstance(validation, Sequence) and validation:
        given[VALIDATION] = validation
        found[VALIDATION] = find_sources(validation, reading, folder=out)
    found[TRAIN] = find_sources(names, reading, found.get(VALIDATION, ()), folder=out)
    if not found[TRAIN]:
        raise ValueError("there is nothing left to train on: all sources are given as validation.")
    identities = {split: [source.identity() for source in some] for split, some in found.items()}
    return _Job(given, tokenizer, loaded, found, identities, fraction, seed, reading)


def _check_unchanged(job: _Job) -> None:
    """Raises ValueError if a source is not what it was at the start."""
    for split, some in job.sources.items():
        for source, identity in zip(some, job.identities[split], strict=True):
            if source.identity() != identity:
                raise ValueError(f"{identity[0]} was changed while it was read; expected it to stay as it is.")


def _check_out(out: Path, job: _Job, overwrite: bool) -> Prepared | None:
    """The set, if it is there already; raises ValueError if there is anything that must not be replaced."""
    if not out.exists():
        return None
    if (out / DESCRIPTION).exists():
        prepared = load_prepared(out)
        if overwrite:
            return None
        if prepared.fingerprint != job.fingerprint:
            raise ValueError(
                f"{out} holds a set of other sources or options, or of sources that have changed since; --overwrite "
                "replaces it."
            )
        return prepared
    begun = unfinished_work(out)
    if begun is None and any(path.name != WORK for path in content(out)):
        raise ValueError(f"{out} holds something that is no prepared set; expected a folder that is new or empty.")
    if begun not in (None, job.request) and not overwrite:
        raise ValueError(f"{out} holds the unfinished set of other sources or options; --overwrite begins anew.")
    return None


@contextmanager
def _work_folder(work: Path, request: str) -> Iterator[Path]:
    """The folder of unfinished work, with the shards that are done.

    What is wrong with the set as a whole leaves nothing behind. A bad source, a full disk or Ctrl-C leaves what is
    done, for the next call.
    """
    with naming(work):
        work.mkdir(exist_ok=True)
        write_json(work / MANIFEST, {"request": request})
    try:
        yield work
    except _Unfinished:
        raise
    except ValueError:
        shutil.rmtree(work)
        raise
    except OSError as error:
        if error.errno not in FULL:
            raise
        raise OSError(error.errno, f"{error.strerror}; {KEPT}", error.filename) from error


class _Unfinished(ValueError):
    """A source is bad, and some shards are done."""


class _Stopped(Exception):
    """Another thread met an error, or the user stopped the work."""


class _Meter:
    """Adds up and reports what the threads do, and stops them."""

    def __init__(self, stage: str, total: int, on_progress: Callable[[Progress], None] | None) -> None:
        self.stop = threading.Event()
        self._lock = threading.Lock()
        self._on_progress = on_progress
        self._state = Progress(stage, 0, 0, 0, total)
        self.add()

    def add(self, documents: int = 0, tokens: int = 0, done: int = 0) -> None:
        if self.stop.is_set():
            raise _Stopped
        with self._lock:
            old = self._state
            self._state = old._replace(
                documents=old.documents + documents, tokens=old.tokens + tokens, done=old.done + done
            )
            if self._on_progress is not None:
                self._on_progress(self._state)


def _tokenise(
    job: _Job,
    plan: Mapping[str, list[list[Part]]],
    work: Path,
    workers: int,
    on_progress: Callable[[Progress], None] | None,
) -> dict[str, list[Path]]:
    """Makes the shards that are missing; returns the paths of all of them."""
    paths = {split: [_shard_path(job, work, shard) for shard in plan[split]] for split in plan}
    todo = [(shard, path) for split in plan for shard, path in zip(plan[split], paths[split], strict=True)]
    _clear(work, keep={MANIFEST, *(path.name for _, path in todo)})
    meter = _Meter("tokenising", sum(_size(shard) for shard, _ in todo), on_progress)
    encode = make_encoder(job.tokenizer)

    def run(shard: list[Part], path: Path) -> None:
        if not path.exists():
            write_shard(path, read_shard(shard, job.reading), encode, job.eos, meter.add)
        meter.add(done=_size(shard))

    try:
        with _one_thread_each(), ThreadPoolExecutor(workers) as pool:
            futures = [pool.submit(run, shard, path) for shard, path in todo]
            try:
                for future in as_completed(futures):
                    future.result()
            except BaseException:
                meter.stop.set()
                pool.shutdown(wait=False, cancel_futures=True)
                raise
        _check_unchanged(job)
    except ValueError as error:
        if any(path.exists() for _, path in todo):
            raise _Unfinished(f"{str(error).removesuffix('.')}; {KEPT}.") from error
        raise
    return paths


def _shard_path(job: _Job, work: Path, shard: Sequence[Part]) -> Path:
    """Where a shard is or will be; one in which bad lines were skipped does not serve a call that refuses them."""
    clean = work / f"shard-{job.shard(shard)}.arrow"
    skipping = clean.with_name(f"{clean.stem}-skipping.arrow")
    return skipping if job.reading.skip_bad and not clean.exists() else clean


def _clear(folder: Path, keep: Set[str]) -> None:
    """Removes what earlier calls left and this one cannot use."""
    for path in folder.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name not in keep:
            path.unlink()


def _size(shard: list[Part]) -> int:
    return sum(part.size for part in shard)


@contextmanager
def _one_thread_each() -> Iterator[None]:
    """While open, the Rust tokenizer does not start threads of its own."""
    name = "TOKENIZERS_PARALLELISM"
    before = os.environ.get(name)
    os.environ[name] = "false"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


class _Made(NamedTuple):
    """What is in a set, and what was left out of it."""

    splits: dict[str, Statistics]
    blank: int
    skipped: int
    bytes_per_token: float


def _put_together(
    job: _Job, paths: Mapping[str, list[Path]], folder: Path, on_progress: Callable[[Progress], None] | None
) -> _Made:
    """Writes the splits and the tokenizer into ``folder``, from the shards."""
    totals = {split: measure(read_groups(some, job.eos)) for split, some in paths.items()}
    for split, total in totals.items():
        if not len(total.lengths):
            where = ", ".join(str(identity[0]) for identity in job.identities[split][:3])
            skipped = f" ({total.skipped:,} bad lines were skipped)" if total.skipped else ""
            raise ValueError(f"there is no text in {where}{skipped}; expected at least one document that is not empty.")
    lengths = {split: total.lengths for split, total in totals.items()}
    choice = None
    if job.fraction is not None:
        choice = choose_validation(lengths[TRAIN], job.fraction, job.seed)
        lengths = divide(lengths[TRAIN], choice)
    meter = _Meter("writing", sum(int(some.sum()) for some in lengths.values()), on_progress)
    try:
        _write_set(job, paths, choice, folder, meter)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)  # of no use, and perhaps what fills the disk
        raise
    every = totals.values()
    tokens = sum(int((total.lengths - 1).sum()) for total in every)
    size = sum(total.size for total in every)
    return _Made(
        {split: _statistics(some) for split, some in lengths.items()},
        sum(total.blank for total in every),
        sum(total.skipped for total in every),
        size / max(1, tokens),
    )


def _statistics(lengths: NDArray[np.int64]) -> Statistics:
    return Statistics(len(lengths), int(lengths.sum()), float(np.median(lengths)), int(lengths.max()))


def _write_set(job: _Job, paths: Mapping[str, list[Path]], choice: Choice | None, folder: Path, meter: _Meter) -> None:
    def groups(split: str) -> Iterator[Group]:
        for group in read_groups(paths[split], job.eos):
            yield group
            tokens = int(group.lengths.sum())
            meter.add(len(group.lengths), tokens, tokens)

    splits = [*paths] if choice is None else [TRAIN, VALIDATION]
    scratch = folder / "scratch"
    with ExitStack() as stack:
        write = {split: stack.enter_context(split_writer(folder / split, split, job.fingerprint)) for split in splits}
        if choice is not None:
            write_splits(groups(TRAIN), choice, job.eos, write[TRAIN], write[VALIDATION], scratch)
        else:
            for split in splits:
                write_documents(groups(split), write[split], scratch)
    with naming(folder):
        job.tokenizer.save_pretrained(str(folder / TOKENIZER))


def _publish(job: _Job, made: _Made, work: Path, out: Path) -> Prepared:
    """Puts the finished set in its place, instead of one that is there; a kill on the way loses no shard."""
    description = {
        "format": FORMAT,
        "version": VERSION,
        "tokenizer": {
            "name": job.tokenizer_name,
            "vocab_size": len(job.tokenizer),
            "eos_token_id": job.eos,
        },
        "splits": {split: {"documents": some.documents, "tokens": some.tokens} for split, some in made.splits.items()},
        "sources": list(job.names[TRAIN]),
        "skipped_lines": made.skipped,
        "fingerprint": job.fingerprint,
    }
    (out / DESCRIPTION).unlink(missing_ok=True)
    for name in (TRAIN, VALIDATION, TOKENIZER):
        if (out / name).exists():
            shutil.rmtree(out / name)
        if (work / SET / name).exists():
            (work / SET / name).rename(out / name)
    with naming(out / DESCRIPTION):
        write_json(out / DESCRIPTION, description)
    shutil.rmtree(work)
    return load_prepared(out)
