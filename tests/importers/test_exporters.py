"""Records exported for other tools and imported again."""

import pytest

from recorder import open_record
from recorder.tables.formats import export_record
from recorder.testing import write_scripted_record
from recorder.trainers.importing import import_record


@pytest.mark.parametrize("name", ["slime", "pt"])
def test_what_is_exported_imports_to_the_same_batch(name, tmp_path):
    write_scripted_record(tmp_path / "record", num_steps=2)
    export_record(tmp_path / "record", name, tmp_path / "{step}.pt")
    import_record(tmp_path, tmp_path / "back", {"slime": "slime", "pt": "areal"}[name])
    first, back = open_record(tmp_path / "record"), open_record(tmp_path / "back")
    for step in (0, 1):
        ours, theirs = first.step(step).batch(0), back.step(step).batch(0)
        assert theirs.keys() - ours.keys() == {"prompt_length", "unknown"}
        for key in ours.keys() - {"prompt_id"}:
            assert ours[key].tobytes() == theirs[key].tobytes()
