"""One run of the experiment on DNA: a classifier trained on all folds but one, and tested on that one."""

from __future__ import annotations

import hashlib
import json
import math
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoModel, LlamaConfig, Mamba2Config, PreTrainedConfig

import titans
from titans.models import TitansConfig
from titans.models.baselines import fit as fit_width
from titans.tasks.dna import LETTERS, DNASet, read_dna
from titans.words import require_whole

UNKNOWN = LETTERS.index("N")
COMPLEMENT = torch.tensor([3, 2, 1, 0, UNKNOWN])
PARAMETERS = 72_000  # of every sequence model, its tokens and its last layer included
# What all variants of ours share; the width of the feed-forward layers makes up for the rest.
OURS: dict[str, Any] = {
    "num_attention_heads": 2, "segment_size": 32, "window_size": 32,
    "num_persistent_tokens": 4, "memory_heads": 2, "memory_local_heads": 0,
}  # fmt: skip
ABLATIONS: dict[str, dict[str, Any]] = {
    "lmm-memory-off": {"memory_writes": False},
    "lmm-linear": {"memory_depth": 1},
    "lmm-no-momentum": {"memory_momentum": False},
}
CNN_WIDTHS = (16, 8, 4)
CNN_KERNEL = 8
CNN_EMBEDDING = 100
CNN_DENSE = 512
COUNTED = 4  # letters of the words that the control counts
TEST_BATCH = 256


@dataclass(frozen=True)
class Fit:
    """How a network is trained.

    Attributes:
        epochs, batch_size: as usual; sequences of similar length are in a batch.
        learning_rate: the highest of a one-cycle schedule, or the constant one of Adam.
        one_cycle: AdamW with a one-cycle schedule and clipped gradients; False: plain Adam.
        weight_decay, dropout, smoothing: of the weights, of the tokens and the last layer's input, of the labels.
        both_strands: a random strand of each sequence in training, and the mean of both strands' logits in the test.
        pretraining: epochs of next-token prediction on the training sequences before that.
    """

    epochs: int = 4
    batch_size: int = 64
    learning_rate: float = 3e-3
    one_cycle: bool = True
    weight_decay: float = 0.05
    dropout: float = 0.3
    smoothing: float = 0.1
    both_strands: bool = True
    pretraining: int = 0

    def check(self) -> None:
        """Raises a ``ValueError`` at a setting that makes no sense."""
        require_whole(epochs=self.epochs, batch_size=self.batch_size)
        require_whole(least=0, pretraining=self.pretraining)
        if not self.learning_rate > 0:
            raise ValueError(f"learning_rate is {self.learning_rate!r}; expected a positive number")
        if not self.weight_decay >= 0:
            raise ValueError(f"weight_decay is {self.weight_decay!r}; expected a number from 0")
        for name in ("dropout", "smoothing"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)!r}; expected a number from 0 and below 1")


@dataclass(frozen=True)
class Run:
    """One model to train and test on one fold of one data set.

    Attributes:
        path, folds, drop_shared: arguments of :func:`titans.tasks.dna.read_dna`.
        data: the name of the data set.
        fold: the one that is tested.
        word, stride: letters of the words that a token is the mean of, and how many words that is; 1 and 1: a token
            per nucleotide.
        hidden_size: of all sequence models.
        fit: fields of :class:`Fit`.
        shuffled: whether the training labels are shuffled, a control.
        limit: training and test sequences at most; None: all.
    """

    path: str
    data: str
    folds: int
    drop_shared: bool
    model: str
    fold: int
    seed: int
    word: int
    stride: int
    hidden_size: int
    fit: Mapping[str, Any]
    shuffled: bool = False
    limit: int | None = None

    @property
    def name(self) -> str:
        """That of its file."""
        return f"{re.sub(r'[^A-Za-z0-9.+-]+', '-', self.data)}-{self.model}-{self.fold}-{self.seed}"

    @property
    def settings(self) -> dict[str, Any]:
        """Everything that its figures depend on."""
        network = network_fields(self.model, self.hidden_size)
        return asdict(self) | {"path": _digest(self.load()), "network": network, "version": titans.__version__}

    def file(self, out: Path) -> Path:
        """Its figures, in the folder of an experiment."""
        return out / "runs" / f"{self.name}.json"

    def load(self) -> DNASet:
        """Its data."""
        return load_data(self.path, self.folds, self.drop_shared)[self.data]


