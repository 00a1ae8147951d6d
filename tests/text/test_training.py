"""The outer loop: transcripts, episodes, a loss as in the formulas, and held-out answers that are found."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.text.small_bert import save_small_bert
from tests.text.test_neural import SMALL, shaken, vectors
from titans.text.encoder import TextEncoder
from titans.text.facts import generate_facts
from titans.text.neural import NeuralConfig, NeuralTextMemory
from titans.text.training import (
    Episode,
    Message,
    Texts,
    TextTraining,
    ask_projection,
    draw_episodes,
    encode_sessions,
    evaluate,
    generate_sessions,
    rank_texts,
    read_transcripts,
    split_sessions,
    train_memory,
)


def make_episode() -> Episode:
    """Six texts, a question about the fourth, and the first, which asks for the second."""
    written = vectors(6).double()
    asked = torch.cat([vectors(1, seed=1).double(), written[:1]])
    return Episode(written, asked, torch.tensor([3, 1]), torch.tensor([-1, 0]))


def unit(x: Tensor) -> Tensor:
    return x / x.norm()


def answer(weights: Sequence[Tensor], x: Tensor) -> Tensor:
    """M(x): two layers with biases."""
    one = x.new_ones(1)
    return weights[1] @ torch.cat([F.silu(weights[0] @ torch.cat([x, one])), one])


def learned(memory: NeuralTextMemory, texts: Tensor) -> list[Tensor]:
    """The memory's weights after the texts of an episode, from the equations."""
    config, start = memory.config, list(memory.initial)
    projected = [unit(memory.to_dim.weight @ text) for text in texts]
    keys, values = ([unit(map_.weight @ x) for x in projected] for map_ in (memory.to_key, memory.to_value))
    # The chunk's first weights; copies, since the gradient of the memory is not that of what comes before it.
    anchor = [w.detach().requires_grad_() if config.first_order else w.clone() for w in start]
    weights, momentum = start, [torch.zeros_like(w) for w in start]
    for t, (k, v) in enumerate(zip(keys, values, strict=True)):
        error = answer(anchor, k) - v
        u = torch.autograd.grad(error.square().sum(), anchor, create_graph=True)  # Eq. 12
        theta: float | Tensor = config.theta
        if config.bounded:
            kappa = sum(g.square().sum() for g in u) / (4 * error.square().sum())
            crowd = 1 + sum((k @ other).square() for other in keys[:t])
            theta = config.theta / ((1 + kappa) * crowd**2)
        momentum = [config.eta * s - theta * g for s, g in zip(momentum, u, strict=True)]  # Eq. 14
        weights = [(1 - config.alpha) * (w - r) + r + s for w, r, s in zip(weights, start, momentum, strict=True)]
    return weights


@pytest.mark.parametrize("bounded", [True, False])
@pytest.mark.parametrize("first_order", [False, True])
def test_the_ranking_and_its_gradients_are_those_of_the_formulas(first_order: bool, bounded: bool) -> None:
    memory = shaken(replace(SMALL, first_order=first_order, bounded=bounded, theta=0.05)).double()
    episode = make_episode()
    weights = learned(memory, episode.written)
    texts = [unit(memory.to_dim.weight @ text) for text in episode.written]
    for row, (asked, right, asker) in enumerate(zip(*episode[1:], strict=True)):
        x = unit(memory.to_dim.weight @ asked)
        z = unit(x - answer(weights, unit(memory.to_query.weight @ x)))
        sought = [place for place in range(6) if place != asker]
        scores = torch.stack([z @ (texts[i] + 0.5 * texts[i - 1] if i else texts[i]) for i in sought]) / 0.05
        expected = scores.logsumexp(0) - scores[sought.index(int(right))]
        made = rank_texts(memory, episode, 0.5)[row] / 0.05
        loss = F.cross_entropy(made, right)
        torch.testing.assert_close(loss, expected)
        parameters = dict(memory.named_parameters())
        found, wanted = (
            torch.autograd.grad(each, list(parameters.values()), retain_graph=True) for each in (loss, expected)
        )
        for name, one, other in zip(parameters, found, wanted, strict=True):
            torch.testing.assert_close(one, other, msg=lambda text, name=name: f"{name}: {text}")
            assert float(other.abs().max()) > 0, name


def test_second_order_gradients_are_others_than_first_order_ones() -> None:
    gradients = []
    for first_order in (False, True):
        memory = shaken(replace(SMALL, first_order=first_order, theta=0.05)).double()
        F.cross_entropy(rank_texts(memory, make_episode(), 0.5), make_episode().answers).backward()
        gradients.append(memory.initial[0].grad)
    assert gradients[0] is not None and gradients[1] is not None
    assert float((gradients[0] - gradients[1]).norm()) > 0.01 * float(gradients[0].norm())


