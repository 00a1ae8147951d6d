"""bAbI: short stories about people who move around and carry things, and questions about them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from titans.tasks.background import split_of, writer_for
from titans.tasks.base import (
    Answer,
    Example,
    Group,
    Task,
    WrongLengthError,
    append_question,
    check_longest,
    require_at_most,
    require_lengths,
)

PERSONS = ("Daniel", "John", "Mary", "Sandra")
PLACES = ("bathroom", "bedroom", "garden", "hallway", "kitchen", "office")
THINGS = ("apple", "football", "milk")
MOVES = ("went to", "went back to", "moved to", "journeyed to", "travelled to")
TAKES = ("got", "took", "grabbed", "picked up")
DROPS = ("left", "dropped", "discarded", "put down")
ANSWERS = dict.fromkeys(("qa1", "qa2", "qa3", "qa4"), PLACES) | {"qa5": ("Bill", "Fred", "Jeff", "Mary", *THINGS)}
HELD_OUT = 10  # one in this many training stories is kept for validation
TRIES = 1000  # how many stories to draw until one fits


class Story(NamedTuple):
    """Facts in order, a question and its answer."""

    facts: tuple[str, ...]
    question: str
    answer: str
    needed: tuple[int, ...] = ()  # which facts the answer follows from, where a file says so

    @property
    def bare(self) -> Story:
        """Without what is needed, which makes no difference to whoever is asked."""
        return self._replace(needed=())


class Kind(NamedTuple):
    """Questions that our own rules can answer.

    Attributes:
        asked: whom or what a question may be about.
        question: with a gap for that.
    """

    asked: tuple[str, ...]
    question: str


QUESTIONS = {
    "qa1": Kind(PERSONS, "Where is {}?"),
    "qa2": Kind(THINGS, "Where is the {}?"),
    "who": Kind(THINGS, "Who has the {}?"),  # not a task of bAbI: the first half of the way to an answer of qa2
}
FACTS = {"qa1": (2, 10), "qa2": (3, 20)}  # how many our own stories have; they go on until something was taken
ALSO = ("qa1", "who")
TIMES = ("throughout", "end")


@dataclass(frozen=True)
class StoryTask(Task):
    """What tasks with stories have in common.

    Attributes:
        data: a folder with bAbI files such as qa1_single-supporting-fact_train.txt; None: stories of our own, which
            exist for qa1 and qa2.
        task: qa1 to qa5.
        also: ("qa1", "who"), or one of them, with qa2: training asks the same stories where people are and who has a
            thing as well, since where a thing is follows from these.
    """

    data: str | None = None
    task: str = "qa1"
    also: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.task not in ANSWERS:
            raise ValueError(f"task is {self.task!r}; expected one of {', '.join(ANSWERS)}")
        repeated = len(set(self.also)) < len(self.also)
        if not set(self.also) <= set(ALSO) or repeated or (self.also and self.task != "qa2"):
            raise ValueError(
                f"also is {self.also!r} and task is {self.task!r}; expected ('qa1', 'who') or one of them with qa2, "
                "or nothing"
            )
        if self.data is None and self.task not in FACTS:
            raise ValueError(f"task is {self.task!r} without data; expected a folder of bAbI files, or one of qa1, qa2")
        if self.data is not None and not _files(self.data, self.task, "*"):
            raise ValueError(
                f"{self.data} has no files of {self.task}; expected {self.task}_..._train.txt and _test.txt"
            )

    @property
    def chance(self) -> float:
        """A guess among the words that the question leaves open; the place or person it names is not the answer."""
        return {"qa1": 1 / 6, "qa2": 1 / 6, "qa3": 1 / 5, "qa4": 1 / 5, "qa5": 1 / 3}[self.task]

    def story(self, rng: random.Random, split: str) -> Story:
        """A story of a split."""
        if self.data is not None:
            return rng.choice(_stories(self.data, self.task, split))
        while True:
            story = tell(rng, self.task)
            if self.belongs(story, split):
                return story

    def belongs(self, story: Story, split: str) -> bool:
        """Whether a split may ask a question about facts: what the test asks, no other split does.

        Train and validation may share a question if two stories of a file begin alike.
        """
        if self.data is None:
            return split_of(" ".join([*story.facts, story.question])) == split
        return split == "test" or story.bare not in _tested(self.data, self.task)

    def understands(self, story: Story) -> bool:
        """Whether our rules answer a story's own question; they do not if its file uses other words than bAbI."""
        return story.bare in answered(story.facts, self.task)

    @property
    def most_questions(self) -> int:
        """How many questions our rules can answer of one story, at most; those of ``also`` too."""
        return count_questions(self.task, *self.also)

    def answered(self, facts: Sequence[str], split: str) -> list[Story]:
        """All questions that our rules can answer from the facts and that a split may ask, also those of ``also``."""
        found = [story for task in (self.task, *self.also) for story in answered(facts, task)]
        return [story for story in found if self.belongs(story, split)]


