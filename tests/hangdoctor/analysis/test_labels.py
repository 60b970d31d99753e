"""Labels and culprits of hand-written stacks and of posts, and what each confidence is worth."""

import re
import tomllib
from pathlib import Path

import pytest

from benchmarks import hang_calibration
from hangdoctor.diagnose import diagnose
from hangdoctor.parse.read import read_snapshot

CASES = Path(__file__).parent / "cases"


def cases() -> list:
    """Return the cases of all files: `##### title | label | culprits | world N`, then stacks."""
    found = []
    for path in sorted(CASES.glob("*.txt")):
        for block in path.read_text().split("##### ")[1:]:
            head, text = block.split("\n", 1)
            title, label, culprits, *world = [part.strip() for part in head.split("|")]
            ranks = tuple(int(rank) for rank in re.findall(r"\d+", culprits))
            size = int(world[0].split()[1]) if world else None
            found.append(pytest.param(label, ranks, size, text, id=f"{path.stem}: {title}"))
    return found


@pytest.mark.parametrize(("label", "culprits", "world_size", "text"), cases())
def test_stacks_get_their_label_and_culprits(tmp_path, label, culprits, world_size, text):
    (tmp_path / "stacks.txt").write_text(text)
    diagnosis = diagnose(read_snapshot([tmp_path], world_size))
    assert (diagnosis.label, diagnosis.culprit_ranks) == (label, culprits), diagnosis.summary
    assert diagnosis.confidence != "high"  # one sample cannot distinguish slow from stuck
    assert diagnosis.evidence
    assert diagnosis.would_refute


POSTS = tomllib.loads(Path(__file__).with_name("posts.toml").read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", POSTS)
def test_post_is_read(tmp_path, name):
    post = POSTS[name]
    (tmp_path / "post.txt").write_text(post["text"])
    found = diagnose(read_snapshot([tmp_path / "post.txt"]))
    said = f"{found.summary} ({found.confidence})".lower()
    parts = [post["says"]] if isinstance(post["says"], str) else post["says"]
    assert (found.label, [part for part in parts if part not in said]) == (post["label"], []), said
    assert "watchdog_timeout" not in said
    assert "culprits" not in post or list(found.culprit_ranks) == post["culprits"]


@pytest.fixture(scope="module")
def answers():
    return [hang_calibration.answer(case) for case in hang_calibration.own_cases()]


def test_every_answer_is_acceptable_and_the_page_shows_how_many_are_exact(answers):
    assert [f"{given.case.title}: {given.label}" for given in answers if not given.right] == []
    page = (hang_calibration.ROOT / "docs/verbs/hang.md").read_text()
    assert hang_calibration.TABLE.search(page)[0] == hang_calibration.table(answers)


def test_one_sample_is_never_certain(answers):
    single = [given for given in answers if "collection.json" not in given.case.files]
    assert single
    assert {given.confidence for given in single} == {"medium", "low"}
