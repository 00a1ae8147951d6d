"""Where a memory should listen, and how it should start, from plain text: before any training."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from titans.adapters.memory import TapMemory, above
from titans.adapters.model import HEAD, AdaptedModel
from titans.adapters.states import Reading, head

SKIPPED = 8  # the first tokens of a text, whose states are like no others
RIDGE = 0.1  # what whitening adds to every variance, in units of their mean
VALUE_SIZE = 5.0  # the length of a value before it is squashed into the unit ball
COMMON = 50  # so many of the most frequent tokens are not asked for: anybody finds them
ASKED = 256  # tokens of a text that the probe asks for, at most
LOUDNESS = 60.0  # loud enough to outvote the model where the gate is open
OPENED, FLOORS = (0.02, 0.05, 0.1, 0.2, 0.4), (0.25, 0.35, 0.45)  # of which a memory starts with the best


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
def start(model: AdaptedModel, readings: Sequence[Reading]) -> list[tuple[float, float]]:
    """Starts the memories as induction heads, in closed form; returns how far each is open at first, and its floor.

    A query has the features of the whitened state of a token, a key those of the token before, a value is the whitened
    embedding of the present token: asked with a state, the memory says what followed the states that were like it. How
    loud it says so is what predicts the texts best.
    """
    chosen = []
    for index, memory in enumerate(model.memories):
        assert isinstance(memory, TapMemory)
        if model.inject[index] != HEAD:
            raise ValueError(f"inject is {model.inject[index]}; expected {HEAD}: only there a memory can be started")
        _start_memory(model, memory, model.taps[index], readings)
        opened, floor = _best_opening(model, index, readings)
        memory.loudness.fill_(LOUDNESS)
        memory.to_gate.bias.fill_(math.log(opened / (1 - opened)))
        memory.floor.fill_(floor)
        chosen.append((opened, floor))
    return chosen


def _start_memory(model: AdaptedModel, memory: TapMemory, taps: Sequence[int], readings: Sequence[Reading]) -> None:
    width = model.config.hidden_size
    embedding = model.embedding.float()
    for place, tap in enumerate(taps):
        x = embedding if tap == 0 else torch.cat([reading.states[tap][SKIPPED:].float() for reading in readings])
        memory.mean[place] = x.mean(0)
        memory.scale[place] = 1 / x.std(0).clamp(min=1e-6)
    states = torch.cat([_inputs(memory, taps, reading, embedding)[SKIPPED:] for reading in readings])
    key = slice(width, None) if len(taps) > 1 else slice(None)
    words = (embedding - memory.mean[0]) * memory.scale[0]
    whitened = whiten(words)
    whitened *= VALUE_SIZE / (words @ whitened.T).norm(dim=-1).mean()
    coded = whiten(states[:, key])
    for codes in (memory.to_query, memory.to_key):
        codes.weight.zero_()
        codes.bias.zero_()
        codes.weight[:, key] = coded
    memory.to_value.weight.zero_()
    memory.to_value.weight[:, :width] = whitened
    memory.sizes.copy_((words @ whitened.T).norm(dim=-1).clamp(min=1e-6))


def whiten(x: Tensor) -> Tensor:
    """(channels, channels): after it the channels of x (samples, channels) vary about as much in every direction."""
    values, vectors = torch.linalg.eigh(x.T @ x / len(x))
    values = values.clamp(min=0)
    made: Tensor = (vectors * (values + RIDGE * values.mean()).rsqrt()) @ vectors.T
    return made


def _inputs(memory: TapMemory, taps: Sequence[int], reading: Reading, embedding: Tensor) -> Tensor:
    ids = reading.ids.to(embedding.device)
    states = [embedding[ids] if tap == 0 else reading.states[tap].to(embedding.device).float() for tap in taps]
    return memory.standardise(torch.stack(states, dim=-2))


def read_texts(model: AdaptedModel, index: int, readings: Sequence[Reading]) -> tuple[Tensor, Tensor]:
    """What a memory recalls of texts (texts, 1, longest time, width), and how far it is open (texts, time, 1)."""
    memory = model.memories[index]
    assert isinstance(memory, TapMemory)
    embedding = model.embedding.float()
    each = [_inputs(memory, model.taps[index], reading, embedding) for reading in readings]
    x = pad_sequence(each, batch_first=True)
    mask = pad_sequence([torch.ones(len(one), dtype=torch.bool, device=x.device) for one in each], True)
    y, _ = memory.write(x, memory.init_state(len(x)), None if bool(mask.all()) else mask)
    return y, memory.output_gate(x)


def _best_opening(model: AdaptedModel, index: int, readings: Sequence[Reading]) -> tuple[float, float]:
    """How far open, and with which floor, the memory predicts texts best beyond the window."""
    memory = model.memories[index]
    assert isinstance(memory, TapMemory)
    embedding = model.embedding.float()
    losses = {(opened, floor): 0.0 for opened in OPENED for floor in FLOORS}
    for reading in readings:
        places = torch.arange(min(reading.window, len(reading.ids) // 2), len(reading.ids) - 1, 4)
        wanted = reading.ids[places + 1].to(embedding.device)
        like = memory.likeness(read_texts(model, index, [reading])[0][0, 0, places], embedding)
        logits = head(model, reading.last[places].to(like.device).float())
        for floor in FLOORS:
            more = above(like, floor)
            for opened in OPENED:
                losses[opened, floor] += float(F.cross_entropy(logits + LOUDNESS * opened * more, wanted))
    return min(losses, key=lambda pair: losses[pair])
