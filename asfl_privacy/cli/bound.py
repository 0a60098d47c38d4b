"""`bound`: the certified sensitivity of a head."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Annotated

import typer
from torch import nn

import sensitivity
from asfl_privacy.cli.bound_head import Subject, find_subject
from asfl_privacy.cli.bound_table import layer_rows, norm_rows, print_layers, print_norms
from asfl_privacy.cli.budget import Json, show
from asfl_privacy.config import NORMS

METHODS = ("auto", "fast", "product")


def bound(
    *,
    model: Annotated[
        str, typer.Option("--model", metavar="NAME|module:factory", help="Network, or a head as it is.")
    ] = "small-cnn",
    data: Annotated[
        str | None, typer.Option("--data", metavar="NAME|module:name", help="Gives the input shape. [digits]")
    ] = None,
    input_shape: Annotated[
        str | None, typer.Option("--input-shape", metavar="C,H,W", help="Shape of one record, instead of --data.")
    ] = None,
    until: Annotated[
        str, typer.Option("--until", "--exchange-layer", metavar="auto|NAME", help="Block that ends the head.")
    ] = "auto",
    p: Annotated[str, typer.Option("-p", "--p", metavar="1|2|inf", help="Norm of the inputs.")] = "2",
    q: Annotated[str, typer.Option("-q", "--q", metavar="1|2|inf", help="Norm of the outputs.")] = "2",
    all_norms: Annotated[
        bool, typer.Option("--all-norms", help="All nine norms for every possible exchange layer.")
    ] = False,
    method: Annotated[
        str, typer.Option("--method", metavar="|".join(METHODS), help="Of sensitivity.certify.")
    ] = "auto",
    budget: Annotated[float, typer.Option("--budget", metavar="SECONDS", help="Work for tightening.")] = 10.0,
    box: Annotated[
        str | None, typer.Option("--box", metavar="LOW,HIGH", help="Range of every input value; default: any.")
    ] = None,
    seed: Annotated[int, typer.Option("--seed", metavar="S", help="Seed of the initial weights.")] = 0,
    search: Annotated[
        bool, typer.Option("--search/--no-search", help="Search for a lower bound, which shows how tight the value is.")
    ] = True,
    data_root: Annotated[str, typer.Option("--data-root", metavar="DIR", help="Folder of data sets.")] = "data",
    as_json: Json = False,
) -> None:
    """A proven bound on how far two inputs at p-distance 1 can move the head's output in q-norm.

    A factory that takes num_classes makes a network, which is split; any other makes a head, bounded whole or up to
    --until. Examples:

    asfl-privacy bound --model small-cnn --p 2 --q 2

    asfl-privacy bound --model my_module:make_head --input-shape 1,28,28 --all-norms
    """
    for name, norm in (("p", p), ("q", q)):
        if norm not in NORMS:
            raise ValueError(f"{name} {norm!r} is no norm; use {', '.join(NORMS)}")
    if method not in METHODS:
        raise ValueError(f"method {method!r} is unknown; use {', '.join(METHODS)}")
    if not 0 <= seed < 2**63:
        raise ValueError(f"seed {seed} must be a whole number from 0 on, below 2^63; give for example 0")
    if not (math.isfinite(budget) and budget > 0.0):
        raise ValueError(f"budget {budget} must be a positive number of seconds; give for example 10")
    input_box = None if box is None else _box(box)
    if all_norms and method == "product":
        raise ValueError("method 'product' needs p = q, and --all-norms asks for all nine; use auto or fast")
    if all_norms and input_box is not None:
        raise ValueError(f"box {box} has no effect with --all-norms; leave one of them out")
    subject = find_subject(
        model,
        data=data,
        data_root=Path(data_root),
        input_shape=None if input_shape is None else _shape(input_shape),
        seed=seed,
    )
    started = time.perf_counter()
    if all_norms:
        rows = norm_rows(subject, _ends(subject, until), method=method, budget_s=budget)
        seconds = round(time.perf_counter() - started, 3)
        if as_json:
            show({"all_norms": rows, "method": method, "seconds": seconds}, as_json=True)
            return
        print_norms(rows)
        show({"method": method, "seconds": seconds}, as_json=False)
        return
    exchange_layer, head = subject.head(until)
    certificate = sensitivity.certify(
        head,
        p=NORMS[p],
        q=NORMS[q],
        input_shape=subject.input_shape,
        input_box=input_box,
        method=method,
        budget_s=budget,
        search=search,
    )
    found = certificate.lower_bound
    layers = layer_rows(certificate)
    numbers: dict[str, object] = {
        "value": certificate.value,
        "p": p,
        "q": q,
        "exchange_layer": exchange_layer or None,
        "lower_bound": found,
        "tightness": None if not found else certificate.value / found,
        "method": certificate.method,
        "slack": certificate.slack,
        "layers": layers,
        "seconds": round(time.perf_counter() - started, 3),
    }
    if as_json:
        show(numbers, as_json=True)
        return
    show({name: value for name, value in numbers.items() if value is not None and name != "layers"}, as_json=False)
    print_layers(layers)


def _ends(subject: Subject, until: str) -> tuple[str, ...]:
    """Blocks at which heads may end, up to the one asked for, if any; "" stands for the whole model."""
    names = subject.exchange_layers
    if until != "auto":
        subject.head(until)  # refuses a name that is no block
        return names[: names.index(until) + 1]
    is_sequence = type(subject.model) is nn.Sequential and len(names) > 0  # its last block ends the whole of it
    return names if subject.has_tail or is_sequence else (*names, "")


def _shape(text: str) -> tuple[int, ...]:
    sizes = [part.strip() for part in text.split(",")]
    if not all(size.isascii() and size.isdigit() and int(size[:12]) > 0 for size in sizes):
        raise ValueError(
            f"input shape {text!r} must be whole numbers from 1 on, separated by commas; give for example 1,28,28"
        )
    return tuple(int(size) for size in sizes)


def _box(text: str) -> tuple[float, float]:
    try:
        low, high = (float(side) for side in text.split(","))
    except ValueError:
        low, high = math.nan, math.nan
    if not low <= high:
        raise ValueError(f"box {text!r} must be two numbers LOW,HIGH with LOW ≤ HIGH; give for example 0,1")
    return low, high
