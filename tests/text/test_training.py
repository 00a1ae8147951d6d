"""The outer loop: transcripts, episodes, gradients as in the formulas, and a read loss that falls."""

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
from tests.text.test_neural import SMALL, attended, shaken, vectors
from titans.text.encoder import TextEncoder
from titans.text.facts import generate_facts
from titans.text.neural import NeuralConfig, NeuralTextMemory
from titans.text.training import (
    Batch,
    Episode,
    Message,
    TextTraining,
    add_gradients,
    draw_episodes,
    episode_losses,
    evaluate,
    generate_sessions,
    halves,
    read_transcripts,
    split_sessions,
    train_memory,
)

FORMULAS = TextTraining(write=1.0, read=1.0, contrastive=0.0)


def make_batch(episodes: int = 3) -> Batch:
    written = vectors(episodes * 6).view(episodes, 6, 12).double()
    asked = vectors(episodes * 2, seed=1).view(episodes, 2, 12).double()
    answers = torch.tensor([[0, 3], [5, 2], [1, 1]])[:episodes]
    return Batch(written, asked, answers)


def unit(x: Tensor) -> Tensor:
    return x / x.norm()


def answer(weights: Sequence[Tensor], x: Tensor) -> Tensor:
    """M(x): two layers with biases."""
    one = x.new_ones(1)
    return weights[1] @ torch.cat([F.silu(weights[0] @ torch.cat([x, one])), one])


def told(memory: NeuralTextMemory, texts: Tensor) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """The memory's weights after the texts of an episode, their keys and their values, from the equations."""
    config, start = memory.config, list(memory.initial)
    keys, values = [], []
    for text in texts:
        x = unit(memory.to_dim.weight @ text)
        y = attended(memory, x, answer(start, unit(memory.to_query.weight @ x)))
        keys.append(unit(memory.to_key.weight @ y))
        values.append(unit(memory.to_value.weight @ y))
    # copies: keys and values come from M_0 too, through h, but the memory's own gradient takes them as they are
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
    return weights, keys, values


