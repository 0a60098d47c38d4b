"""Flower's simulation: message API, FedAvg of its own, Ray actors of one core each (its documented set-up)."""

from __future__ import annotations

import logging
import os
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

os.environ |= {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1", "RAY_USAGE_STATS_ENABLED": "0"}

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from workload import (
    Clock,
    Where,
    finish,
    load_records,
    load_task,
    network_of,
    train_locally,
)

HELD: dict[str, Any] = {}  # what an actor keeps between messages: data, network and optimizer


def held(folder: str) -> dict[str, Any]:
    """Data and network of this process, loaded once."""
    if not HELD:
        torch.set_num_threads(1)
        task, records = load_task(Path(folder)), load_records(Path(folder))
        network = network_of(task, records)
        optimizer = torch.optim.SGD(network.parameters(), lr=task.lr)
        HELD.update(task=task, records=records, network=network, optimizer=optimizer)
    return HELD


def client_app(folder: str) -> ClientApp:
    """The client's side."""
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        import engine_flower  # the actor's own copy, which lives as long as the actor

        mine = engine_flower.held(folder)
        task, records, network = mine["task"], mine["records"], mine["network"]
        client = int(context.node_config["partition-id"])
        round = int(message.content["config"]["server-round"]) - 1
        network.load_state_dict(message.content["arrays"].to_torch_state_dict())
        inputs, labels = records.inputs[client], records.labels[client]
        steps = train_locally(network, mine["optimizer"], inputs, labels, task, where=Where(round, client))
        metrics = MetricRecord({"num-examples": len(labels), "steps": steps})
        content = RecordDict({"arrays": ArrayRecord(network.state_dict()), "metrics": metrics})
        return Message(content=content, reply_to=message)

    return app


def main(folder: Path, out: Path, workers: int) -> None:
    """Run a task."""
    logging.getLogger("flwr").setLevel(logging.ERROR)
    task, records = load_task(folder), load_records(folder)
    clock, app, found = Clock(task), ServerApp(), {}
    steps = []

    def tick(server_round: int, arrays: ArrayRecord) -> MetricRecord:
        clock.tick()
        return MetricRecord()

    def add_steps(replies: list[RecordDict], weighted_by: str) -> MetricRecord:
        steps.extend(int(reply["metrics"]["steps"]) for reply in replies)
        return MetricRecord()

    @app.main()
    def serve(grid: Grid, context: Context) -> None:
        strategy = FedAvg(
            fraction_train=1.0,
            fraction_evaluate=0.0,
            min_train_nodes=task.clients,  # else a first round goes on without nodes that are yet to register
            min_available_nodes=task.clients,
            train_metrics_aggr_fn=add_steps,
        )
        result = strategy.start(
            grid=grid, initial_arrays=ArrayRecord(records.initial), num_rounds=task.rounds, evaluate_fn=tick
        )
        found["weights"] = result.arrays.to_torch_state_dict()

    run_simulation(
        server_app=app,
        client_app=client_app(str(folder.resolve())),
        num_supernodes=task.clients,
        backend_config={
            "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
            "init_args": {"num_cpus": workers, "include_dashboard": False},
        },
    )
    finish(
        out,
        clock=clock,
        weights=found["weights"],
        task=task,
        records=records,
        steps=sum(steps),
        versions={name: version(name) for name in ("flwr", "ray")},
    )


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
