"""What surprise means: less for what was said before, more for what contradicts it."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from titans.text.encoder import TextEncoder
from titans.text.facts import generate_facts, generate_triples, measure_surprise
from titans.text.neural import NeuralTextMemory


def encode_triples(encoder: TextEncoder, count: int) -> Tensor:
    triples = generate_triples(count, random.Random(0))
    return torch.from_numpy(encoder.encode([text for triple in triples for text in triple])).view(count, 3, -1)


@pytest.mark.parametrize("count", [24, pytest.param(200, marks=pytest.mark.slow)])
def test_a_contradiction_surprises_more_than_a_paraphrase_and_a_repetition_least(
    encoder: TextEncoder, count: int
) -> None:
    memory = NeuralTextMemory.default()
    surprise = measure_surprise(memory, encode_triples(encoder, count), torch.zeros(0, 384))
    before, after = surprise.unbind(1)
    text, paraphrase, contradiction = after.unbind(-1)
    assert bool((text < before[:, 0]).all())
    assert float((contradiction > paraphrase).float().mean()) > 0.9
    assert bool((contradiction > text).all())
    assert float(contradiction.mean() - paraphrase.mean()) > 0.002


def test_in_a_memory_that_knows_other_things_the_paraphrase_loses_more_of_its_surprise(encoder: TextEncoder) -> None:
    known = [fact.text for fact in generate_facts(20, random.Random(1))]
    context = torch.from_numpy(encoder.encode(known))
    surprise = measure_surprise(NeuralTextMemory.default(), encode_triples(encoder, 24), context)
    fall = surprise[:, 0] - surprise[:, 1]
    assert bool((fall[:, 0] > 0).all())
    assert float((fall[:, 1] > fall[:, 2]).float().mean()) > 0.6


def test_no_triple_says_the_same_of_the_same_person_twice() -> None:
    triples = generate_triples(200, random.Random(0))
    texts = [text for triple in triples for text in triple]
    assert len(set(texts)) == 600
    assert triples == generate_triples(200, random.Random(0)) != generate_triples(200, random.Random(1))
    with pytest.raises(ValueError, match="part is 'all'; expected one of train, test"):
        generate_triples(2, random.Random(0), "all")
