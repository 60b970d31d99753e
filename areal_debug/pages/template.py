"""Render a page's template into a file, atomically."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

PACKAGE = Path(__file__).parents[1]  # templates are stored next to the verbs that fill them


def write_template(file: Path, template: str, facts: Mapping[str, Any]) -> None:
    """Write a page. Everything in `facts` is escaped; a name that `facts` lacks is an error.

    Args:
        template: path below `areal_debug`.
    """
    pages = Environment(loader=FileSystemLoader(PACKAGE), autoescape=True, undefined=StrictUndefined)
    text = pages.get_template(template).render(facts)
    temporary = file.with_name(file.name + ".tmp")
    temporary.write_text(text, encoding="utf-8")
    temporary.rename(file)
