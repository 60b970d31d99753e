"""The page in a real browser: numbers, keys, filters, colour schemes, a growing record."""

import http.client
import threading
from urllib.parse import urlsplit

import numpy as np
import pytest

from areal_core.safety.printable import UNPRINTABLE
from areal_debug.record.decode import load_decoder
from areal_debug.view.page import Contents, FollowedRecord, make_server
from recorder import open_record

from . import records
from .pages import open_ready, write_page
from .records import begin_chats, chat_batch, send, write_chats


@pytest.fixture(scope="module")
def chats(tmp_path_factory):
    return write_chats(tmp_path_factory.mktemp("chats") / "record", num_rows=400, num_steps=3)


@pytest.fixture(scope="module")
def url(chats, tmp_path_factory):
    return write_page(tmp_path_factory.mktemp("page") / "page.html", chats)


def test_the_page_loads_nothing_and_shows_every_sample_with_few_nodes(page, url):
    open_ready(page, url)
    assert page.requests == [url]
    assert page.evaluate("at('count').textContent") == "400 samples"
    assert page.evaluate("document.querySelectorAll('*').length") < 2500
    assert page.evaluate("[...document.querySelectorAll('.curve p span')].map(n => n.textContent)") == [
        "reward", "length", "staleness", "loss", "grad norm",
    ]  # fmt: skip


def test_hovering_a_token_shows_the_numbers_of_the_record(page, url, chats):
    open_ready(page, url)
    step = open_record(chats).step(2)
    batch, learning = step.batch(0), step.learning(0)
    place = int(batch["loss_mask"].argmax())
    page.hover(f'[data-at="{place}"]')
    page.wait_for("!at('tip').hidden")
    names, values = page.evaluate(
        "[[...document.querySelectorAll('#tip th')], [...document.querySelectorAll('#tip td')]]"
        ".map(nodes => nodes.map(n => n.textContent))"
    )
    displayed = dict(zip(names, values, strict=True))
    assert float(displayed["logprob"]) == pytest.approx(float(batch["logprobs"][place]), rel=1e-4)
    assert float(displayed["trainer logprob"]) == pytest.approx(
        float(learning["prox_logp"][place - 1]), rel=1e-4
    )
    assert float(displayed["advantage"]) == pytest.approx(
        float(learning["advantages"][place - 1]), rel=1e-4, abs=1e-6
    )
    assert displayed["weights"] == f"version {batch['versions'][place]}"
    assert int(displayed["token id"]) == batch["input_ids"][place]
    assert int(displayed["position"]) == place


def test_text_of_a_model_is_never_run(page, tmp_path, monkeypatch):
    evil = "</script><script>document.title='owned'</script><img src=x onerror=alert(1)>"
    monkeypatch.setattr(records, "THOUGHTS", (evil,) * 4)
    record = write_chats(tmp_path / "</script>", num_rows=4, num_steps=1)
    open_ready(page, write_page(tmp_path / "page.html", record))
    assert evil in page.evaluate("textOf(app.view.a, 0)")
    assert page.evaluate("document.title") != "owned"
    assert page.evaluate("document.querySelectorAll('img').length") == 0
    assert len(page.requests) == 1


HIDDEN = "\x1b]52;c;x\x07 \x9b2J \u202e \u200b \u2028 \U000e0041"
SHOWN = r"\x1b]52;c;x\x07 \x9b2J \u202e \u200b \u2028 \U000e0041"


def test_control_and_direction_codes_of_a_model_are_shown(page, tmp_path, monkeypatch):
    monkeypatch.setattr(records, "THOUGHTS", (HIDDEN,) * 4)
    record = write_chats(tmp_path / HIDDEN.replace(" ", ""), num_rows=4, num_steps=1)
    open_ready(page, write_page(tmp_path / "page.html", record))
    assert SHOWN in page.evaluate("document.getElementById('sample').textContent")
    assert SHOWN in page.evaluate("textOf(app.view.a, 0)")
    assert page.evaluate("app.document.sides[0].record").endswith(SHOWN.replace(" ", ""))
    assert not UNPRINTABLE.search(page.evaluate("document.documentElement.textContent + document.title"))


def test_the_policy_allows_this_script_and_style_only(page, url):
    open_ready(page, url)
    policy = page.evaluate("document.querySelector('meta[http-equiv]').content")
    assert "unsafe" not in policy
    assert page.evaluate("getComputedStyle(document.querySelector('header.top')).display") == "flex"
    add = "(node => { node.textContent = '%s'; document.body.append(node); })(document.createElement('%s'))"
    page.evaluate(add % ("globalThis.owned = true", "script"))
    page.evaluate(add % ("header { display: none }", "style"))
    assert page.evaluate("globalThis.owned") is None
    assert page.evaluate("getComputedStyle(document.querySelector('header.top')).display") == "flex"


@pytest.fixture
def served(tmp_path):
    """Return a function that adds a step to a record of one step, and the address of its page."""
    writer, tokenizer = begin_chats(tmp_path / "record")
    rng = np.random.default_rng(0)

    def add(step):
        send(writer, step, chat_batch(tokenizer, 4, step, rng), rng)

    add(0)
    decode = load_decoder(open_record(tmp_path / "record"))
    with make_server(Contents(FollowedRecord(str(tmp_path / "record"), decode)), 0) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        yield add, server.address
        server.shutdown()
        thread.join()


def test_a_served_page_follows_a_record_that_grows(page, served):
    add, address = served
    open_ready(page, address)
    page.wait_for("app.view")
    assert page.evaluate("at('stepper').textContent").startswith("‹Step 0›")
    add(1)
    page.wait_for("app.number === 1")
    assert page.evaluate("app.document.sides[0].curves.reward.length") == 2
    page.press("[")
    page.wait_for("app.number === 0")
    assert page.evaluate("app.following") is False
    assert all(request.startswith((address, "data:")) for request in page.requests)


def test_a_page_of_another_site_gets_nothing_from_the_server(served):
    _, address = served
    port, top = urlsplit(address).port, urlsplit(address).path
    for host, path, status in (
        ("evil.example", f"{top}run.json", 403),
        ("localhost", "/", 403),
        ("localhost", "/run.json", 403),
        ("localhost", f"{top[:-2]}/run.json", 403),
        ("localhost", f"{top}run.json", 200),
        ("localhost", f"{top}blob/a-9-text", 404),
    ):
        connection = http.client.HTTPConnection("127.0.0.1", port)
        connection.request("GET", path, headers={"Host": f"{host}:{port}"})
        reply = connection.getresponse()
        body = reply.read()
        connection.close()
        assert reply.status == status
    assert b"step 9 is not recorded" in body
