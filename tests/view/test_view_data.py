"""The data of a page: texts, numbers of tokens, and two steps beside each other."""

from itertools import pairwise

import numpy as np
import pytest

from areal_debug.record.decode import load_decoder
from areal_debug.view import page
from areal_debug.view.data import read_run, read_step, run_document, text_of_tokens
from areal_debug.view.pairs import pair_document
from recorder import open_record
from tests.command_line import invoke

from .records import QUESTIONS, THOUGHTS, train_tokenizer, write_chats


@pytest.fixture(scope="module")
def chats(tmp_path_factory):
    return write_chats(tmp_path_factory.mktemp("chats") / "record", num_rows=8, num_steps=3)


def texts_of(view):
    """Return the joined text of every row."""
    bounds = np.concatenate([[0], np.cumsum(view.rows["length"], dtype=np.int64)])
    return ["".join(view.text.texts[i] for i in view.text.index[a:b]) for a, b in pairwise(bounds)]


def test_token_texts_join_to_the_text_also_where_characters_span_tokens(tmp_path):
    tokenizer = train_tokenizer(tmp_path)
    rows = [tokenizer.encode(text).ids for text in (*QUESTIONS, *THOUGHTS)]
    bounds = np.concatenate([[0], np.cumsum([len(row) for row in rows])])
    found = text_of_tokens(
        np.concatenate(rows), bounds, lambda ids: tokenizer.decode(ids, skip_special_tokens=False)
    )
    joined = ["".join(found.texts[i] for i in found.index[a:b]) for a, b in pairwise(bounds)]
    assert joined == [*QUESTIONS, *THOUGHTS]
    assert [found.ids[i] for i in found.index] == [token for row in rows for token in row]
    assert len(found.texts) < len(np.concatenate(rows))


def test_trainer_columns_are_aligned_to_their_own_token(chats):
    record = open_record(chats)
    view = read_step(record.step(1), load_decoder(record))
    batch, learning = record.step(1).batch(0), record.step(1).learning(0)
    start = int(batch["cu_seqlens"][2])
    trained = start + int(batch["loss_mask"][start:].argmax())
    assert view.tokens["advantage"][trained] == learning["advantages"][trained - 1]
    assert view.tokens["trainer logprob"][trained] == pytest.approx(batch["logprobs"][trained], abs=0.5)
    assert np.isnan(view.tokens["advantage"][start])  # no prediction for the first token
    assert view.tokens["entropy"][trained] == learning["entropy"][trained - 1]
    assert view.missing == {}
    assert texts_of(view)[4].endswith(f"{THOUGHTS[1]}<|im_end|>")


def test_curves_have_a_value_a_step_and_json_has_none_where_it_is_not_finite(chats):
    run = read_run(open_record(chats))
    assert run.steps == [0, 1, 2]
    rewards = [float(open_record(chats).step(s).batch(0)["rewards"].mean()) for s in run.steps]
    assert run.curves["reward"] == rewards
    assert run.curves["staleness"][0] == 0
    assert run.clip == pytest.approx((0.8, 1.28))
    run.curves["loss"][1] = float("nan")
    assert run_document(run)["curves"]["loss"][1] is None


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
