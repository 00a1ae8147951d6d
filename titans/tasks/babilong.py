"""BABILong: the facts of a short story, in order but scattered over a long text, and a question about them."""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar

import numpy as np

from titans.tasks.babi import TRIES, Story, StoryTask, ask_for
from titans.tasks.background import PARTS, WHOLE, Writer, text_files, writer_for
from titans.tasks.base import Example, Group, WrongLengthError, append_question, require_lengths

_MOVED = "Some sentences of the text below say where people go"
_CARRIED = (
    f"{_MOVED} and what they pick up and put down. A thing goes where the person who has it goes, and stays where it "
    "was put down."
)
INSTRUCTIONS = {
    "qa1": f"{_MOVED}. Everybody is where he or she went last. Answer with one word, a place.",
    "qa2": f"{_CARRIED} Say where the thing is now. Answer with one word, a place.",
    "qa3": f"{_CARRIED} Say where the thing was before. Answer with one word, a place.",
    "qa4": "Some sentences of the text below say how places lie to each other. Answer with one word, a place.",
    "qa5": "Some sentences of the text below say who gives what to whom. Answer with one word, a person or a thing.",
}
EXAMPLES = {
    "qa1": (
        "Ruth went to the barn. Otto moved to the cellar. Ruth moved to the attic. Where is Ruth? attic",
        "Otto travelled to the porch. Ruth went to the barn. Where is Otto? porch",
    ),
    "qa2": (
        "Ruth went to the barn. Ruth took the lamp. Ruth moved to the attic. Where is the lamp? attic",
        "Otto moved to the cellar. Otto got the rope. Otto dropped the rope. Otto went to the porch. "
        "Where is the rope? cellar",
    ),
    "qa3": (
        "Ruth took the lamp. Ruth went to the barn. Ruth moved to the attic. Where was the lamp before the attic? barn",
        "Otto moved to the cellar. Otto got the rope. Ruth went to the barn. Otto travelled to the porch. "
        "Where was the rope before the porch? cellar",
    ),
    "qa4": (
        "The barn is north of the attic. The porch is south of the attic. What is north of the attic? barn",
        "The cellar is east of the porch. The porch is east of the barn. What is the porch east of? barn",
    ),
    "qa5": (
        "Ruth took the lamp. Ruth gave the lamp to Otto. Otto went to the barn. Who did Ruth give the lamp to? Otto",
        "Otto got the rope. Ruth moved to the attic. Otto handed the rope to Emil. What did Otto give to Emil? rope",
    ),
}


