"""The frame of every page: its policy, its colours, and data that is text."""

import base64
import hashlib
import html
import re

from markupsafe import Markup

from areal_core.safety.printable import UNPRINTABLE
from areal_debug.report.charts import bars
from areal_debug.report.frame import Frame, Link, framed, shared_style
from areal_debug.report.model import Cell, Curve, Facts, Finding, Picture, Report, Row, Table
from areal_debug.report.page import write_report

EVIL = "</style><script>x</script>{{ 7*7 }}\x1b]0;x\x07\u202e\U000e0041\"'"
SHOWN = r"&lt;/style&gt;&lt;script&gt;x&lt;/script&gt;{{ 7*7 }}\x1b]0;x\x07\u202e\U000e0041&#34;&#39;"


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
