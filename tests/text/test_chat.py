from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest
import typer

from tests.text.conftest import Opener
from tests.text.endpoint import KEY, Endpoint, closed_port, serve
from titans.cli import app
from titans.text.chat import Conversation, printable
from titans.text.llm import LLMError, LocalLLM, NoLLM, OpenAILLM
from titans.text.memory import Memory
from titans.text.prompt import OPEN
from titans.text.records import Scope

PAGE = Path(__file__).parents[2] / "docs" / "text-memory.md"
FACT, QUESTION = "My dog is called Bruno.", "What is my dog's name?"


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    with serve("Good", " ", "dog.") as made:
        yield made


@pytest.fixture
def memory(open_plain: Opener) -> Memory:
    return open_plain()


def talk_to(endpoint: Endpoint, memory: Memory, user: str = "default", model: str = "words") -> Conversation:
    return Conversation(memory, OpenAILLM(model, endpoint.url, KEY), Scope(user))


def texts(memory: Memory, user: str = "default") -> list[tuple[str | None, str]]:
    return [(record.role, record.text) for record in reversed(memory.records(user=user))]


def test_the_local_model_uses_a_fact_that_was_told_in_an_earlier_talk(open_plain: Opener) -> None:
    llm = LocalLLM()
    told = open_plain()
    told.add(FACT, role="user")
    told.add("I live in Lisbon.", role="user")
    told.close()
    talk = Conversation(open_plain(), llm, max_tokens=16)
    assert "Bruno" in "".join(talk.turn(QUESTION))
    assert talk.last is not None and talk.last.prompt is not None
    assert [hit.record.text for hit in talk.last.prompt.used] == [FACT]
    llm.close()


def test_the_prompt_holds_what_was_recalled_and_the_answer_is_stored(endpoint: Endpoint, memory: Memory) -> None:
    memory.add(FACT, role="user")
    talk = talk_to(endpoint, memory)
    assert list(talk.turn(QUESTION)) == ["Good", " ", "dog."]
    sent = endpoint.requests[0]["messages"][-1]["content"]
    assert sent.startswith(f'{OPEN}\n- "{FACT}" (user, ') and sent.endswith(QUESTION)
    assert texts(memory) == [("user", FACT), ("user", QUESTION), ("assistant", "Good dog.")]
    assert talk.last is not None and talk.last.answer is not None
    assert talk.last.message.surprise > 0 and talk.last.answer.metadata == {}


def test_only_what_is_shown_counts_as_used(endpoint: Endpoint, memory: Memory) -> None:
    for text in (FACT, "The kettle is blue.", "We met on a Tuesday."):
        memory.add(text, role="user")
    talk = Conversation(memory, OpenAILLM("words", endpoint.url, KEY), budget=48)
    list(talk.turn(QUESTION))
    assert talk.last is not None and talk.last.prompt is not None
    shown = {hit.record.text for hit in talk.last.prompt.used}
    assert 0 < len(shown) < len(talk.last.found.hits)
    assert {record.text for record in memory.records() if record.uses} == shown


def test_earlier_messages_of_the_talk_are_sent_along(endpoint: Endpoint, memory: Memory) -> None:
    talk = talk_to(endpoint, memory)
    for message in ("Hello.", "I like tea."):
        list(talk.turn(message))
    assert [message["content"] for message in endpoint.requests[1]["messages"][1:]] == [
        "Hello.", "Good dog.", "I like tea.",
    ]  # fmt: skip
    assert len(talk.history) == 4


def test_a_message_is_stored_before_the_model_is_asked(endpoint: Endpoint, memory: Memory) -> None:
    talk = talk_to(endpoint, memory)
    talk.turn(FACT)
    assert texts(memory) == [("user", FACT)]
    assert endpoint.requests == []


def test_a_model_that_cannot_be_reached_loses_nothing(memory: Memory) -> None:
    talk = Conversation(memory, OpenAILLM("words", f"http://127.0.0.1:{closed_port()}/v1", KEY))
    with pytest.raises(LLMError, match="cannot be reached"):
        list(talk.turn(FACT))
    assert texts(memory) == [("user", FACT)]
    assert talk.history == []
    assert memory.search(QUESTION).hits[0].record.text == FACT


