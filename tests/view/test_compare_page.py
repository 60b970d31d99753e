"""Two records beside each other in a real browser: differences, groups, histograms, search."""

import json
import threading
from difflib import SequenceMatcher
from itertools import pairwise

import numpy as np
import pytest
from click.testing import CliRunner

from areal_debug.record.decode import load_decoder
from areal_debug.verbs.open import command
from areal_debug.view.page import Contents, FollowedRecord, Place, make_server
from recorder import open_record

from . import records
from .records import write_chats, write_other

TEXTS = "[...document.querySelectorAll({!r})].map(node => node.textContent)"


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two")
    return write_chats(folder / "a", num_rows=8, num_steps=3), write_other(folder / "b")


@pytest.fixture(scope="module")
def folder(two, tmp_path_factory):
    """The address of a folder with all steps of both."""
    place = tmp_path_factory.mktemp("page") / "pages"
    return f"{write(place, two[0], '--compare', two[1], '--all-steps')}/index.html"


def write(output, *arguments):
    done = CliRunner().invoke(command, [str(one) for one in (*arguments, "-o", output)])
    assert done.exit_code == 0, done.output
    return f"file://{output}"


def open_at(page, url, fragment="", **size):
    page.open("about:blank")  # another fragment of the same page loads nothing
    page.open(f"{url}{fragment}", **size)
    page.wait_for("document.body.dataset.ready")
    assert page.errors == []


def link_of(page):
    page.evaluate("new Promise(done => setTimeout(done, 2 * LINK_MS))")
    return page.evaluate("location.hash")


def texts(page, selector):
    return page.evaluate(TEXTS.format(selector))


def tip(page):
    """Return the rows of the tooltip."""
    return dict(
        page.evaluate(
            "[...document.querySelectorAll('#tip tr')].map(row => [row.children[0].textContent,"
            " [...row.children].slice(1).map(cell => cell.textContent)])"
        )
    )


def test_a_folder_loads_the_steps_that_are_shown_and_no_others(page, folder):
    open_at(page, folder)
    loaded = sorted(request.rpartition("/")[2] for request in page.requests)
    shown = [f"{side}-2-{kind}.js" for side in "ab" for kind in ("numbers", "text")]
    assert loaded == sorted(["index.html", *shown, "pair-2.js"])
    page.press("[")
    page.wait_for("app.number === 1")
    assert {request.rpartition("/")[2] for request in page.requests} >= {"a-1-text.js", "pair-1.js"}
    assert not any("-0-" in request for request in page.requests)


def test_tokens_are_aligned_and_the_first_that_differs_is_marked(page, folder, two):
    open_at(page, folder, "#step=2&prompt=200&sample=0&compare=B")
    left, right = (open_record(path).step(2).batch(0) for path in two)
    first = int(left["loss_mask"].argmax()) + 3
    marked = page.evaluate("[...document.querySelectorAll('.first')].map(node => +node.dataset.at)")
    assert marked == [first, first]
    a, b = (batch["input_ids"][: batch["cu_seqlens"][1]].tolist() for batch in (left, right))
    only = page.evaluate(
        "['a', 'b'].map(side => document.querySelectorAll(`.only[data-side=${side}]`).length)"
    )
    pieces = [one for one in SequenceMatcher(None, a, b, autojunk=False).get_opcodes() if one[0] != "equal"]
    assert only == [sum(p[2] - p[1] for p in pieces), sum(p[4] - p[3] for p in pieces)]
    assert texts(page, ".differences button")[0].startswith(f"tokens differ from token {first}: ")
    joined = "[...document.querySelectorAll('[data-side=b]')].map(node => node.textContent).join('')"
    decoded = load_decoder(open_record(two[1]))(b)
    assert page.evaluate(joined).replace("↵", "") == decoded


def test_a_shortest_edit_is_found(page, folder):
    open_at(page, folder)
    chance = np.random.default_rng(3)
    for _ in range(40):
        a, b = (chance.integers(0, 4, chance.integers(0, 30)).tolist() for _ in range(2))
        pieces = page.evaluate(f"""(() => {{
            const side = list => ({{ step: {{ ids: [0, 1, 2, 3], tokens: {{ index: list }} }}, start: 0, end: list.length }});
            return alignTokens(side({a}), side({b}));
        }})()""")
        same = [(one["a"], one["b"]) for one in pieces if one["same"]]
        assert all(a[slice(*left)] == b[slice(*right)] for left, right in same)
        for side, length in (("a", len(a)), ("b", len(b))):
            ends = [0, *(end for one in pieces for end in one[side]), length]
            assert ends[::2] == ends[1::2]  # each piece begins where the one before ended
        longest = np.zeros((len(a) + 1, len(b) + 1), int)
        for i in range(len(a)):
            for j in range(len(b)):
                both = longest[i, j] + 1 if a[i] == b[j] else max(longest[i + 1, j], longest[i, j + 1])
                longest[i + 1, j + 1] = both
        assert sum(left[1] - left[0] for left, _ in same) == longest[-1, -1]


