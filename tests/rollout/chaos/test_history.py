"""The history checker finds each planted violation, and nothing in a history that is right."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from tests.rollout.chaos.history import Plan, Reply, TrainedRow, Violations, check_history

BATCH, SAMPLES, STALENESS, EPOCH = 2, 2, 1, 4
PLAN = Plan(BATCH, SAMPLES, STALENESS, EPOCH, num_steps=4)


def make_row(step: int, prompt_id: int, sample_id: int, version: int | None = None) -> TrainedRow:
    """A prompt of three tokens and a completion of four."""
    tokens = [5, 6, 100 + prompt_id % EPOCH, 10 + sample_id, 11, 12, 13]
    return TrainedRow(
        step,
        prompt_id,
        sample_id,
        np.array(tokens),
        np.arange(7) >= 3,
        np.array([0, 0, 0, -0.5, -1.5, -0.25, -2.0], dtype=np.float32),
        np.array([-1] * 3 + [step if version is None else version] * 4),
    )


def replies_to(row: TrainedRow, cut: int = 4, fault: str = "") -> list[Reply]:
    """The reply to a row's prompt; two of them if it was interrupted after `cut` tokens."""
    bounds = [3, 3 + cut, 7] if cut < 4 else [3, 7]
    return [
        Reply(
            "server 1",
            tuple(row.tokens[:start].tolist()),
            tuple(row.tokens[start:end].tolist()),
            tuple(row.logprobs[start:end].tolist()),
            tuple(row.versions[start:end].tolist()),
            fault,
        )
        for start, end in pairwise(bounds)
    ]


@pytest.fixture
def rows() -> list[TrainedRow]:
    """Two epochs of four prompts, in four steps."""
    return [make_row(p // BATCH, p, s) for p in range(2 * EPOCH) for s in range(SAMPLES)]


def check(rows, plan=PLAN, replies=None) -> Violations:
    return check_history(
        rows, [r for row in rows for r in replies_to(row)] if replies is None else replies, plan
    )


def kinds(found: Violations) -> dict[str, int]:
    return {kind: count for kind, count in found.counts().items() if count}


def test_a_run_that_did_what_it_had_to_do_has_no_violation(rows):
    assert not check(rows)


def test_a_sample_that_no_step_trained_on_is_lost(rows):
    del rows[5]
    found = check(rows)
    assert found.lost == ["prompt 2, sample 1: in no row"]
    assert kinds(found) == {"lost": 1}


def test_a_step_that_is_not_recorded_is_lost(rows):
    found = check([row for row in rows if row.step != 1])
    assert "step 1 is in no record" in found.lost
    assert kinds(found) == {"lost": 5}


def test_a_sample_that_was_trained_on_twice_is_doubled(rows):
    found = check([*rows, replace(rows[3], step=1)])
    assert "prompt 1, sample 1: in 2 rows" in found.doubled


def test_a_prompt_that_comes_twice_in_an_epoch_is_doubled(rows):
    """With prompt ids that are right: only the tokens show it."""
    rows[8:10] = [make_row(2, 5, s) for s in range(SAMPLES)]
    rows[8:10] = [replace(row, prompt_id=4) for row in rows[8:10]]
    assert kinds(check(rows)) == {"doubled": 1}
    assert "epoch 1: 2 rows of prompts that other epochs have less often" in check(rows).doubled[0]


def test_a_prompt_beyond_the_last_step_is_doubled(rows):
    found = check([*rows, make_row(3, 8, 0)])
    assert "prompt 8, sample 0: beyond the run's prompts" in found.doubled


def test_a_run_that_was_ended_may_have_prompts_of_its_last_steps_in_flight(rows):
    ended = Plan(BATCH, SAMPLES, STALENESS, EPOCH)
    # Prompt 6 was in flight, and prompt 8 was trained on in its place.
    later = [row for row in rows if row.prompt_id != 6] + [make_row(3, 8, s) for s in range(SAMPLES)]
    assert not check(later, ended)
    # Prompt 5 cannot be: it started at version 2 at the latest, and was due at version 3.
    assert kinds(check([row for row in rows if row.prompt_id != 5], ended)) == {"lost": 2}


def test_a_token_that_is_staler_than_the_bound_is_too_old(rows):
    rows[12] = make_row(3, 6, 0, version=1)
    found = check(rows)
    assert found.too_old == ["step 3, prompt 6, sample 0: a token of version 1, 2 behind, the bound is 1"]
    assert kinds(found) == {"too_old": 1}


def test_a_token_of_a_version_that_was_not_trained_yet_is_reported(rows):
    rows[0] = make_row(0, 0, 0, version=1000)
    assert check(rows).too_old == [
        "step 0, prompt 0, sample 0: a token of version 1000, which was not trained yet"
    ]


@pytest.mark.parametrize("cut", [1, 2, 3])
def test_a_row_of_two_replies_is_a_chain(rows, cut):
    assert not check(rows, replies=[reply for row in rows for reply in replies_to(row, cut)])


@pytest.mark.parametrize(
    ("name", "value"), [("logprobs", np.nan), ("logprobs", -0.125), ("tokens", 99), ("versions", 2)]
)
def test_a_token_that_no_reply_had_is_poisoned(rows, name, value):
    replies = [reply for row in rows for reply in replies_to(row)]
    changed = getattr(rows[13], name).copy()
    changed[5] = value
    rows[13] = replace(rows[13], **{name: changed})
    found = check(rows, replies=replies)
    assert kinds(found) == {"poisoned": 1}
    assert found.poisoned[0].startswith(
        "step 3, prompt 6, sample 1: no intact reply has the 4 sampled tokens"
    )
    assert found.poisoned[0].endswith("nor any spoiled one")


def test_a_row_of_a_spoiled_reply_names_fault_and_server(rows):
    replies = [reply for row in rows[1:] for reply in replies_to(row)]
    spoiled = replies_to(rows[0], fault="nan")
    found = check(rows, replies=[*replies, *spoiled])
    assert found.poisoned[0].endswith("as in a spoiled reply: nan from server 1")


def test_the_second_reply_of_a_chain_may_be_the_spoiled_one(rows):
    first, second = replies_to(rows[0], cut=2)
    others = [reply for row in rows[1:] for reply in replies_to(row)]
    found = check(rows, replies=[*others, first, replace(second, fault="nan")])
    assert "has the 2 sampled tokens from 5 on" in found.poisoned[0]


def test_a_row_without_a_sampled_token_is_lost(rows):
    rows[0] = replace(rows[0], sampled=np.zeros(7, dtype=bool))
    assert "step 0, prompt 0, sample 0: no sampled token" in check(rows).lost
