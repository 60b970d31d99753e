"""Render a page's template into a file, atomically."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from areal_core.safety.durable import commit_file
from areal_core.safety.html_page import Frame, badge, framed, hash_source, lead, tone_of
from areal_core.safety.printable import printable_block

STYLE_ELEMENT = re.compile(r"<style>(.*?)</style>", re.DOTALL)
PACKAGE = Path(__file__).parents[1]  # templates are stored next to the verbs that fill them


def write_template(
    file: Path, template: str, frame: Frame, facts: Mapping[str, Any], *, style: str = "", inside: str = ""
) -> None:
    """Write a page.

    Everything in `facts` is made printable and escaped; a name that `facts` lacks is an error.

    Args:
        template: path below `areal_debug`, of the content inside the frame.
        style: rules of this page only.
        inside: a complete page that is shown inside of this one, whose own styles apply.
    """
    pages = Environment(
        loader=FileSystemLoader(PACKAGE), autoescape=True, undefined=StrictUndefined, finalize=shown
    )
    pages.globals = {
        "lead": lambda *texts: Markup(lead(*texts)),
        "badge": lambda verdict: Markup(badge(verdict)),
        "tone_of": tone_of,
    }
    body = pages.get_template(template).render(facts)
    styles = " ".join(hash_source(sheet) for sheet in STYLE_ELEMENT.findall(inside))
    commit_file(file, framed(frame, body, style=style, styles=styles))


def shown(value: Any) -> Any:
    """Return text with control codes shown; pictures, which are markup of ours, as they are."""
    return printable_block(value) if isinstance(value, str) and not isinstance(value, Markup) else value
