"""Multi-query associative recall: does a model still know, at the end, the pairs it was shown at the start?

One sequence, with `pairs` = 2:

    position   0    1    2    3    4 ...                       ... length-1
    token      k1   v1   k2   v2   filler ...  k2  filler  k1  filler
    label      -    -    -    -    -           v2  -       v1  -

The pairs stand at the very start and the questions at the very end, so at sixteen times the training length
nearly the whole sequence lies between the two: only what the memory still holds can answer.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titans.models import TitansConfig, TitansForCausalLM

IGNORE = -100  # the label of a position that is not a question; cross_entropy leaves it out
SPLITS = ("train", "validation", "test")


def _help(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True)
class RecallConfig:
    """The task, the model and its training. The defaults are the reference set-up."""

    pairs: int = _help(8, "key-value pairs in a sequence, each asked for once")
    length: int = _help(64, "length of the training sequences")
    num_keys: int = _help(64, "size of the key vocabulary")
    num_values: int = _help(64, "size of the value vocabulary; guessing is right once in so many answers")
    num_fillers: int = _help(64, "size of the filler vocabulary")

    variant: str = _help("lmm", "lmm, mac, mag or mal")
    layers: int = _help(2, "number of blocks")
    dim: int = _help(64, "width of the model")
    ffn_multiplier: float = _help(2.0, "hidden width of the feed-forward layers, as a multiple of dim")
    attention_heads: int = _help(4, "attention heads of mac, mag and mal")
    window: int = _help(16, "attention window of mag and mal; two layers of it must not reach from question to pair")
    segment: int = _help(16, "segment of mac")
    persistent: int = _help(0, "persistent tokens of each block")
    tied: bool = _help(False, "whether the output head shares its weight with the embedding")
    heads: int = _help(1, "memory heads")
    head_dim: int | None = _help(None, "width of a memory head; none: dim / heads")
    depth: int = _help(2, "layers of the memory network")
    mode: str = _help("exact", "memory rule: exact, chunked or recurrent")
    chunk_size: int | None = _help(None, "chunk of the chunked rule, tile of the exact one; none: the default")
    momentum: bool = _help(True, "whether the memory has momentum")
    forgetting: bool = _help(True, "whether the memory forgets")
    conv_kernel: int = _help(4, "width of the short causal convolution before the memory; 0: off")
    bounded: bool = _help(True, "whether the memory's steps are bounded for any input")
    writes: bool = _help(True, "whether the memory is written at all; false is the control")

    steps: int = _help(600, "training steps at most")
    warmup: int = _help(50, "steps of linear warm-up")
    decay: float = _help(1 / 3, "share of the steps, at the end, over which the learning rate falls to zero")
    batch_size: int = _help(32, "sequences a step")
    learning_rate: float = _help(4e-3, "peak learning rate of AdamW")
    clip: float = _help(1.0, "largest gradient norm")
    eval_every: int = _help(50, "steps between two held-out evaluations at the training length")
    eval_sequences: int = _help(64, "sequences in such an evaluation")
    stop_at: float | None = _help(None, "stop once held-out accuracy passes this twice in a row; none: never")

    def __post_init__(self) -> None:
        for name in ("pairs", "num_keys", "num_values", "num_fillers", "layers", "dim", "heads", "depth"):
            _require_positive(name, getattr(self, name))
        for name in ("steps", "batch_size", "learning_rate", "clip", "eval_every", "eval_sequences"):
            _require_positive(name, getattr(self, name))
        if self.pairs > self.num_keys:
            raise ValueError(f"pairs must be at most num_keys = {self.num_keys}, got {self.pairs}")
        if self.length < self.shortest:
            raise ValueError(f"length must be at least 3 x pairs = {self.shortest}, got {self.length}")
        if self.warmup < 0:
            raise ValueError(f"warmup must not be negative, got {self.warmup}")
        if not 0 <= self.decay <= 1:
            raise ValueError(f"decay must be in [0, 1], got {self.decay}")
        if self.stop_at is not None and not 0 < self.stop_at <= 1:
            raise ValueError(f"stop_at must be in (0, 1] or none, got {self.stop_at}")

    @property
    def vocab_size(self) -> int:
        """Keys come first, then values, then fillers."""
        return self.num_keys + self.num_values + self.num_fillers

    @property
    def shortest(self) -> int:
        """The shortest possible sequence: the pairs, and one question for each."""
        return 3 * self.pairs

    @property
    def chance(self) -> float:
        """Accuracy of a guess among all values."""
        return 1 / self.num_values

    def build_model(self) -> TitansForCausalLM:
        """The model as described here, new."""
        return TitansForCausalLM(
            TitansConfig(
                variant=self.variant,
                vocab_size=self.vocab_size,
                hidden_size=self.dim,
                num_hidden_layers=self.layers,
                num_attention_heads=self.attention_heads,
                intermediate_size=max(1, round(self.ffn_multiplier * self.dim)),
                segment_size=self.segment,
                window_size=self.window,
                num_persistent_tokens=self.persistent,
                tie_word_embeddings=self.tied,
                memory_heads=self.heads,
                memory_head_dim=self.head_dim,
                memory_depth=self.depth,
                memory_mode=self.mode,
                memory_chunk_size=self.chunk_size,
                memory_momentum=self.momentum,
                memory_forgetting=self.forgetting,
                memory_conv_kernel=self.conv_kernel,
                memory_bounded=self.bounded,
                memory_writes=self.writes,
            )
        )


def _require_positive(name: str, value: float) -> None:
    if not 0 < value < math.inf:
        raise ValueError(f"{name} must be above 0, got {value}")


def sample_recall(
    config: RecallConfig, batch_size: int, length: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Draw `batch_size` sequences of `length` tokens.

    Returns tokens and labels, both (batch, length). A label is the value that belongs to the key asked for at
    that position, and `IGNORE` elsewhere. The questions are spread over the last 2 x pairs positions (fewer if
    the length leaves no room), in random order, with fillers between them.
    """
    _require_positive("batch_size", batch_size)
    if length < config.shortest:
        raise ValueError(f"length must be at least 3 x pairs = {config.shortest}, got {length}")
    pairs = config.pairs
    first_filler = config.num_keys + config.num_values

    def random_subset(count: int, size: int) -> Tensor:
        """`size` distinct numbers below `count`, a row for each sequence."""
        return torch.rand(batch_size, count, generator=generator).argsort(dim=1)[:, :size]

    keys = random_subset(config.num_keys, pairs)
    values = torch.randint(config.num_keys, first_filler, (batch_size, pairs), generator=generator)
    tokens = torch.randint(first_filler, config.vocab_size, (batch_size, length), generator=generator)
    tokens[:, 0 : 2 * pairs : 2] = keys
    tokens[:, 1 : 2 * pairs : 2] = values

    tail = min(2 * pairs, length - 2 * pairs)
    # a random subset comes in random order, so the questions do too
    positions = length - tail + random_subset(tail, pairs)
    tokens.scatter_(1, positions, keys)
    labels = torch.full_like(tokens, IGNORE).scatter_(1, positions, values)
    return tokens, labels


