"""Every fault whose rows an engine can answer, over HTTP: the columns arrive as they are, so that the cause is the same as at home."""

from dataclasses import replace

import numpy as np
import pytest

from consistency.engine.reply import Law
from consistency.fault_server import serving_rows
from consistency.live import Words, ask_engines, sampled_of
from consistency.prompts import Prompt

from .faults import FAULTS, NUM_ROWS, Given, make_world
from .test_diagnose import diagnosis_of, world

WORDS = Words(str, 160)
# An engine cannot answer these: two turns, prompts of its own beside those it is told, replies cut in half.
NOT_ONE_REPLY = {"history stripped", "last logprob missing", "tool output in the mask"}
# The token has a version of its own, which a reply of one version does not carry.
NOT_ONE_VERSION = {"update in flight", "policy moved"}
# The columns say who answered, which an address does.
SEVERAL = {"one stale worker"}
SERVED = [name for name in FAULTS if name not in NOT_ONE_REPLY | NOT_ONE_VERSION | SEVERAL]


def over_http(given: Given) -> Given:
    """What a user gets who asks the engine with the prompts of the rows."""
    rows = given.sequences
    prompts = [
        Prompt(tuple(rows.input_ids[rows.row(row)][~rows.sampled[rows.row(row)]].tolist()), {})
        for row in range(rows.num_rows)
    ]
    with serving_rows(rows) as address:
        conversation = ask_engines([address], prompts, 1, Law(), WORDS)
    (sequences,) = sampled_of(conversation, "bfloat16").parts.values()
    return replace(given, sequences=sequences)


def test_at_least_25_causes_can_be_served():
    assert len({FAULTS[name][0] for name in SERVED}) >= 25


@pytest.mark.parametrize("name", SERVED)
def test_columns_arrive_as_they_were_told(name):
    given = FAULTS[name][1](world())
    served = over_http(given).sequences
    order = served_order(given.sequences)
    assert served.num_rows == NUM_ROWS
    for row in range(NUM_ROWS):
        told, got = given.sequences.row(order[row]), served.row(row)
        np.testing.assert_array_equal(served.input_ids[got], given.sequences.input_ids[told])
        sampled = served.sampled[got]
        np.testing.assert_array_equal(
            served.engine_logprobs[got][sampled], given.sequences.engine_logprobs[told][sampled]
        )


def served_order(rows):
    """Equal prompts are answered in the order of the rows, so that is the order of the replies too."""
    return list(range(rows.num_rows))


@pytest.mark.long
@pytest.mark.parametrize("seed", [5, 6])
@pytest.mark.parametrize("noise", [0.003, 0.02])
def test_right_cause_comes_first_in_95_percent_over_http(seed, noise):
    at = make_world(seed, noise)
    wrong = []
    for name in SERVED:
        cause, build = FAULTS[name]
        causes = diagnosis_of(over_http(build(at)), at).causes
        if not causes or causes[0].id != cause:
            wrong.append((name, [found.id for found in causes]))
    assert len(wrong) <= 0.05 * len(SERVED), wrong
