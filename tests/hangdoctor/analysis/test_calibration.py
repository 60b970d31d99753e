"""Cases in the shape of what people post: acceptable answers, and what each confidence is worth."""

import pytest

from benchmarks import hang_calibration


@pytest.fixture(scope="module")
def answers():
    return [hang_calibration.answer(case) for case in hang_calibration.own_cases()]


def wrong(answers) -> list[str]:
    return [f"{given.case.source}: {given.case.title}: {given.label}" for given in answers if not given.right]


def test_at_least_95_percent_of_the_answers_are_acceptable(answers):
    assert len(answers) >= 200
    assert len(wrong(answers)) <= 0.05 * len(answers), wrong(answers)


def test_no_certain_answer_is_wrong(answers):
    assert wrong(given for given in answers if given.confidence == "high") == []


@pytest.mark.parametrize(("level", "share"), [("high", 0.97), ("medium", 0.85), ("low", 0.60)])
def test_a_confidence_is_right_as_often_as_the_docs_say(answers, level, share):
    right, of = hang_calibration.calibration(answers)[level]
    assert of >= 30
    assert right >= share * of


def test_one_sample_is_never_certain(answers):
    single = [given for given in answers if "collection.json" not in given.case.files]
    assert single
    assert {given.confidence for given in single} == {"medium", "low"}
