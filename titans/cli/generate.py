"""`titans generate`: continue a text, after a document of any length whose memory can be kept in a file."""

from __future__ import annotations

import json
import os
import secrets
import sys
import time
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from titans.cli.common import Device, bar, require
from titans.files import finite

if TYPE_CHECKING:
    from titans.models.generation import Session

DTYPES = ("float32", "bfloat16", "float16", "float64")


def generate(
    model: Annotated[str, typer.Argument(help="A folder with a saved model, or a name on the hub.")],
    prompt: Annotated[str | None, typer.Argument(help="The text to continue; - reads standard input.")] = None,
    file: Annotated[Path | None, typer.Option(help="Read the prompt from this file; - reads standard input.")] = None,
    context: Annotated[Path | None, typer.Option(help="Read this document first; it may have any length.")] = None,
    memory: Annotated[
        Path | None, typer.Option(help="Continue from what was read into this file; --context adds to it.")
    ] = None,
    save_memory: Annotated[
        bool, typer.Option("--save-memory", help="Add the prompt and the answer to --memory too.")
    ] = False,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Write at most this many tokens.")] = 200,
    temperature: Annotated[
        float, typer.Option(help="How random the choice is; below 1, likely tokens become likelier.")
    ] = 0.8,
    top_k: Annotated[int | None, typer.Option(min=1, help="Choose among this many of the likeliest tokens.")] = None,
    top_p: Annotated[
        float | None, typer.Option(help="Sample from the likeliest tokens whose probabilities add up to this.")
    ] = None,
    greedy: Annotated[bool, typer.Option("--greedy", help="Always choose the likeliest token.")] = False,
    repetition_penalty: Annotated[float, typer.Option(help="Above 1, earlier tokens become less likely.")] = 1.0,
    seed: Annotated[
        int | None, typer.Option(min=0, help="The seed of the choices; default: a new one each time.")
    ] = None,
    stop: Annotated[list[str], typer.Option(help="Stop before this text; may be repeated.")] = [],  # noqa: B006
    echo: Annotated[bool, typer.Option(help="Print the prompt before the answer.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object at the end instead.")] = False,
    device: Device = "auto",
    dtype: Annotated[
        str | None, typer.Option(help=f"The type of the weights: {', '.join(DTYPES)}; default: as saved.")
    ] = None,
) -> None:
    """Continue a text. A document can be read first, in constant memory, and what was read can be kept for later."""
    text = _read_prompt(prompt, file)
    _check_memory(memory, writes=save_memory or context is not None)
    if not all(stop):
        raise typer.BadParameter("--stop takes a text of at least one character.")
    if save_memory and memory is None:
        raise typer.BadParameter("--save-memory needs --memory with the file to save to.")
    require("generate", "transformers", "models")
    if context is not None:
        _check_context(context)

    from titans.models.generation import Sampling, Session, check_keeps_memory

    report: dict[str, Any] = {"context_tokens": 0, "context_tokens_per_second": None}
    try:
        sampling = Sampling(
            temperature, top_k, top_p, greedy, repetition_penalty, secrets.randbits(32) if seed is None else seed
        )
        kept = memory if memory is not None and memory.exists() else None
        session = Session.load(model, kept, device, _numbers(dtype))
        if memory is not None:
            check_keeps_memory(session.model, model)
        if kept is not None:
            _say(f"{_kept(session, kept)}.")
        ids = session.encode(text or "", first=context is None)  # before the long reading, and not after it
        if context is not None:
            report |= _read_context(session, context, memory)
        if text is not None or context is None or memory is None:
            answer = _answer(session, ids, max_new_tokens, sampling, stop, text if echo else None, as_json)
            report |= {"prompt_tokens": len(ids), "seed": sampling.seed, **answer}
            if save_memory:
                session.settle().save(memory)
    except ValueError as error:
        raise typer.BadParameter(f"{str(error).rstrip('.')}.") from error
    if as_json:
        _write(json.dumps(finite(report), ensure_ascii=False, allow_nan=False) + "\n")


