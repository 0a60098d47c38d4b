"""`attack`: what a curious recipient gets from what a run released."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console

from asfl_privacy.attacks import Effort
from asfl_privacy.cli.budget import Json
from asfl_privacy.config import SweepConfig, load_config
from asfl_privacy.configured_data import load_data
from asfl_privacy.reporting import write_atomic
from asfl_privacy.run import UNPROTECTED, Run
from asfl_privacy.run_attack import NUM_RECORDS, QUICK, RunAttack, attack_csv, attack_json, attack_run
from asfl_privacy.run_files import CONFIG_FILE, ROW_FILE, STATEMENT_FILE
from asfl_privacy.run_folder import FinishedRun, read_run
from asfl_privacy.sweep import check_reported, prepare_sweep, rewrite_report
from asfl_privacy.worker import kept_record, run_folder

FOLDER = "attack"


def attack(
    *,
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a finished run, or of a sweep.")],
    records: Annotated[int, typer.Option("--records", metavar="N", help="Test records attacked.")] = NUM_RECORDS,
    seed: Annotated[int, typer.Option("--seed", metavar="S", help="Of records, noise and attacks.")] = 0,
    quick: Annotated[bool, typer.Option("--quick", help="A weaker attacker in a third of the time.")] = False,
    as_json: Json = False,
) -> int:
    """Rebuild test records from releases, tell them apart and guess their labels, as a curious recipient would.

    Of a sweep: each private cell of its first seed; its report gets the picture. Results lie in RUN/attack. Exit code 1
    where a guess refutes the claimed ε. Attacks bound nothing from above. Examples:

    asfl-privacy attack reports/gaussian-digits

    asfl-privacy attack runs/asfl-gaussian-eps4-… --records 24 --quick
    """
    from asfl_privacy.reporting.attack_section import (  # loads plotting libraries
        Attacked,
        attack_section,
        draw_pictures,
    )
    from asfl_privacy.reporting.html import html_pictures

    torch.set_num_threads(1)
    sweep = None
    if (run / ROW_FILE).is_file() or not (run / "cells").is_dir():
        folders = [run]
    else:
        sweep = _read_sweep(run)
        folders = _cells(run, *sweep)
    attacks, box = _attack(folders, records=records, seed=seed, effort=QUICK if quick else None)
    breaches = [line for one in attacks for line in one.breaches]
    shown = [
        Attacked(
            row=one.row(),
            originals=one.result.originals,
            without_noise=one.result.best_without_noise.records,
            with_noise=None if one.noise_stddev is None else one.result.best.records,
        )
        for one in attacks
    ]
    beside = "" if sweep is None else f"{FOLDER}/"
    section = attack_section(shown, value_range=box, figure=f"{beside}figures/attack.svg", breaches=breaches)
    contents: dict[str, str | bytes] = {"attack.json": attack_json(attacks), "attack.csv": attack_csv(attacks)}
    contents |= {f"figures/{name}": file for name, file in draw_pictures(shown, value_range=box).items()}
    if sweep is None:
        stored = run / STATEMENT_FILE
        statement = (
            stored.read_text(encoding="utf-8") if stored.is_file() else f"**Nothing is promised.** {UNPROTECTED}"
        )
        command = shlex.join(["asfl-privacy", *sys.argv[1:]])
        contents["report.html"] = html_pictures(
            section, title=f"Attack on {attacks[0].cell.label}", statement=statement, command=command
        )
    (run / FOLDER / "figures").mkdir(parents=True, exist_ok=True)
    for name, content in contents.items():
        write_atomic(run / FOLDER / name, content)
    if sweep is not None:
        rewrite_report(run, *sweep, section)
    if as_json:
        print(contents["attack.json"], end="")  # noqa: T201
    else:
        _print_table(section.headings, section.lines)
        page = run / "report.html" if sweep is not None else run / FOLDER / "report.html"
        print(f"\n{section.sentences[-1]}\npicture and table: {page}")  # noqa: T201
    for line in breaches:
        print(f"BREACH: {line}", file=sys.stderr if as_json else sys.stdout)
    return 1 if breaches else 0


def _read_sweep(out: Path) -> tuple[SweepConfig, tuple[Run, ...]]:
    """The grid of a sweep's folder and its runs."""
    if not (out / CONFIG_FILE).is_file():
        raise ValueError(f"{out} holds no sweep ({CONFIG_FILE} is missing); give a folder that train or sweep wrote")
    config = load_config(out / CONFIG_FILE, overrides={})
    runs = prepare_sweep(config, data=load_data(config))
    check_reported(runs, out=out)
    return config, runs


def _cells(out: Path, config: SweepConfig, runs: Sequence[Run]) -> list[Path]:
    """Folders of the finished runs of the first seed that share activations with noise; without noise if none does."""
    first = [(run_folder(out, index, run), run) for index, run in enumerate(runs) if run.cell.seed == config.seed]
    private = [(folder, run) for folder, run in first if run.privacy is not None and run.privacy.shares_activations]
    clean = [(folder, run) for folder, run in first if run.privacy is None and run.cell.exchange_layer is not None]
    wanted = private or clean
    finished = [folder for folder, run in wanted if kept_record(folder, config=config, run=run) is not None]
    if not finished:
        reason = "its runs share no activations" if not wanted else f"no run of seed {config.seed} finished"
        raise ValueError(f"{out}: there is nothing to attack ({reason}); give a sweep of method asfl that has finished")
    if len(finished) < len(wanted):
        print(f"{len(wanted) - len(finished)} failed runs are left out", file=sys.stderr)  # noqa: T201
    return finished


def _attack(
    folders: Sequence[Path], *, records: int, seed: int, effort: Effort | None
) -> tuple[list[RunAttack], tuple[float, float]]:
    """Attack run after run on the same records, with a line of progress on a terminal alone; and the input box."""
    console = Console(stderr=True)
    attacks: list[RunAttack] = []
    finished: FinishedRun | None = None
    for number, folder in enumerate(folders, start=1):
        finished = read_run(folder)
        if console.is_terminal:
            console.print(f"[{number}/{len(folders)}] {finished.run.cell.label}", highlight=False, markup=False)
        attacks.append(attack_run(finished, num_records=records, seed=seed, effort=effort))
    assert finished is not None
    return attacks, finished.data.input_box


def _print_table(headings: Sequence[str], lines: Sequence[Sequence[str]]) -> None:
    """Plain columns, never cut, whatever the terminal."""
    widths = [max(len(line[column]) for line in (headings, *lines)) for column in range(len(headings))]
    for line in (headings, *lines):
        cells = [text.rjust(width) for text, width in zip(line[1:], widths[1:], strict=True)]
        print("  ".join([line[0].ljust(widths[0]), *cells]))  # noqa: T201
