"""The README's tables are those of the reports that lie beside it, to the letter."""

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def readme_tables():
    spec = importlib.util.spec_from_file_location("readme_tables", ROOT / "experiments" / "readme_tables.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def committed(name):
    return sorted(path.parent for path in (ROOT / "reports").glob(f"{name}-*/run.json"))


def filled():
    """Blocks of the README that hold something."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    return [name for name in ("table1", "table3") if f"CONTRIBUTING.md -->\n\n<!-- end of {name} -->" not in text]


@pytest.mark.parametrize("name", filled())
def test_a_table_of_the_readme_is_made_of_a_committed_report(readme_tables, name, monkeypatch):
    """Catches: a figure typed by hand, a report that changed after the README was made."""
    monkeypatch.chdir(ROOT)
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    folders = [path.relative_to(ROOT) for path in committed(name) if f"{path.relative_to(ROOT)}/report.md" in text]
    shown = [
        folder for folder in folders if readme_tables.with_block(text, name, readme_tables.BLOCKS[name](folder)) == text
    ]
    assert len(shown) == 1


def test_a_block_that_is_not_there_is_named(readme_tables):
    with pytest.raises(ValueError, match="table9: the text has no block"):
        readme_tables.with_block("nothing", "table9", [])
    text = "a\n<!-- x: made -->\nold\n<!-- end of x -->\nb"
    assert readme_tables.with_block(text, "x", ["new"]) == "a\n<!-- x: made -->\nnew\n<!-- end of x -->\nb"
