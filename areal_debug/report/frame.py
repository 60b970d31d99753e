"""The frame of every HTML page: style sheet, header, navigation, footer, and a strict policy.

A page is one file that loads nothing. Its policy names its style and its script by their hashes, so
that no other is applied, and forbids every request. Text from outside goes through `safe`.

    <header>  name of the run, kind of page, links to the other pages of the run  </header>
    <main>    `lead`: verdict, heading, summary; then the page's own content        </main>
    <footer>  version                                                             </footer>
"""

import base64
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from html import escape
from importlib import metadata
from pathlib import Path

from areal_core.safety.printable import printable
from areal_debug.report.model import tone_of

NOTHING = "'none'"


@dataclass(frozen=True)
class Link:
    """A link to another page; `is_current` is the page that contains it."""

    name: str
    address: str
    is_current: bool = False


@dataclass(frozen=True)
class Frame:
    """What is around the content of a page.

    Args:
        title: of the window, and of a tab.
        run: what the page is about: the name of a run, a record or a collection.
        kind: the verb that wrote it, such as "doctor".
        verdict: one of the words of `model.TONES`, if the page has one.
        links: the pages of the same run, this one included; empty for a page on its own.
    """

    title: str
    run: str
    kind: str
    verdict: str = ""
    links: Sequence[Link] = ()


def framed(
    frame: Frame,
    body: str,
    *,
    style: str = "",
    script: str = "",
    styles: str = "",
    loads: str = "",
    connect: str = "'none'",
    images: str = NOTHING,
    tools: str = "",
) -> str:
    """Return a complete page.

    Args:
        body: HTML whose data is escaped already.
        style: further rules, after those that all pages share.
        script: the page's only inline script; "" forbids inline scripts.
        styles: further sources of styles for the policy, of a page inside of this one.
        loads: sources of the policy of scripts that the page loads, such as its data.
        connect: source of the policy that the script may request: "'self'" of a served page.
        images: source of the policy of pictures: "data:" of a page that has them inside.
        tools: HTML of buttons at the end of the header.
    """
    sheet = shared_style() + style
    allowed = f"{hash_source(script) if script else ''} {loads}".strip() or "'none'"
    policy = (
        f"default-src 'none'; style-src {f'{hash_source(sheet)} {styles}'.strip()}; script-src {allowed}; "
        f"connect-src {connect}; {f'img-src {images}; ' if images != NOTHING else ''}base-uri 'none'; form-action 'none'"
    )
    last_names = "/".join(frame.run.rstrip("/").split("/")[-2:])
    run, kind, version = safe(frame.run), safe(frame.kind), safe(installed_version())
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        f'<meta name="generator" content="areal-debug {version}">\n'
        f'<meta name="areal-debug" content="{kind}: {safe(frame.verdict)}">\n'
        f'<link rel="icon" href="data:,">\n<title>{safe(frame.title)}</title>\n<style>{sheet}</style>\n</head>\n'
        f'<body class="{kind}">\n<a class="skip" href="#main">Skip to the content</a>\n'
        f'<header class="top"><p class="run" title="{run}"><b>{safe(last_names)}</b> <span>{kind}</span></p>'
        f"{navigation(frame.links)}{tools}</header>\n"
        f'<main id="main" tabindex="-1">\n{body}\n</main>\n'
        f'<footer class="end"><p>areal-debug {version}</p></footer>\n'
        + (f"<script>{script}</script>\n" if script else "")
        + "</body>\n</html>\n"
    )


def navigation(links: Sequence[Link]) -> str:
    if not links:
        return ""
    items = "".join(
        f'<a href="{safe(link.address)}"{" aria-current=page" if link.is_current else ""}>{safe(link.name)}</a>'
        for link in links
    )
    return f'<nav class="pages" aria-label="Pages of this run">{items}</nav>'


def lead(verdict: str, heading: str, summary: str = "") -> str:
    """Return the first lines of a content: badge of the verdict, heading, summary."""
    below = f'<p class="summary">{safe(summary)}</p>' if summary else ""
    return f'<div class="lead">{badge(verdict)}<h1>{safe(heading)}</h1>{below}</div>'


def badge(verdict: str) -> str:
    """Return a verdict as a badge in its colour; nothing without one."""
    return f'<span class="badge {tone_of(verdict)}">{safe(verdict)}</span>' if verdict else ""


def safe(text: str) -> str:
    """Return text from outside for HTML: on one line, control codes shown, markup escaped."""
    return escape(printable(text), quote=True)


def hash_source(text: str) -> str:
    """Return an inline element as a source of a Content-Security-Policy."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


@cache
def shared_style() -> str:
    return (Path(__file__).parent / "page.css").read_text(encoding="utf-8")


@cache
def installed_version() -> str:
    try:
        return metadata.version("areal-debug")
    except metadata.PackageNotFoundError:
        return ""
