"""Figure 3: centroids of the classes in the latent space, client by client, and how far clients disagree about them.

A run is trained up to its last round, whose local work then all clients do, each from the same global network and exactly
as its method says. Training happens here and not in a kept run: run folders hold the global network alone, and SCAFFOLD,
MOON and others need what their clients keep. The last round, not one more after it, so that a learning rate that ends at 0
has not ended yet; all clients, not the cohort alone, so that a class has as many centroids as there are clients who have
it. What is measured of a run is kept beside the runs, as JSON.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Final, get_args

import numpy as np
from material import Measured
from numpy.typing import NDArray
from recipe import rate_of
from runs import OutOfTimeError, Runs, config_of, digest_of
from sklearn.manifold import TSNE

from asfl_privacy.cli.one_cell import one_cell
from asfl_privacy.config import SweepConfig
from asfl_privacy.configured_data import load_data
from asfl_privacy.execution import Progress, RunStoppedError, begin_run, run_rounds
from asfl_privacy.execution.choice import choose_executor, make_executor
from asfl_privacy.execution.local_results import local_networks
from asfl_privacy.federated import METHODS, Federation
from asfl_privacy.federated.latent_space import Centroids, Records, client_centroids, scatter
from asfl_privacy.federated.weights import Weights
from asfl_privacy.models import split_model
from asfl_privacy.models.build import block_names
from asfl_privacy.reporting.atomic import write_atomic
from asfl_privacy.reporting.records import Record
from asfl_privacy.run import federation_of, prepare_run

PERPLEXITY: Final = 30.0
MIN_RECORDS: Final = 5
Tables = dict[str, list[Record]]


def measure(fields: Mapping[str, Any], options: Mapping[str, Any], *, runs: Runs) -> Measured:
    """Centroids and their scatter under several methods.

    Args:
        fields: Of every run's configuration.
        options: `methods`, FedAvg among them; `rates` or `lr`; `seeds`; `min_records`, the fewest of a client's own
            that a centroid is a mean of.
        runs: Who trains, and where what was measured is kept.

    Returns:
        The tables `scatter` and `centroids`, the latter with places in the plane.

    Raises:
        ValueError: FedAvg is missing, rates with several exchange layers, or a run that failed, named.
        OutOfTimeError: The time for runs was over before any was measured.
    """
    methods, min_records = list(options["methods"]), options.get("min_records", MIN_RECORDS)
    if "fedavg" not in methods:
        raise ValueError("methods lack fedavg, which the others are compared with; add it")
    asked = _asked(fields, {method: rate_of(method, options) for method in methods})
    cells = [(method, seed, {**asked[method], "seed": seed}) for seed in range(options["seeds"]) for method in methods]
    for _, _, one in cells:
        config_of(one)
    terms = {"below": runs.folder, "min_records": min_records, "until": runs.until}
    parts: list[Callable[[], Tables]]
    if runs.pool is None:
        parts = [partial(measured, one, **terms) for _, _, one in cells]
    else:
        parts = [runs.pool.submit(measured, one, **terms).result for _, _, one in cells]
    tables: Tables = {"scatter": [], "centroids": []}
    missing = []
    for (method, seed, _), part in zip(cells, parts, strict=True):
        try:
            found = part()
        except OutOfTimeError:
            missing.append(f"{method}, seed {seed}")
            continue
        except ValueError as error:
            raise ValueError(f"latent space of {method}, seed {seed}: {error}") from error
        for table, records in found.items():
            tables[table] += records
    if not tables["scatter"]:
        raise OutOfTimeError
    return Measured(tables=tables, missing=missing)


def _asked(fields: Mapping[str, Any], rates: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Fields of each method's runs: all have the exchange layer that tuning gave to one, so that spaces are the same.

    The layer is what is measured after; it changes nothing of methods that do not cut the network.

    Raises:
        ValueError: Several exchange layers.
    """
    layers = [config_of({**fields, **own}).exchange_layer for own in rates.values() if "exchange_layer" in own]
    if len(set(layers)) > 1:
        raise ValueError(
            f"methods have exchange layers {' and '.join(sorted({one for layer in layers for one in layer}))}: ratios are "
            "compared in one space; name one layer, or leave one of these methods out"
        )
    layer = {"exchange_layer": list(layers[0])} if layers else {}
    return {method: {**fields, **own, **layer, "mech": ["none"], "method": [method]} for method, own in rates.items()}


