"""`meanformer cite`: BibTeX of the theorems behind an experiment."""

from typing import Annotated

import typer

from meanformer.cli.app import EXPERIMENTS, app


@app.command(rich_help_panel=EXPERIMENTS)
def cite(
    name: Annotated[str, typer.Argument(help="Name of an experiment.")],
) -> None:
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