@dataclass(frozen=True)
class Babi(StoryTask):
    """A story and a question at its end; in training, several.

    Attributes:
        ask: when training asks: ``"throughout"``, after every fact; ``"end"``, at the end alone, each question once, as
            many as there is room for. An answer inside a story is one more fact, which may spare a model the others.
        facts: how many facts the stories of a test have; empty: five numbers that occur in stories of the task.
        longest: the longest training sequences that it draws; longer ones are left to the tasks beside it. None: of
            any length.
    """

    name: ClassVar[str] = "babi"
    title: ClassVar[str] = "Questions about a short story (bAbI)"
    source: ClassVar[str] = "bAbI (arXiv 1502.05698)"
    axes: ClassVar[tuple[str, ...]] = ("facts",)
    facts: tuple[int, ...] = ()
    longest: int | None = None
    ask: str = "throughout"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_longest(self.longest)
        if self.ask not in TIMES:
            raise ValueError(f"ask is {self.ask!r}; expected one of {', '.join(TIMES)}")
        if not self.facts:
            object.__setattr__(self, "facts", tuple(_spread(sorted(self._numbers()))))
        require_lengths("facts", self.facts, 1)
        unknown = sorted(set(self.facts) - self._numbers())
        if unknown:
            raise ValueError(f"facts is {unknown[0]}; expected a number that stories of {self.task} have")

    def _numbers(self) -> set[int]:
        """The numbers of facts that occur in stories of a test."""
        if self.data is None:
            fewest, most = FACTS[self.task]
            return set(range(fewest, most + 1))
        split = "test" if _files(self.data, self.task, "test") else "train"
        return {len(story.facts) for story in _stories(self.data, self.task, split)}

    def groups(self) -> list[dict[str, Any]]:
        """One per number of facts."""
        return [{"facts": facts} for facts in self.facts]

    def training_group(self, rng: random.Random, length: int) -> dict[str, Any]:
        """A story that fits into the length."""
        require_at_most(self.longest, length, self.name)
        return {"length": length}

    def draw(self, rng: random.Random, group: Group, split: str, tokenizer: Any) -> Example:
        """A story with the group's number of facts, or as much of one as fits into the group's length."""
        if "facts" in group:
            return self._written(rng, self._story_of(rng, split, group["facts"]), None, split, tokenizer)
        write = self._asked_at_the_end if self.ask == "end" else self._written
        for _ in range(TRIES):
            found = write(rng, self.story(rng, split), group["length"], split, tokenizer)
            if found.answers:
                return found
        raise WrongLengthError(f"length is {group['length']}; expected room for a fact of {self.task} and a question")

    def _story_of(self, rng: random.Random, split: str, facts: int) -> Story:
        """A story of a split with that many facts."""
        if self.data is None and facts in self._numbers():
            while len((story := self.story(rng, split)).facts) != facts:
                pass
            return story
        stories = [] if self.data is None else _stories(self.data, self.task, split)
        found = [story for story in stories if len(story.facts) == facts]
        if not found:
            raise ValueError(f"facts is {facts}; expected a number that stories of {self.task} have")
        return rng.choice(found)

    def _written(self, rng: random.Random, story: Story, room: int | None, split: str, tokenizer: Any) -> Example:
        """A story with its question, or with one after each of the facts that there is room for."""
        writer = writer_for(tokenizer)
        tokens, waiting = list(writer.opening), []
        answers: list[Answer] = []
        boundary = 0
        after_each = room is not None and self.understands(story)
        for number, fact in enumerate(story.facts, 1):
            waiting += writer.write(f" {fact}")
            if room is not None and len(tokens) + len(waiting) > room:
                break
            asked = [story] if number == len(story.facts) else []
            if after_each:
                asked += self.answered(story.facts[:number], split)
            if not asked:
                continue
            chosen = rng.choice(asked)
            question, answer = writer.ask(ask_for(chosen), f" {chosen.answer}")
            if room is not None and len(tokens) + len(waiting) + len(question) + len(answer) > room:
                break
            tokens += waiting
            waiting = []
            boundary = len(tokens)
            answers.append(append_question(tokens, question, answer))
        return Example(tokens, answers, boundary)

    def _asked_at_the_end(self, rng: random.Random, story: Story, room: int, split: str, tokenizer: Any) -> Example:
        """Some facts of a story that leave room for a question at least, and as many questions as fit."""
        if not self.understands(story):
            return self._written(rng, story, room, split, tokenizer)
        writer = writer_for(tokenizer)
        tokens = list(writer.opening)
        facts = [writer.write(f" {fact}") for fact in story.facts]
        ends = list(accumulate(map(len, facts), initial=len(tokens)))
        question, answer = writer.ask(ask_for(story), f" {story.answer}")
        fitting = [number for number in range(1, len(ends)) if ends[number] + len(question) + len(answer) <= room]
        number = rng.choice(fitting) if fitting else 0
        for fact in facts[:number]:
            tokens += fact
        boundary, answers = len(tokens), []
        asked = self.answered(story.facts[:number], split)
        for chosen in rng.sample(asked, len(asked)):
            question, answer = writer.ask(ask_for(chosen), f" {chosen.answer}")
            if len(tokens) + len(question) + len(answer) <= room:
                answers.append(append_question(tokens, question, answer))
        return Example(tokens, answers, boundary)


