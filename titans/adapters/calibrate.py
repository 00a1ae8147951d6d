"""Where a memory should listen, and how it should start, from plain text: before any training."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from titans.adapters.memory import TapMemory
from titans.adapters.model import AdaptedModel
from titans.adapters.states import Reading, head

SKIPPED = 8  # the first tokens of a text, whose states are like no others
RIDGE = 0.1  # what whitening adds to every variance, in units of their mean
VALUE_SIZE = 5.0  # the length of a value before it is squashed into the unit ball
COMMON = 50  # so many of the most frequent tokens are not asked for: anybody finds them
ASKED = 256  # tokens of a text that the probe asks for, at most
SIZES = (0.3, 1.0, 2.0, 4.0, 7.0, 12.0, 20.0, 35.0)  # of what a memory says at the start
LOST = 0.01  # nats per token that a start may cost: a loud one learns faster


def probe(readings: Sequence[Reading], window: int) -> dict[int, float]:
    """How often the state that is most like a token's, beyond the window, was followed by what follows the token.

    Of the tokens that did occur there, and are not among the commonest: by layer, for the layers that were recorded.
    """
    counts = Counter(token for reading in readings for token in reading.ids.tolist())
    common = {token for token, _ in counts.most_common(min(COMMON, len(counts) // 4))}
    hits: dict[int, list[float]] = {layer: [] for layer in readings[0].states}
    for reading in readings:
        ids = reading.ids.tolist()
        asked = []
        for place in range(window + SKIPPED, len(ids) - 1):
            if ids[place + 1] not in common and ids[place + 1] in ids[SKIPPED + 1 : place - window + 2]:
                asked.append(place)
        asked = asked[:: max(1, len(asked) // ASKED)]
        if not asked:
            continue
        places = torch.tensor(asked)
        following = reading.ids[1:]
        for layer, states in reading.states.items():
            x = states.float()[:-1]
            x = F.normalize((x - x[SKIPPED:].mean(0)) / x[SKIPPED:].std(0).clamp(min=1e-6), dim=-1)
            alike = x[places] @ x.T
            near = torch.arange(len(x)) > places[:, None] - window
            alike[near] = -torch.inf
            alike[:, :SKIPPED] = -torch.inf
            found = following[alike.argmax(dim=1)]
            hits[layer] += (found == following[places]).tolist()
    if not any(hits.values()):
        longest = max(len(reading.ids) for reading in readings)
        raise ValueError(
            f"the texts have {longest} tokens, in which nothing comes again beyond the window of {window}; expected "
            "longer ones, or a tap"
        )
    return {layer: sum(found) / len(found) for layer, found in hits.items()}


@torch.no_grad()
def start(model: AdaptedModel, readings: Sequence[Reading]) -> list[float]:
    """Starts the memories as induction heads, in closed form; returns how loud each begins.

    A key is the whitened state of the token before, a query that of the present token, a value the whitened embedding
    of the present token: asked with a state, the memory says what followed the states that were like it. What it says
    is turned into a state that the model's head reads as that token, by least squares over the vocabulary.
    """
    chosen = []
    for index, memory in enumerate(model.memories):
        assert isinstance(memory, TapMemory)
        _start_memory(model, memory, model.taps[index], readings)
        chosen.append(_size(model, index, readings))
        memory.to_out.weight.mul_(chosen[-1])
    return chosen


def _start_memory(model: AdaptedModel, memory: TapMemory, taps: Sequence[int], readings: Sequence[Reading]) -> None:
    width, inner = model.config.hidden_size, memory.heads * memory.head_dim
    embedding = next(model.get_input_embeddings().parameters()).float()
    for place, tap in enumerate(taps):
        x = embedding if tap == 0 else torch.cat([reading.states[tap][SKIPPED:].float() for reading in readings])
        memory.mean[place] = x.mean(0)
        memory.scale[place] = 1 / x.std(0).clamp(min=1e-6)
    states = torch.cat([_inputs(memory, taps, reading, embedding)[SKIPPED:] for reading in readings])
    of_value = taps.index(0) if 0 in taps else len(taps) - 1
    value = slice(of_value * width, (of_value + 1) * width)
    key = [channel for channel in range(memory.dim) if len(taps) == 1 or not value.start <= channel < value.stop]
    words = (embedding - memory.mean[of_value]) * memory.scale[of_value] if 0 in taps else states[:, value]
    whitened = whiten(words, inner)
    whitened *= VALUE_SIZE / (words @ whitened.T).norm(dim=-1).mean()

    memory.to_qkv.weight.zero_()
    query = whiten(states[:, key], inner)
    for part in (0, 1):
        memory.to_qkv.weight[part * inner : (part + 1) * inner, key] = query
    memory.to_qkv.weight[2 * inner :, value] = whitened
    if memory.conv is not None:
        memory.conv.zero_()
        memory.conv[-1] = 1.0
        if memory.conv_kernel > 1:
            memory.conv[-1, inner : 2 * inner] = 0.0  # the key is the token before
            memory.conv[-2, inner : 2 * inner] = 1.0
    if memory.to_gates is not None:
        memory.to_gates.weight.zero_()
    memory.to_gate.weight.zero_()
    memory.to_gate.bias.zero_()

    weight = getattr(model.decoder.norm, "weight", None)
    rows = next(model.get_output_embeddings().parameters()).float()
    rows = rows if weight is None else rows * weight.float()
    wanted = (words if 0 in taps else embedding) @ whitened.T
    gram = rows.T @ rows
    gram += RIDGE * gram.diagonal().mean() * torch.eye(width, device=gram.device)
    memory.to_out.weight.copy_(torch.linalg.solve(gram, rows.T @ wanted))


def whiten(x: Tensor, width: int) -> Tensor:
    """(width, channels): the directions in which x (samples, channels) varies most, with about the same variance."""
    values, vectors = torch.linalg.eigh(x.T @ x / len(x))
    values, vectors = values.clamp(min=0).flip(0)[:width], vectors.flip(1)[:, :width]
    scaled = vectors * (values + RIDGE * values.mean()).rsqrt()
    if width <= x.shape[1] and width == vectors.shape[0]:
        return scaled @ vectors.T  # square: as near to the channels as it can be
    made: Tensor = F.pad(scaled.T, (0, 0, 0, width - scaled.shape[1]))
    return made


def _inputs(memory: TapMemory, taps: Sequence[int], reading: Reading, embedding: Tensor) -> Tensor:
    ids = reading.ids.to(embedding.device)
    states = [embedding[ids] if tap == 0 else reading.states[tap].to(embedding.device).float() for tap in taps]
    return memory.standardise(torch.stack(states, dim=-2))


def memory_output(model: AdaptedModel, readings: Sequence[Reading], index: int | None = None) -> Tensor:
    """What the memories, or one of them, say to texts: (texts, longest time, hidden_size)."""
    embedding = next(model.get_input_embeddings().parameters()).float()
    total: Tensor | None = None
    for number, memory in enumerate(model.memories):
        assert isinstance(memory, TapMemory)
        if index is None or number == index:
            each = [_inputs(memory, model.taps[number], reading, embedding) for reading in readings]
            x = pad_sequence(each, batch_first=True)
            mask = pad_sequence([torch.ones(len(one), dtype=torch.bool, device=x.device) for one in each], True)
            y = memory(x, None, None if bool(mask.all()) else mask)[0]
            total = y if total is None else total + y
    assert total is not None
    return total


def _size(model: AdaptedModel, index: int, readings: Sequence[Reading]) -> float:
    """The largest of ``SIZES`` whose output costs no more than ``LOST`` in language."""
    losses = {size: 0.0 for size in (0.0, *SIZES)}
    for reading in readings:
        said = memory_output(model, [reading], index)[0]
        places = torch.arange(min(reading.window, len(reading.ids) // 2), len(reading.ids) - 1, 4)
        for size in losses:
            logits = head(model, reading.last[places].to(said.device).float() + size * said[places])
            losses[size] += float(F.cross_entropy(logits, reading.ids[places + 1].to(said.device)))
    allowed = losses[0.0] + LOST * len(readings)
    return max((size for size in SIZES if losses[size] <= allowed), default=SIZES[0])
