"""Facts about people, made from templates: texts to train a memory on."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True)
class Kind:
    """What can be known about a person, stated in two ways and asked in two; {n} is the name, {v} the value."""

    statement: str
    paraphrase: str
    questions: tuple[str, str]
    train: str  # values, separated by commas
    test: str

    def values(self, part: str) -> list[str]:
        """The values of the part ``"train"`` or ``"test"``."""
        return (self.train if part == "train" else self.test).split(", ")


class Fact(NamedTuple):
    """A fact about a person, in words."""

    text: str
    paraphrase: str
    questions: tuple[str, str]


NAMES = {
    part: names.split(", ")
    for part, names in {
        "train": "Ada, Alan, Beth, Boris, Carla, Chen, Dora, Edgar, Elsa, Farid, Fiona, Greg, Hana, Igor, Ines, Jonas, "
        "Karim, Lena, Lukas, Mabel, Nadia, Olaf, Petra, Quinn, Rosa, Samir, Tessa, Umar, Vera, Walter",
        "test": "Ann, Bruno, Clara, Dmitri, Emma, Felix, Gina, Hugo, Irma, Jack, Kira, Leo, Mona, Nils, Oscar, Paula, "
        "Ravi, Sofia, Theo, Yara",
    }.items()
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
# What people say that states no fact to remember.
SMALL_TALK = (
    "Good morning.", "How are you today?", "Thank you so much for your help!", "See you tomorrow, then.",
    "That sounds like a lot of fun.", "I had a long day at work.", "The weather is lovely today.", "I am on my way.",
    "What a nice surprise!", "I could not agree more.", "Let me think about it.", "You were right about the traffic.",
    "Can you say that again?", "I just got back from a walk.", "It was great to see everybody on Sunday.",
    "I am so happy for you.", "Take care and give my love to the family.", "We should do this more often.",
    "Sorry, I missed your call.", "That reminds me of a film that we saw.", "I have no idea what to cook tonight.",
    "The meeting took longer than it should have.", "Do you want to come along?", "I slept badly last night.",
    "It is getting late, so I have to go.", "Nothing much happened here this week.", "Did you like the concert?",
    "I finally finished that puzzle.", "The neighbours were loud again.", "Congratulations, you have earned it!",
    "I will send you the pictures later.", "That must have been hard for you.", "My phone is almost out of battery.",
    "We laughed all evening.", "Let us talk about it over lunch.", "I can hardly wait for the holidays.",
    "The train was late, as always.", "You always know what to say.", "I need new shoes.", "Have a good trip!",
)  # fmt: skip


def generate_facts(count: int, rng: random.Random, part: str = "train") -> list[Fact]:
    """Facts that do not contradict each other: each is about another person or another kind of thing.

    The part ``"test"`` has other people and other values than ``"train"``.
    """
    return [
        Fact(
            kind.statement.format(n=name, v=value),
            kind.paraphrase.format(n=name, v=value),
            (kind.questions[0].format(n=name), kind.questions[1].format(n=name)),
        )
        for kind, name, value, _ in draw_values(count, rng, part)
    ]


def draw_values(count: int, rng: random.Random, part: str) -> list[tuple[Kind, str, str, str]]:
    """Pairs of a kind and a name, no two alike, each with two different values."""
    if part not in NAMES:
        raise ValueError(f"part is {part!r}; expected one of {', '.join(NAMES)}")
    pairs = [(kind, name) for kind in KINDS for name in NAMES[part]]
    if not 0 <= count <= len(pairs):
        raise ValueError(f"count is {count}; expected 0 to {len(pairs)}, the number of facts that the templates make")
    drawn = []
    for kind, name in rng.sample(pairs, count):
        value, other = rng.sample(kind.values(part), 2)
        drawn.append((kind, name, value, other))
    return drawn