def _read_prompt(prompt: str | None, file: Path | None) -> str | None:
    if prompt is not None and file is not None:
        raise typer.BadParameter("give the prompt, or --file with a file that holds it, and not both.")
    if prompt == "-" or str(file) == "-":
        data = sys.stdin.buffer.read()
    elif file is not None:
        data = file.read_bytes()
    elif prompt is not None:
        data = os.fsencode(prompt)
    else:
        return None
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise typer.BadParameter(f"the prompt is not UTF-8 at byte {error.start:,}.") from None


def _check_memory(path: Path | None, writes: bool) -> None:
    """Refuses a file before the work, not after it."""
    if path is None:
        return
    if path.is_dir():
        raise typer.BadParameter(f"{path} is a directory, a file name is needed.")
    if not path.exists() and not writes:
        raise typer.BadParameter(f"{path} is not there; --context or --save-memory would make it.")
    if writes and not os.access(path.absolute().parent, os.W_OK):
        raise typer.BadParameter(f"{path} cannot be written: {path.absolute().parent} is not a directory to write in.")


def _check_context(path: Path) -> None:
    """Refuses a bad file: reading it with a model takes far longer, and might fail at its very end."""
    from titans.models.text import read_text

    if path.exists() and not path.is_file() and not path.is_dir():
        return  # a pipe can be read only once
    try:
        with path.open("rb", buffering=0) as file:
            if not sum(1 for _ in read_text(file, str(path))):
                raise ValueError(f"{path} is empty")
    except ValueError as error:
        raise typer.BadParameter(f"{error}.") from error


def _numbers(dtype: str | None) -> Any:
    """The type of the weights; None: as saved."""
    import torch

    if dtype is not None and dtype not in DTYPES:
        raise ValueError(f"--dtype is {dtype}; expected one of {', '.join(DTYPES)}")
    return None if dtype is None else getattr(torch, dtype)


def _read_context(session: Session, path: Path, memory: Path | None) -> dict[str, Any]:
    """Reads a document, with a progress bar, and keeps it in ``memory`` once it has been read whole."""
    from titans.models.text import read_text

    if session.reader.grows:
        _say(f"the cache of a {session.model.config.model_type} model grows with the context.")
    size = path.stat().st_size or None  # that of a pipe is not known
    start = time.perf_counter()
    try:
        with path.open("rb", buffering=0) as file, bar("reading", size) as move:

            def show(count: int) -> None:
                rate = count / (time.perf_counter() - start)
                move(file.tell() if size else 0, size, f"reading: {count:,} tokens, {rate:,.0f} tokens/s")

            blocks = read_text(file, str(path))
            first = next(blocks, None)
            if first is None:
                raise ValueError(f"{path} is empty")
            count = session.read(chain([first], blocks), on_piece=show)
    except KeyboardInterrupt:
        if memory is not None:
            state = "as it was" if memory.exists() else "not written"
            _say(f"{path} was not read to its end: {memory} is {state}.")
        raise
    seconds = time.perf_counter() - start
    done = f"read {count:,} tokens of {path} in {seconds:,.1f} s, {count / seconds:,.0f} a second"
    if memory is not None:
        session.cache.save(memory)
        done += f"; {_kept(session, memory)}"
    _say(f"{done}.")
    return {"context_tokens": count, "context_tokens_per_second": count / seconds}


def _answer(
    session: Session,
    ids: list[int],
    max_new_tokens: int,
    sampling: Any,
    stops: list[str],
    echo: str | None,
    quiet: bool,
) -> dict[str, Any]:
    """Writes an answer as it comes, unless ``quiet``."""
    shown = echo or ""
    if not quiet:
        _write(shown)
    try:
        answer = session.answer(ids, max_new_tokens, sampling, stops, None if quiet else _write)
    except KeyboardInterrupt:
        if not quiet:
            _write("\n")
        raise
    if not quiet:
        _write("\n")
    return {
        "text": shown + answer.text,
        "tokens": answer.tokens,
        "new_tokens": len(answer.tokens),
        "finish": answer.finish,
        "tokens_per_second": answer.tokens_per_second,
    }


def _kept(session: Session, memory: Path) -> str:
    return f"{memory} holds {session.cache.seen:,} tokens in {memory.stat().st_size:,} bytes"


def _say(words: str) -> None:
    typer.echo(f"titans: {words}", err=True)


def _write(text: str) -> None:
    """To standard output, at once and in UTF-8, whatever the terminal believes in."""
    typer.echo(text.encode(), nl=False)
