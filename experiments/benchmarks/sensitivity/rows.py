"""One line of rows.csv: what one tool says about one head and one pair of norms, with all that made it."""

from __future__ import annotations

import csv
import hashlib
import importlib.metadata
import io
import platform
import subprocess
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import sensitivity
from asfl_privacy.reporting import write_atomic

PACKAGES = ("torch", "numpy", "scipy", "deel-torchlip", "orthogonium", "eclipse-nn", "mlxtend", "scikit-learn")

# Kinds of number, as their tool claims them.
UPPER, ESTIMATE, LOWER, EXACT = "upper bound", "estimate", "lower bound", "truth"
REFUSES, FAILED, MISSING, MEMORY = "refuses", "failed", "not installed", "MB"


@dataclass(frozen=True, kw_only=True)
class Source:
    """What made a row.

    Attributes:
        commit: of the checkout, with + where files have changed since; "unknown" outside one.
        code: digest of the sensitivity package's files.
        versions: of Python and of the packages that matter.
        command: the command line.
    """

    commit: str
    code: str
    versions: str
    command: str


@dataclass(frozen=True)
class Answer:
    """What a tool says: kind of number, the number, and how it came about or why there is none."""

    kind: str
    value: float | None
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One answer.

    Attributes:
        head: the head's name.
        about: the head in words.
        digest: of its weights.
        accuracy: of the trained head on held-out records, or None.
        p: norm of the input: "1", "2" or "inf".
        q: norm of the output: likewise.
        tool: who answers.
        kind: of number, one of the constants above, as the tool claims it.
        value: the number, or None where there is none.
        seconds: wall clock, for reading alone: nothing is decided by it.
        steps: gradient steps of a search, or None.
        note: method, or reason of a refusal.
        commit, code, versions, command: as in `Source`.
    """

    head: str
    about: str
    digest: str
    accuracy: float | None
    p: str
    q: str
    tool: str
    kind: str
    value: float | None
    seconds: float | None
    steps: int | None
    note: str
    commit: str
    code: str
    versions: str
    command: str

    @property
    def key(self) -> tuple[str, str, str, str]:
        """What may stand once in a file: head, norms and tool."""
        return (self.head, self.p, self.q, self.tool)


COLUMNS = tuple(field.name for field in fields(Row))


def write_rows(path: Path, rows: list[Row]) -> None:
    """Replace the file in one step, so that a killed run leaves whole rows."""
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    writer.writeheader()
    for row in rows:
        writer.writerow({name: "" if value is None else value for name, value in asdict(row).items()})
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, text.getvalue())


def read_rows(path: Path) -> list[Row]:
    """The rows of a file.

    Raises:
        SystemExit: with one line, if the file has other columns.
    """
    with path.open(encoding="utf-8", newline="") as file:
        reader = csv.DictReader(file)
        if tuple(reader.fieldnames or ()) != COLUMNS:
            raise SystemExit(f"{path} has other columns than this benchmark writes: move it away and run again")
        return [_row(line) for line in reader]


def _row(line: dict[str, str]) -> Row:
    def number(name: str) -> float | None:
        return float(line[name]) if line[name] else None

    texts = {name: line[name] for name in COLUMNS if name not in ("accuracy", "value", "seconds", "steps")}
    steps = int(line["steps"]) if line["steps"] else None
    return Row(accuracy=number("accuracy"), value=number("value"), seconds=number("seconds"), steps=steps, **texts)


def source_of(command: str) -> Source:
    """Commit, code and versions of this run."""
    package = Path(sensitivity.__file__).parent
    code = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        code.update(path.relative_to(package).as_posix().encode() + path.read_bytes())
    versions = [f"python {platform.python_version()}"]
    for name in PACKAGES:
        try:
            versions.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            versions.append(f"{name} not installed")
    return Source(commit=_commit(), code=code.hexdigest()[:12], versions=", ".join(versions), command=command)


def _commit() -> str:
    git = ["git", "-C", str(Path(__file__).parent)]
    try:
        commit = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
        changed = subprocess.run([*git, "status", "--porcelain"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return commit[:12] + ("+" if changed.strip() else "")
