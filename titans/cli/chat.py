"""`titans chat`: talk to a language model that remembers."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from typing import TYPE_CHECKING, Annotated, Any

import typer

from titans.cli.memory import DEFAULT_STORE, Encoder, Neural, Store, Url, open_memory

if TYPE_CHECKING:
    from rich.table import Table

    from titans.text.chat import Conversation
    from titans.text.records import Record

HELP = """\
/memories         the newest memories; /memories WORDS: those that fit
/forget ID        erase a memory for good; its first letters are enough; /forget all: everything of this talk's scope
/why              what was recalled for the last message, and why; how surprising it was
/help             this
/quit             leave, as does Ctrl-D; Ctrl-C stops an answer
A message that begins with / is written with two: //"""
LISTED = 20  # memories that /memories shows
SHOWN = 200  # characters of a memory in a table
WIDTH = 300  # of tables where there is no terminal


def chat(
    message: Annotated[str | None, typer.Option("--message", "-m", help="Say this, print the answer, and end.")] = None,
    store: Store = DEFAULT_STORE,
    user: Annotated[str, typer.Option(help="Whose memory.")] = "default",
    agent: Annotated[str | None, typer.Option(help="Of which agent.")] = None,
    session: Annotated[str | None, typer.Option(help="Keep to this conversation.")] = None,
    llm: Annotated[
        str,
        typer.Option(help="local, local:FILE.gguf, openai:MODEL, hf:FOLDER, or none to see the prompt instead."),
    ] = "local",
    base_url: Annotated[
        str | None, typer.Option(help="Of an OpenAI-compatible server; default: OPENAI_BASE_URL.")
    ] = None,
    api_key: Annotated[
        str | None, typer.Option(help="Of that server; default, and safer: OPENAI_API_KEY.", show_default=False)
    ] = None,
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds to wait for that server.")] = 60.0,
    budget: Annotated[int, typer.Option(min=0, help="Tokens of a prompt for memories; 0 shows none.")] = 512,
    threshold: Annotated[
        float | None, typer.Option(help="Recall no memory whose cosine with the message is less.")
    ] = None,
    system: Annotated[str | None, typer.Option(help="The persistent text that begins every prompt.")] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens of an answer at most.")] = 256,
    temperature: Annotated[float | None, typer.Option(min=0, help="Default: 0, or what a server thinks best.")] = None,
    show: Annotated[bool, typer.Option("--show", help="Show what is recalled, and each message's surprise.")] = False,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Most records in the store; the least surprising go.")
    ] = None,
    encoder: Encoder = None,
    neural: Neural = None,
    url: Url = None,
) -> None:
    """Talk to a language model that remembers what was said, here and in earlier talks.

    Without a terminal every line of the input is a message.
    """
    with open_memory(store, new=True, encoder=encoder, neural=neural, limit=limit, url=url) as memory:
        from titans.text.chat import Conversation
        from titans.text.llm import make_llm
        from titans.text.records import Scope

        scope = Scope(user, agent, session)
        with closing(make_llm(llm, base_url, api_key, timeout)) as made:
            talk = Conversation(memory, made, scope, budget, system, max_tokens, temperature, threshold)
            if message is not None:
                _answer(talk, message, show)
            elif sys.stdin.isatty():
                _converse(talk, show)
            elif not _read_all(talk, show):
                raise typer.Exit(2)


def _converse(talk: Conversation, show: bool) -> None:
    """Reads from the terminal until it ends; whatever goes wrong with a message, the talk goes on."""
    with suppress(ImportError):
        import readline  # noqa: F401  (gives input() line editing and a history, which is not written to any file)
    typer.echo(f"{talk.llm.name}, with the memory of {talk.scope}. /help lists the commands.")
    while True:
        try:
            line = input("> ")
            if not _handle(talk, line, show, _confirm):
                return
        except EOFError:
            typer.echo()
            return
        except KeyboardInterrupt:
            typer.echo()
        except ValueError as error:
            _complain(error)


def _read_all(talk: Conversation, show: bool) -> bool:
    """Takes every line of the input as a message or command; False if something went wrong with one."""
    fine = True
    for data in sys.stdin.buffer:
        try:
            if not _handle(talk, data.decode("utf-8"), show, lambda question: True):
                break
        except UnicodeDecodeError as error:
            _complain(ValueError(f"a line of the input is not valid UTF-8 at byte {error.start}"))
            fine = False
        except ValueError as error:
            _complain(error)
            fine = False
    return fine


def _handle(talk: Conversation, line: str, show: bool, confirm: Callable[[str], bool]) -> bool:
    """Does what a line says; False if it says to leave."""
    line = line.strip()
    if not line.startswith("/") or line.startswith("//"):
        if line:
            _answer(talk, line.removeprefix("/") if line.startswith("//") else line, show)
        return True
    command, _, rest = line.partition(" ")
    rest = rest.strip()
    if command in ("/quit", "/exit"):
        return False
    if command == "/help":
        typer.echo(HELP)
    elif command == "/memories":
        _print(_memories(talk, rest))
    elif command == "/forget":
        _forget(talk, rest, confirm)
    elif command == "/why":
        _why(talk)
    else:
        raise ValueError(f"there is no command {command}; expected /memories, /forget, /why, /help or /quit")
    return True


