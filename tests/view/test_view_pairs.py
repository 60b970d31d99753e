"""Two steps beside each other, and pages of all steps: what is matched, listed and written."""

import base64
import gzip
import json
import re
import stat

import pytest
from click.testing import CliRunner

from areal_debug.verbs.open import command
from areal_debug.view import page
from areal_debug.view.page import Contents, FollowedRecord, Place
from areal_debug.view.pairs import pair_document
from recorder import StepNotRecorded, open_record
from recorder.testing import write_scripted_record

from .records import write_chats, write_other

OURS = (False, False)


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """A record and another one of the same prompts."""
    folder = tmp_path_factory.mktemp("two")
    return write_chats(folder / "a", num_rows=8, num_steps=3), write_other(folder / "b")


def steps_of(two, step):
    return [open_record(path).step(step) for path in two]


def call(*arguments):
    return CliRunner().invoke(command, [str(argument) for argument in arguments])


def test_rows_are_matched_by_prompt_and_sample(two):
    assert pair_document(*steps_of(two, 0), OURS) == {
        "match": list(range(8)),
        "differences": [],
        "num_differences": 0,
    }
    found = pair_document(*steps_of(two, 2), OURS)
    assert found["match"] == list(range(8))
    first = found["differences"][0]
    start = int(open_record(two[0]).step(2).batch(0)["loss_mask"].argmax())
    assert (first["stage"], first["name"]) == ("batch", "input_ids")
    assert first["place"] == {"prompt_id": 200, "sample_id": 0, "token": start + 3}
    assert "left" not in first  # a value may be redacted text
    assert {one["name"] for one in found["differences"]} >= {"input_ids", "rewards", "logprobs"}


def test_prompts_with_other_numbers_are_matched_by_what_they_contain(two, tmp_path):
    moved = write_other(tmp_path / "moved", num_steps=1, prompts_from=5000)
    steps = open_record(two[0]).step(0), open_record(moved).step(0)
    assert pair_document(*steps, OURS)["match"] == list(range(8))


def test_rows_of_two_ranks_are_counted_over_both(tmp_path):
    for name in "ab":
        write_scripted_record(tmp_path / name, num_steps=1, num_ranks=2, num_rows=3)
    steps = [open_record(tmp_path / name).step(0) for name in "ab"]
    assert pair_document(*steps, OURS)["match"] == list(range(6))


def test_a_row_of_one_side_only_has_no_partner(two, tmp_path):
    fewer = write_chats(tmp_path / "fewer", num_rows=4, num_steps=1)
    steps = open_record(fewer).step(0), open_record(two[0]).step(0)
    assert pair_document(*steps, OURS)["match"] == [0, 1, 2, 3, -1, -1, -1, -1]


def test_two_steps_are_paired_but_their_stages_not_compared(two):
    steps = open_record(two[0]).step(1), open_record(two[0]).step(2)
    found = pair_document(*steps, OURS)
    assert found["differences"] == []
    assert sorted(found["match"]) == list(range(8))  # the same questions under other numbers


def blobs_of(text):
    found = re.findall(r'<script type="text/plain" id="([ab]-[^"]+|pair-[^"]+)">([^<]+)<', text)
    return {name: base64.b64decode(data) for name, data in found}


def test_a_file_and_a_folder_hold_the_same_steps(two, tmp_path):
    file, folder = tmp_path / "all.html", tmp_path / "pages"
    for output in (file, folder):
        done = call(two[0], "--compare", two[1], "--all-steps", "-o", output, "--json")
        assert done.exit_code == 0, done.output
    facts = json.loads(done.stdout)
    assert facts["page"] == str(folder / "index.html")
    assert facts["num_steps"] == 3
    sizes = [path.stat().st_size for path in folder.rglob("*.*")]
    assert facts["size_bytes"] == sum(sizes)
    blobs = blobs_of(file.read_text())
    names = [f"{side}-{step}-{kind}" for side in "ab" for step in range(3) for kind in ("text", "numbers")]
    assert set(blobs) == {*names, "pair-0", "pair-1", "pair-2"}
    for name, data in blobs.items():
        script = (folder / "steps" / f"{name}.js").read_text()
        assert script == f'receive("{name}", "{base64.b64encode(data).decode()}");\n'
    assert json.loads(gzip.decompress(blobs["pair-0"]))["match"] == list(range(8))
    assert stat.S_IMODE(folder.stat().st_mode) & 0o077 == 0 or not folder.stat().st_mode & 0o002


def test_a_page_of_two_steps_of_one_record_has_both(two, tmp_path):
    done = call(two[0], "--step", 0, "--compare-step", 2, "-o", tmp_path / "p.html")
    assert done.exit_code == 0, done.output
    names = set(blobs_of((tmp_path / "p.html").read_text()))
    assert names == {"a-0-text", "a-0-numbers", "b-2-text", "b-2-numbers", "pair-0"}


def test_one_file_has_a_limit_and_leaves_nothing_behind(two, tmp_path, monkeypatch):
    monkeypatch.setattr(page, "MAX_FILE_BYTES", 1000)
    done = call(two[0], "--all-steps", "-o", tmp_path / "all.html")
    assert done.exit_code == 2
    assert "one file would have more than 0 MB at step 0" in done.output
    assert "write a folder (-o FOLDER)" in done.output
    assert list(tmp_path.iterdir()) == []


def test_only_a_folder_of_a_page_is_replaced(two, tmp_path):
    folder = tmp_path / "pages"
    assert call(two[0], "--all-steps", "-o", folder).exit_code == 0
    assert "exists already: give --force" in call(two[0], "--all-steps", "-o", folder).output
    assert call(two[0], "--all-steps", "-o", folder, "--force").exit_code == 0
    (folder / "notes.txt").write_text("mine")
    done = call(two[0], "--all-steps", "-o", folder, "--force")
    assert done.exit_code == 2
    assert "holds other files than a page" in done.output
    assert (folder / "notes.txt").read_text() == "mine"


def test_contents_name_what_is_not_there(two):
    sides = [FollowedRecord(str(path), None) for path in two]
    alone, both = Contents(sides[0]), Contents(*sides, shift=1)
    assert alone.names(2) == ["a-2-text", "a-2-numbers"]
    assert both.names(1) == ["a-1-text", "a-1-numbers", "b-2-text", "b-2-numbers", "pair-1"]
    assert both.names(2) == ["a-2-text", "a-2-numbers"]  # the other one has no step 3
    assert both.document(None, Place(1, 4))["paired"] == [0, 1]
    with pytest.raises(StepNotRecorded, match="compares with no other record"):
        alone.blob("b-0-text")
    with pytest.raises(StepNotRecorded, match="step 9 is not recorded"):
        both.blob("a-9-numbers")
