"""The command line as a whole: finding the commands, exit codes, error sentences.

A command is a file in this folder that decorates a function with `@app.command`. It
imports what is heavy inside that function, so that `meanformer --help` stays instant.

Exit codes: 0 all claims hold, 1 one does not, 2 bad input, 130 interrupted.
"""

import importlib
import importlib.metadata
import io
import pkgutil
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

# Typer exports only this subclass of what it raises for a wrong command line.
UsageError = typer.BadParameter.__bases__[0]

EXPERIMENTS = "Experiments"
SIMULATIONS = "Runs of your own"
HELP = "About"
PANELS = (EXPERIMENTS, SIMULATIONS, HELP)

BAD_INPUT = 2
INTERRUPTED = 130


class Commands(TyperGroup):
    """All commands; a user's mistake becomes one sentence and exit code 2."""

    def list_commands(self, ctx: typer.Context) -> list[str]:
        """Names in the order of the help: panel by panel, the main job first."""
        order = {name: place for place, name in enumerate(PANELS)}

        def rank(name: str) -> tuple:
            panel = order.get(str(self.commands[name].rich_help_panel), len(order))
            return panel, name != "atlas", name

        return sorted(self.commands, key=rank)

    def main(self, *args: Any, standalone_mode: bool = True, **options: Any) -> Any:
        """Run the command line and leave with the right code."""
        try:
            code = super().main(*args, standalone_mode=False, **options)
        except UsageError as error:
            complain(error.format_message())
            code = BAD_INPUT
        except Exception as error:
            if not is_users_mistake(error):
                raise
            complain(str(error))
            code = BAD_INPUT
        except KeyboardInterrupt:
            code = INTERRUPTED
        sys.exit(code or 0)


app = typer.Typer(
    name="meanformer",
    cls=Commands,
    invoke_without_command=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def show_version(is_wanted: bool) -> None:
    """Print the version and leave."""
    if is_wanted:
        typer.echo(f"meanformer {importlib.metadata.version('meanformer')}")
        raise typer.Exit


@app.callback()
def describe(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            help="Print the version and leave.",
            callback=show_version,
            is_eager=True,
        ),
    ] = False,
) -> None:
    """Transformers as maps between probability measures: theorems checked and drawn.

    Start with [bold]meanformer atlas[/bold].
    """
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def main() -> None:
    """Entry point of the `meanformer` command."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    app()


def load_commands() -> None:
    """Import every file of this folder; each registers its command."""
    for module in pkgutil.iter_modules([str(Path(__file__).parent)]):
        importlib.import_module(f"meanformer.cli.{module.name}")


def complain(sentence: str) -> None:
    """One sentence on standard error."""
    typer.echo(f"meanformer: {' '.join(sentence.split())}", err=True)


def is_users_mistake(error: Exception) -> bool:
    """Whether an exception is the library's way to say that an input was wrong."""
    from meanformer.errors import InvalidInput

    return isinstance(error, InvalidInput)