def test_an_answer_that_is_stopped_is_stored_as_far_as_it_went(endpoint: Endpoint, memory: Memory) -> None:
    talk = talk_to(endpoint, memory)
    answer = talk.turn("Hello.")
    next(answer)
    answer.close()
    other = talk.turn("Hello again.")
    assert [next(other) for _ in range(3)] == ["Good", " ", "dog."]
    with pytest.raises(KeyboardInterrupt):
        other.throw(KeyboardInterrupt)
    assert texts(memory)[1::2] == [("assistant", "Good"), ("assistant", "Good dog.")]
    assert talk.last is not None and talk.last.answer is not None
    assert talk.last.answer.metadata == {"stopped": True}


def test_an_answer_that_was_given_before_is_counted_and_still_in_the_talk(endpoint: Endpoint, memory: Memory) -> None:
    talk = talk_to(endpoint, memory)
    for message in ("Hello.", "Hello again.", "Hello."):
        list(talk.turn(message))
    assert {record.text: record.repeats for record in memory.records()} == {
        "Hello.": 1, "Hello again.": 0, "Good dog.": 2,
    }  # fmt: skip
    assert [said["content"] for said in talk.history[::2]] == ["Hello.", "Hello again.", "Hello."]


def test_an_answer_that_breaks_off_is_stored_as_far_as_it_came(endpoint: Endpoint, memory: Memory) -> None:
    with pytest.raises(LLMError):
        list(talk_to(endpoint, memory, model="broken").turn("Hello."))
    assert texts(memory) == [("user", "Hello."), ("assistant", "Good")]


def test_without_a_model_the_prompt_is_shown_and_only_the_message_stored(memory: Memory) -> None:
    memory.add(FACT, role="user")
    talk = Conversation(memory, NoLLM(), system="Be brief.")
    shown = "".join(talk.turn(QUESTION))
    assert shown.startswith("[system]\nBe brief. ") and FACT in shown and shown.endswith(QUESTION)
    assert texts(memory) == [("user", FACT), ("user", QUESTION)]


def test_a_message_that_is_too_long_for_the_model_is_stored_and_refused(endpoint: Endpoint, memory: Memory) -> None:
    talk = Conversation(memory, OpenAILLM("words", endpoint.url, KEY, context=300), max_tokens=100)
    with pytest.raises(ValueError, match=r"^the message has [\d,]+ tokens; expected a prompt of at most 200$"):
        talk.turn("word " * 300)
    assert len(texts(memory)) == 1


def test_a_message_that_cannot_be_stored_is_not_sent(endpoint: Endpoint, memory: Memory) -> None:
    talk = talk_to(endpoint, memory)
    for message in ("", "  ", "a\x00b", "half \ud83d"):
        with pytest.raises(ValueError):
            talk.turn(message)
    assert texts(memory) == [] and endpoint.requests == [] and talk.last is None


def test_control_characters_of_an_answer_reach_neither_terminal_nor_store(memory: Memory) -> None:
    with serve("\x1b[2Jred\x07", "\x9b1m\n", "alert\x00") as endpoint:
        assert "".join(talk_to(endpoint, memory).turn("Hello.")) == "[2Jred1m\nalert"
    assert texts(memory)[1] == ("assistant", "[2Jred1m\nalert")
    assert printable("Größe\t東京\n🧑‍🚀") == "Größe\t東京\n🧑‍🚀"


def test_an_answer_of_nothing_is_not_stored(memory: Memory) -> None:
    with serve(" ", "\n") as endpoint:
        list(talk_to(endpoint, memory).turn("Hello."))
    assert texts(memory) == [("user", "Hello.")]


def test_no_prompt_of_one_user_holds_words_of_another(endpoint: Endpoint, memory: Memory) -> None:
    list(talk_to(endpoint, memory, "ann").turn("My dog is called Bruno, says ann."))
    list(talk_to(endpoint, memory, "bob").turn(QUESTION))
    assert not any("ann" in message["content"] for message in endpoint.requests[1]["messages"])
    talk = talk_to(endpoint, memory, "bob")
    with pytest.raises(ValueError, match=r"^there is no record '\w+' of user 'bob'$"):
        talk.forget(memory.records(user="ann")[0].id)


