"""The post-mortem in a real browser: laid out as meant, nothing loaded, nothing run."""

import re
import subprocess
from pathlib import Path

import pytest

from areal_debug.hang.html import page
from hangdoctor.diagnose import diagnose
from hangdoctor.parse.read import read_snapshot

INSTALL = Path(__file__).parents[2] / "browser" / "install_chromium.sh"
FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"]
FLAGS += ["--disable-background-networking", "--disable-component-update", "--window-size=1200,900"]
TEXT = """Ranks 0-5, 7:
Thread 1 (idle): "MainThread"
    all_reduce (torch/distributed/distributed_c10d.py:2806)
    step (train.py:60)
    <module> (train.py:90)
Rank 6:
Thread 1 (idle): "MainThread"
    <script>document.title="owned"</script> (torch/utils/data/x.py:1)
    _try_get_data (torch/utils/data/dataloader.py:1131)
    step (train.py:50)
    <module> (train.py:90)
"""
# Inserted into a copy of the page, which forbids scripts: widths and colours in the browser.
PROBE = """<script>addEventListener("load", () => {
  const boxes = [...document.querySelectorAll(".icicle .row .row > .node")].map(n => Math.round(n.getBoundingClientRect().width));
  const cells = [...document.querySelectorAll(".cell")].map(c => getComputedStyle(c).backgroundColor);
  const width = document.documentElement.scrollWidth;
  document.body.dataset.seen = [boxes.join(","), new Set(cells).size, width, document.title].join("|");
})</script>"""


@pytest.fixture(scope="module")
def chromium() -> str:
    """A browser, installed if it is not there."""
    done = subprocess.run([str(INSTALL)], capture_output=True, text=True, timeout=300)
    if done.returncode == 77:
        pytest.skip(done.stderr.strip())
    return done.stdout.strip()


def test_page_is_laid_out_with_widths_of_ranks_and_runs_nothing(tmp_path, chromium):
    (tmp_path / "stacks.txt").write_text(TEXT)
    snapshot = read_snapshot([tmp_path / "stacks.txt"])
    html = page(diagnose(snapshot), snapshot)
    probed = re.sub(r"<meta http-equiv=[^>]*>", "", html).replace("</body>", PROBE + "</body>")
    (tmp_path / "page.html").write_text(probed)
    command = [
        chromium,
        *FLAGS,
        f"--user-data-dir={tmp_path / 'profile'}",
        "--dump-dom",
        f"file://{tmp_path / 'page.html'}",
    ]
    dom = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    boxes, colours, width, title = re.search(r'data-seen="([^"]*)"', dom)[1].split("|")
    wide, narrow = map(int, boxes.split(","))
    assert 5 < wide / narrow < 8
    assert colours == "2"
    assert int(width) <= 1200
    assert title.startswith("dataloader_stall")
