"""The command line as a whole: finding the commands, exit codes, error sentences.

A command is a file in this folder that decorates a function with `@app.command`. It
imports what is heavy inside that function, so that `meanformer --help` stays instant.

Exit codes: 0 all claims hold, or a simulation ended (also early, with a line that says
why); 1 a claim does not hold, or writing failed; 2 bad input; 130 interrupted.
"""

import importlib
import importlib.metadata
import io
import pkgutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, cast

import typer
from typer.core import TyperGroup

from meanformer.cli import signals

# Typer exports only this subclass of what it raises for a wrong command line.
UsageError = cast(type[typer.BadParameter], typer.BadParameter.__bases__[0])

EXPERIMENTS = "Experiments"
SIMULATIONS = "Runs of your own"
HELP = "About"
PANELS = (EXPERIMENTS, SIMULATIONS, HELP)

# Options that several commands have.
Only = Annotated[
    str | None, typer.Option(help="Patterns of names, like 'radius*|sinkhorn*'.")
]
AsJson = Annotated[
    bool, typer.Option("--json", help="Print one JSON object and nothing else.")
]

BAD_INPUT = 2
INTERRUPTED = 130
TERMINATED = 143


class Commands(TyperGroup):
    """All commands; a user's mistake becomes one sentence and exit code 2."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Names in the order of the help: panel by panel, the main job first."""
        order = {name: place for place, name in enumerate(PANELS)}

        def rank(name: str) -> tuple:
            panel = vars(self.commands[name]).get("rich_help_panel")
            return order.get(panel, len(order)), name != "atlas", name

        return sorted(self.commands, key=rank)

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        **options: Any,
    ) -> Any:
        """Run the command line and leave with the right code; show help if empty."""
        words = list(sys.argv[1:] if args is None else args) or ["--help"]
        try:
            code = super().main(words, prog_name, standalone_mode=False)
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
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def show_version(is_wanted: bool) -> bool:
    """Print the version and leave, if that is wanted."""
    if is_wanted:
        typer.echo(f"meanformer {importlib.metadata.version('meanformer')}")
        raise typer.Exit
    return is_wanted


@app.callback()
def describe(
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


def main() -> None:
    """Entry point of the `meanformer` command."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    signals.heed()
    try:
        app()
    except SystemExit as leaving:
        if leaving.code in (INTERRUPTED, TERMINATED):
            signals.abandon(leaving.code)
        raise


def load_commands() -> None:
    """Import every file of this folder; each registers its command."""
    for module in pkgutil.iter_modules([str(Path(__file__).parent)]):
        importlib.import_module(f"meanformer.cli.{module.name}")


def complain(sentence: str) -> None:
    """One sentence on standard error."""
    typer.echo(f"meanformer: {' '.join(sentence.split())}", err=True)


def is_users_mistake(error: Exception) -> bool:
    """Whether an exception is the library's way to say that an input was wrong."""
    from meanformer.errors import InvalidInput, Overflow

    return isinstance(error, (InvalidInput, Overflow))
