from __future__ import annotations

import gc
import itertools
import random
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from titans.models.text import encode
from titans.models.tokenizer import byte_tokenizer, train_tokenizer
from titans.tasks.background import _WRITERS, OWN, split_of, split_sentences, writer_for
from titans.tasks.base import SPLITS, example
from titans.tasks.needle import ADJECTIVES, NOISE, NOUNS, Needle, NeedleEssay, NeedleNoise, NeedleWord


def _like_llama() -> PreTrainedTokenizerFast:
    """A tokenizer that puts a space of its own before every text."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(content=" ", left=1)]
    )
    letters = sorted({*"▁\n.,:-?!0123456789", *OWN, *OWN.upper()} - {" "})
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=["<unk>"], initial_alphabet=letters)
    words = re.findall(r" ?\S+", OWN)
    tokenizer.train_from_iterator(words, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")


BYTES = byte_tokenizer()
WORDS = train_tokenizer([OWN, NOISE, "One of the special magic numbers for is:"] * 3, 700)
LLAMA = _like_llama()
TOKENIZERS = {"bytes": BYTES, "words": WORDS, "llama": LLAMA}
TASKS = (NeedleNoise(), NeedleEssay(), NeedleWord(), NeedleWord(value="word"), NeedleNoise(digits=2))
FORMS = {"number": r"\d+", "uuid": r"[0-9a-f-]{36}", "word": r"[a-z]+-[a-z]+"}

each_tokenizer = pytest.mark.parametrize("tokenizer", TOKENIZERS.values(), ids=TOKENIZERS)
each_task = pytest.mark.parametrize("task", TASKS, ids=lambda task: f"{task.name}-{task.kind}")


def _folder(path: Path, **texts: str) -> str:
    path.mkdir(exist_ok=True)
    for name, text in texts.items():
        (path / f"{name}.txt").write_text(text, encoding="utf-8")
    return str(path)


def _numbered(first: int, last: int) -> str:
    """Sentences that can be told apart and have no digits."""
    pairs = list(itertools.product(ADJECTIVES, NOUNS))
    return " ".join(f"There was a {adjective} {noun} at home." for adjective, noun in pairs[first:last])


@given(
    task=st.sampled_from(TASKS),
    tokenizer=st.sampled_from([*TOKENIZERS.values()]),
    length=st.integers(500, 3000),
    depth=st.floats(0, 1),
    split=st.sampled_from(SPLITS),
    seed=st.integers(0, 10**6),
)
@settings(max_examples=60, deadline=None)
def test_a_sequence_has_its_length_its_depth_and_one_needle(
    task: Needle, tokenizer: Any, length: int, depth: float, split: str, seed: int
) -> None:
    drawn = task.draw(random.Random(seed), {"length": length, "depth": depth}, split, tokenizer)
    assert len(drawn.tokens) == length
    (answer,) = drawn.answers
    assert list(answer.wanted) == drawn.tokens[answer.place :]

    context = tokenizer.decode(drawn.tokens[: drawn.boundary])
    value = tokenizer.decode(answer.wanted).strip()
    assert re.fullmatch(FORMS[task.kind], value)
    assert context.count(value) == 1
    found = re.search(rf"{task.glue}One of the special magic {task.kind}s for ([a-z]+-[a-z]+) is: {value}\.", context)
    assert found is not None
    assert f"{task.kind} for {found[1]} mentioned" in tokenizer.decode(drawn.tokens[drawn.boundary :])

    start, needle = (len(encode(tokenizer, text)) for text in (context.partition("\n")[0], found[0]))
    haystack = drawn.boundary - start - needle
    before = len(encode(tokenizer, context[: found.start()])) - start
    longest = max(len(encode(tokenizer, text)) for text in [NOISE, *split_sentences(OWN)])
    assert abs(before - depth * haystack) <= longest


@each_task
@pytest.mark.parametrize("depth", [0.0, 1.0])
def test_the_ends_are_ends(task: Needle, depth: float) -> None:
    drawn = example(task, "test", 0, 0, {"length": 1200, "depth": depth}, BYTES)
    lines = BYTES.decode(drawn.tokens[: drawn.boundary]).partition("\n")[2].strip()
    needle = re.search(r"One of the special magic .*? is: [\w-]+\.", lines)
    assert needle is not None
    assert lines.startswith(needle[0]) if depth == 0 else lines.endswith(needle[0])


def test_the_words_are_those_of_ruler() -> None:
    drawn = example(NeedleNoise(), "test", 0, 0, {"length": 800, "depth": 0.5}, BYTES)
    text = BYTES.decode(drawn.tokens)
    key, value = re.findall(r"for (\S+) is: (\d{7})\.", text)[0]
    instruction, *noise, question = text.split("\n")
    assert instruction == (
        "A special magic number is hidden within the following text. Make sure to memorize it. "
        "I will quiz you about the number afterwards."
    )
    assert question == (
        f"What is the special magic number for {key} mentioned in the provided text? "
        f"The special magic number for {key} mentioned in the provided text is {value}"
    )
    assert noise.count(f"One of the special magic numbers for {key} is: {value}.") == 1
    assert set(noise[:-1]) == {NOISE, f"One of the special magic numbers for {key} is: {value}."}
    assert NOISE.startswith(noise[-1])  # cut, to the length


@each_tokenizer
@each_task
def test_question_and_answer_are_cut_as_in_the_whole_text(task: Needle, tokenizer: Any) -> None:
    for number in range(5):
        drawn = example(task, "train", 0, number, 1500, tokenizer)
        text = tokenizer.decode(drawn.tokens)
        whole = encode(tokenizer, text)
        tail = len(drawn.tokens) - drawn.boundary
        assert whole[-tail:] == drawn.tokens[drawn.boundary :]
        assert whole[:200] == drawn.tokens[:200]
        assert "  " not in text
        assert [*drawn.answers[0].wanted] == drawn.tokens[-len(drawn.answers[0].wanted) :]


def test_special_tokens_that_open_a_text_stand_first() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 256)]
    )
    drawn = example(NeedleNoise(), "test", 0, 0, {"length": 900, "depth": 0.5}, tokenizer)
    assert drawn.tokens[0] == 256 and drawn.tokens.count(256) == 1  # type: ignore[attr-defined]
    assert len(drawn.tokens) == 900


@each_task
def test_no_two_splits_share_a_value(task: Needle) -> None:
    values = {
        split: {
            BYTES.decode(example(task, split, 0, number, 800, BYTES).answers[0].wanted).strip() for number in range(50)
        }
        for split in SPLITS
    }
    assert all(split_of(value) == split for split, some in values.items() for value in some)
    assert not values["train"] & (values["validation"] | values["test"]) and not values["validation"] & values["test"]
    assert min(map(len, values.values())) > 3


@each_tokenizer
@pytest.mark.parametrize("task", [NeedleNoise(needles=3), NeedleEssay(needles=3), NeedleWord(needles=3)], ids=str)
def test_each_of_several_needles_stands_once_and_is_asked_for_by_its_key(task: Needle, tokenizer: Any) -> None:
    drawn = task.draw(random.Random(1), {"length": 3000, "depth": 0.25}, "test", tokenizer)
    assert len(drawn.tokens) == 3000
    text, context = (tokenizer.decode(tokens) for tokens in (drawn.tokens, drawn.tokens[: drawn.boundary]))
    told = dict(re.findall(rf"magic {task.kind}s for ([a-z-]+) is: ({FORMS[task.kind]})\.", context))
    asked = re.findall(rf"magic {task.kind} for ([a-z-]+) mentioned in the provided text is ({FORMS[task.kind]})", text)
    assert told == dict(asked) and len(told) == len(asked) == 3
    assert [tokenizer.decode(answer.wanted).strip() for answer in drawn.answers] == [value for _, value in asked]
    first = context.index(f"for {asked[0][0]} is:") / len(context)
    assert 0.1 < first < 0.45  # the first that is asked for is the one at the depth


def test_training_has_as_many_needles_as_fit_and_a_test_exactly_those_asked_for() -> None:
    task, counts = NeedleNoise(needles=4), {}
    for length in (512, 1024):
        rng = random.Random(0)
        drawn = [task.draw(rng, task.training_group(rng, length), "train", BYTES) for _ in range(40)]
        assert {len(each.tokens) for each in drawn} == {length}
        counts[length] = {len(each.answers) for each in drawn}
    assert counts == {512: {1, 2}, 1024: {1, 2, 3, 4}}
    with pytest.raises(ValueError, match=r"^length is 512; expected at least \d+$"):
        task.draw(random.Random(0), {"length": 512, "depth": 0.5}, "test", BYTES)


def test_needles_that_cannot_all_differ_are_refused() -> None:
    task = NeedleNoise(needles=64, digits=2)
    with pytest.raises(ValueError, match=r"^needles is 64; expected fewer, as test lacks that many different numbers$"):
        task.draw(random.Random(0), {"length": 99999, "depth": 0.5}, "test", BYTES)


def test_the_last_digit_does_not_tell_the_split() -> None:
    for split in SPLITS:
        last = {example(NeedleNoise(), split, 0, number, 600, BYTES).tokens[-1] for number in range(150)}
        assert last == set(b"0123456789")


def test_split_seed_and_number_decide_a_sequence() -> None:
    group = {"length": 900, "depth": 0.5}
    first = example(NeedleEssay(), "test", 0, 0, group, BYTES)
    assert example(NeedleEssay(), "test", 0, 0, group, byte_tokenizer()) == first
    assert example(NeedleEssay(), "test", 0, 1, group, BYTES) != first
    assert example(NeedleEssay(), "test", 1, 0, group, BYTES) != first


def test_groups_are_lengths_by_depths_and_training_has_any_depth() -> None:
    task = NeedleNoise(lengths=(500, 1000), depths=(0.0, 1.0))
    assert [tuple(group[axis] for axis in task.axes) for group in task.groups()] == [
        (500, 0.0),
        (500, 1.0),
        (1000, 0.0),
        (1000, 1.0),
    ]
    drawn = [task.training_group(random.Random(seed), 700) for seed in range(50)]
    assert {group["length"] for group in drawn} == {700}
    assert min(group["depth"] for group in drawn) < 0.1 and max(group["depth"] for group in drawn) > 0.9


def test_essays_are_read_by_name_and_from_any_sentence(tmp_path: Path) -> None:
    folder = _folder(tmp_path, b=_numbered(60, 120), a=_numbered(0, 60), c=_numbered(120, 180))
    task = NeedleEssay(haystack=folder)
    sentences = split_sentences(_numbered(0, 180))
    firsts = set()
    for number in range(30):
        text = BYTES.decode(example(task, "train", 0, number, {"length": 2500, "depth": 1.0}, BYTES).tokens)
        shown = split_sentences(text.partition("\n")[2].partition(" One of the")[0])
        first = sentences.index(shown[0])
        assert shown[:-1] == sentences[first : first + len(shown) - 1]
        firsts.add(first)
    assert len(firsts) > 10


def test_every_split_has_a_part_of_the_haystack_of_its_own(tmp_path: Path) -> None:
    folder = _folder(tmp_path, a=_numbered(0, 900))
    group = {"length": 1000, "depth": 0.5}

    def sentences(split: str, divide: bool) -> set[str]:
        task = NeedleEssay(haystack=folder, divide=divide)
        texts = (BYTES.decode(example(task, split, 0, number, group, BYTES).tokens) for number in range(100))
        return {sentence for text in texts for sentence in re.findall(r"There was a \w+ \w+ at home\.", text)}

    parts = [sentences(split, True) for split in SPLITS]
    assert all(parts) and not (parts[0] & parts[1] or parts[0] & parts[2] or parts[1] & parts[2])
    assert sentences("train", False) & sentences("test", False)


def test_a_haystack_that_is_too_small_is_refused_unless_it_may_be_repeated(tmp_path: Path) -> None:
    folder = _folder(tmp_path, essay="A first sentence. A second one. ")
    group = {"length": 900, "depth": 0.5}
    with pytest.raises(ValueError, match=r"^haystack has 32 tokens; expected at least \d{3}$"):
        example(NeedleEssay(divide=False, haystack=folder), "test", 0, 0, group, BYTES)
    drawn = example(NeedleEssay(divide=False, haystack=folder, repeat=True), "test", 0, 0, group, BYTES)
    assert len(drawn.tokens) == 900
    assert BYTES.decode(drawn.tokens).count("A second one. A first sentence.") > 3


def test_a_haystack_of_just_enough_is_enough(tmp_path: Path) -> None:
    group = {"length": 900, "depth": 0.5}
    with pytest.raises(ValueError, match="expected at least") as error:
        example(NeedleEssay(divide=False, haystack=_folder(tmp_path / "few", a="Few.")), "test", 0, 0, group, BYTES)
    needed = int(str(error.value).split()[-1])
    exact = _folder(tmp_path / "exact", a="x" * (needed - 2) + ".")  # and the space before it
    assert len(example(NeedleEssay(divide=False, haystack=exact), "test", 0, 0, group, BYTES).tokens) == 900
    less = _folder(tmp_path / "less", a="x" * (needed - 3) + ".")
    with pytest.raises(ValueError, match=f"has {needed - 1} tokens; expected at least {needed}"):
        example(NeedleEssay(divide=False, haystack=less), "test", 0, 0, group, BYTES)


def test_a_value_that_the_haystack_has_is_not_drawn(tmp_path: Path) -> None:
    numbers = [str(number) for number in range(10, 100) if split_of(str(number)) == "test"]
    most = NeedleEssay(
        divide=False,
        haystack=_folder(tmp_path / "most", a=f"It was in 7{' 7'.join(numbers[1:])}."),
        digits=2,
        repeat=True,
    )
    for number in range(20):
        drawn = example(most, "test", 0, number, {"length": 700, "depth": 0.5}, BYTES)
        assert BYTES.decode(drawn.answers[0].wanted) == f" {numbers[0]}"
    every = NeedleEssay(
        divide=False, haystack=_folder(tmp_path / "all", a=f"It was in {' '.join(numbers)}."), digits=2, repeat=True
    )
    with pytest.raises(ValueError, match="every number of test"):
        example(every, "test", 0, 0, {"length": 700, "depth": 0.5}, BYTES)


def test_a_key_does_not_have_the_value_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("titans.tasks.needle.ADJECTIVES", ("old", "bold", "cold", "red"))
    monkeypatch.setattr("titans.tasks.needle.NOUNS", ("owl",))
    for number in range(30):
        drawn = example(NeedleWord(value="word"), "train", 0, number, 700, BYTES)
        assert (
            BYTES.decode(drawn.tokens[: drawn.answers[0].place]).count(BYTES.decode(drawn.answers[0].wanted)[1:]) == 1
        )


def test_files_are_read_once_for_a_tokenizer_and_forgotten_with_it(tmp_path: Path) -> None:
    folder = _folder(tmp_path, a=_numbered(0, 90))
    task, tokenizer = NeedleEssay(divide=False, haystack=folder), byte_tokenizer()
    first = example(task, "test", 0, 0, 1000, tokenizer)
    (tmp_path / "a.txt").unlink()
    assert example(task, "test", 0, 0, 1000, tokenizer) == first
    gc.collect()  # tokenizers of other tests
    known = len(_WRITERS)
    del tokenizer
    gc.collect()
    assert len(_WRITERS) == known - 1


def test_pieces_that_a_token_would_join_are_cut_apart() -> None:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    letters = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator([".\n", "s 1"] * 9, trainers.BpeTrainer(vocab_size=300, initial_alphabet=letters))
    joining = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    assert len(encode(joining, ".\n")) == len(encode(joining, "s 1")) == 1
    writer = writer_for(joining)
    assert writer.write("\nWhat") == encode(joining, "\nWhat")
    assert writer.ask("\nIt is", " 12") == (encode(joining, "\nIt is"), encode(joining, " 12"))


def test_what_a_writer_keeps_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("titans.tasks.background.KEPT", 10)
    writer = writer_for(byte_tokenizer())
    for number in range(100):
        assert writer.write(f" {number}") == [*f" {number}".encode()]
        assert len(writer._kept) <= 10


def test_too_short_a_length_is_refused_with_one_that_does() -> None:
    with pytest.raises(ValueError, match=r"^length is 100; expected at least \d+$") as error:
        example(NeedleNoise(), "test", 0, 0, {"length": 100, "depth": 0.5}, BYTES)
    least = int(str(error.value).split()[-1])
    rng = random.Random("needle-noise test 0 0 {'length': 100, 'depth': 0.5}")
    assert len(NeedleNoise().draw(rng, {"length": least, "depth": 0.5}, "test", BYTES).tokens) == least


def test_chance_is_one_in_as_many_values_as_there_are() -> None:
    assert NeedleNoise(digits=2).chance == pytest.approx(1 / len(range(10, 100)))
    assert NeedleEssay().chance == pytest.approx(1 / (10**7 - 10**6))
    assert NeedleWord().chance == pytest.approx(2**-122)
    assert NeedleWord(value="word").chance == pytest.approx(1 / len({(a, b) for a in ADJECTIVES for b in NOUNS}))


@pytest.mark.parametrize(
    ("task", "settings", "message"),
    [
        (NeedleNoise, {"lengths": ()}, r"lengths is \(\); expected one or more"),
        (NeedleNoise, {"lengths": (0,)}, r"lengths is \(0,\); expected"),
        (NeedleEssay, {"depths": (0.5, 1.5)}, r"depths is \(0.5, 1.5\); expected one or more numbers from 0 to 1"),
        (NeedleNoise, {"needles": 0}, "needles is 0; expected a whole number from 1 to 64"),
        (NeedleEssay, {"digits": 1}, "digits is 1; expected at least 2"),
        (NeedleNoise, {"digits": 0}, "digits is 0; expected at least 2"),
        (NeedleWord, {"value": "number"}, "value is 'number'; expected one of uuid, word, name, sentence"),
        (NeedleWord, {"haystack": "nowhere"}, "nowhere has no text; expected a file or a folder with .txt files"),
    ],
)
def test_settings_that_make_no_sense_are_refused(task: type[Needle], settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        task(**settings)


def test_text_needs_a_tokenizer() -> None:
    with pytest.raises(ValueError, match="tokenizer is None; expected one"):
        example(NeedleNoise(), "test", 0, 0, 900, None)


def test_a_haystack_without_a_word_is_refused(tmp_path: Path) -> None:
    task = NeedleEssay(haystack=_folder(tmp_path, a=" \n"))
    with pytest.raises(ValueError, match="is empty; expected text"):
        example(task, "test", 0, 0, 900, BYTES)


def test_titles_and_initials_end_no_sentence() -> None:
    text = 'He met Mr. Fox.\n"Go!" said  J. Doe. (At last.) Why? Nobody knew'
    assert split_sentences(text) == ["He met Mr. Fox.", '"Go!"', "said J. Doe.", "(At last.)", "Why?", "Nobody knew"]
