"""Where page templates come from."""

import functools

from jinja2 import Environment, PackageLoader, StrictUndefined, Template


@functools.cache
def _environment() -> Environment:
    return Environment(
        loader=PackageLoader("asfl_privacy.reporting", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )


def load_template(name: str) -> Template:
    """A template of this package; it escapes HTML by default and stops at an unknown name.

    Args:
        name: "report.md" or "report.html".
    """
    return _environment().get_template(f"{name}.jinja")