@lru_cache(maxsize=2)
def load_data(path: str, folds: int, drop_shared: bool) -> dict[str, DNASet]:
    """The data sets of a folder, by name; read once."""
    return {data.name: data for data in read_dna(path, folds, drop_shared=drop_shared)}


@lru_cache(maxsize=8)
def _digest(data: DNASet) -> str:
    return hashlib.sha256(json.dumps([data.sequences, data.labels, data.folds]).encode()).hexdigest()[:16]


class WordTokens(nn.Module):
    """Tokens for a sequence model: the mean of the embeddings of ``stride`` words that end one letter apart.

    Words of one letter with a stride of 1 are plain character embeddings. A token knows no letter after its own.
    """

    def __init__(self, word: int, stride: int, width: int) -> None:
        super().__init__()
        self.word, self.stride = word, stride
        self.embedding = nn.Embedding(4**word + 1, width, padding_idx=4**word)
        with torch.no_grad():
            nn.init.normal_(self.embedding.weight[:-1], std=0.1)

    def forward(self, codes: Tensor) -> Tensor:
        """(batch, letters) to (batch, tokens, width); a word with an N, or before the start, counts as 0."""
        time = codes.shape[1]
        padded = F.pad(codes, (self.word - 1, 0), value=UNKNOWN)
        words, unknown = torch.zeros_like(codes), torch.zeros_like(codes, dtype=torch.bool)
        for offset in range(self.word):
            letters = padded[:, offset : offset + time]
            words, unknown = 4 * words + letters, unknown | (letters == UNKNOWN)
        embedded = self.embedding(words.where(~unknown, 4**self.word))
        return F.pad(embedded, (0, 0, 0, -time % self.stride)).unflatten(1, (-1, self.stride)).mean(2)


