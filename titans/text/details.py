"""How much a text tells that somebody may ask for later, judged by its words alone."""

from __future__ import annotations

import math
import re

WORD = re.compile(r"\w+(?:['’]\w+)?")
SELF = frozenset("i me my mine myself we us our ours i'm i've i'll i'd we're we've we'll we'd".split())  # noqa: SIM905
CALENDAR = frozenset(
    """
    monday tuesday wednesday thursday friday saturday sunday january february march april may june july august september
    october november december
    """.split()  # noqa: SIM905
)
_SPEAKER = re.compile(r"([A-Z]\w*(?: [A-Z]\w*)?): ")
_SENTENCE = re.compile(r"(?<=[.!?…])\s+")
_OTHER = frozenset("you your yours yourself you're you've you'll you'd".split())  # noqa: SIM905
_TIME = CALENDAR | frozenset(
    """
    ago autumn day days evening fall last month months morning next night recently since spring summer today tomorrow
    tonight week weekend weekends weeks winter year years yesterday
    """.split()  # noqa: SIM905
)


def details(text: str) -> float:
    """More for every name, number and word of time, and for who speaks of themselves; less for who speaks of the other.

    Names are told from other words by their capitals, and the words are English; in another language numbers count.
    """
    told = own = other = 0
    for sentence in _SENTENCE.split(split_speaker(text)[1]):
        for index, word in enumerate(WORD.findall(sentence)):
            plain = word.casefold().replace("’", "'")
            if plain in SELF:
                own += 1
            elif plain in _OTHER:
                other += 1
            elif plain in _TIME or word[0].isdigit() or (index and word[0].isupper()):
                told += 1
    # The second name of a text adds less than the first.
    return math.sqrt(told) + (math.sqrt(own) - math.sqrt(other)) / 2


def split_speaker(text: str) -> tuple[str, str]:
    """``"Ann: I moved."`` as Ann and what she said; nobody if the text names no speaker."""
    match = _SPEAKER.match(text)
    return (match[1], text[match.end() :]) if match else ("", text)
