"""`open`: what a run left is found, judged and linked, and served to this machine only."""

import html
import http.client
import io
import json
import os
import re
import tarfile
import threading
import tomllib
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest

from areal_core.telemetry.trace import TRAINER_TRACK, Trace
from areal_debug import Recorder
from areal_debug.doctor.rows import NOWHERE, worst_place
from areal_debug.open.find import find
from areal_debug.open.served import Workbench, make_server
from recorder import open_record
from recorder.testing import write_scripted_record
from tests.command_line import invoke

STACKS = """Ranks 0-2:
Thread 1 (idle): "MainThread"
    all_reduce (torch/distributed/distributed_c10d.py:2806)
    step (train.py:60)
Rank 3:
Thread 1 (idle): "MainThread"
    _try_get_data (torch/utils/data/dataloader.py:1131)
    step (train.py:50)
"""
OPTIONS = {"batch_size": 2, "max_head_offpolicyness": 0, "max_concurrent_rollouts": 8, "max_new_tokens": 512}
SERVER = {"address": "10.0.0.1:30000", "state": "quarantined", "rejected": 1}
FOUND_PAGE = (
    '<!doctype html><html><head><meta name="areal-debug" content="consistency: mismatch">'
    "<style>h1 { color: rgb(1, 2, 3) }</style><style>{}</style></head>"
    "<body><h1>a report</h1><script>parent.document.title = 'owned'</script>"
    '<img src="http://127.0.0.1:9/x.png"></body></html>'
)