def test_the_outer_loop_lowers_the_held_out_loss(encoder: TextEncoder) -> None:
    settings = TextTraining(epochs=2, written=12, generated=4, held_out=0.5, learning_rate=1e-3)
    result = train_memory([], encoder, settings=settings)
    before, after = (result.figures["held_out"][when] for when in ("before", "after"))
    assert after["loss"] < 0.95 * before["loss"]
    assert len(result.figures["held_out"]["epochs"]) == 3 and result.figures["steps"] == 8
    assert result.memory.fingerprint == result.figures["fingerprint"] != NeuralTextMemory.default().fingerprint


def test_the_same_seed_trains_the_same_memory(tmp_path: Path) -> None:
    small = TextEncoder.load(save_small_bert(tmp_path))
    config = NeuralConfig(width=small.width, dim=8)
    made = []
    for seed in (0, 0, 1):
        settings = TextTraining(epochs=1, written=12, generated=2, seed=seed)
        made.append(train_memory([], small, config, settings).memory.fingerprint)
    assert made[0] == made[1] != made[2]


def test_lines_are_messages_and_an_empty_line_ends_a_session(tmp_path: Path) -> None:
    file = tmp_path / "talk.txt"
    file.write_text("Hello.\n  Hi, Ann. \n\n\nIt rains.\n", encoding="utf-8")
    assert read_transcripts([file]) == [[Message("Hello."), Message("Hi, Ann.")], [Message("It rains.")]]


def test_objects_have_sessions_and_questions(tmp_path: Path) -> None:
    file = tmp_path / "talk.jsonl"
    file.write_text(
        '{"text": "Ann lives in Oslo.", "session": 1, "question": "Where is Ann?"}\n'
        '{"text": "Bob has a dog.", "session": 2}\n'
        '{"text": "Ann lives in Oslo.", "session": 1, "question": "Who lives in Oslo?"}\n\n'
        '{"question": "What does Eve do?", "answer": "Eve paints.", "session": 2}\n'
    )
    assert read_transcripts([file]) == [
        [Message("Ann lives in Oslo.", ("Where is Ann?", "Who lives in Oslo?"))],
        [Message("Bob has a dog."), Message("Eve paints.", ("What does Eve do?",))],
    ]


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.txt", b"\n \n", "a.txt has no messages in it; expected one per line"),
        ("a.txt", b"good\n\xff\xfe", "a.txt is not UTF-8: byte 5 is 0xff"),
        ("a.jsonl", b'{"text": "a"}\n{', r"a.jsonl, line 2, cannot be read as JSON"),
        ("a.jsonl", b'"a"', r"a.jsonl, line 1, is not an object"),
        ("a.jsonl", b'{"words": "a"}', r"a.jsonl, line 1, has a text of type NoneType; expected words"),
        ("a.jsonl", b'{"text": "a", "question": 3}', r"line 1, has a question of type int; expected words"),
        ("a.jsonl", b'{"text": " "}', "line 1, has an empty text; expected words"),
    ],
)
def test_a_transcript_that_cannot_be_read_is_one_sentence(
    tmp_path: Path, name: str, content: bytes, words: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=words):
        read_transcripts([tmp_path / name])


def make_sessions(sizes: Sequence[int], questions: bool) -> list[list[Message]]:
    """Messages with numbers, and a question about every second."""
    return [
        [Message(f"message {i} of {s}", (f"what is {i} of {s}",) * (questions and i % 2 == 0)) for i in range(size)]
        for s, size in enumerate(sizes)
    ]


def number_texts(sizes: Sequence[int], questions: bool = False) -> Texts:
    """Texts whose vectors are their numbers, and questions whose vectors are the negative numbers of their answers."""
    places = torch.tensor([place for size in sizes for place in range(size)])
    answers = torch.arange(0, len(places), 2)[: None if questions else 0]
    numbers = torch.arange(len(places), dtype=torch.float32).unsqueeze(1)
    return Texts(numbers, -numbers[answers], answers, places > 0)


