"""`titans chat`: talk to a language model that remembers."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from titans.cli.memory import (
    Agent,
    Encoder,
    Limit,
    Neural,
    Session,
    Store,
    User,
    covered_scopes,
    in_sentences,
    open_memory,
)

if TYPE_CHECKING:
    from rich.table import Table

    from titans.text.chat import Conversation
    from titans.text.records import Record

HELP = """\
/memories         list the newest memories; /memories WORDS: those that match
/forget ID        erase a memory for good (the start of its id is enough)
/forget all       erase all memories of exactly this user, agent and session
/why              show what was recalled for the last message, and why, and how surprising the message was
/help             show this
/quit             leave, as Ctrl-D does; Ctrl-C stops an answer
To send a message that begins with /, write //."""
LISTED = 20  # memories that /memories shows
SHOWN = 200  # characters of a memory in a table
WIDTH = 300  # of tables where there is no terminal


def chat(
    message: Annotated[
        str | None, typer.Option("--message", "-m", help="Send one message, print the answer, and exit.")
    ] = None,
    store: Store = None,
    user: User = "default",
    agent: Agent = None,
    session: Session = None,
    llm: Annotated[
        str,
        typer.Option(
            help="Model that answers: local, local:FILE.gguf, openai:MODEL, hf:FOLDER; none shows the prompt."
        ),
    ] = "local",
    base_url: Annotated[
        str | None, typer.Option(help="URL of an OpenAI-compatible server; by default OPENAI_BASE_URL.")
    ] = None,
    api_key: Annotated[
        str | None, typer.Option(help="Key for that server; by default, and safer, OPENAI_API_KEY.")
    ] = None,
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds to wait for that server.")] = 60.0,
    budget: Annotated[
        int, typer.Option(min=0, help="Tokens of a prompt that memories may take; 0: none are shown.")
    ] = 512,
    threshold: Annotated[
        float | None, typer.Option(help="Leave out memories whose cosine with the message is lower.")
    ] = None,
    system: Annotated[str | None, typer.Option(help="Text that begins every prompt.")] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Largest number of tokens of an answer.")] = 256,
    temperature: Annotated[
        float | None, typer.Option(min=0, help="Temperature; by default 0, or the server's own.")
    ] = None,
    show: Annotated[
        bool, typer.Option("--show", help="Show what is recalled and how surprising each message is.")
    ] = False,
    commands: Annotated[
        bool,
        typer.Option(
            "--commands", help="Obey lines that begin with / without a terminal, too; /forget all then does not ask."
        ),
    ] = False,
    limit: Limit = None,
    encoder: Encoder = None,
    neural: Neural = None,
) -> None:
    """Talk to a language model that remembers what was said, now and in earlier conversations.

    In a terminal, /help lists the commands. Without one, each line of the input is a message, whatever it begins with.
    """
    with in_sentences():
        from titans.text.chat import Conversation
        from titans.text.llm import make_llm
        from titans.text.records import Scope, check_text, check_threshold

        scope = Scope(user, agent, session)
        check_threshold(threshold)
        if message is not None:
            check_text(message, "message")
        with (
            closing(make_llm(llm, base_url, api_key, timeout)) as made,
            # Last, so that a wrong argument leaves no empty store behind.
            open_memory(store, "add", encoder=encoder, neural=neural, limit=limit) as memory,
        ):
            conversation = Conversation(memory, made, scope, budget, system, max_tokens, temperature, threshold)
            if message is not None:
                _answer(conversation, message, show)
            elif sys.stdin.isatty():
                _converse(conversation, show)
            elif not _read_all(conversation, show, commands):
                raise typer.Exit(2)


def _converse(conversation: Conversation, show: bool) -> None:
    """Reads messages from the terminal; whatever goes wrong with one, the conversation goes on."""
    with suppress(ImportError):
        import readline  # noqa: F401  (gives input() line editing and a history, which is not written to any file)
    typer.echo(f"{conversation.llm.name}, with the memory of {conversation.scope}. /help lists the commands.")
    while True:
        try:
            line = input("> ")
            if not _handle(conversation, line, show, _confirm):
                return
        except EOFError:
            typer.echo()
            return
        except KeyboardInterrupt:
            typer.echo()
        except ValueError as error:
            _complain(error)


