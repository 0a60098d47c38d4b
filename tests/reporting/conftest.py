from collections.abc import Callable

import pytest

BASE = {
    "status": "ok",
    "method": "asfl",
    "data": "digits",
    "partition": "dirichlet:0.1",
    "clients": 10,
    "cohort": 5,
    "model": "small-cnn",
    "mech": "none",
    "exchange_layer": "conv1",
    "seed": 0,
    "accuracy": 0.9,
    "rounds": 20,
    "tail_steps": 4,
    "full_steps": 6,
    "remote_fraction": 0.2,
    "lr": 0.05,
    "bytes_model": 1000,
    "bytes_activations": 200,
    "bytes_labels": 8,
    "seconds": 1.25,
}
NOISE = {
    "mech": "gaussian",
    "target_epsilon": 4.0,
    "delta": 1e-5,
    "radius": 1.0,
    "p": 2,
    "q": 2,
    "placement": "input",
    "noise": "fresh",
    "own": "clean",
    "sensitivity": 1.0,
    "noise_scale": 1.0812,
    "noise_stddev": 1.0812,
    "epsilon_release": 4.0,
    "epsilon_total": 30.0,
    "delta_total": 1e-5,
    "epsilon_whole_record": 500.0,
}

Make = Callable[..., dict[str, object]]


@pytest.fixture
def unnoised() -> Make:
    return lambda **changes: {**BASE, **changes}


@pytest.fixture
def fedavg() -> Make:
    return lambda **changes: {
        **BASE,
        "method": "fedavg",
        "exchange_layer": None,
        "tail_steps": 0,
        "full_steps": 10,
        **changes,
    }


@pytest.fixture
def gaussian() -> Make:
    return lambda **changes: {**BASE, **NOISE, **changes}


@pytest.fixture
def grid(unnoised: Make, fedavg: Make, gaussian: Make) -> list[dict[str, object]]:
    """Two seeds: references, four ε at δ = 1e-5, a δ ladder at ε = 16, and one failed run."""
    rows = []
    for seed in (0, 1):
        rows += [unnoised(seed=seed, accuracy=0.93 + seed / 100), fedavg(seed=seed, accuracy=0.88 + seed / 100)]
        cells = [(1.0, 1e-5), (4.0, 1e-5), (16.0, 1e-5), (64.0, 1e-5), (16.0, 1e-2), (16.0, 1e-7)]
        for index, (epsilon, delta) in enumerate(cells):
            rows.append(
                gaussian(
                    seed=seed,
                    accuracy=0.6 + index / 20 + seed / 50,
                    target_epsilon=epsilon,
                    epsilon_release=epsilon,
                    epsilon_total=6 * epsilon,
                    epsilon_whole_record=40 * epsilon,
                    delta=delta,
                    delta_total=delta,
                )
            )
    rows[2] = {
        **rows[2],
        "status": "failed: RuntimeError: loss is NaN in <b>round</b> 3 | 50% of a_b & c",
        "accuracy": None,
    }
    return rows
