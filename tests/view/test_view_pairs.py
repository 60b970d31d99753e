"""Two steps beside each other, and pages of all steps: what is matched, listed and written."""

from areal_debug.view import page
from areal_debug.view.pairs import pair_document
from recorder import open_record
from tests.command_line import invoke

OURS = (False, False)


def steps_of(two, step):
    return [open_record(path).step(step) for path in two]


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


def test_one_file_has_a_limit_and_leaves_nothing_behind(two, tmp_path, monkeypatch):
    monkeypatch.setattr(page, "MAX_FILE_BYTES", 1000)
    done = invoke("open", two[0], "--all-steps", "-o", tmp_path / "all.html")
    assert done.exit_code == 2
    assert "one file would have more than 0 MB at step 0" in done.output
    assert "write a folder (-o FOLDER)" in done.output
    assert list(tmp_path.iterdir()) == []
