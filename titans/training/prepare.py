"""From text to a tokenised set on disk, which `titans train` reads: in parallel, in shards, and resumable."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from titans.files import write_atomically
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

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

SET = "set"
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class Statistics(NamedTuple):
    """Of the documents of a split: how many, tokens of all, of the middle one and of the longest."""

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
        splits: what is in it.
        blank: documents that were left out, as they are nothing but white space.
        bytes_per_token: of the text, ends of documents not counted.
    """

    prepared: Prepared
    fresh: bool
    splits: Mapping[str, Statistics]
    blank: int = 0
    bytes_per_token: float = 0.0


class Progress(NamedTuple):
    """How far the work is.

    Attributes:
        stage: "tokenising", then "writing".
        documents: that this call has been through at this stage.
        tokens: of them.
        done: of ``total``, with the work of earlier calls: bytes of the sources, then tokens.
        total: of all there is.
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

    The work is done in shards, by threads: the tokenizer is Rust, and works beside the interpreter. Shards that are
    done are kept in a folder inside ``out``; a call that was stopped is finished by another one with the same
    arguments. The set is the same, row for row, for any number of workers and of stops. On the way, and only then, it
    takes twice its room on disk.

    A document of up to a MiB (or ``shard_bytes``, if that is less) is tokenised whole. A longer one is cut into blocks
    where byte-level BPE gives the same tokens as without the cut (:func:`titans.training.sources.find_cut`); with other
    tokenizers, and in texts that have no white space for a long way, a token or two at a cut may differ. Its tokens are
    one row all the same, up to a GiB of text: what is longer becomes several documents.

    Args:
        names: files, folders and hub datasets; see :func:`titans.training.sources.find_sources`.
        out: a folder, new or empty, or with a set to replace.
        tokenizer: see :func:`titans.models.tokenizer.load_tokenizer`.
        validation: sources of the validation split, which are left out of the others; or which part of the documents
            it gets, chosen by a hash of their number and of ``seed``; of fewer than 20, the last part of their tokens.
        reading: how sources become documents.
        workers: threads.
        overwrite: replace a prepared set, finished or not. Anything else is never replaced.
        on_progress: told how far the work is, from any thread.
    """
    out = Path(out)
    names = [names] if isinstance(names, str) else names
    validation = [validation] if isinstance(validation, str) else validation
    if workers < 1:
        raise ValueError(f"workers is {workers}; expected at least 1.")
    check_parent(out)
    job = _make_job(names, out, tokenizer, validation, reading or Reading(), seed)
    existing = _check_out(out, job.fingerprint, overwrite)
    if existing is not None:
        return Report(existing, False, {})
    plan = {split: plan_shards(found, job.reading) for split, found in job.sources.items()}
    with _work_folder(out, job.fingerprint) as work:
        paths = _tokenise(job, plan, work, workers, on_progress)
        _check_unchanged(job)
        splits, blank, bytes_per_token = _put_together(job, paths, work / SET, on_progress)
        prepared = _publish(job, splits, work, out)
    return Report(prepared, True, splits, blank, bytes_per_token)


@dataclass(frozen=True)
class _Job:
    """What is to be done; ``identities`` are those of the sources of each split when the work began."""

    names: Sequence[str]
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
        tokenizer = [tokenizer_state(self.tokenizer), self.eos, len(self.tokenizer)]
        options = [asdict(self.reading), BLOCK_BYTES, self.fraction, self.seed]
        content = json.dumps([FORMAT, VERSION, self.identities, tokenizer, options])
        return hashlib.sha256(content.encode()).hexdigest()[:32]


def _make_job(
    names: Sequence[str],
    out: Path,
    tokenizer: str,
    validation: float | Sequence[str] | None,
    reading: Reading,
    seed: int,
) -> _Job:
    """Looks at what was asked for; raises ValueError for what cannot be done."""
    fraction = float(validation) if isinstance(validation, int | float) else None
    if fraction is not None and not 0 < fraction < 1:
        raise ValueError(f"validation is {fraction:g}; expected a part between 0 and 1, or files.")
    loaded = load_tokenizer(tokenizer)
    if loaded.eos_token_id is None:
        raise ValueError(f"the tokenizer {tokenizer} has no eos token; expected one to put behind every document.")
    found: dict[str, list[Source]] = {TRAIN: []}  # the first split, though it is looked for last
    if isinstance(validation, Sequence) and validation:
        found[VALIDATION] = find_sources(validation, reading, folder=out)
    found[TRAIN] = find_sources(names, reading, found.get(VALIDATION, ()), folder=out)
    if not found[TRAIN]:
        raise ValueError("there is nothing left to train on: all sources are given as validation.")
    identities = {split: [source.identity() for source in some] for split, some in found.items()}
    return _Job(names, tokenizer, loaded, found, identities, fraction, seed, reading)


def _check_unchanged(job: _Job) -> None:
    """The sources are what they were at the start."""
    for split, some in job.sources.items():
        for source, identity in zip(some, job.identities[split], strict=True):
            if source.identity() != identity:
                raise ValueError(f"{identity[0]} was changed while it was read; prepare it again.")


