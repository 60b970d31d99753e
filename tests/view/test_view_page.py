"""The page in a real browser: numbers, keys, filters, colour schemes, a growing record."""

import http.client
import threading
from urllib.parse import urlsplit

import numpy as np
import pytest
from click.testing import CliRunner

from areal_core.safety.printable import UNPRINTABLE
from areal_debug.record.decode import load_decoder
from areal_debug.verbs.open import command
from areal_debug.view.page import Contents, FollowedRecord, make_server
from recorder import open_record

from . import records
from .records import begin_chats, chat_batch, send, write_chats


@pytest.fixture(scope="module")
def chats(tmp_path_factory):
    return write_chats(tmp_path_factory.mktemp("chats") / "record", num_rows=400, num_steps=3)


@pytest.fixture(scope="module")
def url(chats, tmp_path_factory):
    return write_page(chats, tmp_path_factory.mktemp("page") / "page.html")


def write_page(record, file, *options):
    done = CliRunner().invoke(command, [str(record), "-o", str(file), *options])
    assert done.exit_code == 0, done.output
    return f"file://{file}"


def open_ready(page, url, **size):
    page.open(url, **size)
    page.wait_for("document.body.dataset.ready")


def test_the_page_loads_nothing_and_shows_every_sample_with_few_nodes(page, url):
    open_ready(page, url)
    assert page.requests == [url]
    assert page.errors == []
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


def test_text_of_the_page_is_the_decoded_row(page, url, chats):
    open_ready(page, url)
    record = open_record(chats)
    arrays = record.step(2).batch(0)
    for row in (0, 7):
        ids = arrays["input_ids"][arrays["cu_seqlens"][row] : arrays["cu_seqlens"][row + 1]].tolist()
        assert page.evaluate(f"textOf(app.view.a, {row})") == load_decoder(record)(ids)
    page.press("c")
    page.wait_for("document.querySelector('.tokens').innerText")  # the browser renders what comes into view
    shown = page.evaluate("document.querySelector('.tokens').innerText")
    assert shown.replace("↵", "") == page.evaluate("textOf(app.view.a, 0)")


def test_sorting_and_filtering_select_the_matching_rows(page, url, chats):
    open_ready(page, url)
    rewards = open_record(chats).step(2).batch(0)["rewards"]
    page.press("/")
    for key in (text := "reward>0 finish=stop calculator"):
        page.press(key)
    page.wait_for(f"table.filter === '{text}' && at('count').textContent.includes(' of ')")
    shown = page.evaluate("table.order")
    assert 0 < len(shown) < 400
    assert all(rewards[row] > 0 for row in shown)
    assert all(
        "calculator" in text
        for text in page.evaluate("table.order.slice(0, 20).map(r => textOf(app.view.a, r))")
    )
    page.press("Enter")
    lengths = page.evaluate("(table.sortBy('length'), table.order.map(r => app.view.a.rows.length[r]))")
    assert lengths == sorted(lengths, reverse=True)
    page.evaluate("(table.show(app.view, table.columns, 'colour>1'), countSamples())")
    assert page.evaluate("at('count').textContent") == "invalid filter: colour>1"


def test_keys_walk_samples_and_tokens_and_change_colours(page, url):
    open_ready(page, url)
    page.evaluate("at('table').focus()")
    for key in ("j", "j", "k", "ArrowDown"):
        page.press(key)
    assert page.evaluate("sample.row") == 2
    page.press("3")
    assert page.evaluate("sample.mode.name") == "advantage"
    page.press("4")
    assert page.evaluate("sample.mode.name") == "entropy"
    page.press("ArrowRight")
    page.press("ArrowRight")
    first = page.evaluate("sample.turns.find(turn => turn[2])[0]")
    assert page.evaluate("document.querySelector('.at').dataset.at") == str(first + 1)
    page.press("?")
    assert page.evaluate("at('help').open") is True
    page.press("Escape", 27)
    assert page.evaluate("at('help').open") is False


def test_a_conversation_is_shown_turn_by_turn(page, url):
    open_ready(page, url)
    headings = "[...document.querySelectorAll('.turn h3 span:first-child')].map(n => n.textContent)"
    assert page.evaluate(headings) == ["prompt", "model, turn 1", "environment", "model, turn 2"]
    page.press("c")
    assert page.evaluate(headings) == []


def test_unlikely_tokens_are_tinted_more_and_versions_are_marked(page, url):
    open_ready(page, url)
    shares = page.evaluate(
        "[-0.01, -1, -5].map(v => colourings(app.view.a, app.document.sides[0])[0].tint(v)[1])"
    )
    assert shares == sorted(shares)
    assert shares[2] > 3 * shares[0]
    assert page.evaluate("document.querySelectorAll('.tokens .border').length") == 1
    marked = page.evaluate(
        "[0.7, 0.9, 1.2, 1.3].map(colourings(app.view.a, app.document.sides[0])[1].marked)"
    )
    assert marked == [True, False, False, True]


def test_text_of_a_model_is_never_run(page, tmp_path, monkeypatch):
    evil = "</script><script>document.title='owned'</script><img src=x onerror=alert(1)>"
    monkeypatch.setattr(records, "THOUGHTS", (evil,) * 4)
    record = write_chats(tmp_path / "</script>", num_rows=4, num_steps=1)
    open_ready(page, write_page(record, tmp_path / "page.html"))
    assert evil in page.evaluate("textOf(app.view.a, 0)")
    assert page.evaluate("document.title") != "owned"
    assert page.evaluate("document.querySelectorAll('img').length") == 0
    assert len(page.requests) == 1


HIDDEN = "\x1b]52;c;x\x07 \x9b2J \u202e \u200b \u2028 \U000e0041"
SHOWN = r"\x1b]52;c;x\x07 \x9b2J \u202e \u200b \u2028 \U000e0041"


def test_control_and_direction_codes_of_a_model_are_shown(page, tmp_path, monkeypatch):
    monkeypatch.setattr(records, "THOUGHTS", (HIDDEN,) * 4)
    record = write_chats(tmp_path / HIDDEN.replace(" ", ""), num_rows=4, num_steps=1)
    open_ready(page, write_page(record, tmp_path / "page.html"))
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
