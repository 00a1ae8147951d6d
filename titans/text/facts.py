"""Facts about people, made from templates: texts to train a memory on, and triples to test its surprise with."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from titans.text.neural import NeuralTextMemory


@dataclass(frozen=True)
class Kind:
    """What can be known of a person, said in two ways and asked for in two; {n} is the name, {v} the value."""

    statement: str
    paraphrase: str
    questions: tuple[str, str]
    train: str  # values, with commas between them
    test: str


class Fact(NamedTuple):
    """A fact about a person, in words."""

    text: str
    paraphrase: str
    questions: tuple[str, str]


class Triple(NamedTuple):
    """A text, the same said otherwise, and a text that contradicts it."""

    text: str
    paraphrase: str
    contradiction: str


NAMES = {
    "train": (
        "Ada, Alan, Beth, Boris, Carla, Chen, Dora, Edgar, Elsa, Farid, Fiona, Greg, Hana, Igor, Ines, Jonas, Karim, "
        "Lena, Lukas, Mabel, Nadia, Olaf, Petra, Quinn, Rosa, Samir, Tessa, Umar, Vera, Walter"
    ),
    "test": (
        "Ann, Bruno, Clara, Dmitri, Emma, Felix, Gina, Hugo, Irma, Jack, Kira, Leo, Mona, Nils, Oscar, Paula, Ravi, "
        "Sofia, Theo, Yara"
    ),
}
KINDS = (
    Kind(
        "{n} lives in {v}.",
        "{n}'s home is in {v}.",
        ("Where does {n} live?", "Which city is {n}'s home in?"),
        "Paris, Cairo, Tokyo, Boston, Nairobi, Madrid",
        "Oslo, Lima, Delhi, Vienna, Toronto, Seoul",
    ),
    Kind(
        "{n} works as a {v}.",
        "{n} earns a living as a {v}.",
        ("What is {n}'s job?", "What does {n} do for work?"),
        "nurse, carpenter, lawyer, pilot, farmer, chemist",
        "teacher, plumber, painter, judge, baker, sailor",
    ),
    Kind(
        "{n} has a pet {v}.",
        "The animal that {n} keeps at home is a {v}.",
        ("What pet does {n} have?", "Which animal does {n} keep at home?"),
        "cat, parrot, hamster, snake, goat, turtle",
        "dog, rabbit, canary, lizard, pony, ferret",
    ),
    Kind(
        "{n}'s favourite food is {v}.",
        "{n} would rather eat {v} than anything else.",
        ("What does {n} like to eat most?", "Which dish is {n}'s favourite?"),
        "pizza, sushi, lentil soup, fried rice, pancakes, goulash",
        "lasagne, curry, tacos, dumplings, paella, falafel",
    ),
    Kind(
        "{n} plays the {v}.",
        "The instrument that {n} plays is the {v}.",
        ("Which instrument does {n} play?", "What kind of music lessons did {n} take?"),
        "piano, cello, trumpet, banjo, organ, clarinet",
        "violin, guitar, drums, flute, harp, saxophone",
    ),
    Kind(
        "{n} goes {v} every weekend.",
        "On Saturdays and Sundays {n} is out {v}.",
        ("What does {n} do at the weekend?", "Which sport does {n} do?"),
        "climbing, sailing, cycling, bowling, fencing, hiking",
        "swimming, skiing, running, rowing, surfing, skating",
    ),
    Kind(
        "{n} is learning {v}.",
        "{n} takes lessons in {v}.",
        ("Which language is {n} learning?", "What language does {n} take lessons in?"),
        "Spanish, Arabic, Japanese, Turkish, Greek, Swahili",
        "French, Korean, Russian, Hindi, Polish, Italian",
    ),
    Kind(
        "{n} is allergic to {v}.",
        "{n} must not come near {v} because of an allergy.",
        ("What is {n} allergic to?", "What does {n} have to avoid?"),
        "peanuts, pollen, shellfish, wheat, latex, mould",
        "eggs, dust, milk, soy, bees, strawberries",
    ),
    Kind(
        "{n} drives a {v} car.",
        "The car that {n} drives is {v}.",
        ("What colour is {n}'s car?", "What does the car of {n} look like?"),
        "red, white, silver, purple, brown, golden",
        "blue, black, green, yellow, pink, grey",
    ),
    Kind(
        "{n} was born in {v}.",
        "{n}'s birthday is in {v}.",
        ("When is {n}'s birthday?", "In which month was {n} born?"),
        "January, March, May, July, September, November",
        "February, April, June, August, October, December",
    ),
    Kind(
        "{n} drinks {v} in the morning.",
        "With breakfast {n} always has {v}.",
        ("What does {n} drink in the morning?", "What does {n} have with breakfast?"),
        "coffee, cocoa, orange juice, mint tea, buttermilk, lemonade",
        "black tea, espresso, water, apple juice, kefir, hot chocolate",
    ),
    Kind(
        "{n} is reading a book about {v}.",
        "The book that {n} is reading is about {v}.",
        ("What is {n}'s book about?", "What is {n} reading about?"),
        "whales, castles, chess, volcanoes, Napoleon, robots",
        "spiders, opera, the moon, pirates, gardening, Mozart",
    ),
)


def generate_facts(count: int, rng: random.Random, part: str = "train") -> list[Fact]:
    """Facts no two of which are about the same thing of the same person, so that none contradicts another.

    Those of the part ``"test"`` are about other people and other values than those of ``"train"``.
    """
    return [
        Fact(
            kind.statement.format(n=name, v=value),
            kind.paraphrase.format(n=name, v=value),
            (kind.questions[0].format(n=name), kind.questions[1].format(n=name)),
        )
        for kind, name, value, _ in _choose(count, rng, part)
    ]


def generate_triples(count: int, rng: random.Random, part: str = "test") -> list[Triple]:
    """Triples no two of which are about the same thing of the same person; parts as for :func:`generate_facts`."""
    return [
        Triple(
            kind.statement.format(n=name, v=value),
            kind.paraphrase.format(n=name, v=value),
            kind.statement.format(n=name, v=other),
        )
        for kind, name, value, other in _choose(count, rng, part)
    ]


def _choose(count: int, rng: random.Random, part: str) -> list[tuple[Kind, str, str, str]]:
    """Kinds, names, values and other values."""
    if part not in NAMES:
        raise ValueError(f"part is {part!r}; expected one of {', '.join(NAMES)}")
    pairs = [(kind, name) for kind in KINDS for name in NAMES[part].split(", ")]
    if not 0 <= count <= len(pairs):
        raise ValueError(f"count is {count}; expected 0 to {len(pairs)}, so many things there are to know")
    chosen = []
    for kind, name in rng.sample(pairs, count):
        value, other = rng.sample((kind.train if part == "train" else kind.test).split(", "), 2)
        chosen.append((kind, name, value, other))
    return chosen


def measure_surprise(memory: NeuralTextMemory, triples: Tensor, context: Tensor) -> Tensor:
    """How surprising texts, paraphrases and contradictions are before and after the text has been told.

    Args:
        memory: projections and start.
        triples: (n, 3, width), the vectors of :func:`generate_triples`.
        context: (m, width), texts that the memory is told first; each triple starts from there.

    Returns:
        (n, 2, 3): before and after; text, paraphrase and contradiction.
    """
    known, _ = memory.write(memory.empty(), context)
    rows = []
    for triple in triples:
        told, _ = memory.write(known, triple[:1])
        rows.append([[memory.write(scope, text[None])[1] for text in triple] for scope in (known, told)])
    return torch.tensor([[[float(surprise) for surprise in when] for when in row] for row in rows])
