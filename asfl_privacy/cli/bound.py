"""`bound`: the certified sensitivity of a head."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

import sensitivity
from asfl_privacy.accounting.checks import norm_word
from asfl_privacy.cli.budget import Json, show
from asfl_privacy.config import NORMS
from asfl_privacy.data import load_dataset
from asfl_privacy.models import build_model, split_model


def bound(
    *,
    data: Annotated[str, typer.Option("--data", metavar="NAME|module:name", help="Gives the input shape.")] = "digits",
    model: Annotated[str, typer.Option("--model", metavar="NAME|module:factory", help="Network.")] = "small-cnn",
    exchange_layer: Annotated[
        str, typer.Option("--exchange-layer", metavar="auto|NAME", help="Block that ends the head.")
    ] = "auto",
    p: Annotated[str, typer.Option("-p", "--p", metavar="1|2|inf", help="Norm of the inputs.")] = "2",
    q: Annotated[str, typer.Option("-q", "--q", metavar="1|2|inf", help="Norm of the outputs.")] = "2",
    seed: Annotated[int, typer.Option("--seed", metavar="S", help="Seed of the initial weights.")] = 0,
    search: Annotated[bool, typer.Option("--search", help="Search for a lower bound too.")] = False,
    data_root: Annotated[str, typer.Option("--data-root", metavar="DIR", help="Folder of data sets.")] = "data",
    as_json: Json = False,
) -> None:
    """A proven bound on how far two inputs at p-distance 1 can move the head's output in q-norm.

    Example: asfl-privacy bound --model small-cnn --p 2 --q 2 --search
    """
    for name, norm in (("p", p), ("q", q)):
        if norm not in NORMS:
            raise ValueError(f"{name} {norm!r} is no norm; use {', '.join(NORMS)}")
    if seed < 0:
        raise ValueError(f"seed {seed} must be a whole number from 0 on; give for example 0")
    records = load_dataset(data, root=Path(data_root))
    split = split_model(build_model(model, data=records, seed=seed), exchange_layer)
    started = time.perf_counter()
    certificate = sensitivity.certify(
        split.head.eval(), p=NORMS[p], q=NORMS[q], input_shape=records.input_shape, search=search
    )
    seconds = time.perf_counter() - started
    found = certificate.lower_bound
    numbers: dict[str, object] = {
        "value": certificate.value,
        "p": p,
        "q": q,
        "lower_bound": found,
        "tightness": None if not found else certificate.value / found,
        "method": certificate.method,
        "slack": certificate.slack,
        "layers": [
            {
                "name": layer.name,
                "kind": layer.kind,
                "p": norm_word(layer.p),
                "q": norm_word(layer.q),
                "value": layer.value,
            }
            for layer in certificate.layers
        ],
        "seconds": round(seconds, 3),
    }
    if not as_json:
        shown = [f"{layer.name} ({layer.kind}) {layer.value}" for layer in certificate.layers]
        numbers = {name: value for name, value in numbers.items() if value is not None} | {"layers": "; ".join(shown)}
    show(numbers, as_json=as_json)
