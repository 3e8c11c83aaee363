"""`meanformer limit`: what tokens tend to, predicted and found."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from meanformer.cli import signals, terminal
from meanformer.cli.app import SIMULATIONS, app


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
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object and nothing else.")
    ] = False,
) -> None:
    """Say what tokens tend to: from the matrices alone, and by following them.

    Of the file only the tables tokens and attention count. Exit code 1 if prediction
    and tokens disagree.
    """
    from meanformer.experiments.framework import environment
    from meanformer.observables import predict_limit

    with environment.computing():
        layer, cloud = _given(config)
        if predict:
            prediction = predict_limit(layer)
            _tell(_prediction(prediction), str(prediction), as_json)
            return
        report = _followed(layer, cloud, depth)
    agrees = report.agrees
    found = _prediction(report.prediction) | {"found": _detection(report.detection)}
    _tell(found | {"agrees": agrees}, str(report), as_json)
    raise typer.Exit(1 if agrees is False else 0)


def _given(config: Path) -> tuple[Any, Any]:
    from meanformer.observables.limits.prediction import attention_of
    from meanformer.storage.config import build, read_config
    from meanformer.storage.words import mistakes_of_a_file

    with mistakes_of_a_file():
        tables = read_config(config)
        kept = {
            name: tables[name]
            for name in ("tokens", "attention", "flow")
            if name in tables
        }
        run = build(kept | {"solve": {"depth": 1.0}}, config.parent)
        return attention_of(run.flow), run.measure


def _followed(layer: Any, cloud: Any, depth: float | None) -> Any:
    from meanformer.observables import find_limit

    with terminal.progress_bar("following tokens") as update:
        progress = terminal.solve_progress(update)
        return find_limit(layer, cloud, depth=depth, progress=progress)


def _prediction(prediction: Any) -> dict[str, Any]:
    values = prediction.spectrum.eigenvalues
    return {
        "predicted": prediction.geometry,
        "status": prediction.status,
        "reason": prediction.reason,
        "eigenvalues": [[value.real, value.imag] for value in values.tolist()],
        "gap": prediction.gap,
        "alignment": prediction.alignment,
        "definiteness": prediction.definiteness,
        "codimension": prediction.codimension,
        "failures": prediction.failures,
    }


def _detection(detection: Any) -> dict[str, Any]:
    def listed(array: Any) -> Any:
        return None if array is None else array.tolist()

    return {
        "geometry": detection.geometry,
        "verdict": detection.verdict,
        "reason": detection.reason,
        "depth": detection.depth,
        "leaders": listed(detection.leaders),
        "follows": listed(detection.follows),
        "vertices": listed(detection.vertices),
        "offsets": listed(detection.offsets),
        "residual": detection.residual,
        "exponent": detection.exponent,
    }


def _tell(facts: dict[str, Any], words: str, as_json: bool) -> None:
    typer.echo(json.dumps(facts, allow_nan=False) if as_json else words)