@pytest.mark.parametrize("bounded", [True, False])
@pytest.mark.parametrize("first_order", [False, True])
def test_the_gradients_are_those_of_the_formulas(first_order: bool, bounded: bool) -> None:
    memory = shaken(replace(SMALL, first_order=first_order, bounded=bounded, theta=0.05)).double()
    batch = make_batch()
    losses = episode_losses(memory, batch)
    add_gradients(memory, losses, FORMULAS)

    write: Tensor = torch.zeros((), dtype=torch.float64)
    read, query_gradient = 0.0, torch.zeros_like(memory.to_query.weight)
    for written, asked, answers in zip(*batch, strict=True):
        weights, keys, values = told(memory, written)
        write = write + sum((answer(weights, k) - v).square().sum() for k, v in zip(keys, values, strict=True)) / 18
        fixed = [w.detach() for w in weights]
        for text, index in zip(asked, answers, strict=True):
            x = unit(memory.to_dim.weight @ text).detach()
            z = memory.to_query.weight.detach() @ x
            q = unit(z).requires_grad_()
            loss = (answer(fixed, q) - values[int(index)].detach()).square().sum() / 6
            (g,) = torch.autograd.grad(loss, q)
            query_gradient += torch.outer((g - q.detach() * (q.detach() @ g)) / z.norm(), x)
            read += float(loss.detach())
    others = {name: p for name, p in memory.named_parameters() if name != "to_query.weight"}
    expected = torch.autograd.grad(write, list(others.values()))

    torch.testing.assert_close(losses.write, write)
    assert float(losses.read.detach()) == pytest.approx(read)
    torch.testing.assert_close(memory.to_query.weight.grad, query_gradient)
    for (name, parameter), wanted in zip(others.items(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, wanted, msg=lambda text, name=name: f"{name}: {text}")
        assert float(wanted.abs().max()) > 0, name


def test_the_write_loss_is_not_for_the_queries_and_the_read_loss_is_for_nothing_else() -> None:
    for settings in (replace(FORMULAS, read=0.0), replace(FORMULAS, write=0.0)):
        memory = shaken(replace(SMALL, data_dependent=True)).double()
        add_gradients(memory, episode_losses(memory, make_batch()), settings)
        for name, parameter in memory.named_parameters():
            assert parameter.grad is not None, name
            reached = float(parameter.grad.abs().sum()) > 0
            assert reached == ((name == "to_query.weight") == (settings.read > 0)), name


def test_second_order_gradients_are_others_than_first_order_ones() -> None:
    gradients = []
    for first_order in (False, True):
        memory = shaken(replace(SMALL, first_order=first_order, theta=0.05)).double()
        add_gradients(memory, episode_losses(memory, make_batch()), FORMULAS)
        gradients.append(memory.initial[0].grad)
    assert gradients[0] is not None and gradients[1] is not None
    assert float((gradients[0] - gradients[1]).norm()) > 0.01 * float(gradients[0].norm())


def test_the_contrastive_loss_reaches_every_parameter() -> None:
    memory = shaken(replace(SMALL, data_dependent=True)).double()
    episode_losses(memory, make_batch(), 0.1).contrastive.backward()
    for name, parameter in memory.named_parameters():
        assert parameter.grad is not None and float(parameter.grad.abs().sum()) > 0, name


def test_the_same_words_in_another_episode_are_no_wrong_answer() -> None:
    memory = shaken(SMALL).double()
    batch = make_batch(1)
    twice = Batch(*(torch.cat([x, x]) for x in batch))
    once = episode_losses(memory, batch, 0.1).contrastive
    other = twice.written.clone()
    other[1] = -other[1]  # now the second episode has texts of its own
    assert float(episode_losses(memory, twice, 0.1).contrastive) < float(
        episode_losses(memory, twice._replace(written=other), 0.1).contrastive
    )
    assert float(episode_losses(memory, twice, 0.1).contrastive) >= float(once)


def test_the_outer_loop_lowers_the_held_out_read_loss(encoder: TextEncoder) -> None:
    settings = TextTraining(epochs=3, generated=24, held_out=0.5, learning_rate=1e-3)
    for chosen in (settings, replace(settings, contrastive=0.0, write=1.0)):
        result = train_memory([], encoder, settings=chosen)
        before, after = (result.figures["held_out"][when] for when in ("before", "after"))
        assert after["read"] < 0.98 * before["read"]
        assert len(result.figures["held_out"]["epochs"]) == 4 and result.figures["steps"] == 9
        assert result.memory.fingerprint == result.figures["fingerprint"] != NeuralTextMemory.default().fingerprint
        if chosen.contrastive:
            assert after["contrastive"] < 0.9 * before["contrastive"]


def test_the_same_seed_trains_the_same_memory(tmp_path: Path) -> None:
    small = TextEncoder.load(save_small_bert(tmp_path))
    config = NeuralConfig(dim=8, heads=2)
    made = []
    for seed in (0, 0, 1):
        settings = TextTraining(epochs=1, generated=8, seed=seed)
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
    """Messages with numbers, so that neighbours can be told."""
    return [
        [
            Message(f"message {i} of session {s}, which is long enough", (f"what is {i} of {s}",) * questions)
            for i in range(size)
        ]
        for s, size in enumerate(sizes)
    ]


@given(sizes=st.lists(st.integers(1, 40), min_size=1, max_size=6), questions=st.booleans(), seed=st.integers(0, 99))
def test_every_query_is_answered_by_a_text_that_was_written(sizes: list[int], questions: bool, seed: int) -> None:
    sessions = make_sessions(sizes, questions)
    episodes = draw_episodes(sessions, TextTraining(), random.Random(seed))
    texts = [message.text for session in sessions for message in session]
    assert len(episodes) >= (sum(sizes) - 5) // 8
    for episode in episodes:
        assert len(episode.written) == len(set(episode.written)) == 6
        assert len(episode.asked) == len(set(episode.answers)) == 2
        for asked, answer in zip(episode.asked, episode.answers, strict=True):
            text = episode.written[answer]
            if questions and asked.startswith("what"):
                assert text.startswith(asked.replace("what is", "message").replace("of", "of session"))
            elif asked in texts:  # a neighbour that was left out
                assert asked not in episode.written and abs(texts.index(asked) - texts.index(text)) == 1
            else:
                assert asked in halves(text)


def test_queries_of_plain_transcripts_are_neighbours_and_halves() -> None:
    episodes = draw_episodes(make_sessions([160], False), TextTraining(), random.Random(0))
    kinds = {
        asked in episode.written[answer] for episode in episodes for asked, answer in zip(*episode[1:], strict=True)
    }
    assert kinds == {True, False}


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
    for some in (train, held_out):
        assert draw_episodes(some, TextTraining(), random.Random(seed))


def test_generated_facts_never_contradict_each_other_and_tests_have_their_own() -> None:
    rng = random.Random(0)
    for session in generate_sessions(50, 6, rng):
        assert len({question for message in session for question in message.questions}) == 12
    train, test = ({fact.text for fact in generate_facts(200, rng, part)} for part in ("train", "test"))
    assert len(train) == len(test) == 200 and not train & test
    with pytest.raises(ValueError, match="count is 241; expected 0 to 240"):
        generate_facts(241, rng, "test")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"epochs": 0}, "epochs is 0; expected a whole number of at least 1"),
        ({"asked": 7}, "asked is 7 and written is 6; expected no more asked than written"),
        ({"learning_rate": 0.0}, "learning_rate is 0.0; expected a positive number"),
        ({"write": -1.0}, "write is -1.0; expected a number of at least 0"),
        ({"held_out": 1.0}, "held_out is 1.0; expected a share between 0 and 1"),
    ],
)
def test_a_wrong_setting_is_one_sentence(change: dict[str, float], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        TextTraining(**change)  # type: ignore[arg-type]


def test_without_data_there_is_nothing_to_train_on(tmp_path: Path) -> None:
    small = TextEncoder.load(save_small_bert(tmp_path))
    with pytest.raises(ValueError, match="there are no sessions and generated is 0"):
        train_memory([], small)


def test_the_figures_are_means_over_all_queries() -> None:
    memory = shaken(SMALL).double()
    whole = make_batch()
    parts = [Batch(*(x[:1] for x in whole)), Batch(*(x[1:] for x in whole))]
    expected = evaluate(memory, [whole], FORMULAS)
    assert evaluate(memory, parts, FORMULAS) == pytest.approx(expected)
    assert Episode._fields == ("written", "asked", "answers")