def _read_all(conversation: Conversation, show: bool, commands: bool) -> bool:
    """Takes each line of the input as a message, or as in a terminal; False if something went wrong with one."""
    fine = True
    for data in sys.stdin.buffer:
        try:
            line = data.decode("utf-8").strip()
            if not commands:
                if line:
                    _answer(conversation, line, show)
            elif not _handle(conversation, line, show, lambda question: True):
                break
        except UnicodeDecodeError as error:
            _complain(ValueError(f"a line of the input is not valid UTF-8 at byte {error.start}"))
            fine = False
        except ValueError as error:
            _complain(error)
            fine = False
    return fine


def _handle(conversation: Conversation, line: str, show: bool, confirm: Callable[[str], bool]) -> bool:
    """Sends the message or does the command of a line; False if the command is to leave."""
    line = line.strip()
    if not line.startswith("/") or line.startswith("//"):
        if line:
            _answer(conversation, line.removeprefix("/") if line.startswith("//") else line, show)
        return True
    command, _, rest = line.partition(" ")
    rest = rest.strip()
    if command in ("/quit", "/exit"):
        return False
    if command == "/help":
        typer.echo(HELP)
    elif command == "/memories":
        _print(_memories(conversation, rest))
    elif command == "/forget":
        _forget(conversation, rest, confirm)
    elif command == "/why":
        _why(conversation)
    else:
        raise ValueError(f"there is no command {command}; expected /memories, /forget, /why, /help or /quit")
    return True


def _answer(conversation: Conversation, message: str, show: bool) -> None:
    """Sends a message and prints the answer as it comes; Ctrl-C stops it."""
    answer = conversation.turn(message)
    if show:
        _show_recall(conversation)
    begun = False
    with closing(answer):  # which stores the answer up to then
        try:
            for piece in answer:
                typer.echo(piece.encode(), nl=False)
                begun = True
        except ValueError as error:
            raise ValueError(f"{str(error).rstrip('.')}; the message is stored") from error
        finally:
            if begun:
                typer.echo()
    if show and conversation.last is not None and conversation.last.answer is not None:
        _note(f"surprise of the answer {conversation.last.answer.surprise:.3f}")


def _show_recall(conversation: Conversation) -> None:
    turn = conversation.last
    if turn is None or turn.prompt is None:
        return
    many = len(turn.prompt.used)
    _note(f"surprise {turn.message.surprise:.3f}; {many} of {many + turn.prompt.dropped} memories in the prompt")
    for hit in turn.prompt.used:
        _note(f"  {hit.score:.3f}  {hit.record.created[:10]}  {_one_line(hit.record.text)}")


def _why(conversation: Conversation) -> None:
    turn = conversation.last
    if turn is None:
        typer.echo("Nothing has been said yet.")
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


def _memories(conversation: Conversation, words: str) -> Table:
    scope = asdict(conversation.scope)
    if words:
        found = conversation.memory.search(words, **scope, limit=LISTED, count_uses=False)
        records = [hit.record for hit in found]
    else:
        records = conversation.memory.records(**scope, limit=LISTED)
    table = _table("id", "date", "who", "surprise", "text")
    for record in records:
        who, surprise = record.role or "", f"{record.surprise:.3f}"
        table.add_row(record.id[:8], record.created[:10], who, surprise, _one_line(record.text))
    return table


def _forget(conversation: Conversation, which: str, confirm: Callable[[str], bool]) -> None:
    if which == "all":
        memory, scope = conversation.memory, conversation.scope
        if confirm(f"Erase {covered_scopes(memory, scope).get(scope, 0):,} memories of exactly {scope}?"):
            count = conversation.forget_all()
            left = sum(covered_scopes(memory, scope).values())
            stay = f" {left:,} of its other agents and sessions stay; `titans memory delete-all --below` erases them."
            typer.echo(f"{count:,} memories erased.{stay if left else ''}")
        return
    if not which:
        raise ValueError("/forget takes the id of a memory, or all; /memories lists them")
    record = _find(conversation, which)
    conversation.forget(record.id)
    typer.echo(f"Erased: {_one_line(record.text)}")


def _find(conversation: Conversation, start: str) -> Record:
    """The only record of the conversation's scope whose id begins with ``start``."""
    records = conversation.memory.records(**asdict(conversation.scope), limit=1_000_000)
    found = [record for record in records if record.id.startswith(start)]
    if len(found) != 1:
        many = "no memory has" if not found else f"{len(found)} memories have"
        raise ValueError(f"{many} an id that begins with {start!r}; /memories lists them")
    return found[0]


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
    """Prints to standard error, so that a pipe gets the answer alone."""
    typer.echo(words, err=True)


def _complain(error: ValueError) -> None:
    _note(f"titans: {' '.join(str(error).split()).rstrip('.')}.")
