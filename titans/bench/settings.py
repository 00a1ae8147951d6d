"""What each benchmark can be asked for: a field with a help text is also an option of its command."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any

from titans.words import nearest, require_whole


def _option(help: str, default: Any = MISSING, least: int = 1) -> Any:
    """A field that is an option, or an argument if it has no default; whole numbers are at least ``least``."""
    return field(default=default, metadata={"help": help, "least": least})


def check_lengths(name: str, lengths: Sequence[int]) -> tuple[int, ...]:
    """The lengths in order; a ValueError if there are none, or two alike, or one below 1."""
    if not lengths:
        raise ValueError(f"{name} is empty; expected at least one number of tokens")
    if min(lengths) < 1:
        raise ValueError(f"{name} has {min(lengths)}; expected at least 1")
    if len(set(lengths)) < len(lengths):
        raise ValueError(f"{name} is {', '.join(map(str, lengths))}; expected each number once")
    return tuple(sorted(lengths))


def _check_names(name: str, chosen: Sequence[str], known: Collection[str]) -> None:
    """Raises a ValueError that names the first of the chosen that is not known, and what it may have meant."""
    for one in chosen:
        if one not in known:
            raise ValueError(f"{name} has {one!r}: {nearest(one, known)}")


def _check_url(store: str | None) -> None:
    if store is not None and not store.startswith(("postgresql://", "postgres://")):
        raise ValueError(f"store is {store}; expected a URL such as postgresql://USER:PASSWORD@HOST/DATABASE")


@dataclass(frozen=True)
class Settings:
    """What a benchmark measures; a value that cannot be measured raises a ValueError with one sentence."""

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if isinstance(value, list):  # as JSON has it
                object.__setattr__(self, each.name, tuple(value))
            if each.type == "int" or (each.type == "int | None" and value is not None):
                require_whole(each.metadata.get("least", 1), **{each.name: value})


@dataclass(frozen=True)
class MemoryBenchmarkSettings(Settings):
    """Of `titans bench memory`; ``gemm_size`` is the side of the square float32 product whose rate is the yardstick."""

    dim: int = _option("Width of the model.", 256)
    heads: int = _option("Memories side by side, each dim / heads wide.", 4)
    depth: int = _option("Layers of each memory.", 2)
    chunk_size: int = _option("Tokens that share one gradient anchor; the exact rule has none.", 64)
    batch: int = _option("Sequences per call.", 1)
    lengths: tuple[int, ...] = _option("Tokens per sequence, separated by commas.", (512, 2048, 8192, 32768))
    repeats: int = _option("Interleaved rounds of timing; the token-by-token mode takes part in two.", 5)
    threads: int = _option("CPU threads.", 1)
    only: tuple[str, ...] = _option("Contenders to run, separated by commas; all by default.", ())
    recurrent_max_length: int = _option("Longest length for the token-by-token mode.", 512)
    reference_max_length: int = _option("Longest length for titans-pytorch.", 2048)
    peak_memory: bool = _option("Measure peak memory too, in one process per figure.", True)
    gemm_size: int = 1024

    def __post_init__(self) -> None:
        from titans.bench.memory import CONTENDERS

        super().__post_init__()
        if self.dim % self.heads:
            raise ValueError(f"dim is {self.dim} and heads is {self.heads}; expected heads to divide dim")
        object.__setattr__(self, "lengths", check_lengths("lengths", self.lengths))
        _check_names("only", self.only, CONTENDERS)

    @property
    def head_width(self) -> int:
        return self.dim // self.heads


@dataclass(frozen=True)
class ModelBenchmarkSettings(Settings):
    """Of `titans bench model`."""

    dim: int = _option("Width of every model.", 256)
    layers: int = _option("Layers of every model (Mamba2: as many as fit).", 4)
    heads: int = _option("Heads of the attention and of the memory.", 4)
    vocab_size: int = _option("Size of the vocabulary.", 256)
    parameters: int | None = _option("Approximate size of every model; that of MAC by default.", None)
    memory_mode: str = _option("Rule of our memories: exact, chunked or recurrent.", "exact")
    memory_depth: int = _option("Layers of each memory.", 2)
    chunk_size: int | None = _option("Chunk of our memories (exact: tile).", None)
    window: int = _option("Tokens that MAG and MAL attend to.", 256)
    segment: int = _option("Tokens per MAC segment.", 128)
    persistent: int = _option("Persistent tokens per layer.", 16, least=0)
    batch: int = _option("Sequences per call.", 1)
    lengths: tuple[int, ...] = _option("Tokens per sequence, separated by commas.", (512, 2048, 8192, 16384, 32768))
    decode_positions: tuple[int, ...] = _option(
        "Positions at which decoding is timed, separated by commas.", (1000, 100_000)
    )
    decode_tokens: int = _option("Tokens to decode per round.", 64)
    measures: tuple[str, ...] = _option("What to measure, separated by commas.", ("train", "prefill", "decode"))
    repeats: int = _option("Interleaved rounds of timing.", 3)
    threads: int = _option("CPU threads.", 1)
    only: tuple[str, ...] = _option("Contenders to run, separated by commas; all by default.", ())
    max_seconds: float = _option("Longest time that one measurement, or reading up to a position, may take.", 600.0)
    max_memory: float | None = _option("GiB that one measurement may take; 3/4 of what is free by default.", None)
    peak_memory: bool = _option("Measure peak memory too, in one process per figure.", True)

    def __post_init__(self) -> None:
        from titans.bench.model import CONTENDERS, MEASURES
        from titans.layers.memory import MODES

        super().__post_init__()
        if self.dim % self.heads or self.dim // self.heads % 2:
            raise ValueError(
                f"dim is {self.dim} and heads is {self.heads}; expected heads to divide dim into even widths"
            )
        if self.memory_mode not in MODES:
            raise ValueError(f"memory_mode is {self.memory_mode!r}: {nearest(self.memory_mode, MODES)}")
        _check_names("only", self.only, CONTENDERS)
        if not self.measures:
            raise ValueError(f"measures is empty; expected some of {', '.join(MEASURES)}")
        _check_names("measures", self.measures, MEASURES)
        for name in ("max_seconds", "max_memory"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{name} is {value}; expected a positive number")
        for name in ("lengths", "decode_positions"):
            object.__setattr__(self, name, check_lengths(name, getattr(self, name)))
        if self.measures != ("decode",) and self.lengths[0] < 2:
            raise ValueError(f"lengths has {self.lengths[0]}; expected at least 2, a token and the next")

    @property
    def head_width(self) -> int:
        return self.dim // self.heads

    def lengths_of(self, measure: str) -> tuple[int, ...]:
        """The lengths, or positions, at which something is measured."""
        return self.decode_positions if measure == "decode" else self.lengths


@dataclass(frozen=True)
class StreamBenchmarkSettings(Settings):
    """Of `titans bench stream`; ``call`` is the tokens per call of the runs named stream."""

    tokens: int = _option("Length of every stream.", 1_000_000)
    decode_tokens: int = _option("Tokens that are read one at a time.", 20_000)
    call: int = 4096
    only: tuple[str, ...] = _option(
        "Runs, such as stream-exact-1 or bounds-default-chunked-2, separated by commas; all by default.", ()
    )

    def __post_init__(self) -> None:
        from titans.bench.stream import BOUNDS_CALL, RUNS, WARM_UP

        _check_names("only", self.only, RUNS)
        super().__post_init__()
        if any(run.startswith("stream") for run in self.only or RUNS):
            require_whole(2 * WARM_UP * self.call, tokens=self.tokens)
        require_whole(BOUNDS_CALL, tokens=self.tokens)
        require_whole(2 * WARM_UP, decode_tokens=self.decode_tokens)


@dataclass(frozen=True)
class CarriedBenchmarkSettings(Settings):
    """Of `titans bench carried`: one pair of runs per seed."""

    seeds: tuple[int, ...] = _option("Seeds, separated by commas.", (0, 1, 2))
    steps: int = _option("Optimiser steps of every run.", 1000)
    documents: int = _option("Documents to train on.", 20_000)
    threads: int = _option("CPU threads.", 1)

    def __post_init__(self) -> None:
        from titans.bench.carried import ROWS

        super().__post_init__()
        require_whole(ROWS, documents=self.documents)
        if not self.seeds or min(self.seeds) < 0 or len(set(self.seeds)) < len(self.seeds):
            raise ValueError(f"seeds is {list(self.seeds)}; expected one or more different numbers of at least 0")


@dataclass(frozen=True)
class OverheadBenchmarkSettings(Settings):
    """Of `titans bench overhead`."""

    data: str | None = _option("Folder that `titans prepare` wrote; random letters by default.", None)
    model: str = _option("Name of the model.", "mag")
    size: str = _option("Size of the model, such as 1.5m.", "1.5m")
    steps: int = _option("Steps of a run.", 30, least=3)
    rounds: int = _option("Runs of each loop, in turns.", 5)
    threads: int = _option("CPU threads.", 1)


@dataclass(frozen=True)
class AdapterBenchmarkSettings(Settings):
    """Of `titans bench adapter`."""

    model: str = _option("A folder, a GGUF file, local for SmolLM2-135M, or random for a small Llama.", "random")
    window: int = _option("Tokens that the window has.", 256)
    sinks: int = _option("First tokens that are seen besides.", 4)
    lengths: tuple[int, ...] = _option("Tokens of a text, separated by commas.", (1024, 2048, 4096, 8192, 16384))
    threads: int = _option("CPU threads.", 1)


@dataclass(frozen=True)
class CachingBenchmarkSettings(Settings):
    """Of `titans bench caching`."""

    dim: int = _option("Width of the model.", 256)
    heads: int = _option("Memories side by side, each dim / heads wide.", 4)
    depths: tuple[int, ...] = _option("Layers of each memory, separated by commas.", (1, 2))
    kept: tuple[int, ...] = _option("Earlier states that are kept and read, separated by commas.", (0, 4, 16, 64))
    segment: int = _option("Tokens after which a state is kept.", 64)
    length: int = _option("Tokens of a call.", 512)
    repeats: int = _option("Interleaved rounds of timing.", 5)
    threads: int = _option("CPU threads.", 1)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, numbers, least in (("depths", self.depths, 1), ("kept", self.kept, 0)):
            if min(numbers, default=least) < least:
                raise ValueError(f"{name} has {min(numbers)}; expected at least {least}")


@dataclass(frozen=True)
class TextBenchmarkSettings(Settings):
    """Of `titans bench text`."""

    texts: str = _option("Folder of text files, such as novels.")
    records: int = _option("Sentences to remember.", 100_000, least=2)
    queries: int = _option("Searches that are timed.", 300)
    batch: int = _option("Texts that are written one by one, and in a batch.", 1000)
    store: str | None = _option(
        "URL of a PostgreSQL database to measure, in schemas that are dropped afterwards.", None
    )
    load: int = _option("Records with random vectors to fill a store with first.", 0, least=0)
    users: int = _option("Users of these records.", 1000)
    writers: int = _option("Processes that write to one store at the same time, compared with one.", 1)
    threads: int | None = _option("CPU threads; PyTorch's choice by default.", None)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not Path(self.texts).is_dir():
            raise ValueError(f"texts is {self.texts}, which is no folder; expected a folder of .txt files")
        _check_url(self.store)


@dataclass(frozen=True)
class ServiceBenchmarkSettings(Settings):
    """Of `titans bench service`."""

    seconds: int = _option("Seconds of searching and writing.", 60)
    clients: int = _option("Clients at the same time.", 64)
    writes: int = _option("Requests of a hundred that write; the others search.", 20, least=0)
    records: int = _option("Records in the store before.", 1000, least=0)
    chats: int = _option("Chats that are timed.", 200)
    store: str | None = _option(
        "URL of a PostgreSQL database to measure, in a schema that is dropped afterwards.", None
    )
    threads: int = _option("CPU threads of the server's encoder.", 1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.writes > 100:
            raise ValueError(f"writes is {self.writes}; expected at most 100")
        _check_url(self.store)


@dataclass(frozen=True)
class FlopsSettings(Settings):
    """Of `titans bench flops`: which training run is counted."""

    model: str = _option("lmm, mac, mag, mal or sliding-window.", "mac")
    size: str = _option("Model size, from 1m to 760m, as in configs/.", "760m")
    length: int = _option("Tokens per sequence.", 4096)
    batch: int = _option("Sequences that a GPU works on at a time.", 4)
    tokens: float = _option("Tokens of the run, such as 30e9.", 30e9)
    chunk_size: int = _option("Chunk of the memory.", 64)
    vocab_size: int | None = _option("Vocabulary size. Default: that of the chosen model size.", None)
    first_order: bool = _option("Use first-order outer gradients.", False)
    checkpointing: bool = _option("Assume gradient checkpointing.", True)

    def __post_init__(self) -> None:
        from titans.bench.flops import NAMES

        if self.model not in NAMES:
            raise ValueError(f"model is {self.model!r}; the formula is for {', '.join(NAMES)}")
        super().__post_init__()
        if not self.tokens > 0:
            raise ValueError(f"tokens is {self.tokens}; expected a positive number")