def recall_stream(
    config: RecallConfig, split: str, seed: int, batch_size: int | None = None, length: int | None = None
) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches without end. Split and seed decide every one of them; no two splits share a stream."""
    if split not in SPLITS:
        raise ValueError(f"split must be one of {', '.join(SPLITS)}, got {split!r}")
    if seed < 0:
        raise ValueError(f"seed must not be negative, got {seed}")
    generator = torch.Generator().manual_seed(len(SPLITS) * seed + SPLITS.index(split))
    while True:
        yield sample_recall(config, batch_size or config.batch_size, length or config.length, generator)


class RecallModel(nn.Module):
    """A small Titans language model that knows which task it is for."""

    def __init__(self, config: RecallConfig) -> None:
        super().__init__()
        self.config = config
        self.model = config.build_model()

    def forward(self, tokens: Tensor, where: Tensor | None = None) -> Tensor:
        """Logits for `tokens` (batch, time): (batch, time, vocabulary), or (n, vocabulary) at the n true positions
        of `where` (batch, time), which spares a long sequence the head's work and memory."""
        x = self.model.model(tokens, use_cache=False).last_hidden_state
        logits: Tensor = self.model.lm_head(x if where is None else x[where])
        return logits


@dataclass(frozen=True)
class CurvePoint:
    """One held-out evaluation in the course of training."""

    step: int
    loss: float  # mean training loss since the point before
    accuracy: float  # held-out, at the training length
    seconds: float


@dataclass
class RecallRun:
    """A trained model and how it got there."""

    model: RecallModel
    steps: int  # steps taken: fewer than asked for if it stopped early or diverged
    seconds: float
    diverged: bool
    curve: list[CurvePoint]


