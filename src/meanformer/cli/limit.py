"""`meanformer limit`: what tokens tend to, predicted and found."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from meanformer.cli import signals, terminal
from meanformer.cli.app import SIMULATIONS, AsJson, app


@app.command(rich_help_panel=SIMULATIONS)
@signals.apart
def limit(
    config: Annotated[
        Path,
        typer.Argument(
            metavar="CONFIG.toml", help="Tokens and one softmax attention layer."
        ),
    ],
    predict: Annotated[
        bool, typer.Option("--predict", help="Look at the matrices only.")
    ] = False,
    depth: Annotated[
        float | None, typer.Option(help="How far to follow the tokens at most.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Say what tokens tend to: from the matrices alone, and by following them.

    Of the file only the tables tokens and attention count. Exit code 1 if prediction
    and tokens disagree.
    """
    from meanformer.experiments.framework import environment
    from meanformer.observables import find_limit, predict_limit

    with environment.computing():
        layer, cloud = _given(config)
        if predict:
            prediction = predict_limit(layer)
            _tell(_prediction(prediction), str(prediction), as_json)
            return
        with terminal.progress_bar("following tokens") as update:
            progress = terminal.solve_progress(update)
            report = find_limit(layer, cloud, depth=depth, progress=progress)
    agrees = report.agrees
    found = _prediction(report.prediction) | {"found": _detection(report.detection)}
    _tell(found | {"agrees": agrees}, str(report), as_json)
    raise typer.Exit(1 if agrees is False else 0)


def _given(config: Path) -> tuple[Any, Any]:
    from meanformer.errors import check
    from meanformer.observables.limits.prediction import attention_of
    from meanformer.storage.config import build, read_config

    tables = read_config(config)
    check("tokens" in tables, "limit follows tokens; the file must have [tokens].")
    wanted = ("tokens", "attention", "flow")
    kept = {name: table for name, table in tables.items() if name in wanted}
    run = build(kept | {"solve": {"depth": 1.0}}, config.parent)
    return attention_of(run.flow), run.measure


def _prediction(prediction: Any) -> dict[str, Any]:
    values = prediction.spectrum.eigenvalues
    names = "status reason gap alignment definiteness codimension failures"
    return {
        "predicted": prediction.geometry,
        "eigenvalues": [[value.real, value.imag] for value in values.tolist()],
        **{name: getattr(prediction, name) for name in names.split()},
    }


def _detection(detection: Any) -> dict[str, Any]:
    plain = "geometry verdict reason depth residual exponent"
    arrays = "leaders follows vertices offsets"
    found = {name: getattr(detection, name) for name in arrays.split()}
    return {
        **{name: getattr(detection, name) for name in plain.split()},
        **{name: a if a is None else a.tolist() for name, a in found.items()},
    }


def _tell(facts: dict[str, Any], words: str, as_json: bool) -> None:
    typer.echo(json.dumps(facts, allow_nan=False) if as_json else words)