def count_questions(*tasks: str) -> int:
    """How many questions our rules can answer of one story, at most."""
    return sum(len(QUESTIONS[task].asked) for task in tasks if task in QUESTIONS)


def ask_for(story: Story) -> str:
    """The words up to the answer."""
    return f"\nQuestion: {story.question}\nAnswer:"


def tell(rng: random.Random, task: str) -> Story:
    """A story of our own in the manner of bAbI: qa1 asks about a person, qa2 about a thing that somebody has taken."""
    kind = QUESTIONS[task]
    number = rng.randint(*FACTS[task])
    where: dict[str, str] = {}  # people, and things that somebody has taken: only those are asked about
    holder: dict[str, str] = {}
    facts: list[str] = []
    while len(facts) < number or (task == "qa2" and not any(thing in where for thing in THINGS)):
        person = rng.choice(PERSONS)
        here = where.get(person)
        # Where a thing was at first is not said, so the first to take it may find it anywhere.
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
    """Every question of a kind of :data:`QUESTIONS` that the facts answer, with its answer; none for another task.

    People go where they are said to go, and what they have taken and not yet dropped goes with them.
    """
    if task not in QUESTIONS:
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
    kind, known = QUESTIONS[task], holder if task == "who" else where
    return [Story(tuple(facts), kind.question.format(name), known[name]) for name in kind.asked if name in known]


def read_stories(file: Path) -> list[list[Story]]:
    """The stories of a bAbI file: for each story, one entry per question, with the facts before it."""
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
            places: dict[str, int] = {}
        sentence, *answer = rest.split("\t")
        if answer:
            needed = [places[line] for line in " ".join(answer[1:]).split() if line in places]
            stories[-1].append(Story(tuple(facts), sentence.strip(), answer[0].strip(), tuple(needed)))
        else:
            places[number] = len(facts)
            facts.append(sentence.strip())
    return stories


def _spread(numbers: Sequence[int], many: int = 5) -> list[int]:
    """That many of the numbers, evenly spread from the first to the last."""
    return sorted({numbers[round(i * (len(numbers) - 1) / (many - 1))] for i in range(many)})


def _files(data: str, task: str, ending: str) -> list[Path]:
    return sorted(Path(data).expanduser().glob(f"{task}_*_{ending}.txt"))


@cache
def _tested(data: str, task: str) -> frozenset[Story]:
    """The questions of the test; empty if its file is missing."""
    return frozenset(story.bare for story in (_stories(data, task, "test") if _files(data, task, "test") else ()))


@cache
def _stories(data: str, task: str, split: str) -> list[Story]:
    """The questions of a split; validation has the last of the training stories.

    A few stories are in both files of a task: only the test asks their questions.
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
    questions = [story for told in stories for story in told if story.bare not in tested]
    if not questions:
        raise ValueError(f"{files[0]} has no questions for {split}; expected at least one")
    return questions
