"""The Ray cluster: connecting to it, what a worker needs of it, and whether a machine can run cells."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import platform
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from asfl_privacy.execution.child_processes import THREAD_VARIABLES
from asfl_privacy.shared_folder import SharedFolder, check_folder_from

SAME_EVERYWHERE = ("asfl-privacy", "torch", "numpy", "scipy")
"""Packages of which every machine must have the same version, so that rows do not depend on where a cell ran."""


def import_ray() -> Any:  # noqa: ANN401 - ray is an extra, so its types may not be there
    """The ray module.

    Raises:
        ValueError: Ray is not installed.
    """
    try:
        return importlib.import_module("ray")
    except ImportError:
        raise ValueError(
            "launcher ray: Ray is an extra that is not installed; run pip install 'asfl-privacy[ray]', or use launcher local"
        ) from None


def check_machine(folders: Sequence[SharedFolder], versions: Mapping[str, str], *, answer: str) -> str:
    """What keeps this machine from running cells, in one line with value, rule and fix; empty if nothing does.

    Args:
        folders: What it must see.
        versions: Packages and their versions where the sweep was started.
        answer: Name of the answer to leave in the folders.
    """
    here = package_versions()
    for name, version in versions.items():
        if here[name] != version:
            return (
                f"launcher ray: machine {platform.node()} has {name} {here[name]} and the one that started the sweep "
                f"{version}, so that its rows could differ; install the same version on all"
            )
    for folder in folders:
        wrong = check_folder_from(folder, answer)
        if wrong:
            return not_shared(folder, platform.node(), wrong)
    return ""


def not_shared(folder: SharedFolder, machine: str, wrong: str) -> str:
    """The line about a machine that does not share a folder."""
    return (
        f"launcher ray: machine {machine} does not share the folder {folder.path} ({wrong}), where every machine must read "
        "and write; give one on a file system that all of them mount"
    )


def package_versions() -> dict[str, str]:
    """The public part of the versions that rows depend on."""
    return {name: importlib.metadata.version(name).partition("+")[0] for name in SAME_EVERYWHERE}


def worker_options(device: str, resources: Mapping[str, float]) -> dict[str, Any]:
    """What Ray must give a worker.

    Args:
        device: Of the configuration; `auto` takes a GPU if the cluster has one, then for every worker.
        resources: Of the cluster.

    Raises:
        ValueError: The cluster lacks it.
    """
    needs_gpu = device == "cuda" or (device == "auto" and resources.get("GPU", 0) >= 1)
    for kind in ("CPU", "GPU") if needs_gpu else ("CPU",):
        if resources.get(kind, 0) < 1:
            raise ValueError(
                f"launcher ray: the cluster has {resources.get(kind, 0):g} {kind}s and a worker needs 1 with device {device}; "
                f"add a machine with a {kind}" + (", or use device cpu" if kind == "GPU" else "")
            )
    variables = dict.fromkeys(THREAD_VARIABLES, "1")
    if "PYTHONPATH" in os.environ:  # where own models and data sets are found, if every machine has that folder
        variables["PYTHONPATH"] = os.environ["PYTHONPATH"]
    return {"num_cpus": 1, "num_gpus": int(needs_gpu), "runtime_env": {"env_vars": variables}}


@contextmanager
def connected(ray: Any) -> Iterator[None]:  # noqa: ANN401
    """Be connected to a cluster; one that the program is connected to already stays as it is."""
    if ray.is_initialized():
        yield
        return
    address = os.environ.get("RAY_ADDRESS", "")
    if address.startswith("ray://"):
        raise ValueError(
            f"RAY_ADDRESS {address} is that of Ray's client server, which does not share folders; start the sweep on a "
            "machine of the cluster, with RAY_ADDRESS=auto"
        )
    host, colon, port = address.rpartition(":")
    if colon:  # Ray itself would try for minutes, deaf to Ctrl-C
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()
        except (OSError, ValueError, OverflowError) as error:
            raise _no_connection(address, error) from None
    before = os.environ.get("RAY_USAGE_STATS_ENABLED")
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    try:
        try:
            ray.init(include_dashboard=False, log_to_driver=False, logging_level="error")
        except (ConnectionError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
            raise _no_connection(address, error) from None
        yield
    finally:
        ray.shutdown()
        if before is None:
            del os.environ["RAY_USAGE_STATS_ENABLED"]
        else:
            os.environ["RAY_USAGE_STATS_ENABLED"] = before


def _no_connection(address: str, error: Exception) -> ValueError:
    reason = " ".join(str(error).split())
    return ValueError(
        f"launcher ray: no connection to the cluster {address or 'on this machine'} ({reason}); check RAY_ADDRESS, or leave "
        "it out for a local cluster"
    )