def _answer(talk: Conversation, message: str, show: bool) -> None:
    """Says a message and prints the answer as it comes; Ctrl-C stops it, and ends what is not a talk."""
    answer = talk.turn(message)
    if show:
        _show_recall(talk)
    begun = False
    with closing(answer):  # which stores what was said until then
        try:
            for piece in answer:
                typer.echo(piece.encode(), nl=False)
                begun = True
        except ValueError as error:
            raise ValueError(f"{str(error).rstrip('.')}; the message is stored") from error
        finally:
            if begun:
                typer.echo()
    if show and talk.last is not None and talk.last.answer is not None:
        _note(f"surprise of the answer {talk.last.answer.surprise:.3f}")


def _show_recall(talk: Conversation) -> None:
    turn = talk.last
    if turn is None or turn.prompt is None:
        return
    many = len(turn.prompt.used)
    _note(f"surprise {turn.message.surprise:.3f}; {many} of {many + turn.prompt.dropped} memories in the prompt")
    for hit in turn.prompt.used:
        _note(f"  {hit.score:.3f}  {hit.record.created[:10]}  {_one_line(hit.record.text)}")


def _why(talk: Conversation) -> None:
    turn = talk.last
    if turn is None:
        typer.echo("Nothing was said yet.")
        return
    typer.echo(f"{_one_line(turn.message.text)}: surprise {turn.message.surprise:.3f}")
    used = {hit.record.id for hit in turn.prompt.used} if turn.prompt is not None else set()
    table = _table("shown", "score", "cosine", "words", "memory", "surprise", "age", "id", "text")
    for hit in turn.found:
        figures = [f"{hit.score:.3f}", *map(_figure, (hit.cosine, hit.bm25, hit.neural, hit.surprise)), _age(hit.age)]
        table.add_row("yes" if hit.record.id in used else "", *figures, hit.record.id[:8], _one_line(hit.record.text))
    if turn.found:
        _print(table)
    else:
        typer.echo(f"Nothing was recalled{': ' + turn.found.note if turn.found.note else ''}.")
    if turn.found.below:
        typer.echo(f"{turn.found.below} below the threshold.")


def _memories(talk: Conversation, words: str) -> Table:
    scope = talk.scope
    if words:
        found = talk.memory.search(
            words, user=scope.user, agent=scope.agent, session=scope.session, limit=LISTED, count_uses=False
        )
        records = [hit.record for hit in found]
    else:
        records = talk.memory.records(user=scope.user, agent=scope.agent, session=scope.session, limit=LISTED)
    table = _table("id", "date", "who", "surprise", "text")
    for record in records:
        who, surprise = record.role or "", f"{record.surprise:.3f}"
        table.add_row(record.id[:8], record.created[:10], who, surprise, _one_line(record.text))
    return table


def _forget(talk: Conversation, which: str, confirm: Callable[[str], bool]) -> None:
    if which == "all":
        if confirm(f"Erase every memory of {talk.scope}?"):
            typer.echo(f"{talk.forget_all():,} memories erased.")
        return
    if not which:
        raise ValueError("/forget takes the id of a memory, or all; /memories lists them")
    record = _find(talk, which)
    talk.forget(record.id)
    typer.echo(f"Erased: {_one_line(record.text)}")


def _find(talk: Conversation, start: str) -> Record:
    """The only record of the talk's scope whose id begins so."""
    found = [record for record in _all(talk) if record.id.startswith(start)]
    if len(found) != 1:
        many = "no memory has" if not found else f"{len(found)} memories have"
        raise ValueError(f"{many} an id that begins with {start!r}; /memories lists them")
    return found[0]


def _all(talk: Conversation) -> Iterator[Record]:
    scope = talk.scope
    yield from talk.memory.records(user=scope.user, agent=scope.agent, session=scope.session, limit=1_000_000)


def _confirm(question: str) -> bool:
    return input(f"{question} yes or no: ").strip().lower() in ("y", "yes")


def _table(*columns: str) -> Table:
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 0, 0))
    for name in columns:
        table.add_column(name, no_wrap=name != "text", overflow="fold")
    return table


def _print(table: Table) -> None:
    from rich.console import Console

    console = Console(markup=False, highlight=False)
    if not console.is_terminal:
        console.width = WIDTH
    console.print(table)


def _figure(value: Any) -> str:
    return "" if value is None else f"{value:.3f}"


def _age(seconds: float) -> str:
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(seconds, 0):.0f} s"


def _one_line(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= SHOWN else line[:SHOWN] + "…"


def _note(words: str) -> None:
    """Beside the answer, so that what is piped on is the answer alone."""
    typer.echo(words, err=True)


def _complain(error: ValueError) -> None:
    _note(f"titans: {' '.join(str(error).split()).rstrip('.')}.")
