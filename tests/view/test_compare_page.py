"""Two records beside each other in a real browser: differences, groups, histograms, search."""

import json
from difflib import SequenceMatcher
from itertools import pairwise

import pytest

from areal_debug.record.decode import load_decoder
from recorder import open_record

from .pages import open_ready, write_page

TEXTS = "[...document.querySelectorAll({!r})].map(node => node.textContent)"


@pytest.fixture(scope="module")
def folder(two, tmp_path_factory):
    place = tmp_path_factory.mktemp("page") / "pages"
    return f"{write_page(place, two[0], '--compare', two[1], '--all-steps')}/index.html"


def texts(page, selector):
    return page.evaluate(TEXTS.format(selector))


def test_a_folder_loads_the_steps_that_are_shown_and_no_others(page, folder):
    open_ready(page, folder)
    loaded = sorted(request.rpartition("/")[2] for request in page.requests)
    shown = [f"{side}-2-{kind}.js" for side in "ab" for kind in ("numbers", "text")]
    assert loaded == sorted(["index.html", *shown, "pair-2.js"])
    page.press("[")
    page.wait_for("app.number === 1")
    assert {request.rpartition("/")[2] for request in page.requests} >= {"a-1-text.js", "pair-1.js"}
    assert not any("-0-" in request for request in page.requests)


def test_tokens_are_aligned_and_the_first_that_differs_is_marked(page, folder, two):
    open_ready(page, f"{folder}#step=2&prompt=200&sample=0&compare=B")
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


@pytest.mark.parametrize(
    ("query", "wanted"),
    [('"calculator"', "calculator"), ("/calc[a-z]+r/", "calculator"), ("NATALIA sold", "Natalia sold")],
)
def test_search_finds_text_in_all_steps(page, folder, two, query, wanted):
    open_ready(page, f"{folder}#step=2&compare=")
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
    page.wait_for("app.number === 0 && sample.at >= 0")  # a late scroll event hides its tip
    found = page.evaluate("sample.step.texts[sample.step.tokens.index[sample.at]]")
    assert wanted.startswith(found.strip()) or found.strip()[:1] == wanted[:1]


def names_of(page):
    """Return (role, name) of every element that a screen reader stops at."""
    nodes = page.call("Accessibility.getFullAXTree")["nodes"]
    found = [(n["role"]["value"], n.get("name", {}).get("value", "")) for n in nodes if not n["ignored"]]
    return [(role, name) for role, name in found if role not in ("none", "generic", "InlineTextBox")]


def test_a_screen_reader_gets_a_role_and_a_name_of_everything(page, folder):
    open_ready(page, f"{folder}#step=2&prompt=200&sample=0&compare=B")
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