@given(
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=6),
    questions=st.booleans(),
    written=st.integers(2, 50),
    neighbours=st.integers(0, 8),
    seed=st.integers(0, 99),
)
def test_episodes_are_stretches_that_ask_for_their_own_texts(
    sizes: list[int], questions: bool, written: int, neighbours: int, seed: int
) -> None:
    texts = number_texts(sizes, questions)
    settings = TextTraining(written=written, neighbours=neighbours)
    seen: list[int] = []
    for episode in draw_episodes([texts], settings, random.Random(seed)):
        numbers = episode.written.flatten().tolist()
        assert numbers == list(range(int(numbers[0]), int(numbers[0]) + min(written, sum(sizes))))
        seen += numbers
        asked, right, askers = episode.asked.flatten(), episode.written[episode.answers].flatten(), episode.askers
        assert torch.equal(asked[askers < 0], -right[askers < 0])  # a question, and the text that answers it
        assert torch.equal(asked[askers >= 0], right[askers >= 0] - 1)  # a text, and the next of the same session
        assert torch.equal(episode.written[askers[askers >= 0]].flatten(), asked[askers >= 0])
        assert texts.follows[right[askers >= 0].long()].all()
        assert len(asked) > 0 and (askers >= 0).sum() <= neighbours
        assert (askers < 0).sum() == sum(2 * int(n / 2) == n for n in numbers) * questions
    assert len(seen) == len(set(seen))


def test_sessions_become_one_row_of_texts(encoder: TextEncoder) -> None:
    texts = encode_sessions(make_sessions([3, 2], True), encoder)
    assert texts.follows.tolist() == [False, True, True, False, True]
    assert texts.answers.tolist() == [0, 2, 3]
    facts = generate_sessions(5, random.Random(0))
    assert not encode_sessions(facts, encoder).follows.any()
    words = ["what is 0 of 0", "what is 2 of 0", "what is 0 of 1"]
    torch.testing.assert_close(texts.asked, torch.from_numpy(encoder.encode(words)))
    torch.testing.assert_close(texts.written[3:4], torch.from_numpy(encoder.encode(["message 0 of 1"])))


def test_a_text_never_answers_itself() -> None:
    memory = shaken(SMALL).double()
    for read in (rank_texts(memory, make_episode(), 0.5), rank_texts(memory, make_episode(), 0.5, ask_projection)):
        assert torch.isinf(read).nonzero().tolist() == [[1, 0]]


@given(sizes=st.lists(st.integers(1, 60), min_size=1, max_size=8), part=st.floats(0.01, 0.9), seed=st.integers(0, 99))
def test_what_is_held_out_is_not_trained_on(sizes: list[int], part: float, seed: int) -> None:
    sessions = make_sessions(sizes, False)
    if sum(sizes) < 16:
        with pytest.raises(ValueError, match=rf"the data has {sum(sizes)} messages; expected at least 16"):
            split_sessions(sessions, part, 8, random.Random(seed))
        return
    train, held_out = split_sessions(sessions, part, 8, random.Random(seed))
    kept, left = ([message for session in some for message in session] for some in (train, held_out))
    assert not set(kept) & set(left) and len(kept) + len(left) == sum(sizes)


def test_generated_facts_never_contradict_each_other_and_tests_have_their_own() -> None:
    rng = random.Random(0)
    for _ in range(50):
        messages = [message for session in generate_sessions(6, rng) for message in session]
        assert len({question for message in messages for question in message.questions}) == 12
    train, test = ({fact.text for fact in generate_facts(200, rng, part)} for part in ("train", "test"))
    assert len(train) == len(test) == 200 and not train & test
    with pytest.raises(ValueError, match="count is 241; expected 0 to 240"):
        generate_facts(241, rng, "test")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"epochs": -1}, "epochs is -1; expected a whole number of at least 0"),
        ({"written": 1}, "written is 1; expected a whole number of at least 2"),
        ({"learning_rate": 0.0}, "learning_rate is 0.0; expected a positive number"),
        ({"share": -1.0}, "share is -1.0; expected a number of at least 0"),
        ({"held_out": 1.0}, "held_out is 1.0; expected a share between 0 and 1"),
    ],
)
def test_a_wrong_setting_is_one_sentence(change: dict[str, float], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        TextTraining(**change)  # type: ignore[arg-type]


def test_data_that_cannot_be_trained_on_is_one_sentence(tmp_path: Path) -> None:
    small = TextEncoder.load(save_small_bert(tmp_path))
    with pytest.raises(ValueError, match="there are no sessions and generated is 0"):
        train_memory([], small)
    with pytest.raises(ValueError, match="the data has no questions and neighbours is 0"):
        train_memory(make_sessions([20], False), small, settings=TextTraining(neighbours=0))
    with pytest.raises(ValueError, match="width is 384; expected 32, that of the encoder's vectors"):
        train_memory(make_sessions([20], False), small, NeuralConfig())


def test_the_figures_are_means_over_all_queries() -> None:
    memory = shaken(SMALL).double()
    whole = make_episode()
    parts = [whole._replace(asked=whole.asked[i], answers=whole.answers[i], askers=whole.askers[i]) for i in ([0], [1])]
    settings = TextTraining()
    assert evaluate(memory, parts, settings) == pytest.approx(evaluate(memory, [whole], settings))