def measured(fields: Mapping[str, Any], *, below: Path, min_records: int, until: float | None) -> Tables:
    """One run's part of both tables, trained unless it is there.

    Args:
        fields: Of the sweep's configuration, one value each.
        below: Folder of the runs.
        min_records: See `measure`.
        until: Time of the clock after which no run is begun, or None.

    Raises:
        ValueError: Whatever a phase refuses.
        OutOfTimeError: It is not there, and the time is over.
    """
    config = config_of({**fields, "evaluate_every": config_of(fields).rounds})
    path = below / "latent" / f"{config.methods[0]}-{digest_of(config)}-{min_records}.json"
    if path.is_file():
        kept: Tables = json.loads(path.read_text(encoding="utf-8"))
        return kept
    if until is not None and time.time() > until:
        raise OutOfTimeError
    federation, networks = trained(config)
    found = tables_of(federation, networks, config=config, min_records=min_records)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, json.dumps(found, ensure_ascii=False) + "\n")
    return found


def trained(config: SweepConfig) -> tuple[Federation, dict[int, Weights]]:
    """The networks of all clients after their local work of a run's last round.

    Args:
        config: Of one run.

    Returns:
        The federation and its clients' networks.

    Raises:
        ValueError: Whatever a phase refuses.
    """
    config, cell = one_cell(config, command="the latent space")
    data = load_data(config)
    run = prepare_run(config, cell, data=data)
    federation, method = federation_of(config, run, data=data), METHODS[run.cell.method]
    choice = choose_executor(config.executor, federation, method, workers=1)
    last, now = config.rounds - 1, begin_run(federation, ledger=None)

    def keep(progress: Progress) -> None:
        nonlocal now
        now = progress

    with make_executor(choice.name, federation, method) as executor:
        with suppress(RunStoppedError):
            run_rounds(
                federation,
                method,
                executor=executor,
                start=now,
                should_stop=lambda: now.rounds_done == last,
                after_round=keep,
            )
        networks = local_networks(
            now.state,
            range(len(federation.clients)),
            federation=federation,
            method=method,
            executor=executor,
            round=last,
        )
    return federation, networks


def tables_of(
    federation: Federation, networks: Mapping[int, Weights], *, config: SweepConfig, min_records: int
) -> Tables:
    """Scatter in both spaces on both kinds of records; centroids before the last layer, in the plane.

    The exchange layer is the configuration's for every method, also for those that never cut the network there.
    """
    names = block_names(federation.model)
    cut = split_model(federation.model, config.exchange_layer[0], input_shape=federation.input_shape)
    tables: Tables = {"scatter": [], "centroids": []}
    run: Record = {"method": config.methods[0], "seed": config.seed}
    for space, after in (("exchange", cut.exchange_layer), ("penultimate", names[-2])):
        for records in get_args(Records):
            centroids = client_centroids(
                federation,
                networks,
                after=after,
                records=records,
                min_records=min_records if records == "own" else 1,  # the same few for all clients compare as well
            )
            found = scatter(centroids)
            tables["scatter"].append(
                {
                    **run,
                    "space": space,
                    "layer": after,
                    "records": records,
                    "classes": 0 if found is None else found.num_classes,
                    "within": None if found is None else found.within,
                    "between": None if found is None else found.between,
                }
            )
            if space == "penultimate":
                tables["centroids"] += [{**run, "records": records, **point} for point in drawn(centroids)]
    return tables


def drawn(centroids: Centroids) -> list[dict[str, int | float | None]]:
    """Client, class and place in the plane of each centroid."""
    places = plane(centroids.means)
    return [
        {"client": int(client), "label": int(label), "x": x, "y": y}
        for client, label, (x, y) in zip(centroids.clients, centroids.labels, places, strict=True)
    ]


def plane(points: NDArray[np.float64]) -> list[tuple[float, float]] | list[tuple[None, None]]:
    """Points in the plane by t-SNE; blank for fewer than four, or where all are one.

    Args:
        points: Shape (n, d).

    Guarantee:
        Equal points give equal places with the same libraries: the start is PCA's, the gradient exact, the seed fixed.
        Scaling the space by a power of 2 changes no neighbourhood.

    Source:
        van der Maaten & Hinton 2008; perplexity 30, or (n − 1)/3 where that is less, as their own code demands.
    """
    if len(points) < 4 or points.shape[1] < 2 or not np.ptp(points, axis=0).any():
        return [(None, None)] * len(points)
    perplexity = min(PERPLEXITY, (len(points) - 1) / 3)
    places = TSNE(perplexity=perplexity, init="pca", method="exact", random_state=0).fit_transform(points)
    return [(float(x), float(y)) for x, y in places]