def test_what_is_forgotten_is_in_no_later_prompt(endpoint: Endpoint, memory: Memory, tmp_path: Path) -> None:
    talk = talk_to(endpoint, memory)
    list(talk.turn("The code is walrus."))
    list(talk.turn("I like tea."))
    talk.forget(next(record.id for record in memory.records() if "walrus" in record.text))
    assert talk.last is None
    list(talk.turn("What is the code?"))
    sent = endpoint.requests[-1]["messages"]
    assert not any("walrus" in message["content"] for message in sent)
    assert any("I like tea." in message["content"] for message in sent)
    assert not any(b"walrus" in file.read_bytes() for file in tmp_path.rglob("*") if file.is_file())


def test_everything_of_a_scope_can_be_forgotten(endpoint: Endpoint, memory: Memory) -> None:
    memory.add("I am bob.", user="bob")
    talk = talk_to(endpoint, memory)
    list(talk.turn(FACT))
    assert talk.forget_all() == 2
    assert talk.history == [] and talk.last is None
    assert texts(memory) == [] and len(texts(memory, "bob")) == 1


@pytest.mark.parametrize("scope", [Scope("ann"), Scope("ann", "a"), Scope("ann", session="s"), Scope("ann", "a", "s")])
def test_forgetting_all_erases_exactly_its_scope(scope: Scope, memory: Memory) -> None:
    everywhere = [
        Scope(user, agent, session) for user in ("ann", "ben") for agent in (None, "a", "b") for session in (None, "s")
    ]
    for each in everywhere:
        memory.add(FACT, **asdict(each))
    assert Conversation(memory, NoLLM(), scope).forget_all() == 1
    assert [each for each, _ in memory.scopes()] == [each for each in everywhere if each != scope]


def test_a_talk_within_a_session_keeps_to_it(endpoint: Endpoint, memory: Memory) -> None:
    memory.add("My dog is called Rex.", session="other", role="user")
    memory.add(FACT, session="this", role="user")
    talk = Conversation(memory, OpenAILLM("words", endpoint.url, KEY), Scope(session="this"))
    list(talk.turn(QUESTION))
    sent = endpoint.requests[0]["messages"][-1]["content"]
    assert FACT in sent and "Rex" not in sent
    with pytest.raises(ValueError, match="there is no record"):
        talk.forget(memory.records(session="other")[0].id)
    assert {record.session for record in memory.records() if record.text == QUESTION} == {"this"}


def test_memories_below_the_threshold_are_not_shown_but_counted(memory: Memory) -> None:
    memory.add(FACT, role="user")
    memory.add("Interest rates rose again.", role="user")
    talk = Conversation(memory, NoLLM(), threshold=0.4)
    shown = "".join(talk.turn(QUESTION))
    assert FACT in shown and "Interest" not in shown
    assert talk.last is not None and talk.last.found.below == 1


def test_impossible_limits_are_refused_in_one_sentence(memory: Memory) -> None:
    with pytest.raises(ValueError, match=r"^budget is -1; expected a whole number of at least 0$"):
        Conversation(memory, NoLLM(), budget=-1)
    with pytest.raises(ValueError, match=r"^max_tokens is 0; expected a whole number of at least 1$"):
        Conversation(memory, NoLLM(), max_tokens=0)
    with pytest.raises(ValueError, match=r"^max_tokens is 99999; expected less than 32768, the context of none$"):
        Conversation(memory, NoLLM(), max_tokens=99999)


def test_the_python_on_the_page_runs_as_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    exec(compile(code, str(PAGE), "exec"), {})
    out = capsys.readouterr().out
    assert "My dog is called Bruno." in out and "Where do I live?" in out and "I live in Lisbon." in out


def test_the_commands_on_the_page_exist_with_their_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    page = PAGE.read_text(encoding="utf-8")
    lines = re.findall(r"^(?:    )?(?:\$ )?titans (.*)$", page, re.MULTILINE)
    lines += [line.replace("FILE", "f").replace("FOLDER", "f") for line in re.findall(r"`titans ([^`]*)`", page)]
    assert len(lines) > 15
    for line in lines:
        words = shlex.split(line.partition("<")[0], comments=True)
        command: typer.main.TyperGroup = typer.main.get_command(app)  # type: ignore[assignment]
        while words and words[0] in getattr(command, "commands", {}):
            command = command.commands[words.pop(0)]  # type: ignore[assignment]
        assert not getattr(command, "commands", {}), line
        try:
            command.make_context("titans", words, resilient_parsing=False)
        except Exception as error:  # what is left out on the page is no mistake, what does not exist is
            assert type(error).__name__ == "MissingParameter" or "does not exist" in str(error), (line, error)