class SequenceClassifier(nn.Module):
    """Word tokens, a causal sequence model of transformers, the mean over the tokens and a linear layer."""

    def __init__(self, config: PreTrainedConfig, word: int, stride: int, classes: int, dropout: float) -> None:
        super().__init__()
        self.tokens = WordTokens(word, stride, config.hidden_size)
        self.backbone = AutoModel.from_config(config)
        self.backbone.set_input_embeddings(None)
        self.dropout = nn.Dropout(dropout)
        self.score = nn.Linear(config.hidden_size, classes)

    def _read(self, codes: Tensor) -> Tensor:
        return self.backbone(inputs_embeds=self.dropout(self.tokens(codes)), use_cache=False).last_hidden_state

    def forward(self, codes: Tensor, lengths: Tensor) -> Tensor:
        """(batch, letters) and (batch,) to logits; padding at the end is not seen, the models being causal."""
        hidden = self._read(codes)
        counts = -(-lengths // self.tokens.stride)
        real = torch.arange(hidden.shape[1])[None] < counts[:, None]
        return self.score(self.dropout((hidden * real[..., None]).sum(1) / counts[:, None]))

    def next_token_loss(self, codes: Tensor, head: nn.Linear) -> Tensor:
        """The cross-entropy of the letters of each token, predicted from those before; N and padding do not count."""
        stride = self.tokens.stride
        hidden = self._read(codes)
        letters = F.pad(codes, (0, -codes.shape[1] % stride), value=UNKNOWN).unflatten(1, (-1, stride))
        logits = head(hidden[:, :-1]).unflatten(-1, (stride, UNKNOWN))
        return F.cross_entropy(logits.flatten(0, 2), letters[:, 1:].flatten(), ignore_index=UNKNOWN)


class BenchmarkCNN(nn.Module):
    """The network of the Genomic Benchmarks paper (Grešová et al. 2023): three convolutions and two dense layers.

    Its embedding and first convolution are one linear map of the letters, which is how it is computed here.
    """

    def __init__(self, length: int, classes: int) -> None:
        super().__init__()
        self.length = length
        self.embedding = nn.Embedding(len(LETTERS), CNN_EMBEDDING)
        self.first = nn.Conv1d(CNN_EMBEDDING, CNN_WIDTHS[0], CNN_KERNEL)
        layers: list[nn.Module] = []
        for width, after in zip(CNN_WIDTHS, (*CNN_WIDTHS[1:], None), strict=True):
            layers += [nn.BatchNorm1d(width), nn.ReLU(), nn.MaxPool1d(2)]
            layers += [nn.Conv1d(width, after, CNN_KERNEL)] if after else [nn.Flatten()]
            length = (length - CNN_KERNEL + 1) // 2
        self.rest = nn.Sequential(*layers)
        self.dense = nn.Sequential(nn.Linear(length * CNN_WIDTHS[-1], CNN_DENSE), nn.Linear(CNN_DENSE, classes))

    def forward(self, codes: Tensor, lengths: Tensor) -> Tensor:
        """(batch, letters) to logits."""
        codes = F.pad(codes, (0, self.length - codes.shape[1]), value=UNKNOWN)
        kernel = torch.einsum("oek,le->olk", self.first.weight, self.embedding.weight)
        letters = F.one_hot(codes, len(LETTERS)).to(kernel.dtype).transpose(1, 2)
        return self.dense(self.rest(F.conv1d(letters, kernel, self.first.bias)))


class WordCounts(nn.Module):
    """A control that knows no order: logistic regression on how often each short word occurs, on either strand."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4**COUNTED, affine=False)
        self.score = nn.Linear(4**COUNTED, classes)

    def forward(self, codes: Tensor, lengths: Tensor) -> Tensor:
        """(batch, letters) to logits."""
        windows = codes.unfold(1, COUNTED, 1)
        known = (windows != UNKNOWN).all(-1)
        powers = 4 ** torch.arange(COUNTED)
        counts = torch.zeros(len(codes), 4**COUNTED + 1)
        for words in ((windows * powers).sum(-1), ((3 - windows) * powers.flip(0)).sum(-1)):
            counts.scatter_add_(1, words.where(known, 4**COUNTED), torch.ones(words.shape))
        return self.score(self.norm(counts[:, :-1].log1p()))


def build_network(run: Run, classes: int, longest: int, dropout: float) -> nn.Module:
    """The network of a run; sequence models have about ``PARAMETERS``."""
    if run.model.startswith("cnn"):
        return BenchmarkCNN(max(longest, 64), classes)
    if run.model == "word-counts":
        return WordCounts(classes)

    def make(width: int) -> SequenceClassifier:
        config = _config(run.model, run.hidden_size, width)
        return SequenceClassifier(config, run.word, run.stride, classes, dropout)

    def count(width: int) -> int:
        with torch.device("meta"):
            return count_parameters(make(width))

    return make(fit_width(count, PARAMETERS))


def network_fields(model: str, hidden_size: int) -> dict[str, Any]:
    """The config of a sequence model, but for the width that its number of parameters decides; of others, nothing."""
    if model.startswith("cnn") or model == "word-counts":
        return {}
    common = {"vocab_size": 1, "hidden_size": hidden_size}
    if model == "mamba2":
        return common | {
            "num_hidden_layers": 2,
            "num_heads": 4,
            "head_dim": hidden_size // 2,
            "n_groups": 1,
            "chunk_size": 32,
        }
    if model == "llama":
        return common | {"num_hidden_layers": 2, "num_attention_heads": 2}
    variant = model.split("-")[0]
    layers = 2 if variant == "lmm" else 1  # the others have attention beside the memory in each
    return common | OURS | ABLATIONS.get(model, {}) | {"variant": variant, "num_hidden_layers": layers}


def _config(model: str, hidden_size: int, width: int) -> PreTrainedConfig:
    """A sequence model whose feed-forward layer, or for Mamba2 whose state, has a width."""
    fields = network_fields(model, hidden_size)
    if model == "mamba2":
        return Mamba2Config(**fields, state_size=width)
    return (LlamaConfig if model == "llama" else TitansConfig)(**fields, intermediate_size=width)


def count_parameters(network: nn.Module) -> int:
    """How many parameters a network has."""
    return sum(parameter.numel() for parameter in network.parameters())


def encode(sequences: Sequence[str]) -> list[Tensor]:
    """The letters of each sequence as numbers."""
    table = np.zeros(128, dtype=np.int64)
    table[[ord(letter) for letter in LETTERS]] = np.arange(len(LETTERS))
    return [torch.from_numpy(table[np.frombuffer(sequence.encode(), np.uint8)]) for sequence in sequences]


def other_strand(codes: Tensor) -> Tensor:
    """The reverse complement of one sequence."""
    return COMPLEMENT[codes].flip(0)


def _batch(codes: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    padded = nn.utils.rnn.pad_sequence(list(codes), batch_first=True, padding_value=UNKNOWN)
    return padded, torch.tensor([len(each) for each in codes])


def _batches(codes: Sequence[Tensor], size: int, both_strands: bool) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """The sequences once in random order: (which, letters, lengths); those of similar length together."""
    order = torch.randperm(len(codes))
    lengths = torch.tensor([len(codes[index]) for index in order])
    order = order[lengths.sort(stable=True).indices]  # equal lengths stay in random order
    batches = order.split(size)
    for which in (batches[index] for index in torch.randperm(len(batches))):
        turned = torch.rand(len(which)) < (0.5 if both_strands else 0.0)
        chosen = [
            other_strand(codes[i]) if turn else codes[i]
            for i, turn in zip(which.tolist(), turned.tolist(), strict=True)
        ]
        yield which, *_batch(chosen)


def train(network: nn.Module, codes: Sequence[Tensor], labels: Tensor, fit: Fit) -> None:
    """Trains a classifier."""

    def loss(which: Tensor, letters: Tensor, lengths: Tensor) -> Tensor:
        return F.cross_entropy(network(letters, lengths), labels[which], label_smoothing=fit.smoothing)

    _descend(network.parameters(), loss, codes, fit, fit.epochs, network)


def pretrain(network: SequenceClassifier, codes: Sequence[Tensor], fit: Fit) -> None:
    """Trains a sequence model to predict what comes next, on both strands."""
    head = nn.Linear(network.score.in_features, network.tokens.stride * UNKNOWN)

    def loss(which: Tensor, letters: Tensor, lengths: Tensor) -> Tensor:
        return network.next_token_loss(letters, head)

    _descend([*network.parameters(), *head.parameters()], loss, codes, fit, fit.pretraining, network)


def _descend(
    parameters: Any, loss: Callable[..., Tensor], codes: Sequence[Tensor], fit: Fit, epochs: int, network: nn.Module
) -> None:
    parameters = list(parameters)
    steps = epochs * math.ceil(len(codes) / fit.batch_size)
    optimizer: torch.optim.Optimizer
    if fit.one_cycle:
        optimizer = torch.optim.AdamW(parameters, fit.learning_rate, weight_decay=fit.weight_decay)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, fit.learning_rate, total_steps=steps, pct_start=0.2)
    else:
        optimizer, schedule = torch.optim.Adam(parameters, fit.learning_rate), None
    network.train()
    for _ in range(epochs):
        for batch in _batches(codes, fit.batch_size, fit.both_strands):
            optimizer.zero_grad()
            loss(*batch).backward()
            if schedule is not None:
                nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            if schedule is not None:
                schedule.step()
    network.eval()


@torch.no_grad()
def predict(network: nn.Module, codes: Sequence[Tensor]) -> Tensor:
    """Logits of each sequence, in order."""
    parts = (codes[start : start + TEST_BATCH] for start in range(0, len(codes), TEST_BATCH))
    return torch.cat([network(*_batch(part)) for part in parts])


def do_run(run: Run) -> dict[str, Any]:
    """Trains and tests a model; its figures."""
    start = time.process_time()
    data, fit = run.load(), Fit(**run.fit)
    codes, labels = encode(data.sequences), torch.tensor(data.labels)
    parts = [[i for i, f in enumerate(data.folds) if (f == run.fold) == tested] for tested in (False, True)]
    if run.limit is not None:
        parts = [part[:: -(-len(part) // run.limit)] for part in parts]
    (training, wanted), (testing, truth) = (([codes[i] for i in part], labels[part]) for part in parts)
    torch.manual_seed(run.seed)
    if run.shuffled:
        wanted = wanted[torch.randperm(len(wanted))]
    network = build_network(run, len(data.classes), max(map(len, codes)), fit.dropout)
    if fit.pretraining:
        assert isinstance(network, SequenceClassifier)
        pretrain(network, training, fit)
    train(network, training, wanted, fit)
    one = predict(network, testing)
    both = (one + predict(network, [other_strand(each) for each in testing])) / 2 if fit.both_strands else one
    if not torch.isfinite(both).all():
        raise ValueError("its logits are not finite; expected a lower learning rate")
    guess, classes = both.argmax(-1), len(data.classes)
    confusion = torch.bincount(classes * truth + guess, minlength=classes**2).view(classes, classes)
    return {
        "data": run.data, "model": run.model, "fold": run.fold, "seed": run.seed,
        "parameters": count_parameters(network), "train": len(training), "test": len(testing),
        "accuracy": float((guess == truth).float().mean()),
        "one_strand": float((one.argmax(-1) == truth).float().mean()),
        "confusion": confusion.tolist(), "seconds": time.process_time() - start, "settings": run.settings,
    }  # fmt: skip
