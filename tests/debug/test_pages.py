"""Data in a page without scripts is text: no markup, no control codes."""

from markupsafe import Markup

from areal_core.safety.printable import UNPRINTABLE
from areal_debug.pages.charts import bars
from areal_debug.pages.template import write_template

EVIL = "</style><script>x</script>{{ 7*7 }}\x1b]0;x\x07\u202e\U000e0041"


def test_data_of_a_page_is_escaped_and_printable(tmp_path):
    facts = {
        "verdict": EVIL, "headline": EVIL, "summary": EVIL, "alarms": [], "overrides": [EVIL], "absent": [EVIL],
        "charts": [{"svg": bars([1.0, 2.0], EVIL, EVIL), "caption": EVIL}, {"svg": Markup("<svg/>"), "caption": ""}],
    }  # fmt: skip
    write_template(tmp_path / "page.html", "doctor/doctor.html", facts)
    page = (tmp_path / "page.html").read_text()
    assert not UNPRINTABLE.search(page)
    assert "<script" not in page
    assert "<svg/>" in page
    assert "default-src 'none'" in page
    shown = r"&lt;/style&gt;&lt;script&gt;x&lt;/script&gt;{{ 7*7 }}\x1b]0;x\x07\u202e\U000e0041"
    assert page.count(shown) == 10