def test_values_of_both_sides_and_their_change_are_shown(page, folder, two):
    left, right = (open_record(path).step(2).batch(0) for path in two)
    start = int(left["cu_seqlens"][1])
    token = int(np.flatnonzero(left["loss_mask"][start : left["cu_seqlens"][2]])[4])
    open_at(page, folder, f"#step=2&prompt=200&sample=1&token={token}&compare=B")
    page.evaluate("new Promise(done => setTimeout(done, 100))")
    below = "document.querySelector('.at').getBoundingClientRect().bottom <= at('tip').getBoundingClientRect().top"
    assert page.evaluate(below)  # the tooltip does not cover the token
    shown = tip(page)
    before = left["logprobs"][start + token]
    after = right["logprobs"][int(right["cu_seqlens"][1]) + token]
    assert [float(value) for value in shown["logprob"]] == pytest.approx([before, after, -0.5], rel=1e-3)
    assert shown["token id"][2] == "="
    assert any(text.startswith("logprob: 1 of ") for text in texts(page, ".differences button"))
    page.evaluate("table.sortBy('change')")
    assert page.evaluate("table.order.slice(0, 2).map(item => table.view.rowA[item])") == [1, 5]
    page.press("x")
    tinted = page.evaluate(
        "[...document.querySelectorAll('[data-side=a]')].filter(n => n.style.background).map(n => +n.dataset.at)"
    )
    assert tinted == [start + token]


def test_stages_that_differ_lead_to_their_token(page, folder, two):
    open_at(page, folder)
    assert page.evaluate("at('differences').firstChild.textContent").startswith(
        "First to differ: batch: input_ids, "
    )
    page.evaluate("document.querySelector('#differences a').click()")
    page.wait_for("!at('tip').hidden")
    first = int(open_record(two[0]).step(2).batch(0)["loss_mask"].argmax()) + 3
    assert tip(page)["position"] == [str(first)]
    open_at(page, folder, "#step=0&compare=B")
    assert texts(page, "#differences summary") == ["No difference in what both recorded of this step"]


def test_the_address_follows_and_leads_to_what_is_shown(page, folder):
    open_at(page, folder, "#step=1&prompt=101&sample=2")
    assert page.evaluate("[app.number, app.comparing, sample.row]") == [1, False, 6]
    page.press("b")
    page.wait_for("app.comparing")
    assert link_of(page) == "#step=1&prompt=101&sample=2&compare=B"
    page.press("ArrowRight")
    token = page.evaluate("sample.at - sample.start")
    assert link_of(page) == f"#step=1&prompt=101&sample=2&token={token}&compare=B"
    page.evaluate("location.hash = '#step=2&prompt=200&sample=3&token=5'")
    page.wait_for("app.number === 2 && sample.at >= 0")
    assert page.evaluate("[app.comparing, sample.row, sample.at - sample.start]") == [False, 3, 5]
    page.evaluate("location.hash = '#step=77'")
    page.wait_for("at('problem').textContent")
    assert "Step 77 is not in this page, which has 3 steps, 0 to 2" in texts(page, "#problem")[0]
    page.evaluate("location.hash = '#step=2&prompt=9'")
    page.wait_for("at('problem').textContent.startsWith('Step 2 has no sample 9')")


def test_the_command_opens_the_page_at_a_token(page, two, tmp_path):
    url = write(tmp_path / "one.html", two[0], "--step", 1, "--at", "101.3.7")
    open_at(page, url)
    assert link_of(page) == "#step=1&prompt=101&sample=3&token=7"
    assert page.requests == [url]


@pytest.mark.parametrize(
    ("query", "wanted"),
    [
        ('"calculator"', "calculator"),
        ("/calc[a-z]+r/", "calculator"),
        ("NATALIA sold", "Natalia sold"),
    ],
)
def test_search_finds_text_in_all_steps(page, folder, two, query, wanted):
    open_at(page, folder, "#step=2&compare=")
    page.press("f")
    page.evaluate(f"find({json.dumps(query)})")
    page.wait_for("at('found').textContent.includes('3 of 3')")
    decode, record = load_decoder(open_record(two[0])), open_record(two[0])
    expected = 0
    for step in record.steps:
        arrays = record.step(step).batch(0)
        bounds = arrays["cu_seqlens"]
        expected += sum(decode(arrays["input_ids"][a:b].tolist()).count(wanted) for a, b in pairwise(bounds))
    assert len(texts(page, "#results li")) == expected > 0
    assert set(texts(page, "#results mark")) == {wanted}
    page.evaluate("document.querySelector('#results a').click()")
    page.wait_for("app.number === 0 && !at('tip').hidden")
    found = page.evaluate("sample.step.texts[sample.step.tokens.index[sample.at]]")
    assert wanted.startswith(found.strip()) or found.strip()[:1] == wanted[:1]