@dataclass(frozen=True)
class Babilong(StoryTask):
    """Facts in a long text.

    The background fills the sequence to exactly its length, so its last sentence may be cut. Stories whose facts alone
    are too long are skipped.

    Attributes:
        background: a file, or a folder whose .txt files are read in the order of their names: the first eight tenths
            for train, one for validation and the last for test; None: a short text of our own, repeated, for all.
        repeat: start over where the text ends, for lengths that it does not have; if not, it must be long enough.
        lengths: of the sequences, in tokens.
        examples: how many short examples the instruction has.
        questions: how many questions a training text asks, at most; those after the first follow from its facts, which
            our rules can tell for qa1 and qa2.
    """

    name: ClassVar[str] = "babilong"
    title: ClassVar[str] = "Facts in a long text (BABILong)"
    source: ClassVar[str] = "BABILong (arXiv 2406.10149) and bAbI (arXiv 1502.05698), with instructions of our own"
    axes: ClassVar[tuple[str, ...]] = ("length",)
    background: str | None = None
    repeat: bool = False
    lengths: tuple[int, ...] = (1024, 2048, 4096, 8192, 16384, 32768, 65536)
    examples: int = 0
    questions: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.background is not None:
            text_files(self.background)
        require_lengths("lengths", self.lengths, 1)
        if not isinstance(self.examples, int) or not 0 <= self.examples <= len(EXAMPLES[self.task]):
            raise ValueError(f"examples is {self.examples}; expected 0 to {len(EXAMPLES[self.task])}")
        most = max(1, self.most_questions)
        if not isinstance(self.questions, int) or not 1 <= self.questions <= most:
            raise ValueError(f"questions is {self.questions}; expected 1 to {most} for {self.task}")

    def groups(self) -> list[dict[str, Any]]:
        """One per length."""
        return [{"length": length} for length in self.lengths]

    def training_group(self, rng: random.Random, length: int) -> dict[str, Any]:
        """That length, with as many questions as fit, up to ``questions``."""
        return {"length": length} if self.questions == 1 else {"length": length, "at_most": self.questions}

    def draw(self, rng: random.Random, group: Group, split: str, tokenizer: Any) -> Example:
        """A sequence of ``group["length"]`` tokens: instruction, facts in background, question and answer."""
        length = group["length"]
        writer = writer_for(tokenizer)
        start = writer.begin(self._instruction())
        least = len(start) + _least(self, writer, split)
        for _ in range(TRIES if least <= length else 0):
            story = self.story(rng, split)
            facts, question = _cut(story, writer)
            room = length - len(start) - sum(map(len, facts)) - sum(map(len, question))
            if room >= 0:
                break
        else:
            raise WrongLengthError(f"length is {length}; expected at least {least} for the facts of {self.task}")
        asked = [question]
        for other in self._others(rng, story, split, group.get("at_most", 1) - 1):
            more = writer.ask(ask_for(other), f" {other.answer}")
            if sum(map(len, more)) <= room:
                asked.append(more)
                room -= sum(map(len, more))
        part = WHOLE if self.background is None else PARTS[split]
        background = writer.read(self.background, part)
        again = self.background is None or (self.repeat and room > len(background.tokens))
        text, places = background.take(rng, room, again, "background")
        spots = sorted(rng.choices(places.tolist(), k=len(facts)))
        # where facts and sentences begin: behind the instruction and the facts before them
        before = len(start) + np.cumsum([0, *map(len, facts)])
        told = np.array(spots) + before[:-1]
        others = places[:-1] + before[np.searchsorted(spots, places[:-1], "right")]
        sentences = np.sort(np.concatenate([told, others]))
        needed = np.searchsorted(sentences, told[list(story.needed)]).tolist()
        context, done = start, 0
        for fact, place in zip(facts, spots, strict=True):
            context += text[done:place].tolist() + fact
            done = place
        context += text[done:].tolist()
        boundary = len(context)
        answers = [append_question(context, words, answer) for words, answer in asked]
        return Example(context, answers, boundary, sentences.tolist(), needed)

    def _instruction(self) -> str:
        examples = "".join(f"Example: {example}\n" for example in EXAMPLES[self.task][: self.examples])
        return f"{INSTRUCTIONS[self.task]}\n{examples}<context>\n"

    def _others(self, rng: random.Random, story: Story, split: str, many: int) -> list[Story]:
        """Up to that many other questions that the facts of a story answer."""
        if not many or not self.understands(story):
            return []
        others = [other for other in self.answered(story.facts, split) if other.question != story.question]
        return rng.sample(others, len(others))[:many]


def _cut(story: Story, writer: Writer) -> tuple[list[list[int]], tuple[list[int], list[int]]]:
    """The tokens of each fact of a story, and of its question and answer."""
    facts = [writer.write(f" {fact}") for fact in story.facts]
    return facts, writer.ask(f"\n</context>{ask_for(story)}", f" {story.answer}")


@lru_cache(maxsize=64)
def _least(task: StoryTask, writer: Writer, split: str) -> int:
    """The tokens of the shortest of many stories, with its question and answer."""
    rng = random.Random(0)
    cut = (_cut(task.story(rng, split), writer) for _ in range(TRIES))
    return min(sum(map(len, facts)) + sum(map(len, question)) for facts, question in cut)
