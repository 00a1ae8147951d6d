"""BABILong: the facts of a short story, in order but scattered over a long text, and a question about them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from titans.tasks.background import PARTS, WHOLE, split_of, text_files, writer_for
from titans.tasks.base import Answer, Example, Group, Task, WrongLengthError, require_lengths

PERSONS = ("Daniel", "John", "Mary", "Sandra")
PLACES = ("bathroom", "bedroom", "garden", "hallway", "kitchen", "office")
THINGS = ("apple", "football", "milk")
MOVES = ("went to", "went back to", "moved to", "journeyed to", "travelled to")
TAKES = ("got", "took", "grabbed", "picked up")
DROPS = ("left", "dropped", "discarded", "put down")
ANSWERS = dict.fromkeys(("qa1", "qa2", "qa3", "qa4"), PLACES) | {"qa5": ("Bill", "Fred", "Jeff", "Mary", *THINGS)}
HELD_OUT = 10  # one in so many training stories is kept for validation
TRIES = 1000  # stories that are drawn to find one that fits

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


class Story(NamedTuple):
    """Facts in order, a question and its answer."""

    facts: tuple[str, ...]
    question: str
    answer: str


class Kind(NamedTuple):
    """Of the stories whose questions can be answered here: the fewest and the most facts of our own, who or what is
    asked for, and how."""

    fewest: int
    most: int
    asked: tuple[str, ...]
    question: str


FACTS = {"qa1": Kind(2, 10, PERSONS, "Where is {}?"), "qa2": Kind(3, 20, THINGS, "Where is the {}?")}


@dataclass(frozen=True)
class Babilong(Task):
    """Facts in a long text.

    The text is as long as makes the sequence exactly its length, so its last sentence may be cut. Stories whose facts
    alone are longer than that are passed over.

    Attributes:
        data: a folder with bAbI files such as qa1_single-supporting-fact_train.txt; None: stories of our own, which
            there are for qa1 and qa2.
        task: qa1 to qa5.
        background: a file, or a folder whose .txt files are read in the order of their names: the first eight tenths
            for train, one for validation and the last for test; None: a short text of our own, repeated, for all.
        lengths: of the sequences, in tokens.
        examples: how many short ones stand in the instruction.
        questions: in training, up to so many are asked of a text one after the other; those after the first follow from
            its facts, as can be told for qa1 and qa2.
    """

    name: ClassVar[str] = "babilong"
    title: ClassVar[str] = "Facts in a long text (BABILong)"
    source: ClassVar[str] = "BABILong (arXiv 2406.10149) and bAbI (arXiv 1502.05698), with instructions of our own"
    axes: ClassVar[tuple[str, ...]] = ("length",)
    data: str | None = None
    task: str = "qa1"
    background: str | None = None
    lengths: tuple[int, ...] = (1024, 2048, 4096, 8192, 16384, 32768, 65536)
    examples: int = 0
    questions: int = 1

    def __post_init__(self) -> None:
        if self.task not in ANSWERS:
            raise ValueError(f"task is {self.task!r}; expected one of {', '.join(ANSWERS)}")
        if self.data is None and self.task not in FACTS:
            raise ValueError(f"task is {self.task!r} without data; expected a folder of bAbI files, or one of qa1, qa2")
        if self.data is not None and not _files(self.data, self.task, "*"):
            raise ValueError(
                f"{self.data} has no files of {self.task}; expected {self.task}_..._train.txt and _test.txt"
            )
        if self.background is not None:
            text_files(self.background)
        require_lengths("lengths", self.lengths, 1)
        if not isinstance(self.examples, int) or not 0 <= self.examples <= len(EXAMPLES[self.task]):
            raise ValueError(f"examples is {self.examples}; expected 0 to {len(EXAMPLES[self.task])}")
        most = len(FACTS[self.task].asked) if self.task in FACTS else 1
        if not isinstance(self.questions, int) or not 1 <= self.questions <= most:
            raise ValueError(f"questions is {self.questions}; expected 1 to {most} for {self.task}")

    @property
    def chance(self) -> float:
        """One of the words that the question leaves open: the place or the person that it names is not the answer."""
        return {"qa1": 1 / 6, "qa2": 1 / 6, "qa3": 1 / 5, "qa4": 1 / 5, "qa5": 1 / 3}[self.task]

    def groups(self) -> list[dict[str, Any]]:
        """Each length."""
        return [{"length": length} for length in self.lengths]

    def training_group(self, rng: random.Random, length: int) -> dict[str, Any]:
        """That length, with as many questions as fit of a number up to ``questions``."""
        return {"length": length} if self.questions == 1 else {"length": length, "at_most": self.questions}

    def draw(self, rng: random.Random, group: Group, split: str, tokenizer: Any) -> Example:
        """A sequence of ``group["length"]`` tokens: instruction, facts in background, question and answer."""
        length = group["length"]
        writer = writer_for(tokenizer)
        start = writer.begin(self._instruction())
        sizes = []
        for _ in range(TRIES):
            story = self._story(rng, split)
            facts = [writer.write(f" {fact}") for fact in story.facts]
            asked = [writer.ask(f"\n</context>{_question(story)}", f" {story.answer}")]
            sizes.append(len(start) + sum(map(len, facts)) + sum(map(len, asked[0])))
            if sizes[-1] <= length:
                break
        else:
            raise WrongLengthError(f"length is {length}; expected at least {min(sizes)} for the facts of {self.task}")
        room = length - sizes[-1]
        for other in self._others(rng, story, split, group.get("at_most", 1) - 1):
            more = writer.ask(_question(other), f" {other.answer}")
            if sum(map(len, more)) <= room:
                asked.append(more)
                room -= sum(map(len, more))
        part = WHOLE if self.background is None else PARTS[split]
        background = writer.read(self.background, part)
        text, places = background.take(rng, room, self.background is None, "background")
        context, done = start, 0
        for fact, place in zip(facts, sorted(rng.choices(places.tolist(), k=len(facts))), strict=True):
            context += text[done:place].tolist() + fact
            done = place
        context += text[done:].tolist()
        tokens, answers = list(context), []
        for question, answer in asked:
            answers.append(Answer(len(tokens) + len(question), tuple(answer)))
            tokens += question + answer
        return Example(tokens, answers, boundary=len(context))

    def _instruction(self) -> str:
        examples = "".join(f"Example: {example}\n" for example in EXAMPLES[self.task][: self.examples])
        return f"{INSTRUCTIONS[self.task]}\n{examples}<context>\n"

    def _story(self, rng: random.Random, split: str) -> Story:
        if self.data is not None:
            return rng.choice(_stories(self.data, self.task, split))
        while True:
            story = tell(rng, self.task)
            if self._is_of(story, split):
                return story

    def _others(self, rng: random.Random, story: Story, split: str, many: int) -> list[Story]:
        """Up to so many other questions that the facts of a story answer."""
        if not many:
            return []
        others = [other for other in answered(story.facts, self.task) if other.question != story.question]
        return [other for other in rng.sample(others, len(others)) if self._is_of(other, split)][:many]

    def _is_of(self, story: Story, split: str) -> bool:
        if self.data is None:
            return split_of(" ".join([*story.facts, story.question])) == split
        return split == "test" or story not in _tested(self.data, self.task)


def _question(story: Story) -> str:
    return f"\nQuestion: {story.question}\nAnswer:"


def tell(rng: random.Random, task: str) -> Story:
    """A story of our own in the manner of bAbI: qa1 asks for a person, qa2 for a thing that somebody has taken."""
    kind = FACTS[task]
    number = rng.randint(kind.fewest, kind.most)
    where: dict[str, str] = {}  # persons, and things that somebody has taken: those alone are asked for
    holder: dict[str, str] = {}
    facts: list[str] = []
    while len(facts) < number or (task == "qa2" and not any(thing in where for thing in THINGS)):
        person = rng.choice(PERSONS)
        here = where.get(person)
        # Where a thing was at first is not said, so that the first to take it may find it anywhere.
        within = [thing for thing in THINGS if thing not in holder and where.get(thing, here) == here]
        held = [thing for thing in THINGS if holder.get(thing) == person]
        if task == "qa1" or here is None or rng.random() < 0.5 or not (within or held):
            here = where[person] = rng.choice([place for place in PLACES if place != here])
            where.update(dict.fromkeys(held, here))
            facts.append(f"{person} {rng.choice(MOVES)} the {here}.")
            continue
        thing = rng.choice(within + held)
        if thing in held:
            del holder[thing]
            facts.append(f"{person} {rng.choice(DROPS)} the {thing}.")
        else:
            holder[thing], where[thing] = person, here
            facts.append(f"{person} {rng.choice(TAKES)} the {thing}.")
    asked = rng.choice([name for name in kind.asked if name in where])
    return Story(tuple(facts), kind.question.format(asked), where[asked])


def answered(facts: Sequence[str], task: str) -> list[Story]:
    """Every question of qa1 or qa2 that the facts answer, with its answer; none for another task.

    Persons go where they are said to go, what they have taken and not yet dropped goes with them.
    """
    if task not in FACTS:
        return []
    where: dict[str, str] = {}
    holder: dict[str, str] = {}
    for fact in facts:
        action, _, target = fact.removesuffix(".").removesuffix(" there").rpartition(" the ")
        person, _, action = action.partition(" ")
        if action in TAKES:
            holder[target] = person
        elif action in DROPS:
            holder.pop(target, None)
        elif action in MOVES:
            where[person] = target
        where.update({thing: where[owner] for thing, owner in holder.items() if owner in where})
    kind = FACTS[task]
    return [Story(tuple(facts), kind.question.format(name), where[name]) for name in kind.asked if name in where]


def read_stories(file: Path) -> list[list[Story]]:
    """The stories of a bAbI file, each as often as it has questions: with the facts before each of them."""
    stories: list[list[Story]] = []
    for row, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        number, _, rest = line.partition(" ")
        if not number.isdecimal() or (not stories and number != "1"):
            raise ValueError(
                f"line {row} of {file} is {line!r}; expected a number, from 1 on in a story, and a sentence"
            )
        if number == "1":
            stories.append([])
            facts: list[str] = []
        sentence, *answer = rest.split("\t")
        if answer:
            stories[-1].append(Story(tuple(facts), sentence.strip(), answer[0].strip()))
        else:
            facts.append(sentence.strip())
    return stories


def _files(data: str, task: str, ending: str) -> list[Path]:
    return sorted(Path(data).expanduser().glob(f"{task}_*_{ending}.txt"))


@cache
def _tested(data: str, task: str) -> frozenset[Story]:
    """The questions of the test; none without its file."""
    return frozenset(_stories(data, task, "test") if _files(data, task, "test") else ())


@cache
def _stories(data: str, task: str, split: str) -> list[Story]:
    """The questions of a split; validation has the last of the training stories, and what the test has too is no one's.

    A few stories stand in both files of a task.
    """
    ending = "test" if split == "test" else "train"
    files = _files(data, task, ending)
    if len(files) != 1:
        raise ValueError(f"{data} has {len(files)} files {task}_..._{ending}.txt; expected one")
    stories = read_stories(files[0])
    if split != "test":
        cut = len(stories) - len(stories) // HELD_OUT
        stories = stories[:cut] if split == "train" else stories[cut:]
    tested = set() if split == "test" else _tested(data, task)
    questions = [story for told in stories for story in told if story not in tested]
    if not questions:
        raise ValueError(f"{files[0]} has no questions for {split}; expected at least one")
    return questions
