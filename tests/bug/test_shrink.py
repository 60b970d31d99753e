"""Removal of rows and tokens, and the expressions that say what must stay."""

import pytest

from replayer.bug.shrink import Numbers, Row, Shrinker, minimise, parse_symptom


@pytest.mark.parametrize("needed", [{0}, {63}, {17, 18}, {3, 60}, {0, 31, 32, 63}, set(range(5, 12))])
def test_the_items_that_are_needed_together_are_left(needed):
    runs = []

    def occurs(items):
        runs.append(tuple(items))
        return needed <= set(items)

    assert set(minimise(range(64), occurs)) == needed
    assert len(runs) < 120


def rows_of(num_rows, num_tokens):
    return tuple(Row(0, row, f"0.{row}", tuple(range(num_tokens))) for row in range(num_rows))


def test_rows_then_tokens_are_removed_and_the_first_token_stays():
    def occurs(rows):
        return any(row.row == 5 and 7 in row.tokens for row in rows)

    seen = []
    shrinker = Shrinker(rows_of(16, 12), occurs, seen.append)
    assert shrinker.shrink() == (Row(0, 5, "0.5", (0, 7)),)
    assert shrinker.is_minimal
    assert [len(rows) for rows in seen[:4]] == [8, 4, 2, 1]
    assert shrinker.num_runs < 30


NUMBERS = Numbers(
    loss=float("nan"),
    grad_norm=120.0,
    stats={"ppo_actor/update/entropy/avg": 2.0, "ppo_actor/update/ratio/max": 5.0, "ppo_actor/kl/max": 1.0},
    rewards=[0.0, 1.0],
    advantages=[1.0, float("inf")],
    lengths=[3, 0],
)


@pytest.mark.parametrize(
    ("text", "occurs"),
    [
        ("loss is nan", True),
        ("loss is not nan", False),
        ("loss is not finite", True),
        ("loss > 0", False),
        ("grad_norm > 100", True),
        ("grad_norm is finite and loss is nan", True),
        ("advantages is inf", True),
        ("rewards is inf", False),
        ("rewards is finite", True),
        ("advantages is finite", False),
        ("max(rewards) == 1 and 0 in lengths", True),
        ('stats["ppo_actor/update/entropy/avg"] == 2', True),
        ('stats["entropy/avg"] == 2', True),
        ('error != ""', False),
    ],
)
def test_a_symptom_is_true_or_false_of_the_numbers_of_a_step(text, occurs):
    assert parse_symptom(text).occurs(NUMBERS) is occurs


def test_an_error_of_another_kind_is_not_the_symptom():
    from dataclasses import replace

    whole = Numbers(error="IndexError: index out of range")
    symptom = replace(parse_symptom('error != ""'), like=whole)
    assert symptom.occurs(Numbers(error="IndexError: another index"))
    assert not symptom.occurs(Numbers(error="nothing to train on"))