def test_a_served_page_compares_steps_as_they_are_recorded(page, two):
    contents = Contents(*(FollowedRecord(str(path), load_decoder(open_record(path))) for path in two))
    with make_server(contents, 0, Place(1, 100)) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            address = server.address
            open_at(page, address)
            assert link_of(page).startswith("#step=1&prompt=100&sample=0&compare=B")
            assert f"{address}blob/pair-1" in page.requests
            page.press("]")
            page.wait_for("app.number === 2")
            page.evaluate("find('calculator')")
            page.wait_for("at('found').textContent.includes('6 of 6')")
            page.evaluate("fetch('run.json?2').then(reply => { globalThis.answer = reply.status; })")
            page.wait_for("globalThis.answer")
            assert page.evaluate("answer") == 204  # nothing new
        finally:
            server.shutdown()
            thread.join()


def test_the_page_of_two_records_opens_at_what_differs_first(page, two, tmp_path, monkeypatch):
    monkeypatch.setattr(
        records, "changed", lambda batch: batch | {"rewards": batch["rewards"] + [0, 0, 0, 0, 0, 1, 0, 0]}
    )
    other = write_other(tmp_path / "b", num_steps=2)
    open_at(page, write(tmp_path / "p.html", two[0], "--step", 1, "--compare", other))
    assert link_of(page) == "#step=1&prompt=101&sample=1&compare=B"


def names_of(page):
    """Return (role, name) of every element that a screen reader stops at."""
    nodes = page.call("Accessibility.getFullAXTree")["nodes"]
    found = [(n["role"]["value"], n.get("name", {}).get("value", "")) for n in nodes if not n["ignored"]]
    return [(role, name) for role, name in found if role not in ("none", "generic", "InlineTextBox")]


def test_a_screen_reader_gets_a_role_and_a_name_of_everything(page, folder):
    open_at(page, folder, "#step=2&prompt=200&sample=0&compare=B")
    for key in "sghf":
        page.press(key)
        found = names_of(page)
        needed = ("button", "tab", "grid", "slider", "searchbox", "link", "checkbox", "tabpanel", "article")
        assert [one for one in found if one[0] in needed and not one[1]] == []
        page.evaluate("document.activeElement.blur()")
    roles = {role for role, _ in found}
    assert roles >= {"main", "heading", "tablist", "tab", "tabpanel", "slider", "article", "button", "status"}
    names = [name for role, name in found if role == "slider"]
    assert names[0].startswith("reward. A: ")
    assert {("heading", "Step 2"), ("heading", "Prompt 200, sample 0")} <= set(found)
    page.evaluate("document.activeElement.blur()")
    page.press("s")
    page.press("ArrowRight")
    assert page.evaluate("at('announce').textContent").startswith('"<tool" ') or page.evaluate(
        "at('announce').textContent.includes('logprob')"
    )


CONTRAST = """(() => {
    const pen = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
    const rgba = colour => { pen.clearRect(0, 0, 1, 1); pen.fillStyle = colour; pen.fillRect(0, 0, 1, 1);
        const [r, g, b, a] = pen.getImageData(0, 0, 1, 1).data; return [r, g, b, a / 255]; };
    const over = (top, below) => top.slice(0, 3).map((c, i) => c * top[3] + below[i] * (1 - top[3]));
    const light = c => c.map(v => v / 255).map(v => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
        .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
    const ground = node => { const chain = []; for (let n = node; n; n = n.parentElement) chain.push(n);
        return chain.reverse().reduce((below, n) => over(rgba(getComputedStyle(n).backgroundColor), below), [255, 255, 255]); };
    const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT), low = [];
    for (let text; (text = walker.nextNode());) {
        const node = text.parentElement, box = node.getBoundingClientRect();
        if (!text.data.trim() || !box.width || !node.checkVisibility() || ["SCRIPT", "NOSCRIPT"].includes(node.tagName)) continue;
        const below = ground(node), a = light(over(rgba(getComputedStyle(node).color), below)), b = light(below);
        const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
        if (ratio < 4.5) low.push([ratio.toFixed(2), node.className || node.id || node.tagName, text.data.slice(0, 20)]);
    }
    return low;
})()"""


@pytest.mark.parametrize(
    ("width", "dark"),
    [
        (1400, True),
        pytest.param(420, False, marks=pytest.mark.long),
        pytest.param(1400, False, marks=pytest.mark.long),
        pytest.param(420, True, marks=pytest.mark.long),
    ],
)
def test_text_has_contrast_and_nothing_overflows(page, folder, width, dark):
    open_at(page, folder, "#step=2&prompt=200&sample=0&compare=B", width=width, height=900, dark=dark)
    for key in "sghf1237x":
        page.press(key)
        if key == "f":
            page.evaluate("find('calculator')")
            page.wait_for("at('found').textContent.includes('of 6')")
            page.evaluate("document.activeElement.blur()")
        assert page.evaluate(CONTRAST) == []
        assert page.evaluate("document.documentElement.scrollWidth") == width