def learning_rate_factor(config: RecallConfig, step: int) -> float:
    """Share of the peak learning rate at `step`: a linear rise, held long, and a linear fall to zero.

    Learning to recall begins on a plateau, and a rate that falls early (a cosine over as few steps) stays there.
    """
    rise = (step + 1) / max(1, config.warmup)
    fall = (config.steps - step) / max(1.0, config.decay * config.steps)
    return max(0.0, min(1.0, rise, fall))


def train_recall(
    config: RecallConfig, seed: int, on_step: Callable[[int, float, float], None] | None = None
) -> RecallRun:
    """Train a `RecallModel` from scratch; `seed` decides its weights and its data.

    `on_step` is told (steps taken, loss, last held-out accuracy) after every step. Training ends after
    `config.steps`, or earlier: when `config.stop_at` is reached, or when the loss is no longer finite.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = RecallModel(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.learning_rate, betas=(0.9, 0.95), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: learning_rate_factor(config, step))
    batches = recall_stream(config, "train", seed)

    curve: list[CurvePoint] = []
    losses: list[float] = []
    accuracy = 0.0
    diverged = False
    step = 0
    start = time.perf_counter()
    while step < config.steps and not diverged:
        tokens, labels = next(batches)
        asked = labels != IGNORE
        loss = F.cross_entropy(model(tokens, asked), labels[asked])
        optimizer.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), config.clip)
        diverged = not (torch.isfinite(loss) and torch.isfinite(norm))
        if not diverged:
            optimizer.step()
            schedule.step()
        step += 1
        losses.append(loss.item())

        if step % config.eval_every == 0 or step == config.steps or diverged:
            accuracy = _accuracy(model, config, "validation", seed, config.length, config.eval_sequences)
            seconds = time.perf_counter() - start
            curve.append(CurvePoint(step, sum(losses) / len(losses), accuracy, seconds))
            losses.clear()
        if on_step is not None:
            on_step(step, loss.item(), accuracy)
        if config.stop_at is not None and _stays_above(config.stop_at, curve):
            break
    return RecallRun(model, step, time.perf_counter() - start, diverged, curve)


def _stays_above(accuracy: float, curve: Sequence[CurvePoint]) -> bool:
    return len(curve) > 1 and min(point.accuracy for point in curve[-2:]) > accuracy


def evaluate_recall(
    model: RecallModel,
    lengths: Sequence[int],
    seed: int = 0,
    sequences: int = 64,
    tokens_at_once: int = 16384,
) -> dict[int, float]:
    """Accuracy on the test stream of `seed`, for every one of `lengths`; NaN if any answer is not finite.

    A sequence is read in one call; `tokens_at_once` bounds how many tokens a call reads, and so the memory it takes.
    """
    _require_positive("sequences", sequences)
    config = model.config
    return {n: _accuracy(model, config, "test", seed, n, sequences, tokens_at_once) for n in lengths}


def run_recall(
    config: RecallConfig,
    seed: int,
    lengths: Sequence[int],
    sequences: int = 64,
    on_step: Callable[[int, float, float], None] | None = None,
) -> dict[str, Any]:
    """Train, then test at every one of `lengths`: the run's summary with its `recall`, ready for JSON.

    A run that diverged recalls None, and so does a model whose answers are not finite.
    """
    run = train_recall(config, seed, on_step)
    if run.diverged:
        recall = dict.fromkeys(lengths, math.nan)
    else:
        recall = evaluate_recall(run.model, lengths, seed, sequences)
    return {
        "seed": seed,
        "recall": {str(length): _or_none(accuracy) for length, accuracy in recall.items()},
        "steps": run.steps,
        "seconds": round(run.seconds, 1),
        "diverged": run.diverged,
        "config": asdict(config),
        "curve": [{name: _or_none(value) for name, value in asdict(point).items()} for point in run.curve],
    }


def _or_none(value: float) -> float | None:
    return value if math.isfinite(value) else None


@torch.no_grad()
def _accuracy(
    model: RecallModel,
    config: RecallConfig,
    split: str,
    seed: int,
    length: int,
    sequences: int,
    tokens_at_once: int = 16384,
) -> float:
    tokens, labels = next(recall_stream(config, split, seed, sequences, length))
    batch_size = max(1, tokens_at_once // length)
    was_training = model.training
    model.eval()
    right = answers = 0
    finite = True
    for rows, wanted in zip(tokens.split(batch_size), labels.split(batch_size), strict=True):
        asked = wanted != IGNORE
        logits = model(rows, asked)
        finite = finite and bool(torch.isfinite(logits).all())
        right += int((logits.argmax(dim=-1) == wanted[asked]).sum())
        answers += int(asked.sum())
    model.train(was_training)
    return right / answers if finite else math.nan
