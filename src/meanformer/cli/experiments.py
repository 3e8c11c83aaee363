"""`meanformer experiments`, `cite`: what there is to run, and what it rests on."""

import json
from typing import Annotated, Any

import typer

from meanformer.cli import terminal
from meanformer.cli.app import EXPERIMENTS, AsJson, Only, app


@app.command(rich_help_panel=EXPERIMENTS)
def experiments(only: Only = None, as_json: AsJson = False) -> None:
    """List the experiments: name, claims, paper, room, run time."""
    from meanformer.experiments.framework import registry

    found = registry.select(only)
    if as_json:
        facts = {"experiments": [_facts(one) for one in found]}
        typer.echo(json.dumps(facts, indent=1))
        return
    out = terminal.console()
    for one in found:
        _print(one, out)
    plural = "s" * (len(found) != 1)
    typer.echo(f"{len(found)} experiment{plural}; run one with: meanformer run NAME")


def _print(experiment: Any, out: Any) -> None:
    from rich.markup import escape

    from meanformer.experiments.framework.text import to_plain

    facts = _facts(experiment)
    title = f"[bold]{facts['name']}[/bold]  {escape(to_plain(experiment.title))}"
    terminal.show(title, out)
    for claim in experiment.claims:
        statement = escape(to_plain(claim.statement))
        terminal.show(f"  {statement} [dim]({claim.status})[/dim]", out)
    settings = vars(experiment.settings("quick"))
    chosen = ", ".join(f"{name}={value}" for name, value in settings.items())
    terminal.show(f"  [dim]--set {escape(chosen)}[/dim]", out)
    papers = "; ".join(facts["papers"]) or "no paper"
    line = f"  [dim]{papers} · {facts['room']} · about {facts['seconds']:.0f} s[/dim]"
    terminal.show(line + "\n", out)


def _facts(experiment: Any) -> dict[str, Any]:
    from meanformer.experiments.framework import citations
    from meanformer.experiments.framework.settings import as_json
    from meanformer.experiments.framework.workers import estimate

    known = citations.bibliography(citations.bibliography_file())
    keys = [ref.key for claim in experiment.claims for ref in claim.references]
    return {
        **_picked(experiment, "name title room"),
        "seconds": estimate(experiment, "quick"),
        "papers": [known[k].short if k in known else k for k in dict.fromkeys(keys)],
        "parameters": as_json(experiment.settings()),
        "claims": [
            _picked(claim, "id statement status reference")
            for claim in experiment.claims
        ],
    }


def _picked(thing: Any, names: str) -> dict[str, Any]:
    return {name: getattr(thing, name) for name in names.split()}


@app.command(rich_help_panel=EXPERIMENTS)
def cite(name: Annotated[str, typer.Argument(help="Name of an experiment.")]) -> None:
    """Print the BibTeX entries that the claims of an experiment rest on."""
    from meanformer.experiments.framework import citations, registry

    experiment = registry.find(name)
    entries = citations.entries_behind(experiment)
    for claim in experiment.claims:
        for reference in claim.references:
            place = f", {reference.place}" if reference.place else ""
            typer.echo(f"% {claim.id} ({claim.status}): {reference.key}{place}")
    for entry in entries:
        typer.echo(f"\n{entry.bibtex}")
    if not entries:
        typer.echo(f"% {name} cites no publication.")
