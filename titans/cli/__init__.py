"""The `titans` command: one file per verb, and errors of one sentence."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from titans.cli import (
    adapt,
    bench,
    chat,
    demo,
    eval,
    experiment,
    forecast,
    generate,
    inspect,
    mcp,
    memory,
    prepare,
    recall,
    remember,
    report,
    serve,
    text,
    tokenizer,
    train,
)

app = typer.Typer(
    name="titans",
    help="Sequence models with a memory that learns at test time.",
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(adapt.app, name="adapt")
app.add_typer(bench.app, name="bench")
app.add_typer(experiment.app, name="experiment")
app.add_typer(forecast.app, name="forecast")
app.add_typer(memory.app, name="memory")
app.add_typer(serve.app, name="serve")
app.add_typer(text.app, name="text")
app.command("chat")(chat.chat)
app.command("demo")(demo.demo)
app.command("eval")(eval.evaluate)
app.command("generate")(generate.generate)
app.command("inspect")(inspect.inspect)
app.command("mcp")(mcp.mcp)
app.command("prepare")(prepare.prepare)
app.command("recall")(recall.recall)
app.command("remember")(remember.remember)
app.command("report")(report.report)
app.command("tokenizer")(tokenizer.tokenizer)
app.command("train", context_settings=train.FLAGS)(train.train)


def _print_version(wanted: bool) -> None:
    if wanted:
        from titans import __version__

        typer.echo(f"titans {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True),
    ] = False,
) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit: 0, 2 for a wrong argument or file (one sentence on stderr), 130 for Ctrl-C."""
    try:
        code = app(args=list(arguments) if arguments is not None else None, prog_name="titans", standalone_mode=False)
    except (KeyboardInterrupt, typer.Abort):
        code = 130
    except OSError as error:
        known = error.strerror is not None and error.filename is not None
        words = f"{error.filename}: {error.strerror}." if known else str(error)
        typer.echo(f"titans: {' '.join(words.split())}", err=True)
        code = 2
    except Exception as error:
        # What typer raises for a wrong argument has no public base class, but it always has words for it.
        format_message = getattr(error, "format_message", None)
        if format_message is None:
            raise
        typer.echo(f"titans: {' '.join(format_message().split())}", err=True)
        code = 2
    if code == 130:
        typer.echo("titans: interrupted.", err=True)
    sys.exit(code if isinstance(code, int) else 0)