def _check_out(out: Path, fingerprint: str, overwrite: bool) -> Prepared | None:
    """The set, if it is there already; raises ValueError if something else is, which is not to be replaced."""
    if not out.exists():
        return None
    if (out / DESCRIPTION).exists():
        prepared = load_prepared(out)
        if overwrite:
            return None
        if prepared.fingerprint != fingerprint:
            raise ValueError(
                f"{out} holds a set of other sources or options, or of sources that have changed since; --overwrite "
                "replaces it."
            )
        return prepared
    if (begun := unfinished_work(out)) is not None:
        if begun != fingerprint and not overwrite:
            raise ValueError(
                f"{out} holds the unfinished set of other sources or options, or of sources that have changed since; "
                "--overwrite begins anew."
            )
    elif any(path.name != WORK for path in out.iterdir()):
        raise ValueError(f"{out} holds something that is no prepared set; expected a folder that is new or empty.")
    return None


@contextmanager
def _work_folder(out: Path, fingerprint: str) -> Iterator[Path]:
    """The folder of unfinished work, with the shards that are done if it is this work's; for one process at a time.

    Bad input leaves nothing behind. A full disk or Ctrl-C leaves what is done, for the next call.
    """
    missing = [path for path in (out, *out.absolute().parents) if not path.exists()]
    work = out / WORK
    work.mkdir(parents=True, exist_ok=True)
    with (work / "lock").open("w") as lock:
        _take(lock, out)
        try:
            if unfinished_work(out) != fingerprint:
                _empty(work, keep="lock")
                with naming(work):
                    write_atomically(work / MANIFEST, json.dumps({"fingerprint": fingerprint}).encode())
            yield work
        except ValueError:
            shutil.rmtree(work)
            with suppress(OSError):
                for path in missing:
                    path.rmdir()
            raise
        except OSError as error:
            if error.errno not in FULL:
                raise
            kept = "what is done is kept, and the same command goes on from there"
            raise OSError(error.errno, f"{error.strerror}; {kept}", error.filename) from error


def _take(lock: IO[str], out: Path) -> None:
    if fcntl is not None:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ValueError(f"{out} is being prepared by another process; wait for it or choose another.") from None


def _empty(folder: Path, keep: str) -> None:
    for path in folder.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name != keep:
            path.unlink()


class _Stopped(Exception):
    """Another thread met an error, or the user stopped the work."""


class _Meter:
    """Adds up what the threads do, tells of it, and stops them."""

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
    """Makes the shards that are missing; the paths of all of them."""
    paths = {split: [work / f"{split}-{i:06d}.arrow" for i in range(len(plan[split]))] for split in plan}
    todo = [(shard, path) for split in plan for shard, path in zip(plan[split], paths[split], strict=True)]
    meter = _Meter("tokenising", sum(_size(shard) for shard, _ in todo), on_progress)
    encode = make_encoder(job.tokenizer)

    def run(shard: list[Part], path: Path) -> None:
        if not path.exists():
            write_shard(path, read_shard(shard, job.reading), encode, job.eos, meter.add)
        meter.add(done=_size(shard))

    with _one_thread_each(), ThreadPoolExecutor(workers) as pool:
        futures = [pool.submit(run, shard, path) for shard, path in todo]
        try:
            for future in as_completed(futures):
                future.result()
        except BaseException:
            meter.stop.set()
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return paths


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


def _put_together(
    job: _Job, paths: Mapping[str, list[Path]], folder: Path, on_progress: Callable[[Progress], None] | None
) -> tuple[dict[str, Statistics], int, float]:
    """Writes the splits and the tokenizer into ``folder``, from the shards; statistics, blank ones, bytes a token."""
    totals = {split: measure(read_groups(some, job.eos)) for split, some in paths.items()}
    for split, total in totals.items():
        if not len(total.lengths):
            where = ", ".join(str(identity[0]) for identity in job.identities[split][:3])
            raise ValueError(f"there is no text in {where}; expected at least one document that is not empty.")
    lengths = {split: total.lengths for split, total in totals.items()}
    choice = None
    if job.fraction is not None:
        choice = choose_validation(lengths[TRAIN], job.fraction, job.seed)
        lengths = divide(lengths[TRAIN], choice)
    meter = _Meter("writing", sum(int(some.sum()) for some in lengths.values()), on_progress)
    shutil.rmtree(folder, ignore_errors=True)
    try:
        _write_set(job, paths, choice, folder, meter)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)  # of no use, and perhaps what fills the disk
        raise
    tokens = sum(int((total.lengths - 1).sum()) for total in totals.values())
    size = sum(total.size for total in totals.values())
    blank = sum(total.blank for total in totals.values())
    return {split: _statistics(some) for split, some in lengths.items()}, blank, size / max(1, tokens)


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


def _publish(job: _Job, splits: Mapping[str, Statistics], work: Path, out: Path) -> Prepared:
    """Puts the finished set in its place, instead of one that is there; a kill on the way loses no shard."""
    description = {
        "format": FORMAT,
        "version": VERSION,
        "tokenizer": {
            "name": job.tokenizer_name,
            "vocab_size": len(job.tokenizer),
            "eos_token_id": job.eos,
        },
        "splits": {split: {"documents": some.documents, "tokens": some.tokens} for split, some in splits.items()},
        "sources": list(job.names),
        "fingerprint": job.fingerprint,
    }
    (out / DESCRIPTION).unlink(missing_ok=True)
    for name in (TRAIN, VALIDATION, TOKENIZER):
        if (out / name).exists():
            shutil.rmtree(out / name)
        if (work / SET / name).exists():
            (work / SET / name).rename(out / name)
    with naming(out / DESCRIPTION):
        write_atomically(out / DESCRIPTION, json.dumps(description, indent=2).encode() + b"\n")
    shutil.rmtree(work)
    return load_prepared(out)
