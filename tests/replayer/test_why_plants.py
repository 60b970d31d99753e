"""The corpus of planted bugs fits the code: every text that a plant replaces is there."""

import shutil
from collections import Counter
from pathlib import Path

import pytest

from benchmarks.why_plants import plants as data
from replayer.compare.relations import KINDS
from replayer.compare.stages import STAGES

ROOT = Path(__file__).parents[2]
PLANTS = data.read_plants()
CAUSES = {"config", "code", "environment", "data", "engine", "nondeterminism"}


def test_there_are_forty_bugs_and_twenty_pairs_of_every_kind():
    counts = Counter(plant.kind for plant in PLANTS)
    assert counts.pop("equal") >= 20
    assert sum(counts.values()) >= 40
    assert counts.keys() == CAUSES
    assert len({plant.name for plant in PLANTS}) == len(PLANTS)


@pytest.mark.parametrize("plant", [plant for plant in PLANTS if plant.edits], ids=lambda plant: plant.name)
def test_a_planted_commit_and_the_innocent_ones_apply_to_the_code(plant, tmp_path):
    before, after = (
        [edit for _, edits in data.innocent_commits(when) for edit in edits] for when in ("before", "after")
    )
    for edit in (*before, *plant.edits, *after):
        if not (tmp_path / edit.file).exists():
            (tmp_path / edit.file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / edit.file, tmp_path / edit.file)
        edit.apply(tmp_path)
    assert all(edit.new in (tmp_path / edit.file).read_text() for edit in plant.edits)


@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.name)
def test_a_truth_is_in_the_words_of_the_verb(plant):
    assert plant.base in data.read("bases")
    if plant.truth is not None:
        assert set(plant.truth.stages) <= set(STAGES)
        assert set(plant.truth.patterns) <= {None, *KINDS}
        assert set(plant.truth.causes) <= CAUSES
        assert plant.truth.named
