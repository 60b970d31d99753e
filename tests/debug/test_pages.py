"""The frame of every page: its policy, its colours, and data that is text."""

import base64
import hashlib
import html
import re

import pytest
from markupsafe import Markup

from areal_core.safety.printable import UNPRINTABLE
from areal_debug.report.charts import bars
from areal_debug.report.frame import Frame, Link, framed, shared_style
from areal_debug.report.model import Cell, Curve, Facts, Finding, Picture, Report, Row, Table
from areal_debug.report.page import write_report

EVIL = "</style><script>x</script>{{ 7*7 }}\x1b]0;x\x07\u202e\U000e0041\"'"
SHOWN = r"&lt;/style&gt;&lt;script&gt;x&lt;/script&gt;{{ 7*7 }}\x1b]0;x\x07\u202e\U000e0041&#34;&#39;"
GROUNDS = ("paper", "card", "hover", "chosen")
INKS = ("ink", "soft", "faint", "accent", "good", "bad", "amber", "violet", "cool", "warm")
TINTS = ("good", "bad", "amber", "violet", "cool", "warm", "faint")


def test_data_of_a_page_is_escaped_and_printable(tmp_path):
    rows = [Row(EVIL, EVIL), Row(EVIL, EVIL, is_code=True), Row(EVIL, EVIL, address=EVIL)]
    curve = Curve(EVIL, [1.0, 2.0], [0, 1], caption=EVIL)
    blocks = [
        EVIL, Facts(rows, EVIL), Table([EVIL], [[EVIL], [Cell(EVIL, address=EVIL)]], EVIL, EVIL), curve,
        Picture(Markup("<svg/>"), EVIL), Picture(bars([1.0, 2.0], EVIL, EVIL), EVIL),
        Finding(EVIL, EVIL, "bad", rows, EVIL, curve),
    ]  # fmt: skip
    frame = Frame(EVIL, EVIL, EVIL, EVIL, (Link(EVIL, EVIL),))
    report = Report(EVIL, EVIL, "bad", blocks, [EVIL])
    write_report(tmp_path / "page.html", report, frame, summary=EVIL)
    page = (tmp_path / "page.html").read_text()
    assert not UNPRINTABLE.search(page)
    assert "<script" not in page
    assert "<svg/>" in page
    same_escapes = page.replace("&quot;", "&#34;").replace("&#x27;", "&#39;")
    assert same_escapes.count(SHOWN) > 40
    assert EVIL not in html.unescape(page)


def hash_of(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def test_the_policy_names_the_style_and_the_script_and_forbids_the_rest():
    page = framed(Frame("a title", "a run", "doctor"), "<p>", style="p { }", script="let a = 1")
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', page)[1]
    style, script = re.search(r"<style>(.*?)</style>.*<script>(.*?)</script>", page, re.DOTALL).groups()
    assert policy == (
        f"default-src 'none'; style-src 'sha256-{hash_of(style)}'; script-src 'sha256-{hash_of(script)}'; "
        "connect-src 'none'; base-uri 'none'; form-action 'none'"
    )
    assert style == shared_style() + "p { }"
    assert "script-src 'none'" in framed(Frame("", "", ""), "")


def luminance(colour: str) -> float:
    """Relative luminance of WCAG 2.2 of "#rrggbb"."""
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("scheme", [0, 1], ids=["light", "dark"])
def test_text_is_readable_on_every_ground(scheme):
    colours = {
        name: pair[scheme]
        for name, *pair in re.findall(r"--([a-z-]+): light-dark\((#\w{6}), (#\w{6})\)", shared_style())
    }
    pairs = [(ink, ground) for ink in INKS for ground in GROUNDS] + [
        ("ink", f"tint-{tint}") for tint in TINTS
    ]
    found = {pair: contrast(colours[pair[0]], colours[pair[1]]) for pair in pairs}
    assert {pair: round(value, 2) for pair, value in found.items() if value < 4.5} == {}
    assert contrast("#000000", "#ffffff") == 21
    assert set(colours) == {*GROUNDS, *INKS, "line", *(f"tint-{tint}" for tint in TINTS)}