def write_trace(folder: Path) -> None:
    trace = Trace(folder, 0, 1, OPTIONS)
    begin = trace._origin_ns
    for step in range(6):
        start, length = begin + step * 10**10, 10**9 * (4 if step == 3 else 1)
        trace.complete("rollout", "stage", start, start + length, TRAINER_TRACK, {})
        trace.complete("step", "stage", start, start + length + 10**8, TRAINER_TRACK, {})
    trace.close()


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """A folder with one of everything."""
    top = tmp_path_factory.mktemp("open") / "run"
    logs = top / "logs" / "trial"
    logs.mkdir(parents=True)
    write_scripted_record(logs / "record")
    rows = [{"step": n, "ppo_actor/update/grad_norm": 60.0 if n in (1, 5, 9) else 0.5} for n in range(60)]
    (logs / "stats.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (logs / "server_health.json").write_text(json.dumps({"updated": "now", "servers": [SERVER]}))
    write_trace(logs / "trace")
    with tarfile.open(top / "stacks.tar.gz", "w:gz") as tar:
        member = tarfile.TarInfo("stacks.txt")
        member.size = len(STACKS)
        tar.addfile(member, io.BytesIO(STACKS.encode()))
    (top / "checkpoints").mkdir()
    (top / "checkpoints" / "model.safetensors").write_bytes(bytes(100))
    (top / "report.html").write_text(FOUND_PAGE)
    (top / "why.json").write_text(
        json.dumps({"verdict": "diverged", "cause": {"what": "<script>"}, "pattern": None, "next": ""})
    )
    (top / "other.json").write_text('{"verdict": "of another tool"}')
    (top / "damaged").mkdir()
    (top / "damaged" / "record.json").write_text("{}")
    os.symlink(logs, top / "again")
    return top


@pytest.fixture(scope="module")
def workbench(run, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("pages") / "workbench"
    done = invoke("open", run, "-o", folder, "--json")
    assert done.exit_code == 0, done.output
    (folder.parent / "found.json").write_text(done.stdout)
    return folder


def test_everything_is_found_once_with_its_verdict(run, workbench):
    listed = json.loads((workbench.parent / "found.json").read_text())
    found = [[one[part] for part in ("kind", "name", "verb", "verdict", "page")] for one in listed["found"]]
    expected = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())["found"]
    assert sorted(found) == sorted(expected)
    assert listed["verdict"] in ("problem", "error", "slow", "hung", "mismatch", "diverged")


class Links(HTMLParser):
    """The addresses, identifiers and headings of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.addresses: list[str] = []
        self.ids: set[str] = set()
        self.levels: list[int] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        self.ids |= {given["id"]} if "id" in given else set()
        self.addresses += [given["href"]] if tag == "a" else []
        self.levels += [int(tag[1])] if re.fullmatch("h[1-6]", tag) else []


def test_every_link_leads_to_a_page_or_a_place_in_it(workbench):
    for file in workbench.glob("*.html"):
        for address in Links(file.read_text()).addresses:
            path, _, place = html.unescape(address).partition("#")
            target = file.parent / path if path else file
            assert target.is_file(), (file.name, address)
            if place and not place.startswith("step="):
                assert place in Links(target.read_text()).ids, (file.name, address)


def test_a_folder_that_changes_or_cannot_be_read_is_no_error(run, tmp_path):
    listed, note = find(run)
    assert note == ""
    gone = replace(listed[0], path=tmp_path / "gone")
    (tmp_path / "loop").symlink_to(tmp_path)
    assert find(tmp_path) == ([], "")
    assert gone.path.exists() is False


@pytest.mark.parametrize(("width", "dark"), [(1400, False), (420, True)])
def test_pages_fit_the_screen_load_nothing_and_name_their_pictures(page, workbench, width, dark):
    unnamed = {"link", "button", "image", "navigation", "region", "Iframe"}
    for file in sorted(workbench.glob("*.html")):
        url = f"file://{file}"
        page.open(url, width=width, height=900, dark=dark)
        assert page.evaluate("document.documentElement.scrollWidth") <= width, file.name
        assert page.errors == []
        assert {request for request in page.requests if not request.startswith("about:")} == {url}, file.name
        nodes = [node for node in page.call("Accessibility.getFullAXTree")["nodes"] if not node["ignored"]]
        roles = [node["role"]["value"] for node in nodes if not node.get("name", {}).get("value")]
        assert unnamed.isdisjoint(roles), (file.name, roles)
        assert {"banner", "navigation", "main", "contentinfo"} <= {node["role"]["value"] for node in nodes}


def test_a_page_that_was_found_keeps_its_style_and_runs_nothing(page, workbench):
    page.open(f"file://{workbench}/report.html")
    assert page.evaluate("document.title") == "consistency: report.html"
    assert page.evaluate("document.querySelector('iframe').getAttribute('sandbox')") == ""
    assert len(page.requests) == 1 or all("127.0.0.1:9" not in request for request in page.requests)
    inside = page.call("DOM.getDocument", depth=-1, pierce=True)["root"]
    assert "a report" in json.dumps(inside)


@pytest.fixture
def served(run, tmp_path):
    workbench = Workbench(run, tmp_path / "workbench")
    workbench.refresh()
    with make_server(workbench, 0) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def answer(server, path: str, **headers: str) -> tuple[int, str, str]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=30)
    connection.request("GET", f"{server.top}{path.removeprefix('/')}", headers=headers)
    reply = connection.getresponse()
    found = reply.status, reply.getheader("Content-Type"), reply.read().decode()
    connection.close()
    return found


def test_the_server_follows_the_run_and_answers_no_other_site(run, served):
    status, kind, body = answer(served, "/")
    assert (status, kind) == (200, "text/html; charset=utf-8")
    assert "later.json" not in body
    (run / "later.json").write_text(json.dumps({"verdict": "diverged", "cause": 1, "pattern": 1, "next": 1}))
    assert answer(served, "/")[2].count("later.json") == 2
    (run / "later.json").unlink()
    assert answer(served, "/hang.html")[0] == 200
    for path in ("/../found.json", "/%2e%2e/found.json", "//etc/passwd", "/absent.html"):
        assert answer(served, path)[0] == 404
    assert answer(served, "/", Host="evil.example")[0] == 403
    with pytest.raises(HTTPError, match="Forbidden"):  # as another user of this machine
        urlopen(served.address.replace(served.top, "/"))
    assert answer(served, "/", Origin="http://evil.example")[0] == 403


def test_the_most_extreme_row_or_token_of_a_metric_is_found(tmp_path):
    with Recorder(tmp_path / "record", trainer="trl") as recorder:
        recorder.step(0, [
            {"prompt_tokens": [5], "completion_tokens": [7] * length, "logprobs": [-1.0] * length,
             "old_logprobs": [-1.1] * (length - 1) + [-1.0 - gap], "reward": reward, "group": "g"}
            for length, gap, reward in ((3, 0.2, 1.0), (5, 0.1, 0.5), (4, 0.9, 0.75))
        ])  # fmt: skip
    step = open_record(tmp_path / "record").step(0)
    found = {
        metric: worst_place(step, f"record/{metric}")
        for metric in ("reward", "length", "logprob_difference", "zero_variance_groups")
    }
    assert found == {
        "reward": (0, 1, None),
        "length": (0, 1, None),
        "logprob_difference": (0, 2, 4),
        "zero_variance_groups": NOWHERE,
    }


def test_sample_of_the_package_shows_a_hang_and_a_collapsed_policy(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    asked = invoke("hang", "--sample", "--json")
    assert (asked.exit_code, json.loads(asked.stdout)["label"]) == (1, "collective_mismatch")
    asked = invoke("open", "--sample", "--json")
    found = {one["kind"]: one["verdict"] for one in json.loads(asked.stdout)["found"]}
    assert found == {"record": "complete", "metrics": "problem", "hang": "hung"}
    assert invoke("doctor", "areal-debug-sample/record").exit_code == 1
    assert invoke("record", "verify", "areal-debug-sample/record").exit_code == 0
    page = invoke("open", "--sample", "-o", "page.html")
    assert (page.exit_code, Path("page.html").is_file()) == (0, True)
    hidden = invoke("open", "--sav", "x")  # of --save, which help does not list
    assert (hidden.exit_code, "--save" in hidden.stderr) == (2, False)
    both = invoke("open", "areal-debug-sample", "--sample")
    assert (both.exit_code, "or --sample" in both.stderr) == (2, True)
