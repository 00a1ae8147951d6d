"""What the memories of a model do along a text: surprise, gates and norms for every layer, and who sees whom."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from titans.layers import NeuralMemory
from titans.layers.record import GATE_NAMES, MemoryRecord, memories_of, record_memory
from titans.models import PRESETS, TitansCache, TitansConfig, TitansForCausalLM, build
from titans.models.configuration import VARIANTS
from titans.models.loading import load_folder, read_config
from titans.ops.attention import segment_visible, window_visible
from titans.words import sentence

BYTES = 256  # the vocabulary of a model that reads bytes
PIECE = 256  # most tokens of one call, so that memory use does not grow with the text
POINTS = 120  # fewest stations along a text at which norms are taken, if it has that many tokens
FRESH_SIZE = "1m"  # of the model that a variant's name stands for
# what a cell of a mask's picture says about a query and a key
HIDDEN, SEEN, REMEMBERED = range(3)
PICTURE_TOKENS, PICTURE_SPAN, PICTURE_PERSISTENT = 24, 8, 4  # largest lengths in the picture


@dataclass(frozen=True)
class Token:
    """A token of a text.

    Attributes:
        id: its number in the vocabulary.
        text: the part of the text that it stands for; empty for the second and later bytes of a character.
        name: what it is called where its text does not say, such as "byte 0xc3"; empty otherwise.
    """

    id: int
    text: str
    name: str = ""


@dataclass(frozen=True)
class GateTrace:
    """A gate at each token: mean, lowest and highest over the heads."""

    mean: list[float] = field(default_factory=list)
    low: list[float] = field(default_factory=list)
    high: list[float] = field(default_factory=list)

    def extend(self, values: Tensor) -> None:
        """Append values (heads, time)."""
        self.mean.extend(values.mean(0).tolist())
        self.low.extend(values.amin(0).tolist())
        self.high.extend(values.amax(0).tolist())


@dataclass(frozen=True)
class LayerTrace:
    """What one memory did. Norms are those of the whole memory, all its heads and layers together.

    Attributes:
        gradient_norm: the surprise of each token, ||grad l||, before it was written.
        loss: l(M; k, v) of each token, summed over the heads.
        gates: theta, alpha and eta at each token, where the memory has them.
        weights: ||M|| at the stations of :attr:`Inspection.stations`.
        moved: ||M - M_0|| there: how far the memory has moved from its learned start.
        momentum: ||S|| there; None without momentum.
    """

    gradient_norm: list[float]
    loss: list[float]
    gates: dict[str, GateTrace]
    weights: list[float]
    moved: list[float]
    momentum: list[float] | None


@dataclass(frozen=True)
class MaskPicture:
    """Who sees whom in one layer, drawn short.

    Attributes:
        groups: name and number of the keys, from left to right.
        cells: one row per token: HIDDEN, SEEN by attention, or REMEMBERED, reached only through the memory.
        note: what was shortened for the picture; empty if nothing was.
    """

    groups: list[tuple[str, int]]
    cells: list[list[int]]
    note: str


@dataclass(frozen=True)
class Inspection:
    """What a model did along a text.

    Attributes:
        tokens: the text.
        prediction: -log p of each token given those before it, in nats; None for the first.
        stations: after how many tokens the norms were taken.
        layers: one trace per layer.
        mask: who sees whom.
    """

    tokens: list[Token]
    prediction: list[float | None]
    stations: list[int]
    layers: list[LayerTrace]
    mask: MaskPicture


@torch.no_grad()
def inspect_tokens(
    model: TitansForCausalLM,
    tokens: Sequence[Token],
    piece: int | None = None,
    on_piece: Callable[[int], None] | None = None,
) -> Inspection:
    """Let ``model`` read ``tokens`` piece by piece, and record what its memories do.

    Args:
        piece: tokens between two stations, at most ``PIECE``; None: so few that there are ``POINTS`` stations, if the
            text has that many tokens.
        on_piece: called with the number of tokens read so far.
    """
    if not tokens:
        raise ValueError("the text is empty; expected at least one token")
    if piece is not None and piece < 1:
        raise ValueError(f"piece is {piece}; expected a whole number of at least 1")
    memories = memories_of(model)
    if not memories:
        raise ValueError("the model has no memory: use_memory is False; expected a model with a memory to inspect")
    piece = piece or max(1, min(PIECE, len(tokens) // POINTS))
    layers = [
        LayerTrace([], [], {name: GateTrace() for name in GATE_NAMES}, [], [], [] if memory.momentum else None)
        for memory in memories
    ]
    prediction: list[float | None] = [None]
    stations: list[int] = []
    cache: TitansCache | None = None
    ahead: Tensor | None = None  # (1, vocabulary), what was expected of the next token
    was_training = model.training
    model.eval()
    try:
        with record_memory(model) as records:
            for start in range(0, len(tokens), piece):
                part = tokens[start : start + piece]
                ids = torch.tensor([[token.id for token in part]], device=model.device)
                output = model(ids, past_key_values=cache, use_cache=True)
                cache = output.past_key_values
                logits = output.logits[0].float()
                expected = logits[:-1] if ahead is None else torch.cat([ahead, logits[:-1]])
                targets = ids[0, len(ids[0]) - len(expected) :]
                prediction += nn.functional.cross_entropy(expected, targets, reduction="none").tolist()
                ahead = logits[-1:]
                stations.append(start + len(part))
                for memory, record, layer in zip(memories, records, layers, strict=True):
                    _note(memory, record, layer, len(part))
                    record.clear()
                if on_piece is not None:
                    on_piece(stations[-1])
    finally:
        model.train(was_training)
    for layer in layers:
        for name in GATE_NAMES:
            if not layer.gates[name].mean:
                del layer.gates[name]
    return Inspection(list(tokens), prediction, stations, layers, picture_mask(model.config))


def _note(memory: NeuralMemory, record: MemoryRecord, layer: LayerTrace, count: int) -> None:
    """Add the last ``count`` tokens of a record; those before them are persistent tokens."""
    norm = torch.cat([surprise.gradient_norm[0] for surprise in record.surprise], dim=-1)[:, -count:]
    loss = torch.cat([surprise.loss[0] for surprise in record.surprise], dim=-1)[:, -count:]
    layer.gradient_norm.extend(norm.square().sum(0).sqrt().tolist())
    layer.loss.extend(loss.sum(0).tolist())
    for name in record.gates[0]:
        layer.gates[name].extend(torch.cat([gates[name][0] for gates in record.gates], dim=-1)[:, -count:])
    assert record.state is not None
    weights = [w[0].float() for w in record.state.weights]
    layer.weights.append(_norm(weights))
    layer.moved.append(_norm([w - start.float() for w, start in zip(weights, memory.initial(None), strict=True)]))
    if layer.momentum is not None:
        layer.momentum.append(_norm([m[0].float() for m in record.state.momentum]))


def _norm(tensors: Sequence[Tensor]) -> float:
    return float(torch.stack([tensor.square().sum() for tensor in tensors]).sum().sqrt())


def picture_mask(config: TitansConfig) -> MaskPicture:
    """Who sees whom in a layer of a model, over a few tokens, with its window or segment cut short."""
    time = PICTURE_TOKENS
    attends = bool(config.attending)
    prefix = min(config.num_persistent_tokens, PICTURE_PERSISTENT)
    if config.variant == "mac" and not attends:
        prefix = 0  # such a block has none
    remembered = REMEMBERED if config.use_memory else HIDDEN
    past = torch.ones(time, time, dtype=torch.bool).tril()
    groups = [("tokens", time)]
    if not attends:
        seen = torch.zeros(time, time, dtype=torch.bool)
        before = torch.full((time, prefix), remembered)
    elif config.variant == "mac":
        span = min(config.segment_size, PICTURE_SPAN)
        inside = segment_visible(span, span, history=False)
        seen = torch.block_diag(*[inside] * -(-time // span))[:time, :time].bool()
        before = torch.full((time, prefix), SEEN)
        if config.use_memory:
            history = segment_visible(span, span)[:, :span]
            h = torch.block_diag(*[history] * -(-time // span))[:time, :time].long()
            before = torch.cat([before, h * SEEN], dim=1)
            groups.insert(0, ("h, read from the memory", time))
    else:
        visible = window_visible(time, min(config.window_size, PICTURE_SPAN), prefix)
        seen = visible[:, prefix:]
        before = visible[:, :prefix].long() * SEEN
    cells = torch.where(seen, SEEN, torch.where(past, remembered, HIDDEN))
    if prefix:
        groups.insert(0, ("persistent", prefix))

    name = "segment_size" if config.variant == "mac" else "window_size"
    shortened = [(name, getattr(config, name), PICTURE_SPAN)] if attends else []
    if prefix:
        shortened.append(("num_persistent_tokens", config.num_persistent_tokens, PICTURE_PERSISTENT))
    notes = [f"{what} {drawn} instead of {real:,}" for what, real, drawn in shortened if real > drawn]
    return MaskPicture(groups, torch.cat([before, cells], dim=1).tolist(), " and ".join(notes))


@dataclass(frozen=True)
class Subject:
    """A model to inspect.

    Attributes:
        model: the model.
        tokenizer: of transformers; None: the model reads bytes.
        source: where it came from.
        fresh: whether its weights are random.
    """

    model: TitansForCausalLM
    tokenizer: Any
    source: str
    fresh: bool

    def tokenize(self, data: bytes) -> list[Token]:
        """The tokens of a text in UTF-8; a model without a tokenizer takes any bytes."""
        if self.tokenizer is not None:
            return tokenize(self.tokenizer, data)
        size = self.model.config.vocab_size
        if size < BYTES:
            raise ValueError(
                f"{self.source} has no tokenizer and a vocabulary of {size}; expected at least {BYTES} to read bytes"
            )
        return tokenize_bytes(data)


def load_subject(name: str, seed: int = 0) -> Subject:
    """The model in a folder, or a fresh one from a config file or from the name of a variant or a preset."""
    path = Path(name)
    fresh = (*VARIANTS, *PRESETS)
    if path.is_dir():
        _read_config(path / "config.json")
        model, tokenizer = load_folder(path)
        return Subject(model, tokenizer, name, fresh=False)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if path.is_file():
            fields = _read_config(path)
            try:
                made = TitansForCausalLM(TitansConfig.from_dict(fields))
            except Exception as error:  # a field of the wrong kind raises whatever first trips over it
                raise ValueError(f"{name} does not describe a model: {sentence(error)}") from error
        elif name in fresh:
            made = build(name, FRESH_SIZE)
        else:
            raise ValueError(
                f"{name} is not there; expected a folder with a model, a config file, or one of {', '.join(fresh)}"
            )
    return Subject(made.eval(), None, name, fresh=True)


def _read_config(path: Path) -> dict[str, Any]:
    fields = read_config(path)
    kind = fields.get("model_type")
    if kind != "titans":
        raise ValueError(f"{path} has model_type {kind!r}; expected the config of a Titans model, 'titans'")
    return fields


def tokenize_bytes(data: bytes) -> list[Token]:
    """One token per byte. The first byte of a character carries it; bytes that are not UTF-8 stand for themselves."""
    tokens = []
    for character in data.decode("utf-8", errors="surrogateescape"):
        own = character.encode("utf-8", errors="surrogateescape")
        if len(own) == 1 and character.isascii():
            tokens.append(Token(own[0], character))
        elif len(own) == 1:
            tokens.append(Token(own[0], f"\\x{own[0]:02x}", f"byte 0x{own[0]:02x}, not UTF-8"))
        else:
            for place, byte in enumerate(own):
                name = f"byte 0x{byte:02x}, {place + 1} of {len(own)} of {character}"
                tokens.append(Token(byte, "" if place else character, name))
    return tokens


def tokenize(tokenizer: Any, data: bytes) -> list[Token]:
    """The tokens that a tokenizer of transformers makes of a text; without the special ones, their texts are the text.

    A tokenizer that does not know the places of its tokens shows each as it decodes it.
    """
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"the text is not UTF-8 at byte {error.start}; expected text for the tokenizer") from None
    if not tokenizer.is_fast:
        return [Token(number, tokenizer.decode([number])) for number in tokenizer(text)["input_ids"]]
    encoded = tokenizer(text, return_offsets_mapping=True)
    special = set(tokenizer.all_special_ids)
    tokens, done = [], 0
    for number, (_, stop) in zip(encoded["input_ids"], encoded["offset_mapping"], strict=True):
        own = text[done:stop]  # what lies between two tokens goes with the second
        done = max(done, stop)
        name = "" if own else str(tokenizer.convert_ids_to_tokens(number))
        tokens.append(Token(number, name, "special") if number in special and not own else Token(number, own, name))
    return tokens
